"""
State dicts of other code: the config.json of a plain architecture beside tensors with a gate, as that code saves them.

Such a folder holds what the training code saved, as safetensors and in one piece (no shards of tensor parallelism),
and the config.json of the architecture without its gate. How the gate is stored is named by the user (`layout`) or by
the flag of Megatron's own configuration (`DECLARED_LAYOUTS`). Names are those of Transformers, Megatron Core or
OLMo-core; every tensor must have its place, so that names of another architecture are refused.

Sources: Megatron-LM (transformer/attention.py, GPTModel), OLMo-core (nn/hf/convert.py), modded-nanogpt (`attn_gate`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from functools import partial
from typing import Any

import torch

from .gated_source import Change, GatedSource, take
from .layouts import HeadGeometry, get_layout, widen_gate
from .sources import Source
from .tensor_files import SafetensorsReader


# Flags of Megatron's configuration that name a layout.
DECLARED_LAYOUTS = {"attention_output_gate": "megatron", "head_wise_attn_gate": "megatron_tail"}

# Megatron's two have one granularity each; the other would have as many rows as the other layout.
ONLY_GRANULARITY = {"megatron": ("elementwise",), "megatron_tail": ("headwise",)}


@dataclass(frozen=True)
class Naming:
    """
    The names that some code gives to the tensors of a decoder.

    Args:
        source: that code.
        layer: what stands for `model.layers.N.`, with {} for N.
        outside: module here -> module there, outside of the layers.
        inside: the same below a layer; whole tensor names where the kind (`.weight`) differs as well. Of several names
            the first that exists is read.
        fused: module that holds query, key and value together.
        gate: names of a gate of its own, if there is such a thing.
        halves: module here -> (module there, 0 or 1), where one tensor holds two, one above the other.
    """

    source: str
    layer: str
    fused: str
    gate: tuple[str, ...]
    outside: Mapping[str, str] = field(default_factory=dict)
    inside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    halves: Mapping[str, tuple[str, int]] = field(default_factory=dict)


NAMINGS = (
    Naming(
        "Transformers",
        "model.layers.{}.",
        fused="self_attn.linear_qkv",
        gate=("self_attn.g_proj", "self_attn.gate_proj", "self_attn.attn_gate"),
    ),
    Naming(
        "Megatron Core",
        "decoder.layers.{}.",
        fused="self_attention.linear_qkv",
        gate=(),
        outside={
            "model.embed_tokens": "embedding.word_embeddings",
            "model.norm": "decoder.final_layernorm",
            "lm_head": "output_layer",
        },
        inside={
            # With Transformer Engine a norm belongs to the map behind it.
            "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
            "post_attention_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
            "self_attn.q_norm": ("self_attention.q_layernorm",),
            "self_attn.k_norm": ("self_attention.k_layernorm",),
            "self_attn.o_proj": ("self_attention.linear_proj",),
            "mlp.down_proj": ("mlp.linear_fc2",),
        },
        halves={"mlp.gate_proj": ("mlp.linear_fc1", 0), "mlp.up_proj": ("mlp.linear_fc1", 1)},
    ),
    Naming(
        "OLMo-core",
        "blocks.{}.",
        fused="attention.w_qkv",
        gate=("attention.w_g",),
        outside={"model.embed_tokens": "embeddings", "model.norm": "lm_head.norm", "lm_head": "lm_head.w_out"},
        inside={
            "input_layernorm": ("attention_norm",),
            "post_attention_layernorm": ("feed_forward_norm",),
            "self_attn.q_proj": ("attention.w_q",),
            "self_attn.k_proj": ("attention.w_k",),
            "self_attn.v_proj": ("attention.w_v",),
            "self_attn.o_proj": ("attention.w_out",),
            "self_attn.q_norm": ("attention.q_norm",),
            "self_attn.k_norm": ("attention.k_norm",),
            "mlp.gate_proj": ("feed_forward.w1",),
            "mlp.up_proj": ("feed_forward.w3",),
            "mlp.down_proj": ("feed_forward.w2",),
        },
    ),
)


@dataclass(frozen=True)
class GatedStateDict(GatedSource):
    """
    A plain architecture with a gate beside it.

    Args:
        naming: whose names the tensors have; found by `settled`.
        names: tensors of the first layer, to choose among several names.
        gate_name: the gate's own tensor, where the layout is "separate".
        gate_columns: coordinates of the hidden state that the gate reads, where it reads some only.
    """

    naming: Naming = NAMINGS[0]
    names: frozenset[str] = frozenset()
    gate_name: str = ""
    gate_columns: int | None = None

    def settled(self, reader: SafetensorsReader, fields: Mapping[str, Any]) -> tuple[GatedSource, dict[str, Any]]:
        record = self._named(reader)
        fields = {**fields, "gate_position": "sdpa_output", "gate_granularity": "elementwise"}
        holder = record._place("model.layers.0.self_attn.g_proj.weight", record.geometry(fields))[0]
        if holder not in reader.tensors:
            raise ValueError(f"layout={self.layout!r} is given, and the source has no gate: {holder!r} is missing.")
        fields["gate_granularity"] = record._granularity(holder, reader.tensors[holder].shape[0], fields)
        fields["gate_bias"] = re.sub("weight$", "bias", holder) in reader.tensors
        columns = reader.tensors[holder].shape[-1]
        if self.layout == "separate" and columns < fields["hidden_size"]:
            record = replace(
                record,
                gate_columns=fields["hidden_size"],
                notes=(f"The gate reads the first {columns} coordinates of the hidden state; the others weigh 0.",),
            )
        return super(GatedStateDict, record).settled(reader, fields)

    def _named(self, reader: SafetensorsReader) -> "GatedStateDict":
        """This record with the names that the tensors have; ValueError when they are nobody's."""
        for naming in NAMINGS:
            prefix = naming.layer.format(0)
            names = frozenset(name.removeprefix(prefix) for name in reader.tensors if name.startswith(prefix))
            if names:
                gates = [name for name in naming.gate if f"{name}.weight" in names]
                if self.layout == "separate" and len(gates) != 1:
                    raise ValueError(
                        f"layout='separate' is given, and the first layer, named as {naming.source} names it, has "
                        f"{' and '.join(gates) or 'no gate of its own'}; known are {', '.join(naming.gate) or 'none'}."
                    )
                return replace(self, naming=naming, names=names, gate_name="".join(gates))
        raise ValueError(
            f"No tensor of a first layer is named as {', '.join(naming.source for naming in NAMINGS)} name theirs "
            f"({', '.join(naming.layer.format(0) + '...' for naming in NAMINGS)}): rename the tensors."
        )

    def _granularity(self, holder: str, rows: int, fields: Mapping[str, Any]) -> str:
        """The granularity that has this many rows; two have the same number only if heads are of one coordinate."""
        layout, expected = get_layout(self.layout), {}
        for granularity in ONLY_GRANULARITY.get(self.layout, ("headwise", "elementwise")):
            geometry = self.geometry({**fields, "gate_granularity": granularity})
            blocks = [("g", geometry.rows("g"))] if self.layout == "separate" else layout.blocks(geometry)
            expected[granularity] = sum(rows for _, rows in blocks)
        for granularity, number in expected.items():
            if rows == number:
                return granularity
        raise ValueError(
            f"layout={self.layout!r} is given, and this {self.model_type} source has no gate there: {holder} has "
            f"{rows} rows instead of {' or '.join(f'{number} ({name})' for name, number in expected.items())}."
        )

    def _place(self, name: str, geometry: HeadGeometry) -> tuple[str, list[Change]]:
        module, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
        if layer is None:
            return f"{self.naming.outside.get(module, module)}.{kind}", []
        inside, changes = self._place_inside(layer[2], kind, geometry)
        return self.naming.layer.format(layer[1]) + inside, changes

    def _place_inside(self, module: str, kind: str, geometry: HeadGeometry) -> tuple[str, list[Change]]:
        """As `_place`, below a layer."""
        layout, part = get_layout(self.layout), module.removeprefix("self_attn.").removesuffix("_proj")
        if self.layout != "separate" and part in layout.pattern + layout.tail:
            together = "k" in layout.pattern
            whole = f"{self.naming.fused}.{kind}" if together else self._named_here("self_attn.q_proj", kind)
            return whole, [partial(take, self.layout, geometry, part)]
        if part == "g":
            widens = self.gate_columns and kind == "weight"
            return f"{self.gate_name}.{kind}", [partial(widen_gate, hidden_size=self.gate_columns)] if widens else []
        if module in self.naming.halves:
            whole, half = self.naming.halves[module]
            return f"{whole}.{kind}", [partial(take_half, half)]
        return self._named_here(module, kind), []

    def _named_here(self, module: str, kind: str) -> str:
        """The name below a layer of what is called `module.kind` in this package."""
        modules = self.naming.inside.get(module, (module,))
        names = self.naming.inside.get(f"{module}.{kind}") or [f"{name}.{kind}" for name in modules]
        return next((name for name in names if name in self.names), names[-1])


def take_half(half: int, tensor: torch.Tensor) -> torch.Tensor:
    """The upper (0) or lower (1) half of the rows."""
    return tensor.chunk(2)[half].clone()


def declared_layout(raw: Mapping[str, Any]) -> str | None:
    """The layout that Megatron's own flags in config.json name; ValueError when they name two."""
    layouts = [layout for flag, layout in DECLARED_LAYOUTS.items() if raw.get(flag)]
    if len(layouts) > 1:
        raise ValueError(f"{' and '.join(DECLARED_LAYOUTS)} are both true, and a layer has one gate.")
    return layouts[0] if layouts else None


def gated(record: Source, layout: str) -> GatedStateDict:
    """The record of a plain architecture whose checkpoint holds a gate, laid out as `layout`."""
    get_layout(layout)
    given = {entry.name: getattr(record, entry.name) for entry in fields_of(Source)}
    given["reads"] = record.reads | DECLARED_LAYOUTS.keys()
    return GatedStateDict(**given, layout=layout.replace("-", "_"))
