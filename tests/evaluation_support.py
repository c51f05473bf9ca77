"""What the tests of evaluation share: tiny data, the tiny real model, and jobs on them. Skips without the extra."""

from pathlib import Path

import pytest


pytest.importorskip("lm_eval", reason="evaluation needs the extra `eval`: pip install 'gated-llama[eval]'")

from gated_llama.evaluation import load, parse


DATA = Path(__file__).parent / "data"
STORIES = DATA / "stories260K"
ROOTS = [DATA / "eval" / "benchmarks", DATA / "eval" / "text"]


def make_job(model: str | Path, tasks: str, *arguments: str, roots=ROOTS):
    """A job on the CPU in float32, of four documents and batch size 1 unless the arguments say otherwise."""
    defaults = ["--device", "cpu", "--limit", "4", "--batch_size", "1"]
    named = ["--model_args", f"pretrained={model},dtype=float32", "--tasks", tasks]
    return load(parse([*defaults, *named, *arguments]), roots)
