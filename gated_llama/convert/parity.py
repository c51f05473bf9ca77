"""
Whether an export computes what its source computes: the same token ids through both, in float32.

Both are read from their files and rounded to the export's dtype first, so what is measured is the rewriting and not
the rounding of weights. One row of tokens counts its positions from 0, the other spreads them over the whole context,
since a wrong rotary scale shows only far from the start. At a few tokens trained models are so ill-conditioned that
the order of a sum moves a logit by 1e-3 (SmolLM2, float32); they are allowed more, and the others decide.
"""

import gc
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

from ..configuration_gated import GatedLlamaConfig
from ..modeling_gated import GatedLlamaForCausalLM
from .layouts import HeadGeometry, get_layout
from .loading import Loadable
from .targets import Target
from .tensor_files import SafetensorsReader, one_line, read_json
from .tokenizer import PROBES


# Largest difference of the logits, relative to the largest logit where that exceeds 1. In float32 it is rounding
# through the layers; in a shorter dtype it is the rounding of gains that are stored in another form (see `rewriting`).
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

# The share of tokens that must be within the tolerance, and what the others may have, in tolerances.
DECISIVE_SHARE = 0.95
OUTLIER = 100

SHORT, LONG = 64, 512

# A bias of o_proj that is zero is left out of the files, because llama.cpp refuses tensors that it does not know.
MAY_BE_MISSING = "self_attn.o_proj.bias"


@dataclass(frozen=True)
class Parity:
    """
    Source against export.

    Args:
        dtype: the dtype that both were stored in; the computation is in float32.
        tokens: positions compared.
        max_abs_difference: largest difference of the logits.
        usual_difference: 95 % of the tokens of each row have no larger one.
        tolerance: what `usual_difference` may be; the largest may be 100 times that.
        largest_logit: the largest logit of the source in absolute value.
        kl: mean KL divergence of the next-token distributions from source to export, in nats.
    """

    dtype: str
    tokens: int
    max_abs_difference: float
    usual_difference: float
    tolerance: float
    largest_logit: float
    kl: float

    @property
    def passes(self) -> bool:
        # False for nan
        return self.usual_difference <= self.tolerance and self.max_abs_difference <= OUTLIER * self.tolerance


def compare(source: Loadable, export: Path, target: Target, dtype: torch.dtype) -> Parity:
    """Runs both and compares; one model is in memory at a time. ValueError when the export cannot be loaded."""
    model = source.load_model(str(source.rounding(dtype)).removeprefix("torch.")).float()
    ids, positions = sample(model.config, source)
    expected = logits_of(model, ids, positions)
    del model
    gc.collect()  # modules hold cycles; two models need not be in memory at once
    try:
        found = logits_of(LOADERS.get(target.name, load_auto)(export, dtype).eval().float(), ids, positions)
    except (RuntimeError, KeyError) as error:
        raise ValueError(f"The export cannot be loaded: {one_line(error)}") from error
    return judge(expected, found, dtype)


def judge(expected: torch.Tensor, found: torch.Tensor, dtype: torch.dtype) -> Parity:
    """Logits [rows, tokens, vocabulary] of the source and of the export."""
    largest = expected.abs().max().item()
    differences = (expected - found).abs().amax(dim=-1)
    return Parity(
        dtype=str(dtype).removeprefix("torch."),
        tokens=differences.numel(),
        max_abs_difference=differences.max().item(),
        usual_difference=differences.quantile(DECISIVE_SHARE, dim=1).max().item(),
        tolerance=TOLERANCES[dtype] * max(1.0, largest),
        largest_logit=largest,
        kl=mean_divergence(expected.flatten(0, 1), found.flatten(0, 1)),
    )


def mean_divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Mean KL divergence of the distributions of two logits [tokens, vocabulary], in nats; a few tokens at a time."""
    total = 0.0
    for a, b in zip(expected.split(SHORT), found.split(SHORT), strict=True):
        a, b = a.double().log_softmax(-1), b.double().log_softmax(-1)
        total += nn.functional.kl_div(b, a, log_target=True, reduction="sum").item()
    return max(total / len(expected), 0.0)


def sample(config: GatedLlamaConfig, source: Loadable) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and positions, both [2, tokens]; a window that slides is left behind if that takes 512 tokens at most."""
    tokens = min(config.max_position_embeddings, max(SHORT, min(LONG, (config.sliding_window or 0) + SHORT)))
    ids = torch.randint(config.vocab_size, (2, tokens), generator=torch.Generator().manual_seed(0))
    if text := text_ids(source, config.vocab_size):
        ids = torch.tensor(text * (2 * tokens // len(text) + 1))[: 2 * tokens].view(2, tokens)
    spread = torch.linspace(0, config.max_position_embeddings - 1, tokens).long()
    return ids, torch.stack([torch.arange(tokens), spread])


def text_ids(source: Loadable, vocab_size: int) -> list[int]:
    """Ids of the tokenizer's probes; none without a tokenizer."""
    if not source.has_tokenizer:
        return []
    return [index for index in source.load_tokenizer()("\n".join(PROBES))["input_ids"] if index < vocab_size]


@torch.inference_mode()
def logits_of(model: nn.Module, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    # With a mask, positions that jump are not taken for the borders of packed documents.
    mask = torch.ones_like(ids)
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


def load_auto(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The library's class for this folder; its tensors and the file's must be the same."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True, trust_remote_code=False, local_files_only=True
    )
    missing = {name for name in info["missing_keys"] if not name.endswith(MAY_BE_MISSING)}
    if differing := sorted(missing | set(info["unexpected_keys"])):
        raise KeyError(f"its tensors are not those of {type(model).__name__}, the first {differing[0]!r}")
    return model


class HeadedDecoder(nn.Module):
    """A decoder of the library that has no class with a language-modelling head, under such a head."""

    def __init__(self, decoder: nn.Module, vocab_size: int, hidden_size: int):
        super().__init__()
        self.model = decoder
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, **inputs):
        output = self.model(**inputs)
        output["logits"] = self.lm_head(output.last_hidden_state)
        return output


def load_step3p5(folder: Path, dtype: torch.dtype) -> nn.Module:
    """
    Step-3.5 as the library's Step3p7TextModel: the same decoder, without a head and without an Auto class of its own.

    Experts are renamed as the library does for step3p7 checkpoints; biases that are in no file are zero.
    """
    config = Step3p7TextConfig.from_dict(read_json(folder / "config.json"))
    model = HeadedDecoder(Step3p7TextModel(config), config.vocab_size, config.hidden_size)
    reader = SafetensorsReader(folder)
    tensors = {}
    for name in reader.tensors:
        renamed = name.replace(".share_expert.", ".mlp.shared_experts.").replace(".moe.gate.", ".mlp.gate.")
        renamed = renamed.replace(".moe.router_bias", ".mlp.gate.e_score_correction_bias")
        renamed = renamed.replace(".moe.down_proj.weight", ".mlp.experts.down_proj")
        tensors[renamed] = reader.read(name)
    for name in [name for name in tensors if name.endswith(".moe.gate_proj.weight")]:
        prefix = name.removesuffix("moe.gate_proj.weight")
        parts = [tensors.pop(f"{prefix}moe.{part}_proj.weight") for part in ("gate", "up")]
        tensors[f"{prefix}mlp.experts.gate_up_proj"] = torch.cat(parts, dim=1)
    for name, parameter in model.state_dict().items():
        # The layer without effect has no biases in the file.
        if name.endswith("_proj.bias") and ".self_attn." in name:
            tensors.setdefault(name, torch.zeros(parameter.shape))
    model.load_state_dict(rounded(tensors, dtype))
    return model


def load_paper(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The paper release's format, whose class is not in the library, unpacked into this package's own."""
    raw = read_json(folder / "config.json")
    config = GatedLlamaConfig(
        **{name: value for name, value in raw.items() if name in PAPER_FIELDS},
        rope_parameters=(raw["rope_scaling"] or {"rope_type": "default"}) | {"rope_theta": raw["rope_theta"]},
        qk_norm=raw["use_qk_norm"],
        qkv_bias=raw["qkv_bias"],
        o_bias=raw["qkv_bias"],
        gate_bias=raw["qkv_bias"],
        gate_position="sdpa_output",
        gate_granularity="headwise" if raw["headwise_attn_output_gate"] else "elementwise",
    )
    geometry = HeadGeometry(
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.gate_shape[1]
    )
    reader = SafetensorsReader(folder)
    tensors = {}
    for name in reader.tensors:
        tensor = reader.read(name)
        if ".q_proj." in name:
            parts = get_layout("per_kv_group").split(tensor, geometry)
            tensors |= {name.replace(".q_proj.", f".{part}_proj."): value for part, value in parts.items()}
        else:
            tensors[name] = tensor
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model = GatedLlamaForCausalLM(config)
    model.load_state_dict(rounded(tensors, dtype))
    return model


def rounded(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights as a model of that dtype holds them, in float32; `model.to(dtype)` would round its buffers too."""
    return {name: tensor.to(dtype).float() for name, tensor in tensors.items()}


PAPER_FIELDS = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
}

LOADERS = {"step3p5": load_step3p5, "paper": load_paper}
