"""The numbers of evaluate.py as Markdown tables, and a picture: summary.py OUT.json [PICTURE.png MODEL ...]"""

import json
import sys
from collections.abc import Callable
from pathlib import Path


WINDOWS = [f"window 256, {kept} first kept" for kept in (0, 4)]


def sink_columns(depth: int) -> dict[str, Callable[[dict], str]]:
    """By the titles of README.md. At two thirds of the depth, massive activations stand alone."""
    deep = 2 * depth // 3
    return {
        "first-token attention": lambda result: f"{result['sink']['first_token_attention']:.4f}",
        "most attended key": most_attended,
        "largest activation, any layer": lambda result: f"{result['sink']['max_activation']:,.0f}",
        f"layer {deep}": lambda result: f"{result['sink']['max_activation_per_layer'][deep]:,.0f}",
        "window 256: no / 4 first tokens kept": lambda result: (
            f"{ratio(result, WINDOWS[0]) / ratio(result, WINDOWS[1]):.3f}"
        ),
        "W8A8": lambda result: f"{ratio(result, 'W8A8'):.2f}",
        "4-bit activations": lambda result: f"{ratio(result, 'A4 per token'):.0f}",
    }


def ratio(result: dict, intervention: str) -> float:
    return result["robustness"][intervention]["perplexity_ratio"]


def most_attended(result: dict) -> str:
    most = max(result["most_attended"], key=lambda found: found["share"])
    return f"{most['share']:.3f}, key {most['key']}"


def label(name: str) -> str:
    """models/transplanted_65k -> transplanted 65k"""
    return name.removeprefix("models/").removesuffix("/model").replace("_", " ")


def table(title: str, rows: dict[str, dict], columns: dict[str, Callable[[dict], str]]) -> list[str]:
    lines = [f"| {title} | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    return lines + [f"| {name} | {' | '.join(cell(row) for cell in columns.values())} |" for name, row in rows.items()]


def domain_tables(models: dict) -> list[str]:
    """KL to the source, perplexity over the source's, and the KL of one row as it is / with the gates reset."""
    rows, gates = {}, {}
    for name, result in models.items():
        if "without_first" in result:  # the source itself
            rows[f"{label(name)} without its first token"] = result["without_first"]
        else:
            rows[label(name)] = result["domains"]
        if "gates" in result:
            kept, reset = result["gates"]["kept"], result["gates"]["reset"]
            gates[label(name)] = {domain: (kept[domain]["kl"], reset[domain]["kl"]) for domain in kept}
    domains = list(next(iter(rows.values())))
    lines = []
    for title, key in (("KL to the source, nats per token", "kl"), ("perplexity / source", "perplexity_ratio")):
        cells = {domain: lambda row, domain=domain, key=key: f"{row[domain][key]:.3f}" for domain in domains}
        lines += [*table(title, rows, cells), ""]
    pairs = {domain: lambda row, domain=domain: "{:.3f} / {:.2f}".format(*row[domain]) for domain in domains}
    return [*lines, *table("KL with its gates / with them reset", gates, pairs), ""]


def main(results: Path, picture: Path | None, shown: list[str]) -> None:
    models = json.loads(results.read_text())["models"]
    depth = len(next(iter(models.values()))["sink"]["max_activation_per_layer"])
    sinks = table("", {label(name): result for name, result in models.items()}, sink_columns(depth))
    print("\n".join([*domain_tables(models), *sinks]))
    if picture is not None:
        from gated_llama.retrofit.figures import before_and_after  # brings torch, which tables do not need

        before_and_after({label(name): models[name]["sink"] for name in shown or models}).savefig(picture, dpi=130)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None, sys.argv[3:])
