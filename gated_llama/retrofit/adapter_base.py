"""What a gate adapter belongs to: the base it was taken from, known by its config, its gates and some values."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..configuration_gated import GatedLlamaConfig
from ..convert.checkpoint import GATE_TENSOR
from ..convert.opening import open_checkpoint


# What an adapter may change in the config; the rest of it says what the base computes, or nothing about that.
CARRIED_FIELDS = ("qkv_bias", "o_bias", "mlp_bias", "gate_bias", "bos_token_id", "gate_retrofit")
IDLE_FIELDS = ("use_cache", "pad_token_id", "eos_token_id", "initializer_range", "attention_dropout", "gate_init")
# The part of `gate_retrofit` that says where the gates start.
START_FIELDS = ("policy", "fold", "bias")

SAMPLES = 4  # values kept of each tensor
ROUNDING = 2**-8  # relative; the same value in bfloat16 on one side and in more bits on the other


class Weights(NamedTuple):
    """The tensors of a model or of a folder; a tied head counts once."""

    name: str
    architecture: str
    config: GatedLlamaConfig
    shapes: dict[str, torch.Size]
    read: Callable[[str], torch.Tensor]


def open_weights(source: nn.Module | str | Path) -> Weights:
    """The weights of a model, or of a checkpoint folder without loading it; ValueError when it is not gated_llama."""
    if isinstance(source, nn.Module):
        config = require_gated_llama(getattr(source, "config", None))
        architecture, state = type(source).__name__, source.state_dict()
        name = getattr(source, "name_or_path", "") or architecture
        shapes, read = {key: tensor.shape for key, tensor in state.items()}, state.__getitem__
    else:
        checkpoint = open_checkpoint(source)
        name, config = str(source), GatedLlamaConfig.from_dict(checkpoint.raw_config)
        architecture = next(iter(config.architectures or ()), "")
        shapes = {key: torch.Size(info.shape) for key, info in checkpoint.reader.tensors.items()}
        read = checkpoint.reader.read
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    return Weights(name, architecture, config, shapes, read)


def require_gated_llama(config: Any) -> GatedLlamaConfig:
    if (found := getattr(config, "model_type", None)) != GatedLlamaConfig.model_type:
        raise ValueError(f"This is a model of type {found!r}, not {GatedLlamaConfig.model_type!r}: convert it first.")
    return config


def describe(weights: Weights) -> dict[str, Any]:
    """What `check_base` compares, as in JSON: config fields that decide what is computed, starts, sampled weights."""
    return {"config": fields_of(weights.config), "start": start_of(weights.config), "sample": sample_of(weights)}


def check_base(weights: Weights, base: dict[str, Any]) -> None:
    """ValueError unless these are the weights of `base` (see `describe`), up to their dtype, with unmoved gates."""
    check_fields(weights.config, base["config"], "The adapter's base has")
    check_start(weights)
    if (found := start_of(weights.config)) != base["start"]:
        raise ValueError(f"The gates of the adapter's base start from {base['start']}, those of this model: {found}.")
    for name, expected in base["sample"].items():
        found = values_of(weights.read(name))
        near = [abs(a - b) <= ROUNDING * abs(a) + 1e-7 for a, b in zip(expected, found, strict=False)]
        if len(found) != len(expected) or not all(near):
            raise ValueError(f"This model is not {base['name']}, the adapter's base: its {name} holds other values.")


def check_fields(config: GatedLlamaConfig, expected: dict[str, Any], whose: str) -> None:
    found = fields_of(config)
    if differing := [name for name in expected if found.get(name) != expected[name]]:
        name = differing[0]
        more = f", and {', '.join(differing[1:])} differ too" if differing[1:] else ""
        raise ValueError(f"{whose} {name}={expected[name]!r} where this model has {found.get(name)!r}{more}.")


def check_start(weights: Weights) -> None:
    """ValueError unless every gate is where the identity policy put it."""
    record = weights.config.gate_retrofit or {}
    gates = [name for name in weights.shapes if GATE_TENSOR.search(name)]
    if not gates:
        raise ValueError(f"{weights.name} has no gate parameters.")
    if record.get("policy") != "identity":
        raise ValueError(
            f"{weights.name} is no base for a gate adapter: its policy is {record.get('policy')!r}, and the base is "
            "what `gated-llama convert --policy identity` writes."
        )
    if name := moved_gate(weights):
        raise ValueError(f"{weights.name} is no base for a gate adapter: {name} has moved from its start.")


def moved_gate(weights: Weights) -> str | None:
    """The first gate tensor that is not where the recorded policy put it; None where all are."""
    bias = (weights.config.gate_retrofit or {}).get("bias") or 0.0
    for name in filter(GATE_TENSOR.search, weights.shapes):
        start = 0.0 if name.endswith(".weight") else bias
        if not (weights.read(name).float() - start).abs().max() <= ROUNDING * abs(start):  # not finite: moved, too
            return name
    return None


def fields_of(config: GatedLlamaConfig) -> dict[str, Any]:
    """The config fields that say what is computed, as in JSON."""
    fields = config.to_dict()
    names = [name for name in GatedLlamaConfig.__annotations__ if name not in (*CARRIED_FIELDS, *IDLE_FIELDS)]
    return json.loads(json.dumps({name: fields.get(name) for name in names}))


def start_of(config: GatedLlamaConfig) -> dict[str, Any]:
    """Where the gates start, and which biases there are."""
    record = config.gate_retrofit or {}
    biases = {name: getattr(config, name) for name in CARRIED_FIELDS if name.endswith("_bias")}
    return {name: record.get(name) for name in START_FIELDS} | biases


def sample_of(weights: Weights) -> dict[str, list[float]]:
    return {name: values_of(weights.read(name)) for name in sorted(weights.shapes) if not GATE_TENSOR.search(name)}


def values_of(tensor: torch.Tensor) -> list[float]:
    """`SAMPLES` values, evenly spread."""
    flat = tensor.detach().flatten()
    return flat[:: max(1, len(flat) // SAMPLES)][:SAMPLES].float().tolist()
