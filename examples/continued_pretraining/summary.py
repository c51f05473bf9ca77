"""The numbers of evaluate.py as Markdown tables, and a picture: summary.py OUT.json [PICTURE.png MODEL ...]"""

import json
import sys
from pathlib import Path

from gated_llama.retrofit.figures import before_and_after


def cells(values, form: str) -> list[str]:
    return [format(value, form) for value in values]


def fidelity_table(models: dict) -> list[str]:
    domains = list(next(iter(models.values()))["domains"])
    lines = [f"| | {' | '.join(domains)} |", "|---|" + "--:|" * len(domains)]
    for name, result in models.items():
        label, found = name, result["domains"]
        if "without_first" in result:  # the source itself
            label, found = f"{name} without its first token", result["without_first"]
        rows = {f"{label}: KL": ("kl", ".3f"), f"{label}: perplexity / source": ("perplexity_ratio", ".3f")}
        for row, (key, form) in rows.items():
            values = cells((found[domain][key] for domain in domains), form)
            lines.append(f"| {row} | {' | '.join(values)} |")
    return lines


def gates_table(models: dict) -> list[str]:
    """KL on one row of each domain, as it is / with the gates reset."""
    gated = {name: result["gates"] for name, result in models.items() if "gates" in result}
    domains = list(next(iter(gated.values()))["kept"])
    lines = [f"| gates as they are / reset: KL | {' | '.join(domains)} |", "|---|" + "--:|" * len(domains)]
    for name, found in gated.items():
        pairs = (f"{found['kept'][domain]['kl']:.3f} / {found['reset'][domain]['kl']:.3g}" for domain in domains)
        lines.append(f"| {name} | {' | '.join(pairs)} |")
    return lines


def sink_table(models: dict) -> list[str]:
    kept = [f"window 256, {kept} first kept" for kept in (0, 1, 4)]
    lines = [
        "| | F-Attn | most attended key | max, any layer | max, layer 20 | window: 0 kept / 4 kept | 1 kept / 4 kept |"
        " W8A8 | A4 |",
        "|---|" + "--:|" * 8,
    ]
    for name, result in models.items():
        sink, robust = result["sink"], result["robustness"]
        windows = [robust[key]["perplexity_ratio"] for key in kept]
        most = max(result["most_attended"], key=lambda found: found["share"])
        row = [f"{sink['first_token_attention']:.4f}", f"{most['share']:.3f}, key {most['key']}"]
        row += [f"{sink['max_activation']:,.0f}"]
        row += [f"{sink['max_activation_per_layer'][20]:,.0f}"]
        row += cells((windows[0] / windows[2], windows[1] / windows[2]), ".3f")
        row += [f"{robust[key]['perplexity_ratio']:.3g}" for key in ("W8A8", "A4 per token")]
        lines.append(f"| {name} | {' | '.join(row)} |")
    return lines


def main(results: Path, picture: Path | None, shown: list[str]) -> None:
    models = json.loads(results.read_text())["models"]
    print("\n".join([*fidelity_table(models), "", *gates_table(models), "", *sink_table(models)]))
    if picture is not None:
        before_and_after({name: models[name]["sink"] for name in shown or models}).savefig(picture, dpi=130)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None, sys.argv[3:])
