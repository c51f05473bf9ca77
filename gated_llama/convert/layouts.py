# Copyright 2026 The gated-llama authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""How others store the gate of attention: tensor <-> tensor, both ways, without a model or a file.

Weights are [rows, columns] as `nn.Linear` holds them and biases are [rows]; rows are outputs, and every function takes
both. Head h of a projection is `head_dim` rows, or a single row in a headwise gate. Several layouts have the same
shape, so nothing here infers one: callers name it, and `layout_contrasts` only says how plausible a name looks.

State dicts of Megatron, OLMo-core and others are converted as folders (see `state_dicts`). Single tensors are taken
apart with the same functions: Megatron's linear_qkv as "megatron" or "megatron_tail" (then `merge_elementwise` where a
headwise gate was stored with its row repeated), narrow gates with `widen_gate`, and a gate that multiplies by
2 sigmoid(u) with `fold_scale(o_proj, 2)`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HeadGeometry:
    """Sizes that fix the rows of a layout; `gate_width` is `head_dim` if the gate is elementwise, 1 if headwise."""

    heads: int
    kv_heads: int
    head_dim: int
    gate_width: int

    def rows_per_head(self, part: str) -> int:
        """Rows of one head of the projection `part`: "q", "k", "v" or "g"."""
        return self.gate_width if part == "g" else self.head_dim

    def rows(self, part: str) -> int:
        """Rows of the whole projection `part`."""
        return self.rows_per_head(part) * (self.kv_heads if part in "kv" else self.heads)


@dataclass(frozen=True)
class FusedLayout:
    """
    The row order of one stored tensor that holds one or several projections.

    The tensor is a sequence of units, one for each query head ("head"), each key/value head with the query heads that
    read it ("group"), or a single one ("all"). A unit lists the projections of `pattern` one after the other, each
    with its heads in ascending order; the projections of `tail` follow after the last unit, whole.

    Args:
        unit: "head", "group" or "all".
        pattern, tail: letters among q (query), k (key), v (value) and g (gate).
        source: the code that stores tensors this way.
    """

    unit: str
    pattern: str
    tail: str = ""
    source: str = ""

    def blocks(self, geometry: HeadGeometry) -> list[tuple[str, int]]:
        """(projection, rows) of each run of rows, from the first row to the last."""
        units = {"head": geometry.heads, "group": geometry.kv_heads, "all": 1}[self.unit]
        unit = [(part, geometry.rows(part) // units) for part in self.pattern]
        return unit * units + [(part, geometry.rows(part)) for part in self.tail]

    def split(self, tensor: torch.Tensor, geometry: HeadGeometry) -> dict[str, torch.Tensor]:
        """
        The projections that `tensor` holds, each with its heads in ascending order and memory of its own.

        Returns: a tensor for each letter of the layout.
        Raises: ValueError when the number of rows is not this layout's.
        """
        blocks = self.blocks(geometry)
        expected = sum(rows for _, rows in blocks)
        if tensor.shape[0] != expected:
            raise ValueError(f"The tensor has {tensor.shape[0]} rows; {self._describe(geometry)} needs {expected}.")
        pieces = tensor.split([rows for _, rows in blocks])
        return {
            part: torch.cat([piece for piece, (name, _) in zip(pieces, blocks, strict=True) if name == part])
            for part in self.pattern + self.tail
        }

    def join(self, parts: Mapping[str, torch.Tensor], geometry: HeadGeometry) -> torch.Tensor:
        """
        The stored tensor that holds `parts`: the inverse of `split`.

        Raises: ValueError when a part is absent, superfluous, or has another number of rows.
        """
        found = {part: tensor.shape[0] for part, tensor in parts.items()}
        expected = {part: geometry.rows(part) for part in self.pattern + self.tail}
        if found != expected:
            raise ValueError(f"The projections have the rows {found}; {self._describe(geometry)} needs {expected}.")
        blocks = self.blocks(geometry)
        pieces = {part: iter(parts[part].split([r for name, r in blocks if name == part])) for part in expected}
        return torch.cat([next(pieces[part]) for part, _ in blocks])

    def _describe(self, geometry: HeadGeometry) -> str:
        order = f"[{' '.join(self.pattern)}] per {self.unit}" + (f", then {self.tail}" if self.tail else "")
        return (
            f"the layout {order} with {geometry.heads} query and {geometry.kv_heads} key/value heads of "
            f"{geometry.head_dim} and {geometry.gate_width} gate rows a head"
        )


LAYOUTS = {
    "separate": FusedLayout("all", "q", source="AFMoE and Muse (gate_proj), Step-3.5 (g_proj), OLMo-core (w_g)"),
    "per_kv_group": FusedLayout("group", "qg", source="github.com/qiuzh20/gated_attention, modeling_qwen3.py"),
    "per_head": FusedLayout("head", "qg", source="transformers, Qwen3NextAttention and Qwen3_5Attention"),
    "megatron": FusedLayout("group", "qgkv", source="Megatron-LM, attention_output_gate (linear_qkv)"),
    "megatron_tail": FusedLayout("group", "qkv", tail="g", source="Megatron-LM, head_wise_attn_gate (linear_qkv)"),
    "halves": FusedLayout("all", "qg", source="one matrix cut in two, as gates are often added to own code"),
}

# Row orders of one and the same shape: taking one for another loads without an error and computes nonsense.
CONFUSABLE = tuple(name for name, layout in LAYOUTS.items() if layout.pattern == "qg")


def get_layout(name: str) -> FusedLayout:
    """The layout of that name; ValueError with the known names otherwise. Hyphens are read as underscores."""
    layout = LAYOUTS.get(name.replace("-", "_"))
    if layout is None:
        raise ValueError(f"Unknown gate layout {name!r}; use one of {', '.join(LAYOUTS)}.")
    return layout


def repeat_headwise(gate: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The elementwise gate [heads * head_dim, ...] equal to the headwise `gate` [heads, ...]."""
    return gate.repeat_interleave(head_dim, dim=0)


def merge_elementwise(gate: torch.Tensor, head_dim: int) -> torch.Tensor:
    """
    The headwise gate [heads, ...] equal to the elementwise `gate` [heads * head_dim, ...].

    Raises: ValueError when the rows of a head differ, because no headwise gate computes the same then.
    """
    heads = gate.unflatten(0, (-1, head_dim))
    unequal = (heads != heads[:, :1]).flatten(1).any(dim=1)
    if unequal.any():
        raise ValueError(
            f"The gate's rows differ within head {int(unequal.nonzero()[0])} and {int(unequal.sum()) - 1} more: "
            "it is truly elementwise and has no headwise form."
        )
    return heads[:, 0].clone()


def widen_gate(gate: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """
    A gate weight that reads all of x from one that reads its first coordinates: zero columns are appended.

    Shapes: [rows, width] -> [rows, hidden_size]. Source: modded-nanogpt, whose `attn_gate` reads x[..., :12].
    """
    if gate.shape[1] > hidden_size:
        raise ValueError(f"The gate reads {gate.shape[1]} coordinates of a hidden state that has {hidden_size}.")
    return torch.nn.functional.pad(gate, (0, hidden_size - gate.shape[1]))


def norm_from_zero_centred(weight: torch.Tensor) -> torch.Tensor:
    """
    The gain 1 + w of a norm stored as w, in fp32 as Qwen3-Next, Qwen3.5 and Step compute it.

    Exact for w in bf16 or fp16 of at least 2^-16 in size; the result needs fp32, since bf16 resolves gains near 1 to
    0.4 % only.
    """
    return weight.float() + 1.0


def norm_to_zero_centred(weight: torch.Tensor) -> torch.Tensor:
    """The form w = gain - 1 of a norm's gain, in fp32; exact for gains in [0.5, 2]."""
    return weight.float() - 1.0


def fold_scale(weight: torch.Tensor, scale: float) -> torch.Tensor:
    """
    `scale * weight`, bitwise reversible: a gate `scale * sigmoid` becomes a sigmoid before an o_proj scaled so.

    Raises: ValueError when scale is not a power of two (the product would be rounded), or when the dtype of the weight
    cannot hold the product.
    """
    mantissa, _ = torch.frexp(torch.tensor(float(scale)))
    if mantissa.item() != 0.5:
        raise ValueError(
            f"gate_scale={scale} is not a positive power of two, such as 0.5, 2 or 4: others would round the weight "
            "that it is folded into."
        )
    folded = weight * scale
    if not torch.equal(folded / scale, weight):
        raise ValueError(f"{weight.dtype} cannot hold the weight times {scale}: convert in float32 or bfloat16.")
    return folded


def layout_contrasts(weight: torch.Tensor, geometry: HeadGeometry) -> dict[str, float]:
    """
    How far query rows and gate rows differ in size under each layout that would have this shape.

    The contrast is mean(log |q rows|) - mean(log |g rows|) with |row| the Euclidean norm: queries and gates of a
    trained model are rarely of one size, so the true row order shows the largest magnitude and a wrong one mixes both
    towards 0. Average it over layers before reading it.

    Args:
        weight: a fused query/gate weight [rows, hidden].
    Returns: the signed contrast for each name of `CONFUSABLE`.
    """
    norms = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)  # no copy of the weight in float32
    sizes = norms.clamp_min(torch.finfo(torch.float32).tiny).log()
    parts = {name: LAYOUTS[name].split(sizes, geometry) for name in CONFUSABLE}
    return {name: (rows["q"].mean() - rows["g"].mean()).item() for name, rows in parts.items()}


def implausible_layout(declared: str, contrasts: Iterable[Mapping[str, float]], least: float = 0.05) -> str | None:
    """
    The layout that the rows point at when it is not the declared one, from `layout_contrasts` of each layer.

    A layout is named when its mean contrast is at least `least` (a size ratio of about 1.05; published measurements
    range from 1.08 to 1.34) and at least 1.5 times the declared one's. `None` says only that nothing speaks against
    the declaration: it is what an untrained model gives.
    """
    layers = list(contrasts)
    if not layers or declared not in CONFUSABLE:
        return None
    means = {name: abs(sum(layer[name] for layer in layers)) / len(layers) for name in CONFUSABLE}
    best = max(means, key=means.get)
    return best if means[best] >= max(least, 1.5 * means[declared]) and best != declared else None
