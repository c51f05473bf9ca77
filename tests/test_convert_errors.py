"""Bad input to the converter: one clear line, nothing half-written, the source untouched."""

import errno
import hashlib
import json
import math
import os
import shutil
from codecs import BOM_UTF8
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config, SmolLM3Config

from gated_llama.convert import checkpoint as checkpoint_module
from gated_llama.convert import convert_checkpoint, opening, tokenizer
from gated_llama.convert.extend_context import extend_context
from gated_llama.convert.inspection import inspect_checkpoint
from gated_llama.convert.layouts import fold_scale
from gated_llama.convert.loading import Loadable
from gated_llama.convert.opening import open_checkpoint
from gated_llama.convert.verify import verify


STORIES = Path(__file__).parent / "data" / "stories260K"
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.fixture
def save_source(tmp_path):
    """`save_source(config_class, shards=False, **fields)`: folder with a random model."""

    def save(config_class=LlamaConfig, shards=False, **fields) -> Path:
        model = AutoModelForCausalLM.from_config(config_class(**{**TINY, **fields}))
        model.save_pretrained(tmp_path / "source", max_shard_size="20KB" if shards else "5GB")
        return tmp_path / "source"

    return save


def digest(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def refused(folder: Path, match: str | None, error=ValueError, output: str = "out", **options) -> None:
    """The conversion raises one line that matches and leaves the parent of its output and the source as they were."""
    before, around = digest(folder), sorted(os.listdir(folder.parent))
    with pytest.raises(error, match=match) as caught:
        convert_checkpoint(folder, folder.parent / output, **options)
    if error is ValueError:
        assert "\n" not in str(caught.value)
    assert sorted(os.listdir(folder.parent)) == around
    assert digest(folder) == before


def edit_json(path: Path, **changes) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def edit_tensors(folder: Path, **changes) -> None:
    """Replaces tensors of a single-file checkpoint; `...` removes one. Double underscores stand for dots."""
    tensors = load_file(folder / WEIGHTS) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not ...}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


# Requests


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"position": "G6"}, "G6"),
        ({"granularity": "per-head"}, "per-head"),
        ({"activation": "relu"}, "relu"),
        ({"operation": "divide"}, "divide"),
        ({"gate_input": "queries"}, "queries"),
        ({"position": "G5"}, "no head axis"),
        ({"layers": []}, "gate_layers"),
        ({"layers": [4]}, r"layers are 0 to 3"),
        ({"policy": "zero"}, r"policy='zero' is unknown; choose one of identity, open, normal"),
        ({"policy": "open"}, "needs a bias, not None"),
        ({"policy": "open", "bias": float("nan")}, "needs a bias, not nan"),
        ({"bias": 4.0}, "belongs to policy='open'"),
        ({"policy": "open", "bias": 4.0, "gate_bias": False}, "needs gate_bias=True"),
        ({"policy": "open", "bias": 4.0, "gate_input": "states", "granularity": "elementwise"}, "has no bias"),
        ({"operation": "add"}, r"it adds 0.5 at a zero logit"),
        ({"operation": "add", "activation": "ns_sigmoid"}, r"it adds 0.75 at a zero logit"),
        ({"activation": "silu", "gate_bias": False}, "needs gate_bias=True"),
        ({"gate_input": "states", "granularity": "elementwise"}, "has no parameter"),
        ({"gate_input": "constant", "gate_bias": True}, "no projection"),
        ({"position": None, "policy": "normal"}, "needs a gate"),
        ({"dtype": "int8"}, r"dtype='int8' is not supported; choose one of float32, bfloat16, float16"),
        ({"max_shard_size": "5 gigabytes"}, r"max_shard_size=.5 gigabytes. is no size"),
        ({"max_shard_size": 0}, "no room"),
        ({"revision": "main"}, "belongs to a Hub id"),
    ],
)
def test_request_is_refused(options, match, save_source):
    refused(save_source(), match, **options)


def test_states_input_has_nothing_to_write(save_source, tmp_path):
    report = convert_checkpoint(
        save_source(), tmp_path / "out", gate_input="states", granularity="elementwise", policy="normal"
    )
    assert report.tensors_written == report.tensors_read
    assert any("differs" in note for note in report.notes)


def test_output_is_never_overwritten(save_source, tmp_path):
    folder = save_source()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "keep.txt").write_text("mine")
    refused(folder, "is not empty")
    assert (tmp_path / "out" / "keep.txt").read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    refused(folder, "is a file", output="file")
    refused(folder, "lies in the source", output="source/gated")
    refused(folder, "is not empty|lies in the source", output="source")
    (tmp_path / "empty").mkdir()
    convert_checkpoint(folder, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()


def test_output_in_new_folders(save_source, tmp_path):
    folder = save_source()
    refused(folder, "policy", output="new/deep/out", policy="zero")
    convert_checkpoint(folder, tmp_path / "new" / "deep" / "out")
    assert os.listdir(tmp_path / "new" / "deep") == ["out"]


def test_source_that_is_not_there(tmp_path):
    for source, match in (
        (tmp_path / "absent", "does not exist"),
        ("./absent", "does not exist"),
        ("a/b/c", "does not exist"),
    ):
        with pytest.raises(ValueError, match=match):
            convert_checkpoint(source, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no config.json"):
        convert_checkpoint(tmp_path / "empty", tmp_path / "out")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"name the folder of a checkpoint, or a .gguf file"):
        convert_checkpoint(tmp_path / "weights.bin", tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Hub:
    """Stands for the Hub: serves `snapshot_download` from a folder and records what was asked for."""

    def __init__(self, folder: Path, cache: Path, error: Exception | None = None):
        self.folder, self.cache, self.error, self.calls = folder, cache, error, []

    def download(self, repository, *, revision, allow_patterns):
        self.calls.append((repository, revision, allow_patterns))
        if self.error:
            raise self.error
        snapshot = self.cache / "c0ffee"
        for path in self.folder.iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                snapshot.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, snapshot / path.name)
        return str(snapshot)


def test_hub_source_fetches_what_its_index_names(save_source, tmp_path, monkeypatch):
    folder = save_source(shards=True)
    save_file({"stale": torch.zeros(3)}, folder / "consolidated.safetensors")
    torch.save({}, folder / "pytorch_model.bin")
    hub = Hub(folder, tmp_path / "cache")
    monkeypatch.setattr(opening, "snapshot_download", hub.download)
    report = convert_checkpoint("someone/some-model", tmp_path / "out", revision="v1")
    assert report.source == "someone/some-model"
    assert [call[:2] for call in hub.calls] == [("someone/some-model", "v1"), ("someone/some-model", "c0ffee")]
    fetched = {path.name for path in (tmp_path / "cache" / "c0ffee").iterdir()}
    assert fetched == {path.name for path in folder.iterdir()} - {"consolidated.safetensors", "pytorch_model.bin"}
    assert "base_model: someone/some-model" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("reads", [open_checkpoint, inspect_checkpoint])
@pytest.mark.parametrize("beside", ["model", "nothing"])
def test_adapters_are_merged_first(beside, reads, save_source):
    """from_pretrained would apply it."""
    folder = save_source()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    if beside == "nothing":
        (folder / "config.json").unlink()
    refused(folder, "an adapter .*merge the adapter first")
    with pytest.raises(ValueError, match="merge the adapter first"):
        reads(folder)
    with pytest.raises(ValueError, match="merge the adapter first"):
        extend_context(folder, folder.with_name("longer"), factor=2)


def test_adapters_on_the_hub_are_seen(save_source, tmp_path, monkeypatch):
    folder = save_source()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    monkeypatch.setattr(opening, "snapshot_download", Hub(folder, tmp_path / "cache").download)
    with pytest.raises(ValueError, match="merge the adapter first"):
        convert_checkpoint("someone/some-model", tmp_path / "out")


@pytest.fixture
def cached(save_source, tmp_path, monkeypatch) -> Path:
    """The Hub's cache with somebody/model in it, and no network; its snapshot."""
    repository = tmp_path / "hub" / "models--somebody--model"
    snapshot = repository / "snapshots" / ("c0ffee" * 7)[:40]
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in save_source().iterdir():
        blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return snapshot


def test_a_cached_model_needs_no_network(cached, tmp_path):
    found = inspect_checkpoint("somebody/model")
    local = inspect_checkpoint(cached)
    assert (found.parameters, found.files) == (local.parameters, local.files)
    report = convert_checkpoint("somebody/model", tmp_path / "out")
    assert report.tensors_read == len(open_checkpoint(cached).reader.tensors)
    extend_context("somebody/model", tmp_path / "long", factor=4)
    assert verify("somebody/model", tmp_path / "out").passes()


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_model_that_is_cached_in_part_is_told(missing, cached):
    (cached / missing).unlink()
    with pytest.raises(ValueError, match=missing):
        inspect_checkpoint("somebody/model")
    with pytest.raises(ValueError, match="neither a local path nor in the local cache"):
        inspect_checkpoint("somebody/else")


def test_hub_source_that_is_not_there(tmp_path, monkeypatch):
    error = RepositoryNotFoundError("404\nnot found", response=Mock(headers={}))
    hub = Hub(tmp_path, tmp_path / "cache", error)
    monkeypatch.setattr(opening, "snapshot_download", hub.download)
    with pytest.raises(ValueError, match=r"^someone/typo is neither .* nor readable on the Hub: 404 not found"):
        convert_checkpoint("someone/typo", tmp_path / "out")


# Configurations


@pytest.mark.parametrize(
    ("config_class", "changes", "match"),
    [
        (
            LlamaConfig,
            {"model_type": "llama4"},
            r"'llama4' cannot be converted; supported are afmoe, llama, mistral, qwen2",
        ),
        (LlamaConfig, {"model_type": ...}, "None cannot be converted"),
        (LlamaConfig, {"model_type": "gated_llama"}, "gated_llama checkpoint already"),
        (
            LlamaConfig,
            {"attn_logit_softcapping": 50.0},
            r"attn_logit_softcapping=50.0: not known for model type 'llama'",
        ),
        (LlamaConfig, {"sliding_window": 8}, "sliding_window=8: not known"),
        (Qwen2Config, {"attention_bias": True}, "attention_bias=True: not known"),
        (LlamaConfig, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "a quantised source"),
        (LlamaConfig, {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "own model code"),
        (LlamaConfig, {"rope_interleaved": True}, r"rope_interleaved=True: supported is False or None"),
        (LlamaConfig, {"is_encoder_decoder": True}, "is_encoder_decoder=True"),
        (LlamaConfig, {"rope_theta": 500000.0}, "rope_theta is given more than once and differently"),
        (LlamaConfig, {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0.5"),
        (
            LlamaConfig,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            r"partial_rotary_factor=0.25",
        ),
        (
            Qwen2Config,
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}},
            "per layer type",
        ),
        (LlamaConfig, {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "spiral"),
        (LlamaConfig, {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "two types"),
        (LlamaConfig, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "of different types"),
        (
            LlamaConfig,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "gamma": 1}},
            "not known: gamma",
        ),
        (LlamaConfig, {"rope_parameters": "default"}, "not a table"),
        (
            LlamaConfig,
            {"rope_parameters": ..., "rope_theta": "10000"},
            r"config\.json has rope_theta='10000', which is no number",
        ),
        (
            LlamaConfig,
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": "2"}},
            r"rope_parameters\.factor='2', which is no number",
        ),
        (
            LlamaConfig,
            {"rope_parameters": {"rope_type": "default", "rope_theta": True}},
            "rope_theta=True",
        ),
        (
            LlamaConfig,
            {"dtype": ..., "torch_dtype": "auto"},
            "torch_dtype='auto', which names no dtype: write that",
        ),
        (LlamaConfig, {"dtype": "auto"}, "dtype='auto', which names no dtype"),
        (LlamaConfig, {"dtype": "nn"}, "dtype='nn', which names no dtype"),
        (LlamaConfig, {"rope_parameters": YARN | {"extrapolation_factor": 2}}, "not known: extrapolation_factor"),
        (LlamaConfig, {"rope_parameters": YARN | {"rope_type": "dynamic", "finetuned": True}}, "not known: finetuned"),
        (
            LlamaConfig,
            {"rope_parameters": YARN | {"rope_type": "dynamic", "attn_factor": 1}},
            "known: attn_factor",
        ),
        (LlamaConfig, {"rope_parameters": YARN | {"attn_factor": "0.9"}}, "attn_factor='0.9', which is no number"),
        (LlamaConfig, {"rope_parameters": YARN | {"attn_factor": 0.9, "mscale": 0.7}}, "neither mscale nor"),
        (
            LlamaConfig,
            {"rope_parameters": YARN | {"attn_factor": 0.9, "attention_factor": 1.0}},
            r"attn_factor=0.9 means an amplitude of 1.02477 at factor=4.0, and attention_factor=1.0 another",
        ),
        (LlamaConfig, {"hidden_act": "relu7"}, "hidden_act='relu7' is unknown"),
        (LlamaConfig, {"hidden_size": "32"}, "not a valid llama configuration"),
        (LlamaConfig, {"num_attention_heads": 3}, "not a valid llama configuration"),
        (Qwen3Config, {"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        (Qwen2Config, {"layer_types": ["sliding_attention"] * 4}, "sliding_window=None"),
    ],
)
def test_config_is_refused(config_class, changes, match, save_source):
    folder = save_source(config_class)
    edit_json(folder / "config.json", **changes)
    refused(folder, match)


def test_a_dtype_that_is_none_is_told_in_one_line_by_all_readers(save_source):
    """The library raises AttributeError."""
    folder = save_source()
    edit_json(folder / "config.json", dtype=..., torch_dtype="auto")
    with pytest.raises(ValueError, match=r"config\.json is not valid: .* has no attribute 'auto'$"):
        _ = Loadable.open(folder).config


def test_layers_without_rotary_are_refused_by_name(save_source):
    refused(
        save_source(SmolLM3Config, pad_token_id=0),
        r"layers \[3\] have no rotary embedding \(no_rope_layers, as in SmolLM3-3B\)",
    )


def test_other_architectures_are_refused_by_name(tmp_path):
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    refused(tmp_path / "source", "'gpt2' cannot be converted")


@pytest.mark.parametrize("content", ["{", "[1, 2]", "\x00\xff"])
def test_damaged_config(content, save_source):
    folder = save_source()
    (folder / "config.json").write_bytes(content.encode("latin1"))
    refused(folder, r"config\.json (is not valid JSON|holds a JSON list)")


# Weights


def test_missing_shard(save_source):
    folder = save_source(shards=True)
    victim = sorted(folder.glob("*.safetensors"))[2]
    victim.unlink()
    refused(folder, f"{victim.name} is named by {INDEX} but missing")


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, -1])
def test_truncated_file(keep, save_source):
    folder = save_source()
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    refused(folder, f"{WEIGHTS} is not a whole safetensors file")


def test_index_and_files_disagree(save_source):
    folder = save_source(shards=True)
    index = json.loads((folder / INDEX).read_text())
    name = "model.layers.2.mlp.up_proj.weight"
    other = next(file for file in sorted(set(index["weight_map"].values())) if file != index["weight_map"][name])

    edit_json(folder / INDEX, weight_map=index["weight_map"] | {name: other})
    refused(folder, f"{name!r} is (not in the index|listed in the index but not in the file)")
    edit_json(folder / INDEX, weight_map={key: file for key, file in index["weight_map"].items() if key != name})
    refused(folder, f"{name!r} is not in the index")
    edit_json(folder / INDEX, weight_map={})
    refused(folder, "has no weight_map")
    edit_json(folder / INDEX, weight_map={name: "../other.safetensors"})
    refused(folder, "not a file of the same folder")
    (folder / INDEX).write_text("{")
    refused(folder, "is not valid JSON")


def test_a_tied_head_that_only_the_index_knows(save_source, tmp_path):
    folder = save_source(shards=True, tie_word_embeddings=True)
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    edit_json(folder / INDEX, weight_map=index | {"lm_head.weight": max(index.values())})
    convert_checkpoint(folder, tmp_path / "out")
    assert verify(folder, tmp_path / "out").passes()
    edit_json(folder / "config.json", tie_word_embeddings=False)
    refused(folder, r"no tensor 'lm_head.weight'.*tie_word_embeddings is false", output="other")


def test_unindexed_files_are_ignored(save_source, tmp_path):
    folder = save_source(shards=True)
    expected = convert_checkpoint(folder, tmp_path / "before")
    for stale in ("consolidated.safetensors", "model-00001-of-00002.safetensors"):
        save_file({"model.norm.weight": torch.full((32,), 7.0), "other": torch.zeros(3)}, folder / stale)
    assert convert_checkpoint(folder, tmp_path / "after").tensors_read == expected.tensors_read
    before, after = (load_file(tmp_path / name / WEIGHTS) for name in ("before", "after"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    save_file({"model.norm.weight": torch.zeros(32)}, folder / WEIGHTS)
    refused(folder, "two sets of weights", output="third")


def test_pickled_weights_are_not_read(save_source):
    folder = save_source()
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    refused(folder, r"pytorch_model.bin but no safetensors: load it once")
    (folder / "pytorch_model.bin").unlink()
    refused(folder, f"holds neither {WEIGHTS} nor {INDEX}")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model__layers__1__self_attn__k_proj__weight": ...}, r"no tensor 'model.layers.1.self_attn.k_proj.weight'"),
        ({"lm_head__weight": ...}, r"no tensor 'lm_head.weight'.*tie_word_embeddings is false"),
        ({"model__layers__1__self_attn__sinks": torch.zeros(4)}, r"a tensor 'model.layers.1.self_attn.sinks'"),
        ({"model__layers__4__mlp__up_proj__weight": torch.zeros(48, 32)}, r"a tensor 'model.layers.4.mlp"),
        (
            {"model__layers__1__self_attn__q_proj__bias": torch.zeros(32)},
            r"a tensor 'model.layers.1.self_attn.q_proj.bias",
        ),
        ({"model__layers__0__self_attn__g_proj__weight": torch.zeros(4, 32)}, "g_proj.weight"),
        ({"xmodel__rotary_emb__inv_freq": torch.zeros(4)}, r"a tensor 'xmodel\.rotary_emb"),
        ({"model__rotary_emb__inv_freq_scale": torch.zeros(4)}, r"a tensor 'model\.rotary_emb\.inv_freq_scale'"),
        ({"model__layers__0__mlp__rotary_emb__inv_freq": torch.zeros(4)}, r"a tensor 'model\.layers\.0\.mlp\.rotary"),
        ({"model__norm__weight": torch.zeros(33)}, r"'model.norm.weight' has shape \[33\].*calls for \[32\]"),
        ({"model__norm__weight": torch.zeros(32, dtype=torch.int8)}, "has dtype I8; supported are F32, BF16, F16"),
        ({"model__norm__weight": torch.zeros(32).to(torch.float8_e4m3fn)}, "has dtype F8_E4M3.*Quantised weights"),
        (
            {"model__norm__weight": torch.zeros(32, dtype=torch.float64)},
            r"has dtype F64; supported .*\. Load the model with dtype=torch.float32 and save it first",
        ),
    ],
)
def test_tensors_that_do_not_fit(changes, match, save_source):
    folder = save_source()
    edit_tensors(folder, **changes)
    refused(folder, match)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_not_finite(value, dtype, save_source, tmp_path):
    folder = save_source(num_hidden_layers=1)
    weight = torch.zeros(48, 32, dtype=dtype)
    weight[47, 31] = value
    edit_tensors(folder, model__layers__0__mlp__up_proj__weight=weight)
    refused(folder, r"'model.layers.0.mlp.up_proj.weight' of the source holds values that are not finite")


def test_fold_past_float16(save_source, tmp_path):
    folder = save_source(num_hidden_layers=1)
    tensors = {name.replace(".", "__"): tensor.half() for name, tensor in load_file(folder / WEIGHTS).items()}
    tensors["model__layers__0__self_attn__o_proj__weight"][3, 4] = 40000.0
    edit_tensors(folder, **tensors)
    refused(folder, r"o_proj.weight' times 2 passes the largest float16 \(65504\): convert with dtype='bfloat16'")
    convert_checkpoint(folder, tmp_path / "out", dtype="bfloat16")
    edit_tensors(folder, model__embed_tokens__weight=torch.full((64, 32), 1e5))
    refused(folder, r"'model.embed_tokens.weight' passes the largest float16", output="other", dtype="float16")


# What the library does not read, or reads otherwise


def test_a_config_that_begins_with_a_byte_order_mark(tmp_path):
    """The library reads no JSON of the kind; its tokenizers ask for config.json, too."""
    source = Path(shutil.copytree(STORIES, tmp_path / "source"))
    plain = convert_checkpoint(source, tmp_path / "plain")
    (source / "config.json").write_bytes(BOM_UTF8 + (source / "config.json").read_bytes())
    report = convert_checkpoint(source, tmp_path / "out")
    assert report.tokenizer_class == plain.tokenizer_class is not None
    assert digest(tmp_path / "out").keys() == digest(tmp_path / "plain").keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (tmp_path / "plain" / "config.json").read_text()
    )
    assert verify(source, tmp_path / "out").passes()
    assert inspect_checkpoint(source).to_dict() == inspect_checkpoint(STORIES).to_dict() | {"model": str(source)}
    assert extend_context(source, tmp_path / "x2", factor=2).length == 1024
    AutoModelForCausalLM.from_pretrained(tmp_path / "x2")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_byte_order_mark_in_a_tokenizer_is_named(name, tmp_path):
    source = Path(shutil.copytree(STORIES, tmp_path / "source"))
    (source / name).write_bytes(BOM_UTF8 + (source / name).read_bytes())
    refused(source, f"{name} begins with a byte order mark.*save it as UTF-8 without one")


@pytest.mark.parametrize("missing", [("sentencepiece", "protobuf"), ("protobuf",)])
def test_packages_for_a_sentencepiece_model_are_named(missing, tmp_path, monkeypatch):
    """The library says that tiktoken is missing."""
    source = Path(shutil.copytree(STORIES, tmp_path / "source"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    (source / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    for package in ("sentencepiece", "protobuf"):
        monkeypatch.setattr(tokenizer, f"is_{package}_available", lambda package=package: package not in missing)
    refused(
        source,
        rf"tokenizer\.model is a SentencePiece model, .* pip install {' '.join(missing)}\.$",
        error=ImportError,
    )


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("table", ["rope_parameters", "rope_scaling"])
def test_yarn_parameters_that_nothing_reads_are_left_out(value, table, save_source, tmp_path):
    folder = save_source()
    edit_json(folder / "config.json", rope_parameters=..., rope_theta=1e4)
    edit_json(folder / "config.json", **{table: YARN | {"finetuned": value, "extrapolation_factor": 1}})
    report = convert_checkpoint(folder, tmp_path / "out")
    assert report.config.rope_parameters == YARN
    assert verify(folder, tmp_path / "out").passes()


@pytest.mark.parametrize("extra", [{}, {"attention_factor": None}, {"attention_factor": 1.0}])
@pytest.mark.parametrize("policy", ["identity", "normal"])
def test_attn_factor_becomes_an_amplitude(extra, policy, save_source, tmp_path):
    """
    As DeepSeek-R1-0528-Qwen3-8B has it: vLLM and SGLang multiply it with 0.1 ln(4) + 1, which gives 1; Transformers
    reads `attention_factor` only. All readers of this package agree on the model, and the conversion says so.
    """
    folder = save_source(Qwen3Config, max_position_embeddings=2048)
    yarn = {key: value for key, value in YARN.items() if key != "rope_theta"}
    edit_json(folder / "config.json", rope_parameters=..., rope_theta=1e4)
    edit_json(folder / "config.json", rope_scaling=yarn | {"attn_factor": 0.8782488562869419} | extra)
    report = convert_checkpoint(folder, tmp_path / "out", policy=policy)
    assert report.config.rope_parameters == YARN | {"attention_factor": 1.0}
    stated = [note for note in report.notes if "attn_factor=0.878" in note]
    assert len(stated) == (0 if extra.get("attention_factor") else 1)
    assert verify(folder, tmp_path / "out").passes() is (policy == "identity")
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for model in (result, Loadable.open(folder).load_model()):
        assert model.model.rotary_emb.attention_scaling == 1.0
    library = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb.attention_scaling
    assert library == (1.0 if extra.get("attention_factor") else pytest.approx(0.1 * math.log(4) + 1))


# Interruptions


def test_full_disk_while_writing(save_source, monkeypatch):
    folder = save_source()
    parts = checkpoint_module.Stream.parts

    def fail(stream, name):
        if name == "model.layers.2.mlp.up_proj.weight":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield from parts(stream, name)

    monkeypatch.setattr(checkpoint_module.Stream, "parts", fail)
    refused(folder, "No space left on device", error=OSError)
    refused(folder, "No space left on device", error=OSError, output="new/deep/out")


def test_full_disk_while_copying(save_source, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = save_source()
    monkeypatch.setattr(os, "copy_file_range", fail, raising=False)
    refused(folder, "No space left on device", error=OSError)


def test_full_disk_is_seen_before_writing(save_source, monkeypatch):
    folder = save_source()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000))
    refused(folder, r"has 1,000 bytes free and the result needs \d", error=OSError)


@pytest.mark.parametrize("moment", ["first", "middle", "last"])
def test_interrupt(moment, save_source):
    folder = save_source()

    def interrupt(done: int, total: int, name: str) -> None:
        if moment == "first" or (moment == "middle" and done > total / 2) or done == total:
            raise KeyboardInterrupt

    refused(folder, None, error=KeyboardInterrupt, progress=interrupt)


def test_parts_of_a_failed_folder_are_never_visible(save_source, tmp_path):
    folder = save_source()
    listings = []
    convert_checkpoint(folder, tmp_path / "out", progress=lambda *call: listings.append(os.listdir(tmp_path)))
    for listing in listings:
        assert "out" not in listing
        assert next(name for name in listing if name != "source").startswith(".out.partial-")
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


@pytest.mark.parametrize(
    "edit",
    [
        {"pad_token_id": 9999},
        {"vocab_size": -1},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "abc"}},
        {"model_type": ["llama"]},
    ],
)
def test_configurations_of_no_model_are_refused(save_source, tmp_path, edit):
    path = save_source() / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | edit), encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json"):
        convert_checkpoint(path.parent, tmp_path / "out")
    assert [child.name for child in tmp_path.iterdir()] == ["source"]


def test_generation_settings_of_config_json_are_carried(save_source, tmp_path):
    source = save_source()
    (source / "generation_config.json").unlink()
    path = source / "config.json"
    settings = {"do_sample": True, "temperature": 0.3, "max_length": 40}
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | settings), encoding="utf-8")
    convert_checkpoint(source, tmp_path / "out")
    kept = [AutoModelForCausalLM.from_pretrained(folder).generation_config for folder in (source, tmp_path / "out")]
    for name, value in settings.items():
        assert [getattr(config, name) for config in kept] == [value, value]
    assert kept[0].eos_token_id == kept[1].eos_token_id == 2


def test_the_licence_of_a_card_that_is_not_utf8_is_taken_over(save_source, tmp_path):
    source = save_source()
    (source / "README.md").write_bytes("---\nlicense: mit\n---\n\nna\xefve\n".encode("latin-1"))
    convert_checkpoint(source, tmp_path / "out")
    assert ModelCard.load(tmp_path / "out" / "README.md").data.license == "mit"


@pytest.mark.parametrize("content", ["xx", "[]"])
def test_broken_generation_settings_are_refused(save_source, tmp_path, content):
    source = save_source()
    (source / "generation_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        convert_checkpoint(source, tmp_path / "out")
    assert [child.name for child in tmp_path.iterdir()] == ["source"]


def test_output_may_be_a_link_to_an_empty_folder(save_source, tmp_path):
    source = save_source()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    convert_checkpoint(source, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / WEIGHTS).is_file()
    with pytest.raises(ValueError, match="does not exist: make it first"):
        convert_checkpoint(source, tmp_path / "dangling")


@pytest.mark.parametrize("layers", ["0-1", 1, [0, "1"]])
def test_layers_are_a_list_of_numbers(save_source, tmp_path, layers):
    with pytest.raises(ValueError, match="list of layer numbers"):
        convert_checkpoint(save_source(), tmp_path / "out", layers=layers)


def test_gates_of_other_code_call_for_a_layout(save_source, tmp_path):
    save_source()
    path = tmp_path / "source" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.g_proj.weight"] = torch.zeros(4, TINY["hidden_size"])
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match="looks like another layout: if the source has a gate, name how it is stored"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out")
    with pytest.raises(ValueError, match="holds 1 gate tensors that its architecture has no place for"):
        Loadable.open(tmp_path / "source").load_model()


@pytest.mark.parametrize(("model_type", "reason"), [("deepseek_v3", "latent"), ("qwen3_moe", "mixtures of experts")])
def test_architectures_without_a_place_are_refused_with_the_reason(model_type, reason, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=reason):
        convert_checkpoint(tmp_path, tmp_path.with_name("out"))


@pytest.mark.parametrize("scale", [3.0, 0.0, -2.0, float("nan")])
def test_scales_that_are_no_power_of_two_are_named(scale):
    with pytest.raises(ValueError, match=r"gate_scale=.* is not a positive power of two, such as 0.5, 2 or 4"):
        fold_scale(torch.ones(2), scale)
