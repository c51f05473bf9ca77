"""A source that brings a gate of its own: where query, gate and norms lie, and what takes the place of a policy."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import torch

from . import exported
from .layouts import (
    CONFUSABLE,
    HeadGeometry,
    get_layout,
    implausible_layout,
    layout_contrasts,
    merge_elementwise,
    norm_from_zero_centred,
)
from .policies import GateStart
from .sources import Origin, Source
from .tensor_files import SafetensorsReader


Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class GatedSource(Source):
    """
    A source architecture with a gate; `fields` give the gate's fields too.

    What config.json leaves open is decided by values, and written into a copy of the record: see `settled`.

    Args:
        layout: name of the row order of q_proj in `LAYOUTS`; "separate" for a gate in tensors of its own.
        zero_centred: norms are stored as w with the gain 1 + w.
        renames: part of a name here -> what stands for it there.
        qk_norms: norm -> the linear map before it; they are left out when they do nothing.
        output_norms: the same for norms that have no place here, and hence must do nothing.
        unscaled: linear maps that are stored times 2^-30, because the norm behind them does nothing.
        repeated_rows: a headwise gate whose row is stored for each coordinate of its head.
        notes: what the user should know about the import, one sentence each.
    """

    layout: str = "separate"
    zero_centred: bool = False
    renames: Mapping[str, str] = field(default_factory=dict)
    qk_norms: Mapping[str, str] = field(default_factory=dict)
    output_norms: Mapping[str, str] = field(default_factory=dict)
    unscaled: tuple[str, ...] = ()
    repeated_rows: bool = False
    notes: tuple[str, ...] = ()

    def settled(self, reader: SafetensorsReader, fields: Mapping[str, Any]) -> tuple["GatedSource", dict[str, Any]]:
        """This record and the decoder's fields, as the tensors show them to be; ValueError when they contradict."""
        record, fields = self, dict(fields)
        for settle in (exported.settle_output_bias, exported.settle_norms, exported.settle_rows):
            record, fields = settle(record, reader, fields)
        return record, fields

    def origins(self, names: Iterable[str], fields: Mapping[str, Any]) -> dict[str, Origin]:
        """Where each target comes from; query and gate may share a source tensor."""
        return {name: self._origin(name, self.geometry(fields)) for name in names}

    def geometry(self, fields: Mapping[str, Any]) -> HeadGeometry:
        """The sizes of the heads as they are stored."""
        heads, head_dim = fields["num_attention_heads"], fields["head_dim"]
        width = 1 if fields["gate_granularity"] == "headwise" and not self.repeated_rows else head_dim
        return HeadGeometry(heads, fields["num_key_value_heads"] or heads, head_dim, width)

    def _origin(self, name: str, geometry: HeadGeometry) -> Origin:
        if self.zero_centred and name.endswith("norm.weight"):
            return Origin(self.renamed(name), norm_from_zero_centred, torch.float32)
        source, changes = self._place(name, geometry)
        if self.repeated_rows and ".g_proj." in name:
            changes.append(partial(merge_elementwise, head_dim=geometry.head_dim))
        if any(f".{projection}." in name for projection in self.unscaled):
            changes.append(partial(exported.without_scale, name))
        return Origin(source, partial(apply, changes) if changes else None)

    def _place(self, name: str, geometry: HeadGeometry) -> tuple[str, list[Change]]:
        """The source tensor that holds the target `name`, and how to take the target out of it."""
        projection = re.fullmatch(r"(.+\.self_attn\.)([qg])_proj\.(weight|bias)", name)
        if projection and self.layout != "separate":
            prefix, part, kind = projection.groups()
            return f"{prefix}q_proj.{kind}", [partial(take, self.layout, geometry, part)]
        return self.renamed(name), []

    def renamed(self, name: str) -> str:
        return reduce(lambda name, pair: name.replace(*pair), self.renames.items(), name)

    def with_layout(self, layout: str) -> "GatedSource":
        """This record for a checkpoint whose q_proj is laid out as `layout`, a row order of the same shape."""
        get_layout(layout)
        layout = layout.replace("-", "_")
        allowed = CONFUSABLE if self.layout in CONFUSABLE else (self.layout,)
        if layout not in allowed:
            raise ValueError(
                f"layout={layout!r} does not fit a {self.model_type} checkpoint, which stores its gate as "
                f"{self.layout!r}; possible are {', '.join(allowed)}."
            )
        if layout == self.layout:
            return self
        note = f"The format stores its gate as {self.layout!r}; it was read as {layout!r}, as you asked."
        return replace(self, layout=layout, notes=(*self.notes, note))

    def start(self, reader: SafetensorsReader, fields: Mapping[str, Any], scale: float = 1.0) -> GateStart:
        """
        What takes the place of a policy: the source's gate as it is, and what to say about it.

        Args:
            scale: the source multiplies by `scale * sigmoid`; a power of two, which is folded into o_proj.
        """
        note = f"The source's own gate was taken over ({fields['gate_granularity']}, stored as {self.layout!r}); "
        folded = (
            "nothing was initialised or folded." if scale == 1 else f"o_proj was multiplied by its scale {scale:g}."
        )
        notes = [note + folded, *self.notes, self.doubt(reader, fields)]
        return ImportedGate(
            "imported",
            gate_bias=fields["gate_bias"],
            fold={} if scale == 1 else {"o_proj.weight": scale},
            layout=self.layout,
            notes=tuple(filter(None, notes)),
        )

    def doubt(self, reader: SafetensorsReader, fields: Mapping[str, Any], sample: int = 8) -> str | None:
        """
        One sentence when the sizes of the rows speak for another layout, from up to `sample` layers.

        Raises: ValueError when a fused tensor has not the rows of this layout.
        """
        if self.layout not in CONFUSABLE:
            return None
        layers, geometry, contrasts = fields["num_hidden_layers"], self.geometry(fields), []
        for layer in sorted({index * layers // min(sample, layers) for index in range(min(sample, layers))}):
            name = self._place(f"model.layers.{layer}.self_attn.q_proj.weight", geometry)[0]
            if name not in reader.tensors:
                continue  # reported with all that is missing
            with exported.naming(name):
                contrasts.append(layout_contrasts(reader.read(name), geometry))
        likely = implausible_layout(self.layout, contrasts)
        return likely and (
            f"Query and gate rows of q_proj look as if they were laid out as {likely!r} instead of the declared "
            f"{self.layout!r}; gated_llama.convert.layout_check.layout_losses tells on a text which of them fits."
        )


@dataclass(frozen=True)
class ImportedGate(GateStart):
    """The gate of a source, as it is: nothing starts."""

    layout: str = ""

    def record(self, source_model_type: str, package_version: str) -> dict[str, Any]:
        return super().record(source_model_type, package_version) | {"layout": self.layout}


def take(layout: str, geometry: HeadGeometry, part: str, tensor: torch.Tensor) -> torch.Tensor:
    return get_layout(layout).split(tensor, geometry)[part]


def apply(changes: Iterable[Change], tensor: torch.Tensor) -> torch.Tensor:
    return reduce(lambda tensor, change: change(tensor), changes, tensor)
