"""
A model's rotary embedding in numbers, and in the words that every reader takes for the same numbers.

The parameters are those of Transformers 5.24.0 (modeling_rope_utils.py); `engines` tells who reads which.
"""

from math import isclose, log
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..configuration_gated import GatedLlamaConfig
from ..modeling_gated import GatedLlamaRotaryEmbedding


# What the library reads for each type beside rope_theta. Engines read other names, too, which must not get through.
PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("factor", "short_factor", "long_factor", "attention_factor", "original_max_position_embeddings"),
    "proportional": ("factor",),
}


def rotary_share(config: GatedLlamaConfig) -> float:
    """The share of each head that is rotated."""
    return config.rope_parameters.get("partial_rotary_factor") or 1.0


def rotated(config: GatedLlamaConfig) -> int:
    """How many coordinates of each head are rotated."""
    return int(config.head_dim * rotary_share(config))


def frequencies(config: GatedLlamaConfig) -> tuple[torch.Tensor, float]:
    """Angle per position of each rotary pair, in radians, and the factor on cosine and sine."""
    kind = config.rope_parameters["rope_type"]
    compute = ROPE_INIT_FUNCTIONS.get(kind, GatedLlamaRotaryEmbedding.compute_default_rope_parameters)
    return compute(config, torch.device("cpu"))


def is_yarn(config: GatedLlamaConfig) -> bool:
    return config.rope_parameters["rope_type"] == "yarn"


def yarn_factor(config: GatedLlamaConfig) -> float:
    """How far YaRN stretches the positions; the ratio of the context lengths where `factor` is null."""
    own = config.rope_parameters
    return float(own["factor"] or config.max_position_embeddings / own["original_max_position_embeddings"])


def yarn_amplitude(factor: float) -> float:
    """What YaRN multiplies cosine and sine with unless it is told otherwise (arXiv 2309.00071, section 3.4)."""
    return 0.1 * log(factor) + 1 if factor > 1 else 1.0


def has_own_amplitude(config: GatedLlamaConfig) -> bool:
    """Whether this is YaRN with another factor on cosine and sine (attention_factor; mscale with mscale_all_dim)."""
    return is_yarn(config) and not isclose(frequencies(config)[1], yarn_amplitude(yarn_factor(config)), rel_tol=1e-7)


def rounds_borders(config: GatedLlamaConfig) -> bool:
    """Whether YaRN's frequency borders are whole numbers."""
    return bool(config.rope_parameters.get("truncate", True))


def yarn_positions(config: GatedLlamaConfig) -> float:
    """How many positions YaRN was stretched to."""
    return yarn_factor(config) * config.rope_parameters["original_max_position_embeddings"]


def written_rotary(config: GatedLlamaConfig) -> dict[str, Any]:
    """
    `rope_parameters` of an export: what the library reads and nothing else, without nulls, numbers as floats.

    Some engines take an integer or a null factor for something else. Raises: ValueError for a type that is not known.
    """
    own = config.rope_parameters
    words = {"rope_type": own["rope_type"], "rope_theta": float(own["rope_theta"])}
    if is_yarn(config):
        return words | _written_yarn(config)
    if own["rope_type"] not in PARAMETERS:
        known = ", ".join(sorted({"yarn", *PARAMETERS}))
        raise ValueError(f"rope_type={own['rope_type']!r} cannot be exported; known are {known}.")
    names = [name for name in PARAMETERS[own["rope_type"]] if own.get(name) is not None]
    return words | {
        name: float(own[name]) if name.endswith("factor") and isinstance(own[name], int) else own[name]
        for name in names
    }


def _written_yarn(config: GatedLlamaConfig) -> dict[str, Any]:
    """
    YaRN's parameters. An amplitude of its own is named twice: Transformers and vLLM read `attention_factor`, MLX-LM
    and SGLang compute (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1). Without one, none is named.
    """
    own, factor = config.rope_parameters, yarn_factor(config)
    words = {"factor": factor, "original_max_position_embeddings": own["original_max_position_embeddings"]}
    words |= {name: float(own[name]) for name in ("beta_fast", "beta_slow") if own.get(name)}
    if not rounds_borders(config):
        words["truncate"] = False
    if has_own_amplitude(config):
        amplitude = float(frequencies(config)[1])
        words["attention_factor"] = amplitude
        if factor > 1:
            words |= {"mscale": (amplitude - 1) / (0.1 * log(factor)), "mscale_all_dim": 0.0}
    return words
