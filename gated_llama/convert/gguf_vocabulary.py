"""
What a GGUF file says about its tokenizer: every key `tokenizer.*` is honoured, known to be harmless, or refused.

Transformers builds the tokenizer from the file, but splits text by GPT-2's rule for names that it does not know, and
leaves a few keys aside. What they mean: llama.cpp b11549, src/llama-vocab.cpp.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import decoders, pre_tokenizers


ADVICE = "convert with the tokenizer folder of the original model: --tokenizer FOLDER"

BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
ADD_BOS, ADD_SPACE = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix"

READ = {
    MODEL,
    PRE,
    ADD_BOS,
    ADD_SPACE,
    "tokenizer.ggml.add_eos_token",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.merges",
    "tokenizer.chat_template",
}
# Regular expression of keys -> why they change no ids of a text.
HARMLESS = {
    r"tokenizer\.ggml\.\w+_token_ids?": "name tokens that have a role, such as the end of a turn",
    r"tokenizer\.ggml\.token_type_count": "segment embeddings of encoders",
    r"tokenizer\.ggml\.(add_sep_token|mask_token)": "encoders only",
    r"tokenizer\.ggml\.(remove_extra_whitespaces|precompiled_charsmap)": "read for unigram models only",
    r"tokenizer\.ggml\.added_tokens": "older files repeat tokens there that are in the list",
    r"tokenizer\.chat_templates|tokenizer\.chat_template\.\w+": "further templates",
}

# Names for which the library has GPT-2's rule because it does not list them, and GPT-2's rule is right.
GPT2 = frozenset({"gpt-2", "phi-2"})
# GPT-2's rule behind a cut at each digit.
DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
# A whole word of the vocabulary is taken before merges are tried.
LLAMA3 = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"})
WHOLE_WORDS = LLAMA3 | {"jina-v5-nano", "tekken"}

UNUSED = 5


def known_pre_tokenizers() -> set[str]:
    """Names under which text is split as llama.cpp does."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return {*GPT2, *DIGITS, *GGUF_PRE_TOKENIZER_SPLITS}


def unreadable(metadata: Mapping[str, Any]) -> str | None:
    """Why the tokenizer that a file describes cannot be rebuilt with the same ids; `None` where it can."""
    keys = [key for key in metadata if key.startswith("tokenizer.") and key not in READ]
    if unknown := [key for key in keys if not any(re.fullmatch(pattern, key) for pattern in HARMLESS)]:
        return f"its key {unknown[0]} is not known"
    model, pre = metadata.get(MODEL), metadata.get(PRE)
    if model not in (BYTE_LEVEL, SENTENCEPIECE):
        return f"its {MODEL}={model!r} is neither {BYTE_LEVEL!r} nor {SENTENCEPIECE!r}"
    if model == BYTE_LEVEL and pre is None:
        return f"it has no {PRE}, which says how text is split"
    known = sorted(known_pre_tokenizers())
    if model == BYTE_LEVEL and pre not in known:
        return f"its {PRE}={pre!r} is none of those whose splitting is known ({', '.join(known)})"
    return None


def loading_options(metadata: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Arguments for AutoTokenizer; ValueError where it would guess."""
    if reason := unreadable(metadata):
        raise ValueError(f"The tokenizer of {path} cannot be rebuilt from the file, since {reason}: {ADVICE}.")
    # llama.cpp puts the first token before texts of these, unless the file says otherwise; the library does not.
    implied = metadata[MODEL] == BYTE_LEVEL and metadata[PRE] in LLAMA3 and ADD_BOS not in metadata
    return {"gguf_file": path.name} | ({"add_bos_token": True} if implied else {})


def complete(tokenizer, metadata: Mapping[str, Any]):
    """`tokenizer`, as the library read it from the file, with what the library leaves aside."""
    backend = tokenizer.backend_tokenizer
    if metadata[MODEL] == BYTE_LEVEL:
        if metadata[PRE] in DIGITS:
            steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        backend.model.ignore_merges = metadata[PRE] in WHOLE_WORDS
    elif not metadata.get(ADD_SPACE, True):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def stated_tokens(path: Path) -> list[str] | None:
    """The file's own list of tokens, by id."""
    from transformers.integrations.gguf.reader import read_gguf_metadata

    return read_gguf_metadata(str(path), ("tokenizer.ggml.tokens",))[0].get("tokenizer.ggml.tokens")


def check_vocabulary(tokenizer, name: str, tokens: Sequence[str], types: Sequence[int] = ()) -> None:
    """ValueError unless `tokenizer` has every used token of a GGUF file's list under the same id, and no others."""

    def spelled(token: str) -> str:  # llama.cpp's script writes added tokens with spaces
        return token.replace("▁", " ")

    vocabulary = {index: token for token, index in tokenizer.get_vocab().items()}
    if max(vocabulary, default=0) >= len(tokens):
        raise ValueError(f"{name} has ids up to {max(vocabulary)}, and the GGUF file lists {len(tokens)} tokens.")
    for index, token in enumerate(tokens):
        found = vocabulary.get(index)
        unused = re.fullmatch(r"\[PAD\d+\]", token) or (index < len(types) and types[index] == UNUSED)
        if (found is None and not unused) or (found is not None and spelled(found) != spelled(token)):
            raise ValueError(
                f"{name} has {found!r} as token {index}, and the GGUF file lists {token!r}: it is the tokenizer of "
                "another model."
            )
