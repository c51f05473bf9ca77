"""Whether a model's attention sink is a constant that a gate can take over: measured before anything is edited."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ..diagnostics import Activations, FirstTokenAttention, FirstTokenStates, SpikeWriter
from ..diagnostics.corpus import with_first
from ..diagnostics.probes import in_eval_mode


# Heads that give the first token less than this on average have no sink to take over.
SMALLEST_ATTENTION = 0.02


@dataclass(frozen=True)
class HeadSink:
    """
    The sink of one query head: its mean attention on the first token; |v_0| / median |v_j| of its key/value head; the
    relative spread of k_0 and v_0 between texts. obstacle: why no gate takes it over, None if one can.

    The spread is 0 in a decoder, whose first token sees nothing but itself (encoders are refused). The size of v_0 is
    no obstacle: the values' bias takes it away, and the output's bias gives it back.
    """

    layer: int
    head: int
    first_token_attention: float
    value_norm_ratio: float
    key_deviation: float
    value_deviation: float
    obstacle: str | None


@dataclass(frozen=True)
class SinkReport:
    """The sinks of all heads, by layer, and the MLP units that write the first token's massive activation."""

    first_token: str
    tokens: int
    mean: float
    max_activation: float
    heads: list[list[HeadSink]]
    spike_writers: list[SpikeWriter]

    def transplantable(self, layer: int) -> torch.Tensor:
        """[heads] bool."""
        return torch.tensor([head.obstacle is None for head in self.heads[layer]])

    @property
    def count(self) -> int:
        return sum(head.obstacle is None for layer in self.heads for head in layer)


@in_eval_mode
@torch.no_grad()
def measure_sink(model: nn.Module, rows: Iterable[torch.Tensor], first: int, first_token: str) -> SinkReport:
    """
    Measures the sink on the token `first`, put before each row of token ids [seq]; at least two rows.

    Raises ValueError for fewer rows, since constancy is a statement about several texts.
    """
    with FirstTokenAttention(model) as attention, FirstTokenStates(model) as states, Activations(model) as activations:
        for row in rows:
            model.base_model(with_first(row[None], first).to(model.device), use_cache=False)  # no logits are needed
    attended, constants, spikes = attention.result(), states.result(), activations.result()
    if constants.documents < 2:
        raise ValueError(
            f"{constants.documents} row of text does not show whether the sink is a constant: give more calibration "
            "text or a shorter --context."
        )
    return SinkReport(
        first_token=first_token,
        tokens=attended.tokens,
        mean=attended.mean,
        max_activation=spikes.max,
        heads=[_heads(index, attended, constants) for index in range(len(attended.layers))],
        spike_writers=spikes.spike_writers,
    )


def _heads(index: int, attended, constants) -> list[HeadSink]:
    weights = attended.per_head[index]
    group = len(weights) // len(constants.value_norm_ratio[index])
    heads = []
    for head, weight in enumerate(weights):
        ratio, key, value = (
            table[index][head // group]
            for table in (constants.value_norm_ratio, constants.key_deviation, constants.value_deviation)
        )
        heads.append(HeadSink(attended.layers[index], head, weight, ratio, key, value, _obstacle(weight)))
    return heads


def _obstacle(weight: float) -> str | None:
    return None if weight >= SMALLEST_ATTENTION else f"no sink: the first token gets {weight:.3f} of the attention"
