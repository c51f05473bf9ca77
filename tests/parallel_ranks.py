"""Run by torchrun with a folder of checkpoints: loads each sharded and compares it with the whole model."""

import sys
from pathlib import Path

import torch
from torch import distributed
from transformers.distributed import DistributedConfig

from gated_llama import GatedLlamaForCausalLM


IDS = torch.arange(1, 13)[None]


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def faults(folder) -> list[str]:
    """What differs by more than the order of fp32 sums."""
    plan = DistributedConfig(tp_size=2, tp_plan="auto")
    sharded, single = (
        GatedLlamaForCausalLM.from_pretrained(folder, **arguments) for arguments in ({"distributed_config": plan}, {})
    )
    with torch.no_grad():
        found = [] if torch.allclose(sharded(IDS).logits, single(IDS).logits, rtol=1e-4, atol=1e-4) else ["logits"]
    for model in (sharded, single):
        model(IDS, labels=IDS).loss.backward()
    for name, parameter in sharded.named_parameters():
        expected = single.get_parameter(name).grad
        if not torch.allclose(whole(parameter.grad), expected, rtol=1e-3, atol=1e-5):
            found.append(f"gradient of {name}")
    return found


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    failed = {folder.name: found for folder in sorted(Path(sys.argv[1]).iterdir()) if (found := faults(folder))}
    distributed.destroy_process_group()
    sys.exit(f"{failed}" if failed else 0)
