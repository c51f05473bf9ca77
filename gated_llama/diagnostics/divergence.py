"""
Where two models part: outputs of the same token ids, compared place by place.

Places in a decoder are named after its weights: `"embed_tokens"`, the integers 0..L-1 for the outputs of
`model.layers.N`, `"norm"` for the final norm and `"logits"`. The last layer's own output is among them (the library's
`hidden_states[-1]` is taken after the norm), so a wrong last layer and a wrong final norm are told apart.
"""

import math
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch


Place = int | str


@dataclass(frozen=True)
class LayerDifference:
    """How far two models are apart at one place; `max_abs_difference` is infinite when a value is not finite."""

    place: Place
    max_abs_difference: float
    bitwise: bool


def layer_divergence(
    states_a: Mapping[Place, torch.Tensor], states_b: Mapping[Place, torch.Tensor]
) -> list[LayerDifference]:
    """
    Compares what `recorded_states` kept of two models, place by place in order.

    Raises:
        ValueError: the models differ in their places or in a shape, so that there is nothing to compare.
    """
    if list(states_a) != list(states_b):
        raise ValueError(f"The models have {len(states_a)} and {len(states_b)} layers, norms and heads to compare.")
    return [_difference(place, states_a[place], states_b[place]) for place in states_a]


def _difference(place: Place, a: torch.Tensor, b: torch.Tensor) -> LayerDifference:
    if a.shape != b.shape:
        raise ValueError(f"At {place_name(place)} the models have shapes {list(a.shape)} and {list(b.shape)}.")
    bitwise = a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    largest = (a.double() - b.double()).abs().max().item()
    return LayerDifference(place, largest if math.isfinite(largest) else math.inf, bitwise)


def first_divergence(differences: list[LayerDifference]) -> Place | None:
    """The first place that is not bitwise equal, or None."""
    return next((difference.place for difference in differences if not difference.bitwise), None)


def place_name(place: Place) -> str:
    """The weights that a place is named after: `"model.layers.3"` for 3."""
    return f"model.layers.{place}" if isinstance(place, int) else place


@contextmanager
def recorded_states(model: torch.nn.Module):
    """
    Records the outputs of the embeddings, of each decoder layer and of the final norm during forwards in the block.

    Yields a dict from place to tensor [batch, seq, hidden] on the CPU, in the order of computation; the latest forward
    counts. Raises ValueError for a model whose decoder has no `layers` and `norm`.
    """
    decoder = model.get_decoder()
    if not (hasattr(decoder, "layers") and hasattr(decoder, "norm")):
        raise ValueError(f"{type(model).__name__} has no decoder with `layers` and `norm` whose outputs can be kept.")
    places = {"embed_tokens": model.get_input_embeddings(), **dict(enumerate(decoder.layers)), "norm": decoder.norm}
    states: dict[Place, torch.Tensor] = {}

    def keep(place: Place):
        def hook(module, inputs, output):
            states[place] = (output[0] if isinstance(output, tuple) else output).detach().cpu()

        return hook

    handles = [module.register_forward_hook(keep(place)) for place, module in places.items()]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
