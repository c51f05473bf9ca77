"""Diagnostics of attention sinks, massive activations and gates, as probes that attach to a loaded model.

with FirstTokenAttention(model) as attention, Activations(model) as activations:
    for batch in batches:
        model(**batch)
attention.result().mean, activations.result().spike_writers
"""

from .activations import Activations, ActivationsResult, SpikeWriter, delimiter_token_ids
from .attention import FirstTokenAttention, FirstTokenAttentionResult, attention_maps
from .gates import GateScores, GateScoresResult
from .probes import Probe, attention_modules, decoder_layers, decoder_of
from .states import FirstTokenStates, FirstTokenStatesResult, OutputSparsity, OutputSparsityResult


__all__ = [
    "Activations",
    "ActivationsResult",
    "FirstTokenAttention",
    "FirstTokenAttentionResult",
    "FirstTokenStates",
    "FirstTokenStatesResult",
    "GateScores",
    "GateScoresResult",
    "OutputSparsity",
    "OutputSparsityResult",
    "Probe",
    "SpikeWriter",
    "attention_maps",
    "attention_modules",
    "decoder_layers",
    "decoder_of",
    "delimiter_token_ids",
]
