"""Texts to rows of token ids: tokenised once, as a stream, and mixed in given proportions."""

import contextlib
import hashlib
import json
import secrets
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers.utils import logging

from ..diagnostics.corpus import read_documents
from .settings import Data


logger = logging.get_logger(__name__)

DOCUMENTS = 64  # documents tokenised at a time
COMPARED = 8  # documents that two tokenizers are compared on

Progress = Callable[[str, int], None]


def token_stream(
    tokenizer, path: str | Path, separator: str, cache: str | Path, progress: Progress | None = None
) -> np.ndarray:
    """
    All ids of a file, documents joined by `separator`, as int32; read from `cache` where it was tokenised before.

    The cache is keyed by the file's content and the tokenizer. progress: called as progress(path, documents so far).
    """
    path, cache = Path(path), Path(cache)
    documents = read_documents(path)
    first = next(documents, None)  # a file that cannot be read is told before it is hashed
    if first is None:
        raise ValueError(f"Text file {path} holds no text.")
    target = cache / f"{text_digest(tokenizer, path, separator)}.int32"
    if not target.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        ids = _encode(tokenizer, chain([first], documents), between_documents(path, separator), str(path), progress)
        unfinished = target.with_name(f"{target.name}.{secrets.token_hex(4)}")
        try:
            with open(unfinished, "wb") as file:
                for part in ids:
                    file.write(np.asarray(part, dtype=np.int32).tobytes())
            unfinished.rename(target)
        finally:
            unfinished.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                cache.rmdir()  # if it is empty
    if not target.stat().st_size:
        raise ValueError(f"Text file {path} is empty: it gives no tokens.")
    return np.memmap(target, dtype=np.int32, mode="r")


def _encode(tokenizer, documents: Iterator[str], separator: str, name: str, progress: Progress | None):
    joint = tokenizer.encode(separator, add_special_tokens=False) if separator else []
    done = 0
    for group in iter(lambda: list(islice(documents, DOCUMENTS)), []):
        for ids in tokenizer(group, add_special_tokens=False, return_attention_mask=False)["input_ids"]:
            yield ids
            yield joint
        done += len(group)
        if progress is not None:
            progress(name, done)


def between_documents(path: str | Path, separator: str) -> str:
    """The separator for a .jsonl; pieces of one .txt belong together."""
    return separator if Path(path).name.removesuffix(".gz").endswith(".jsonl") else ""


def text_digest(tokenizer, path: str | Path, separator: str) -> str:
    """What identifies the ids that `tokenizer` gives the file, its documents joined by `separator`."""
    digest = hashlib.sha256(between_documents(path, separator).encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # as encoding leaves it: padding and truncation are no rules of the text
        backend.no_padding()
        backend.no_truncation()
    rules = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    digest.update(rules.encode())
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:32]


class Rows(Dataset):
    """
    Rows of `context` ids in a fixed order, each {"input_ids": [context], "row": its index}.

    names: the text that each row is from. targets: records of `targets.stored_targets`, which rows then bring along.
    """

    def __init__(self, streams: dict[str, np.ndarray], places: list[tuple[str, int]], context: int):
        self.streams, self.places, self.context = streams, places, context
        self.targets: np.ndarray | None = None

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.places]

    @property
    def digests(self) -> dict[str, str]:
        """What identifies each text and its tokenizer."""
        return {name: Path(stream.filename).stem for name, stream in self.streams.items()}

    @property
    def order(self) -> str:
        """What identifies the rows and their order."""
        return hashlib.sha256(json.dumps([self.places, self.context]).encode()).hexdigest()[:32]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        name, row = self.places[index]
        ids = self.streams[name][row * self.context : (row + 1) * self.context]
        item = {"input_ids": torch.from_numpy(ids.astype(np.int64)), "row": torch.tensor(index)}
        if self.targets is not None:
            record = self.targets[index]
            item["target_ids"] = torch.from_numpy(record["ids"].astype(np.int64))
            item["target_log_probabilities"] = torch.from_numpy(record["log_probabilities"].copy())
        return item


def mix_rows(
    tokenizer, data: Data, count: int, *, seed: int, cache: str | Path, progress: Progress | None = None
) -> Rows:
    """
    `count` rows, from each text as many as its share says, in an order that depends on the seed and on the order in
    which the texts are named. cache: folder for token ids.

    Raises ValueError for a text that has fewer rows than that, unless `data.repeat`.
    """
    streams = {
        name: token_stream(tokenizer, text.path, data.separator, cache, progress) for name, text in data.texts.items()
    }
    counts = proportional({name: text.share for name, text in data.texts.items()}, count)
    places = []
    for name, wanted in counts.items():
        if not wanted:
            logger.warning(f"data.texts.{name}: its share of {count} rows is none; it is not trained on.")
        available = len(streams[name]) // data.context
        if available < 1 or (available < wanted and not data.repeat):
            raise ValueError(
                f"data.texts.{name}: {data.texts[name].path} is too short: it gives {available} rows of "
                f"{data.context} tokens and its share of {count} rows is {wanted}. Give more text, a smaller share or "
                "fewer steps" + (", or set data.repeat: true." if available else ".")
            )
        places += [(name, row) for row in _chosen(available, wanted, f"{seed}:{name}")]
    order = torch.randperm(len(places), generator=_generator(f"{seed}:order"))
    return Rows(streams, [places[index] for index in order.tolist()], data.context)


def proportional(shares: dict[str, float], count: int) -> dict[str, int]:
    """Whole numbers in these proportions that add up to `count` (largest remainders)."""
    total = sum(shares.values())
    exact = {name: share / total * count for name, share in shares.items()}
    result = {name: int(value) for name, value in exact.items()}
    for name in sorted(exact, key=lambda name: result[name] - exact[name])[: count - sum(result.values())]:
        result[name] += 1
    return result


def _chosen(available: int, wanted: int, key: str) -> list[int]:
    """Rows without repetition, but for whole rounds when there are not enough."""
    chosen: list[int] = []
    for turn in range(-(-wanted // available)):
        chosen += torch.randperm(available, generator=_generator(f"{key}:{turn}")).tolist()
    return chosen[:wanted]


def _generator(key: str) -> torch.Generator:
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def draw(seed: int, row: int) -> float:
    """A number in [0, 1) that belongs to a row: the same in every batch, on every rank and after a resume."""
    return torch.rand((), generator=_generator(f"{seed}:draw:{row}")).item()


def same_tokens(tokenizer, other, paths: list[str]) -> str | None:
    """A token, or the first of the files, that the two tokenizers give different ids; None where they agree."""
    known = other.get_vocab()
    for token, number in tokenizer.get_vocab().items():
        if known.get(token, number) != number:
            return f"the token {token!r}"
    for path in paths:
        sample = "\n".join(text[:500] for text in islice(filter(str.strip, read_documents(path)), COMPARED))
        first, second = (each.encode(sample, add_special_tokens=False) for each in (tokenizer, other))
        if first != second:
            return path
    return None
