"""Sources that bring a gate of their own: one record per format, and why the others cannot be represented.

Every record here describes a G1 gate, `y * sigmoid(x W_g + b)` on the output of attention per head, whose weights lie
where `layout` says (see `layouts.LAYOUTS`). The layout is part of the format and never read off a shape; a checkpoint
known to deviate can be converted with another one (`convert_checkpoint(..., layout=...)`).
"""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig

from . import sources, state_dicts
from .gated_source import GatedSource
from .sources import (
    ATTENTION_BIAS,
    COMMON_FIELDS,
    MLP_BIAS,
    QWEN_WINDOW_READS,
    QWEN_WINDOWS,
    Ignored,
    Source,
    check_rope,
    window_of,
)


# The norms that exports make neutral where the model has none, and the linear maps before them.
QK_NORMS = {"self_attn.q_norm.weight": "self_attn.q_proj", "self_attn.k_norm.weight": "self_attn.k_proj"}


def gate(granularity: Callable[[PreTrainedConfig], str], bias: Callable[[PreTrainedConfig], bool]) -> dict[str, Any]:
    """Field table of a G1 gate that multiplies by a sigmoid."""
    return {
        "gate_position": lambda config: "sdpa_output",
        "gate_granularity": granularity,
        "gate_bias": bias,
    }


NO_LINEAR_LAYERS = "there is no linear-attention layer"
NO_EXPERTS = "there is no mixture of experts"

# The paper release: its own Qwen3Config with four more attributes. `attention_bias` is in it but not read.
PAPER_FLAGS = ("headwise_attn_output_gate", "elementwise_attn_output_gate")
PAPER_READS = frozenset({"qkv_bias", "use_qk_norm", *PAPER_FLAGS, *QWEN_WINDOW_READS})
PAPER_FIELDS = (
    COMMON_FIELDS
    | QWEN_WINDOWS
    | {
        "qk_norm": lambda config: getattr(config, "use_qk_norm", True),
        # Its q, k, v and o projections share one flag, and so do the gate rows of q_proj.
        "qkv_bias": lambda config: getattr(config, "qkv_bias", False),
        "o_bias": lambda config: getattr(config, "qkv_bias", False),
    }
)


def paper_flags(config: PreTrainedConfig) -> list[str]:
    return [name for name in PAPER_FLAGS if getattr(config, name, False)]


def refuse_paper(config: PreTrainedConfig) -> str | None:
    if len(paper_flags(config)) == 2:
        return "headwise_attn_output_gate and elementwise_attn_output_gate are both true, and a layer has one gate"
    if window_of(config) is not None:
        return (
            "use_sliding_window is true, which the release's code applies in its flash-attention class only: the same "
            "weights are two models there. Set use_sliding_window to false, or drop the gate flags"
        )
    return None


PAPER_BASELINE = Source(
    "qwen3",
    PAPER_FIELDS,
    PAPER_READS,
    ignored={"attention_bias": Ignored("the release's code reads qkv_bias instead")},
    refuse=refuse_paper,
)
PAPER_GATED = GatedSource(
    "qwen3",
    PAPER_FIELDS
    | gate(
        lambda config: paper_flags(config)[0].split("_")[0],
        lambda config: getattr(config, "qkv_bias", False),
    ),
    PAPER_READS,
    ignored=PAPER_BASELINE.ignored,
    refuse=refuse_paper,
    layout="per_kv_group",
)


def refuse_hybrid(config: PreTrainedConfig) -> str | None:
    linear = [index for index, kind in enumerate(config.layer_types) if kind != "full_attention"]
    if linear:
        return (
            f"layers {linear} are {config.layer_types[linear[0]]} layers (it is a hybrid), and every layer of this "
            "decoder is softmax attention"
        )
    if getattr(config, "attn_output_gate", True) is False:
        return "attn_output_gate is false, but the library's class always gates"
    sparse = [index for index in range(config.num_hidden_layers) if is_sparse(config, index)]
    return f"layers {sparse} are mixtures of experts, and every layer of this decoder is dense" if sparse else None


def is_sparse(config: PreTrainedConfig, index: int) -> bool:
    return (
        getattr(config, "num_experts", 0) > 0
        and index not in config.mlp_only_layers
        and (index + 1) % config.decoder_sparse_step == 0
    )


def without_axes(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters without the split over axes: the positions of a text are the same on each of them."""
    return {name: value for name, value in rope.items() if not name.startswith("mrope_")}


def text_rope(config: PreTrainedConfig) -> dict[str, Any]:
    """Rotary parameters for text alone; a rotary share of 1 is this decoder's default and left out."""
    rope = without_axes(config.rope_parameters)
    return {name: value for name, value in rope.items() if (name, value) != ("partial_rotary_factor", 1)}


QWEN_GATED_FIELDS = (
    COMMON_FIELDS
    | ATTENTION_BIAS
    | {"qk_norm": lambda config: True, "rope_parameters": text_rope}
    | gate(lambda config: "elementwise", lambda config: config.attention_bias)
)
QWEN_GATED_READS = frozenset(
    {
        "attention_bias",
        "attn_output_gate",
        "full_attention_interval",
        "layer_types",
        "num_experts",
        "mlp_only_layers",
        "decoder_sparse_step",
    }
)
QWEN_GATED_IGNORED = {
    name: Ignored(reason)
    for reason, names in {
        NO_LINEAR_LAYERS: (
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "mamba_ssm_dtype",
        ),
        NO_EXPERTS: (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "num_experts_per_tok",
            "norm_topk_prob",
            "output_router_logits",
            "router_aux_loss_coef",
        ),
        "vLLM's name of attention_bias": ("qkv_bias",),
    }.items()
    for name in names
}


def check_text_rotary(raw: Mapping[str, Any]) -> None:
    """As `check_rope`, with partial rotary and a split of the frequencies over axes, which a text does not notice."""
    tables = ("rope_scaling", "rope_parameters")
    check_rope(
        {name: without_axes(value) if name in tables and value else value for name, value in raw.items()},
        partial_rotary=True,
    )


def qwen_gated(model_type: str) -> GatedSource:
    """The record of a Qwen decoder with a gate in the query projection of its softmax layers."""
    return GatedSource(
        model_type,
        QWEN_GATED_FIELDS,
        QWEN_GATED_READS,
        ignored=QWEN_GATED_IGNORED,
        refuse=refuse_hybrid,
        check_rotary=check_text_rotary,
        layout="per_head",
        zero_centred=True,
        qk_norms=QK_NORMS,
    )


def step_rope(config: PreTrainedConfig) -> dict[str, Any]:
    """The rotary parameters of all layers; `refuse_step` has seen to it that there is one table."""
    return dict(config.rope_parameters[config.layer_types[0]])


def refuse_step(config: PreTrainedConfig) -> str | None:
    sparse = [index for index, kind in enumerate(config.mlp_layer_types) if kind == "sparse"]
    if sparse:
        return f"layers {sparse} are mixtures of experts, and every layer of this decoder is dense"
    tables = [config.rope_parameters[kind] for kind in sorted(set(config.layer_types))]
    if any(table != tables[0] for table in tables):
        return f"rotary parameters differ between layer types ({config.rope_parameters}); this decoder has one table"
    heads = [layer.num_attention_heads for layer in config.per_layer_config]
    if len(set(heads)) > 1:
        return f"layers have {heads} query heads, and all layers of this decoder have the same number"
    if any(config.swiglu_limits_shared or ()):
        return f"swiglu_limits_shared={config.swiglu_limits_shared} clamps the MLP, which this decoder does not"
    if config.query_pre_attn_scalar != config.head_dim:
        return f"query_pre_attn_scalar={config.query_pre_attn_scalar} scales scores by another width than head_dim"
    return None


def check_step_rotary(raw: Mapping[str, Any]) -> None:
    """ValueError for rotary settings that differ between layers, or stand where the library's class does not look."""
    for name in ("rope_theta", "partial_rotary_factors"):
        values = raw.get(name)
        if isinstance(values, list) and len(set(values)) > 1:
            raise ValueError(f"{name}={values} differs between layers; this decoder has one rotary embedding for all.")
    nested = raw.get("rope_parameters") or {}
    if raw.get("partial_rotary_factor") is not None or not all(isinstance(table, dict) for table in nested.values()):
        raise ValueError(
            "Step reads rotary parameters per layer, from rope_theta and partial_rotary_factors or from a table per "
            "layer type in rope_parameters; this config.json has them in another place, where its code ignores them."
        )
    for table in [*nested.values(), raw.get("rope_scaling")]:
        check_rope({"rope_parameters": table}, partial_rotary=True)


STEP = GatedSource(
    "step3p5",
    COMMON_FIELDS
    | QWEN_WINDOWS
    | ATTENTION_BIAS
    | MLP_BIAS
    | {"qk_norm": lambda config: True, "rope_parameters": step_rope}
    | gate(lambda config: "headwise", lambda config: False),
    frozenset(
        {
            "attention_bias",
            "attention_other_setting",
            "layer_types",
            "mlp_bias",
            "mlp_layer_types",
            "moe_layers_enum",
            "num_attention_groups",
            "num_sliding_attention_heads",
            "partial_rotary_factors",
            "query_pre_attn_scalar",
            "sliding_window",
            "swiglu_limits_shared",
        }
    ),
    ignored={
        "per_layer_config": Ignored("every layer has the same sizes", only=({}, None)),
        "yarn_only_types": Ignored("full attention has the scaled rotary", only=(None, [], ["full_attention"])),
        "use_head_wise_attn_gate": Ignored("the library's class always gates, per head", only=(True,)),
        "zero_centered": Ignored("norms are stored as gain - 1", only=(True,)),
        "use_qk_norm": Ignored("queries and keys are always normalised", only=(True,)),
        "att_impl_type": Ignored("grouped-query attention", only=("GQA",)),
        "use_mfa": Ignored("grouped-query attention", only=(False,)),
        "sink": Ignored("there is no attention sink parameter", only=(False, None)),
        "use_rope_layers": Ignored("every layer rotates", only=(None, [])),
        "num_nextn_predict_layers": Ignored("there is no layer for multi-token prediction", only=(0, None)),
        "max_seq_len": Ignored("a limit of serving; max_position_embeddings is read"),
    }
    | {
        name: Ignored(NO_EXPERTS)
        for name in (
            "moe_every_n_layer",
            "moe_intermediate_size",
            "moe_layer_offset",
            "moe_num_experts",
            "moe_router_activation",
            "moe_router_scaling_factor",
            "moe_top_k",
            "mtp_layer_types",
            "mtp_mlp_layer_types",
            "n_routed_experts",
            "need_fp32_gate",
            "norm_expert_weight",
            "num_experts_per_tok",
            "num_local_experts",
            "output_router_logits",
            "share_expert_dim",
            "share_expert_dims",
            "swiglu_limits",
            "use_moe",
            "use_moe_router_bias",
        )
    },
    refuse=refuse_step,
    check_rotary=check_step_rotary,
    zero_centred=True,
    qk_norms=QK_NORMS,
)


def refuse_afmoe(config: PreTrainedConfig) -> str | None:
    if config.mup_enabled:
        return "mup_enabled multiplies the embeddings by sqrt(hidden_size), and this decoder takes them as they are"
    full = [index for index, kind in enumerate(config.layer_types) if kind == "full_attention"]
    if full:
        return f"its full-attention layers {full} do not rotate, and every layer of this decoder does"
    sparse = list(range(config.num_dense_layers, config.num_hidden_layers))
    return f"layers {sparse} are mixtures of experts, and every layer of this decoder is dense" if sparse else None


def afmoe_window(config: PreTrainedConfig) -> int | None:
    """None for a window that holds the whole context: AFMoE rotates in sliding layers only."""
    window = config.sliding_window
    return window if window is not None and window < config.max_position_embeddings else None


AFMOE = GatedSource(
    "afmoe",
    COMMON_FIELDS
    | ATTENTION_BIAS
    | {"qk_norm": lambda config: True, "sliding_window": afmoe_window}
    | gate(lambda config: "elementwise", lambda config: False),
    frozenset(
        {
            "attention_bias",
            "global_attn_every_n_layers",
            "layer_types",
            "mup_enabled",
            "num_dense_layers",
            "sliding_window",
        }
    ),
    ignored={
        name: Ignored(NO_EXPERTS)
        for name in (
            "load_balance_coeff",
            "moe_intermediate_size",
            "n_group",
            "num_expert_groups",
            "num_experts",
            "num_experts_per_tok",
            "num_limited_groups",
            "num_shared_experts",
            "output_router_logits",
            "route_norm",
            "route_scale",
            "score_func",
            "topk_group",
            "use_grouped_mm",
        )
    },
    refuse=refuse_afmoe,
    renames={"self_attn.g_proj": "self_attn.gate_proj", "post_attention_layernorm": "pre_mlp_layernorm"},
    qk_norms=QK_NORMS,
    output_norms={"post_attention_layernorm.weight": "self_attn.o_proj", "post_mlp_layernorm.weight": "mlp.down_proj"},
)

GATED_SOURCES = {
    source.model_type: source for source in (qwen_gated("qwen3_next"), qwen_gated("qwen3_5_text"), STEP, AFMOE)
}

OUTPUT_NORMS = "its layers also normalise what attention and MLP write, and this decoder has no norm there"
LATENT_ATTENTION = "its keys and values come from a shared latent (MLA), and this decoder projects them from the input"
PARTS = "it holds more than a language model: save its text model alone"

EXPERTS = "its layers are mixtures of experts, and every layer of this decoder is dense"
# Architectures, most of them gated, that have no representation here whatever the values in their config.json.
NOT_REPRESENTABLE = {
    "axk2": f"its gate reads a latent of the query instead of the hidden state, and {LATENT_ATTENTION}",
    "bailing_hybrid": LATENT_ATTENTION,
    "beam": OUTPUT_NORMS,
    "deepseek_v2": LATENT_ATTENTION,
    "deepseek_v3": LATENT_ATTENTION,
    "dory": "it keeps its states on the unit sphere (nGPT) and has no norm with a gain",
    "dots3_note": PARTS,
    "dots3_note_text": LATENT_ATTENTION,
    "hrm_text": "it runs two stacks of layers in turns, and this decoder runs one once",
    "hy_v4": LATENT_ATTENTION,
    "inkling2_text": "it mixes neighbouring tokens by convolutions around its attention",
    "laguna": "its gate is a softplus, which has no upper bound and is no sigmoid of anything",
    "lfm3": "it has convolution layers in place of attention",
    "muse_glimmer_text": OUTPUT_NORMS,
    "muse_spark_text": OUTPUT_NORMS,
    "mixtral": EXPERTS,
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS,
    "qwen3_5": PARTS,
    "qwen3_5_moe": PARTS,
    "qwen3_5_moe_text": EXPERTS,
    "qwen4_exp_text": "its residual stream is several streams that are mixed anew around each layer",
    "step3p7": PARTS,
}


def source_for(raw: Mapping[str, Any], layout: str | None = None) -> Source:
    """The record for a raw config.json, with another `layout` if one is given; ValueError says why there is none."""
    flag = state_dicts.declared_layout(raw)
    raw = {name: value for name, value in raw.items() if name not in state_dicts.DECLARED_LAYOUTS}
    record = declared_source(raw)
    if isinstance(record, GatedSource):
        return record.with_layout(layout) if layout else record
    layout = layout or flag
    return state_dicts.gated(record, layout) if layout else record


def declared_source(raw: Mapping[str, Any]) -> Source:
    model_type = raw.get("model_type")
    if reason := NOT_REPRESENTABLE.get(model_type):
        raise ValueError(f"Sources of model type {model_type!r} cannot be converted: {reason}.")
    if model_type == "qwen3" and not PAPER_READS.isdisjoint(raw.keys() - QWEN_WINDOW_READS):
        return PAPER_GATED if any(raw.get(name) for name in PAPER_FLAGS) else PAPER_BASELINE
    return GATED_SOURCES.get(model_type) or sources.source_for(raw, GATED_SOURCES)
