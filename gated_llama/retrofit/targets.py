"""The source's most likely tokens for the rows of a run, computed once and kept in a file."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ..diagnostics.corpus import with_first
from .data import Rows
from .losses import top_k_targets


HEADER = 512  # bytes of JSON, padded with spaces, before the records


def stored_targets(
    path: Path,
    rows: Rows,
    k: int,
    *,
    source: str,
    first: int | None,
    load: Callable[[], nn.Module],
    say: Callable[[str], None] = lambda line: None,
) -> np.memmap:
    """
    One record per row: "ids" [context, k] int32 and "log_probabilities" [context, k] float32, in the order of `rows`.

    Computed in float32 by the model that `load` gives and `source` identifies, with the token `first` before each row,
    unless the file is there. An interrupted computation goes on where it ended. Raises ValueError for a file of other
    rows or texts, another source or another k.
    """
    texts = hashlib.sha256(json.dumps(rows.digests).encode()).hexdigest()[:32]
    identity = {"rows": rows.order, "texts": texts, "count": len(rows), "context": rows.context}
    header = json.dumps(identity | {"k": k, "source": source, "first": first}).encode().ljust(HEADER)
    if len(header) != HEADER:
        raise ValueError(f"source={source} is too long for the header of {path}: use a shorter name.")
    record = np.dtype([("ids", "<i4", (rows.context, k)), ("log_probabilities", "<f4", (rows.context, k))])
    if path.is_dir():
        raise ValueError(f"losses.kl.targets={path} is a folder: name a file in it.")
    if not path.is_file():
        compute(path, header, record, rows, k, first, load, say)
    if header_of(path) != header or path.stat().st_size != HEADER + len(rows) * record.itemsize:
        raise ValueError(
            f"losses.kl.targets={path} was made for other rows or texts, another source or another top_k: name "
            "another file, or remove it to have it made again."
        )
    return np.memmap(path, dtype=record, mode="r", offset=HEADER, shape=(len(rows),))


def unfinished(path: Path) -> Path:
    """Where the records of `path` are until all of them are there."""
    return path.with_name(f".{path.name}.partial")


def header_of(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with open(path, "rb") as file:
        return file.read(HEADER)


@torch.no_grad()
def compute(path: Path, header: bytes, record: np.dtype, rows: Rows, k: int, first: int | None, load, say) -> None:
    """Appends records to a file beside `path`, which takes its name when the last one is there."""
    partial = unfinished(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = (partial.stat().st_size - HEADER) // record.itemsize if header_of(partial) == header else 0
    model = load().eval()
    with open(partial, "r+b" if done else "wb") as file:
        file.write(header)
        file.truncate(HEADER + done * record.itemsize)
        file.seek(0, 2)
        for index in range(done, len(rows)):
            say(f"source: row {index + 1} of {len(rows)}")
            ids = with_first(rows[index]["input_ids"][None], first).to(model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, -rows.context :]
            values = np.empty((), dtype=record)
            values["ids"], values["log_probabilities"] = (part.cpu().numpy() for part in top_k_targets(logits, k))
            file.write(values.tobytes())
    partial.rename(path)
