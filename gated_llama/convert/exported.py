"""
Undoing an export: what `rewriting` adds to a model so that another architecture computes it, recognised by values.

An export may carry a last layer of zeros, norms that do nothing behind projections scaled by 2^-30, and a headwise
gate with each row repeated. Each is recognised exactly, by every value of it, and taken back; whatever is not exactly
so stays what it is.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from .layouts import merge_elementwise, norm_to_zero_centred
from .opening import Checkpoint
from .rewriting import NEUTRAL_SCALE, SMALLEST_NEUTRAL_EPS, neutral_gain
from .tensor_files import SafetensorsReader, TensorInfo


if TYPE_CHECKING:
    from .gated_source import GatedSource


Settled = tuple["GatedSource", dict[str, Any]]

# The architectures that get a layer without effect (`Target.identity_layer`).
WITH_ADDED_LAYER = ("step3p5", "afmoe")
PER_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "partial_rotary_factors",
    "rope_theta",
    "swiglu_limits",
    "swiglu_limits_shared",
)
OUTPUTS = re.compile(r"(o_proj|down_proj)(\.(weight|bias))?$")

# No projection of a model reaches this; one that does was not scaled, so the norm behind it does something.
LARGEST_WEIGHT = 2.0**16

NO_OUTPUT_BIAS = "o_proj has no bias in the files, which readers of this format take for a bias of zero."
NEUTRAL_QK = "QK-norm does nothing in this export of a model without it, and was taken back bit for bit."
NEUTRAL_OUTPUTS = "The norms behind attention and MLP do nothing in this export and were taken back bit for bit."
REPEATED_ROWS = "The rows of the gate are equal within each head, so that it is headwise here."
ADDED_LAYER = "The last layer is all zeros behind its norms, as exports append it, and was left out."


@dataclass(frozen=True)
class FewerTensors:
    """A reader that shows some of its tensors only."""

    reader: SafetensorsReader
    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> torch.Tensor:
        return self.reader.read(name)


def without_added_layer(checkpoint: Checkpoint) -> tuple[Checkpoint, list[str]]:
    """The checkpoint without a last layer that adds exactly nothing, if it is of a type that exports append one to."""
    raw = checkpoint.raw_config
    layers = raw.get("num_hidden_layers")
    if raw.get("model_type") not in WITH_ADDED_LAYER or not isinstance(layers, int) or layers < 2:
        return checkpoint, []
    prefix = f"model.layers.{layers - 1}."
    if not adds_nothing(checkpoint.reader, prefix):
        return checkpoint, []
    kept = {name: info for name, info in checkpoint.reader.tensors.items() if not name.startswith(prefix)}
    cut = {name: raw[name][: layers - 1] for name in PER_LAYER if isinstance(raw.get(name), list)}
    config = raw | cut | {"num_hidden_layers": layers - 1}
    return replace(checkpoint, raw_config=config, reader=FewerTensors(checkpoint.reader, kept)), [ADDED_LAYER]


def adds_nothing(reader: SafetensorsReader, prefix: str) -> bool:
    """Whether all that this layer writes to the residual stream passes a projection of zeros."""
    outputs = [name for name in reader.tensors if name.startswith(prefix) and OUTPUTS.search(name)]
    kinds = {OUTPUTS.search(name)[1] for name in outputs}
    return kinds == {"o_proj", "down_proj"} and not any(reader.read(name).any() for name in outputs)


def settle_output_bias(record: "GatedSource", reader: SafetensorsReader, fields: dict[str, Any]) -> Settled:
    """Exports leave a bias of o_proj out of the files where the format has it and the model has not."""
    names = [f"model.layers.{layer}.self_attn.o_proj.bias" for layer in range(fields["num_hidden_layers"])]
    stored = any(origin.source in reader.tensors for origin in record.origins(names, fields).values())
    if stored or not fields.get("o_bias"):
        return record, fields
    return noted(record, NO_OUTPUT_BIAS), fields | {"o_bias": False}


def settle_norms(record: "GatedSource", reader: SafetensorsReader, fields: dict[str, Any]) -> Settled:
    """Norms that do nothing are left out, and the scale of the projections before them with them."""
    if record.output_norms and not all_neutral(record, reader, fields, record.output_norms):
        raise ValueError(
            f"This {record.model_type} checkpoint cannot be represented: its layers also normalise what attention and "
            "MLP write, and this decoder has no norm there."
        )
    if record.output_norms:
        record = noted(without_norms(record, record.output_norms), NEUTRAL_OUTPUTS)
    if record.qk_norms and all_neutral(record, reader, fields, record.qk_norms):
        return noted(without_norms(record, record.qk_norms), NEUTRAL_QK), fields | {"qk_norm": False}
    return record, fields


def all_neutral(
    record: "GatedSource", reader: SafetensorsReader, fields: Mapping[str, Any], norms: Mapping[str, str]
) -> bool:
    names = [f"model.layers.{layer}.{norm}" for layer in range(fields["num_hidden_layers"]) for norm in norms]
    return all(
        name in reader.tensors and is_neutral(reader.read(name), fields["rms_norm_eps"], record.zero_centred)
        for name in names
    )


def is_neutral(stored: torch.Tensor, eps: float, zero_centred: bool) -> bool:
    """Whether this is, bit for bit, how an export stores the gain that undoes the scale 2^-30."""
    if eps < SMALLEST_NEUTRAL_EPS:
        return False
    gain = torch.full(stored.shape, neutral_gain(eps))
    return torch.equal((norm_to_zero_centred(gain) if zero_centred else gain).to(stored.dtype), stored)


def without_norms(record: "GatedSource", norms: Mapping[str, str]) -> "GatedSource":
    dropped = "|".join([record.dropped_tensors, *(rf"model\.layers\.\d+\.{re.escape(norm)}" for norm in norms)])
    return replace(record, unscaled=(*record.unscaled, *norms.values()), dropped_tensors=dropped)


def without_scale(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The projection before it was scaled by 2^-30; ValueError when it was not, so that its norm does something."""
    restored = tensor / NEUTRAL_SCALE
    if restored.abs().max() > LARGEST_WEIGHT:
        raise ValueError(f"Tensor {name!r} is not scaled by 2^-30, though the gain of the norm behind it is 2^30.")
    return restored


def settle_rows(record: "GatedSource", reader: SafetensorsReader, fields: dict[str, Any]) -> Settled:
    """A gate is headwise if its rows are equal within each head of every layer, and not all zero."""
    if fields["gate_granularity"] != "elementwise":
        return record, fields
    names = [f"model.layers.{layer}.self_attn.g_proj.weight" for layer in range(fields["num_hidden_layers"])]
    names += [name.replace(".weight", ".bias") for name in names] if fields["gate_bias"] else []
    some = False
    for origin in record.origins(names, fields).values():
        if origin.source not in reader.tensors:
            return record, fields  # reported with all that is missing
        gate = reader.read(origin.source)
        with naming(origin.source):
            gate = origin.take(gate) if origin.take else gate
        try:
            merge_elementwise(gate, fields["head_dim"])
        except (ValueError, RuntimeError):  # rows differ, or their number is none of this model
            return record, fields
        some = some or bool(gate.any())
    if not some:
        return record, fields
    return noted(replace(record, repeated_rows=True), REPEATED_ROWS), fields | {"gate_granularity": "headwise"}


def noted(record: "GatedSource", note: str) -> "GatedSource":
    return replace(record, notes=(*record.notes, note))


@contextmanager
def naming(tensor: str) -> Iterator[None]:
    """A ValueError inside tells which tensor it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{tensor}: {error}") from error
