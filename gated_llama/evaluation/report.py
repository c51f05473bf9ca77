"""A comparison as Markdown, JSON and a picture."""

import json
import re
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..convert.tensor_files import to_json
from .compare import Comparison
from .pairing import ENOUGH, Row
from .statistics import LEVEL, RESAMPLES


FORMAT_VERSION = 1
PACKAGES = ("gated-llama", "lm_eval", "transformers", "torch", "datasets")


def to_dict(comparison: Comparison) -> dict[str, Any]:
    """Everything but the samples; `rows` holds the numbers, `results` the harness's own."""
    rows = [asdict(row) | {"clear": row.clear} for row in comparison.rows]
    results = {
        name: {key: value for key, value in result.items() if key != "samples"}
        for name, result in comparison.results.items()
    }
    fields = asdict(comparison) | {"rows": rows, "results": results}
    return {"format_version": FORMAT_VERSION, "versions": {name: version(name) for name in PACKAGES}, **fields}


def to_markdown(comparisons: list[Comparison]) -> str:
    """One section for each policy for the beginning of requests."""
    first = comparisons[0]
    parts = [f"# {_short(first.model)} against {_short(first.base)}"]
    parts += [_section(comparison) for comparison in comparisons]
    noise = " Noise: the base against itself." if any(comparison.noise for comparison in comparisons) else ""
    parts.append(
        f"Intervals: {LEVEL:.0%}, bootstrap over documents ({RESAMPLES:,} resamples) of the paired difference. p: "
        f"exact McNemar test on the documents that the two answer differently.{noise} Clear: the interval leaves zero "
        f"out, the difference passes the noise, and there are {ENOUGH} documents or more. Perplexities differ in "
        "nats, the logarithm of their ratio. Arrows point where better is."
    )
    parts.append(", ".join(f"{name} {version(name)}" for name in PACKAGES) + ".")
    return "\n\n".join(parts) + "\n"


def _section(comparison: Comparison) -> str:
    beginning = {
        "auto": "what tokenizer and harness do",
        "none": "no beginning-of-sequence token",
        "always": f"one {comparison.bos_token} before every request",
    }.get(comparison.bos, f"one {comparison.bos_token} before every request")
    lines = [
        f"## Beginning of requests: {comparison.bos}",
        "",
        f"{beginning[0].upper()}{beginning[1:]}. {comparison.requests:,} requests with the same token ids for both; "
        f"{comparison.dtype}, batch size {comparison.batch_size}, context {comparison.context_length:,} tokens.",
        "",
    ]
    if comparison.identical:
        lines += ["**All answers of the two models are identical, to the last digit.**", ""]
    if comparison.noise:
        lines += [f"Noise: the base with {comparison.noise}.", ""]
    lines += [
        "| task | metric | n | base | model | difference | p | noise | clear |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    lines += [_line(row) for row in comparison.rows]
    lines += _measurements(comparison)
    if comparison.left_out:
        lines += ["", "Not paired: " + ", ".join(f"{task} {metric}" for task, metric in comparison.left_out) + "."]
    return "\n".join(lines)


def _line(row: Row) -> str:
    values = row.values
    metric = (
        row.metric + (f" ({row.filter})" if row.filter != "none" else "") + (" ↑" if row.higher_is_better else " ↓")
    )
    p = "" if values.p_value is None else f"{values.p_value:.3f}"
    noise = "" if row.noise is None else _signed(row.noise.difference)
    bounds = "" if values.documents == 1 else f" [{_signed(values.low)}, {_signed(values.high)}]"
    difference = f"{_signed(values.difference)}{bounds} {row.unit}".rstrip()
    cells = (row.name, metric, values.documents, _number(values.base), _number(values.model), difference, p, noise)
    return "| " + " | ".join(map(str, cells)) + f" | {'yes' if row.clear else 'no'} |"


def _measurements(comparison: Comparison) -> list[str]:
    """What probes found on the scored tokens: a table, or nothing when none ran."""
    lines, cached = [], []
    for label in ("base", "model"):
        for task, found in comparison.results[label]["config"].get("probes", {}).items():
            if found["cached"]:
                cached.append(f"{task} ({label}) {found['cached']:,}")
            gates, sink = found.get("gate_scores"), found.get("first_token_attention")
            cells = [task, label, f"{found['tokens']:,}"]
            cells += [f"{gates[key]:.3f}" for key in ("mean", "share_below", "share_above")] if gates else [""] * 3
            cells += [f"{sink['mean']:.4f}", f"{found['max_activation']['m_act']:.4g}"] if sink else [""] * 2
            cells.append("" if found["overhead"] is None else f"{found['overhead']:+.0%}")
            lines.append(f"| {' | '.join(cells)} |")
    if not lines:
        return []
    note = f"Requests that were answered from the cache and not measured: {', '.join(cached)}." if cached else ""
    heading = "| task | | tokens | gate mean | < 0.1 | > 0.9 | first-token attention | M-Act | cost of measuring |"
    table = [
        "",
        "Measured on the tokens that were read for these scores:",
        "",
        heading,
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
        *lines,
    ]
    return [*table, "", note] if note else table


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1 else f"{value:.6g}"


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{value:+.4f}"


def draw(comparison: Comparison, path: Path, limit: int = 30) -> None:
    """
    Bars of base and model, and beside them the differences with their intervals and the noise.

    Scores and perplexities (per token) have axes of their own; at most `limit` rows of each, groups first.
    """
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot

    scores = [row for row in comparison.rows if not row.unit]
    perplexities = [row for row in comparison.rows if row.unit in ("nats per token", "nats per target")]
    kinds = [rows[:limit] for rows in (scores, perplexities) if rows]
    heights = [0.42 * len(rows) + 0.9 for rows in kinds]
    figure, axes = pyplot.subplots(
        len(kinds), 2, figsize=(10, sum(heights) + 0.8), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for (left, right), rows in zip(axes, kinds, strict=True):
        _bars(left, rows)
        _differences(right, rows)
    axes[0, 0].legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    axes[0, 1].legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    figure.suptitle(f"{_short(comparison.model)} against {_short(comparison.base)}, BOS {comparison.bos}", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bars(axis: Any, rows: list[Row]) -> None:
    places = range(len(rows))
    axis.barh([y - 0.2 for y in places], [row.values.base for row in rows], 0.38, color="0.65", label="base")
    axis.barh([y + 0.2 for y in places], [row.values.model for row in rows], 0.38, color="0.2", label="model")
    axis.set_yticks(list(places), [f"{row.name}\n{row.metric}" for row in rows], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("perplexity" if rows[0].unit else "score")


def _differences(axis: Any, rows: list[Row]) -> None:
    places = list(range(len(rows)))
    values = [row.values.difference for row in rows]
    spans = [
        [v - row.values.low for v, row in zip(values, rows, strict=True)],
        [row.values.high - v for v, row in zip(values, rows, strict=True)],
    ]
    axis.axvline(0, color="0.5", linewidth=0.8)
    axis.errorbar(values, places, xerr=[[max(0, x) for x in side] for side in spans], fmt="o", color="0.1", capsize=3,
                  markersize=4, label=f"model - base, {LEVEL:.0%}")  # fmt: skip
    noisy = [(y, row.noise.difference) for y, row in zip(places, rows, strict=True) if row.noise]
    axis.plot([x for _, x in noisy], [y for y, _ in noisy], "x", color="0.45", label="noise")
    axis.set_yticks(places, [])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlabel("difference (nats)" if rows[0].unit else "difference (score)")


def _short(name: str) -> str:
    return Path(name).name or name


def write(comparisons: list[Comparison], folder: Path, samples: bool = False) -> list[Path]:
    """
    Writes comparison.md and, for each policy, a JSON object and a picture; returns their paths.

    samples: also each task's documents, requests and answers, as JSON lines, of both models.
    """
    from lm_eval.utils import handle_non_serializable

    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "comparison.md"]
    written[0].write_text(to_markdown(comparisons), encoding="utf-8")
    for comparison, stem in zip(comparisons, _stems([comparison.bos for comparison in comparisons]), strict=True):
        content = to_json(to_dict(comparison), indent=1, default=handle_non_serializable)
        (folder / f"{stem}.json").write_text(content + "\n", encoding="utf-8")
        draw(comparison, folder / f"{stem}.png")
        written += [folder / f"{stem}.json", folder / f"{stem}.png"]
        if samples:
            written += _write_samples(comparison, folder / stem.replace("comparison", "samples"))
    return written


def _stems(policies: list[str]) -> list[str]:
    """Names of files, one for each policy; what a name cannot hold is left out of it."""
    if len(policies) == 1:
        return ["comparison"]
    names = [re.sub(r"\W", "", policy) for policy in policies]
    unique = [name if name and names.count(name) == 1 else f"{place}{name}" for place, name in enumerate(names, 1)]
    return [f"comparison-{name}" for name in unique]


def _write_samples(comparison: Comparison, folder: Path) -> list[Path]:
    from lm_eval.utils import handle_non_serializable

    folder.mkdir(exist_ok=True)
    written = []
    for label in ("base", "model"):
        for task, of_task in comparison.results[label]["samples"].items():
            lines = (json.dumps(s, default=handle_non_serializable, ensure_ascii=False) + "\n" for s in of_task)
            written.append(folder / f"{task}.{label}.jsonl")
            written[-1].write_text("".join(lines), encoding="utf-8")
    return written
