"""Checkpoint folders for tests, and what a model makes of the same ids."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from gated_llama import GatedLlamaForCausalLM


IDS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))

# Two ways through the same float32 sums of a model whose logits are of size 1 to 10.
ROUNDING = {"atol": 1e-5, "rtol": 0}
LOUD = 0.05

NO_TOKENIZER = "The source has no tokenizer, so neither has the result."


def write_checkpoint(folder: Path, config: dict, tensors: dict) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load(folder: Path, **options) -> GatedLlamaForCausalLM:
    return GatedLlamaForCausalLM.from_pretrained(folder, attn_implementation="eager", **options).eval()


@torch.no_grad()
def logits_of(model, ids=IDS) -> torch.Tensor:
    return model(input_ids=ids).logits


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def imported_note(config) -> str:
    """The note of a conversion that took over the gate of its source."""
    return (
        f"The source's own gate was taken over ({config.gate_granularity}, stored as "
        f"{config.gate_retrofit['layout']!r}); nothing was initialised or folded."
    )
