"""All diagnostics of one model on one text, as one object that becomes JSON, a table, pictures and a page."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from .. import __version__
from .activations import Activations, delimiter_token_ids
from .attention import FirstTokenAttention, attention_maps
from .corpus import Corpus
from .divergence import Place, layer_divergence, recorded_states
from .gates import GateScores, GateScoresResult
from .interventions import (
    gate_interventions,
    measure_interventions,
    quantisation_interventions,
    streaming_interventions,
)
from .probes import attention_modules, in_eval_mode
from .states import FirstTokenStates, OutputSparsity


SCHEMA_VERSION = 1
MAP_TOKENS = 48  # attention maps are pictures of the first tokens of the first row
MAP_LAYERS = 4

Progress = Callable[[str, int, int], None]  # what is being done, steps done, steps in all


@dataclass(frozen=True)
class DiagnosisReport:
    """
    What `diagnose` measured of one model. Numbers are those of the probes' results, see there for definitions.

    model, text: what was measured on what. first_token_attention: `FirstTokenAttentionResult` with `sink_rate`.
    max_activation: `ActivationsResult`. spike_writers: its list of {layer, unit, first_token_activation,
    elsewhere_max, elsewhere_mean, contribution, dimension}. gate_scores: `GateScoresResult`, None without a gate.
    sparsity: `OutputSparsityResult`. first_token_states: `FirstTokenStatesResult`. interventions: list of
    `InterventionOutcome`, None when not asked for; those that do not apply to the model are in `left_out` with the
    reason. against: the same of another model. maps and states (outputs of the layers on the first row)
    are for pictures and comparison and not part of the JSON.
    """

    model: dict[str, Any]
    text: dict[str, Any]
    first_token_attention: dict[str, Any]
    max_activation: dict[str, Any]
    spike_writers: list[dict[str, Any]]
    gate_scores: dict[str, Any] | None
    sparsity: dict[str, Any]
    first_token_states: dict[str, Any]
    interventions: list[dict[str, Any]] | None
    left_out: dict[str, str]
    maps: dict[int, torch.Tensor] = field(repr=False)
    states: dict[Place, torch.Tensor] = field(repr=False)
    against: "DiagnosisReport | None" = None

    def divergence(self) -> list[dict[str, Any]] | None:
        """
        Largest difference of the two models' hidden states on the first row: [{place, max_abs_difference, bitwise}].

        None without a second model, and for models that do not have the same layers and shapes (`not_compared`).
        """
        if self.against is None or self.not_compared():
            return None
        return [asdict(difference) for difference in layer_divergence(self.states, self.against.states)]

    def not_compared(self) -> str | None:
        """Why the layers of two models are not compared; None if they are, or if there is one model."""
        if self.against is None:
            return None
        if not (self.states and self.against.states):
            return "A decoder without `layers` and `norm` has no outputs that could be kept."
        try:
            layer_divergence(self.states, self.against.states)
        except ValueError as error:
            return str(error)
        return None

    def to_dict(self) -> dict[str, Any]:
        """The content of report.json: plain numbers, lists and names, with `schema_version`."""
        report = asdict(replace(self, maps={}, states={}, against=None))
        for unsaved in ("maps", "states"):
            del report[unsaved]
        report |= {"divergence": self.divergence(), "against": self.against.to_dict() if self.against else None}
        return {"schema_version": SCHEMA_VERSION, "gated_llama_version": __version__, **report}


@in_eval_mode
def diagnose(
    model: nn.Module,
    tokenizer,
    corpus: Corpus,
    *,
    name: str = "",
    batch_size: int = 1,
    interventions: bool = True,
    intervention_tokens: int = 1024,
    map_layers: list[int] | None = None,
    progress: Progress = lambda what, done, total: None,
) -> DiagnosisReport:
    """
    Runs every probe over the corpus in one pass, then the interventions on its first `intervention_tokens` tokens.

    Works on any causal language model whose attention goes through the Transformers attention interface; the model is
    left as it was. Raises ValueError for other models and for unknown layers in `map_layers`.
    """
    modules = attention_modules(model)
    map_layers = spread(sorted(modules), MAP_LAYERS) if map_layers is None else map_layers
    with within_positions(model, corpus.ids.shape[1]):
        maps = attention_maps(model, corpus.ids[0, :MAP_TOKENS], map_layers)
    probes = make_probes(model, tokenizer)
    batches = corpus.ids.split(batch_size)
    with contextlib.ExitStack() as stack, torch.no_grad(), within_positions(model, corpus.ids.shape[1]):
        for probe in probes.values():
            stack.enter_context(probe)
        for index, batch in enumerate(batches):
            progress("probing", index, len(batches))
            model(batch.to(model.device), use_cache=False)
    results = {key: probe.result() for key, probe in probes.items()}
    outcomes, left_out = None, {}
    if interventions:
        rows = corpus.ids[: max(1, intervention_tokens // corpus.ids.shape[1])]
        outcomes, left_out = intervene(model, list(rows.split(batch_size)), results.get("gate_scores"), progress)
    activations = results["max_activation"].to_dict()
    return DiagnosisReport(
        model=describe(model, name, modules),
        text={"source": corpus.source, "rows": len(corpus.ids), "context": corpus.ids.shape[1], "bos": corpus.bos},
        first_token_attention=name_tokens(results["first_token_attention"].to_dict(), tokenizer),
        spike_writers=activations.pop("spike_writers"),
        max_activation=activations,
        gate_scores=results["gate_scores"].to_dict() if "gate_scores" in results else None,
        sparsity=results["sparsity"].to_dict(),
        first_token_states=name_tokens(results["first_token_states"].to_dict(), tokenizer),
        interventions=outcomes,
        left_out=left_out,
        maps=maps,
        states=first_row_states(model, corpus),
    )


@contextlib.contextmanager
def within_positions(model: nn.Module, tokens: int) -> Iterator[None]:
    """Learned positions come to an end, which is an IndexError; rotary ones do not."""
    try:
        yield
    except IndexError as error:
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or "fewer"
        raise ValueError(
            f"The model has {limit} positions and a row has {tokens} tokens: choose a smaller context."
        ) from error


@torch.no_grad()
def first_row_states(model: nn.Module, corpus: Corpus) -> dict[Place, torch.Tensor]:
    """Outputs of embeddings, layers and final norm on the first row; empty for a decoder built in another way."""
    decoder = model.get_decoder()
    if not hasattr(decoder, "layers") or not hasattr(decoder, "norm"):
        return {}
    with recorded_states(model) as states:
        model(corpus.ids[:1].to(model.device), use_cache=False)
    return states


def make_probes(model: nn.Module, tokenizer) -> dict[str, Any]:
    """The probes that apply to the model, under the names of the report's sections."""
    probes = {
        "first_token_attention": FirstTokenAttention(model),
        "max_activation": Activations(model, delimiter_ids=delimiter_token_ids(tokenizer)),
        "sparsity": OutputSparsity(model),
        "first_token_states": FirstTokenStates(model),
    }
    with contextlib.suppress(ValueError):  # no gate that is known: the section stays empty
        probes["gate_scores"] = GateScores(model)
    return probes


def intervene(
    model: nn.Module, batches: list[torch.Tensor], scores: GateScoresResult | None, progress: Progress
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Outcomes of all interventions that apply, and why the others do not."""
    window = batches[0].shape[1] // 2
    offers = {
        "gates": lambda: gate_interventions(model, scores) if scores else refuse("the model has no known gate"),
        "window": lambda: streaming_interventions(model, window),
        "quantisation": lambda: quantisation_interventions(model),
    }
    chosen, left_out = {}, {}
    for kind, offer in offers.items():
        try:
            chosen |= offer()
        except ValueError as error:
            left_out[kind] = str(error)
    for name, intervention in list(chosen.items()):
        try:
            with intervention():  # those that do not fit the model say so here
                pass
        except ValueError as error:
            left_out[name] = str(error)
            del chosen[name]
    outcomes = measure_interventions(model, counted(batches, progress), chosen)
    return [outcome.to_dict() for outcome in outcomes], left_out


def counted(batches: list[torch.Tensor], progress: Progress) -> Iterator[torch.Tensor]:
    for index, batch in enumerate(batches):
        progress("interventions", index, len(batches))
        yield batch


def refuse(reason: str):
    raise ValueError(reason)


def describe(model: nn.Module, name: str, modules: dict[int, nn.Module]) -> dict[str, Any]:
    config = model.config.get_text_config()  # of a multimodal model, the part that is a decoder
    return {
        "name": name or model.config.name_or_path,
        "model_type": model.config.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attn_implementation": str(config._attn_implementation),
        "layers": config.num_hidden_layers,
        "attention_layers": sorted(modules),
        "heads": config.num_attention_heads,
        "parameters": model.num_parameters(),  # also of weights that are packed
        "quantization": model.config.to_dict().get("quantization_config"),
    }


def name_tokens(section: dict[str, Any], tokenizer) -> dict[str, Any]:
    """Adds the text of each first token to its id and count."""
    for entry in section["first_tokens"]:
        entry["token"] = tokenizer.convert_ids_to_tokens(entry["id"])
    return section


def spread(layers: list[int], count: int) -> list[int]:
    """`count` of the layers at equal distances, the first and the last among them."""
    if len(layers) <= count:
        return layers
    return [layers[round(index * (len(layers) - 1) / (count - 1))] for index in range(count)]
