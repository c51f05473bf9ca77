# Copyright 2026 The gated-llama authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Configuration of a Llama/Qwen-style decoder with a gate in its attention (Gated Attention, arXiv 2505.06708)."""

import operator
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


GATE_FORMAT_VERSION = 1

# The paper's names for the five positions, accepted wherever `gate_position` is.
GATE_POSITION_ALIASES = {
    "G1": "sdpa_output",
    "G2": "value",
    "G3": "key",
    "G4": "query",
    "G5": "dense_output",
}

# Where the gated tensor's heads and their width come from; None is the single "head" of the residual width.
GATE_SITES = {
    "sdpa_output": ("num_attention_heads", "head_dim"),
    "value": ("num_key_value_heads", "head_dim"),
    "key": ("num_key_value_heads", "head_dim"),
    "query": ("num_attention_heads", "head_dim"),
    "dense_output": (None, "hidden_size"),
}

# Every Auto class finds its own in config.json, whichever head was saved; these files travel with every checkpoint.
AUTO_MAP = {
    "AutoConfig": "configuration_gated.GatedLlamaConfig",
    "AutoModel": "modeling_gated.GatedLlamaModel",
    "AutoModelForCausalLM": "modeling_gated.GatedLlamaForCausalLM",
    "AutoModelForSequenceClassification": "modeling_gated.GatedLlamaForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_gated.GatedLlamaForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_gated.GatedLlamaForQuestionAnswering",
}
OWN_FILES = ("configuration_gated", "parts_gated", "checkpoint_gated", "modeling_gated")

# Names by which other architectures describe what this decoder lacks or calls otherwise: ignoring one would build
# another model than was meant. With each, what to say instead, and which values say what the decoder does anyway.
FOREIGN_FIELDS = (
    (
        "num_experts num_local_experts n_routed_experts moe_num_experts n_shared_experts num_experts_per_tok "
        "moe_intermediate_size shared_expert_intermediate_size router_aux_loss_coef",
        "this decoder has no experts",
        operator.not_,
    ),
    (
        "gating attn_output_gate attention_output_gate headwise_attn_output_gate elementwise_attn_output_gate "
        "use_head_wise_attn_gate",
        "a gate is declared by gate_position, gate_granularity and gate_activation",
        operator.not_,
    ),
    ("attention_bias use_bias", "biases are declared by qkv_bias, o_bias and mlp_bias", operator.not_),
    ("use_qk_norm qk_layernorm", "norms of queries and keys are declared by qk_norm", operator.not_),
    (
        "sliding_window_pattern full_attention_interval",
        "windows are declared by sliding_window and layer_types",
        operator.not_,
    ),
    ("hidden_activation", "the activation of the MLP is declared by hidden_act", operator.not_),
    ("no_rope_layers", "every layer of this decoder has rotary positions", lambda layers: all(layers or ())),
    ("q_lora_rank kv_lora_rank", "this decoder has no latent attention", operator.not_),
    ("linear_num_key_heads linear_num_value_heads", "this decoder has no linear attention", operator.not_),
    ("attn_logit_softcapping final_logit_softcapping clip_qkv", "this decoder caps nothing", operator.not_),
    ("attention_multiplier query_pre_attn_scalar", "attention is scaled by head_dim ** -0.5", operator.not_),
    (
        "embedding_multiplier residual_multiplier logits_scaling logit_scale scale_emb",
        "this decoder scales neither embeddings, residuals nor logits",
        lambda factor: factor in (None, 1),
    ),
)


def file_of(reference: str) -> str:
    """The module that a reference of an `auto_map` names: "REPOSITORY--MODULE.CLASS" or "MODULE.CLASS"."""
    return reference.rsplit("--", 1)[-1].split(".", 1)[0]


def refuse_foreign(fields: dict):
    """Raises ValueError for fields, name -> value, that this decoder would ignore although they mean something."""
    if unknown := sorted(name for name in fields if name.startswith("gate_")):
        known = [name for name in GatedLlamaConfig.__dataclass_fields__ if name.startswith("gate_")]
        raise ValueError(f"Unknown gate fields {unknown}: the fields of a gate are {known}.")
    for names, instead, harmless in FOREIGN_FIELDS:
        for name in set(names.split()) & set(fields):
            if not harmless(fields[name]):
                raise ValueError(f"{name}={fields[name]!r} would be ignored: {instead}.")


@strict
class GatedLlamaConfig(PreTrainedConfig):
    r"""
    Configuration of [`GatedLlamaModel`]. Decoder fields carry the names of Llama and Qwen3; the gate is described by
    the fields below. With y the gated tensor, x the pre-normed hidden state and `act` the activation, the gate writes
    `y * act(x W_g + b)` (multiply) or `y + act(x W_g + b)` (add).

    Args:
        qkv_bias, o_bias, mlp_bias (`bool`): biases of q/k/v_proj, of o_proj and of the MLP.
        qk_norm (`bool`): RMSNorm per head on queries and keys, before rotary (Qwen3).
        norms_in_fp32 (`bool`): keep the gains of all norms in fp32: those of an import, 1 + w, need the digits.
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` for each layer; the default
            is sliding everywhere when `sliding_window` is set and full everywhere otherwise.
        gate_position (*optional*): the gated tensor: `"sdpa_output"` (G1), `"value"` (G2), `"key"` (G3), `"query"`
            (G4, both before QK-norm and rotary), `"dense_output"` (G5, after o_proj), or `None` for no gate.
        gate_granularity: `"elementwise"`, one score per coordinate, or `"headwise"`, one per head.
        gate_head_shared (`bool`): logits are averaged over heads before the activation.
        gate_operation: `"multiply"` or `"add"`.
        gate_activation: `"sigmoid"`, `"silu"`, `"identity"` or `"ns_sigmoid"` (0.5 + 0.5 sigmoid, range (0.5, 1)).
        gate_input: `"hidden_states"` (x), `"constant"` (free parameters instead of x W_g, zero at the start) or
            `"states"` (the gated tensor itself, no parameters; with sigmoid this is SiLU of the tensor).
        gate_bias (`bool`): bias of the gate projection.
        gate_layers (`list[int]`, *optional*): the gated layers; `None` for all.
        gate_init: how gate weights that are in no checkpoint start: `"normal"` (std `initializer_range`) or `"zeros"`.
        gate_in_fp32 (`bool`): build and load the gate's weights in fp32, and compute logits and activation in it,
            also from weights that a cast of the model has rounded. The default computes them in the dtype of the
            activations, as Qwen3-Next and vLLM do.
        sdpa_output_norm (`bool`): RMSNorm per head on the attention output (the paper's control, Table 3).
        gate_retrofit (`dict`, *optional*): what a conversion wrote and folded; written by the converter.

    Sources: paper sections 2.2 and 3 (positions, granularity, sharing, operation, activation), Tables 1, 3 and 4.
    """

    model_type = "gated_llama"
    _auto_class = "AutoConfig"

    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: int = 5504
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    attention_dropout: float | int = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms_in_fp32: bool = False
    sliding_window: int | None = None
    layer_types: list[str] | None = None

    gate_position: (
        Literal["sdpa_output", "value", "key", "query", "dense_output", "G1", "G2", "G3", "G4", "G5"] | None
    ) = None
    gate_granularity: Literal["elementwise", "headwise"] = "elementwise"
    gate_head_shared: bool = False
    gate_operation: Literal["multiply", "add"] = "multiply"
    gate_activation: Literal["sigmoid", "silu", "identity", "ns_sigmoid"] = "sigmoid"
    gate_input: Literal["hidden_states", "constant", "states"] = "hidden_states"
    gate_bias: bool = False
    gate_layers: list[int] | None = None
    gate_init: Literal["normal", "zeros"] = "normal"
    gate_in_fp32: bool = False
    sdpa_output_norm: bool = False
    gate_format_version: int = GATE_FORMAT_VERSION
    gate_retrofit: dict | None = None

    def __post_init__(self, **kwargs):
        refuse_foreign(kwargs)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            kind = "full_attention" if self.sliding_window is None else "sliding_attention"
            self.layer_types = [kind] * self.num_hidden_layers
        # Derived classes keep their entries; ours name the files beside config.json, not in another repository.
        given = kwargs.pop("auto_map", None) or {}
        derived = {name: each for name, each in given.items() if file_of(str(each)) not in OWN_FILES}
        # An attribute, and before the parent's turn: the library and its quantisers add rules of their own.
        self.base_model_tp_plan = self._parallel_plan()
        super().__post_init__(**kwargs)
        self.auto_map = AUTO_MAP | derived

    def __setattr__(self, name, value):
        if name == "gate_position":
            value = GATE_POSITION_ALIASES.get(value, value)
        super().__setattr__(name, value)

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As in the parent, but refuses the config of another architecture instead of reading it as this one."""
        found = config_dict.get("model_type", cls.model_type)
        if found != cls.model_type:
            raise ValueError(
                f"This is a checkpoint of type {found!r}, not {cls.model_type!r}: loading it here would start its "
                "gates from nothing. Convert it first: `gated-llama convert SOURCE OUT` "
                "(pip install gated-llama), then load OUT."
            )
        writer = (config_dict.get("auto_map") or {}).get("AutoConfig") or AUTO_MAP["AutoConfig"]
        if cls.__module__ == __name__ and file_of(writer) not in OWN_FILES:
            raise ValueError(
                f"This configuration was written by {writer!r}, a class derived from {cls.__name__}: load it with "
                "that class. If Auto classes shall find it, give it a model_type of its own and register it."
            )
        return super().from_dict(config_dict, **kwargs)

    @staticmethod
    def _check_received_keys(rope_type, received_keys, required_keys, optional_keys=None, ignore_keys=None):
        """The library's check of the rotary keys of one type, where a key that is not read is an error, no warning."""
        allowed = required_keys | (optional_keys or set()) | (ignore_keys or set())
        allowed |= {"rope_type", "partial_rotary_factor", "original_max_position_embeddings"}
        remarks = {"type", "finetuned"}  # older names that no code reads
        if rope_type == "proportional":
            remarks.add("factor")  # read, and missing in the library's own list
        for fault, keys in (
            ("lack", required_keys - received_keys),
            ("have keys that are not read,", received_keys - allowed - remarks),
        ):
            if keys:
                raise ValueError(
                    f"rope_parameters of type {rope_type!r} {fault} {sorted(keys)}: the keys of this type are "
                    f"{sorted(allowed)}."
                )

    def _parallel_plan(self) -> dict[str, str]:
        plan = {f"layers.*.self_attn.{name}_proj": "colwise" for name in ("q", "k", "v")}
        plan["layers.*.self_attn.o_proj"] = "rowwise"
        plan |= {f"layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")}
        plan["layers.*.mlp.down_proj"] = "rowwise"
        if self.qk_norm:
            plan |= {f"layers.*.self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in ("q", "k")}
        if self.sdpa_output_norm:
            plan["layers.*.self_attn.sdpa_norm"] = "replicated_with_grad_allreduce"
        return plan | self._gate_parallel_plan()

    def _gate_parallel_plan(self) -> dict[str, str]:
        attention, dense = "layers.*.self_attn", self.gate_position == "dense_output"
        if self.has_gate_projection:
            # o_proj's output is whole on every rank, so is its gate; a shared score needs the logits of all heads.
            whole = dense or self.gate_head_shared
            return {f"{attention}.g_proj": "colwise_gather_output" if whole else "colwise"}
        if self.gate_position is None or self.gate_input == "states" or dense:
            return {}
        # A bare parameter has no forward to hook, so its owner carries the rule for it.
        if self.gate_head_shared:
            return {attention: "replicated_with_grad_allreduce"}
        return {f"{attention}.g_param": "colwise", attention: "local_params"}

    @property
    def has_gate_projection(self) -> bool:
        """Whether gated layers own a `g_proj`."""
        return self.gate_position is not None and self.gate_input == "hidden_states"

    @property
    def gated_layers(self) -> list[int]:
        """Indices of the layers that have a gate, ascending."""
        if self.gate_position is None:
            return []
        return sorted(self.gate_layers) if self.gate_layers is not None else list(range(self.num_hidden_layers))

    @property
    def kept_in_fp32(self) -> set[str]:
        """Names, or parts of names, of the modules and parameters that are fp32 in a model of half precision."""
        gate = {"hidden_states": "g_proj", "constant": "g_param"}.get(self.gate_input)
        kept = {gate} if gate and self.gate_in_fp32 and self.gated_layers else set()
        return kept | {"norm"} if self.norms_in_fp32 else kept

    @property
    def gate_shape(self) -> tuple[int, int] | None:
        """(heads, width) of the gate's logits for one token: width is 1 when headwise. `None` without a gate."""
        if self.gate_position is None:
            return None
        heads_field, width_field = GATE_SITES[self.gate_position]
        heads = getattr(self, heads_field) if heads_field else 1
        return heads, 1 if self.gate_granularity == "headwise" else getattr(self, width_field)

    @property
    def gate_parameters_per_layer(self) -> int:
        """Parameters that the gate adds to one gated layer (paper, Table 1 counts the weights without bias)."""
        if self.gate_position is None or self.gate_input == "states":
            return 0
        heads, width = self.gate_shape
        if self.gate_input == "constant":
            return heads * width
        return heads * width * (self.hidden_size + int(self.gate_bias))

    def validate_decoder(self):
        """Part of `@strict`-powered validation: head counts, windows and rotary parameters agree."""
        kv_heads_fit = 1 <= self.num_key_value_heads <= self.num_attention_heads
        if not kv_heads_fit or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}: query heads must divide evenly into groups."
            )
        unknown = sorted(set(self.layer_types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ValueError(
                f"layer_types contains {unknown}; this decoder has 'full_attention' and 'sliding_attention' layers."
            )
        slides = "sliding_attention" in self.layer_types
        if slides and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(
                f"layer_types has sliding layers but sliding_window={self.sliding_window}: set a window of at least 1."
            )
        if self.sliding_window is not None and not slides:
            raise ValueError(
                f"sliding_window={self.sliding_window} but no entry of layer_types is 'sliding_attention': "
                "set sliding_window=None or name the sliding layers."
            )
        rope_types = ["default", *ROPE_INIT_FUNCTIONS]
        if (rope_type := self.rope_parameters.get("rope_type", "default")) not in rope_types:
            raise ValueError(f"rope_parameters has rope_type={rope_type!r}; this decoder knows {rope_types}.")
        if nested := sorted(set(self.rope_parameters) & set(self.layer_types)):
            raise ValueError(
                f"rope_parameters are given per layer type ({nested}); this decoder has one rotary embedding for all."
            )

    def validate_fields(self):
        """Part of `@strict`-powered validation: no attribute means something that the decoder ignores."""
        others = {name: value for name, value in vars(self).items() if name not in self.__dataclass_fields__}
        refuse_foreign(others)
        # Qwen's: the window is off unless the first says otherwise, and only layers from the second on have it.
        if self.sliding_window is not None and (
            others.get("use_sliding_window", True) is False or others.get("max_window_layers")
        ):
            raise ValueError(
                f"sliding_window={self.sliding_window} beside use_sliding_window={others.get('use_sliding_window')} "
                f"and max_window_layers={others.get('max_window_layers')}, which would be ignored: name the sliding "
                "layers in layer_types, or set sliding_window=None."
            )

    def validate_gate(self):
        """Part of `@strict`-powered validation: refuses combinations of gate fields that have no meaning."""
        if self.gate_format_version > GATE_FORMAT_VERSION:
            raise ValueError(
                f"gate_format_version={self.gate_format_version} is newer than this code, which reads up to "
                f"{GATE_FORMAT_VERSION}: update gated-llama."
            )
        if self.gate_layers is not None:
            valid = range(self.num_hidden_layers)
            if not self.gate_layers or len(set(self.gate_layers)) < len(self.gate_layers):
                raise ValueError(
                    f"gate_layers={self.gate_layers} must name each gated layer once; "
                    "use gate_layers=None for all layers and gate_position=None for no gate."
                )
            if outside := [index for index in self.gate_layers if index not in valid]:
                raise ValueError(f"gate_layers contains {outside}; layers are 0 to {self.num_hidden_layers - 1}.")
        if self.gate_position is None:
            return
        headwise, position = self.gate_granularity == "headwise", self.gate_position
        if position == "dense_output" and (headwise or self.gate_head_shared):
            raise ValueError(
                "gate_position='dense_output' gates the residual width, which has no head axis: "
                "use gate_granularity='elementwise' and gate_head_shared=False."
            )
        if position in ("key", "query") and headwise and self.qk_norm and self.gate_operation == "multiply":
            raise ValueError(
                f"A headwise multiplicative {position} gate before QK-norm cancels exactly (RMSNorm does not see "
                "scale): use gate_granularity='elementwise', another position, or qk_norm=False."
            )
        if self.gate_input == "states" and (headwise or self.gate_head_shared):
            raise ValueError(
                "gate_input='states' lets each coordinate gate itself: "
                "use gate_granularity='elementwise' and gate_head_shared=False."
            )
        if self.gate_input != "hidden_states" and self.gate_bias:
            raise ValueError(f"gate_input={self.gate_input!r} has no projection to carry a bias: use gate_bias=False.")


__all__ = ["GatedLlamaConfig"]
