"""What each source architecture says and how it is said here: one record per `model_type`.

A record maps the source's configuration to the decoder fields of `GatedLlamaConfig` and lists every attribute of its
config.json: read, or ignored with a reason. What is in neither list is refused, so that a setting that the decoder
does not have can never be dropped in silence.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .source_rotary import ROPE_TABLES, check_numbers, plain_rotary
from .tensor_files import one_line


class Origin(NamedTuple):
    """
    Where a target tensor comes from: a source tensor, and what to take of it (`None`: all of it, unchanged).

    With `dtype`, the source tensor is cast to it before `take`.
    """

    source: str
    take: Callable[[torch.Tensor], torch.Tensor] | None = None
    dtype: torch.dtype | None = None


class Ignored(NamedTuple):
    """Why an attribute has no effect here; with `only`, the values for which that is so."""

    reason: str
    only: tuple | None = None


def check_rope(raw: Mapping[str, Any], *, partial_rotary: bool = False) -> None:
    """
    ValueError when rotary settings contradict each other, differ by layer type, or are unknown to the source's class.

    Args:
        partial_rotary: whether that class applies `partial_rotary_factor`.
    """
    tables = {name: raw[name] for name in ROPE_TABLES if raw.get(name)}
    check_numbers({key: raw[key] for key in ("rope_theta", "partial_rotary_factor") if key in raw})
    kinds = {name: check_rope_table(name, table) for name, table in tables.items()}
    if len(set(kinds.values())) > 1:
        raise ValueError(
            f"rope_scaling and rope_parameters are of different types: {kinds}. Keep the one that is right."
        )
    for key in ("rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"):
        places = {"config.json": raw, **tables}
        values = {place: table[key] for place, table in places.items() if table.get(key) is not None}
        if len(set(values.values())) > 1:
            raise ValueError(f"{key} is given more than once and differently: {values}. Keep the one that is right.")
        if key == "partial_rotary_factor" and not partial_rotary and set(values.values()) - {1}:
            raise ValueError(
                f"partial_rotary_factor={next(iter(values.values()))}: the library's class for this type rotates "
                "whole heads, so a checkpoint with partial rotary is not what it says it is."
            )


NOT_NUMBERS = ("rope_type", "type", "truncate", "short_factor", "long_factor", "mrope_section")


def check_rope_table(name: str, table: Any) -> str:
    """The rotary type of one table; ValueError when it is not understood."""
    if not isinstance(table, dict):
        raise ValueError(f"config.json has {name}={table!r}, which is not a table of rotary parameters.")
    if nested := [key for key, value in table.items() if isinstance(value, dict)]:
        raise ValueError(
            f"{name} is given per layer type ({', '.join(nested)}); this decoder has one rotary embedding for all."
        )
    if unknown := sorted(set(table) - set(RopeParameters.__annotations__) - {"type"}):
        raise ValueError(
            f"{name} has parameters that are not known: {', '.join(unknown)}. Transformers ignores them: remove them "
            "from a copy of config.json if the model was trained without."
        )
    check_numbers({key: value for key, value in table.items() if key not in NOT_NUMBERS}, f"{name}.")
    kinds = {table[key] for key in ("rope_type", "type") if table.get(key)} or {"default"}
    if len(kinds) > 1:
        raise ValueError(f"{name} has two types, {' and '.join(sorted(kinds))}. Keep the one that is right.")
    kind = kinds.pop()
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(["default", *sorted(ROPE_INIT_FUNCTIONS)])
        raise ValueError(f"{name} has rope_type={kind!r}; known types are {known}.")
    return kind


@dataclass(frozen=True)
class Source:
    """
    A source architecture whose tensors are named and shaped as they are here; others override `origins`.

    Args:
        model_type: `model_type` in the source's config.json.
        fields: `GatedLlamaConfig` field -> value, from the source's config object.
        reads: attributes of config.json, besides COMMON_READS, that `fields` depends on.
        ignored: attributes of config.json, besides COMMON_IGNORED, that change nothing.
        refuse: says why a config of this type cannot be represented, or returns `None`.
        check_rotary: raises ValueError for rotary settings in config.json that are not understood.
        dropped_tensors: regular expression of source tensors that are recomputed and hence not read.
    """

    model_type: str
    fields: Mapping[str, Callable[[PreTrainedConfig], Any]]
    reads: frozenset[str]
    ignored: Mapping[str, Ignored] = field(default_factory=dict)
    refuse: Callable[[PreTrainedConfig], str | None] = lambda config: None
    check_rotary: Callable[[Mapping[str, Any]], None] = check_rope
    dropped_tensors: str = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"

    def origins(self, names: Iterable[str], fields: Mapping[str, Any]) -> dict[str, Origin]:
        """Where each of the target tensors `names` comes from, for these fields of `GatedLlamaConfig`."""
        return {name: Origin(name) for name in names}


SAME_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "tie_word_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)

COMMON_FIELDS = {name: lambda config, name=name: getattr(config, name) for name in SAME_FIELDS} | {
    "head_dim": lambda config: getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    "rope_parameters": lambda config: copy.deepcopy(config.rope_parameters),
    "attention_dropout": lambda config: config.attention_dropout or 0.0,
}

COMMON_READS = frozenset(SAME_FIELDS) | {
    "attention_dropout",
    "dtype",
    "head_dim",
    "model_type",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "torch_dtype",
}

HEADS = "belongs to classification heads; only the language model is converted"
BACKEND = "chooses an attention backend, not a result"
BOOKKEEPING = "names files, versions or other software"
ENCODER_DECODER = "encoder-decoder models only"
OUTPUT = "chooses what forward returns"

COMMON_IGNORED = {
    "architectures": Ignored("the class is chosen anew; tensors are checked one by one"),
    "transformers_version": Ignored(BOOKKEEPING),
    "_name_or_path": Ignored(BOOKKEEPING),
    "name_or_path": Ignored(BOOKKEEPING),
    "_commit_hash": Ignored(BOOKKEEPING),
    "transformers.js_config": Ignored(BOOKKEEPING),
    "unsloth_version": Ignored(BOOKKEEPING),
    "max_sequence_length": Ignored("a limit of training; max_position_embeddings is read"),
    "unsloth_fixed": Ignored(BOOKKEEPING),
    "is_llama_config": Ignored(BOOKKEEPING),
    "tokenizer_class": Ignored("the tokenizer is checked and pinned in tokenizer_config.json"),
    "attn_implementation": Ignored(BACKEND),
    "_attn_implementation": Ignored(BACKEND),
    "_attn_implementation_autoset": Ignored(BACKEND),
    "_flash_attn_2_enabled": Ignored(BACKEND),
    "pretraining_tp": Ignored("splits the same products into slices; the library no longer reads it"),
    "rope_interleaved": Ignored("rotary pairs are (i, i + width / 2)", only=(False, None)),
    "use_mrope": Ignored("multimodal rotary", only=(False, None)),
    "id2label": Ignored(HEADS),
    "label2id": Ignored(HEADS),
    "num_labels": Ignored(HEADS),
    "problem_type": Ignored(HEADS),
    "finetuning_task": Ignored(HEADS),
    "classifier_dropout": Ignored(HEADS),
    "output_attentions": Ignored(OUTPUT),
    "output_hidden_states": Ignored(OUTPUT),
    "return_dict": Ignored(OUTPUT),
    "use_return_dict": Ignored(OUTPUT),
    "chunk_size_feed_forward": Ignored("cuts the MLP into chunks, not read by decoders"),
    "is_decoder": Ignored("every model here is a decoder"),
    "is_encoder_decoder": Ignored(ENCODER_DECODER, only=(False, None)),
    "add_cross_attention": Ignored(ENCODER_DECODER, only=(False, None)),
    "cross_attention_hidden_size": Ignored(ENCODER_DECODER, only=(None,)),
    "tie_encoder_decoder": Ignored(ENCODER_DECODER, only=(False, None)),
    "decoder_start_token_id": Ignored(ENCODER_DECODER),
    "sep_token_id": Ignored("not used by language models"),
    "prefix": Ignored("text pipelines of older versions only", only=(None, "")),
    "task_specific_params": Ignored("pipelines of older versions only"),
    "pruned_heads": Ignored("no head is pruned", only=({}, None)),
    "torchscript": Ignored("export setting of older versions"),
    "tf_legacy_loss": Ignored("TensorFlow only"),
    "use_bfloat16": Ignored("TensorFlow only"),
    "quantization_config": Ignored("the weights are not quantised", only=(None,)),
    "auto_map": Ignored("no code travels with the source", only=(None, {})),
} | {
    name: Ignored("generation setting; carried in generation_config.json")
    for name in GenerationConfig._get_default_generation_params()
}

# Attributes that declare a gate in the attention of formats whose weights are laid out in another way.
GATE_FLAGS = (
    "headwise_attn_output_gate",
    "elementwise_attn_output_gate",
    "attn_output_gate",
    "attention_output_gate",
    "use_head_wise_attn_gate",
    "gating",
)

REFUSALS = {
    "quantization_config": "a quantised source: convert the unquantised checkpoint and quantise the result",
    "auto_map": (
        "the source brings its own model code, which may compute something else than the library's class: if it does "
        "not, remove `auto_map` from a copy of its config.json"
    ),
}


def window_of(config: PreTrainedConfig) -> int | None:
    return config.sliding_window if "sliding_attention" in config.layer_types else None


QWEN_WINDOWS = {"sliding_window": window_of, "layer_types": lambda config: list(config.layer_types)}
QWEN_WINDOW_READS = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}

ATTENTION_BIAS = {
    "qkv_bias": lambda config: config.attention_bias,
    "o_bias": lambda config: config.attention_bias,
}
MLP_BIAS = {"mlp_bias": lambda config: config.mlp_bias}


def nope_layers(config: PreTrainedConfig) -> str | None:
    layers = [index for index, rotary in enumerate(config.no_rope_layers) if not rotary]
    if not layers:
        return None
    return (
        f"layers {layers} have no rotary embedding (no_rope_layers, as in SmolLM3-3B), and every layer of this "
        "decoder rotates"
    )


SOURCES = {
    source.model_type: source
    for source in (
        Source("llama", COMMON_FIELDS | ATTENTION_BIAS | MLP_BIAS, frozenset({"attention_bias", "mlp_bias"})),
        Source(
            "qwen2",
            # Qwen2 has no field for it: q, k and v always carry a bias, o never does.
            COMMON_FIELDS | QWEN_WINDOWS | {"qkv_bias": lambda config: True},
            frozenset(QWEN_WINDOW_READS),
        ),
        Source(
            "qwen3",
            COMMON_FIELDS | QWEN_WINDOWS | ATTENTION_BIAS | {"qk_norm": lambda config: True},
            frozenset(QWEN_WINDOW_READS | {"attention_bias"}),
        ),
        Source(
            "mistral",
            COMMON_FIELDS | {"sliding_window": lambda config: config.sliding_window},
            frozenset({"sliding_window"}),
        ),
        Source(
            "smollm3",
            COMMON_FIELDS | QWEN_WINDOWS | ATTENTION_BIAS | MLP_BIAS,
            frozenset(QWEN_WINDOW_READS | {"attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"}),
            refuse=nope_layers,
        ),
    )
}


def source_for(raw: Mapping[str, Any], gated: Iterable[str] = ()) -> Source:
    """
    The record for a raw config.json; ValueError names what is not supported.

    Args:
        gated: the types that bring a gate of their own, which are supported as well.
    """
    model_type = raw.get("model_type")
    if model_type == "gated_llama":
        raise ValueError("The source is a gated_llama checkpoint already: load it with from_pretrained as it is.")
    if flags := [name for name in GATE_FLAGS if raw.get(name)]:
        raise ValueError(
            f"The source declares a gate of its own ({flags[0]}={raw[flags[0]]!r}), and the format of {model_type} "
            "has no place for one. If you know how it is stored, remove the flag from a copy of config.json and name "
            "the layout; otherwise convert the ungated base model."
        )
    if model_type not in SOURCES:
        raise ValueError(
            f"Sources of model type {model_type!r} cannot be converted; supported are "
            f"{', '.join(sorted({*SOURCES, *gated}))}."
        )
    return SOURCES[model_type]


def decoder_fields(source: Source, raw: Mapping[str, Any]) -> dict[str, Any]:
    """
    Decoder fields of `GatedLlamaConfig` for a raw config.json.

    Values that the source's config class derives (defaults of absent keys, windows by layer, rotary parameters) are
    taken from that class. Raises ValueError for whatever is not understood.
    """
    raw, _ = plain_rotary(raw)
    check_attributes(source, raw)
    check_dtype(raw)
    source.check_rotary(raw)
    try:
        config = CONFIG_MAPPING[source.model_type].from_dict(copy.deepcopy(dict(raw)))
    except (StrictDataclassError, TypeError, ValueError, AttributeError, KeyError, ZeroDivisionError) as error:
        raise ValueError(f"config.json is not a valid {source.model_type} configuration: {one_line(error)}") from error
    if reason := source.refuse(config):
        raise ValueError(f"This {source.model_type} checkpoint cannot be represented: {reason}.")
    fields = {name: value(config) for name, value in source.fields.items()}
    if fields["hidden_act"] not in ACT2FN:
        raise ValueError(f"hidden_act={fields['hidden_act']!r} is unknown; known are {', '.join(sorted(ACT2FN))}.")
    return fields


def check_dtype(raw: Mapping[str, Any]) -> None:
    for key in ("dtype", "torch_dtype"):
        name = raw.get(key)
        if name is not None and not isinstance(getattr(torch, str(name).removeprefix("torch."), None), torch.dtype):
            raise ValueError(
                f"config.json has {key}={name!r}, which names no dtype: write that of the weights, such as "
                "'bfloat16', or leave it out of a copy."
            )


def check_attributes(source: Source, raw: Mapping[str, Any]) -> None:
    """ValueError for the first attribute that is neither read nor known to be without effect."""
    ignored = COMMON_IGNORED | {name: Ignored("no gate is declared", only=(False, None)) for name in GATE_FLAGS}
    ignored = ignored | dict(source.ignored)
    for name, value in raw.items():
        if name in COMMON_READS or name in source.reads:
            continue
        entry = ignored.get(name)
        if entry is not None and (entry.only is None or value in entry.only):
            continue
        reason = REFUSALS.get(name)
        if reason is None and entry is not None:
            reason = f"supported is {' or '.join(repr(v) for v in entry.only)} ({entry.reason})"
        raise ValueError(
            f"config.json has {name}={value!r}: "
            + (reason or f"not known for model type {source.model_type!r}, so the result could be another model")
            + "."
        )
