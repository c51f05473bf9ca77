"""
What a gated model can be exported to: one record per target, read by the exporter and by the README's serving table.

A model is described by its features. A target represents a feature as it is (`native`), by an exact rewriting
(`tricks`), or not at all; an engine that serves the target may lack features of its own, whatever the architecture
(`engines.READERS`) or in this one (`Service.lacks`).

Sources: the model code of Transformers 5.24.0, vLLM 0.32.0, SGLang 0.5.23, MLX-LM 0.32.2 and llama.cpp b11549.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..configuration_gated import GatedLlamaConfig
from . import gguf_configs, rotary, target_configs
from .engines import NOT_STRETCHED, READERS


# The cell of the gate's axes that engines serve. An additive or differently activated gate has no counterpart there.
SERVED_CELL = {
    "gate_position": ("sdpa_output", "engines gate what attention read, before o_proj"),
    "gate_operation": ("multiply", "engines multiply with the score"),
    "gate_activation": ("sigmoid", "engines apply a sigmoid"),
    "gate_input": ("hidden_states", "engines compute the score from the hidden state"),
    "sdpa_output_norm": (False, "engines have no norm on what attention read"),
}

SCALED_ROTARY = ("linear", "yarn", "llama3")

# Name -> whether a model has it.
FEATURES: dict[str, Callable[[GatedLlamaConfig], bool]] = {
    "headwise gate": lambda c: c.gate_position is not None and c.gate_granularity == "headwise",
    "elementwise gate": lambda c: c.gate_position is not None and c.gate_granularity == "elementwise",
    "no gate": lambda c: c.gate_position is None,
    "shared gate": lambda c: c.gate_position is not None and c.gate_head_shared,
    "ungated layers": lambda c: 0 < len(c.gated_layers) < c.num_hidden_layers,
    "fp32 gate": lambda c: c.gate_position is not None and c.gate_in_fp32,
    "gate bias": lambda c: c.gate_bias,
    "q/k/v bias": lambda c: c.qkv_bias,
    "o_proj bias": lambda c: c.o_bias,
    "MLP bias": lambda c: c.mlp_bias,
    "QK-norm": lambda c: c.qk_norm,
    "no QK-norm": lambda c: not c.qk_norm,
    "tied embeddings": lambda c: c.tie_word_embeddings,
    "sliding windows": lambda c: set(c.layer_types) == {"sliding_attention"},
    "sliding windows in some layers": lambda c: len(set(c.layer_types)) > 1,
    "scaled rotary": lambda c: c.rope_parameters["rope_type"] in SCALED_ROTARY,
    "llama3 rotary": lambda c: c.rope_parameters["rope_type"] == "llama3",
    "scaled rotary under sliding windows": lambda c: (
        c.sliding_window is not None and c.rope_parameters["rope_type"] != "default"
    ),
    "dynamic rotary": lambda c: c.rope_parameters["rope_type"] == "dynamic",
    "rotary of another type": lambda c: c.rope_parameters["rope_type"] not in ("default", "dynamic", *SCALED_ROTARY),
    "YaRN amplitude of its own": rotary.has_own_amplitude,
    NOT_STRETCHED: lambda c: rotary.has_own_amplitude(c) and rotary.yarn_factor(c) <= 1,
    "YaRN with exact borders": lambda c: rotary.is_yarn(c) and not rotary.rounds_borders(c),
    "context beyond YaRN's": lambda c: rotary.is_yarn(c) and c.max_position_embeddings > rotary.yarn_positions(c),
    "partial rotary": lambda c: rotary.rotary_share(c) != 1,
    "another MLP activation": lambda c: c.hidden_act not in ("silu", "swish"),
    "one key/value head": lambda c: c.num_key_value_heads == 1,
    "hidden size not a multiple of the heads": lambda c: c.hidden_size % c.num_attention_heads != 0,
}


def features(config: GatedLlamaConfig) -> list[str]:
    """Names of what a target of this model has to represent."""
    return [name for name, present in FEATURES.items() if present(config)]


@dataclass(frozen=True)
class Service:
    """
    An engine that serves an export.

    Args:
        engine: its name, a column of the serving table.
        read_only: nobody ran it with such an export; the statement rests on its source code.
        lacks: feature -> what this engine does not do with it in this architecture, though the target's format has it.
        reader: key in `engines.READERS` of what reads the configuration; `None`: the engine.
    """

    engine: str
    read_only: bool = False
    lacks: Mapping[str, str] = field(default_factory=dict)
    reader: str | None = None

    def __str__(self) -> str:
        return self.engine + (" (from its source code, not run)" if self.read_only else "")

    def missing(self, names: Iterable[str]) -> dict[str, str]:
        """Feature -> what this engine does instead, for those of `names` that it does not honour."""
        lacks = {**READERS[self.reader or self.engine].lacks, **self.lacks}
        return {name: lacks[name] for name in names if name in lacks}


class GateStorage(NamedTuple):
    """Where a target keeps the gate: fused into q_proj in a row order of `layouts`, or under a name of its own."""

    layout: str
    name: str | None = None
    headwise: bool = False


@dataclass(frozen=True)
class Target:
    """
    An architecture to export to.

    Args:
        name: as the user writes it.
        model_type, architecture: `model_type` and `architectures` in its config.json.
        purpose: one line for help and the card.
        config: its config.json from the model's config, without dtype, model_type and architectures.
        gate: where it keeps the gate; `None` when it has none, so that constant gates are folded away.
        native: features that it has itself.
        tricks: feature -> the exact rewriting that represents it, `""` key: what every export needs.
        refusals: feature -> why not, where the plain "it has no ..." would not say enough.
        biases: the projections, among q k v g o, that carry a bias once one of them does.
        zero_centred: norms are stored as gain - 1.
        small_gains: a reader recognises stored gains by a mean below 0.5, so gains are kept below 1 on average.
        qk_norm: it always normalises queries and keys.
        sandwich_norms: it normalises what attention and MLP return.
        unties: the head is stored even where it equals the embeddings.
        identity_layer: tensors (value, *shape) of a layer without effect that is appended; `None` when not needed.
        gguf: one GGUF file instead of a folder; vectors are in float32 there.
        services: the engines.
    """

    name: str
    model_type: str
    architecture: str
    purpose: str
    config: Callable[[GatedLlamaConfig], dict[str, Any]]
    gate: GateStorage | None = None
    native: frozenset[str] = frozenset()
    tricks: Mapping[str, str] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)
    biases: str = ""
    zero_centred: bool = False
    small_gains: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    unties: bool = False
    identity_layer: Callable[[GatedLlamaConfig], dict[str, tuple]] | None = None
    gguf: bool = False
    services: tuple[Service, ...] = ()

    def has_bias(self, config: GatedLlamaConfig) -> bool:
        """Whether the attention of the export carries biases."""
        return any(present for part, present in target_configs.biases(config).items() if part in self.biases)

    @property
    def title(self) -> str:
        """The name, with the architecture where the name stands for several."""
        return f"{self.name} ({self.model_type})" if self.gguf else self.name

    def neutralises(self, config: GatedLlamaConfig) -> list[str]:
        """The projections that are scaled by 2^-30 because a norm behind them must do nothing."""
        names = ["self_attn.q_proj", "self_attn.k_proj"] if self.qk_norm and not config.qk_norm else []
        return names + (["self_attn.o_proj", "mlp.down_proj"] if self.sandwich_norms else [])

    def missing(self, names: Iterable[str]) -> dict[str, str]:
        """Feature -> why the target cannot represent it, for those of `names` that it cannot."""
        absent = [name for name in names if name not in self.native and name not in self.tricks]
        return {name: self.refusals.get(name, f"it has no such thing: {name}") for name in absent}

    def services_for(self, names: Iterable[str]) -> list[Service]:
        """The engines that serve a model with these features."""
        return [service for service in self.services if not service.missing(names)]

    def tricks_for(self, names: Iterable[str]) -> list[str]:
        """What is rewritten, beyond names and row order, to represent these features; one sentence each."""
        return [self.tricks[name] for name in ("", *names) if self.tricks.get(name)]


def require_served_cell(config: GatedLlamaConfig):
    """ValueError when the attention is none that engines know; a gate may be absent."""
    for name, (value, reason) in SERVED_CELL.items():
        if config.gate_position is None and name.startswith("gate_"):
            continue
        if getattr(config, name) != value:
            raise ValueError(
                f"{name}={getattr(config, name)!r} cannot be exported: {reason} ({name}={value!r}). Serve the folder "
                "as it is, through Transformers or an engine's Transformers backend."
            )


SILU = "engines implement SiLU in the MLP only"
NEUTRAL_QK = "QK-norm made neutral: q_proj and k_proj are scaled by 2^-30 and the norms' gains undo it."
ZERO_ROWS = "Layers without a gate get a zero gate (score 1/2) and o_proj times 2."
SHARED_ROWS = "A gate shared by the heads is stored as its average over heads, in each of them."
HEADWISE_ROWS = "The row of a headwise gate is repeated for each coordinate of its head."
BIAS_ZEROS = "Biases that the model lacks are written as zeros, since the target has all of them or none."
FP32_GATE = "The gate's weights are stored in the export's dtype, and engines compute it in the activations'."
OUTPUT_BIAS = "vLLM and llama.cpp drop a bias of o_proj without a word, so the export would be another model there"

GATED = frozenset({"headwise gate", "elementwise gate", "QK-norm", "one key/value head"})
GATED |= {"hidden size not a multiple of the heads"}
YARN = {"YaRN amplitude of its own", NOT_STRETCHED, "context beyond YaRN's"}
SCALED = {"scaled rotary", "llama3 rotary", "YaRN with exact borders"} | YARN
COMMON_TRICKS = {"shared gate": SHARED_ROWS, "ungated layers": ZERO_ROWS, "fp32 gate": FP32_GATE}
COMMON_REFUSALS = {
    "no gate": "the model has no gate; use target qwen3 or llama",
    "another MLP activation": SILU,
    **dict.fromkeys(
        ("dynamic rotary", "rotary of another type"),
        f"only default and {', '.join(SCALED_ROTARY)} rotary are the same in every engine",
    ),
    "o_proj bias": OUTPUT_BIAS,
}

QWEN = {
    "gate": GateStorage("per_head"),
    "native": GATED | SCALED | {"tied embeddings", "partial rotary", "q/k/v bias"},
    "tricks": COMMON_TRICKS | {"headwise gate": HEADWISE_ROWS, "gate bias": BIAS_ZEROS, "no QK-norm": NEUTRAL_QK},
    "refusals": COMMON_REFUSALS,
    "biases": "qkvg",
    "zero_centred": True,
    "qk_norm": True,
}
NO_SGLANG_BIAS = {"q/k/v bias": "SGLang builds this class without biases", "gate bias": "as for q, k and v"}
NO_OUTPUT_BIAS = {"o_proj bias": "it builds Qwen3's o_proj without a bias"}
NO_QWEN3_BIAS = NO_OUTPUT_BIAS | {"q/k/v bias": "it builds Qwen3's attention without biases"}
WINDOWS = ("sliding windows", "sliding windows in some layers")
NO_WINDOWS = dict.fromkeys(WINDOWS, "it builds Qwen3's attention without windows")
NO_MIXED_WINDOWS = {"sliding windows in some layers": "it asserts that all layers slide in Qwen3, or none"}
WIDER_WINDOWS = dict.fromkeys(WINDOWS, "it attends to one token more than the window in this class")
NO_LLAMA3 = {"llama3 rotary": "its converter writes these frequencies for Llama only"}
UNGATED_TRICKS = {
    "headwise gate": "Gates that are zero (score 1/2) fold into o_proj.",
    "elementwise gate": "Gates that are zero (score 1/2) fold into o_proj.",
}
EVERY_ENGINE = ("Transformers", "vLLM", "SGLang", "llama.cpp", "MLX-LM")

TARGETS = {
    target.name: target
    for target in (
        Target(
            "qwen3_5_text",
            "qwen3_5_text",
            "Qwen3_5ForCausalLM",
            "Qwen3.5's dense decoder: elementwise and headwise gates in vLLM and SGLang",
            target_configs.qwen3_5_text,
            **QWEN,
            services=(
                Service("Transformers"),
                Service("vLLM"),
                Service("SGLang", read_only=True, lacks=NO_SGLANG_BIAS),
            ),
        ),
        Target(
            "qwen3_next",
            "qwen3_next",
            "Qwen3NextForCausalLM",
            "Qwen3-Next's decoder without experts, which Transformers serves and engines do not",
            target_configs.qwen3_next,
            **QWEN,
            services=(Service("Transformers"),),
        ),
        Target(
            "afmoe",
            "afmoe",
            "AfmoeForCausalLM",
            "AFMoE without experts: elementwise and headwise gates in vLLM, SGLang and MLX-LM",
            target_configs.afmoe,
            gate=GateStorage("separate", "gate_proj"),
            native=GATED | SCALED | {"sliding windows", "scaled rotary under sliding windows"},
            tricks=COMMON_TRICKS
            | {
                "": "The norms behind attention and MLP made neutral as QK-norm is, and one layer of zeros appended.",
                "headwise gate": HEADWISE_ROWS,
                "no QK-norm": NEUTRAL_QK,
                "tied embeddings": "The head is stored as a copy of the embeddings.",
            },
            refusals=COMMON_REFUSALS,
            qk_norm=True,
            sandwich_norms=True,
            unties=True,
            identity_layer=target_configs.afmoe_identity_layer,
            services=(Service("Transformers"), Service("vLLM"), Service("SGLang", read_only=True), Service("MLX-LM")),
        ),
        Target(
            "step3p5",
            "step3p5",
            "Step3p5ForCausalLM",
            "Step-3.5 without experts: headwise gates in vLLM and MLX-LM",
            target_configs.step3p5,
            gate=GateStorage("separate", "g_proj", headwise=True),
            native=(GATED - {"elementwise gate"})
            | (SCALED - {"YaRN with exact borders"})
            | {"q/k/v bias", "sliding windows", "sliding windows in some layers"},
            tricks=COMMON_TRICKS
            | {
                "": "One layer with experts, all zeros, appended.",
                "no QK-norm": NEUTRAL_QK,
                "tied embeddings": "The head is stored as a copy of the embeddings.",
            },
            refusals=COMMON_REFUSALS
            | {
                "elementwise gate": "its gate has one score per head; use target qwen3_5_text or afmoe",
                "scaled rotary under sliding windows": "its readers disagree on whether sliding layers are scaled",
                "YaRN with exact borders": "Transformers rounds them in this class, so that nothing could be compared",
            },
            biases="qkv",
            zero_centred=True,
            small_gains=True,
            qk_norm=True,
            unties=True,
            identity_layer=target_configs.step3p5_identity_layer,
            services=(
                Service("vLLM", lacks={"one key/value head": "vLLM asserts two or more for this class"}),
                Service(
                    "SGLang",
                    read_only=True,
                    lacks={"q/k/v bias": "SGLang builds this class without biases"} | WIDER_WINDOWS,
                ),
                Service("MLX-LM", lacks={"q/k/v bias": "MLX-LM builds this class without biases"}),
            ),
        ),
        Target(
            "qwen3",
            "qwen3",
            "Qwen3ForCausalLM",
            "plain Qwen3, from an identity retrofit whose gates are still zero or from a model without a gate",
            target_configs.qwen3,
            native=frozenset(FEATURES)
            - {"headwise gate", "elementwise gate", "no QK-norm", "partial rotary", "MLP bias"},
            tricks=UNGATED_TRICKS | {"q/k/v bias": BIAS_ZEROS, "o_proj bias": BIAS_ZEROS},
            refusals={"no QK-norm": "Qwen3 always normalises queries and keys; use target llama"},
            biases="qkvo",
            services=(
                Service("Transformers"),
                Service("vLLM", lacks=NO_OUTPUT_BIAS | NO_MIXED_WINDOWS),
                Service("SGLang", lacks=NO_WINDOWS),
                Service("llama.cpp", lacks=NO_QWEN3_BIAS | NO_WINDOWS | NO_LLAMA3, reader="convert_hf_to_gguf"),
                Service("MLX-LM", lacks=NO_QWEN3_BIAS | NO_WINDOWS),
            ),
        ),
        Target(
            "llama",
            "llama",
            "LlamaForCausalLM",
            "plain Llama, from an identity retrofit whose gates are still zero or from a model without a gate",
            target_configs.llama,
            native=frozenset(FEATURES)
            - {"headwise gate", "elementwise gate", "QK-norm", "partial rotary"}
            - {"sliding windows", "sliding windows in some layers", "hidden size not a multiple of the heads"},
            tricks=UNGATED_TRICKS | {"q/k/v bias": BIAS_ZEROS, "o_proj bias": BIAS_ZEROS},
            refusals={
                "QK-norm": "Llama has none; use target qwen3",
                "hidden size not a multiple of the heads": "LlamaConfig asserts it",
            },
            biases="qkvo",
            services=(
                Service("Transformers"),
                Service("vLLM"),
                Service("SGLang", lacks={"MLP bias": "it drops biases of the MLP without a word"}),
                Service("llama.cpp", reader="convert_hf_to_gguf"),
                Service("MLX-LM"),
            ),
        ),
        Target(
            "paper",
            "qwen3",
            "Qwen3ForCausalLM",
            "the paper release's own format, for its code (github.com/qiuzh20/gated_attention)",
            target_configs.paper,
            gate=GateStorage("per_kv_group", headwise=True),
            native=frozenset(FEATURES)
            - {"no gate", "shared gate", "ungated layers", "fp32 gate", "partial rotary", "MLP bias"}
            - {"sliding windows", "sliding windows in some layers", "YaRN with exact borders"},
            tricks=COMMON_TRICKS | dict.fromkeys(("gate bias", "q/k/v bias", "o_proj bias"), BIAS_ZEROS),
            refusals={
                "no gate": COMMON_REFUSALS["no gate"],
                "YaRN with exact borders": "the Transformers that its code runs with rounds them",
            },
            biases="qkvgo",
        ),
    )
}


EXACT_BORDERS = {"YaRN with exact borders": READERS["llama.cpp"].lacks["YaRN with exact borders"]}

# Two architectures of one format: the first that represents the model is written.
GGUF_TARGETS = (
    Target(
        "gguf",
        "step35",
        "step35",
        "Step-3.5 without experts: headwise gates in llama.cpp",
        gguf_configs.step35,
        gate=GateStorage("separate", "g_proj", headwise=True),
        native=(GATED - {"elementwise gate"})
        | {"scaled rotary", "llama3 rotary"}
        | YARN
        | {"no QK-norm", "q/k/v bias", "partial rotary", "sliding windows", "sliding windows in some layers"},
        tricks=COMMON_TRICKS
        | {
            "": "One layer of zeros with a sliding window, appended.",
            "tied embeddings": "The head is stored as a copy of the embeddings.",
        },
        refusals=COMMON_REFUSALS
        | {
            "elementwise gate": "its gate has one score per head",
            "gate bias": "its gate has none",
            "scaled rotary under sliding windows": "its sliding layers are never scaled",
            **EXACT_BORDERS,
        },
        biases="qkv",
        unties=True,
        identity_layer=gguf_configs.step35_identity_layer,
        gguf=True,
        services=(Service("llama.cpp"),),
    ),
    Target(
        "gguf",
        "qwen35",
        "qwen35",
        "Qwen3.5's dense decoder: elementwise gates in llama.cpp",
        gguf_configs.qwen35,
        gate=GateStorage("per_head"),
        native=GATED | YARN | {"tied embeddings", "scaled rotary", "partial rotary", "q/k/v bias"},
        tricks=QWEN["tricks"] | {"": "One recurrent layer of zeros, appended."},
        refusals=COMMON_REFUSALS | {"llama3 rotary": "it has no frequencies of its own", **EXACT_BORDERS},
        biases="qkvg",
        qk_norm=True,
        identity_layer=gguf_configs.qwen35_identity_layer,
        gguf=True,
        services=(Service("llama.cpp"),),
    ),
)
EVERY_TARGET = (*TARGETS.values(), *GGUF_TARGETS)
TARGET_NAMES = tuple(dict.fromkeys(target.name for target in EVERY_TARGET))


def get_targets(name: str) -> list[Target]:
    """The records of that name, the preferred one first; ValueError with the known names when there is none."""
    if found := [target for target in EVERY_TARGET if target.name == name]:
        return found
    raise ValueError(f"target={name!r} is unknown; choose one of {', '.join(TARGET_NAMES)}.")
