"""Holds the gates of a loaded model at chosen scores, for debugging and for asking what the gates carry."""

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .configuration_gated import GatedLlamaConfig


GATE_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.attn_gate$")

OTHER_THREAD = "Another thread holds the gates of this model: give each thread a copy.deepcopy of it, or take turns."

# The lock of a model, under its first gate.
_held: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


@contextmanager
def gate_override(
    model: nn.Module, value: float | torch.Tensor | Mapping[int, float | torch.Tensor]
) -> Iterator[None]:
    """
    Replaces the scores of a model's gates by `value` inside the context, whatever their logits and activation.

    A multiplicative gate then writes `y * value` and an additive one `y + value`, with y the gated tensor: 1.0 turns
    multiplicative gates off, 0.0 additive ones; after a conversion, `neutral_scores` does. Scores recorded with
    `output_gate_scores=True` are the replaced ones.

    Args:
        model: a gated_llama model, also one whose code comes from the Hub, or a wrapper around one (PEFT, DDP).
        value: a number; a tensor that broadcasts to the gated tensor [batch, seq, heads, width], for instance
            [heads, 1]; or a mapping from layer index to either, which leaves the other layers as they are.

    Contexts nest, the inner one has the last word on the layers that it names, and leaving one restores what was there
    before, also after an exception. They belong to one model and one thread: meanwhile, another thread can neither
    enter one on this model nor run it.

    Raises:
        ValueError: the model has no gates, a layer that is named has none, a value does not fit the gated tensor, or
            another thread is inside such a context.
    """
    gates, config = _gates_of(model)
    values = dict(value) if isinstance(value, Mapping) else dict.fromkeys(gates, value)
    if ungated := sorted(set(values) - set(gates), key=str):
        raise ValueError(f"Layers {ungated} have no gate; the gated layers are {sorted(gates)}.")
    activations = {layer: _constant(_fitting(score, config)) for layer, score in values.items()}
    lock = _held.setdefault(gates[min(gates)], threading.RLock())
    if not lock.acquire(blocking=False):
        raise ValueError(OTHER_THREAD)
    previous = {layer: gates[layer].activation for layer in activations}
    try:
        for layer, activation in activations.items():
            gates[layer].activation = activation
        yield
    finally:
        for layer, activation in previous.items():
            gates[layer].activation = activation
        lock.release()


def neutral_scores(config: GatedLlamaConfig) -> float | dict[int, torch.Tensor]:
    """
    The scores with which gates change nothing, for `gate_override`: a number, or [heads, 1] by layer.

    1 for multiplicative gates and 0 for additive ones. Where a conversion folded the inverse of a gate's first score
    into a projection (`config.gate_retrofit`), it is that score: 1/2 at the identity with sigmoid, and for the heads
    that a transplant left there. Raises ValueError for a transplant that was merged in part: there are none.
    """
    if config.gate_operation == "add":
        return 0.0
    record = config.gate_retrofit or {}
    if "fold" in record and record["fold"] is None:
        raise ValueError(
            f"No scores leave a model as it is into which a gate adapter of another fold is merged at strength "
            f"{record.get('strength')}: set the strength to 0 or 1."
        )
    neutral = 1 / next(iter((record.get("fold") or {}).values()), 1.0)
    if not (left := record.get("identity_heads")):
        return neutral
    scores = {int(layer): torch.full((config.num_attention_heads, 1), neutral) for layer in left}
    for layer, heads in left.items():
        scores[int(layer)][heads] = 0.5
    return {layer: scores.get(layer, torch.tensor(neutral)) for layer in range(config.num_hidden_layers)}


def _gates_of(model: nn.Module) -> tuple[dict[int, nn.Module], GatedLlamaConfig]:
    """The model's gates by layer index, and its config; recognised by name, since Hub code has classes of its own."""
    configs = (getattr(module, "config", None) for module in model.modules())
    config = next((c for c in configs if getattr(c, "model_type", None) == GatedLlamaConfig.model_type), None)
    if config is None:
        raise ValueError(f"{type(model).__name__} is not a {GatedLlamaConfig.model_type} model: it has no gates.")
    named = ((GATE_NAME.search(name), module) for name, module in model.named_modules())
    gates = {int(match[1]): module for match, module in named if match}
    if not gates:
        raise ValueError(f"This {type(model).__name__} has no gates: its gate_position is {config.gate_position!r}.")
    return gates, config


def _fitting(value: float | torch.Tensor, config: GatedLlamaConfig) -> torch.Tensor:
    """`value` as a tensor, if it broadcasts to the heads and the width of the gated tensor."""
    try:
        score = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"A gate score is a number or a tensor, not {value!r}.") from error
    heads, width = config.gate_shape[0], config.hidden_size
    if config.gate_position != "dense_output":
        width = config.head_dim
    sizes = (1, 1, *score.shape)[-2:]
    if score.ndim > 4 or sizes[0] not in (1, heads) or sizes[1] not in (1, width):
        raise ValueError(
            f"Scores of shape {tuple(score.shape)} do not broadcast to [batch, seq, heads={heads}, width={width}]."
        )
    return score


def _constant(score: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """An activation that is `score` everywhere, for the thread that makes it."""
    owner = threading.get_ident()

    def activation(logits: torch.Tensor) -> torch.Tensor:
        # Compiled code cannot ask, and activation checkpointing runs a forward again in the threads of autograd.
        if not torch.compiler.is_compiling() and threading.get_ident() != owner and not _in_backward():
            raise ValueError(OTHER_THREAD)
        fixed = score.to(logits.device, logits.dtype)
        return fixed.expand(torch.broadcast_shapes(fixed.shape, logits.shape))

    return activation


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
