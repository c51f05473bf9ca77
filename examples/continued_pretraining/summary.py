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
        rows = {f"{name}: KL": ("kl", ".3f"), f"{name}: perplexity / source": ("perplexity_ratio", ".3f")}
        measured = [("", result["domains"])] if name != "source" else []
        if "without_first" in result:
            measured = [(", without its first token", result["without_first"])]
        if "gates_reset" in result:
            measured.append((", gates reset", result["gates_reset"]))
        for label, found in measured:
            for row, (key, form) in rows.items():
                if label != ", gates reset" or key == "kl":
                    values = cells((found[domain][key] for domain in domains), form)
                    lines.append(f"| {row.replace(':', label + ':')} | {' | '.join(values)} |")
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
    print("\n".join([*fidelity_table(models), "", *sink_table(models)]))
    if picture is not None:
        before_and_after({name: models[name]["sink"] for name in shown or models}).savefig(picture, dpi=130)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None, sys.argv[3:])
