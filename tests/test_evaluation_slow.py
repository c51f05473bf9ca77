"""The ways of running that take an interpreter of their own, with all of the harness's tasks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from evaluation_support import ROOTS


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]
pytest_plugins = ["evaluation_fixtures"]

FLAGS = ["--tasks", "hellaswag", "--limit", "4", "--device", "cpu", "--output_path"]


def results(command: list[str], out: Path) -> dict:
    """Scores that a command line saved below `out`, run where data sets lie under their Hub ids."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(out / "cache"),
    }
    done = subprocess.run(command, cwd=ROOTS[0], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = out.rglob("results_*.json")
    found = json.loads(file.read_text())["results"]["hellaswag"]
    return {key: value for key, value in found.items() if "," in key and "stderr" not in key}


def test_command_lines_agree(random_gates, tmp_path):
    hf = ["--model", "hf", "--model_args"]
    commands = {
        "lm_eval on the folder": ["lm_eval", *hf, f"pretrained={random_gates},trust_remote_code=True,dtype=float32"],
        "hf, package imported": ["gated_llama.evaluation", *hf, f"pretrained={random_gates},dtype=float32"],
        "gated-llama": ["gated_llama.evaluation", "--model_args", f"pretrained={random_gates},dtype=float32"],
        "gated-llama eval": ["gated_llama_cli", "eval", random_gates, "--model_args", "dtype=float32"],
    }
    found = [
        results([sys.executable, "-m", *command, *FLAGS, str(tmp_path / str(number))], tmp_path / str(number))
        for number, command in enumerate(commands.values())
    ]
    assert all(scores == found[0] for scores in found), dict(zip(commands, found, strict=True))


def test_two_processes_give_what_one_does(random_gates, tmp_path):
    model = ["--model_args", f"pretrained={random_gates},dtype=float32"]
    one = results(
        [sys.executable, "-m", "gated_llama.evaluation", *model, *FLAGS, str(tmp_path / "1")], tmp_path / "1"
    )
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "gated_llama.evaluation"]
    two = results([*launch, *model, *FLAGS, str(tmp_path / "2")], tmp_path / "2")
    assert two == pytest.approx(one, rel=1e-6)
