"""Scores in the metadata (`model-index`) of a model card, where the Hub shows them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.repocard_data import eval_results_to_model_index
from lm_eval.api.task import Task

from ..hub import read_card, write_card
from .documents import OPENING, openings


CARD = "README.md"


def add_results(folder: Path, results: dict[str, Any], tasks: dict[str, Task]) -> Path:
    """
    Writes the scores of an evaluation into the card of a local folder, in place of earlier ones of the same task and
    metric.

    The number of documents and of shots stand beside each score, since an evaluation with `--limit` is no benchmark.

    Raises ValueError when `folder` is no local folder: a model on the Hub is not changed from here.
    """
    check_folder(folder)
    path = folder / CARD
    card = ModelCard(read_card(path), ignore_metadata_errors=True) if path.is_file() else _new_card(folder)
    known = {_key(result): result for result in card.data.eval_results or []}
    known |= {_key(result): result for result in eval_results(results, tasks)}
    name = card.data.pop("model_name") or folder.resolve().name
    card.data.eval_results = None  # the library would merge tasks that share a data set
    card.data["model-index"] = [{"name": name, "results": list(_by_task(name, list(known.values())))}]
    partial = folder / f".{CARD}.partial"
    write_card(partial, str(card))
    partial.replace(path)
    return path


def check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a local folder, so its model card cannot be written: leave --card out.")


def _by_task(model_name: str, results: list[EvalResult]) -> Iterator[dict[str, Any]]:
    """Entries of a model index, one for each task."""
    for task in dict.fromkeys(result.dataset_name for result in results):
        (index,) = eval_results_to_model_index(model_name, [r for r in results if r.dataset_name == task])
        yield from index["results"]


def _new_card(folder: Path) -> ModelCard:
    data = ModelCardData(library_name="transformers", model_name=folder.resolve().name)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n# {folder.resolve().name}\n")


def _key(result: EvalResult) -> tuple:
    return (*result.unique_identifier, result.dataset_name, result.metric_name)


def eval_results(results: dict[str, Any], tasks: dict[str, Task]) -> list[EvalResult]:
    """The scores of tasks, and of groups that have some, as the Hub's records."""
    records = []
    for name, metrics in results["results"].items():
        path, config = _data_set(tasks.get(name))
        for key, value in metrics.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            records.append(
                EvalResult(
                    task_type="text-generation",
                    task_name="Text generation",
                    dataset_type=path or name,
                    dataset_name=_shown_name(name, tasks.get(name)),
                    dataset_config=config,
                    dataset_args={
                        "documents": metrics.get("sample_len"),
                        "num_few_shot": results["n-shot"].get(name),
                    },
                    metric_type=metric,
                    metric_name=metric if filter_name == "none" else f"{metric} ({filter_name})",
                    metric_value=round(value, 6),
                    source_name="lm-evaluation-harness",
                    source_url="https://github.com/EleutherAI/lm-evaluation-harness",
                )
            )
    return records


def _shown_name(name: str, task: Task | None) -> str:
    """A task on the beginnings of its documents is not the task on all of them."""
    cut = task is not None and task.config.process_docs is openings
    return f"{name} (first {OPENING:,} bytes)" if cut else name


def _data_set(task: Task | None) -> tuple[str | None, str | None]:
    """Hub id and configuration of a task's data set; None for local files, generated text and groups."""
    path = None if task is None else task.config.dataset_path
    return (path, task.config.dataset_name or None) if path and "/" in path else (None, None)
