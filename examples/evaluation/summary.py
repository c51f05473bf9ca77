"""All comparisons below a folder in one table; with a second folder, that table and the numbers are written there."""

import json
import sys
from pathlib import Path


COLUMNS = ("task", "metric", "documents", "base", "gated", "difference", "95 % interval", "BOS")


def comparisons(folder: Path) -> list[dict]:
    """The numbers of each comparison, without the harness's own results; `seconds` of the whole step."""
    found = []
    for path in sorted(folder.glob("*/comparison*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        seconds = path.parent / "seconds"
        content["step"] = path.parent.name
        content["seconds"] = int(seconds.read_text()) if seconds.exists() else None
        content["measured"] = {
            label: results["config"].get("probes", {}) for label, results in content.pop("results").items()
        }
        content["base"], content["model"] = (Path(content[key]).name for key in ("base", "model"))
        found.append(content)
    return found


def table(found: list[dict]) -> str:
    """Of each task and metric, the comparison with the most documents."""
    lines = {}
    for comparison in sorted(found, key=lambda c: max(row["values"]["documents"] for row in c["rows"])):
        for row in comparison["rows"]:
            values = row["values"]
            if row["name"].startswith("mmlu_") or row["metric"] in ("word_perplexity", "byte_perplexity"):
                continue  # 57 subjects, and the same likelihoods per word and per byte, are in results.json
            metric = row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"
            numbers = [f"{values[key]:.4f}" for key in ("base", "model")] + [f"{values['difference']:+.4f}"]
            interval = f"[{values['low']:+.4f}, {values['high']:+.4f}] {row['unit']}"
            bos = comparison["bos"].replace("|", "\\|")
            cells = [row["name"], metric, str(values["documents"]), *numbers, interval.strip(), bos]
            lines[row["name"], metric, comparison["bos"]] = f"| {' | '.join(cells)} |"
    heading = [f"| {' | '.join(COLUMNS)} |", "|---|---|--:|--:|--:|--:|---|---|"]
    return "\n".join(heading + [lines[key] for key in sorted(lines)])


def noise(found: list[dict]) -> str:
    """The base against itself, where that was run."""
    lines = []
    for comparison in found:
        for row in comparison["rows"]:
            if row["noise"] is not None:
                cells = [row["name"], row["metric"], str(row["values"]["documents"]), comparison["noise"]]
                lines.append(f"| {' | '.join(cells)} | {row['noise']['difference']:+.4f} |")
    return "\n".join(["| task | metric | documents | the base with | difference |", "|---|---|--:|---|--:|", *lines])


def measured(found: list[dict]) -> str:
    """What probes found on the tokens that were scored."""
    lines = []
    for comparison in found:
        for label, tasks in comparison["measured"].items():
            for task, values in tasks.items():
                if values["tokens"]:
                    gates = values.get("gate_scores", {}).get("mean")
                    cells = [task, "gated" if label == "model" else label, f"{values['tokens']:,}"]
                    cells.append("" if gates is None else f"{gates:.3f}")
                    cells.append(f"{values['first_token_attention']['mean']:.4f}")
                    cells.append(f"{values['max_activation']['m_act']:,.0f}")
                    cells.append("" if values["overhead"] is None else f"{values['overhead']:+.0%}")
                    lines.append(f"| {' | '.join(cells)} |")
    heading = "| task | model | tokens | mean gate score | first-token attention | M-Act | cost of measuring |"
    return "\n".join([heading, "|---|---|--:|--:|--:|--:|--:|", *lines])


def main(folder: Path, out: Path | None) -> None:
    found = comparisons(folder)
    equal = sum(comparison["identical"] for comparison in found)
    parts = [table(found), f"{equal} of {len(found)} comparisons identical to the last digit.", noise(found)]
    text = "\n\n".join([*parts, measured(found)]) + "\n"
    print(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.md").write_text(text, encoding="utf-8")
        (out / "results.json").write_text(json.dumps(found, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
