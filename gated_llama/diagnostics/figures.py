"""Pictures of a diagnosis: each function takes reports and returns a matplotlib figure, readable in grey."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .report import DiagnosisReport


# Line style and marker tell series apart where colours print alike.
STYLES = (
    {"color": "black", "linestyle": "-", "marker": "o"},
    {"color": "tab:orange", "linestyle": "--", "marker": "s"},
)
HATCHES = ("", "///", "...", "xxx")
GREYS = ("0.25", "0.75", "0.5", "0.9")


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1):
    """A figure of its own, without pyplot's global state, and its axes in a list."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError("Pictures need matplotlib: pip install 'gated-llama[plot]'.") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def both(report: "DiagnosisReport") -> list["DiagnosisReport"]:
    """The report, and that of the model that it was compared with."""
    return [report] if report.against is None else [report, report.against]


def label(report: "DiagnosisReport") -> str:
    """The model's name without its folder."""
    return report.model["name"].rstrip("/").rsplit("/", 1)[-1]


def lines(axes, reports: list, values: Callable[[Any], tuple[list, list]], xlabel: str, ylabel: str) -> None:
    for report, style in zip(reports, STYLES, strict=False):
        axes.plot(*values(report), label=label(report), markersize=3.5, linewidth=1.2, **style)
    axes.set_xlabel(xlabel)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)


def first_token_attention(report: "DiagnosisReport") -> "Figure":
    """F-Attn by layer, a line for each model."""
    figure, (axes,) = new_figure(6, 3)
    section = "first_token_attention"
    lines(
        axes,
        both(report),
        lambda r: (getattr(r, section)["layers"], getattr(r, section)["per_layer"]),
        "layer",
        "mean attention on the first token",
    )
    axes.set_ylim(0, 1)
    return figure


def max_activation(report: "DiagnosisReport") -> "Figure":
    """The largest |h| of each layer's output, on a logarithmic axis, a line for each model."""
    figure, (axes,) = new_figure(6, 3)
    lines(
        axes,
        both(report),
        lambda r: (r.max_activation["layers"], r.max_activation["per_layer"]),
        "layer",
        "max |hidden state| (log scale)",
    )
    axes.set_yscale("log")
    return figure


def attention_maps(report: "DiagnosisReport") -> "Figure":
    """Mean over heads for a few layers; the square root of the weight, so that small weights are seen."""
    maps = report.maps
    figure, panels = new_figure(2.6 * len(maps), 2.9, 1, len(maps))
    for axes, (layer, weights) in zip(panels, maps.items(), strict=True):
        image = axes.imshow(weights.mean(dim=0).sqrt().numpy(), cmap="Greys", vmin=0, vmax=1, interpolation="none")
        axes.set_title(f"layer {layer}", fontsize=9)
        axes.set_xlabel("key position")
    panels[0].set_ylabel("query position")
    figure.colorbar(image, ax=panels, label="sqrt(attention), mean of heads", shrink=0.8)
    return figure


def gate_means(report: "DiagnosisReport") -> "Figure":
    """Mean gate score of each layer (rows) and head (columns)."""
    import numpy

    gates = report.gate_scores
    most = max(map(len, gates["per_head"]))
    figure, (axes,) = new_figure(max(3.2, 1.8 + 0.22 * most), max(2.4, 1.2 + 0.13 * len(gates["layers"])))
    image = axes.imshow(
        numpy.array([heads + [numpy.nan] * (most - len(heads)) for heads in gates["per_head"]]),
        aspect="auto",
        cmap="Greys",
        vmin=gates["low"],
        vmax=gates["high"],
        interpolation="none",
    )
    axes.set_yticks(range(len(gates["layers"])), gates["layers"], fontsize=6)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="mean gate score")
    return figure


def gate_histograms(report: "DiagnosisReport") -> "Figure":
    """One row per layer; the shade is the share of the layer's scores in the bin, relative to its fullest bin."""
    import numpy

    gates = report.gate_scores
    counts = numpy.array(gates["histogram"], dtype=float)
    bins = 50 if counts.shape[1] % 50 == 0 else counts.shape[1]
    counts = counts.reshape(len(counts), bins, -1).sum(axis=-1)
    figure, (overall, by_layer) = new_figure(8, 3.2, 1, 2)
    edges = numpy.linspace(gates["low"], gates["high"], bins + 1)
    overall.stairs(counts.sum(axis=0) / counts.sum(), edges, fill=True, color="0.4")
    overall.set_xlabel("gate score")
    overall.set_ylabel("share of scores")
    shares = counts / counts.max(axis=1, keepdims=True)
    extent = (gates["low"], gates["high"], len(shares) - 0.5, -0.5)
    by_layer.imshow(shares, aspect="auto", cmap="Greys", extent=extent, interpolation="none")
    by_layer.set_yticks(range(len(gates["layers"])), gates["layers"], fontsize=5)
    by_layer.set_xlabel("gate score")
    by_layer.set_ylabel("layer")
    return figure


def sparsity(report: "DiagnosisReport") -> "Figure":
    """Mean over the gated layers, if any, of S_tau before and after the gate, and of the controls that only scale."""
    section = report.sparsity
    shown = section["gated_layers"] or section["layers"]
    series = {
        "raw": [shares for layer, shares in zip(section["layers"], section["raw"], strict=True) if layer in shown],
        "gated": section["gated"],
        "times mean score": section["mean_scaled"],
        "norm-matched": section["norm_matched"],
    }
    series = {name: shares for name, shares in series.items() if shares is not None}
    thresholds = section["thresholds"]
    figure, (axes,) = new_figure(5.5, 3)
    for index, (name, shares) in enumerate(series.items()):
        means = [sum(layer[t] for layer in shares) / len(shares) for t in range(len(thresholds))]
        places = [t + (index - (len(series) - 1) / 2) * 0.2 for t in range(len(thresholds))]
        axes.bar(places, means, 0.18, label=name, color=GREYS[index], hatch=HATCHES[index], edgecolor="black")
    axes.set_xticks(range(len(thresholds)), [f"|y| < {tau:g}" for tau in thresholds])
    axes.set_ylabel("share of the SDPA output")
    axes.legend(frameon=False, fontsize=8)
    return figure


def figures(report: "DiagnosisReport") -> dict[str, "Figure"]:
    """Every picture that applies, by file name without suffix."""
    drawn = {
        "first_token_attention": first_token_attention(report),
        "max_activation": max_activation(report),
        "attention_maps": attention_maps(report),
        "sparsity": sparsity(report),
    }
    if report.against is not None:
        drawn["attention_maps_against"] = attention_maps(report.against)
        drawn["sparsity_against"] = sparsity(report.against)
    for suffix, each in zip(("", "_against"), both(report), strict=False):
        if each.gate_scores is not None:
            drawn[f"gate_histograms{suffix}"] = gate_histograms(each)
            drawn[f"gate_means{suffix}"] = gate_means(each)
    return drawn
