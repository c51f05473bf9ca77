"""RULER before and after a context extension, base against gated: `python -m gated_llama.evaluation.ruler`."""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..convert.extend_context import extend_context, find_folder
from ..convert.tensor_files import to_json
from .command import guarded
from .compare import digests, require_same_ids
from .harness import GatedLlamaLM, TruncationError
from .run import Job, build_model, evaluate, load, parse
from .statistics import interval


# RULER (arXiv 2404.06654), average over tasks in percent, of the paper's models: arXiv 2505.06708, Table 5.
PAPER_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
PAPER = {
    "base": (88.89, 85.88, 83.15, 79.50, None, None),
    "gated": (90.56, 87.11, 84.61, 79.77, None, None),
    "base, extended": (82.90, 71.52, 61.23, 37.94, 37.51, 31.65),
    "gated, extended": (88.13, 80.01, 76.74, 72.88, 66.60, 58.82),
}

MODELS = tuple(PAPER)


@dataclass
class Ruler:
    """
    Scores of up to four models on the same prompts.

    models: label -> folder. reserve: tokens that prompts are shorter by. contexts: label -> tokens of context. scores:
    label -> length -> task -> score of each document, 0 to 1; a length beyond a model's context is absent.
    """

    models: dict[str, str]
    reserve: int = 0
    contexts: dict[str, int] = field(default_factory=dict)
    scores: dict[str, dict[int, dict[str, list[float]]]] = field(default_factory=dict)

    def mean(self, label: str, length: int, task: str | None = None) -> float | None:
        """Mean score of a task, or over tasks; None where the length is beyond the model's context."""
        by_task = self.scores.get(label, {}).get(length)
        if by_task is None:
            return None
        return float(np.mean([np.mean(scores) for name, scores in by_task.items() if task in (None, name)]))

    def difference_in_differences(self, length: int, task: str | None = None) -> tuple[float, float, float] | None:
        """
        (gated extended - gated) - (base extended - base), with its 95 % bootstrap interval over documents.

        None unless all four models were run at this length.
        """
        cells = [self.scores.get(label, {}).get(length) for label in MODELS]
        if None in cells:
            return None
        tasks = [name for name in cells[0] if task in (None, name)]
        base, gated, base_x, gated_x = (np.concatenate([cell[name] for name in tasks]) for cell in cells)
        weights = np.concatenate([np.full(len(cells[0][name]), 1 / len(cells[0][name])) for name in tasks])
        change = ((gated_x - gated) - (base_x - base)) * weights
        return float(change.sum() / weights.sum()), *interval(change, weights)


def run_ruler(
    models: dict[str, str],
    lengths: Sequence[int],
    tasks: Sequence[str],
    arguments: Sequence[str] = (),
    *,
    reserve: int = 0,
    data_roots: Sequence[str] = (),
    bos: str = "auto",
    progress: Callable[[str, Ruler], None] = lambda message, ruler: None,
) -> Ruler:
    """
    Runs RULER tasks at each length on each model.

    Prompts are generated once for each length, with the tokenizer of the gated model, and every model must read the
    same ids. A model's context comes from its configuration, extension included; lengths beyond it are left out.

    Args:
        models: label (of `MODELS`) -> folder or Hub id.
        lengths: tokens of prompt and answer together.
        arguments: further flags of `lm_eval run`, such as `--limit 20`.
        reserve: tokens that prompts are generated shorter by. Some of the harness's generators leave no room for the
            answer, so a length equal to the context needs some.
        progress: called with what is done and the result so far.

    Raises:
        ValueError: no prompt fits a length, one would be truncated, the tokenizers differ, or a task is not known.
    """
    if not 0 <= reserve < min(lengths):
        raise ValueError(f"--reserve {reserve} must be between 0 and the shortest length, {min(lengths)}.")
    for folder in models.values():
        find_folder(folder, None)
    tokenizer = models.get("gated") or next(iter(models.values()))
    jobs = {length: _job(tokenizer, length - reserve, tasks, arguments, data_roots) for length in sorted(lengths)}
    check_tasks(next(iter(jobs.values())))
    if "on_truncation" in _shared(jobs):
        raise ValueError("RULER's prompts are never cut: leave on_truncation out of --model_args, and see --reserve.")
    ruler = Ruler(dict(models), reserve)
    asked: dict[int, dict] = {}
    for label, folder in models.items():
        lm = build_model(next(iter(jobs.values())).config, {"pretrained": folder, "bos": bos} | _shared(jobs))
        ruler.contexts[label] = lm.max_length
        for length, job in jobs.items():
            if length > lm.max_length:
                continue
            samples = _samples(job, lm)
            if length in asked:
                require_same_ids(asked[length], job, lm, next(iter(models.values())), folder)
            else:
                asked[length] = digests(job, lm)
            found = ruler.scores.setdefault(label, {}).setdefault(length, {})
            found |= {task: _scores(of_task, length - reserve) for task, of_task in samples.items()}
            progress(f"{label} at {length}: {ruler.mean(label, length):.4f}", ruler)
        lm = None
        gc.collect()
    return ruler


def _job(
    tokenizer: str, length: int, tasks: Sequence[str], arguments: Sequence[str], data_roots: Sequence[str]
) -> Job:
    metadata = json.dumps({"tokenizer": tokenizer, "max_seq_lengths": [length]})
    return load(parse(["--tasks", *tasks, *arguments, "--metadata", metadata]), data_roots)


def _shared(jobs: dict[int, Job]) -> dict[str, Any]:
    config = next(iter(jobs.values())).config
    return {key: value for key, value in config.model_args.items() if key != "pretrained"}


def _samples(job: Job, lm: GatedLlamaLM) -> dict[str, list[dict]]:
    try:
        return evaluate(job, lm)["samples"]
    except TruncationError as error:
        raise ValueError(
            f"{error}. Here also: --reserve 128 generates prompts that are shorter by so much."
        ) from error


def _scores(samples: list[dict], length: int) -> list[float]:
    return [float(sample[str(length)]) for sample in sorted(samples, key=lambda sample: sample["doc_id"])]


def to_markdown(ruler: Ruler) -> str:
    """One table of averages with the difference in differences, one of tasks, and the paper's figures."""
    labels = list(ruler.contexts)
    lengths = sorted({length for by_length in ruler.scores.values() for length in by_length})
    tasks = list(dict.fromkeys(name for cells in ruler.scores.values() for cell in cells.values() for name in cell))
    counts = {len(scores) for cells in ruler.scores.values() for cell in cells.values() for scores in cell.values()}
    parts = ["# RULER before and after the extension of the context", ""]
    parts += [f"- {label}: {ruler.models[label]}, context {ruler.contexts[label]:,} tokens" for label in labels]
    parts += [
        "",
        f"{'/'.join(map(str, sorted(counts)))} documents for each task and length; no prompt was truncated.",
        "",
    ]
    parts += _table("average of " + ", ".join(tasks), ruler, lengths, None)
    for task in tasks if len(tasks) > 1 else []:
        parts += ["", *_table(task, ruler, lengths, task)]
    parts += ["", "For comparison, the paper's models (1.7B, 13 tasks, percent; arXiv 2505.06708, Table 5):", ""]
    parts += ["| | " + " | ".join(map(str, PAPER_LENGTHS)) + " |", "|---|" + "--:|" * len(PAPER_LENGTHS)]
    parts += [f"| {label} | " + " | ".join(_percent(v) for v in values) + " |" for label, values in PAPER.items()]
    change = [_paper_change(index) for index in range(len(PAPER_LENGTHS))]
    parts += ["| difference in differences | " + " | ".join(_percent(value) for value in change) + " |"]
    return "\n".join(parts) + "\n"


def _table(title: str, ruler: Ruler, lengths: Sequence[int], task: str | None) -> list[str]:
    labels = list(ruler.contexts)
    lines = [f"{title}:", "", f"| length | {' | '.join(labels)} | difference in differences |"]
    lines.append("|--:|" + "--:|" * (len(labels) + 1))
    for length in lengths:
        means = [ruler.mean(label, length, task) for label in labels]
        change = ruler.difference_in_differences(length, task)
        shown = "-" if change is None else f"{change[0]:+.4f} [{change[1]:+.4f}, {change[2]:+.4f}]"
        lines.append(f"| {length} | {' | '.join('-' if m is None else f'{m:.4f}' for m in means)} | {shown} |")
    return lines


def _paper_change(index: int) -> float | None:
    base, gated, base_x, gated_x = (values[index] for values in PAPER.values())
    return None if base is None else (gated_x - gated) - (base_x - base)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def to_dict(ruler: Ruler) -> dict[str, Any]:
    """For ruler.json: scores, and by length the difference in differences."""
    lengths = sorted({length for by_length in ruler.scores.values() for length in by_length})
    changes = {length: ruler.difference_in_differences(length) for length in lengths}
    return asdict(ruler) | {"difference_in_differences": changes}


def write(ruler: Ruler, folder: Path) -> None:
    """ruler.json and ruler.md in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ruler.json").write_text(to_json(to_dict(ruler), indent=1) + "\n", encoding="utf-8")
    (folder / "ruler.md").write_text(to_markdown(ruler), encoding="utf-8")


def extended(folder: str, factor: float, out: Path, label: str) -> str:
    """
    The extended copy of a model below `out`, made unless it is there from an earlier run.

    Raises ValueError for a copy of another model, or of one that has been written again since.
    """
    target = out / f"{label}-yarn-{factor:g}"
    record = out / f"{target.name}.source.json"
    origin = _origin(find_folder(folder, None))
    if not target.exists():
        extend_context(folder, target, factor=factor, link=False)
        record.write_text(json.dumps(origin, indent=1) + "\n", encoding="utf-8")
    elif not record.is_file() or json.loads(record.read_text(encoding="utf-8")) != origin:
        raise ValueError(f"{target} was not made from {folder} as it is now: name another --out, or remove it.")
    return str(target)


def _origin(folder: Path) -> dict[str, Any]:
    """What tells a checkpoint folder from another, and from what it was before: its files, their sizes and times."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    stats = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
    return {"folder": str(folder.resolve()), "files": stats}


def check_tasks(job: Job) -> None:
    """ValueError for tasks that have no score for each length, as RULER's have."""
    for name, task in job.tasks.items():
        if not any(str(metric).isdigit() for metric in task.aggregation()):
            raise ValueError(f"{name} is no RULER task: choose from ruler_offline, ruler and what these hold.")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gated_llama.evaluation.ruler",
        description=__doc__,
        epilog="All other flags are those of `lm_eval run`, such as --limit, --use_cache or --batch_size. Prompts are "
        "made once and kept in the assets of the Hub's cache (HF_ASSETS_CACHE, or HF_HOME).",
        allow_abbrev=False,
    )
    parser.add_argument("--base", required=True, help="Folder of the ungated model.")
    parser.add_argument("--gated", required=True, help="Folder of the gated model.")
    parser.add_argument("--factor", type=float, help="Extend both by YaRN and run them again.")
    parser.add_argument("--lengths", type=int, nargs="+", required=True, help="Such as 4096 8192.")
    parser.add_argument("--tasks", nargs="+", default=["ruler_offline"], help="Names, or a group such as ruler.")
    parser.add_argument("--reserve", type=int, default=0, help="Tokens that prompts are generated shorter by.")
    parser.add_argument("--out", type=Path, required=True, help="Folder for results and extended models.")
    parser.add_argument("--data-root", action="append", default=[], help="Data sets under their Hub ids.")
    parser.add_argument("--bos", default="auto", help="Beginning of requests: auto, none, always, or a token.")
    ours, rest = parser.parse_known_args(arguments)

    return guarded(lambda: _run(ours, rest))


def _run(ours: argparse.Namespace, harness_arguments: Sequence[str]) -> None:
    def progress(message: str, ruler: Ruler) -> None:
        sys.stderr.write(f"{message}\n")
        write(ruler, ours.out)

    if ours.out.is_file():
        raise ValueError(f"--out {ours.out} is a file: name a folder.")
    if taken := [flag for flag in ("--output_path", "-o", "--log_samples", "-s") if flag in harness_arguments]:
        raise ValueError(f"{taken[0]} has no use here: results go to --out.")
    models = {"base": ours.base, "gated": ours.gated}
    if ours.factor:
        for label in ("base", "gated"):
            models[f"{label}, extended"] = extended(models[label], ours.factor, ours.out, label)
    ruler = run_ruler(
        models,
        ours.lengths,
        ours.tasks,
        harness_arguments,
        reserve=ours.reserve,
        data_roots=ours.data_root,
        bos=ours.bos,
        progress=progress,
    )
    if not ruler.scores:
        raise ValueError(f"No model has a context of {min(ours.lengths)} tokens: choose shorter --lengths.")
    sys.stdout.write(to_markdown(ruler))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
