"""One evaluation: the harness's own command line in, its results out."""

import argparse
import contextlib
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
from lm_eval import evaluator, simple_evaluate
from lm_eval._cli.harness import HarnessCLI
from lm_eval.api.group import Group
from lm_eval.api.model import LM
from lm_eval.api.registry import get_model
from lm_eval.api.task import Task
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.loggers import EvaluationTracker, TrackioLogger, WandbLogger
from lm_eval.loggers.utils import get_commit_from_path
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Kind
from lm_eval.utils import simple_parse_args_string

from ..convert.tensor_files import one_line
from .cache import cache_name
from .harness import GatedLlamaLM
from .ruler_prompts import keep_prompts, seed_generators


TASKS = Path(__file__).parent / "tasks"
MODEL_CLASS = "gated-llama"

# How `datasets` says that it has no documents.
DATA_ERRORS = (OSError, StopIteration, datasets.exceptions.DatasetsError)


@dataclass
class Job:
    """
    What to evaluate: the harness's options, and its tasks with their documents loaded.

    Documents are loaded once, so that every model of a job is asked the same.
    """

    config: EvaluatorConfig
    manager: TaskManager
    selected: list[Task | Group]

    @cached_property
    def _loaded(self) -> dict[str, Any]:
        return self.manager.load(list(self.selected))

    @property
    def tasks(self) -> dict[str, Task]:
        """All tasks, those inside groups included."""
        return self._loaded["tasks"]

    @property
    def groups(self) -> dict[str, Group]:
        """All groups, those inside groups included."""
        return self._loaded["groups"]


def parse(arguments: Sequence[str]) -> EvaluatorConfig:
    """
    The harness's configuration from its own flags (`lm_eval run --help`), with this package's tasks known to it.

    The model class is `gated-llama` unless a flag or a configuration file names another. A wrong flag ends the process
    with the harness's usage message and code 2, as there.
    """
    options = HarnessCLI()._parser.parse_args(["run", *arguments])
    below = EvaluatorConfig.load_yaml_config(options.config) if options.config else {}
    places = options.include_path or below.get("include_path") or []
    places = [places] if isinstance(places, str) else places
    options.include_path = [str(TASKS), *(str(Path(place).absolute()) for place in places)]
    if options.model is None and "model" not in below:
        options.model = MODEL_CLASS
    if below.get("model_args") and options.model_args:  # the harness would let the flag replace all of the file's
        options.model_args = _model_args(below["model_args"]) | _model_args(options.model_args)
    _check_numbers(options)
    config = EvaluatorConfig.from_cli(options)
    if not config.tasks:
        raise ValueError("No task was named: pass --tasks, such as --tasks hellaswag; `lm_eval ls tasks` lists them.")
    return config


def _model_args(given: str | dict) -> dict:
    return simple_parse_args_string(given) if isinstance(given, str) else given


def _check_numbers(options: argparse.Namespace) -> None:
    """ValueError for sizes and limits that only surface as errors of the loops that they control."""
    size, limit = getattr(options, "batch_size", None), getattr(options, "limit", None)
    if size is not None and not re.fullmatch(r"auto(:\d+)?|[1-9]\d*", str(size)):
        raise ValueError(f"--batch_size {size} must be a whole number above 0, or auto.")
    if limit is not None and limit <= 0:
        raise ValueError(f"--limit {limit:g} must be above 0: a number of documents, or a share below 1.")


def load(config: EvaluatorConfig, data_roots: Sequence[str | Path] = ()) -> Job:
    """
    Loads tasks and documents.

    Args:
        data_roots: folders with data sets under their Hub ids (`Rowan/hellaswag/...`); they come before the Hub.

    Raises:
        ValueError: a task is unknown, or its data set is neither in a data root nor to be had from the Hub.
    """
    metadata = {key: _absolute(value) for key, value in config.metadata.items()}
    try:
        manager = config.process_tasks(metadata)
    except ValueError as error:
        raise ValueError(f"{one_line(error)}: `lm_eval ls tasks` lists the harness's, {TASKS} holds ours.") from error
    seeds = (config.seed or [None, None])[:2]
    keep_prompts(manager, seeds, None if config.samples else config.limit)
    seed_generators(*seeds)  # other synthetic tasks draw their documents from the global generators
    selected = []
    with local_data(data_roots), contextlib.redirect_stdout(sys.stderr):  # generators of synthetic tasks talk
        for name in _without_tags(config.tasks, manager):
            selected += _load_one(name, manager, data_roots)
    job = Job(config, manager, selected)
    unsafe = [name for name, task in job.tasks.items() if getattr(task, "UNSAFE_CODE", False)]
    if unsafe and not config.confirm_run_unsafe_code:
        raise ValueError(f"{unsafe[0]} runs code that the model writes: allow it with --confirm_run_unsafe_code.")
    return job


def _without_tags(names: Iterable[str | dict], manager: TaskManager) -> Iterator[str | dict]:
    """A tag stands for its tasks; one by one, an error can name the task."""
    for name in names:
        entry = manager.task_index.get(name) if isinstance(name, str) else None
        yield from sorted(entry.tags) if entry and entry.kind is Kind.TAG else [name]


def _load_one(name: str | dict, manager: TaskManager, data_roots: Sequence) -> list[Task | Group]:
    """A task, or the groups of a name that are in no other group; ValueError says what it lacks."""
    shown = name.get("task", name.get("group")) if isinstance(name, dict) else name
    try:
        loaded = manager.load([name])
    except DATA_ERRORS as error:
        _blame_part(name, manager, data_roots)
        raise ValueError(
            f"The data set of {shown} was not found ({one_line(error) or type(error).__name__}): "
            f"{_advice(data_roots, _files(name, manager))}."
        ) from error
    except ImportError as error:
        raise ImportError(f"{shown} needs a package that is not installed: {one_line(error)}") from error
    except ValueError as error:
        if "BuilderConfig" not in str(error):  # of `datasets`: the configuration is not among the files
            raise
        raise ValueError(
            f"The data set of {shown} was not found ({one_line(error)}): {_advice(data_roots)}."
        ) from error
    except (AssertionError, LookupError) as error:
        raise ValueError(f"{shown} cannot be loaded: {one_line(error)}") from error
    inner = {child for children in loaded["group_map"].values() for child in children}
    groups = [group for group_name, group in loaded["groups"].items() if group_name not in inner]
    return groups or list(loaded["tasks"].values())


def _advice(data_roots: Sequence, files: str | None = None) -> str:
    places = f"below {', '.join(map(str, data_roots))}" if data_roots else "below a folder given with --data-root"
    return f"put {files} {places}" if files else f"put it {places} under its Hub id, or allow access to the Hub"


def _files(name: str | dict, manager: TaskManager) -> str | None:
    """The local files that one of this package's tasks reads."""
    entry = manager.task_index.get(name) if isinstance(name, str) else None
    found = ((entry.cfg if entry else None) or {}).get("dataset_kwargs", {}).get("data_files")
    return ", ".join(found.values()) if isinstance(found, dict) else None


def _blame_part(name: str | dict, manager: TaskManager, data_roots: Sequence) -> None:
    """Raises for the part of a group whose documents are not there."""
    entry = manager.task_index.get(name) if isinstance(name, str) else None
    if entry is not None and entry.kind is Kind.GROUP:
        for part in (entry.cfg or {}).get("task", []):
            if isinstance(part, str):
                _load_one(part, manager, data_roots)


def _absolute(value: Any) -> Any:
    """A path that tasks are given (RULER's tokenizer) still leads there when the working directory has changed."""
    return str(Path(value).absolute()) if isinstance(value, str) and Path(value).exists() else value


@contextlib.contextmanager
def local_data(roots: Sequence[str | Path]) -> Iterator[None]:
    """
    Within it, `datasets.load_dataset("owner/name")` finds `owner/name` below one of the roots first.

    The library looks for a relative path before it asks the Hub, so the working directory is a folder of links to what
    the roots hold. Raises ValueError for a root that is no folder, or for two that hold the same name.
    """
    if not roots:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        for root in map(Path, roots):
            if not root.is_dir():
                raise ValueError(f"--data-root {root} is not a folder.")
            for entry in root.iterdir():
                link = Path(folder, entry.name)
                if link.is_symlink():
                    raise ValueError(f"{entry.name} is in more than one --data-root: {link.resolve()} and {entry}.")
                link.symlink_to(entry.absolute())
        with contextlib.chdir(folder):
            yield


def build_model(config: EvaluatorConfig, model_args: dict[str, Any] | None = None) -> LM:
    """The model of a configuration, or one of the same class with other arguments."""
    arguments = {
        "batch_size": config.batch_size,
        "max_batch_size": config.max_batch_size,
        "device": config.device,
        **(config.model_args if model_args is None else model_args),
    }
    try:
        return get_model(config.model).create_from_arg_obj({k: v for k, v in arguments.items() if v is not None})
    except OSError as error:
        name = str(arguments.get("pretrained"))
        raise OSError(one_line(error) if name in str(error) else f"{name}: {one_line(error)}") from error
    except (TypeError, AttributeError, AssertionError) as error:  # how an unknown argument, dtype or device surfaces
        raise ValueError(
            f"The model cannot be built ({one_line(error)}): look at --model_args and --device."
        ) from error


def commit() -> str | None:
    """As the harness's `get_git_commit_hash`, without git's complaint on the terminal where there is no repository."""
    with contextlib.suppress(OSError):
        asked = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True, check=False)
        if asked.returncode == 0:
            return asked.stdout.strip()
    return get_commit_from_path(os.getcwd())


@contextlib.contextmanager
def quiet_git() -> Iterator[None]:
    """Within it, the harness learns the commit of the working directory from `commit`."""
    loud, evaluator.get_git_commit_hash = evaluator.get_git_commit_hash, commit
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = loud


def evaluate(job: Job, model: LM, tracker: EvaluationTracker | None = None) -> dict[str, Any] | None:
    """
    The harness's results (`results`, `samples`, `config` ...) of a model on a job; None on processes but the first.

    Perplexity tasks gain `token_perplexity` when the model is of class `gated-llama`: the harness counts words and
    bytes, only the model knows its tokens. A cache (`use_cache`) gets a name of its own for each model and its
    options, since the harness's keys hold the request alone.
    """
    config = job.config
    ours = isinstance(model, GatedLlamaLM)
    with quiet_git():
        results = simple_evaluate(
            model=model,
            model_args=config.model_args,
            tasks=list(job.selected),
            task_manager=job.manager,
            num_fewshot=config.num_fewshot,
            batch_size=config.batch_size,
            max_batch_size=config.max_batch_size,
            device=config.device,
            use_cache=cache_name(config.use_cache, model) if config.use_cache and ours else config.use_cache,
            cache_requests=config.cache_requests.get("cache_requests", False),
            rewrite_requests_cache=config.cache_requests.get("rewrite_requests_cache", False),
            delete_requests_cache=config.cache_requests.get("delete_requests_cache", False),
            limit=config.limit,
            samples=config.samples,
            check_integrity=config.check_integrity,
            write_out=config.write_out,
            log_samples=True,
            evaluation_tracker=tracker,
            system_instruction=config.system_instruction,
            apply_chat_template=config.apply_chat_template,
            fewshot_as_multiturn=config.fewshot_as_multiturn,
            gen_kwargs=config.gen_kwargs,
            verbosity=config.verbosity,
            predict_only=config.predict_only,
            random_seed=config.seed[0] if config.seed else None,
            numpy_random_seed=config.seed[1] if config.seed else None,
            torch_random_seed=config.seed[2] if config.seed else None,
            fewshot_random_seed=config.seed[3] if config.seed else None,
            confirm_run_unsafe_code=config.confirm_run_unsafe_code,
            metadata=config.metadata,
        )
    truncated = model.count_truncated(job.tasks) if ours else {}  # of all processes, so on each of them
    if results is not None:
        results["config"]["model"] = config.model
        if ours:
            _add_token_perplexity(results, job.tasks, model)
            _add_unmeasured(results, job.tasks)
            results["config"]["truncated_prompts"] = truncated
    return results


def _add_token_perplexity(results: dict[str, Any], tasks: dict[str, Task], model: GatedLlamaLM) -> None:
    for name, task in tasks.items():
        if task.OUTPUT_TYPE != "loglikelihood_rolling":
            continue
        total = tokens = 0
        for sample in results["samples"][name]:
            ((text,),) = sample["arguments"]
            count = len(model.rolling_ids(text)[1])
            score = float(sample["resps"][0][0])
            sample["token_perplexity"] = (score, count)
            total, tokens = total + score, tokens + count
        results["results"][name]["token_perplexity,none"] = math.exp(-total / tokens)
        results["higher_is_better"][name]["token_perplexity"] = False


def _add_unmeasured(results: dict[str, Any], tasks: dict[str, Task]) -> None:
    """`cached`: requests of each task that no probe saw, since their answers came from a cache."""
    if (probes := results["config"].get("probes")) is None:
        return
    for name, task in tasks.items():
        asked = sum(request.repeats for request in task.instances)
        found = probes.setdefault(name, {"tokens": 0, "requests": 0, "overhead": None, "logits_unchanged": None})
        found["cached"] = max(0, asked - found["requests"])


def run(job: Job, model: LM | None = None) -> dict[str, Any] | None:
    """Evaluates and saves as `lm_eval run` does; returns the results, samples included."""
    config = job.config
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    loggers = [
        logger(*arguments)
        for logger, arguments in (
            (WandbLogger, (config.wandb_args, config.wandb_config_args)),
            (TrackioLogger, (config.trackio_args,)),
        )
        if arguments[0]
    ]
    where = {"output_path": config.output_path} if config.output_path else {}
    token = {"token": os.environ["HF_TOKEN"]} if os.environ.get("HF_TOKEN") else {}
    tracker = EvaluationTracker(**{**config.hf_hub_log_args, **where, **token})
    results = evaluate(job, model or build_model(config), tracker)
    if results is None:
        return None
    samples = results.pop("samples")
    tracker.general_config_tracker.model_source = config.model
    _log(loggers, results, samples if config.log_samples else None)
    _save(tracker, results, samples, config.log_samples)
    return {**results, "samples": samples}


def _log(loggers: Sequence, results: dict[str, Any], samples: dict[str, list] | None) -> None:
    for logger in loggers:
        logger.post_init(results)
        logger.log_eval_result()
        if samples is not None:
            logger.log_eval_samples(samples)
        (logger.run if isinstance(logger, WandbLogger) else logger).finish()


def _save(tracker: EvaluationTracker, results: dict[str, Any], samples: dict[str, list], log_samples: bool) -> None:
    tracker.save_results_aggregated(results=results, samples=samples if log_samples else None)
    if log_samples:
        for name in results["configs"]:
            tracker.save_results_samples(task_name=name, samples=samples[name])
    if tracker.push_results_to_hub or tracker.push_samples_to_hub:
        tracker.recreate_metadata_card()
