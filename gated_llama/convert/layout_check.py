"""Which row order a fused query/gate projection has, by what each of them makes of a text."""

from pathlib import Path

import torch
from transformers import AutoTokenizer

from ..modeling_gated import GatedLlamaForCausalLM
from .checkpoint import Plan, Stream, make_plan
from .layouts import CONFUSABLE
from .opening import open_checkpoint


def layout_losses(source: str | Path, text: str | torch.Tensor, *, revision: str | None = None) -> dict[str, float]:
    """
    Mean next-token loss of one batch, in nats per token, under each layout that the source's q_proj could have.

    For sources whose own code is not at hand, where parity cannot be measured. A wrong layout mixes queries with
    gates, so the loss of the right one is lower by far on a trained model; on an untrained one all are alike. The
    whole model is held in memory, one layout at a time, and runs in float32.

    Args:
        source: as for `convert_checkpoint`, with a gate fused into q_proj.
        text: a text that the model should find likely, or its token ids [batch, tokens].

    Raises: ValueError when the source has no fused gate, or the text is shorter than two tokens.
    """
    checkpoint = open_checkpoint(source, revision)
    plans = {name: make_plan(checkpoint, {}, {}, layout=name, dtype=torch.float32) for name in CONFUSABLE}
    if isinstance(text, str):
        text = AutoTokenizer.from_pretrained(checkpoint.folder)(text, return_tensors="pt")["input_ids"]
    if text.shape[-1] < 2:
        raise ValueError(f"The text has {text.shape[-1]} token(s), and a loss needs at least 2.")
    return {name: loss_of(plan, text) for name, plan in plans.items()}


@torch.inference_mode()
def loss_of(plan: Plan, ids: torch.Tensor) -> float:
    stream = Stream(plan, progress=None)
    tensors = {name: torch.cat(list(stream.parts(name))) for name in plan.targets}
    model = GatedLlamaForCausalLM.from_pretrained(None, config=plan.config, state_dict=tensors, dtype=torch.float32)
    return model.eval()(input_ids=ids, labels=ids, use_cache=False).loss.item()
