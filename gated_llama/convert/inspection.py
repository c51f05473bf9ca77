"""What a checkpoint is, from its configuration and the headers of its weight files; no weights are read."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_safetensors_metadata, hf_hub_download
from huggingface_hub.errors import (
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    OfflineModeIsEnabled,
    SafetensorsParsingError,
)

from ..configuration_gated import GatedLlamaConfig
from .checkpoint import GATE_TENSOR, build_config, expected_tensors
from .exported import WITH_ADDED_LAYER
from .imports import source_for
from .opening import open_checkpoint, quantiser, stored_in
from .sources import decoder_fields
from .tensor_files import DTYPES, TensorInfo, one_line, read_json


DECODER_FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "qk_norm",
    "qkv_bias",
    "o_bias",
    "mlp_bias",
    "sliding_window",
    "rope_parameters",
)

GATE_FIELDS = (
    "gate_position",
    "gate_granularity",
    "gate_head_shared",
    "gate_operation",
    "gate_activation",
    "gate_input",
    "gate_bias",
    "gate_in_fp32",
)


@dataclass(frozen=True)
class GateCount:
    """Parameters of a gate: `gate` of `total`, and the share in between 0 and 1."""

    granularity: str
    gate: int
    total: int

    @property
    def share(self) -> float:
        return self.gate / self.total


@dataclass(frozen=True)
class Inspection:
    """
    What `inspect_checkpoint` found.

    decoder, gate: fields of `GatedLlamaConfig`; gate is empty for a model without one.
    gated_layers, gate_shape: indices; (heads, width) of the scores of one token.
    parameters: of the whole model, tied weights once; gate_parameters: of the gates among them.
    gate_tensors: weight name with `*` for the layer -> shape; empty where another format stores the gate.
    retrofit: the conversion's own record: its policy, and what it folded into other weights.
    dtypes: dtype -> parameters stored in it (de-quantised, for GGUF). files: file -> bytes.
    quantiser: what the weights are quantised by, such as "torchao"; its scales are among the parameters of `dtypes`.
    offers: what a conversion would add at G1, for a plain model.
    problems: tensors that the configuration calls for and the files lack, or the other way round.
    """

    model: str
    model_type: str
    decoder: dict[str, Any]
    gate: dict[str, Any]
    gated_layers: list[int]
    gate_shape: tuple[int, int] | None
    parameters: int
    gate_parameters: int
    gate_tensors: dict[str, list[int]]
    retrofit: dict[str, Any] | None
    dtypes: dict[str, int]
    files: dict[str, int]
    offers: list[GateCount]
    problems: list[str]
    quantiser: str | None = None

    @property
    def gate_share(self) -> float:
        """Gate parameters over all parameters, 0 to 1."""
        return self.gate_parameters / self.parameters

    def to_dict(self) -> dict[str, Any]:
        offers = [asdict(offer) | {"share": offer.share} for offer in self.offers]
        return asdict(self) | {"gate_share": self.gate_share, "offers": offers}


def inspect_checkpoint(model: str | Path, revision: str | None = None) -> Inspection:
    """
    Describes a gated checkpoint, or a plain one of a type that can be converted.

    Args:
        model: Hub id (only its configuration and headers are fetched), folder or `.gguf` file.
        revision: branch, tag or commit of a Hub id.

    Raises:
        ValueError: no such checkpoint, damaged files, or an architecture that is not known here.
    """
    raw, tensors = read_headers(model, revision)
    config = read_config({name: value for name, value in raw.items() if name != "quantization_config"})
    quantised_by = quantiser(raw)
    gated = config.gate_position is not None
    shapes = shapes_of(config)
    compare = compare_tensors if quantised_by is None else compare_quantised
    return Inspection(
        model=str(model),
        model_type=raw["model_type"],
        decoder={name: getattr(config, name) for name in DECODER_FIELDS},
        gate={name: getattr(config, name) for name in GATE_FIELDS} if gated else {},
        gated_layers=config.gated_layers,
        gate_shape=config.gate_shape,
        parameters=count(shapes),
        gate_parameters=gate_parameters(config),
        gate_tensors={
            re.sub(r"\.\d+\.", ".*.", name): list(shape)
            for name, shape in shapes.items()
            if GATE_TENSOR.search(name) and raw["model_type"] == GatedLlamaConfig.model_type
        },
        retrofit=config.gate_retrofit,
        dtypes=stored_dtypes(tensors),
        files=stored_files(tensors),
        offers=[]
        if gated or quantised_by or raw["model_type"] == GatedLlamaConfig.model_type
        else [offer(config, granularity) for granularity in ("headwise", "elementwise")],
        problems=compare(shapes, tensors) if raw["model_type"] == GatedLlamaConfig.model_type else [],
        quantiser=quantised_by,
    )


def read_headers(model: str | Path, revision: str | None) -> tuple[dict[str, Any], Mapping[str, TensorInfo]]:
    """The content of config.json, and shape, dtype and file of each tensor."""
    name = str(model)
    if Path(name).expanduser().exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        checkpoint = open_checkpoint(model, revision, quantised=True)
        return checkpoint.raw_config, checkpoint.reader.tensors
    tensors = {}
    try:
        raw = read_json(Path(hf_hub_download(model, "config.json", revision=revision)))
        dtypes = stored_in(raw)
        metadata = get_safetensors_metadata(model, revision=revision)
    except (OfflineModeIsEnabled, LocalEntryNotFoundError):  # then from the cache, or not at all
        checkpoint = open_checkpoint(model, revision, quantised=True)
        return checkpoint.raw_config, checkpoint.reader.tensors
    except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise ValueError(f"{model} has no safetensors that can be read: {one_line(error)}") from error
    for file_name, file in metadata.files_metadata.items():
        for name, info in file.tensors.items():
            if info.dtype not in dtypes:
                raise ValueError(
                    f"{model}: {name} is stored as {info.dtype}; only {', '.join(dtypes)} are read, and its "
                    "config.json names no quantiser: name the checkpoint that it was made from."
                )
            tensors[name] = TensorInfo(tuple(info.shape), dtypes[info.dtype], Path(file_name))
    return raw, tensors


def read_config(raw: Mapping[str, Any]) -> GatedLlamaConfig:
    """The configuration of a gated checkpoint of any format, or the ungated one of a plain checkpoint."""
    if raw.get("model_type") == GatedLlamaConfig.model_type:
        return build_config({name: value for name, value in raw.items() if name != "model_type"})
    try:
        return build_config(decoder_fields(source_for(raw), raw))
    except ValueError as error:
        if raw.get("model_type") in WITH_ADDED_LAYER:  # the tensors tell whether it is one, not their headers
            raise ValueError(
                f"{error} If it is an export of this package, whose last layer does nothing, convert it back first."
            ) from error
        raise


def offer(config: GatedLlamaConfig, granularity: str) -> GateCount:
    """What a G1 gate in every layer would add to an ungated model."""
    gated = build_config(config.to_dict() | {"gate_position": "sdpa_output", "gate_granularity": granularity})
    return GateCount(granularity, gate_parameters(gated), count(shapes_of(gated)))


def gate_parameters(config: GatedLlamaConfig) -> int:
    return config.gate_parameters_per_layer * len(config.gated_layers)


def shapes_of(config: GatedLlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a checkpoint of this configuration has."""
    return {name: tuple(tensor.shape) for name, tensor in expected_tensors(config, torch.float32).items()}


def count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def stored_dtypes(tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    """Parameters by dtype, most first."""
    sizes = Counter()
    for info in tensors.values():
        sizes[str(info.dtype).removeprefix("torch.")] += math.prod(info.shape)
    return dict(sizes.most_common())


def stored_files(tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    """Bytes of each weight file; of its tensors, where the file is on the Hub only."""
    sizes = Counter()
    for info in tensors.values():
        sizes[info.file] += math.prod(info.shape) * info.dtype.itemsize
    return {file.name: file.stat().st_size if file.is_file() else size for file, size in sorted(sizes.items())}


def compare_tensors(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, TensorInfo]) -> list[str]:
    """What does not fit between a configuration and its files, one sentence for each tensor."""
    problems = [f"{name} is not in the files" for name in expected if name not in found]
    problems += [f"{name} is in the files but not in the model" for name in found if name not in expected]
    return problems + [
        f"{name} has shape {list(found[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]


def compare_quantised(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, TensorInfo]) -> list[str]:
    """
    The same for quantised weights: whether each module has its own.

    A quantiser stores `q_proj.weight` as tensors of its own names and shapes, all of which begin with `q_proj.`.
    """
    modules = {module_of(name) for name in found}
    problems = [
        f"{name} is not in the files"
        for name in expected
        if name not in found and not (name.endswith(".weight") and module_of(name) in modules)
    ]
    known = {module_of(name) for name in expected}
    problems += [f"{name} is in the files but not in the model" for name in found if module_of(name) not in known]
    plain = {name: info for name, info in found.items() if name in expected and info.dtype in DTYPES.values()}
    return problems + compare_tensors({name: expected[name] for name in plain}, plain)


def module_of(tensor: str) -> str:
    """`"model.norm"` of `"model.norm.weight"`, and of `"model.norm.weight.absmax"`."""
    return tensor.partition(".weight.")[0] if ".weight." in tensor else tensor.rpartition(".")[0]
