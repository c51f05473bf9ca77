"""Conversion: an identity retrofit is its source, bit for bit, whatever the source's shape."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from gated_llama import GatedLlamaConfig, GatedLlamaForCausalLM
from gated_llama.convert import convert_checkpoint
from gated_llama.convert.tensor_files import FileRange, copy_range


TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

ZOO = {
    "llama grouped": (LlamaConfig, {}),
    "llama multi-head": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama multi-query": (LlamaConfig, {"num_key_value_heads": 1}),
    "llama biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama head_dim": (LlamaConfig, {"head_dim": 12}),
    "llama theta": (LlamaConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}}),
    "llama linear": (LlamaConfig, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama dynamic": (
        LlamaConfig,
        {
            "max_position_embeddings": 8,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        },
    ),
    "llama yarn": (LlamaConfig, {"rope_parameters": YARN}),
    "llama llama3": (LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama gelu": (LlamaConfig, {"hidden_act": "gelu"}),
    "qwen2": (Qwen2Config, {}),
    "qwen2 tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2 sliding": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen2 sliding off": (Qwen2Config, {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 2}),
    "qwen2 sliding none": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 28}),
    "qwen2 sliding all": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3": (Qwen3Config, {"hidden_size": 40, "head_dim": 16}),
    "qwen3 biases": (Qwen3Config, {"hidden_size": 40, "head_dim": 16, "attention_bias": True}),
    "qwen3 tied yarn": (Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3 layer types": (
        Qwen3Config,
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "mistral no window": (MistralConfig, {"sliding_window": None}),
    "mistral window": (MistralConfig, {"sliding_window": 5}),
    "mistral head_dim": (MistralConfig, {"sliding_window": 5, "head_dim": 12}),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 1, 1, 1], "pad_token_id": 0}),
}

# Every cell of the grid in which a fold, or none, is exact.
IDENTITY_CELLS = {
    "G1 headwise": {"position": "G1"},
    "G1 elementwise": {"position": "sdpa_output", "granularity": "elementwise"},
    "G1 shared": {"position": "G1", "granularity": "elementwise", "head_shared": True},
    "G1 bias": {"position": "G1", "gate_bias": True},
    "G1 constant": {"position": "G1", "gate_input": "constant"},
    "G1 additive SiLU": {"position": "G1", "granularity": "elementwise", "operation": "add", "activation": "silu"},
    "G1 additive identity": {"position": "G1", "operation": "add", "activation": "identity"},
    "G1 multiplicative identity": {"position": "G1", "activation": "identity"},
    "G1 some layers": {"position": "G1", "layers": [2, 0]},
    "G2 headwise": {"position": "G2"},
    "G2 elementwise": {"position": "value", "granularity": "elementwise"},
    "G2 additive SiLU": {"position": "G2", "operation": "add", "activation": "silu"},
    "G3": {"position": "G3"},
    "G4 elementwise": {"position": "G4", "granularity": "elementwise"},
    "G4 additive identity": {"position": "G4", "operation": "add", "activation": "identity"},
    "G5": {"position": "G5", "granularity": "elementwise"},
    "G5 constant some layers": {
        "position": "G5",
        "granularity": "elementwise",
        "gate_input": "constant",
        "layers": [1],
    },
    "no gate": {"position": None},
}


def fill(model: PreTrainedModel) -> PreTrainedModel:
    """Random values in every parameter, norms and biases too, so that a lost one shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    return model.eval()


@pytest.fixture
def save_source(tmp_path):
    """`save_source(config_class, dtype, **fields)`: folder with a random model of that class."""

    def save(config_class, dtype=torch.float32, **fields) -> Path:
        model = fill(AutoModelForCausalLM.from_config(config_class(**{**TINY, **fields}))).to(dtype)
        model.save_pretrained(tmp_path / "source")
        return tmp_path / "source"

    return save


def edit_json(path: Path, **changes) -> None:
    """Sets keys of a JSON file; the value `...` removes the key."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def load(folder: Path, dtype=torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def assert_same_model(source: PreTrainedModel, result: PreTrainedModel) -> None:
    """Bitwise equal logits and hidden states, longer than any window here, and greedy tokens with a cache."""
    assert isinstance(result, GatedLlamaForCausalLM)
    ids = torch.randint(3, TINY["vocab_size"], (2, 13), generator=torch.Generator().manual_seed(2))
    expected = source(ids, output_hidden_states=True)
    found = result(ids, output_hidden_states=True)
    assert len(found.hidden_states) == TINY["num_hidden_layers"] + 1
    for wanted, got in zip(expected.hidden_states, found.hidden_states, strict=True):
        assert torch.equal(wanted, got)
    assert torch.equal(expected.logits, found.logits)
    assert expected.logits.std() > 0.1
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(source.generate(ids, **options), result.generate(ids, **options))


@pytest.mark.parametrize("name", ZOO)
def test_identity_is_bitwise_the_source(name, save_source, tmp_path):
    config_class, fields = ZOO[name]
    folder = save_source(config_class, **fields)
    report = convert_checkpoint(folder, tmp_path / "out")
    assert report.folded == {"model.layers.*.self_attn.o_proj.weight": 2.0}
    source, result = load(folder), load(tmp_path / "out")
    assert_same_model(source, result)
    inverse_frequencies = [model.model.rotary_emb.original_inv_freq for model in (source, result)]
    assert torch.equal(*inverse_frequencies)


@pytest.mark.parametrize("cell", IDENTITY_CELLS)
@pytest.mark.parametrize("name", ["llama biases", "qwen2 sliding", "qwen3 biases"])
def test_identity_holds_in_every_cell(name, cell, save_source, tmp_path):
    config_class, fields = ZOO[name]
    gate = IDENTITY_CELLS[cell]
    if config_class is Qwen3Config and cell == "G3":
        gate = {**gate, "granularity": "elementwise"}
    folder = save_source(config_class, **fields)
    report = convert_checkpoint(folder, tmp_path / "out", **gate)
    source, result = load(folder), load(tmp_path / "out")
    cancelled = config_class is Qwen3Config and cell in ("G3", "G4 elementwise")
    if not cancelled:
        assert_same_model(source, result)
        return
    # A score of 0.5 before QK-norm: only rms_norm_eps tells the models apart.
    assert report.folded == {}
    assert any("rms_norm_eps" in note for note in report.notes)
    ids = torch.arange(3, 16)[None]
    with torch.no_grad():
        torch.testing.assert_close(result(ids).logits, source(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "cell", ["G1 headwise", "G2 elementwise", "G5", "G4 elementwise", "G1 multiplicative identity"]
)
def test_identity_holds_in_half_precision(cell, dtype, save_source, tmp_path):
    folder = save_source(LlamaConfig, dtype, attention_bias=True)
    report = convert_checkpoint(folder, tmp_path / "out", **IDENTITY_CELLS[cell])
    assert report.config.dtype == dtype
    assert_same_model(load(folder, "auto"), load(tmp_path / "out", "auto"))


@pytest.mark.parametrize("activation", ["silu", "ns_sigmoid"])
@pytest.mark.parametrize("gate_input", ["hidden_states", "constant"])
def test_identity_to_rounding(activation, gate_input, save_source, tmp_path):
    folder = save_source(LlamaConfig)
    report = convert_checkpoint(folder, tmp_path / "out", activation=activation, gate_input=gate_input)
    assert report.notes
    assert report.config.gate_bias == (activation == "silu" and gate_input == "hidden_states")
    source, result = load(folder), load(tmp_path / "out")
    ids = torch.arange(3, 16)[None]
    with torch.no_grad():
        torch.testing.assert_close(result(ids).logits, source(ids).logits, rtol=1e-5, atol=1e-5)


def test_open_and_normal_start_as_they_say(save_source, tmp_path):
    folder = save_source(LlamaConfig)
    source = load(folder)
    ids = torch.arange(3, 16)[None]

    convert_checkpoint(folder, tmp_path / "open", policy="open", bias=4.0)
    model = load(tmp_path / "open")
    with torch.no_grad():
        scores = model.model(ids, output_gate_scores=True).gate_scores
    assert len(scores) == TINY["num_hidden_layers"]
    assert all(torch.equal(score, torch.full_like(score, torch.sigmoid(torch.tensor(4.0)).item())) for score in scores)
    torch.testing.assert_close(
        model.model.layers[0].self_attn.o_proj.weight, source.model.layers[0].self_attn.o_proj.weight
    )

    report = convert_checkpoint(folder, tmp_path / "normal", policy="normal", seed=3, granularity="elementwise")
    assert report.config.gate_retrofit["seed"] == 3
    weights = [layer.self_attn.g_proj.weight for layer in load(tmp_path / "normal").model.layers]
    assert abs(torch.stack(weights).std().item() / 0.2 - 1) < 0.1
    assert not torch.equal(weights[0], weights[1])
    convert_checkpoint(folder, tmp_path / "again", policy="normal", seed=3, granularity="elementwise", layers=[1])
    assert torch.equal(load(tmp_path / "again").model.layers[1].self_attn.g_proj.weight, weights[1])
    convert_checkpoint(folder, tmp_path / "other", policy="normal", seed=4, granularity="elementwise")
    assert not torch.equal(load(tmp_path / "other").model.layers[1].self_attn.g_proj.weight, weights[1])


def test_record_says_what_was_folded_and_where(save_source, tmp_path):
    folder = save_source(Qwen2Config)
    convert_checkpoint(folder, tmp_path / "out", position="G2", layers=[1, 3])
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert isinstance(config, GatedLlamaConfig)
    assert config.gate_layers == [1, 3]
    assert config.gate_retrofit == {
        "policy": "identity",
        "fold": {"v_proj.weight": 2.0, "v_proj.bias": 2.0},
        "bias": None,
        "source_model_type": "qwen2",
        "package_version": config.gate_retrofit["package_version"],
    }
    source, result = (load(path).state_dict() for path in (folder, tmp_path / "out"))
    for name, tensor in source.items():
        gated = any(f"layers.{index}." in name for index in (1, 3))
        assert torch.equal(result[name], tensor * (2 if gated and "v_proj" in name else 1)), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_one_dtype_for_the_whole_file(dtype, stored, save_source, tmp_path):
    folder = save_source(LlamaConfig, stored)
    convert_checkpoint(folder, tmp_path / "out", dtype=dtype, gate_bias=True)
    wanted = getattr(torch, dtype)
    source = load(folder, stored).state_dict()
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    assert {tensor.dtype for tensor in tensors.values()} == {wanted}
    for name, tensor in source.items():
        factor = 2 if "o_proj" in name else 1
        assert torch.equal(tensors[name], (tensor.float() * factor).to(wanted)), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    assert load(tmp_path / "out", "auto").dtype == wanted


def test_mixed_dtypes_follow_the_declared_one(save_source, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save_source(LlamaConfig, torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report = convert_checkpoint(folder, tmp_path / "out")
    assert report.config.dtype == torch.bfloat16
    assert any("bfloat16, float32" in note for note in report.notes)


def test_shards_cover_every_tensor_once(save_source, tmp_path):
    folder = save_source(LlamaConfig)
    seen = []
    report = convert_checkpoint(
        folder, tmp_path / "out", max_shard_size="30KB", progress=lambda *call: seen.append(call)
    )
    assert report.shards > 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    found = {}
    for file_name in files:
        assert (tmp_path / "out" / file_name).stat().st_size < 32_000
        with safe_open(tmp_path / "out" / file_name, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                assert index["weight_map"][name] == file_name
                found[name] = file.get_tensor(name)
    assert len(found) == len(index["weight_map"]) == report.tensors_written
    assert report.tensors_written == report.tensors_read + TINY["num_hidden_layers"]
    total = sum(tensor.nbytes for tensor in found.values())
    assert index["metadata"]["total_size"] == report.bytes_written == total
    assert [done for done, _, _ in seen] == sorted({done for done, _, _ in seen})
    assert seen[-1][:2] == (total, total)
    assert_same_model(load(folder), load(tmp_path / "out"))


def test_large_tensors_are_written_in_parts(save_source, tmp_path, monkeypatch):
    from gated_llama.convert import checkpoint

    folder = save_source(LlamaConfig)
    monkeypatch.setattr(checkpoint, "PART_ELEMENTS", 100)
    calls = []
    convert_checkpoint(folder, tmp_path / "out", progress=lambda *call: calls.append(call))
    assert len(calls) > 300
    assert_same_model(load(folder), load(tmp_path / "out"))


@pytest.mark.parametrize("answer", [OSError(errno.EXDEV, "another file system"), AttributeError("macOS")])
def test_systems_that_cannot_copy_between_files(answer, save_source, tmp_path, monkeypatch):
    def refuse(*args):
        raise answer

    folder = save_source(LlamaConfig)
    convert_checkpoint(folder, tmp_path / "copied")
    monkeypatch.setattr(os, "copy_file_range", refuse, raising=False)
    convert_checkpoint(folder, tmp_path / "read")
    copied, read = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("copied", "read"))
    assert copied == read


def test_file_that_shrinks_while_it_is_copied(tmp_path):
    (tmp_path / "short").write_bytes(b"12345678")
    with open(tmp_path / "copy", "wb", buffering=0) as file:
        assert copy_range(file, FileRange(tmp_path / "short", 2, 4)) == 4
        with pytest.raises(ValueError, match="has become shorter"):
            copy_range(file, FileRange(tmp_path / "short", 4, 100))
    assert (tmp_path / "copy").read_bytes() == b"34565678"


# Raw config.json edits, the class they are applied to, and what `from_pretrained` makes of them has to be kept.
CONFIGS = {
    "v4 theta": (LlamaConfig, {"rope_parameters": ..., "rope_theta": 500000, "rope_scaling": None}),
    "v4 theta float": (Qwen2Config, {"rope_parameters": ..., "rope_theta": 1000000.0}),
    "v4 linear": (
        LlamaConfig,
        {"rope_parameters": ..., "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "v4 llama3": (
        LlamaConfig,
        {
            "rope_parameters": ...,
            "rope_theta": 500000.0,
            "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
        },
    ),
    "v4 yarn without original length": (
        Qwen3Config,
        {"rope_parameters": ..., "rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    ),
    "theta twice, equal": (LlamaConfig, {"rope_theta": 10000.0}),
    "no rope at all": (LlamaConfig, {"rope_parameters": ...}),
    "heads null": (LlamaConfig, {"num_key_value_heads": None, "head_dim": None}),
    "qwen2 heads null": (Qwen2Config, {"num_key_value_heads": None}),
    "mistral window absent": (MistralConfig, {"sliding_window": ...}),
    "mistral window null": (MistralConfig, {"sliding_window": None}),
    "torch_dtype": (LlamaConfig, {"dtype": ..., "torch_dtype": "float32"}),
    "partial rotary of one": (LlamaConfig, {"partial_rotary_factor": 1.0}),
    "SmolLM2 extras": (
        LlamaConfig,
        {
            "is_llama_config": True,
            "rope_interleaved": False,
            "pretraining_tp": 1,
            "transformers.js_config": {"kv_cache_dtype": "x"},
        },
    ),
    "flags of other formats, off": (Qwen3Config, {"headwise_attn_output_gate": False}),
    "generation settings": (LlamaConfig, {"temperature": 0.7, "do_sample": True, "max_length": 20}),
    "qwen2 layer types absent": (
        Qwen2Config,
        {"layer_types": ..., "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config_as_the_source_class_reads_it(name, save_source, tmp_path):
    config_class, changes = CONFIGS[name]
    folder = save_source(config_class, **({"num_key_value_heads": 4} if "null" in name else {}))
    edit_json(folder / "config.json", **changes)
    convert_checkpoint(folder, tmp_path / "out")
    source, result = load(folder), load(tmp_path / "out")
    assert_same_model(source, result)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["rope_parameters"] == source.config.rope_parameters
    assert written["sliding_window"] == (
        source.config.sliding_window
        if config_class is MistralConfig or "sliding_attention" in (getattr(source.config, "layer_types", None) or ())
        else None
    )
    if name == "mistral window absent":
        assert written["sliding_window"] == 4096


def test_qwen2_biases_are_on_qkv_only(save_source, tmp_path):
    report = convert_checkpoint(save_source(Qwen2Config), tmp_path / "out")
    assert (report.config.qkv_bias, report.config.o_bias, report.config.mlp_bias) == (True, False, False)


def test_tied_head_in_the_file(save_source, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save_source(LlamaConfig, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report = convert_checkpoint(folder, tmp_path / "out")
    assert any("tied head" in note for note in report.notes)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in set(file.keys())
    assert_same_model(load(folder), load(tmp_path / "out"))

    tensors["lm_head.weight"].view(torch.int32)[0, 0] ^= 1  # the last bit
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"tie_word_embeddings=true, but lm_head.weight differs"):
        convert_checkpoint(folder, tmp_path / "other")
    assert not (tmp_path / "other").exists()
