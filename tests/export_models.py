"""Saved gated models to export, small and with nothing left at its initial value."""

from pathlib import Path

import torch

from gated_llama import GatedLlamaConfig, GatedLlamaForCausalLM


DATA = Path(__file__).parent / "data"

TINY = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,  # attention matters
    "gate_position": "sdpa_output",
    "gate_granularity": "headwise",
}
MODELS = {"qwen3": {"qk_norm": True}, "llama": {}, "qwen2": {"qkv_bias": True}}
ROTARY = {
    "default": {"rope_type": "default", "rope_theta": 50000.0},
    "linear": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 50000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
QWEN = ("qwen3_5_text", "qwen3_next")
GATED_TARGETS = (*QWEN, "afmoe", "step3p5", "paper")

# Rounding of float32 through two layers; measured 8e-6 at worst.
FLOAT32 = 2e-5


def build(folder, *, zero_gates=False, dtype=torch.float32, **fields):
    """A saved model with random norms, biases and gates, in eval mode."""
    torch.manual_seed(0)
    fields.setdefault("rope_parameters", dict(ROTARY["default"]))
    model = GatedLlamaForCausalLM(GatedLlamaConfig(**{**TINY, **fields})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif ".g_proj." in name:
                parameter.normal_(std=0.5)
            if ".g_proj." in name and zero_gates:
                parameter.zero_()
    model.to(dtype).save_pretrained(folder)
    return model


IDS = torch.randint(TINY["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(1))
