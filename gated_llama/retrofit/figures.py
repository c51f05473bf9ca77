"""The picture of a retrofit: a sink and its massive activations, before and after."""

from itertools import chain, repeat
from typing import TYPE_CHECKING

from ..diagnostics.figures import STYLES, new_figure


if TYPE_CHECKING:
    from matplotlib.figure import Figure


def before_and_after(measures: dict[str, dict]) -> "Figure":
    """
    First-token attention and the largest activation by layer, a line for each model.

    measures: name -> what `deliver.sink_measures` returned. Raises ImportError without matplotlib.
    """
    figure, (attention, activation) = new_figure(9, 3, 1, 2)
    for (name, measured), style in zip(measures.items(), chain(STYLES, repeat({})), strict=False):
        options = {"label": name, "markersize": 3.5, "linewidth": 1.2, **style}
        attention.plot(measured["first_token_attention_per_layer"], **options)
        activation.plot(measured["max_activation_per_layer"], **options)
    attention.set_ylabel("mean attention on the first token")
    attention.set_ylim(bottom=0)
    activation.set_ylabel("max |hidden state| (log scale)")
    activation.set_yscale("log")
    for axes in (attention, activation):
        axes.set_xlabel("layer")
        axes.grid(alpha=0.3)
    attention.legend(frameon=False, fontsize=8)
    return figure
