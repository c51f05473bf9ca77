"""Quantised checkpoints: which modules are left alone, and what runs, describes or refuses the others."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    TorchAoConfig,
)
from transformers.quantizers.quantizers_utils import should_convert_module

from gated_llama import (
    GatedLlamaForCausalLM,
    GatedLlamaForQuestionAnswering,
    GatedLlamaForSequenceClassification,
    GatedLlamaForTokenClassification,
)
from gated_llama.convert import convert_checkpoint
from gated_llama.convert.inspection import inspect_checkpoint
from gated_llama.convert.loading import Loadable
from gated_llama.convert.opening import open_checkpoint
from gated_llama.convert.verify import verify
from gated_llama.diagnostics.interventions import is_plain, quantisation_interventions
from gated_llama.quantization import SKIP_MODULES
from gated_llama_cli import main


STORIES = Path(__file__).parent / "data" / "stories260K"
IDS = torch.randint(3, 96, (2, 10), generator=torch.Generator().manual_seed(1))

CELLS = [
    {"gate_position": position, "gate_granularity": granularity}
    for position in ("G1", "G2", "G3", "G4", "G5")
    for granularity in ("elementwise", "headwise")
    if (position, granularity) != ("G5", "headwise")
] + [{"gate_layers": [1]}, {"gate_input": "constant"}, {"tie_word_embeddings": True}]


def left_alone(config, head: str = "lm_head") -> set[str]:
    """Linear modules that a complete list spares: the output head and every gate projection."""
    layers = config.gated_layers if config.has_gate_projection else []
    return {head, *(f"model.layers.{layer}.self_attn.g_proj" for layer in layers)}


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


# The list


@pytest.mark.parametrize("suffix", ["", ".weight"], ids=["bitsandbytes", "torchao"])
@pytest.mark.parametrize("cell", CELLS)
def test_the_list_spares_gates_and_head_and_nothing_else(cell, suffix, tiny_model):
    """By the library's own rule, for names as either quantiser asks for them."""
    model = tiny_model(**cell)
    spared = {name for name in linears(model) if not should_convert_module(name + suffix, SKIP_MODULES)}
    assert spared == left_alone(model.config)


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        (GatedLlamaForSequenceClassification, "score"),
        (GatedLlamaForTokenClassification, "score"),
        (GatedLlamaForQuestionAnswering, "qa_outputs"),
    ],
)
def test_the_list_knows_the_heads_of_other_tasks(kind, head, tiny_config):
    model = kind(tiny_config())
    spared = {name for name in linears(model) if not should_convert_module(f"{name}.weight", SKIP_MODULES)}
    assert {name.rpartition("transformer.")[2] for name in spared} == left_alone(model.config, head)


# Without the quantiser


def packed(source: Path, folder: Path) -> Path:
    """`source` as a quantiser would save it: q_proj's weight as int8 with scales, of other names."""
    model = AutoModelForCausalLM.from_pretrained(source)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        weight = tensors.pop(name)
        scale = weight.abs().amax(1, keepdim=True) / 127
        stem = name.removesuffix("weight")
        tensors |= {f"{stem}_weight_qdata": (weight / scale).round().to(torch.int8), f"{stem}_weight_scale": scale}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def plain(tmp_path, tiny_model, randomize_gates) -> Path:
    randomize_gates(tiny_model()).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def test_inspect_needs_no_quantiser(plain, tmp_path, capsys):
    found, reference = inspect_checkpoint(packed(plain, tmp_path / "packed")), inspect_checkpoint(plain)
    for same in ("decoder", "gate", "gated_layers", "gate_shape", "parameters", "gate_parameters", "gate_tensors"):
        assert getattr(found, same) == getattr(reference, same)
    assert found.problems == []
    assert (found.quantiser, reference.quantiser) == ("absent", None)
    assert found.dtypes["int8"] == 3 * 64 * 40
    assert main(["inspect", str(tmp_path / "packed")]) == 0
    assert "quantised by absent" in capsys.readouterr().out


def test_inspect_sees_what_a_quantised_checkpoint_lacks(plain, tmp_path):
    folder = packed(plain, tmp_path / "packed")
    tensors = load_file(folder / "model.safetensors")
    for name in ("_weight_qdata", "_weight_scale"):
        del tensors[f"model.layers.1.self_attn.q_proj.{name}"]
    tensors["model.norm.weight"] = torch.ones(39)
    tensors["model.layers.7.mlp.up_proj._weight_qdata"] = torch.ones(2, dtype=torch.int8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert inspect_checkpoint(folder).problems == [
        "model.layers.1.self_attn.q_proj.weight is not in the files",
        "model.layers.7.mlp.up_proj._weight_qdata is in the files but not in the model",
        "model.norm.weight has shape [39] instead of [40]",
    ]


def test_integers_are_no_weights_unless_a_quantiser_says_so(plain, tmp_path):
    folder = packed(plain, tmp_path / "packed")
    assert Loadable.open(folder, quantised=True).stored_dtype == "float32"
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    for open_anyway in (inspect_checkpoint, lambda path: verify(path, path)):
        with pytest.raises(ValueError, match="has dtype I8; supported are F32, BF16, F16"):
            open_anyway(folder)


def test_what_reads_weights_refuses_quantised_ones(plain, tmp_path):
    folder = packed(plain, tmp_path / "packed")
    for read in (open_checkpoint, Loadable.open, lambda path: convert_checkpoint(path, tmp_path / "out")):
        with pytest.raises(ValueError, match="Quantised weights"):
            read(folder)
    assert not (tmp_path / "out").exists()


def test_a_missing_quantiser_is_named(plain, tmp_path, capsys, monkeypatch):
    folder = packed(plain, tmp_path / "packed")

    def absent(*args, **kwargs):
        raise ModuleNotFoundError("No module named 'absent'", name="absent")

    monkeypatch.setattr("gated_llama.convert.loading.AutoModelForCausalLM.from_pretrained", absent)
    assert main(["verify", str(folder), str(plain), "--tokens", "4"]) == 2
    words = "is quantised by absent, which runs it and is not installed: No module named 'absent'."
    assert capsys.readouterr().err.splitlines()[-1] == f"Error: {folder} {words}"


# With it


QUANTISERS = ("torchao", "bitsandbytes")


def quantisation(name: str, skip: list[str] | None):
    pytest.importorskip(name, reason=f"{name} is optional")
    if name == "bitsandbytes":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip)
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=skip)


def quantised(name: str, source: Path, skip: list[str] | None = SKIP_MODULES, kind=AutoModelForCausalLM):
    config = quantisation(name, skip)
    return kind.from_pretrained(source, quantization_config=config, device_map="cpu").eval()


def unquantised(model: nn.Module) -> set[str]:
    return {name for name, module in linears(model).items() if is_plain(module.weight)}


@pytest.mark.slow  # the extra `quantize`, which `make slow` installs
@pytest.mark.parametrize("name", QUANTISERS)
@pytest.mark.parametrize("cell", CELLS)
@torch.no_grad()
def test_quantisers_leave_exactly_the_list_alone(name, cell, tmp_path, tiny_model, randomize_gates):
    model = tiny_model(**cell, initializer_range=0.1)
    randomize_gates(model).save_pretrained(tmp_path)
    found = quantised(name, tmp_path)
    assert unquantised(found) == left_alone(model.config)
    expected = model(IDS).logits
    assert 0 < (found(IDS).logits - expected).abs().mean() < 0.05 * expected.abs().mean()
    assert type(found) is GatedLlamaForCausalLM


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTISERS)
def test_a_list_of_the_gate_alone_quantises_the_head(name, plain, tmp_path, tiny_config):
    """What the complete list is for; and torchao does not find the gate under its bare name."""
    gates = left_alone(tiny_config()) - {"lm_head"}
    assert unquantised(quantised(name, plain, ["g_proj"])) == (gates if name == "bitsandbytes" else set())
    GatedLlamaForSequenceClassification(tiny_config(pad_token_id=0)).save_pretrained(tmp_path / "classifier")
    classifier = quantised(name, tmp_path / "classifier", kind=AutoModelForSequenceClassification)
    assert unquantised(classifier) == gates | {"score"}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTISERS)
@pytest.mark.parametrize("granularity", ["headwise", "elementwise"])
def test_quantised_models_are_inspected_verified_and_diagnosed(name, granularity, tmp_path, capsys):
    plain, int8 = tmp_path / "plain", tmp_path / "int8"
    convert_checkpoint(STORIES, plain, policy="normal", seed=1, granularity=granularity)
    for folder, skip in ((int8, SKIP_MODULES), (tmp_path / "default", None)):
        quantised(name, plain, skip).save_pretrained(folder)
        AutoTokenizer.from_pretrained(plain).save_pretrained(folder)

        found, reference = inspect_checkpoint(folder), inspect_checkpoint(plain)
        assert (found.problems, found.quantiser) == ([], name)
        assert (found.parameters, found.gate_parameters) == (reference.parameters, reference.gate_parameters)

        for dtype in ("float32", "file"):
            report = verify(plain, folder, dtype=dtype, tokens=16)
            assert (report.dtype, report.quantiser) == ("float32", name)
            assert (report.bitwise, report.first_diverging_layer, report.ids_equal) == (False, 0, True)
            assert report.passes(tolerance=1.0)
        assert verify(folder, folder, tokens=16).passes()

    assert main(["verify", str(plain), str(int8), "--tokens", "16"]) == 1
    assert f"By design: weights quantised by {name}" in capsys.readouterr().out
    arguments = ["diagnose", str(int8), "--against", str(plain), "--tokens", "96", "--context", "32"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert content["model"]["quantization"]["quant_method"] == name
    assert content["model"]["parameters"] == content["against"]["model"]["parameters"]
    for key in ("first_token_attention", "gate_scores"):
        assert content[key]["mean"] == pytest.approx(content["against"][key]["mean"], abs=2e-3)
    assert "quantised already" in content["left_out"]["quantisation"]
    assert "quantisation" not in content["against"]["left_out"]


@pytest.mark.slow
def test_models_that_are_quantised_in_part_are_not_rounded_again(plain):
    with pytest.raises(ValueError, match="quantised already"):
        quantisation_interventions(quantised("torchao", plain))
