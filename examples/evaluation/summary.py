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
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|--:|--:|--:|--:|---|---|"]
    for comparison in found:
        for row in comparison["rows"]:
            values = row["values"]
            if row["name"].startswith("mmlu_") or row["metric"] in ("word_perplexity", "byte_perplexity"):
                continue  # 57 subjects, and the same likelihoods per word and per byte, are in results.json
            metric = row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"
            numbers = [f"{values[key]:.4f}" for key in ("base", "model")] + [f"{values['difference']:+.4f}"]
            interval = f"[{values['low']:+.4f}, {values['high']:+.4f}] {row['unit']}"
            cells = [row["name"], metric, str(values["documents"]), *numbers, interval.strip(), comparison["bos"]]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(folder: Path, out: Path | None) -> None:
    found = comparisons(folder)
    text = table(found) + "\n"
    equal = sum(comparison["identical"] for comparison in found)
    text += f"\n{equal} of {len(found)} comparisons identical to the last digit.\n"
    print(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.md").write_text(text, encoding="utf-8")
        (out / "results.json").write_text(json.dumps(found, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
