"""
How text is cut before byte-level BPE, by the names that GGUF files have for it.

A GGUF file does not say how: llama.cpp knows each name's rule. Each rule here gives llama.cpp's ids on texts that tell
them apart. Source: llama.cpp b11549, src/llama-vocab.cpp.
"""

from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers


LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MARKS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
MARKS_REST = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"

# (type, its settings): ByteLevel with GPT-2's own expression, or bytes alone behind another expression.
GPT2 = ("ByteLevel", False, True)
BYTES = ("ByteLevel", False, False)
DIGITS = ("Digits", True)


class PreTokenizer(NamedTuple):
    """
    What a name stands for.

    steps: as (type, settings). ignore_merges: a whole word in the vocabulary is taken before merges.
    adds_bos: texts begin with BOS in a file that does not say.
    """

    steps: tuple[tuple, ...]
    ignore_merges: bool = False
    adds_bos: bool = False


def split(expression: str) -> tuple:
    return ("Split", expression, "Isolated", False)


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((GPT2,)),
    "smollm": PreTokenizer((DIGITS, GPT2)),
    "qwen2": PreTokenizer((split(rf"{LETTERS}|\p{{N}}|{REST}"), BYTES)),
    "qwen35": PreTokenizer((split(rf"{MARKS}|\p{{N}}|{MARKS_REST}"), BYTES)),
    "llama-bpe": PreTokenizer((split(rf"{LETTERS}|\p{{N}}{{1,3}}|{REST}"), BYTES), True, True),
    "smaug-bpe": PreTokenizer((split(rf"{LETTERS}|\p{{N}}{{1,3}}|{REST}"), BYTES)),
    "deepseek-coder": PreTokenizer(
        (*map(split, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")), DIGITS, BYTES)
    ),
}

# Names besides these that files of the architectures that are read here carry.
ALIASES = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "megrez": "qwen2",
    "stablelm2": "qwen2",
    "dbrx": "smaug-bpe",
    "command-r": "smollm",
    "refact": "smollm",
    "starcoder": "smollm",
    "olmo": "gpt-2",
    "phi-2": "gpt-2",
}

# llama.cpp comes near this one only: its expressions know no marks (accents that follow their letter).
TEKKEN = PreTokenizer(
    (split(rf"{CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"), BYTES), True, True
)

READABLE = PRE_TOKENIZERS | {name: PRE_TOKENIZERS[known] for name, known in ALIASES.items()} | {"tekken": TEKKEN}


def built(steps: tuple[tuple, ...]) -> pre_tokenizers.PreTokenizer:
    """The steps as an object of the `tokenizers` library."""
    makers = {
        "ByteLevel": lambda prefix, regex: pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex),
        "Digits": lambda individual: pre_tokenizers.Digits(individual_digits=individual),
        "Split": lambda expression, behavior, invert: pre_tokenizers.Split(
            Regex(expression), behavior.lower(), invert=invert
        ),
    }
    return pre_tokenizers.Sequence([makers[kind](*settings) for kind, *settings in steps])
