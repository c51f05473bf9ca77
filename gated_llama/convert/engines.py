"""
What each engine makes of configuration values that Transformers honours: one table per engine, with its source.

The proof of an export runs in Transformers, which honours all of them, so it cannot see what an engine reads otherwise
or not at all. `targets` lists an engine for a model only where nothing here stands against it; the exporter's notes,
the card and the README's tables follow from that. What every engine listed here reads as Transformers does is in no
table: rope_theta, linear scaling, llama3 scaling, YaRN's factor, beta_fast, beta_slow and
original_max_position_embeddings, rms_norm_eps, head_dim, windows, lists of eos_token_id. What depends on the
architecture (biases, windows in Qwen3) stands with the targets.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reader:
    """
    A program that reads exports.

    Args:
        version: the version that was read.
        files: the files of its repository that the table rests on.
        lacks: feature (`targets.FEATURES`) -> what this program does instead of what Transformers does.
    """

    version: str
    files: str
    lacks: Mapping[str, str] = field(default_factory=dict)


ONLY_SILU = "another MLP activation"
REFUSES_ACTIVATION = {ONLY_SILU: "it refuses activations other than SiLU"}
IGNORES_ACTIVATION = {ONLY_SILU: "it computes SiLU whatever the config says"}
NOT_STRETCHED = "amplitude of an unstretched YaRN"
ALWAYS_ROUNDS = "it always rounds the borders of YaRN (truncate=False is not read)"
NO_AMPLITUDE = "where factor is 1 it ignores an amplitude"

READERS = {
    "Transformers": Reader("Transformers 5.24.0", "src/transformers/modeling_rope_utils.py"),
    "vLLM": Reader(
        "vLLM 0.33.0",  # 0.32.0 is the same; releases that know attn_factor instead of attention_factor are not
        "vllm/model_executor/layers/rotary_embedding/__init__.py and the classes it names, vllm/config/model.py, "
        "vllm/model_executor/models/{llama,qwen2,afmoe,step3p5}.py",
        REFUSES_ACTIVATION
        | {
            "context beyond YaRN's": "its rotary table ends at factor * original_max_position_embeddings",
            "dynamic rotary": "its rotary table ends at max_position_embeddings, where dynamic scaling begins",
            "rotary of another type": (
                "it chooses longrope's factors by the context that it was started with and not by the text, and "
                "knows proportional in Gemma 4 alone"
            ),
        },
    ),
    "SGLang": Reader(
        "SGLang 0.5.23",
        "python/sglang/srt/layers/rotary_embedding/{factory,yarn,rope_variant}.py, "
        "python/sglang/srt/models/{llama,qwen2,qwen2_moe,afmoe,step3p5}.py",
        REFUSES_ACTIVATION
        | {
            NOT_STRETCHED: NO_AMPLITUDE,
            "dynamic rotary": "it stretches texts within max_position_embeddings, too",
            "rotary of another type": (
                "it derives longrope's amplitude from context lengths alone, and knows proportional in Gemma 4 alone"
            ),
        },
    ),
    "MLX-LM": Reader(
        "MLX-LM 0.32.2",
        "mlx_lm/models/rope_utils.py, mlx_lm/models/{llama,qwen3,afmoe,step3p5}.py",
        IGNORES_ACTIVATION
        | {
            NOT_STRETCHED: NO_AMPLITUDE,
            "YaRN with exact borders": ALWAYS_ROUNDS,
            "rotary of another type": "it takes longrope's long factors for every text, and its own amplitude",
        },
    ),
    "llama.cpp": Reader(
        "llama.cpp b11549",
        "src/llama-context.cpp, ggml/src/ggml-cpu/ops.cpp; for files that this package writes",
        IGNORES_ACTIVATION | {"YaRN with exact borders": ALWAYS_ROUNDS},
    ),
    "convert_hf_to_gguf": Reader(
        "llama.cpp b11549",
        "conversion/{base,llama,qwen}.py, its converter of Transformers folders",
        IGNORES_ACTIVATION
        | {
            "YaRN amplitude of its own": (
                "its converter writes attention_factor as what YaRN's usual amplitude is multiplied by"
            ),
            "YaRN with exact borders": ALWAYS_ROUNDS,
            "dynamic rotary": "its converter drops dynamic scaling",
            "rotary of another type": "its converter writes longrope and proportional for other architectures only",
        },
    ),
}
