"""A longer context without training: rotary parameters are rewritten, weights stay as they are."""

import contextlib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from transformers import PreTrainedConfig

from ..hub import read_card, write_card
from .config_file import library_config
from .opening import download, refuse_adapter
from .output_folder import building, check_output
from .tensor_files import INDEX_FILE, SINGLE_FILE, check_finite_file, read_json, read_weight_map, write_json
from .tokenizer import CARRIED, TOKENIZER_CONFIG, copy_files


# What each method writes beside rope_theta; `original` is the length of pre-training.
METHODS: dict[str, Callable[[float, int], dict[str, Any]]] = {
    "yarn": lambda factor, original: {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    },
    "linear": lambda factor, original: {"rope_type": "linear", "factor": factor},
}

# Kept from the source's rotary parameters: they do not depend on the length.
LENGTH_FREE = ("rope_theta", "partial_rotary_factor")

# What belongs to a model beside its weights: configuration and tokenizer, the card and its pictures, the code and the
# record of a gated folder. All else (weights in other formats, states of training runs) would stay unextended.
BELONGING = (*CARRIED, "config.json", "README.md", "*.png", "*.jpg", "*.svg", "*.py", "transplant.json")


@dataclass(frozen=True)
class Extension:
    """
    What an extension did.

    Args:
        output: the folder that was written.
        method: `"yarn"` or `"linear"`.
        factor: extended length / length of pre-training.
        original_length: tokens of context in pre-training; `None` when a linearly scaled source does not say.
        length: tokens of context now.
        rope_parameters: as written.
        unchanged: whether the source had this extension already.
        left_behind: what lies in the source's folder and is no part of the model.
    """

    output: Path
    method: str
    factor: float
    original_length: int | None
    length: int
    rope_parameters: dict[str, Any]
    unchanged: bool
    left_behind: tuple[str, ...] = ()


def extend_context(
    source: str | Path,
    output: str | Path,
    *,
    factor: float,
    method: str = "yarn",
    rope_theta: float | None = None,
    link: bool = False,
    revision: str | None = None,
) -> Extension:
    """
    Copies a checkpoint with rotary parameters for `factor` times its pre-training length.

    The factor counts from the length of pre-training, so extending an extended folder the same way changes nothing.
    YaRN (arXiv 2309.00071) needs no training for moderate factors; the paper's 128k context is YaRN without training.

    Args:
        source: Hub id or folder, gated or not.
        output: the folder to write; it must not exist, or be empty.
        factor: greater than 1.
        method: `"yarn"`, or `"linear"` (position interpolation, arXiv 2306.15595).
        rope_theta: another base of the rotary frequencies; it asks for training (the paper: 10,000 to 1,000,000, and
            80B tokens).
        link: hard links instead of copies of the weights. Whoever then writes to one folder's files changes the other.
            They are not read, so values that are not finite are refused in copies only.
        revision: branch, tag or commit of a Hub source.

    Raises:
        ValueError: the request contradicts the source's configuration, one of them is not valid, or copied weights
            hold nan or infinities.
        OSError: reading or writing failed. In both cases nothing is left at `output`.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not supported; choose one of {', '.join(METHODS)}.")
    if rope_theta is not None and not 1 < rope_theta < float("inf"):
        raise ValueError(f"rope_theta={rope_theta:g} must be greater than 1: frequencies are its negative powers.")
    if not 1 < factor < float("inf"):
        raise ValueError(f"factor={factor:g} must be greater than 1: it is extended length / pre-training length.")
    factor, output = float(factor), check_output(Path(output), source)
    folder = find_folder(source, revision)
    raw = read_json(folder / "config.json")
    config = library_config(folder)
    check_rotary(config)
    changes, extension = plan_extension(raw, output, factor, method, rope_theta)
    check_windows(config, extension.length)
    weights = [] if link else [folder / name for name in weight_files(folder)]
    for path in weights:
        check_finite_file(path)
    with building(output, sum(path.stat().st_size for path in weights)) as target:
        copy_model(folder, target, link)
        left_behind = not_carried(folder, target)
        write_json(target / "config.json", raw | changes)
        raise_tokenizer_limit(target, extension.length)
        if not extension.unchanged:
            mark_card(target, extension)
        check_written(target, extension)
    return replace(extension, left_behind=left_behind)


def find_folder(source: str | Path, revision: str | None) -> Path:
    """The folder of a checkpoint with all its weight files; ValueError when it is not one."""
    path = Path(source).expanduser()
    if path.is_file():
        raise ValueError(f"{path} is a file: convert it first (gated-llama convert {path} OUT), then extend OUT.")
    if not path.is_dir():
        if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(source)):
            raise ValueError(f"{source} does not exist.")
        path = download(str(source), revision, BELONGING)
    refuse_adapter(path)
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} has no config.json: it is not a checkpoint folder.")
    read_weight_map(path)
    return path


def check_rotary(config: PreTrainedConfig) -> None:
    """ValueError for a model that does not have one table of rotary parameters."""
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        raise ValueError(f"A model of type {config.model_type!r} has no rotary embeddings that could be scaled.")
    if nested := [name for name, value in rope.items() if isinstance(value, dict)]:
        raise ValueError(
            f"A model of type {config.model_type!r} has rotary parameters per layer type ({', '.join(nested)}): edit "
            "those by hand, since which layers see the longer context is a choice."
        )


def check_windows(config: PreTrainedConfig, length: int) -> None:
    """ValueError for windows that held all positions, and so were none, and would not hold `length` of them."""
    window, before = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if window and before and before <= window < length and "sliding_attention" in kinds:
        raise ValueError(
            f"The model's layers see a window of {window} tokens, which holds its {before} positions and would not "
            f"hold {length}: extend the checkpoint that it was exported from, and export that."
        )


def plan_extension(
    raw: dict[str, Any], output: Path, factor: float, method: str, rope_theta: float | None
) -> tuple[dict[str, Any], Extension]:
    """The entries of config.json that change, and the report; ValueError where request and source contradict."""
    rope = rotary_parameters(raw)
    length = raw.get("max_position_embeddings")
    if not isinstance(length, int):
        raise ValueError("config.json has no max_position_embeddings, so its pre-training length is not known.")
    extended = rope["rope_type"] != "default"
    original = previous_length(rope, length, factor, method, rope_theta) if extended else length
    if original is None:  # scaled linearly, by this factor
        return {}, Extension(output, method, factor, None, length, rope, unchanged=True)
    target = original * factor
    if target != int(target):
        raise ValueError(f"factor={factor:g} of {original} tokens is {target:g}, not a whole number of positions.")
    kept = rope if extended else {key: rope[key] for key in LENGTH_FREE if key in rope}
    new = kept | METHODS[method](factor, original) | ({} if rope_theta is None else {"rope_theta": float(rope_theta)})
    changes = config_changes(raw, new, int(target))
    return changes, Extension(
        output,
        method,
        factor,
        original,
        int(target),
        new,
        unchanged=all(raw.get(key) == changes[key] for key in changes),
    )


def rotary_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters of a config.json, from the fields of version 5 or of earlier ones, under today's names."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    for key in LENGTH_FREE:
        if raw.get(key) is not None:
            rope.setdefault(key, raw[key])
    return rope


def previous_length(
    rope: dict[str, Any], length: int, factor: float, method: str, rope_theta: float | None
) -> int | None:
    """Pre-training length of a source that is extended already; ValueError unless it is extended as requested."""
    found, by = rope["rope_type"], rope.get("factor")
    if found != method or by != factor:
        raise ValueError(
            f"The source's context is already extended ({found}{f' x{by:g}' if by else ''}, {length} tokens), which "
            f"contradicts {method} x{factor:g}: extend the checkpoint that it was made from."
        )
    if rope_theta is not None and rope.get("rope_theta") != rope_theta:
        raise ValueError(
            f"The source is extended with rope_theta={rope.get('rope_theta')}, which contradicts "
            f"rope_theta={rope_theta:g}: extend the checkpoint that it was made from."
        )
    if found == "linear":
        return None
    original = rope.get("original_max_position_embeddings")
    if original is None:
        raise ValueError(
            "The source's yarn parameters name no original_max_position_embeddings, so its pre-training length is not "
            "known: write it into rope_parameters of config.json."
        )
    if length not in (original, original * factor):
        raise ValueError(
            f"The source contradicts itself: yarn x{factor:g} from {original} tokens gives {original * factor:g}, but "
            f"max_position_embeddings={length}. Correct config.json."
        )
    return original


def config_changes(raw: dict[str, Any], rope: dict[str, Any], length: int) -> dict[str, Any]:
    """New values, in the fields of version 5 and, where the source has them, in those that earlier versions read."""
    changes: dict[str, Any] = {"max_position_embeddings": length, "rope_parameters": rope}
    if raw.get("rope_theta") is not None:
        changes["rope_theta"] = rope["rope_theta"]
    if "rope_scaling" in raw:
        changes["rope_scaling"] = {key: value for key, value in rope.items() if key not in LENGTH_FREE}
    return changes


def weight_files(folder: Path) -> list[str]:
    return sorted(set(read_weight_map(folder).values())) or [SINGLE_FILE]


def copy_model(source: Path, target: Path, link: bool) -> None:
    """The files of the model, its weights (those of the index, where there is one) as hard links if asked."""
    copy_files(source, target, BELONGING)
    if (source / INDEX_FILE).is_file():
        shutil.copyfile(source / INDEX_FILE, target / INDEX_FILE)
    for name in weight_files(source):
        # The files of a Hub snapshot are links into its cache: resolve them, or the link would be to a link.
        origin = (source / name).resolve()
        if link:
            (target / name).hardlink_to(origin)
        else:
            shutil.copyfile(origin, target / name)


def not_carried(source: Path, target: Path) -> tuple[str, ...]:
    """Names of what lies in `source` and not in its copy, hidden files aside; folders end in a slash."""
    carried = {path.name for path in target.iterdir()}
    left = [path for path in source.iterdir() if path.name not in carried and not path.name.startswith(".")]
    return tuple(sorted(f"{path.name}/" if path.is_dir() else path.name for path in left))


def raise_tokenizer_limit(folder: Path, length: int) -> None:
    """Lifts `model_max_length` of the tokenizer, which would warn about, or cut, texts that now fit."""
    path = folder / TOKENIZER_CONFIG
    if path.is_file() and ((config := read_json(path)).get("model_max_length") or length) < length:
        write_json(path, config | {"model_max_length": length})


def mark_card(folder: Path, extension: Extension) -> None:
    """Says in the model card what was done, and takes out its scores, which were measured without."""
    path = folder / "README.md"
    if not path.is_file():
        return
    note = (
        f"> Context extended to {extension.length:,} tokens ({extension.method} x{extension.factor:g}, without "
        "training). Scores and instructions below are the original's.\n"
    )
    header, text = "", read_card(path)
    with contextlib.suppress(yaml.YAMLError):  # a card that cannot be read is no reason not to extend
        if text.startswith("---"):
            card = ModelCard(text, ignore_metadata_errors=True)
            card.data.pop("model_name", None)
            card.data.eval_results = None
            header, text = f"---\n{card.data.to_yaml()}\n---\n\n", card.text.lstrip()
    write_card(path, f"{header}{note}\n{text}")


def check_written(folder: Path, extension: Extension) -> None:
    """The written configuration says to Transformers what it should: its own checks and defaults come in between."""
    config = library_config(folder)
    read = {key: config.rope_parameters.get(key) for key in extension.rope_parameters}
    if read != extension.rope_parameters or config.max_position_embeddings != extension.length:
        raise ValueError(
            f"Transformers does not read what was written for a model of type {config.model_type!r}: {read} at "
            f"{config.max_position_embeddings} positions instead of {extension.rope_parameters} at {extension.length}."
        )


def context_length(config: PreTrainedConfig) -> int | None:
    """
    Tokens of context that a configuration allows; `None` when it does not say.

    Usually `max_position_embeddings`; a YaRN configuration that leaves it at the pre-training length allows `factor`
    times that.
    """
    length = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn" and length == rope.get("original_max_position_embeddings"):
        length = int(length * rope["factor"])
    return length
