"""How a retrofitted gate starts: what each policy writes, what it folds into the source's weights, what it guarantees.

Source: the identity W_g = 0 with the score's inverse folded into a neighbouring projection; powers of two are exact in
float32, bfloat16 and float16, so the logits are bitwise those of the source.
"""

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..configuration_gated import GatedLlamaConfig


POLICIES = ("identity", "open", "normal", "transplant")


class Start(NamedTuple):
    """A constant logit and the score that it gives; score `None` when an additive gate adds nothing."""

    logit: float
    score: float | None


# silu(1.278464542761074) = 1
IDENTITY_STARTS = {
    ("multiply", "sigmoid"): Start(0.0, 0.5),
    ("multiply", "ns_sigmoid"): Start(0.0, 0.75),
    ("multiply", "silu"): Start(1.278464542761074, 1.0),
    ("multiply", "identity"): Start(1.0, 1.0),
    ("add", "silu"): Start(0.0, None),
    ("add", "identity"): Start(0.0, None),
}

# The linear maps whose output a constant score scales, by position. A bias of o_proj lies behind the G1 gate.
FOLD_SITES = {
    "sdpa_output": ("o_proj.weight",),
    "value": ("v_proj.weight", "v_proj.bias"),
    "key": ("k_proj.weight", "k_proj.bias"),
    "query": ("q_proj.weight", "q_proj.bias"),
    "dense_output": ("o_proj.weight", "o_proj.bias"),
}


@dataclass(frozen=True)
class GateStart:
    """
    What a policy does to one checkpoint.

    Args:
        policy: its name.
        logit: the constant logit of the start; written to the gate's bias, or to its free parameters.
        std: standard deviation of the gate weights, 0 for none.
        seed: seed of the random weights.
        gate_bias: whether gate projections carry a bias.
        fold: name below `self_attn` -> factor, in gated layers.
        notes: what the user should know about the result.
    """

    policy: str
    logit: float = 0.0
    std: float = 0.0
    seed: int = 0
    gate_bias: bool = False
    fold: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def tensor(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Start of the gate tensor `name`, in float32. Random values depend on the seed and the name only."""
        if name.endswith(("g_proj.bias", "g_param")):
            return torch.full(shape, self.logit)
        if not self.std:
            return torch.zeros(shape)
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.randn(shape, generator=generator) * self.std

    def record(self, source_model_type: str, package_version: str) -> dict[str, Any]:
        """`config.gate_retrofit`: what was done, so that it is applied once and can be undone."""
        record = {
            "policy": self.policy,
            "fold": dict(self.fold),
            "bias": self.logit or None,
            "source_model_type": source_model_type,
            "package_version": package_version,
        }
        return record | ({"seed": self.seed} if self.std else {})


def plan_start(
    config: GatedLlamaConfig, policy: str, *, bias: float | None, gate_bias: bool | None, seed: int
) -> GateStart:
    """The start that `policy` gives the gate of `config`; ValueError where it has none."""
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r} is unknown; choose one of {', '.join(POLICIES)}.")
    if policy == "transplant":
        raise ValueError(
            "policy='transplant' is fitted on text: use gated_llama.retrofit.transplant_checkpoint, or "
            "`gated-llama convert --policy transplant --calibration FILE`."
        )
    if bias is not None and policy != "open":
        raise ValueError(f"bias={bias} belongs to policy='open'; policy={policy!r} sets its own.")
    if config.gate_position is None:
        if policy != "identity":
            raise ValueError(f"policy={policy!r} needs a gate, and position=None has none.")
        return GateStart("identity")
    start = {"identity": _identity, "open": _open, "normal": _normal}[policy](config, bias, seed)
    wants_bias = start.logit != 0 and config.gate_input == "hidden_states"
    if gate_bias is False and wants_bias:
        raise ValueError(
            f"policy={policy!r} with gate_activation={config.gate_activation!r} starts from the logit {start.logit}, "
            "which needs gate_bias=True (or leave gate_bias out)."
        )
    return GateStart(**{**start.__dict__, "gate_bias": wants_bias if gate_bias is None else gate_bias})


def _identity(config: GatedLlamaConfig, bias: float | None, seed: int) -> GateStart:
    if config.gate_input == "states":
        raise ValueError(
            "policy='identity' with gate_input='states': the score is a function of the gated tensor and has no "
            "parameter that could be set, so no fold makes it constant. Use policy='normal' and train."
        )
    cell = (config.gate_operation, config.gate_activation)
    if cell not in IDENTITY_STARTS:
        added = {"sigmoid": 0.5, "ns_sigmoid": 0.75}[config.gate_activation]
        raise ValueError(
            f"policy='identity' with an additive {config.gate_activation} gate: it adds {added} at a zero logit and "
            "never 0, so it has no identity. Use gate_activation='silu' or 'identity', or operation='multiply'."
        )
    logit, score = IDENTITY_STARTS[cell]
    if score is None or score == 1:
        notes = ("The SiLU bias is rounded to the dtype: scores are 1 to rounding.",) if logit not in (0, 1) else ()
        return GateStart("identity", logit=logit, notes=notes)
    if config.qk_norm and config.gate_position in ("key", "query"):
        note = (
            f"QK-norm divides a constant score out, so nothing is folded; parity with the source is approximate, "
            f"through rms_norm_eps={config.rms_norm_eps} only."
        )
        return GateStart("identity", notes=(note,))
    exact = score == 0.5
    notes = () if exact else (f"The fold 1/{score} is not a power of two: parity with the source is to rounding.",)
    sites = FOLD_SITES[config.gate_position]
    present = {"v_proj.bias": config.qkv_bias, "k_proj.bias": config.qkv_bias, "q_proj.bias": config.qkv_bias}
    present["o_proj.bias"] = config.o_bias
    fold = {site: 1 / score for site in sites if present.get(site, True)}
    return GateStart("identity", fold=fold, notes=notes)


def _open(config: GatedLlamaConfig, bias: float | None, seed: int) -> GateStart:
    if bias is None or not math.isfinite(bias):
        raise ValueError(
            f"policy='open' needs a bias, not {bias}: the scores start at act(bias), for example bias=4.0."
        )
    if config.gate_input == "states":
        raise ValueError("policy='open' with gate_input='states': that gate has no bias. Use policy='normal'.")
    note = f"Scores start at {config.gate_activation}({bias:g}), nothing is folded: the model differs from its source."
    return GateStart("open", logit=float(bias), notes=(note,))


def _normal(config: GatedLlamaConfig, bias: float | None, seed: int) -> GateStart:
    if config.gate_input == "hidden_states":
        note = f"Gate weights are random (std {config.initializer_range}): the model differs from its source."
        return GateStart("normal", std=config.initializer_range, seed=seed, notes=(note,))
    note = "This gate has no weights to draw: free parameters start at zero. The model differs from its source."
    return GateStart("normal", notes=(note,))
