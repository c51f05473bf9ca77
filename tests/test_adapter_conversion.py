"""PEFT adapters of an ungated source on its identity conversion: the same function, or a refusal."""

import json
import shutil
import sys

import peft
import pytest
import torch
from checkpoints import LOUD, apart, change_config, load, logits_of
from huggingface_hub import ModelCard
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import gated_llama_cli
from gated_llama.convert import convert_checkpoint
from gated_llama.retrofit import GateAdapter, convert_adapter
from gated_llama.retrofit.adapter_conversion import METHODS
from gated_llama.retrofit.adapters import WEIGHTS_FILE


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
GATES = {
    "G1": {},
    "G1, some layers": {"layers": [0, 2], "granularity": "elementwise"},
    "G2": {"position": "G2"},
    "G3": {"position": "G3", "granularity": "elementwise"},
    "G4": {"position": "G4"},
    "G5": {"position": "G5", "granularity": "elementwise"},
    "ns_sigmoid": {"activation": "ns_sigmoid"},
    "silu": {"activation": "silu"},
    "constant": {"gate_input": "constant", "position": "G2"},
}
EXACT = [name for name in GATES if name not in ("ns_sigmoid", "silu")]
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=ALL, lora_alpha=16, use_rslora=True),
    "regex": lambda: peft.LoraConfig(r=4, target_modules=r".*self_attn\..*_proj"),
    "all linear": lambda: peft.LoraConfig(r=4, target_modules="all-linear"),
    "ranks": lambda: peft.LoraConfig(
        r=4, target_modules=ALL, layers_to_transform=[1, 2], rank_pattern={"o_proj": 2}, alpha_pattern={"v_proj": 3}
    ),
    "biases": lambda: peft.LoraConfig(r=4, target_modules=["v_proj", "o_proj", "q_proj"], bias="lora_only"),
    "all biases": lambda: peft.LoraConfig(r=4, target_modules=["v_proj"], bias="all"),
    "lora bias": lambda: peft.LoraConfig(r=4, target_modules=ALL, lora_bias=True),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=ALL, use_dora=True),
    "whole projections": lambda: peft.LoraConfig(
        r=4, target_modules=["down_proj"], modules_to_save=["o_proj", "v_proj", "embed_tokens"]
    ),
    "tokens": lambda: peft.LoraConfig(r=4, target_modules=ALL, trainable_token_indices=[3, 5]),
    "trainable tokens": lambda: peft.TrainableTokensConfig(token_indices=[3, 5]),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=ALL, init_r=4, total_step=10),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=ALL),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=ALL),
    "lokr, both": lambda: peft.LoKrConfig(r=1, target_modules=ALL, decompose_both=True, decompose_factor=4),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj", "v_proj", "k_proj"]),
    "ia3": lambda: peft.IA3Config(target_modules=ALL, feedforward_modules=["down_proj"]),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=ALL),
    "copies": lambda: peft.LNTuningConfig(target_modules=["o_proj", "k_proj", "input_layernorm"]),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        attention_bias=True,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("adapter-conversion") / "source"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gated(source):
    """`gated(name)`: folder of the identity conversion with that gate."""

    def make(name: str = "G1"):
        folder = source.with_name(name)
        if not folder.exists():
            convert_checkpoint(source, folder, **GATES[name])
        return folder

    return make


def plain(source, dtype=torch.float32):
    return LlamaForCausalLM.from_pretrained(source, attn_implementation="eager", dtype=dtype).eval()


@pytest.fixture(scope="module")
def adapter(source):
    """`adapter(name)`: folder of an adapter of the source, every tensor of it moved."""

    def make(name: str = "lora"):
        folder = source.with_name(f"adapter {name}")
        if not folder.exists():
            torch.manual_seed(1)
            model = get_peft_model(plain(source), ADAPTERS[name]())
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if parameter.requires_grad or "ranknum" in key:
                        parameter.add_(torch.randn_like(parameter) * 0.2 * parameter.requires_grad)
            model.save_pretrained(folder)
        return folder

    return make


# Every method where a bias is folded and where it is not, every gate with the methods that have more than a factor.
CASES = [(name, gate) for name in ADAPTERS for gate in ("G1, some layers", "G2")]
CASES += [(name, gate) for gate in EXACT if gate not in ("G1, some layers", "G2") for name in ("biases", "dora")]
CASES += [(name, "G5") for name in ("lora bias", "whole projections", "regex")]


@pytest.mark.filterwarnings("ignore")  # of PEFT, about trained embeddings
@pytest.mark.parametrize(
    ("name", "gate", "dtype"),
    [(*case, torch.float32) for case in CASES] + [(n, "G1", torch.bfloat16) for n in ("lora", "dora", "loha", "oft")],
)
def test_the_converted_adapter_computes_the_same_to_the_bit(name, gate, dtype, source, gated, adapter, tmp_path):
    expected = logits_of(PeftModel.from_pretrained(plain(source, dtype), adapter(name)))
    report = convert_adapter(adapter(name), gated(gate), tmp_path / "out")
    assert report.exact
    found = logits_of(PeftModel.from_pretrained(load(gated(gate), dtype=dtype), tmp_path / "out"))
    assert torch.equal(found, expected)
    assert not torch.equal(found, logits_of(plain(source, dtype)))
    if report.scaled:
        unconverted = PeftModel.from_pretrained(load(gated(gate), dtype=dtype), adapter(name))
        assert not torch.equal(logits_of(unconverted), expected)


@pytest.mark.parametrize("name", ["lora", "dora", "whole projections", "biases"])
def test_other_folds_are_scaled_to_rounding(name, source, gated, adapter, tmp_path):
    """The fold of ns_sigmoid is 4/3."""
    expected = logits_of(PeftModel.from_pretrained(plain(source), adapter(name)))
    report = convert_adapter(adapter(name), gated("ns_sigmoid"), tmp_path / "out")
    assert not report.exact
    assert set(report.scaled.values()) == {4 / 3}
    found = logits_of(PeftModel.from_pretrained(load(gated("ns_sigmoid")), tmp_path / "out"))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert apart(logits_of(PeftModel.from_pretrained(load(gated("ns_sigmoid")), adapter(name))), expected) > LOUD


def test_without_a_fold_the_weights_stay(source, gated, adapter, tmp_path):
    assert not convert_adapter(adapter(), gated("silu"), tmp_path / "out").scaled
    before, after = (load_file(folder / WEIGHTS_FILE) for folder in (adapter(), tmp_path / "out"))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_what_is_scaled(gated, adapter, tmp_path):
    """Only what the record names, in gated layers; the adapter merges to the bit, too."""
    report = convert_adapter(adapter("biases"), gated("G1, some layers"), tmp_path / "out")
    name = "base_model.model.model.layers.{}.self_attn.{}"
    assert report.scaled == {name.format("*", "o_proj.lora_B.weight"): 2}
    before, after = (load_file(folder / WEIGHTS_FILE) for folder in (adapter("biases"), tmp_path / "out"))
    assert before.keys() == after.keys()
    doubled = {key for key in before if not torch.equal(before[key], after[key])}
    assert doubled == {name.format(layer, "o_proj.lora_B.weight") for layer in (0, 2)}
    assert all(torch.equal(after[key], 2 * before[key]) for key in doubled)
    assert name.format(0, "o_proj.base_layer.bias") in before


def test_merged_weights_are_those_of_the_merged_source(source, gated, adapter, tmp_path):
    """merge_and_unload on both sides, then the conversion of the one is the other."""
    convert_adapter(adapter("dora"), gated("G2"), tmp_path / "out")
    merged = PeftModel.from_pretrained(load(gated("G2")), tmp_path / "out").merge_and_unload()
    PeftModel.from_pretrained(plain(source), adapter("dora")).merge_and_unload().save_pretrained(tmp_path / "merged")
    convert_checkpoint(tmp_path / "merged", tmp_path / "converted", **GATES["G2"])
    expected = load(tmp_path / "converted").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in merged.state_dict().items())


def test_the_gate_is_no_target(source, gated, adapter, tmp_path):
    """A pattern that the source's projections match, and that g_proj would match, too."""
    convert_adapter(adapter("regex"), gated(), tmp_path / "out")
    model = PeftModel.from_pretrained(load(gated()), tmp_path / "out")
    assert not [name for name, _ in model.named_modules() if "g_proj.lora" in name]
    assert len([name for name, _ in model.named_modules() if name.endswith("o_proj.lora_A")]) == 3


def test_the_rest_of_the_folder(source, gated, adapter, tmp_path):
    """The base is named anew in configuration and card; training state and other weights stay behind."""
    folder = shutil.copytree(adapter(), tmp_path / "adapter")
    (folder / "tokenizer_config.json").write_text("{}")
    for name in ("optimizer.pt", "trainer_state.json", "model.safetensors", "config.json", "training_args.bin"):
        (folder / name).write_text("x")
    (folder / "other").mkdir()
    change(folder, revision="main", lora_dropout=0.1)
    convert_adapter(folder, gated(), tmp_path / "out")
    names = {"README.md", "adapter_config.json", WEIGHTS_FILE, "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    before, after = (json.loads((place / "adapter_config.json").read_text()) for place in (folder, tmp_path / "out"))
    assert after == before | {"base_model_name_or_path": str(gated()), "revision": None}
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.base_model == str(gated())
    assert f"base_model:adapter:{gated()}" in card.data.tags
    assert str(source) not in card.data.to_yaml()
    assert f"for the gated model {gated()};" in card.text
    assert "# Model Card for Model ID" in card.text


@pytest.mark.parametrize("text", [b"caf\xe9, no front matter", b"---\n: [\n---\nbad front matter \xe9"])
def test_cards_that_cannot_be_read(text, gated, adapter, tmp_path):
    folder = shutil.copytree(adapter(), tmp_path / "adapter")
    (folder / "README.md").write_bytes(text)
    convert_adapter(folder, gated(), tmp_path / "out")
    written = (tmp_path / "out" / "README.md").read_bytes()
    assert text in written
    assert written.startswith(b"> Converted by") or text.startswith(b"---")


def test_from_the_shell(gated, adapter, tmp_path, capsys):
    arguments = [str(each) for each in (adapter("dora"), gated(), tmp_path / "out")]
    assert gated_llama_cli.main(["convert-adapter", *arguments]) == 0
    said = capsys.readouterr().out
    assert "LORA" in said
    assert "bit for bit" in " ".join(said.split())
    assert gated_llama_cli.main(["convert-adapter", *arguments]) == 2
    error = capsys.readouterr().err
    assert "not empty" in error
    assert error.count("\n") == 1


# Refusals.


def change(folder, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refused(adapter, gated, out, message):
    with pytest.raises(ValueError, match=message):
        convert_adapter(adapter, gated, out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "VBLORA"}, "of type 'VBLORA'; supported are LORA, .* Merge it into the source"),
        ({"peft_type": "PREFIX_TUNING"}, "of type 'PREFIX_TUNING'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', which moves a part of the base's weights"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights='lora_ga'"),
        ({"layer_replication": [[0, 3], [1, 3]]}, r"layer_replication=\[\[0, 3\], \[1, 3\]\], for which the scale"),
        ({"use_qalora": True}, "use_qalora=True"),
        ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow=1"),
    ],
)
def test_methods_whose_scale_is_not_known(fields, message, gated, adapter, tmp_path):
    folder = shutil.copytree(adapter(), tmp_path / "adapter")
    change(folder, **fields)
    refused(folder, gated(), tmp_path / "out", message)


def test_every_method_of_the_table_is_tried():
    kinds = {make().peft_type.value for make in ADAPTERS.values()}
    assert kinds == METHODS.keys()


def test_adapters_of_gated_models(gated, adapter, tmp_path):
    convert_adapter(adapter(), gated(), tmp_path / "once")
    refused(tmp_path / "once", gated(), tmp_path / "twice", "is gated already: the adapter fits as it is")
    model = get_peft_model(load(gated()), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["g_proj"]))
    model.save_pretrained(tmp_path / "trained")
    change(tmp_path / "trained", base_model_name_or_path=None)
    refused(tmp_path / "trained", gated(), tmp_path / "out", "it was trained on a gated model")
    GateAdapter.extract(gated(), gated()).save(tmp_path / "gates")
    refused(tmp_path / "gates", gated(), tmp_path / "out", r"attach it with GateAdapter\.load")


def test_models_that_are_no_identity_conversion(source, gated, adapter, randomize_gates, tmp_path):
    for policy, message in (("transplant", "is a transplant: .* transplant the result"), ("open", "folds nothing")):
        folder = shutil.copytree(gated(), tmp_path / policy)
        change_config(folder, gate_retrofit={"policy": policy, "fold": {}})
        refused(adapter(), folder, tmp_path / "out", message)
    randomize_gates(load(gated())).save_pretrained(tmp_path / "trained")
    refused(adapter(), tmp_path / "trained", tmp_path / "out", "g_proj.weight has moved from its start")
    change_config(folder, gate_retrofit=None)
    refused(adapter(), folder, tmp_path / "out", r"is no identity conversion \(policy None\)")
    refused(adapter(), source, tmp_path / "out", "type 'llama'.* Convert it first")


def test_adapters_that_do_not_fit(source, gated, adapter, tmp_path):
    other = LlamaForCausalLM(LlamaConfig(**plain(source).config.to_dict() | {"intermediate_size": 48}))
    get_peft_model(other, ADAPTERS["lora"]()).save_pretrained(tmp_path / "other")
    refused(tmp_path / "other", gated(), tmp_path / "out", r"down_proj.lora_A.weight as \(4, 48\), .* \(4, 64\)")
    whole = get_peft_model(plain(source), peft.LoraConfig(target_modules=["up_proj"], modules_to_save=["self_attn"]))
    whole.save_pretrained(tmp_path / "whole")
    refused(tmp_path / "whole", gated(), tmp_path / "out", "g_proj.weight as None, .*whole modules that have a gate")


def test_damaged_adapters(source, gated, adapter, tmp_path):
    refused(source, gated(), tmp_path / "out", "has no adapter_config.json")
    refused(tmp_path / "nothing", gated(), tmp_path / "out", "nothing has no adapter_config.json")
    folder = shutil.copytree(adapter(), tmp_path / "adapter")
    tensors = load_file(folder / WEIGHTS_FILE)
    name = next(key for key in tensors if "down_proj.lora_B" in key)
    save_file(tensors | {name: tensors[name] * float("nan")}, folder / WEIGHTS_FILE)
    refused(folder, gated(), tmp_path / "out", f"{name}' of .* not finite")
    del tensors[name]
    save_file(tensors, folder / WEIGHTS_FILE)
    refused(folder, gated(), tmp_path / "out", f"{name} as None")
    (folder / WEIGHTS_FILE).write_bytes(b"short")
    refused(folder, gated(), tmp_path / "out", "is not a whole safetensors file")
    (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin")
    refused(folder, gated(), tmp_path / "out", "has no adapter_model.safetensors: load it with PEFT")


def test_without_peft(gated, adapter, tmp_path, monkeypatch):
    adapter()
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"pip install 'gated-llama\[peft\]'"):
        convert_adapter(adapter(), gated(), tmp_path / "out")


def test_conversions_say_so(source, gated, tmp_path):
    report = convert_checkpoint(source, tmp_path / "g1", **GATES["G1"])
    (note,) = [note for note in report.notes if "convert-adapter" in note]
    assert "o_proj.weight x 2" in note
    card = (tmp_path / "g1" / "README.md").read_text()
    assert "| adapters of the ungated model | fit after `gated-llama convert-adapter" in card
    report = convert_checkpoint(source, tmp_path / "silu", **GATES["silu"])
    assert not any("convert-adapter" in note for note in report.notes)
    assert "adapters of the ungated" not in (tmp_path / "silu" / "README.md").read_text()
