"""
What a GGUF file says about its tokenizer: every key `tokenizer.*` is honoured, known to be harmless, or refused.

Transformers builds the tokenizer from the file, but splits text by GPT-2's rule for names that it does not know, and
leaves a few keys aside. How text is split is therefore taken from `pre_tokenizers`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .pre_tokenizers import READABLE, PreTokenizer, built


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

# Of tokenizer.ggml.token_type.
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5


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
    if model == BYTE_LEVEL and pre not in READABLE:
        return f"its {PRE}={pre!r} is none of those whose splitting is known ({', '.join(READABLE)})"
    return None


def loading_options(metadata: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Arguments for AutoTokenizer; ValueError where it would guess."""
    if reason := unreadable(metadata):
        raise ValueError(f"The tokenizer of {path} cannot be rebuilt from the file, since {reason}: {ADVICE}.")
    # llama.cpp puts the first token before texts of these, unless the file says otherwise; the library does not.
    implied = metadata[MODEL] == BYTE_LEVEL and READABLE[metadata[PRE]].adds_bos and ADD_BOS not in metadata
    return {"gguf_file": path.name} | ({"add_bos_token": True} if implied else {})


def complete(tokenizer, metadata: Mapping[str, Any], path: Path):
    """`tokenizer`, as the library read it from the file, with what the library leaves aside or reads otherwise."""
    backend = tokenizer.backend_tokenizer
    if metadata[MODEL] == BYTE_LEVEL:
        tokenizer._tokenizer = byte_level(backend, READABLE[metadata[PRE]], path)
    elif not metadata.get(ADD_SPACE, True):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def byte_level(backend: Tokenizer, rule: PreTokenizer, path: Path) -> Tokenizer:
    """
    The file's own vocabulary, merges and special tokens under `rule`, with the rest of `backend`.

    The library renames tokens with letters beyond its byte alphabet, such as <｜User｜>, and no text has their ids.
    """
    found = stated(path, "tokens", "merges", "token_type")
    tokens, kinds = found["tokens"], found["token_type"] or ()
    merges = [(merge[:cut], merge[cut + 1 :]) for merge in found["merges"] if (cut := merge.index(" ", 1))]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    own = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule.ignore_merges))
    own.normalizer, own.decoder, own.post_processor = backend.normalizer, backend.decoder, backend.post_processor
    own.pre_tokenizer = built(rule.steps)
    for kind, add in ((CONTROL, own.add_special_tokens), (USER_DEFINED, own.add_tokens)):
        add([AddedToken(token, normalized=False) for token, each in zip(tokens, kinds, strict=False) if each == kind])
    return own


def stated(path: Path, *names: str) -> dict[str, list | None]:
    """Arrays `tokenizer.ggml.*` of a file, by what follows that prefix."""
    from transformers.integrations.gguf.reader import read_gguf_metadata

    keys = {name: f"tokenizer.ggml.{name}" for name in names}
    found = read_gguf_metadata(str(path), tuple(keys.values()))[0]
    return {name: found.get(key) for name, key in keys.items()}


def stated_tokens(path: Path) -> list[str] | None:
    """The file's own list of tokens, by id."""
    return stated(path, "tokens")["tokens"]


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
