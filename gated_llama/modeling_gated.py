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
"""A Llama/Qwen-style decoder with a gate in its attention (Gated Attention, arXiv 2505.06708).

Everything but the attention, the partial rotary and the classes that assemble them is the installed Transformers'
Qwen3 or Llama part, so each library version brings its own cache, mask and checkpointing conventions.
"""

from functools import wraps

import torch
from torch import nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3PreTrainedModel,
    eager_attention_forward,
)
from transformers.utils import logging
from transformers.utils.output_capturing import OutputRecorder
from transformers.utils.versions import require_version

from .checkpoint_gated import StrictCheckpoints
from .configuration_gated import GatedLlamaConfig
from .parts_gated import (
    AttentionGate,
    GatedBaseModelOutputWithPast,
    GatedCausalLMOutputWithPast,
    GatedLlamaRMSNorm,
    GatedLlamaRotaryEmbedding,
    GatedQuestionAnsweringModelOutput,
    GatedSequenceClassifierOutputWithPast,
    GatedTokenClassifierOutput,
    GateProjection,
    at_least_fp32,
    documents_leak,
    returning_gate_scores,
    rms_norm,
    rotate,
    sum_over_ranks,
)


logger = logging.get_logger(__name__)

# The pins of a package do not reach those who load this file from the Hub.
require_version("transformers>=5.17.0", "gated_llama models need it: pip install -U 'transformers>=5.17.0'")


class GatedLlamaAttention(nn.Module):
    """
    Multi-headed attention whose query, key, value, output per head or dense output may be gated.

    Differs from Qwen3's: biases are declared for q/k/v and o separately, QK-norm is optional, rotary may be partial,
    and `_gate` is called at five sites. Head counts are read from the tensors, so sharded weights work unchanged.
    The gate lies outside the attention kernel: every attention implementation of the library serves it.
    """

    def __init__(self, config: GatedLlamaConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.layer_type = config.layer_types[layer_idx]
        self.sliding_window = config.sliding_window if self.layer_type == "sliding_attention" else None
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True

        hidden = config.hidden_size
        query_width = config.num_attention_heads * self.head_dim
        key_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, query_width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, key_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, key_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(query_width, hidden, bias=config.o_bias)
        self.q_norm = rms_norm(config, self.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = rms_norm(config, self.head_dim) if config.qk_norm else nn.Identity()
        self.sdpa_norm = rms_norm(config, self.head_dim) if config.sdpa_output_norm else nn.Identity()
        self.gate_position = config.gate_position if layer_idx in config.gated_layers else None
        if self.gate_position is not None:
            self._build_gate(config)

    def _build_gate(self, config: GatedLlamaConfig):
        heads, width = config.gate_shape
        dtype = at_least_fp32() if config.gate_in_fp32 else None
        self.attn_gate = AttentionGate(config)
        if config.gate_input == "hidden_states":
            self.g_proj = GateProjection(config.hidden_size, heads * width, bias=config.gate_bias, dtype=dtype)
            self.g_proj.in_fp32 = config.gate_in_fp32
        elif config.gate_input == "constant":
            self.g_param = nn.Parameter(torch.zeros(heads, width, dtype=dtype))

    def _gate(self, position: str, states: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Gates `states` [batch, seq, heads, width] if this is the configured position, else returns them."""
        if position != self.gate_position:
            return states
        return self.attn_gate(states, self._gate_logits(states, hidden_states))[0]

    def _gate_logits(self, states: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits that broadcast to `states`: from the pre-normed hidden state, a parameter, or `states` itself."""
        if self.config.gate_input == "states":
            return states
        if self.config.gate_input == "constant":
            return self.g_param
        weight = getattr(self.g_proj, "weight", None)  # some quantised projections have none
        if self.config.gate_in_fp32 and isinstance(weight, torch.Tensor) and weight.is_floating_point():
            with torch.autocast(hidden_states.device.type, enabled=False):
                logits = self.g_proj(hidden_states)
        else:
            logits = self.g_proj(hidden_states)
        mesh = getattr(weight, "device_mesh", None)
        if self.config.gate_head_shared and mesh is not None and logits.requires_grad:
            logits.register_hook(lambda gradient: sum_over_ranks(gradient, mesh))
        width = 1 if self.config.gate_granularity == "headwise" else states.shape[-1]
        return logits.view(*logits.shape[:-1], -1, width)  # [batch, seq, heads, width]

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache=None,
        past_key_values=None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # `cache` was called `past_key_values` before Transformers 5.24, and engines on older versions still say so.
        cache = past_key_values if cache is None else cache
        input_shape = hidden_states.shape[:-1]
        heads_shape = (*input_shape, -1, self.head_dim)

        query = self._gate("query", self.q_proj(hidden_states).view(heads_shape), hidden_states)
        key = self._gate("key", self.k_proj(hidden_states).view(heads_shape), hidden_states)
        value = self._gate("value", self.v_proj(hidden_states).view(heads_shape), hidden_states)
        query = self.q_norm(query).transpose(1, 2)  # [batch, heads, seq, head_dim]
        key = self.k_norm(key).transpose(1, 2)
        value = value.transpose(1, 2)
        query, key = rotate(query, key, *position_embeddings)

        if cache is not None:
            # Paged caches put what their kernel needs into the keywords.
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)

        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_output, attn_weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=0.0 if not self.training else self.attention_dropout,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )

        # Some kernels flatten tokens or heads: give the gate its head axis back, then flatten for o_proj.
        attn_output = self.sdpa_norm(attn_output.reshape(heads_shape))
        attn_output = self._gate("sdpa_output", attn_output, hidden_states)
        attn_output = self.o_proj(attn_output.reshape(*input_shape, -1))
        attn_output = self._gate("dense_output", attn_output.unsqueeze(-2), hidden_states).squeeze(-2)
        return attn_output, attn_weights


class GatedLlamaDecoderLayer(Qwen3DecoderLayer):
    """Qwen3's layer with gated attention and an MLP that may have biases; the forward is the parent's."""

    def __init__(self, config: GatedLlamaConfig, layer_idx: int):
        super(Qwen3DecoderLayer, self).__init__()
        self.hidden_size = config.hidden_size
        self.self_attn = GatedLlamaAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = rms_norm(config, config.hidden_size)
        self.post_attention_layernorm = rms_norm(config, config.hidden_size)


class GatedLlamaPreTrainedModel(StrictCheckpoints, Qwen3PreTrainedModel):
    """Initialisation, loading and saving: no weight is invented for a checkpoint that lacks it."""

    config: GatedLlamaConfig
    _no_split_modules = ["GatedLlamaDecoderLayer"]
    _can_record_outputs = {
        "hidden_states": GatedLlamaDecoderLayer,
        "attentions": GatedLlamaAttention,
        "gate_scores": OutputRecorder(AttentionGate, index=1),
    }

    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, GateProjection) and self.config.gate_init == "zeros":
            init.zeros_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, GatedLlamaAttention):
            # Only constant gates own a parameter here, and they start at zero (paper, Table 4).
            if (parameter := getattr(module, "g_param", None)) is not None:
                init.zeros_(parameter)
        else:
            super()._init_weights(module)


class GatedLlamaModel(GatedLlamaPreTrainedModel, Qwen3Model):
    """The decoder. `output_gate_scores=True` adds `gate_scores`: one tensor per gated layer, see AttentionGate."""

    _auto_class = "AutoModel"

    def __init__(self, config: GatedLlamaConfig):
        config.validate()  # fields may have been assigned since it was made
        super(Qwen3Model, self).__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([GatedLlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = rms_norm(config, config.hidden_size)
        self.rotary_emb = GatedLlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.has_sliding_layers = "sliding_attention" in config.layer_types
        self._keep_in_fp32_modules_strict = config.kept_in_fp32
        if config.kept_in_fp32:
            # FSDP takes weights of one dtype: those in float32 get a group of their own.
            kept = {type(m).__name__ for m in self.modules() if isinstance(m, (GateProjection, GatedLlamaRMSNorm))}
            self._no_split_modules = [*self._no_split_modules, *sorted(kept)]
        self.post_init()

    @wraps(Qwen3Model.forward)
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, *args, **kwargs):
        for_head = kwargs.pop("gate_scores", None)
        wanted = kwargs.get("output_gate_scores", getattr(self.config, "output_gate_scores", False))
        if wanted:
            self._refuse_reentrant_checkpointing()
        cache = args[0] if args else kwargs.get("cache", kwargs.get("past_key_values"))
        caching = cache is not None or self._makes_a_cache(kwargs.get("use_cache"))
        if documents_leak(self.config._attn_implementation, attention_mask, position_ids, caching):
            logger.warning_once(
                "position_ids restart, but an attention mask or a cache keeps Transformers from separating the packed "
                "documents: they attend to each other. Leave the mask out and set use_cache=False."
            )
        outputs = super().forward(input_ids, attention_mask, position_ids, *args, **kwargs)
        if wanted and isinstance(outputs, dict):
            if "gate_scores" not in outputs:
                raise ValueError(
                    f"Transformers records nothing in a {type(self).__name__}: it knows a class by its name, which "
                    "FSDP changes. Shard the layers and the model with its head, not the decoder between them."
                )
            outputs = GatedBaseModelOutputWithPast(**outputs)
        if for_head is not None:
            for_head.recorded = outputs.gate_scores
        return outputs

    def _checkpoints(self) -> bool:
        return self.gradient_checkpointing and self.training and torch.is_grad_enabled()

    def _makes_a_cache(self, use_cache: bool | None) -> bool:
        return (self.config.use_cache if use_cache is None else use_cache) and not self._checkpoints()

    def _refuse_reentrant_checkpointing(self):
        checkpoint = getattr(self, "_gradient_checkpointing_func", None)
        if self._checkpoints() and getattr(checkpoint, "keywords", {}).get("use_reentrant"):
            raise ValueError(
                "Gate scores have no gradient under reentrant checkpointing: enable it with use_reentrant=False, or "
                "leave output_gate_scores out."
            )


class GatedLlamaForCausalLM(GatedLlamaPreTrainedModel, Qwen3ForCausalLM, GenerationMixin):
    """The decoder with a language-modelling head; the forward is the parent's."""

    _auto_class = "AutoModelForCausalLM"
    forward = returning_gate_scores(Qwen3ForCausalLM.forward, GatedCausalLMOutputWithPast)

    def __init__(self, config: GatedLlamaConfig):
        super(Qwen3ForCausalLM, self).__init__(config)
        self.model = GatedLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


# The generic heads build their decoder through AutoModel, which does not know a class loaded from the Hub: each builds
# its own here and inherits the rest.


class GatedLlamaForSequenceClassification(GenericForSequenceClassification, GatedLlamaPreTrainedModel):
    """The decoder with a classifier on the last real token."""

    _auto_class = "AutoModelForSequenceClassification"
    forward = returning_gate_scores(GenericForSequenceClassification.forward, GatedSequenceClassifierOutputWithPast)

    def __init__(self, config: GatedLlamaConfig):
        GatedLlamaPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = GatedLlamaModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class GatedLlamaForTokenClassification(GenericForTokenClassification, GatedLlamaPreTrainedModel):
    """The decoder with a classifier on every token."""

    _auto_class = "AutoModelForTokenClassification"
    forward = returning_gate_scores(GenericForTokenClassification.forward, GatedTokenClassifierOutput)

    def __init__(self, config: GatedLlamaConfig):
        GatedLlamaPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = GatedLlamaModel(config)
        dropout = getattr(config, "classifier_dropout", None)
        self.dropout = nn.Dropout(0.1 if dropout is None else dropout)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class GatedLlamaForQuestionAnswering(GenericForQuestionAnswering, GatedLlamaPreTrainedModel):
    """The decoder with a head for the start and the end of an answer."""

    _auto_class = "AutoModelForQuestionAnswering"
    forward = returning_gate_scores(GenericForQuestionAnswering.forward, GatedQuestionAnsweringModelOutput)

    def __init__(self, config: GatedLlamaConfig):
        GatedLlamaPreTrainedModel.__init__(self, config)
        self.model = GatedLlamaModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()


__all__ = [
    "GatedLlamaForCausalLM",
    "GatedLlamaForQuestionAnswering",
    "GatedLlamaForSequenceClassification",
    "GatedLlamaForTokenClassification",
    "GatedLlamaModel",
    "GatedLlamaPreTrainedModel",
]
