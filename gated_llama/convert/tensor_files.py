"""Safetensors files, read and written one tensor at a time."""

import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from huggingface_hub.serialization._base import parse_size_to_int
from safetensors import SafetensorError, safe_open


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

TIED_HEAD = "lm_head.weight"

# What systems and file systems answer that cannot copy between two files by themselves.
NO_COPY_IN_KERNEL = (errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP)

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
UNQUANTISE = "Quantised weights have to be converted back to one of these"
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}

# In which quantisers store what only they read.
QUANTISED_DTYPES = DTYPES | {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class TensorInfo(NamedTuple):
    """Shape and dtype of a tensor, and where it is stored; `offset` is `None` when not as bytes of that dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    offset: int | None = None


class FileRange(NamedTuple):
    """Bytes of a file that stand for themselves."""

    file: Path
    offset: int
    size: int


def one_line(error: BaseException) -> str:
    """The message of an error of the libraries, for use in one of ours."""
    return " ".join(str(error).split())


def read_json(path: Path) -> dict:
    """The object in a JSON file; ValueError names the file when it holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin with a byte order mark
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({one_line(error)}): fetch the file again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a JSON {type(content).__name__}, not an object.")
    return content


def to_json(content: Any, *, ensure_ascii: bool = False, **options) -> str:
    """JSON; ValueError names the place of a number that is not finite, which JSON lacks."""
    try:
        return json.dumps(content, allow_nan=False, ensure_ascii=ensure_ascii, **options)
    except ValueError as error:
        place = next(places_not_finite(content), None)
        if place is None:
            raise
        raise ValueError(f"{place} is not finite (nan or inf), and nothing was written with it.") from error


def write_json(path: Path, content: Any) -> None:
    path.write_text(to_json(content, indent=2) + "\n", encoding="utf-8")


def places_not_finite(content: Any, place: str = "") -> Iterator[str]:
    """Where numbers that are not finite stand in lists and tables, such as `measures.held_out[0].kl`."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from places_not_finite(value, f"{place}.{key}".lstrip("."))
    elif isinstance(content, (list, tuple)):
        for index, value in enumerate(content):
            yield from places_not_finite(value, f"{place}[{index}]")
    elif isinstance(content, float) and not math.isfinite(content):
        yield place


def is_finite(tensor: torch.Tensor) -> bool:
    # The extremes carry every nan and infinity, at a tenth of the time of an elementwise test.
    return tensor.numel() == 0 or all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(tensor))


def check_finite(name: str, tensor: torch.Tensor, owner: str) -> None:
    """ValueError, before anything is written with it, for a tensor of `owner` that holds nan or an infinity."""
    if not is_finite(tensor):
        raise ValueError(f"Tensor {name!r} of {owner} holds values that are not finite (nan or inf).")


def check_finite_file(path: Path) -> None:
    """As `check_finite`, for every tensor of a safetensors file that is not quantised."""
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        for name in names:
            if file.get_slice(name).get_dtype() in DTYPES:
                check_finite(name, file.get_tensor(name), str(path))


class SafetensorsReader:
    """
    The tensors of a checkpoint folder, exactly those that its index names.

    `tensors` maps names to shape, dtype and file; `read` returns one of them. Files are opened anew for each tensor,
    so its pages are released with it. Raises ValueError for files that are missing, damaged or contradict the index,
    and for tensors in other dtypes than `dtypes` (code -> dtype).
    """

    def __init__(self, folder: Path, dtypes: Mapping[str, torch.dtype] = DTYPES):
        self.tensors: dict[str, TensorInfo] = {}
        self.dtypes = dtypes
        weight_map = read_weight_map(folder)
        for file_name in dict.fromkeys(weight_map.values()) if weight_map else [SINGLE_FILE]:
            names = {name for name, file in weight_map.items() if file == file_name} if weight_map else None
            self._scan(folder / file_name, names)

    def _scan(self, path: Path, expected: set[str] | None) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                found = {name: file.get_slice(name) for name in names}
                infos = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in found.items()}
            offsets = read_offsets(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file ({one_line(error)}): fetch it again.") from error
        if expected is not None and TIED_HEAD not in infos:
            expected = expected - {TIED_HEAD}  # some indices list it; a model that is not tied is missed for it later
        if expected is not None and (differing := sorted(expected ^ set(infos))):
            where = "is listed in the index but not in the file" if differing[0] in expected else "is not in the index"
            raise ValueError(f"{path} and {INDEX_FILE} disagree: tensor {differing[0]!r} {where}.")
        for name, (shape, code) in infos.items():
            if code not in self.dtypes:
                advice = "Load the model with dtype=torch.float32 and save it" if code == "F64" else UNQUANTISE
                raise ValueError(
                    f"Tensor {name!r} in {path} has dtype {code}; supported are {', '.join(self.dtypes)}. "
                    f"{advice} first."
                )
            self.tensors[name] = TensorInfo(shape, self.dtypes[code], path, offsets[name])

    def read(self, name: str) -> torch.Tensor:
        path = self.tensors[name].file
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"Tensor {name!r} of {path} cannot be read ({one_line(error)}).") from error


def read_offsets(path: Path) -> dict[str, int]:
    """Position in the file of each tensor's first byte, from the header of a valid safetensors file (see `header`)."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in entries.items() if name != "__metadata__"}


def read_weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name from the index, or nothing for a single file; ValueError when a file is not there."""
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if not index.exists():
        if not single.exists():
            raise ValueError(no_weights(folder))
        return {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map: fetch the file again.")
    files = set(weight_map.values())
    if single.exists() and single.name not in files:
        raise ValueError(
            f"{folder} holds two sets of weights, {SINGLE_FILE} and the files of {INDEX_FILE}: remove the stale one."
        )
    for file_name in sorted(files):
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ValueError(f"{index} names {file_name!r}, which is not a file of the same folder.")
        if not (folder / file_name).is_file():
            raise ValueError(f"{folder / file_name} is named by {INDEX_FILE} but missing: fetch it.")
    return weight_map


def no_weights(folder: Path) -> str:
    pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
    if pickles:
        return (
            f"{folder} holds {pickles[0]} but no safetensors: load it once with from_pretrained and save it with "
            "save_pretrained, which writes safetensors."
        )
    return f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}."


def plan_shards(targets: Mapping[str, torch.Tensor], max_shard_size: int | str) -> StateDictSplit:
    """Which file each tensor goes to, in order, so that files stay below `max_shard_size` bytes (or such as "5GB")."""
    try:
        size = parse_size_to_int(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    except ValueError as error:
        raise ValueError(f"max_shard_size={max_shard_size!r} is no size: use such as '5GB'.") from error
    if size < 1:
        raise ValueError(f"max_shard_size={max_shard_size!r} leaves no room for a tensor: use such as '5GB'.")
    return split_torch_state_dict_into_shards(
        dict(targets), filename_pattern="model{suffix}.safetensors", max_shard_size=size
    )


def write_shards(
    folder: Path,
    targets: Mapping[str, torch.Tensor],
    max_shard_size: int | str,
    parts: Callable[[str], Iterable[torch.Tensor | FileRange]],
) -> list[str]:
    """
    Writes the tensors described by `targets` (meta tensors) as safetensors files and their index.

    Headers follow from the shapes, so each file is written front to back and no more than one part is held.

    Args:
        parts: called with each name in turn; yields the tensor in contiguous parts along the first axis, each as a
            tensor or as the bytes of another file.

    Returns: names of the files with weights.
    """
    split = plan_shards(targets, max_shard_size)
    for file_name, names in split.filename_to_tensors.items():
        with open(folder / file_name, "wb", buffering=0) as file:
            write_bytes(file, header({name: targets[name] for name in names}))
            for name in names:
                written = sum(write_part(file, part) for part in parts(name))
                assert written == targets[name].nbytes, name
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return list(split.filename_to_tensors)


def write_part(file: FileIO, part: torch.Tensor | FileRange) -> int:
    """Appends one part and returns its size."""
    if isinstance(part, FileRange):
        return copy_range(file, part)
    return write_bytes(file, part.reshape(-1).view(torch.uint8).numpy())


def write_bytes(file: FileIO, content: bytes | np.ndarray) -> int:
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]
    return len(memoryview(content))


def copy_range(file: FileIO, part: FileRange) -> int:
    """Appends bytes of another file, inside the kernel where it can: a quarter of the time of reading and writing."""
    position, end = part.offset, part.offset + part.size
    with open(part.file, "rb", buffering=0) as source:
        while position < end:
            try:
                copied = os.copy_file_range(source.fileno(), file.fileno(), end - position, position)
            except (AttributeError, OSError) as error:
                if getattr(error, "errno", errno.ENOSYS) not in NO_COPY_IN_KERNEL:
                    raise
                copied = write_bytes(file, os.pread(source.fileno(), min(end - position, 1 << 20), position))
            if not copied:
                raise ValueError(f"{part.file} has become shorter while it was read.")
            position += copied
    return part.size


def header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Safetensors header: its length in 8 bytes, then JSON with dtype, shape and byte range of each tensor."""
    entries: dict = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {
            "dtype": DTYPE_CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text
