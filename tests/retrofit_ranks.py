"""Run by torchrun with a JSON file of [folder, recipe, changes]: trains in `folder / "two"` on every rank."""

import json
import os
import sys
from pathlib import Path

import torch
from retrofit_runs import merged
from torch import distributed

from gated_llama.retrofit import settings
from gated_llama.retrofit.training import train


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, recipe, changes = json.loads(Path(sys.argv[1]).read_text())
    path = Path(folder, f"rank-{os.environ['RANK']}.yaml")
    path.write_text(json.dumps(merged(recipe, changes | {"output": str(Path(folder, "two"))})))
    report = train(settings.read_settings(path))
    distributed.destroy_process_group()
    sys.exit(0 if report.complete else 1)
