"""Text to rows of token ids, each beginning with the same first token."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch


PIECE = 1 << 20  # characters of a .txt file read at a time


@dataclass(frozen=True)
class Corpus:
    """
    Rows of token ids [rows, context] and how they were made.

    bos: the token that every row begins with, None when rows begin with the text's own tokens. source: where the text
    is from.
    """

    ids: torch.Tensor
    bos: str | None
    source: str

    @property
    def tokens(self) -> int:
        return self.ids.numel()


def read_texts(path: str | Path | None) -> tuple[list[str], str]:
    """
    Texts of a .txt file (one) or a .jsonl file (field "text" of each line), also as .gz, and a name for the source.

    Without a path, the beginning of Conan Doyle's "A Scandal in Bohemia" (public domain, Standard Ebooks edition),
    some 5,000 tokens. Raises ValueError for other files and for lines without text.
    """
    if path is None:
        text = files(__package__).joinpath("sample.txt").read_text(encoding="utf-8")
        return [text], "A Scandal in Bohemia (built in)"
    texts = list(read_documents(path))
    return texts if Path(path).name.removesuffix(".gz").endswith(".jsonl") else ["".join(texts)], str(path)


def read_documents(path: str | Path) -> Iterator[str]:
    """
    Texts of a .txt file (one, in pieces that end with a line) or a .jsonl file (field "text"), both also as .gz.

    Raises ValueError for other files and for lines without text.
    """
    path = Path(path)
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if not path.is_file():
        state = "is a folder: name the file in it" if path.is_dir() else "does not exist"
        raise ValueError(f"Text file {path} {state}.")
    if kind not in (".txt", ".jsonl"):
        raise ValueError(f"Text file {path} is neither .txt nor .jsonl (also .gz), with a field 'text' on each line.")
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as file:
            yield from _pieces(file) if kind == ".txt" else _fields(file, path)
    except UnicodeDecodeError as error:
        raise ValueError(f"Text file {path} is not UTF-8 text ({error.reason}).") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"Text file {path} is not a complete gzip file ({error}).") from error


def _pieces(file) -> Iterator[str]:
    while piece := file.read(PIECE):
        yield piece + file.readline()


def _fields(file, path: Path) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"] + ""
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"Line {number} of {path} holds half a surrogate pair, which is no text.") from error
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"Line {number} of {path} is not a JSON object with a string 'text'.") from error
        yield text


def first_token(tokenizer, bos: str, *, field: str = "bos", others: str = "'auto' or 'none'") -> int | None:
    """
    Id of the token that rows begin with: "auto" is the tokenizer's own beginning-of-sequence token if it has one,
    "none" is none, anything else names a token. Raises ValueError, in which `bos` is called `field` and `others` are
    offered, for a name that is not one token.
    """
    if bos == "none":
        return None
    if bos == "auto":
        return tokenizer.bos_token_id
    ids = tokenizer.encode(bos, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"{field}={bos!r} is {len(ids)} tokens and must be one; or choose {others}.")
    return ids[0]


def with_first(rows: torch.Tensor, token: int | None) -> torch.Tensor:
    """Token ids [rows, context] with `token` before each row; None is no token."""
    return rows if token is None else torch.cat([rows.new_full((len(rows), 1), token), rows], dim=1)


def build_corpus(tokenizer, texts: list[str], source: str, *, tokens: int, context: int, bos: str = "auto") -> Corpus:
    """
    Cuts the texts, one after the other, into rows of `context` tokens, at most `tokens` in all.

    A text that is shorter than one row gives one short row. Raises ValueError for an empty text, and for numbers below
    two (one token predicts nothing and attends to nothing but itself).
    """
    for name, value in (("tokens", tokens), ("context", context)):
        if value < 2:
            raise ValueError(f"{name}={value} is too few; at least 2 are needed.")
    start = first_token(tokenizer, bos)
    context = min(context, tokens)
    body = context - (start is not None)
    wanted = body * max(1, tokens // context)
    stream: list[int] = []
    for text in texts:
        stream += tokenizer.encode(text, add_special_tokens=False)
        if len(stream) >= wanted:
            break
    if not stream:
        raise ValueError(f"The text ({source}) is empty: it gives no tokens.")
    if len(stream) < 2:
        raise ValueError(f"The text ({source}) has one token; at least two are needed.")
    body = min(body, len(stream))
    rows = torch.tensor(stream[: min(wanted, len(stream) // body * body)]).view(-1, body)
    rows = with_first(rows, start)
    name = None if start is None else tokenizer.convert_ids_to_tokens(start)
    return Corpus(rows, name, source)
