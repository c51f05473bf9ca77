"""
Run by torchrun with a folder: saves a model under FSDP2 there, "by_hand" with `fully_shard` and by a stock "trainer".

accelerate has FSDP for accelerators only: it is told that the processes are such.
"""

import sys
from pathlib import Path

import torch
from retrofit_ranks import pretend_accelerators
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import Trainer, TrainingArguments
from wrapped_models import IDS, tiny


def sharded():
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    model = tiny()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(IDS, labels=IDS).loss.backward()
    return model


def by_hand(folder: Path):
    model = sharded()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if distributed.get_rank() == 0:
        model.save_pretrained(folder, state_dict=whole)
    assert isinstance(model, FSDPModule)  # still
    model(IDS)


def by_trainer(folder: Path):
    arguments = TrainingArguments(
        str(folder / "run"),
        report_to=[],
        disable_tqdm=True,
        max_steps=1,
        learning_rate=0.0,
        save_strategy="no",
        use_cpu=True,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["GatedLlamaDecoderLayer"]},
    )
    trainer = Trainer(tiny(), arguments, train_dataset=[{"input_ids": IDS[0], "labels": IDS[0]}] * 4)
    trainer.train()
    assert isinstance(trainer.model_wrapped, FSDPModule)
    trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(folder))


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    pretend_accelerators()
    by_trainer(root / "trainer")
    by_hand(root / "by_hand")
    distributed.destroy_process_group()
