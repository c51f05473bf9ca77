"""config.json of each export target, and the layers without effect that some engines ask for."""

from typing import Any

from ..configuration_gated import GatedLlamaConfig
from .rotary import rotary_share, written_rotary


SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "tie_word_embeddings",
    "attention_dropout",
)

# Legal sizes for linear attention that no layer uses: engines compute its state's size, and divide its heads among
# devices, whether or not there is such a layer.
UNUSED_LINEAR_ATTENTION = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
}

# Experts of the layer without effect: engines shard them and their width, and some kernels want a multiple of 128.
UNUSED_EXPERTS = 8
UNUSED_EXPERT_WIDTH = 128


def biases(config: GatedLlamaConfig) -> dict[str, bool]:
    """Which attention projections of the model carry a bias."""
    return {**dict.fromkeys("qkv", config.qkv_bias), "g": config.gate_bias, "o": config.o_bias}


def _shared(config: GatedLlamaConfig) -> dict[str, Any]:
    # Of these two null is written, too: readers have ids of their own for what they do not find.
    fields = {name: getattr(config, name) for name in (*SHARED_FIELDS, "bos_token_id", "eos_token_id")}
    if config.pad_token_id is not None:
        fields["pad_token_id"] = config.pad_token_id
    # Of two names of one function, some engines know one.
    return fields | ({"hidden_act": "silu"} if config.hidden_act == "swish" else {})


def _has_bias(config: GatedLlamaConfig, parts: str) -> bool:
    return any(biases(config)[part] for part in parts)


def _rotary(config: GatedLlamaConfig, **parameters: Any) -> dict[str, Any]:
    """The rotary embedding, where readers of every age look: `rope_parameters`, `rope_theta`, `rope_scaling`."""
    own = written_rotary(config)
    fields = {"rope_theta": own["rope_theta"], "rope_parameters": own | parameters}
    if own["rope_type"] != "default":
        fields["rope_scaling"] = {name: value for name, value in own.items() if name != "rope_theta"} | parameters
    return fields


def _full_attention_qwen(config: GatedLlamaConfig, **rotary: Any) -> dict[str, Any]:
    share = rotary_share(config)
    has_bias = _has_bias(config, "qkvg")
    return {
        **_shared(config),
        **UNUSED_LINEAR_ATTENTION,
        **_rotary(config, partial_rotary_factor=share, **rotary),
        # Transformers reads either place and assumes 0.25 without one; SGLang reads this one.
        "partial_rotary_factor": share,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "full_attention_interval": 1,  # SGLang and MLX-LM read this instead of layer_types
        "attention_bias": has_bias,
        "qkv_bias": has_bias,  # vLLM's name for it
    }


def qwen3_5_text(config: GatedLlamaConfig) -> dict[str, Any]:
    if config.rope_parameters["rope_type"] != "default":
        return _full_attention_qwen(config)
    # Every split is equal for text in Transformers and vLLM. llama.cpp gives frequencies beyond a balanced one to a
    # fourth position, which is 0. A scaled rotary embedding with sections is not understood by vLLM.
    pairs = int(config.head_dim * rotary_share(config)) // 2
    sections = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3]
    return _full_attention_qwen(config, mrope_section=sections, mrope_interleaved=True)


def qwen3_next(config: GatedLlamaConfig) -> dict[str, Any]:
    return {
        **_full_attention_qwen(config),
        "mlp_only_layers": list(range(config.num_hidden_layers)),
        "num_experts": 0,
        "num_experts_per_tok": 0,
    }


def afmoe(config: GatedLlamaConfig) -> dict[str, Any]:
    """N layers as sliding ones, which alone have rotary embeddings, and a full one without effect."""
    layers = config.num_hidden_layers
    return {
        **_shared(config),
        **_rotary(config),
        "num_hidden_layers": layers + 1,
        "num_dense_layers": layers + 1,
        "layer_types": ["sliding_attention"] * layers + ["full_attention"],
        "global_attn_every_n_layers": layers + 1,
        "sliding_window": config.sliding_window or config.max_position_embeddings,
        "mup_enabled": False,
        "tie_word_embeddings": False,
        "attention_bias": False,
        # Nothing has experts, yet vLLM and SGLang read these while they build the model.
        "moe_intermediate_size": UNUSED_EXPERT_WIDTH,
        "num_experts": UNUSED_EXPERTS,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "score_func": "sigmoid",
        "route_norm": True,
        "route_scale": 1.0,
        "n_group": 1,
        "topk_group": 1,
    }


def afmoe_identity_layer(config: GatedLlamaConfig) -> dict[str, tuple]:
    """A layer of zeros; its norms' gains are 1."""
    hidden, head_dim = config.hidden_size, config.head_dim
    norms = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
    query = config.num_attention_heads * head_dim
    return {
        **_zero_attention(config, 1.0),
        "self_attn.gate_proj.weight": (0.0, query, hidden),
        **_zero_mlp("mlp", hidden, config.intermediate_size),
        **{f"{norm}.weight": (1.0, hidden) for norm in norms},
    }


def step3p5(config: GatedLlamaConfig) -> dict[str, Any]:
    """N dense layers and one with experts and without effect, under the names of Step-3.5's own config."""
    layers = config.num_hidden_layers
    rotary = _rotary(config)
    del rotary["rope_parameters"]  # Step-3.5's readers know rope_theta and rope_scaling
    return {
        **_shared(config),
        **rotary,
        # Lists and limits as the released model has them: SGLang reads an entry for each layer.
        "rope_theta": [rotary["rope_theta"]] * (layers + 1),
        "yarn_only_types": ["full_attention"],
        "swiglu_limits": [0.0] * (layers + 1),
        "swiglu_limits_shared": [0.0] * (layers + 1),
        "num_hidden_layers": layers + 1,
        "num_attention_groups": config.num_key_value_heads,
        "layer_types": [*config.layer_types, "full_attention"],
        # Readers build a mask for it whether or not a layer slides.
        "sliding_window": config.sliding_window or config.max_position_embeddings,
        "partial_rotary_factors": [1.0] * (layers + 1),
        "max_seq_len": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "attention_bias": _has_bias(config, "qkv"),
        "att_impl_type": "GQA",
        "use_head_wise_attn_gate": True,
        "moe_layers_enum": str(layers),
        "moe_num_experts": UNUSED_EXPERTS,
        "moe_top_k": 2,
        "moe_intermediate_size": UNUSED_EXPERT_WIDTH,
        "share_expert_dim": UNUSED_EXPERT_WIDTH,
        "moe_router_activation": "softmax",
        "moe_router_scaling_factor": 1.0,
        "norm_expert_weight": True,
        "use_moe_router_bias": True,
        "need_fp32_gate": True,
    }


def step3p5_identity_layer(config: GatedLlamaConfig) -> dict[str, tuple]:
    """A layer of zeros with experts; its zero-centred norms have the gain 1."""
    hidden, width, experts = config.hidden_size, UNUSED_EXPERT_WIDTH, UNUSED_EXPERTS
    return {
        **_zero_attention(config, 0.0),
        "self_attn.g_proj.weight": (0.0, config.num_attention_heads, hidden),
        "moe.gate.weight": (0.0, experts, hidden),
        "moe.router_bias": (0.0, experts),
        "moe.gate_proj.weight": (0.0, experts, width, hidden),
        "moe.up_proj.weight": (0.0, experts, width, hidden),
        "moe.down_proj.weight": (0.0, experts, hidden, width),
        **_zero_mlp("share_expert", hidden, width),
        "input_layernorm.weight": (0.0, hidden),
        "post_attention_layernorm.weight": (0.0, hidden),
    }


def _zero_attention(config: GatedLlamaConfig, norm: float) -> dict[str, tuple]:
    hidden, head_dim = config.hidden_size, config.head_dim
    query, key = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return {
        "self_attn.q_proj.weight": (0.0, query, hidden),
        "self_attn.k_proj.weight": (0.0, key, hidden),
        "self_attn.v_proj.weight": (0.0, key, hidden),
        "self_attn.o_proj.weight": (0.0, hidden, query),
        "self_attn.q_norm.weight": (norm, head_dim),
        "self_attn.k_norm.weight": (norm, head_dim),
    }


def _zero_mlp(name: str, hidden: int, width: int) -> dict[str, tuple]:
    return {
        f"{name}.gate_proj.weight": (0.0, width, hidden),
        f"{name}.up_proj.weight": (0.0, width, hidden),
        f"{name}.down_proj.weight": (0.0, hidden, width),
    }


def qwen3(config: GatedLlamaConfig) -> dict[str, Any]:
    slides = config.sliding_window is not None
    return {
        **_shared(config),
        **_rotary(config),
        "attention_bias": _has_bias(config, "qkvo"),
        "use_sliding_window": slides,
        "sliding_window": config.sliding_window,
        "max_window_layers": config.layer_types.index("sliding_attention") if slides else config.num_hidden_layers,
        "layer_types": list(config.layer_types),
    }


def llama(config: GatedLlamaConfig) -> dict[str, Any]:
    rotary = _rotary(config)
    if "original_max_position_embeddings" in rotary["rope_parameters"]:
        # llama.cpp's converter looks for llama3's here, and takes 8192 without it.
        rotary["original_max_position_embeddings"] = rotary["rope_parameters"]["original_max_position_embeddings"]
    return {
        **_shared(config),
        **rotary,
        "attention_bias": _has_bias(config, "qkvo"),
        "mlp_bias": config.mlp_bias,
        "pretraining_tp": 1,
    }


def paper(config: GatedLlamaConfig) -> dict[str, Any]:
    """The release's config.json, of Transformers 4: a flag for each kind of gate, `qkv_bias` for every projection."""
    rotary = _rotary(config)
    return {
        **_shared(config),
        "rope_theta": rotary["rope_theta"],
        "rope_scaling": rotary.get("rope_scaling"),
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_hidden_layers,
        "attention_bias": False,
        "qkv_bias": _has_bias(config, "qkvgo"),
        "use_qk_norm": config.qk_norm,
        "headwise_attn_output_gate": config.gate_granularity == "headwise",
        "elementwise_attn_output_gate": config.gate_granularity == "elementwise",
    }
