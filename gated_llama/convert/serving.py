"""Where a gated model can be served: the README's table, from the records that the exporter works with."""

from collections.abc import Iterable

from ..configuration_gated import GatedLlamaConfig
from .targets import EVERY_ENGINE, EVERY_TARGET, FEATURES, Service, Target, features


# Nothing is exported: the folder with its code, or this package installed beside the engine.
AS_IT_IS = Target(
    "as it is",
    GatedLlamaConfig.model_type,
    "GatedLlamaForCausalLM",
    "the folder itself, through an engine's Transformers backend",
    GatedLlamaConfig.to_dict,
    native=frozenset(FEATURES),
    services=(
        Service("Transformers"),
        Service("vLLM", reader="Transformers"),
        Service("SGLang", read_only=True, reader="Transformers"),
    ),
)

MODELS = {
    "Qwen3 (QK-norm)": {"qk_norm": True},
    "Llama, Mistral (no QK-norm)": {},
    "Qwen2 (q/k/v bias)": {"qkv_bias": True},
}
GATES = {
    "headwise": {"gate_granularity": "headwise"},
    "elementwise": {"gate_granularity": "elementwise"},
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
ROTARY = {
    "YaRN with an amplitude of its own (`attention_factor`, `mscale`)": YARN | {"attention_factor": 1.0},
    "YaRN with `truncate: false`": YARN | {"truncate": False},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
}
ZERO_GATES = "zero (an identity conversion before training)"

LEGEND = """\
*as it is*: the folder that `convert` or `save_pretrained` wrote, with `trust_remote_code=True` or with this package
installed. A name: `gated-llama export MODEL OUT --target NAME`. *trick*: the export computes the same through a
rewriting that has a price, such as repeated rows, a layer without effect, or projections that must not be quantised;
the card in OUT says which. †: from the engine's source code, and that engine was not run; which of the others were
run, on what, is in `benchmarks/engines`. The last three rows are plain architectures that every engine has (llama.cpp
after its own conversion); they were not run. A dash: not possible.

Engines read default, linear, llama3 and plain YaRN rotary embeddings as Transformers does (llama.cpp has no llama3 for
elementwise gates), and for others some compute something else: `gated_llama/convert/engines.py` says what, by which
file of the engine. An export names the engines that remain; for headwise gates, and for zero ones:"""


def serving_table() -> str:
    """Markdown: a row for each model or rotary embedding and gate, a column for each engine: what serves it there."""
    with_gate = [AS_IT_IS, *(target for target in EVERY_TARGET if target.gate is not None)]
    without_gate = [target for target in EVERY_TARGET if target.gate is None]
    rows = [("model", "gate", *EVERY_ENGINE), ("---",) * (2 + len(EVERY_ENGINE))]
    for model, fields in MODELS.items():
        for gate, gate_fields in GATES.items():
            rows.append((model, gate, *cells(example(**fields, **gate_fields), with_gate)))
    for model, fields in MODELS.items():
        rows.append((model, ZERO_GATES, *cells(example(**fields), without_gate)))
    others = [("rotary embedding", "gate", *EVERY_ENGINE), rows[1]]
    for kind, parameters in ROTARY.items():
        model = example(**GATES["headwise"], rope_parameters=dict(parameters))
        others.append((kind, "headwise", *cells(model, with_gate)))
        others.append((kind, "zero", *cells(model, without_gate)))
    return f"{markdown(rows)}\n\n{LEGEND}\n\n{markdown(others)}\n"


def markdown(rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def example(**fields) -> GatedLlamaConfig:
    """A model with grouped heads and the fields that matter here."""
    return GatedLlamaConfig(num_attention_heads=16, num_key_value_heads=8, gate_position="sdpa_output", **fields)


def cells(config: GatedLlamaConfig, targets: Iterable[Target]) -> list[str]:
    """For each engine the targets through which it serves such a model."""
    names = features(config)
    ways: dict[str, list[str]] = {engine: [] for engine in EVERY_ENGINE}
    for target in targets:
        if target.missing(names):
            continue
        label = target.name if target is AS_IT_IS else f"`{target.name}`"
        if target.tricks_for(names) and target.gate is not None:
            label += " (trick)"
        for service in target.services_for(names):
            ways[service.engine].append(label + ("†" if service.read_only else ""))
    return [", ".join(dict.fromkeys(found)) or "-" for found in ways.values()]
