"""Rotary parameters as others write them, in the library's words."""

import math
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from .rotary import yarn_amplitude


# Where a config.json keeps them: since version 5, and before.
ROPE_TABLES = ("rope_parameters", "rope_scaling")

# Parameters of YaRN's first code that Transformers never read, and the values for which they change nothing there:
# `finetuned` mattered to the dynamic kind only.
WITHOUT_EFFECT = {"finetuned": (True, False, None), "extrapolation_factor": (1, None)}

ATTN_FACTOR = (
    "The source has attn_factor={relative}, which vLLM and SGLang multiply with YaRN's own amplitude and Transformers "
    "ignores. The result computes what they do, with attention_factor={amplitude:g}, and `gated-llama` reads the "
    "source so too; AutoModelForCausalLM gives the source {library:g}."
)


def with_amplitude(table: Mapping[str, Any]) -> dict[str, Any]:
    """
    A table of rotary parameters with `attention_factor` in place of YaRN's `attn_factor`, and none without effect.

    cos and sin are multiplied by attn_factor (0.1 ln(factor) + 1) where `attn_factor` is read (vLLM, SGLang), and by
    `attention_factor` in Transformers. Raises ValueError where the two contradict each other.
    """
    if (table.get("rope_type") or table.get("type")) != "yarn":
        return dict(table)
    result = {key: value for key, value in table.items() if value not in WITHOUT_EFFECT.get(key, ())}
    if (relative := result.pop("attn_factor", None)) is None:
        return result
    check_numbers({key: table.get(key) for key in ("attn_factor", "factor", "attention_factor")})
    if not table.get("factor") or table.get("mscale") or table.get("mscale_all_dim"):
        raise ValueError(f"attn_factor={relative} needs a factor, and neither mscale nor mscale_all_dim beside it.")
    amplitude = relative * yarn_amplitude(table["factor"])
    stated = table.get("attention_factor")
    if stated is not None and not math.isclose(stated, amplitude, rel_tol=1e-6):
        raise ValueError(
            f"attn_factor={relative} means an amplitude of {amplitude:g} at factor={table['factor']}, and "
            f"attention_factor={stated} another: keep the one that is right."
        )
    return result | {"attention_factor": amplitude if stated is None else stated}


def plain_rotary(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A config.json whose rotary tables have gone through `with_amplitude`, and a note where that changes a model."""
    notes = []

    def plain(table: Mapping[str, Any]) -> dict[str, Any]:
        result = with_amplitude(table)
        if table.get("attention_factor") is None and result.get("attention_factor") is not None:
            amplitudes = {"amplitude": result["attention_factor"], "library": yarn_amplitude(table["factor"])}
            notes.append(ATTN_FACTOR.format(relative=table["attn_factor"], **amplitudes))
        return {key: plain(value) if isinstance(value, dict) else value for key, value in result.items()}

    tables = {name: plain(raw[name]) for name in ROPE_TABLES if isinstance(raw.get(name), dict)}
    return {**raw, **tables}, notes[:1]


def honour_attn_factor(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same for a configuration that the library has read, in place."""
    if isinstance(table := getattr(config, "rope_parameters", None), dict) and "attn_factor" in table:
        config.rope_parameters = with_amplitude(table)
    return config


def check_numbers(values: Mapping[str, Any], place: str = "") -> None:
    """ValueError for what is no number where one belongs, such as a number in quotes."""
    for key, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ValueError(f"config.json has {place}{key}={value!r}, which is no number.")
