"""What Transformers' common model tests import from test folders that its source distribution leaves out."""

import functools
import os
import tempfile

import torch
from torch import distributed, multiprocessing


class ExportTesterMixin:
    """Tests of exporters: not in the source distribution."""


class GenerationTesterMixin:
    """Tests of `generate`: not in the source distribution; the common tests ask for the name."""


# A value other than the default for each field that every configuration has.
config_common_kwargs = {
    "output_hidden_states": True,
    "return_dict": False,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["AnyModel"],
    "id2label": {0: "label"},
    "label2id": {"label": 0},
    "problem_type": "regression",
}


# Processes on CPUs.


def _get_distributed_backend():
    return "gloo"


def _get_distributed_device_type():
    return "cpu"


def _get_rank_device(rank):
    return torch.device("cpu")


def _set_rank_device(rank):
    torch.set_num_threads(1)


def _start_rank_processes(function, args, nprocs):
    """Calls function(rank, *args) in `nprocs` processes and waits; raises if one fails."""
    multiprocessing.spawn(function, args=args, nprocs=nprocs)


def run_distributed(world_size):
    """`run_distributed(n)(function)(*args)` calls function(rank, *args) in n processes that form a group."""

    def decorate(function):
        @functools.wraps(function)
        def call(*args):
            with tempfile.TemporaryDirectory() as folder:
                _start_rank_processes(
                    _in_group, (world_size, os.path.join(folder, "store"), function, args), world_size
                )

        return call

    return decorate


def _in_group(rank, world_size, store, function, args):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    _set_rank_device(rank)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        function(rank, *args)
    finally:
        distributed.destroy_process_group()
