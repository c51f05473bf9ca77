"""How text is split by the names that GGUF files have for it: the ids are llama.cpp's."""

import json
from pathlib import Path

import pytest
from gguf import GGUFWriter
from test_gguf import random_model, write_gguf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from gated_llama.convert import llama_cpp
from gated_llama.convert.loading import Loadable
from gated_llama.convert.pre_tokenizers import PRE_TOKENIZERS, READABLE, built
from gated_llama.convert.tokenizer import PROBES
from gated_llama.convert.verify import PROOF_TEXT


CONTROL = ["<pad>", "<s>", "</s>", "<｜end▁of▁turn｜>"]
OWN = "<think>"
TEXTS = (
    *PROBES,
    PROOF_TEXT,
    "def f(x):\n\treturn x\n",
    "a 1 22 333 4444 55555 x1y22 1,000,000",
    "HelloWorld fooBar XMLHttp it's I'M you'LL 'tis",
    "\n\n \n  x  \t\t y \n",
    "a/b//c\n/d !!! ??? ... $%& $ ^ + < = > ~ |",
    "第1章 第22章 abc中文def 여기 있 ١٢٣ ⅷ ½x",
    f"x{OWN}y {CONTROL[3]}z {OWN} </s> a",
)
MARKS = "नमस्ते दुनिया e\u0301"
UNREACHABLE = "Hello"  # in the vocabulary, though no merges lead to it


def trained() -> dict:
    """The model of a tokenizer.json: merges across every border that a pre-tokenizer may draw."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=CONTROL, initial_alphabet=alphabet, max_token_length=12, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, MARKS] * 2, trainer)
    tokenizer.add_tokens([OWN])
    model = json.loads(tokenizer.to_str())["model"]
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) != UNREACHABLE]
    for token in (OWN, UNREACHABLE):
        model["vocab"].setdefault(token, len(model["vocab"]))
    return model


MODEL = trained()
TOKENS = sorted(MODEL["vocab"], key=MODEL["vocab"].get)


def byte_level_keys(pre, **keys):
    """Writes the keys of a byte-level tokenizer; `...` leaves one out."""

    def write(writer: GGUFWriter, config) -> None:
        types = dict.fromkeys(CONTROL, 3) | {OWN: 4}
        found = {
            "model": "gpt2",
            "pre": ... if pre is None else pre,
            "tokens": TOKENS,
            "token_type": [types.get(token, 1) for token in TOKENS],
            "merges": [" ".join(pair) for pair in MODEL["merges"]],
            "padding_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        write_keys(writer, {f"tokenizer.ggml.{name}": value for name, value in found.items()} | keys)

    return write


def write_keys(writer: GGUFWriter, keys: dict) -> None:
    adders = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
    for key, value in keys.items():
        if value is not ...:
            adders[type(value)](key, value)


def write(path: Path, keys, vocab_size: int = len(TOKENS)) -> Path:
    return write_gguf(path, random_model("llama", vocab_size=vocab_size, num_hidden_layers=1), tokenizer=keys)


@pytest.mark.parametrize("name", READABLE)
def test_ids_are_those_of_llama_cpp(name, tmp_path):
    path = write(tmp_path / "tiny.gguf", byte_level_keys(name))
    tokenizer = Loadable.open(path).load_tokenizer()
    texts = TEXTS if name == "tekken" else (*TEXTS, MARKS)  # llama.cpp splits before marks, against the original
    question = {"model": str(path), "texts": list(texts), "prompts": [], "context": 64, "threads": 1}
    asked = llama_cpp.ask(question)["ids"]
    for text, ids in zip(texts, asked, strict=True):
        assert tokenizer.encode(text) == ids, text
    assert (asked[0][0] == 1) == READABLE[name].adds_bos
    assert (TOKENS.index(UNREACHABLE) in asked[0]) == READABLE[name].ignore_merges


def test_rules_differ_on_these_texts():
    """The premise of the test above: no two rules that are told apart give the same ids."""
    found = {}
    for name, rule in (PRE_TOKENIZERS | {"tekken": READABLE["tekken"]}).items():
        description = json.loads(Tokenizer(models.BPE()).to_str())
        model = MODEL | {"ignore_merges": rule.ignore_merges}
        tokenizer = Tokenizer.from_str(json.dumps(description | {"model": model}))
        tokenizer.pre_tokenizer = built(rule.steps)
        found[name] = tuple(tuple(tokenizer.encode(text).ids) for text in (*TEXTS, MARKS))
    assert len(set(found.values())) == len(found)
