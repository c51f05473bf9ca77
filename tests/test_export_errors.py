"""What an export refuses, in one sentence and before anything is written; what a failure leaves behind: nothing."""

import math

import pytest
from checkpoints import change_config
from export_models import QWEN, ROTARY, build
from safetensors.torch import load_file, save_file

from gated_llama.convert import export as export_module
from gated_llama.convert.export import export_checkpoint


REFUSALS = {
    "value gate": ({"gate_position": "value"}, "qwen3_5_text", "gate_position='value'"),
    "additive gate": ({"gate_operation": "add"}, "qwen3_5_text", "gate_operation='add'"),
    "other score": ({"gate_activation": "ns_sigmoid"}, "afmoe", "gate_activation='ns_sigmoid'"),
    "constant gate": ({"gate_input": "constant"}, "paper", "gate_input='constant'"),
    "normed output": ({"sdpa_output_norm": True}, "qwen3_next", "sdpa_output_norm=True"),
    "normed output without a gate": (
        {"sdpa_output_norm": True, "gate_position": None},
        "llama",
        "sdpa_output_norm=True",
    ),
    "no gate": ({"gate_position": None}, "qwen3_5_text", "no gate"),
    "bias of o_proj": ({"o_bias": True}, "qwen3_5_text", "o_proj bias"),
    "bias of the MLP": ({"mlp_bias": True}, "paper", "MLP bias"),
    "bias and afmoe": ({"qkv_bias": True}, "afmoe", "q/k/v bias"),
    "gate bias and step3p5": ({"gate_bias": True}, "step3p5", "gate bias"),
    "elementwise and step3p5": ({"gate_granularity": "elementwise"}, "step3p5", "one score per head"),
    "windows and qwen3_5_text": ({"sliding_window": 20}, "qwen3_5_text", "sliding windows"),
    "scaled windows and step3p5": (
        {"sliding_window": 20, "rope_parameters": dict(ROTARY["linear"])},
        "step3p5",
        "disagree",
    ),
    "mixed windows and afmoe": (
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
        "afmoe",
        "sliding windows in some layers",
    ),
    "dynamic rotary": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 50000.0, "factor": 2.0}},
        "qwen3_5_text",
        "dynamic rotary",
    ),
    "proportional rotary": (
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 50000.0, "factor": 2.0}},
        "afmoe",
        "rotary of another type",
    ),
    "exact borders and step3p5": ({"rope_parameters": {**ROTARY["yarn"], "truncate": False}}, "step3p5", "compared"),
    "exact borders and the paper": (
        {"rope_parameters": {**ROTARY["yarn"], "truncate": False}},
        "paper",
        "rounds them",
    ),
    "another activation": ({"hidden_act": "gelu"}, "afmoe", "SiLU"),
    "partial rotary and afmoe": (
        {"rope_parameters": {**ROTARY["default"], "partial_rotary_factor": 0.5}},
        "afmoe",
        "partial rotary",
    ),
    "gates that are not zero": ({}, "llama", "model.layers.0.self_attn.g_proj.weight is not zero"),
    "QK-norm and llama": ({"qk_norm": True}, "llama", "use target qwen3"),
    "no QK-norm and qwen3": ({}, "qwen3", "use target llama"),
    "tiny eps": ({"rms_norm_eps": 1e-12}, "qwen3_5_text", "rms_norm_eps=1e-12"),
    "unknown target": ({}, "gpt2", "target='gpt2' is unknown; choose one of qwen3_5_text"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_a_target_lacks_is_refused(case, tmp_path):
    fields, target, message = REFUSALS[case]
    build(tmp_path / "source", **fields)
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target=target)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("target", [*QWEN, "afmoe", "step3p5"])
def test_float16_and_neutral_norms(target, tmp_path):
    build(tmp_path / "source")
    with pytest.raises(ValueError, match=r"2\^-30, which float16 cannot hold: use dtype='bfloat16'"):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target=target, dtype="float16")
    build(tmp_path / "normed", qk_norm=True)
    if target != "afmoe":
        report = export_checkpoint(tmp_path / "normed", tmp_path / "out", target=target, dtype="float16")
        assert report.never_quantise == []


def test_a_quantised_model_is_refused(tmp_path):
    build(tmp_path / "source")
    change_config(tmp_path / "source", quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match="is quantised: export the unquantised model"):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target="qwen3_5_text")
    assert not (tmp_path / "out").exists()


def test_interrupted_export_leaves_nothing(tmp_path, monkeypatch):
    build(tmp_path / "source")

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(export_module, "compare", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(tmp_path / "source", tmp_path / "new" / "out", target="afmoe")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        export_checkpoint(tmp_path / "nothing here", tmp_path / "out", target="llama")
    build(tmp_path / "source")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match="not empty"):
        export_checkpoint(tmp_path / "source", tmp_path / "full", target="llama")
    with pytest.raises(ValueError, match="dtype='int8' is not supported"):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target="afmoe", dtype="int8")
    export_checkpoint(tmp_path / "source", tmp_path / "exported", target="afmoe")
    with pytest.raises(ValueError, match="of type 'afmoe': exports start from a gated_llama checkpoint"):
        export_checkpoint(tmp_path / "exported", tmp_path / "out", target="llama")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    name = "model.layers.1.self_attn.g_proj.weight"
    save_file(tensors | {name: tensors[name] * math.nan}, tmp_path / "source" / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name}' of the source holds values that are not finite"):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target="afmoe")
    del tensors[name]
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name}' as None, and config.json calls for"):
        export_checkpoint(tmp_path / "source", tmp_path / "out", target="afmoe")
    assert not (tmp_path / "out").exists()
