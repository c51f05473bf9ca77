"""Gated Attention (arXiv 2505.06708) for Hugging Face Transformers.

Importing this package registers `gated_llama` with the Auto classes; nothing else happens at import.
"""

from .configuration_gated import GatedLlamaConfig
from .modeling_gated import (
    GatedLlamaForCausalLM,
    GatedLlamaForQuestionAnswering,
    GatedLlamaForSequenceClassification,
    GatedLlamaForTokenClassification,
    GatedLlamaModel,
    GatedLlamaPreTrainedModel,
)
from .override import gate_override, neutral_scores
from .registration import register


__version__ = "0.1.0"

register()

__all__ = [
    "GatedLlamaConfig",
    "GatedLlamaForCausalLM",
    "GatedLlamaForQuestionAnswering",
    "GatedLlamaForSequenceClassification",
    "GatedLlamaForTokenClassification",
    "GatedLlamaModel",
    "GatedLlamaPreTrainedModel",
    "gate_override",
    "neutral_scores",
]
