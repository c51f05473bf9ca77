"""Calibration text as token ids, and the hidden states of two models on it, one layer at a time, in scratch files."""

import contextlib
import errno
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ..diagnostics.corpus import build_corpus, first_token


SHORTEST_ROW = 16


def check_rows(tokens: int, context: int) -> None:
    """ValueError unless `tokens` are two rows of `context` at least, and a row is long enough to attend within."""
    if context < SHORTEST_ROW:
        raise ValueError(f"context={context} is too short: rows have at least {SHORTEST_ROW} tokens.")
    if tokens < 2 * context:
        raise ValueError(f"tokens={tokens} is less than two rows of context={context}: raise tokens or lower context.")


def calibration_rows(tokenizer, texts: Sequence[str], source: str, *, tokens: int, context: int) -> torch.Tensor:
    """
    Token ids [rows, context] of the texts, one after the other, without a beginning-of-sequence token.

    source: what error messages call the texts. Raises ValueError when they do not fill a row.
    """
    check_rows(tokens, context)
    corpus = build_corpus(tokenizer, list(texts), source, tokens=tokens, context=context, bos="none")
    if corpus.ids.shape[1] < context:
        raise ValueError(f"{source} has {corpus.tokens} tokens, fewer than one row of context={context}.")
    return corpus.ids


def sink_token(tokenizer, name: str) -> int:
    """The token that the source's sink sits on: "auto" is the tokenizer's beginning-of-sequence token."""
    token = first_token(tokenizer, name, others="'auto'")
    if token is None and name == "none":
        raise ValueError("bos='none': a transplant replaces the sink on a fixed first token, so it must have one.")
    if token is None:
        raise ValueError(
            "A transplant replaces the sink on a fixed first token, and this tokenizer has none of its own: name the "
            "one that the model was trained to see first, for example --bos '<|endoftext|>'."
        )
    return token


class Scratch:
    """Named float32 tensors that live in files: memory does not grow with the number of tokens."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.tensors: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor of this name and shape; its content is what was written to it last."""
        if name not in self.tensors:
            size = torch.Size(shape).numel()
            self.tensors[name] = torch.from_file(str(self.folder / name), shared=True, size=size).view(shape)
        return self.tensors[name]


@contextlib.contextmanager
def scratch(size: int) -> Iterator[Scratch]:
    """OSError where the temporary folder has no room for `size` bytes: a mapped file would fail without a word."""
    with tempfile.TemporaryDirectory() as folder:
        free = shutil.disk_usage(folder).free
        if free < size:
            raise OSError(
                errno.ENOSPC,
                f"{Path(folder).parent} has {free:,} bytes free and the states of the calibration rows need {size:,}: "
                "name another folder in TMPDIR, or take fewer tokens",
            )
        yield Scratch(Path(folder))
