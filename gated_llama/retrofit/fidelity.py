"""How close a model is to the one it came from: KL and perplexity on texts that were not used to make it."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import nn

from ..diagnostics.corpus import with_first
from ..diagnostics.metrics import token_kl, token_nll
from ..diagnostics.probes import eval_mode


@dataclass(frozen=True)
class Fidelity:
    """
    A model against its source on the same text.

    kl: KL(source || model) in nats per token. perplexity, source_perplexity: per predicted token; perplexity_ratio is
    the first divided by the second. tokens: those that both models saw, without any token put before the text.
    """

    name: str
    tokens: int
    kl: float
    perplexity: float
    source_perplexity: float
    perplexity_ratio: float

    def to_dict(self) -> dict:
        return asdict(self)


@torch.no_grad()
def fidelity(
    model: nn.Module,
    source: nn.Module,
    rows: Iterable[torch.Tensor],
    *,
    source_first: int | None = None,
    model_first: int | None = None,
    name: str = "text",
) -> Fidelity:
    """
    Compares two models on rows of token ids [seq], each run as a batch of one.

    source_first, model_first: the token that a model reads before each row, for instance the beginning-of-sequence
    token that it was trained with; `None` for none. Both predict the same tokens of the row. Raises ValueError when
    there is no row of two tokens.
    """
    kl = nll = source_nll = tokens = predicted = 0
    with eval_mode(model), eval_mode(source):
        for row in rows:
            inputs = {"input_ids": row[None].to(source.device)}
            reference = logits_of(source, row, source_first)
            logits = logits_of(model, row, model_first)
            kl += token_kl(reference, logits, inputs)[0]
            loss, count = token_nll(logits, inputs)
            nll, source_nll = nll + loss, source_nll + token_nll(reference, inputs)[0]
            tokens, predicted = tokens + len(row), predicted + count
    if not predicted:
        raise ValueError(f"{name}: there is no row of two tokens to compare the models on.")
    ratio = math.exp((nll - source_nll) / predicted)
    perplexities = (math.exp(total / predicted) for total in (nll, source_nll))
    return Fidelity(name, tokens, kl / tokens, *perplexities, ratio)


def logits_of(model: nn.Module, row: torch.Tensor, first: int | None) -> torch.Tensor:
    """Logits [1, seq, vocabulary] at the tokens of `row`, after the token `first` if there is one."""
    return model(with_first(row[None], first).to(model.device), use_cache=False).logits[:, -len(row) :]
