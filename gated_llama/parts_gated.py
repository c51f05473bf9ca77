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
"""What the decoder is made of besides its attention: gate, rotary embedding, norm, outputs with gate scores."""

from dataclasses import make_dataclass
from functools import wraps

import torch
from torch import nn
from transformers import modeling_outputs
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb
from transformers.utils.import_utils import is_tracing

from .configuration_gated import GatedLlamaConfig


def ns_sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """Non-sparse sigmoid, 0.5 + 0.5 sigmoid(u), range (0.5, 1): the paper's control without small scores (Table 4)."""
    return 0.5 + 0.5 * torch.sigmoid(logits)


def identity(logits: torch.Tensor) -> torch.Tensor:
    """u itself; a function with a name, which a pickled model needs."""
    return logits


GATE_ACTIVATIONS = {
    "sigmoid": torch.sigmoid,
    "silu": nn.functional.silu,
    "identity": identity,
    "ns_sigmoid": ns_sigmoid,
}


def sum_over_ranks(gradient: torch.Tensor, mesh) -> torch.Tensor:
    """Under tensor parallelism each rank applies a shared score to its own heads only: the gradients add up."""
    total = gradient.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=mesh.get_group())
    return total


def at_least_fp32(dtype: torch.dtype | None = None) -> torch.dtype:
    """float32, or `dtype` (of new tensors by default) where it is wider."""
    return torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)


class GateProjection(nn.Linear):
    """
    x W_g + b, with `in_fp32` in float32 whatever dtype x and the weights have.

    A class of its own, so that initialisation, tools and FSDP find gates; quantisers and adapters see a Linear.
    """

    in_fp32 = False

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self.in_fp32:
            return super().forward(hidden_states)
        dtype, bias = at_least_fp32(self.weight.dtype), self.bias
        return nn.functional.linear(
            hidden_states.to(dtype), self.weight.to(dtype), bias if bias is None else bias.to(dtype)
        )


class AttentionGate(nn.Module):
    """
    Applies gate logits to the gated tensor and returns both the result and the scores.

    `states * act(logits)` or `states + act(logits)`; logits are averaged over heads first when the gate is shared.

    Shapes: states [batch, seq, heads, width]; logits broadcastable to it (width 1 when headwise); the result has the
    shape and dtype of states; scores have the shape of logits, with one head when shared.
    """

    def __init__(self, config: GatedLlamaConfig):
        super().__init__()
        self.activation = GATE_ACTIVATIONS[config.gate_activation]
        self.multiplies = config.gate_operation == "multiply"
        self.head_shared = config.gate_head_shared
        self.in_fp32 = config.gate_in_fp32

    def forward(self, states: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.in_fp32:
            logits = logits.float()
        if self.head_shared:
            logits = logits.mean(dim=-2, keepdim=True)
        scores = self.activation(logits)
        gated = states * scores if self.multiplies else states + scores
        # A view fails where a score that does not fit (one for more heads than there are) would widen the states.
        return gated.to(states.dtype).view(states.shape), scores


class GatedLlamaRotaryEmbedding(LlamaRotaryEmbedding):
    """
    Llama's rotary embedding; the default type also reads `partial_rotary_factor`, as the scaled types do.

    Casting or emptying a model leaves its frequencies as they are, in float32: bfloat16 would turn angles by up to
    0.4 % of themselves, which is full turns far from position 0.
    """

    def _apply(self, fn, recurse=True):
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        if before["inv_freq"].device.type == "meta":
            self._compute(self.inv_freq.device)
        else:
            self._buffers.update({name: buffer.to(self.inv_freq.device) for name, buffer in before.items()})
        return self

    def _compute(self, device: torch.device):
        """Frequencies as after construction."""
        compute = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
        self.inv_freq = compute(self.config)[0].to(device)
        self.original_inv_freq = self.inv_freq.clone()
        self.max_seq_len_cached, self.long_inv_freq = self.original_max_seq_len, None

    def forward(self, x, position_ids):
        # Not every way to fill or cast a model passes through `_apply`.
        lost = self.inv_freq.device.type == "meta" != x.device.type
        if lost or self.inv_freq.dtype != torch.float32:
            self._compute(x.device)
        return super().forward(x, position_ids)

    @staticmethod
    def compute_default_rope_parameters(config: GatedLlamaConfig, device=None, **kwargs) -> tuple[torch.Tensor, float]:
        """theta^(-2i/r) for i < r/2, with r = head_dim * partial_rotary_factor: [r / 2], and the scaling 1."""
        width = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, width, 2, dtype=torch.float) / width
        return (1.0 / (config.rope_parameters["rope_theta"] ** exponents)).to(device), 1.0


class GatedLlamaRMSNorm(Qwen3RMSNorm):
    """Qwen3's with gains in float32, for `norms_in_fp32`; it rounds once, to the dtype of the states."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps=eps)
        self.weight = nn.Parameter(self.weight.to(at_least_fp32()))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # In float32 up to the product, as the architectures compute it whose gains are 1 + w.
        return super().forward(hidden_states.to(at_least_fp32(hidden_states.dtype))).to(hidden_states.dtype)


def rms_norm(config: GatedLlamaConfig, width: int) -> nn.Module:
    norm_class = GatedLlamaRMSNorm if config.norms_in_fp32 else Qwen3RMSNorm
    return norm_class(width, eps=config.rms_norm_eps)


def rotate(query, key, cos, sin):
    """Rotates the first `cos.shape[-1]` coordinates of heads [batch, heads, seq, head_dim]; the rest pass."""
    width = cos.shape[-1]
    if width == query.shape[-1]:
        return apply_rotary_pos_emb(query, key, cos, sin)
    rotated = apply_rotary_pos_emb(query[..., :width], key[..., :width], cos, sin)
    return tuple(torch.cat([r, states[..., width:]], dim=-1) for r, states in zip(rotated, (query, key), strict=True))


def documents_leak(implementation: str, attention_mask, position_ids, caching: bool) -> bool:
    """
    Whether documents that are packed into a row, their positions restarting, attend to each other.

    Transformers separates them where it builds the mask without a cache and without a mask of padding; flash kernels
    read the positions themselves. Other implementations and four-dimensional masks are the caller's affair.
    """
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] < 2 or is_tracing(position_ids):
        return False
    padding = isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2
    if not padding and (attention_mask is not None or not caching):
        return False
    if "flash" in implementation:
        if not padding or attention_mask.all():
            return False
    elif implementation not in ("eager", "sdpa", "flex_attention"):
        return False
    restarts = position_ids.diff() <= 0
    if padding:
        real = attention_mask[:, -position_ids.shape[1] :].bool()
        restarts = restarts & real[:, 1:] & real[:, :-1]
    return bool(restarts.any())


def with_gate_scores(output_class: type) -> type:
    """`output_class` with one more field, `gate_scores`: one tensor per gated layer (see AttentionGate), or None."""
    field = ("gate_scores", tuple[torch.Tensor, ...] | None, None)
    name = f"Gated{output_class.__name__}"
    return make_dataclass(name, [field], bases=(output_class,), namespace={"__module__": __name__})


GatedBaseModelOutputWithPast = with_gate_scores(modeling_outputs.BaseModelOutputWithPast)
GatedCausalLMOutputWithPast = with_gate_scores(modeling_outputs.CausalLMOutputWithPast)
GatedSequenceClassifierOutputWithPast = with_gate_scores(modeling_outputs.SequenceClassifierOutputWithPast)
GatedTokenClassifierOutput = with_gate_scores(modeling_outputs.TokenClassifierOutput)
GatedQuestionAnsweringModelOutput = with_gate_scores(modeling_outputs.QuestionAnsweringModelOutput)


class GateScores:
    """Carries a decoder's scores past the forward of its head, which drops them; nothing that is copied on the way."""

    recorded = None


def returning_gate_scores(forward, output_class: type):
    """The forward of a head; its output is an `output_class`, where `output_gate_scores=True` fills `gate_scores`."""

    @wraps(forward)
    def forward_with_scores(self, *args, return_dict=None, **kwargs):
        scores = GateScores()
        if kwargs.get("output_gate_scores", getattr(self.config, "output_gate_scores", False)):
            kwargs["gate_scores"] = scores
        output = output_class(**forward(self, *args, return_dict=True, **kwargs), gate_scores=scores.recorded)
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()

    return forward_with_scores
