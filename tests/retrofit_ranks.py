"""
Run by torchrun with a JSON file of {folder, recipe, changes, sharded, stop}: trains in `folder / "two"` on every rank.

sharded: FSDP over gloo, which accelerate has for accelerators only: it is told that the processes are such.
stop: the step after which the first rank gets a signal, or null.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate.state import DistributedType, PartialState
from retrofit_runs import merged
from torch import distributed

from gated_llama.retrofit import settings
from gated_llama.retrofit.training import train


def pretend_accelerators():
    begin = PartialState.__init__

    def initialise(state, *args, **kwargs):
        begin(state, *args, **kwargs)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = initialise


if __name__ == "__main__":
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    if job["sharded"]:
        pretend_accelerators()

    def progress(step, steps, log):
        if step == job["stop"] and "loss" in log:
            os.kill(os.getpid(), signal.SIGTERM)

    path = Path(job["folder"], f"rank-{os.environ['RANK']}.yaml")
    path.write_text(json.dumps(merged(job["recipe"], job["changes"] | {"output": str(Path(job["folder"], "two"))})))
    report = train(settings.read_settings(path), progress=progress)
    distributed.destroy_process_group()
    sys.exit(0 if report.complete == (job["stop"] is None) else 1)
