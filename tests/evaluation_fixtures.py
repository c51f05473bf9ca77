"""Fixtures of the tests of evaluation, a plugin that those modules name."""

import functools
import shutil
from pathlib import Path

import datasets
import lm_eval.evaluator
import lm_eval.tasks
import pytest
from evaluation_support import STORIES
from lm_eval.tasks._index import TaskIndex

from gated_llama.convert import convert_checkpoint


# Reading all of the harness's task files takes ten seconds; these hold the stock tasks that are used here.
STOCK = ("hellaswag", "gsm8k", "mmlu/default", "ceval", "cmmlu", "wikitext", "ruler")
STOCK_ROOT = Path(lm_eval.tasks.__file__).parent

_build = TaskIndex.build


@functools.cache
def _entries(folder: Path) -> dict:
    return _build([folder])


def _build_short(paths, **options) -> dict:
    folders = [part for path in paths for part in ([path / s for s in STOCK] if path == STOCK_ROOT else [path])]
    return {name: entry for folder in folders for name, entry in _entries(folder).items()}


@pytest.fixture
def quick_harness(monkeypatch, tmp_path):
    """Few task files, no inventory of the machine after each run, data sets and prompts in the test's own folders."""
    monkeypatch.setattr(TaskIndex, "build", staticmethod(_build_short))
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", tmp_path / "assets")


@pytest.fixture(scope="session")
def identity(tmp_path_factory) -> str:
    """The tiny model with gates that change nothing."""
    folder = tmp_path_factory.mktemp("models") / "identity"
    convert_checkpoint(STORIES, folder)
    return str(folder)


@pytest.fixture(scope="session")
def random_gates(tmp_path_factory) -> str:
    """The tiny model with random gates."""
    folder = tmp_path_factory.mktemp("models") / "random"
    convert_checkpoint(STORIES, folder, policy="normal", granularity="elementwise")
    return str(folder)


@pytest.fixture
def base(tmp_path) -> Path:
    """A copy of the tiny model, to be changed."""
    return Path(shutil.copytree(STORIES, tmp_path / "base"))
