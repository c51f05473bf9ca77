"""What happens to the likelihood when gates are reset, first tokens are evicted, or numbers are rounded.

An intervention is a function that returns a context manager; inside it the model is another one, and afterwards it is
what it was, bit by bit. `measure_interventions` runs several on the same tokens.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..override import gate_override, neutral_scores
from .gates import GateScoresResult, gate_modules
from .metrics import as_inputs, token_kl, token_nll
from .probes import decoder_layers, decoder_of, in_eval_mode, named_arguments
from .visibility import sequence_layout


Intervention = Callable[[], contextlib.AbstractContextManager]


@dataclass(frozen=True)
class InterventionOutcome:
    """
    Likelihood under an intervention. nll: nats per token; nll_change: minus the unchanged model's; perplexity_ratio:
    exp(nll_change); kl: KL(unchanged || changed) in nats per token. tokens: predicted ones.
    """

    name: str
    tokens: int
    nll: float
    perplexity: float
    nll_change: float
    perplexity_ratio: float
    kl: float

    def to_dict(self) -> dict:
        return asdict(self)


@in_eval_mode
@torch.no_grad()
def measure_interventions(
    model: nn.Module, batches: Iterable, interventions: Mapping[str, Intervention]
) -> list[InterventionOutcome]:
    """
    Runs the unchanged model and each intervention on the same batches; the first outcome is "unchanged".

    batches: token ids [batch, seq], or mappings with `input_ids` and `attention_mask`. Two sets of logits are in
    memory at a time. Raises ValueError when there is no batch.
    """
    names = ["unchanged", *interventions]
    nll, kl, predicted, tokens = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0), 0, 0
    for batch in batches:
        inputs = as_inputs(batch, model.device)
        reference = model(**inputs, use_cache=False).logits
        loss, count = token_nll(reference, inputs)
        nll["unchanged"] += loss
        predicted += count
        for name, intervention in interventions.items():
            with intervention():
                logits = model(**inputs, use_cache=False).logits
            nll[name] += token_nll(logits, inputs)[0]
            divergence, count = token_kl(reference, logits, inputs)
            kl[name] += divergence
        tokens += count
    if not predicted:
        raise ValueError("There is no text to measure: no batch holds two real tokens in a row.")
    return [
        _outcome(name, predicted, nll[name] / predicted, nll["unchanged"] / predicted, kl[name] / tokens)
        for name in names
    ]


def _outcome(name: str, tokens: int, nll: float, unchanged: float, kl: float) -> InterventionOutcome:
    change = nll - unchanged
    return InterventionOutcome(name, tokens, nll, _exp(nll), change, _exp(change), kl)


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # keeps the report finite, as JSON wants it


def gate_interventions(
    model: nn.Module, scores: GateScoresResult, factors: Sequence[float] = (0.5, 2.0)
) -> dict[str, Intervention]:
    """
    Gates reset to where they change nothing (`neutral_scores`), at their mean per layer and head (from `GateScores`),
    and multiplied by constant factors.

    A gate that carries something makes the first two costly. The first is left out where there are no such scores.
    Raises ValueError for models that are not gated_llama, whose gates are fused into a forward and cannot be replaced.
    """
    if scores.model_type != "gated_llama":
        raise ValueError(f"Gates of a {scores.model_type!r} model are part of its forward and cannot be replaced.")
    means = {layer: torch.tensor(heads)[:, None] for layer, heads in zip(scores.layers, scores.per_head, strict=True)}
    named: dict[str, Intervention] = {"gates = mean": functools.partial(gate_override, model, means)}
    with contextlib.suppress(ValueError):  # a transplant that was merged in part
        neutral = neutral_scores(decoder_of(model).config)
        named = {"gates reset": functools.partial(gate_override, model, neutral), **named}
    return named | {f"gates x {factor:g}": functools.partial(scaled_gates, model, factor) for factor in factors}


@contextlib.contextmanager
def scaled_gates(model: nn.Module, factor: float) -> Iterator[None]:
    """Multiplies every gate score of a gated_llama model by `factor`, whatever the operation."""

    def scale(gate, args, output):
        gated, scores = output
        scaled = gated * factor if gate.multiplies else gated + (factor - 1) * scores
        return scaled.to(gated.dtype), scores * factor

    reader, modules = gate_modules(model)
    if reader.module != "attn_gate":
        raise ValueError("Only gates of gated_llama models can be scaled; others are fused into a forward.")
    with contextlib.ExitStack() as stack:
        for module in modules.values():
            stack.callback(module.attn_gate.register_forward_hook(scale).remove)
        yield


def streaming_interventions(model: nn.Module, window: int, kept: Sequence[int] = (0, 1, 4)) -> dict[str, Intervention]:
    """
    Attention to the last `window` keys and to the first 0, 1 and 4: whether generation survives without its sink.
    """
    return {
        f"window {window}, {first} first kept": functools.partial(evicted_keys, model, window, first) for first in kept
    }


@contextlib.contextmanager
def evicted_keys(model: nn.Module, window: int, kept: int) -> Iterator[None]:
    """
    Lets query i see the last `window` keys up to itself, and the first `kept` real tokens of its row.

    This is a cache from which older keys are evicted, in one forward pass: at every layer a key was itself computed
    from a window. Unlike StreamingLLM (Xiao et al., arXiv 2309.17453), which numbers positions inside the cache,
    tokens keep their positions in the text; distances inside the window are the same, those to kept tokens grow.

    Raises ValueError for layers with windows of their own, for attention implementations other than eager and sdpa,
    and during the pass for texts that fit into the window, since nothing would be evicted.
    """
    decoder = decoder_of(model)
    implementation = decoder.config._attn_implementation
    if window < 1 or kept < 0:
        raise ValueError(f"window is {window} and kept is {kept}; they must be at least 1 and 0.")
    if implementation not in ("eager", "sdpa"):
        raise ValueError(
            f"Evicting keys needs a mask tensor, which {implementation!r} does not take; load the model with "
            "attn_implementation='sdpa'."
        )
    own = set(getattr(decoder.config, "layer_types", None) or ())
    if own - {"full_attention"} or (not own and getattr(decoder.config, "sliding_window", None) is not None):
        raise ValueError("Evicting keys is defined for full attention only; this model has layers of another kind.")
    hook = functools.partial(_replace_mask, implementation=implementation, window=window, kept=kept)
    handle = decoder.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _replace_mask(decoder, args, kwargs, *, implementation: str, window: int, kept: int):
    given = named_arguments(decoder, args, kwargs)
    tokens = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
    batch, seq = tokens.shape[:2]
    if seq <= window:
        raise ValueError(f"The text has {seq} tokens and the window {window}: nothing would be evicted.")
    layout = sequence_layout(batch, seq, tokens.device, given.get("attention_mask"))
    index = torch.arange(seq, device=tokens.device)
    near = (index <= index[:, None]) & (index > index[:, None] - window)
    first = (index <= index[:, None]) & (layout.position < kept)[:, None]
    mask = (near | first) & layout.real[:, None]
    mask = (mask | torch.eye(seq, dtype=torch.bool, device=mask.device))[:, None]  # no row of padding is left empty
    if implementation == "eager":
        dtype = next(decoder.parameters()).dtype
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
    return (), given | {"attention_mask": mask}


def quantisation_interventions(model: nn.Module) -> dict[str, Intervention]:
    """
    Round-to-nearest W8A8 and 4-bit activations: how much outliers cost when numbers are rounded.

    Raises ValueError as `quantised` does.
    """
    roundable(model)
    return {
        "W8A8": functools.partial(quantised, model, weight_bits=8, activation_bits=8),
        "A4 per token": functools.partial(quantised, model, activation_bits=4, per_token=True),
    }


@contextlib.contextmanager
def quantised(
    model: nn.Module, *, weight_bits: int | None = None, activation_bits: int | None = None, per_token: bool = False
) -> Iterator[None]:
    """
    Rounds every linear layer of the decoder stack to nearest, symmetrically; the arithmetic stays in the model's
    dtype.

    x -> s round(x / s), s = max |x| / (2^(bits - 1) - 1): weights with one scale per output channel, inputs with one
    scale per tensor, or per token. Embeddings and the language-modelling head are left alone. Raises ValueError when
    the stack has no `nn.Linear`, or one whose weights are quantised already.
    """
    linears = roundable(model)

    def round_input(module, args):
        states = args[0]
        return (rounded(states, activation_bits, dims=-1 if per_token else None), *args[1:])

    with contextlib.ExitStack() as stack:
        for module in linears:
            if weight_bits is not None:
                stack.callback(setattr, module.weight, "data", module.weight.data)
                module.weight.data = rounded(module.weight.data, weight_bits, dims=-1)
            if activation_bits is not None:
                stack.callback(module.register_forward_pre_hook(round_input).remove)
        yield


def roundable(model: nn.Module) -> list[nn.Linear]:
    """The linear layers of the decoder stack; ValueError when there is none, or when some are quantised already."""
    linears = [module for module in decoder_layers(model).modules() if isinstance(module, nn.Linear)]
    if not linears or not all(is_plain(module.weight) for module in linears):
        raise ValueError("The decoder is quantised already, or has no nn.Linear that could be rounded.")
    return linears


def is_plain(weight: torch.Tensor) -> bool:
    """Whether a weight is an ordinary matrix of 16 bits or more, and not what a quantiser made of it."""
    return weight.is_floating_point() and weight.itemsize > 1 and not is_traceable_wrapper_subclass(weight)


def rounded(states: torch.Tensor, bits: int, dims: int | None) -> torch.Tensor:
    """Symmetric round-to-nearest with one scale per slice along `dims`, or one in all; computed in float32."""
    levels = 2 ** (bits - 1) - 1
    values = states.float()
    peak = values.abs().max() if dims is None else values.abs().amax(dim=dims, keepdim=True)
    scale = (peak / levels).clamp(min=torch.finfo(torch.float32).tiny)
    return (torch.round(values / scale) * scale).to(states.dtype)
