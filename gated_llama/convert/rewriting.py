"""
Rewritings of a gated decoder that keep its function: what lets another architecture's tensors compute it.

A tensor of the export is a `Recipe`, built when its turn to be written comes; steps compose recipes, layer by layer.
Everything is built in float32 and rounded once, to the dtype of the export. Products with powers of two are exact.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import sqrt

import torch

from ..configuration_gated import GatedLlamaConfig
from .layouts import HeadGeometry, get_layout, norm_to_zero_centred, repeat_headwise
from .targets import Target


# What makes a norm behind a linear map the identity (see `neutral_gain`). At 2^-18 the error is 6e-5 already, and a
# key bias of size 100 needs 2^-26; from there to 2^-40 only the rounding of float32 is left.
NEUTRAL_SCALE = 2.0**-30
SMALLEST_NEUTRAL_EPS = 1e-8

# From this mean on, a reader of a target with `small_gains` takes stored gains for plain ones.
MISREAD_MEAN = 0.5

PROJECTIONS = {part: f"self_attn.{part}_proj" for part in "qkvgo"}

# The linear maps that read the output of each norm, and nothing else does.
NORM_READERS = {
    "input_layernorm.weight": tuple(f"self_attn.{part}_proj.weight" for part in "qkvg"),
    "post_attention_layernorm.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
}


@dataclass(frozen=True)
class Recipe:
    """A tensor to write: its shape, and how to build it in float32."""

    shape: tuple[int, ...]
    build: Callable[[], torch.Tensor]

    def then(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Recipe":
        """This tensor after `change`, which keeps its shape."""
        return Recipe(self.shape, lambda: change(self.build()))

    def times(self, factor: float | torch.Tensor) -> "Recipe":
        return self.then(lambda tensor: tensor * factor)


Layer = dict[str, Recipe]


def filled(value: float, *shape: int) -> Recipe:
    """A tensor of one value."""
    return Recipe(shape, lambda: torch.full(shape, value))


def combined(combine: Callable[..., torch.Tensor], *parts: Recipe) -> Recipe:
    """What `combine` makes of the tensors; its shape is found without building them."""
    shape = combine(*(torch.empty(part.shape, device="meta") for part in parts)).shape
    return Recipe(tuple(shape), lambda: combine(*(part.build() for part in parts)))


def neutral_gain(eps: float) -> float:
    """
    The gain sqrt(eps) / s with which RMSNorm(s y) = y, s = NEUTRAL_SCALE.

    rsqrt(mean((s y)^2) + eps) = rsqrt(eps) in float32 as long as mean((s y)^2) is far below eps.

    Raises: ValueError when eps is too small for that.
    """
    if eps < SMALLEST_NEUTRAL_EPS:
        raise ValueError(
            f"rms_norm_eps={eps} is below {SMALLEST_NEUTRAL_EPS}: a norm that this model lacks cannot be made neutral."
        )
    return sqrt(eps) / NEUTRAL_SCALE


def storable_eps(eps: float, zero_centred: bool) -> float:
    """
    The value closest to eps, 0.8 % away at most, whose neutral gain (minus 1 if zero-centred) is exact in bfloat16.

    For this a norm of inputs with mean square v changes by eps / 250 v at most, next to nothing. A neutral gain that
    is rounded instead would scale the scores, or every branch, by up to 0.4 %.
    """
    shift = 1.0 if zero_centred else 0.0
    stored = torch.tensor(neutral_gain(eps) - shift).bfloat16().item()
    return ((stored + shift) * NEUTRAL_SCALE) ** 2


def gain_factors(gain: torch.Tensor) -> torch.Tensor:
    """
    Factors +-2^k with gain * factor in [0.5, 1), where gain * factor - 1 is exact in bfloat16; 1 where the gain is 0.

    A factor on a norm's channel and its inverse on that column of every reader leave the model as it is, bitwise.
    """
    mantissa, exponent = torch.frexp(gain.float())
    return torch.where(gain == 0, 1.0, torch.ldexp(mantissa.sign(), -exponent))


@dataclass(frozen=True)
class Rewriting:
    """How the tensors of a model of `config` become those of `target`, stored in `dtype`."""

    config: GatedLlamaConfig
    target: Target
    dtype: torch.dtype

    def rewrite(self, tensors: dict[str, Recipe]) -> dict[str, Recipe]:
        """The tensors of the export from those of the model, by full names."""
        rest = {name: recipe for name, recipe in tensors.items() if not name.startswith("model.layers.")}
        result = self._outside(rest)
        for index in range(self.config.num_hidden_layers):
            prefix = f"model.layers.{index}."
            own = {name.removeprefix(prefix): r for name, r in tensors.items() if name.startswith(prefix)}
            result |= {prefix + name: recipe for name, recipe in self.layer(own, index).items()}
        if self.target.identity_layer is not None:
            prefix = f"model.layers.{self.config.num_hidden_layers}."
            extra = self.target.identity_layer(self.config)
            result |= {prefix + name: filled(*tensor) for name, tensor in extra.items()}
        return result

    def layer(self, tensors: Layer, index: int) -> Layer:
        """One layer of the export, by names below `model.layers.N`."""
        layer = dict(tensors)
        if self.config.gate_head_shared:
            self._spread_gate(layer)
        self._settle_gate(layer, index in self.config.gated_layers)
        self._settle_biases(layer)
        for norm, readers in NORM_READERS.items():
            self._move_gain(layer, norm, readers)
        if self.target.qk_norm and not self.config.qk_norm:
            self._neutralise_qk(layer)
        if self.target.sandwich_norms:
            self._neutralise_sandwich(layer)
        self._store_gate(layer)
        self._store_norms(layer)
        return layer

    def _outside(self, tensors: Layer) -> Layer:
        """Embeddings, final norm and head."""
        rest = dict(tensors)
        if self.target.unties and "lm_head.weight" not in rest:
            rest["lm_head.weight"] = rest["model.embed_tokens.weight"]
        if "lm_head.weight" in rest:
            self._move_gain(rest, "model.norm.weight", ("lm_head.weight",))
        self._store_norms(rest)
        return rest

    def _spread_gate(self, layer: Layer):
        """A shared gate averages its logits over heads: the same is a gate with the averaged rows in each head."""
        heads, _ = self.config.gate_shape
        for name in [name for name in layer if name.startswith("self_attn.g_proj.")]:
            layer[name] = layer[name].then(
                lambda rows: rows.unflatten(0, (heads, -1)).mean(0).repeat(heads, *[1] * (rows.dim() - 1))
            )

    def _settle_gate(self, layer: Layer, gated: bool):
        """Layers without a gate get a zero one where the target has gates; where it has none, zero gates fold away."""
        output = "self_attn.o_proj.weight"
        if self.target.gate is None:
            if gated:
                layer[output] = layer[output].times(0.5)
                for name in [name for name in layer if name.startswith("self_attn.g_proj.")]:
                    del layer[name]
        elif not gated:
            heads, width = self.config.gate_shape
            layer["self_attn.g_proj.weight"] = filled(0.0, heads * width, self.config.hidden_size)
            layer[output] = layer[output].times(2.0)

    def _settle_biases(self, layer: Layer):
        """Biases where the target has them once one is there, zero where the model has none; no others."""
        for part, projection in PROJECTIONS.items():
            name = f"{projection}.bias"
            if part not in self.target.biases:
                layer.pop(name, None)
            elif self.target.has_bias(self.config) and f"{projection}.weight" in layer:
                layer.setdefault(name, filled(0.0, layer[f"{projection}.weight"].shape[0]))

    def _move_gain(self, layer: Layer, norm: str, readers: Iterable[str]):
        if not self.target.zero_centred or (self.dtype != torch.bfloat16 and not self.target.small_gains):
            return
        gain = layer[norm].build()
        stored = norm_to_zero_centred(gain)
        exact = torch.equal(stored.to(self.dtype).float(), stored)
        if exact and not (self.target.small_gains and stored.mean() >= MISREAD_MEAN):
            return
        # Without bfloat16 nothing is lost in storing; one factor for the whole norm brings its mean below 1.
        factors = gain_factors(gain if self.dtype == torch.bfloat16 else gain.mean()).expand_as(gain)
        layer[norm] = layer[norm].times(factors)
        for name in readers:
            if name in layer:
                layer[name] = layer[name].times(1 / factors)

    def _neutralise_qk(self, layer: Layer):
        gain = neutral_gain(self.config.rms_norm_eps)
        for part in "qk":
            for name in (f"{PROJECTIONS[part]}.weight", f"{PROJECTIONS[part]}.bias"):
                if name in layer:
                    layer[name] = layer[name].times(NEUTRAL_SCALE)
            layer[f"self_attn.{part}_norm.weight"] = filled(gain, self.config.head_dim)

    def _neutralise_sandwich(self, layer: Layer):
        """Norms behind the attention and the MLP; the pre-norm of the MLP takes another name."""
        layer["pre_mlp_layernorm.weight"] = layer.pop("post_attention_layernorm.weight")
        gain = neutral_gain(self.config.rms_norm_eps)
        for name, norm in (
            ("self_attn.o_proj.weight", "post_attention_layernorm.weight"),
            ("mlp.down_proj.weight", "post_mlp_layernorm.weight"),
        ):
            layer[name] = layer[name].times(NEUTRAL_SCALE)
            layer[norm] = filled(gain, self.config.hidden_size)

    def _store_gate(self, layer: Layer):
        storage = self.target.gate
        if storage is None:
            return
        width, head_dim = self.config.gate_shape[1], self.config.head_dim
        repeats = width == 1 and not storage.headwise
        geometry = HeadGeometry(
            self.config.num_attention_heads, self.config.num_key_value_heads, head_dim, head_dim if repeats else width
        )
        for kind in ("weight", "bias"):
            gate = layer.pop(f"self_attn.g_proj.{kind}", None)
            if gate is None:
                continue
            if repeats:
                gate = combined(lambda rows: repeat_headwise(rows, head_dim), gate)
            if storage.name is not None:
                layer[f"self_attn.{storage.name}.{kind}"] = gate
                continue
            query = f"self_attn.q_proj.{kind}"
            layer[query] = combined(fusing(storage.layout, geometry), layer[query], gate)

    def _store_norms(self, layer: Layer):
        if self.target.zero_centred:
            for name in [name for name in layer if name.endswith("norm.weight")]:
                layer[name] = layer[name].then(norm_to_zero_centred)


def fusing(layout: str, geometry: HeadGeometry) -> Callable[..., torch.Tensor]:
    """Joins a query and a gate projection in the row order `layout`."""
    return lambda query, gate: get_layout(layout).join({"q": query, "g": gate}, geometry)
