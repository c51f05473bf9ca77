"""What travels with the weights: tokenizers that give the same ids, templates, generation settings, licences."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from gated_llama.convert import convert_checkpoint
from gated_llama.convert import tokenizer as tokenizer_module


CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig}
TINY = {
    "vocab_size": 700,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
}

TEXTS = (
    "In 2024, 1234567890 tokens cost 3.14 units.",
    "a  b   c    d\n\n\n  e\t\tf \r\n",
    "    def f(x):\n        return x ** 12",
    "中文分词测试,今天。日本語のテスト 한국어",
    "😀👩‍👩‍👧‍👦🇫🇷 ❤️",
    "Café naïve — “quotes” …",
    "<|start|>user\nhello<|end|>",
)

# Splitting rules of Qwen2 (one digit at a time) and Llama 3 (up to three), from their tokenizer.json.
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

SPECIAL = ["<|endoftext|>", "<|start|>", "<|end|>"]


def byte_level(pre_tokenizer, normalizer=None) -> Tokenizer:
    """Trained without its pre-tokenizer, so that merges exist which only the pre-tokenizer prevents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS, "2024 1234 567 12 34 890"] * 4, trainer)
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def smollm() -> Tokenizer:
    return byte_level(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    )


def qwen2() -> Tokenizer:
    return byte_level(split_by(QWEN), normalizers.NFC())


def llama3() -> Tokenizer:
    tokenizer = byte_level(split_by(LLAMA3))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A",
        pair="<|endoftext|> $A <|endoftext|> $B",
        special_tokens=[("<|endoftext|>", 0)],
    )
    return tokenizer


def llama2() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False
    )
    tokenizer.train_from_iterator(list(TEXTS) * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


# name -> (tokenizer.json, the class its tokenizer_config.json declares)
TOKENIZERS = {
    "SmolLM": (smollm, "GPT2Tokenizer"),
    "Qwen2": (qwen2, "Qwen2Tokenizer"),
    "Llama 3": (llama3, "PreTrainedTokenizerFast"),
    "Llama 3 distilled": (llama3, "LlamaTokenizerFast"),
    "Llama 2": (llama2, "LlamaTokenizer"),
    "undeclared": (smollm, None),
}


def save_source(folder: Path, model_type: str, name: str, **fields) -> tuple[Path, Tokenizer]:
    build, declared = TOKENIZERS[name]
    tokenizer = build()
    model = AutoModelForCausalLM.from_config(CONFIGS[model_type](**{**TINY, **fields}))
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"model_max_length": 4096, "clean_up_tokenization_spaces": False}
    if build is llama2:
        settings |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    else:
        settings |= {"bos_token": SPECIAL[0], "eos_token": SPECIAL[0], "unk_token": SPECIAL[0]}
    settings |= {"tokenizer_class": declared} if declared else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder, tokenizer


def plain_ids(tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("model_type", CONFIGS)
def test_ids_are_those_of_tokenizer_json(model_type, name, tmp_path):
    folder, raw = save_source(tmp_path / "source", model_type, name)
    report = convert_checkpoint(folder, tmp_path / "out")
    source, result = (AutoTokenizer.from_pretrained(path) for path in (folder, tmp_path / "out"))
    expected = [raw.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert plain_ids(result) == expected
    if plain_ids(source) == expected:
        assert [result.encode(text) for text in TEXTS] == [source.encode(text) for text in TEXTS]
        assert not any("tokenizer.json" in note for note in report.notes)
    else:
        assert any("the result follows tokenizer.json" in note for note in report.notes)
        assert result.encode("")[: len(source.encode(""))] == source.encode("")
    pinned = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert pinned.pop("tokenizer_class") == report.tokenizer_class
    declared = json.loads((folder / "tokenizer_config.json").read_text())
    declared.pop("tokenizer_class", None)
    assert pinned == declared
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_digits_are_what_the_class_decides(tmp_path):
    """The premise: under another model type the class that SmolLM declares merges digits, and the pin prevents it."""
    folder, raw = save_source(tmp_path / "source", "qwen2", "SmolLM")
    convert_checkpoint(folder, tmp_path / "out")
    result = AutoTokenizer.from_pretrained(tmp_path / "out")
    digits = "1234567890"
    expected = raw.encode(digits).ids
    assert len(expected) == len(digits)
    assert result.encode(digits) == expected
    path = tmp_path / "out" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode(digits) != expected


def test_ids_without_the_package(tmp_path):
    """As remote code, in a process that has never heard of the package."""
    folder, raw = save_source(tmp_path / "source", "llama", "SmolLM")
    convert_checkpoint(folder, tmp_path / "out")
    code = (
        "import json, sys; from transformers import AutoTokenizer; "
        "t = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True); "
        "assert 'gated_llama' not in sys.modules; print(json.dumps(t.encode(sys.argv[2])))"
    )
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "TRANSFORMERS_VERBOSITY": "error"}
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out"), TEXTS[0]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stdout.splitlines()[-1]) == raw.encode(TEXTS[0]).ids


def test_files_travel_byte_for_byte(tmp_path):
    folder, _ = save_source(tmp_path / "source", "llama", "Llama 3", bos_token_id=0, eos_token_id=2)
    files = {
        "chat_template.jinja": "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}",
        "special_tokens_map.json": json.dumps({"bos_token": SPECIAL[0], "eos_token": SPECIAL[0]}),
        "added_tokens.json": "{}",
        "additional_chat_templates/tools.jinja": "{{ tools }}",
        "generation_config.json": '{"eos_token_id": [3, 7], "pad_token_id": 0,\n"temperature": 0.6}',
        "tokenizer.model": "\x00\x01",
        "LICENSE": "Apache",
        "LICENSE.txt": "Apache",
        "NOTICE": "Notice",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    (folder / "optimizer.bin").write_text("stays behind")
    (folder / "README.md").write_text("---\nlicense: mit\nlanguage:\n- en\ntags:\n- x\n---\n# Source\n")
    convert_checkpoint(folder, tmp_path / "out")
    for name, content in files.items():
        assert (tmp_path / "out" / name).read_text() == content, name
    assert not (tmp_path / "out" / "optimizer.bin").exists()
    source, result = (AutoTokenizer.from_pretrained(path) for path in (folder, tmp_path / "out"))
    messages = [{"role": "user", "content": "2024"}]
    assert result.apply_chat_template(messages, tokenize=False) == "<|start|>user\n2024<|end|>"
    assert result.apply_chat_template(messages) == source.apply_chat_template(messages)
    settings = GenerationConfig.from_pretrained(tmp_path / "out")
    assert settings.eos_token_id == [3, 7]
    assert settings.temperature == 0.6

    card = (tmp_path / "out" / "README.md").read_text()
    assert "license: mit" in card
    assert "- gated-attention" in card
    assert "library_name: transformers" in card
    assert "# Source" not in card


def test_generation_stops_where_the_source_stops(tmp_path):
    folder, _ = save_source(tmp_path / "source", "llama", "Llama 3", bos_token_id=0, eos_token_id=2)
    ids = torch.tensor([[0, 5, 6]])
    model = AutoModelForCausalLM.from_pretrained(folder)
    greedy = model.generate(ids, max_new_tokens=1, do_sample=False)[0, -1].item()
    settings = json.dumps({"eos_token_id": [greedy, 7], "pad_token_id": 0, "max_new_tokens": 5})
    (folder / "generation_config.json").write_text(settings)
    convert_checkpoint(folder, tmp_path / "out")
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert result.generation_config.eos_token_id == [greedy, 7]
    assert result.generate(ids, do_sample=False).tolist() == [[0, 5, 6, greedy]]


def test_special_tokens_are_compared_too(tmp_path):
    """The same ids of the text alone are not enough: the source puts a token in front, and these files do not."""
    source = PreTrainedTokenizerFast(tokenizer_object=smollm())
    source.save_pretrained(tmp_path)
    assert tokenizer_module.pin_class(source, tmp_path)[0]
    source.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", source.convert_tokens_to_ids("<|start|>"))]
    )
    with pytest.raises(ValueError, match="None of the tokenizer classes"):
        tokenizer_module.pin_class(source, tmp_path)


def test_tokenizers_that_cannot_be_kept(tmp_path, monkeypatch):
    folder, _ = save_source(tmp_path / "source", "llama", "SmolLM")
    real, calls = tokenizer_module.ids_of, []

    def ids_of(tokenizer):
        calls.append(type(tokenizer).__name__)
        return real(tokenizer) if len(calls) == 1 else []

    monkeypatch.setattr(tokenizer_module, "ids_of", ids_of)
    with pytest.raises(ValueError, match=r"None of the tokenizer classes GPT2Tokenizer, PreTrainedTokenizerFast"):
        convert_checkpoint(folder, tmp_path / "out")
    monkeypatch.undo()
    for content in ("{", "{}"):
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=r"The tokenizer of .* cannot be loaded"):
            convert_checkpoint(folder, tmp_path / "out")
    (folder / "tokenizer.json").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "vocab.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}})
    )
    with pytest.raises(ValueError, match=r"The tokenizer of .* cannot be loaded"):
        convert_checkpoint(folder, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]
