"""
Metadata of the GGUF architectures that llama.cpp serves gates in, and the layers without effect that it asks for.

Keys are those below the architecture's name. Source: llama.cpp b11549, src/models/step35.cpp and qwen35.cpp.
"""

from typing import Any

import torch

from ..configuration_gated import GatedLlamaConfig
from .rotary import frequencies, rotated, written_rotary, yarn_amplitude


# Sizes of the recurrent layer without effect; llama.cpp's kernels want heads of 128.
STATE_SIZE = 128
CONVOLUTION = 4


def rope_factors(config: GatedLlamaConfig) -> torch.Tensor:
    """What each frequency is divided by: the tensor rope_freqs, for a rotary embedding that no metadata describe."""
    exponents = torch.arange(0, rotated(config), 2, dtype=torch.float64) / rotated(config)
    return (config.rope_parameters["rope_theta"] ** -exponents / frequencies(config)[0].double()).float()


def needs_rope_factors(config: GatedLlamaConfig) -> bool:
    return config.rope_parameters["rope_type"] == "llama3"


def _shared(config: GatedLlamaConfig) -> dict[str, Any]:
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers + 1,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        **_scaling(config),
    }


def _scaling(config: GatedLlamaConfig) -> dict[str, Any]:
    """Linear and YaRN scaling; llama.cpp multiplies by YaRN's usual amplitude on its own."""
    own = written_rotary(config)
    if own["rope_type"] not in ("linear", "yarn"):
        return {}
    scaling = {"rope.scaling.type": own["rope_type"], "rope.scaling.factor": own["factor"]}
    if own["rope_type"] == "linear":
        return scaling
    return scaling | {
        "rope.scaling.original_context_length": own["original_max_position_embeddings"],
        "rope.scaling.attn_factor": frequencies(config)[1] / yarn_amplitude(own["factor"]),
        "rope.scaling.yarn_beta_fast": own.get("beta_fast", 32.0),
        "rope.scaling.yarn_beta_slow": own.get("beta_slow", 1.0),
    }


def step35(config: GatedLlamaConfig) -> dict[str, Any]:
    """Every layer is dense; full layers rotate half of `dimension_count`, sliding ones all of their own count."""
    theta = float(config.rope_parameters["rope_theta"])
    return {
        **_shared(config),
        "expert_feed_forward_length": 0,  # no layer has experts, yet llama.cpp insists on the key
        "rope.dimension_count": 2 * rotated(config),
        "rope.dimension_count_swa": rotated(config),
        "rope.freq_base_swa": theta,
        # llama.cpp asserts that a layer slides; the one without effect does.
        "attention.sliding_window": config.sliding_window or config.max_position_embeddings,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types] + [True],
    }


def step35_identity_layer(config: GatedLlamaConfig) -> dict[str, tuple]:
    """A layer of zeros; its norms' gains are 1."""
    hidden, query = config.hidden_size, config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    return {
        "self_attn.q_proj.weight": (0.0, query, hidden),
        "self_attn.k_proj.weight": (0.0, key, hidden),
        "self_attn.v_proj.weight": (0.0, key, hidden),
        "self_attn.o_proj.weight": (0.0, hidden, query),
        **_norms_and_mlp(config),
    }


def qwen35(config: GatedLlamaConfig) -> dict[str, Any]:
    """Layers with full attention and a recurrent one without effect, without which llama.cpp aborts."""
    pairs = rotated(config) // 2
    return {
        **_shared(config),
        "rope.dimension_count": rotated(config),
        # Any other split gives some frequencies to a fourth position, which is 0.
        "rope.dimension_sections": [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0],
        "attention.recurrent_layers": [False] * config.num_hidden_layers + [True],
        "ssm.conv_kernel": CONVOLUTION,
        "ssm.inner_size": STATE_SIZE,
        "ssm.state_size": STATE_SIZE,
        "ssm.time_step_rank": 1,
        "ssm.group_count": 1,
    }


def qwen35_identity_layer(config: GatedLlamaConfig) -> dict[str, tuple]:
    """A gated delta net with one head, all zeros; its norms' gains are 1."""
    hidden = config.hidden_size
    return {
        "attn_qkv.weight": (0.0, 3 * STATE_SIZE, hidden),
        "attn_gate.weight": (0.0, STATE_SIZE, hidden),
        "ssm_conv1d.weight": (0.0, 3 * STATE_SIZE, CONVOLUTION),
        "ssm_dt.bias": (0.0, 1),
        "ssm_a": (0.0, 1),
        "ssm_beta.weight": (0.0, 1, hidden),
        "ssm_alpha.weight": (0.0, 1, hidden),
        "ssm_norm.weight": (1.0, STATE_SIZE),
        "ssm_out.weight": (0.0, hidden, STATE_SIZE),
        **_norms_and_mlp(config),
    }


def _norms_and_mlp(config: GatedLlamaConfig) -> dict[str, tuple]:
    hidden, width = config.hidden_size, config.intermediate_size
    return {
        "input_layernorm.weight": (1.0, hidden),
        "post_attention_layernorm.weight": (1.0, hidden),
        "mlp.gate_proj.weight": (0.0, width, hidden),
        "mlp.up_proj.weight": (0.0, width, hidden),
        "mlp.down_proj.weight": (0.0, hidden, width),
    }
