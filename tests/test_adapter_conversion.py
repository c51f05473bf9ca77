"""LoRA adapters of an ungated source on its gated conversion: the same model, to the bit where the fold is exact."""

import json

import pytest
import torch
from checkpoints import change_config, load, logits_of
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from gated_llama.convert import convert_checkpoint
from gated_llama.retrofit.adapter_conversion import convert_adapter
from gated_llama_cli import main


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS = {
    "lora": {"target_modules": [*ATTENTION, "down_proj"]},
    "rslora, layers": {"target_modules": ATTENTION, "use_rslora": True, "layers_to_transform": [0, 2]},
    "dora": {"target_modules": ATTENTION, "use_dora": True},
    "biases": {"target_modules": ATTENTION, "bias": "lora_only"},
    "lora's biases": {"target_modules": ATTENTION, "lora_bias": True},
    "whole": {"target_modules": ["q_proj"], "modules_to_save": ["o_proj", "v_proj", "k_proj"]},
}
GATES = {
    "G1": {},
    "G1, some layers": {"layers": [1, 2], "granularity": "elementwise"},
    "G2": {"position": "G2"},
    "G3": {"position": "G3", "granularity": "elementwise"},
    "G4": {"position": "G4"},
    "G5": {"position": "G5", "granularity": "elementwise"},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 16}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attention_bias=True)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    folder = tmp_path_factory.mktemp("adapters") / "source"
    model.save_pretrained(folder)
    return folder


def base(source, dtype=torch.float32):
    return LlamaForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation="eager").eval()


def adapter_of(source, folder, **options):
    """A random adapter of the source, as PEFT saves it."""
    torch.manual_seed(1)
    model = get_peft_model(base(source), LoraConfig(r=2, lora_alpha=6, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("gate", GATES)
def test_the_same_model_to_the_bit(source, tmp_path, gate):
    gated = tmp_path / "gated"
    convert_checkpoint(source, gated, **GATES[gate])
    for number, (kind, options) in enumerate(KINDS.items()):
        adapter, converted = adapter_of(source, tmp_path / kind, **options), tmp_path / f"{kind}, converted"
        report = convert_adapter(adapter, gated, converted)
        dtype = (torch.float32, torch.bfloat16)[(number + len(gate)) % 2]
        expected = logits_of(PeftModel.from_pretrained(base(source, dtype), adapter))
        assert torch.equal(logits_of(PeftModel.from_pretrained(load(gated, dtype=dtype), converted)), expected), kind
        unconverted = logits_of(PeftModel.from_pretrained(load(gated, dtype=dtype), adapter))
        assert torch.equal(unconverted, expected) == (not report.scaled), kind


def test_a_fold_that_is_not_a_power_of_two_is_met_to_rounding(source, tmp_path):
    adapter = adapter_of(source, tmp_path / "adapter", **KINDS["dora"])
    report = convert_checkpoint(source, tmp_path / "gated", activation="ns_sigmoid")
    assert any("convert-adapter" in note and "count 0.75 times" in note for note in report.notes)
    found = convert_adapter(adapter, tmp_path / "gated", tmp_path / "converted")
    assert set(found.scaled.values()) == {4 / 3}
    expected = logits_of(PeftModel.from_pretrained(base(source), adapter))
    result = logits_of(PeftModel.from_pretrained(load(tmp_path / "gated"), tmp_path / "converted"))
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


def test_the_rest_of_an_adapter_is_carried(source, tmp_path, capsys):
    adapter = adapter_of(source, tmp_path / "adapter", target_modules=["o_proj", "down_proj"])
    (adapter / "README.md").write_text("---\nbase_model: someone/source\nlicense: mit\n---\n\nText.\n")
    (adapter / "tokenizer.json").write_text("{}")
    convert_checkpoint(source, tmp_path / "gated")
    assert main(["convert-adapter", str(adapter), str(tmp_path / "gated"), str(tmp_path / "converted")]) == 0
    assert "3 of 12 tensors times 2" in capsys.readouterr().out
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path / "converted"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == 3
    assert all(name.endswith("self_attn.o_proj.lora_B.weight") for name in changed)
    fields = json.loads((tmp_path / "converted" / "adapter_config.json").read_text())
    assert fields.pop("base_model_name_or_path") == str(tmp_path / "gated")
    original = json.loads((adapter / "adapter_config.json").read_text())
    assert fields == {name: value for name, value in original.items() if name != "base_model_name_or_path"}
    card = (tmp_path / "converted" / "README.md").read_text()
    assert "someone/source" not in card
    assert "license: mit" in card
    assert (tmp_path / "converted" / "tokenizer.json").read_text() == "{}"
    assert main(["convert-adapter", str(tmp_path / "converted"), str(tmp_path / "gated"), str(tmp_path / "x")]) == 2
    assert "it fits as it is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder, gated: (folder / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (lambda folder, gated: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (lambda folder, gated: edit(folder, peft_type="IA3"), "of type 'IA3'"),
        (lambda folder, gated: edit(folder, init_lora_weights="pissa"), "init_lora_weights='pissa'"),
        (lambda folder, gated: edit(folder, layer_replication=[[0, 2]]), "uses layer_replication"),
        (lambda folder, gated: rewrite(folder, lambda t: t.mul_(float("nan"))), "not finite"),
        (lambda folder, gated: rewrite(folder, lambda t: torch.cat([t, t])), "is another model's"),
        (lambda folder, gated: change_config(gated, gate_retrofit={"policy": "transplant"}), "policy 'transplant'"),
        (lambda folder, gated: change_config(gated, gate_retrofit=None), "policy None"),
    ],
)
def test_what_does_not_fit_is_refused(source, tmp_path, spoil, message):
    adapter = adapter_of(source, tmp_path / "adapter", target_modules=ATTENTION)
    convert_checkpoint(source, tmp_path / "gated")
    spoil(adapter, tmp_path / "gated")
    with pytest.raises(ValueError, match=message):
        convert_adapter(adapter, tmp_path / "gated", tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_adapters_of_gated_models_and_of_other_kinds_are_refused(source, tmp_path):
    convert_checkpoint(source, tmp_path / "gated")
    model = get_peft_model(load(tmp_path / "gated"), LoraConfig(target_modules=["g_proj"], r=2))
    model.save_pretrained(tmp_path / "gates")
    edit(tmp_path / "gates", base_model_name_or_path="moved")
    with pytest.raises(ValueError, match="one of a gated model"):
        convert_adapter(tmp_path / "gates", tmp_path / "gated", tmp_path / "converted")
    ia3 = IA3Config(target_modules=["v_proj"], feedforward_modules=[])
    get_peft_model(base(source), ia3).save_pretrained(tmp_path / "ia3")
    with pytest.raises(ValueError, match="only 'LORA' can be converted"):
        convert_adapter(tmp_path / "ia3", tmp_path / "gated", tmp_path / "converted")


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder, change):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "v_proj.lora_B" in name)
    save_file(tensors | {name: change(tensors[name])}, path)
