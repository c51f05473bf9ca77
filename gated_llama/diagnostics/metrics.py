"""Likelihood of held-out tokens and divergence between two sets of logits, in nats per token."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from .probes import in_eval_mode


SLICE = 256  # positions whose logits are in float32 at a time


def as_inputs(batch: torch.Tensor | Mapping, device) -> dict[str, torch.Tensor]:
    """
    `input_ids` and, if given, `attention_mask` of a batch, on `device`.

    Raises ValueError for anything but ids [batch, seq] of at least two tokens.
    """
    batch = {"input_ids": batch} if isinstance(batch, torch.Tensor) else batch
    inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask") if batch.get(name) is not None}
    if "input_ids" not in inputs or inputs["input_ids"].ndim != 2:
        raise ValueError("A batch is token ids [batch, seq], or a mapping with such `input_ids`.")
    if inputs["input_ids"].shape[1] < 2:
        raise ValueError(f"A text of {inputs['input_ids'].shape[1]} tokens predicts nothing; at least two are needed.")
    return inputs


def real_tokens(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[batch, seq] bool: the tokens that are not padding."""
    mask = inputs.get("attention_mask")
    return torch.ones_like(inputs["input_ids"], dtype=torch.bool) if mask is None else mask.bool()


def token_nll(logits: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> tuple[float, int]:
    """Sum of -log p(next token) in nats, and the number of predicted tokens; both tokens of a pair must be real."""
    real = real_tokens(inputs)
    predicted = real[:, :-1] & real[:, 1:]
    total = 0.0
    for part in _slices(logits.shape[1] - 1):
        losses = nn.functional.cross_entropy(
            logits[:, :-1][:, part].float().transpose(1, 2), inputs["input_ids"][:, 1:][:, part], reduction="none"
        )
        total += losses[predicted[:, part]].sum(dtype=torch.float64).item()
    return total, int(predicted.sum())


def token_kl(reference: torch.Tensor, other: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> tuple[float, int]:
    """
    Sum over real tokens of KL(reference || other) in nats, and the number of tokens. Logits [batch, seq, vocabulary].
    """
    real = real_tokens(inputs)
    total = 0.0
    for part in _slices(reference.shape[1]):
        log_p, log_q = (logits[:, part][real[:, part]].float().log_softmax(-1) for logits in (reference, other))
        total += (log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64).item()
    return total, int(real.sum())


@in_eval_mode
@torch.no_grad()
def mean_nll(model: nn.Module, batches: Iterable) -> tuple[float, int]:
    """
    Mean negative log-likelihood in nats per predicted token over `batches`, and the number of tokens; exp is
    perplexity.

    Raises ValueError when there is no batch.
    """
    total = count = 0
    for batch in batches:
        inputs = as_inputs(batch, model.device)
        nll, tokens = token_nll(model(**inputs, use_cache=False).logits, inputs)
        total, count = total + nll, count + tokens
    if not count:
        raise ValueError("There is no text to measure: no batch holds two real tokens in a row.")
    return total / count, count


def _slices(length: int) -> Iterator[slice]:
    return (slice(start, start + SLICE) for start in range(0, length, SLICE))
