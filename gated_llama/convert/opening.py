"""Finding and opening a source: a Hub id, a local folder, or a GGUF file."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .gguf_source import GgufFile, GgufReader, gguf_config
from .tensor_files import (
    DTYPES,
    INDEX_FILE,
    QUANTISED_DTYPES,
    SINGLE_FILE,
    SafetensorsReader,
    one_line,
    read_json,
)
from .tokenizer import CARRIED, TOKENIZER_CONFIG, VOCABULARIES


ADAPTER_FILE = "adapter_config.json"  # of PEFT

BLOCKS, BLOCK = 64, 1 << 16


@dataclass(frozen=True)
class Checkpoint:
    """
    An opened source.

    Args:
        folder: where its files lie.
        raw_config: the content of config.json, or its equivalent from GGUF metadata.
        reader: `tensors` (name -> shape, dtype, file) and `read(name)`.
        gguf_file: file name below `folder` of a GGUF source.
        hub_id: Hub id, when the source was named so.
        tokenizer: folder of a tokenizer that stands in for the one of a GGUF source.
    """

    folder: Path
    raw_config: dict[str, Any]
    reader: SafetensorsReader | GgufReader
    gguf_file: str | None = None
    hub_id: str | None = None
    tokenizer: Path | None = None

    @contextmanager
    def in_its_words(self) -> Iterator[None]:
        """Within it, errors about a GGUF source speak of its metadata, which stand in for config.json."""
        try:
            yield
        except ValueError as error:
            if self.gguf_file is None or "config.json" not in str(error):
                raise
            raise ValueError(str(error).replace("config.json", f"metadata of {self.gguf_file}")) from error

    @property
    def quantiser(self) -> str | None:
        """What the weights are quantised by, such as "torchao"; None if they are not. GGUF is de-quantised."""
        return quantiser(self.raw_config)

    def digest(self) -> str:
        """
        What identifies the model and its tokens, in hexadecimal: of its configuration, its tokenizer's files and
        `BLOCKS` blocks of each weight file.

        They are spread evenly and cover a file of up to 4 MiB; a larger one could be changed in between.
        """
        digest = hashlib.sha256(json.dumps(self.raw_config, sort_keys=True).encode())
        for pattern in () if self.gguf_file else (*VOCABULARIES, TOKENIZER_CONFIG, "special_tokens_map.json"):
            for path in sorted(self.folder.glob(pattern)):
                digest.update(path.read_bytes())
        for path in sorted({info.file for info in self.reader.tensors.values()}):
            size = path.stat().st_size
            digest.update(size.to_bytes(8))
            with open(path, "rb") as file:
                for number in range(BLOCKS):
                    file.seek(number * max(0, size - BLOCK) // (BLOCKS - 1))
                    digest.update(file.read(BLOCK))
        return digest.hexdigest()[:32]


def quantiser(raw_config: Mapping[str, Any]) -> str | None:
    """`quant_method` of a configuration; "an unknown quantiser" where it says only that there is one."""
    stated = raw_config.get("quantization_config")
    return stated.get("quant_method", "an unknown quantiser") if isinstance(stated, Mapping) else None


def open_checkpoint(source: str | Path, revision: str | None = None, *, quantised: bool = False) -> Checkpoint:
    """
    Opens a source; ValueError when it is not there or damaged. Nothing is read but headers.

    quantised: weights that only their quantiser reads are as well, since they are loaded by Transformers or not at
    all.
    """
    if not str(source).strip():
        raise ValueError("The source is empty: name a Hub id, a folder or a .gguf file.")
    path = Path(source).expanduser()
    if path.exists() and revision is not None:
        raise ValueError(f"revision={revision!r} belongs to a Hub id, and {path} is local.")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is a file: name the folder of a checkpoint, or a .gguf file.")
        file = GgufFile(path)
        raw_config = gguf_config(file)
        return Checkpoint(path.parent, raw_config, GgufReader(file, raw_config), gguf_file=path.name)
    if path.is_dir():
        return open_folder(path, quantised=quantised)
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(source)):
        raise ValueError(f"{source} does not exist.")
    return open_folder(download(str(source), revision), hub_id=str(source), quantised=quantised)


def refuse_adapter(folder: Path) -> None:
    """ValueError for an adapter of PEFT, alone or beside a model: from_pretrained would apply it, and we would not."""
    if not (folder / ADAPTER_FILE).is_file():
        return
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} holds an adapter only ({ADAPTER_FILE}), not a model: merge the adapter first (PEFT's "
            "merge_and_unload, then save_pretrained), and name the folder of the merged model."
        )
    raise ValueError(
        f"{folder} has an adapter beside its weights ({ADAPTER_FILE}), which from_pretrained would apply: merge "
        f"the adapter first (PEFT's merge_and_unload, then save_pretrained), or remove {ADAPTER_FILE} from a copy "
        "for the model without it."
    )


def open_folder(folder: Path, hub_id: str | None = None, quantised: bool = False) -> Checkpoint:
    refuse_adapter(folder)
    if not (folder / "config.json").is_file():
        files = sorted(path.name for path in folder.glob("*.gguf"))
        advice = f"to convert a GGUF file, name it: {folder / files[0]}" if files else "it is not a checkpoint folder"
        raise ValueError(f"{folder} has no config.json: {advice}.")
    raw_config = read_json(folder / "config.json")
    if not isinstance(raw_config.get("model_type", ""), str):
        raise ValueError(f"{folder / 'config.json'} has model_type={raw_config['model_type']!r}, which is not a name.")
    dtypes = stored_in(raw_config) if quantised else DTYPES
    return Checkpoint(folder, raw_config, SafetensorsReader(folder, dtypes), hub_id=hub_id)


def stored_in(raw_config: Mapping[str, Any]) -> Mapping[str, torch.dtype]:
    """Dtypes of the tensors of such a checkpoint; integers are weights only where a quantiser says so."""
    return QUANTISED_DTYPES if quantiser(raw_config) else DTYPES


def download(repository: str, revision: str | None, others: tuple[str, ...] = ()) -> Path:
    """Fetches the files that a conversion reads, and `others`: everything small, then the weights of the index."""
    try:
        folder = Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=["config.json", ADAPTER_FILE, INDEX_FILE, "README.md", *CARRIED, *others],
            )
        )
        index = folder / INDEX_FILE
        weights = sorted(set(read_json(index).get("weight_map", {}).values())) if index.exists() else [SINGLE_FILE]
        # The snapshot is named by its commit, so both fetches see the same state of the repository.
        return Path(snapshot_download(repository, revision=folder.name, allow_patterns=weights))
    except (RepositoryNotFoundError, RevisionNotFoundError, GatedRepoError) as error:
        raise ValueError(f"{repository} is neither a local path nor readable on the Hub: {one_line(error)}") from error
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"{repository} is neither a local path nor in the local cache, and the Hub was not asked or not reached."
        ) from error
