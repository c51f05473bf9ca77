"""A diagnosis on disk: report.json, PNG pictures and one page that holds them all."""

import base64
import io
import json
import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .divergence import place_name
from .figures import both, figures, label


if TYPE_CHECKING:
    from .report import DiagnosisReport


CAPTIONS = {
    "first_token_attention": "Attention on the first token by layer, mean over heads and all queries but its own.",
    "max_activation": "Largest absolute hidden state after each layer.",
    "attention_maps": "Attention maps of the first tokens of the text, mean over heads; the first column is the sink.",
    "sparsity": "Share of small values in what attention read: before the gate, after it, and after mere scaling.",
    "gate_histograms": "Gate scores: of all layers, and by layer (shade relative to the layer's fullest bin).",
    "gate_means": "Mean gate score of each head.",
}

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
img { max-width: 100% } figure { margin: 1rem 0 } figcaption { color: #555 }
"""

Rows = list[list[str]]  # the first row is the heading


def number(value: float | int | None) -> str:
    """Four digits, whole thousands; a dash for what was not measured."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def summary_rows(report: "DiagnosisReport") -> Rows:
    """The main numbers, one column for each model."""
    columns = [dict(main_numbers(each)) for each in both(report)]
    names = list(dict.fromkeys(name for column in columns for name in column))
    heading = ["", *(label(each) for each in both(report))]
    return [heading, *([name, *(column.get(name, "-") for column in columns)] for name in names)]


def main_numbers(report: "DiagnosisReport") -> list[tuple[str, str]]:
    """What a summary begins with: names and values, for one model."""
    attention, activation, gates = report.first_token_attention, report.max_activation, report.gate_scores
    first = ", ".join(f"{entry['token']!r} x {entry['count']}" for entry in attention["first_tokens"][:3])
    keys = ", ".join(f"{entry['key']} x {entry['count']}" for entry in attention["most_attended_keys"][:3])
    rows = [
        ("token 0", first),
        ("first-token attention, mean", number(attention["mean"])),
        ("without the first four queries", number(attention["mean_late"])),
        *((f"sink rate, key {key}, eps 0.3", number(rate)) for key, rate in attention["sink_rate"].items()),
        ("most attended key, mean", number(attention["most_attended"])),
        ("which one, counted from 1", keys or "-"),
        ("max activation", number(activation["max"])),
        ("in layer / dimension", f"{activation['max_layer']} / {activation['dimension']}"),
        ("mean over layers (M-Act)", number(activation["m_act"])),
        ("rises in / falls in layer", f"{number(activation['step_up'])} / {number(activation['step_down'])}"),
        ("massive in layers", spans(activation["massive_layers"])),
    ]
    if gates is not None:
        rows += [
            ("gate score, mean", number(gates["mean"])),
            ("gate scores < 0.1 / > 0.9", f"{gates['share_below']:.1%} / {gates['share_above']:.1%}"),
            ("dead / saturated heads", f"{len(gates['dead_heads'])} / {len(gates['saturated_heads'])}"),
        ]
    return rows


def spans(layers: list[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7"."""
    groups: list[list[int]] = []
    for layer in layers:
        if groups and layer == groups[-1][-1] + 1:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return ", ".join(str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups) or "none"


def divergence_line(report: "DiagnosisReport") -> str:
    """Where the two models part, in one sentence, or why that is not known; empty without a second model."""
    if reason := report.not_compared():
        return f"The layers of the two models are not compared. {reason}"
    if not (places := report.divergence()):
        return ""
    parted = next((place for place in places if not place["bitwise"]), None)
    if parted is None:
        return "On the first row the outputs of every layer are bitwise equal."
    largest = max(places, key=lambda place: place["max_abs_difference"])
    return (
        f"On the first row the models part at {place_name(parted['place'])}, by "
        f"{number(parted['max_abs_difference'])}; the largest difference is "
        f"{number(largest['max_abs_difference'])}, at {place_name(largest['place'])}."
    )


def spike_rows(report: "DiagnosisReport", most: int = 12) -> Rows:
    """Spike writers, the largest contribution first."""
    heading = ["layer", "unit", "on the first token", "elsewhere at most", "contribution", "dimension"]
    keys = ("layer", "unit", "first_token_activation", "elsewhere_max", "contribution", "dimension")
    return [heading, *([number(writer[key]) for key in keys] for writer in report.spike_writers[:most])]


def no_spikes(report: "DiagnosisReport") -> str:
    """What an empty list of spike writers means."""
    if report.max_activation["unit_layers"]:
        return "None."
    return "Not looked for: no MLP of this model ends in a linear map that is known."


def intervention_rows(report: "DiagnosisReport") -> Rows:
    heading = ["intervention", "perplexity", "ratio", "KL (nats/token)"]
    rows = [
        [o["name"], number(o["perplexity"]), number(o["perplexity_ratio"]), number(o["kl"])]
        for o in report.interventions or []
    ]
    return [heading, *rows]


def left_out_line(report: "DiagnosisReport") -> str:
    """Which interventions did not apply, and why; empty if all did."""
    return "; ".join(f"not run: {name} ({reason})" for name, reason in report.left_out.items())


def png(figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def html_table(rows: Rows) -> str:
    def line(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line(rows[0], "th") + "".join(line(row, "td") for row in rows[1:]) + "</table>"


def html_figure(name: str, picture: bytes) -> str:
    key = name.removesuffix("_against")
    caption = CAPTIONS[key] + (" The model compared with." if key != name else "")
    data = base64.b64encode(picture).decode()
    return f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{data}"><figcaption>{escape(caption)}'


def page(report: "DiagnosisReport", pictures: dict[str, bytes]) -> str:
    """One HTML document with every table and picture inside; it needs no other file."""
    text = report.text
    about = f"{text['rows']} rows of {text['context']} tokens from {text['source']}; " + (
        f"each begins with {text['bos']!r}." if text["bos"] else "no token is put in front."
    )
    parts = [f"<h1>{escape(label(report))}</h1><p>{escape(about)}</p>", html_table(summary_rows(report))]
    parts += [html_figure(name, picture) + "</figure>" for name, picture in pictures.items()]
    parts.append(f"<p>{escape(divergence_line(report))}</p>")
    for each in both(report):
        parts.append(f"<h2>Spike writers of {escape(label(each))}</h2>")
        parts.append(html_table(spike_rows(each)) if each.spike_writers else f"<p>{escape(no_spikes(each))}</p>")
        if each.interventions is not None:
            parts.append(f"<h2>Interventions on {escape(label(each))}</h2>" + html_table(intervention_rows(each)))
            parts.append(f"<p>{escape(left_out_line(each))}</p>")
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(label(report))}</title>'
        f"<style>{STYLE}</style>\n<body>\n{body}\n</body></html>\n"
    )


def as_json(content: dict[str, Any]) -> str:
    """Indented, with lists of numbers on one line and six significant digits."""
    text = json.dumps(rounded(content), indent=1, allow_nan=False)
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda numbers: re.sub(r"\s+", " ", numbers[0]), text)


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


def write_report(report: "DiagnosisReport", folder: Path) -> dict[str, Any]:
    """
    Writes report.json, report.html and one PNG per picture into an existing folder; returns the JSON's content.

    Raises ImportError when matplotlib is missing.
    """
    content = report.to_dict()
    pictures = {name: png(figure) for name, figure in figures(report).items()}
    for name, picture in pictures.items():
        (folder / f"{name}.png").write_bytes(picture)
    (folder / "report.json").write_text(as_json(content), encoding="utf-8")
    (folder / "report.html").write_text(page(report, pictures), encoding="utf-8")
    return content
