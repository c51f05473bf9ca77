"""Diagnostics of attention sinks, massive activations and gates, as probes that attach to a loaded model.

with FirstTokenAttention(model) as attention, Activations(model) as activations:
    for batch in batches:
        model(**batch)
attention.result().mean, activations.result().spike_writers
"""

from .activations import Activations, ActivationsResult, SpikeWriter, delimiter_token_ids
from .attention import FirstTokenAttention, FirstTokenAttentionResult, attention_maps
from .divergence import LayerDifference, first_divergence, layer_divergence, recorded_states
from .gates import GateScores, GateScoresResult
from .interventions import (
    InterventionOutcome,
    evicted_keys,
    gate_interventions,
    measure_interventions,
    quantisation_interventions,
    quantised,
    scaled_gates,
    streaming_interventions,
)
from .metrics import mean_nll
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
    "InterventionOutcome",
    "LayerDifference",
    "OutputSparsity",
    "OutputSparsityResult",
    "Probe",
    "SpikeWriter",
    "attention_maps",
    "attention_modules",
    "decoder_layers",
    "decoder_of",
    "delimiter_token_ids",
    "evicted_keys",
    "first_divergence",
    "gate_interventions",
    "layer_divergence",
    "mean_nll",
    "measure_interventions",
    "quantisation_interventions",
    "quantised",
    "recorded_states",
    "scaled_gates",
    "streaming_interventions",
]
