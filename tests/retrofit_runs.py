"""Small training runs for tests: the real 260K-parameter model, a short story, a few steps."""

import copy
import json
from pathlib import Path

import yaml

from gated_llama.convert import convert_checkpoint
from gated_llama.diagnostics.corpus import read_texts
from gated_llama.retrofit.settings import Settings, read_settings
from gated_llama.retrofit.training import train


STORIES = Path(__file__).parent / "data" / "stories260K"

# A recipe with every kind of section; float32, so that equal means equal.
RECIPE = {
    "source": str(STORIES),
    "source_bos": "<s>",
    "student_bos": "none",
    "data": {"context": 32},
    "losses": {"kl": 1.0},
    "gates": {"multiplier": 10},
    "training": {"max_steps": 6, "learning_rate": 1e-3, "bf16": False, "save_steps": 100, "use_cpu": True},
    "measure": {"every": 1.0},
}

ALL_LOSSES = {
    "next_token": 0.3,
    "kl": {"weight": 1.0, "top_k": 50},
    "attention_output": 0.5,
    "outlier": {"weight": 0.1, "tau": 2.0, "first_token_weight": 16.0, "down_proj": True},
    "sink": {"weight": 1.0, "eps": 0.02},
    "gate": 0.1,
}


def prepare(folder: Path, **options) -> dict:
    """A gated model and two texts in `folder`, and the recipe that names them."""
    convert_checkpoint(STORIES, folder / "gated", **({"granularity": "headwise"} | options))
    text = read_texts(None)[0][0]
    (folder / "prose.txt").write_text(text[:12000])
    paragraphs = [{"text": paragraph} for paragraph in text[12000:24000].split("\n\n")]
    (folder / "paragraphs.jsonl").write_text("\n".join(map(json.dumps, paragraphs)))
    texts = {"prose": str(folder / "prose.txt"), "paragraphs": {"path": str(folder / "paragraphs.jsonl"), "share": 3}}
    recipe = copy.deepcopy(RECIPE) | {"model": str(folder / "gated"), "output": str(folder / "run")}
    recipe["data"] |= {"texts": texts, "cache": str(folder / "tokens")}
    return recipe


def merged(recipe: dict, changes: dict) -> dict:
    """`changes` win; sections are merged but for `losses` and `stages`, which are replaced."""
    result = copy.deepcopy(recipe)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict) and key != "losses"
        result[key] = result[key] | value if both else value
    return result


def write(folder: Path, recipe: dict, name: str = "recipe.yaml", **changes) -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(merged(recipe, changes), sort_keys=False))
    return path


def settings(folder: Path, recipe: dict, **changes) -> Settings:
    return read_settings(write(folder, recipe, **changes))


def run(folder: Path, recipe: dict, name: str = "run", **changes):
    """Trains to the end in `folder / name`."""
    return train(settings(folder, recipe, output=str(folder / name), **changes))


def steps(report) -> list[dict]:
    """What was logged of each step, without the time that it took."""
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in report.log if "loss" in entry]
