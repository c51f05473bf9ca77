"""
The sink transplant: an attention sink on a constant first token becomes a headwise output gate, in closed form.

With a_i0 the attention of query i on the first token, whose key and value are constants of the model,

    o_i = (1 - a_i0) softmax_{j>=1}(s_i) (v_j - v_0) + v_0,

an output gate over attention without the first token, a value bias -v_0 and an output bias W_O v_0. That is exact;
what is approximated is the gate's logit, which has to be a linear function of the layer's input.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn

from .. import __version__
from ..configuration_gated import GatedLlamaConfig
from ..convert import convert_checkpoint
from ..convert.checkpoint import build_config
from ..diagnostics.probes import eval_mode
from ..modeling_gated import GatedLlamaForCausalLM
from .calibration import calibration_rows, scratch, sink_token
from .sink import SMALLEST_ATTENTION, SinkReport, measure_sink
from .walk import LayerFit, Walk, WalkOptions


# A sink below this mean first-token attention is not worth an operation.
SMALLEST_SINK = 0.05
MEASURED_ROWS = 8

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class TransplantReport:
    """
    What was measured and done.

    sink: of the source, with its first token. layers: how well each layer could be matched. edits: what was changed,
    in order; `undo_transplant` reads it. options: of the fits. calibration_tokens: without the first ones. measures:
    by `transplant_checkpoint`, on text that was kept back: both models' sinks, their KL, the noise floor.
    """

    sink: SinkReport
    layers: list[LayerFit]
    edits: list[dict]
    options: WalkOptions
    calibration_tokens: int
    context: int
    measures: dict = field(default_factory=dict)

    def to_dict(self) -> dict:
        return asdict(self)


def transplant(
    model: nn.Module,
    tokenizer,
    texts: Sequence[str],
    *,
    tokens: int = 32768,
    context: int = 511,
    bos: str = "auto",
    granularity: str = "headwise",
    options: WalkOptions | None = None,
    progress: Progress = lambda what, done, total: None,
) -> tuple[GatedLlamaForCausalLM, TransplantReport]:
    """
    Makes a gated model without a sink from a loaded one, which stays as it is.

    Args:
        model: a causal language model of a type that `convert_checkpoint` reads, without gates, in float32.
        texts: calibration text; of every kind that matters, in turn, since `tokens` are taken from the start.
        tokens, context: calibration tokens in all, and in a row.
        bos: the first token on which the sink sits: "auto" (the tokenizer's) or a token.
        granularity, options, progress: as in `transplant_rows`.

    The result is meant to run without the token `bos` before its texts; `transplant_checkpoint` also takes it out of
    the tokenizer. Raises ValueError for bad input and for a model without a sink.
    """
    if isinstance(texts, str):
        raise ValueError("texts is one string: pass a list of texts.")
    first = sink_token(tokenizer, bos)
    rows = calibration_rows(tokenizer, texts, "the texts", tokens=tokens, context=context)
    return transplant_rows(
        without_gates(model),
        rows,
        first,
        first_token=tokenizer.convert_ids_to_tokens(first),
        granularity=granularity,
        options=options,
        progress=progress,
    )


def without_gates(model: nn.Module) -> nn.Module:
    """The model in this package's format; it goes through files, since conversion does."""
    if model.config.model_type == GatedLlamaConfig.model_type:
        return model
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder) / "model")
        convert_checkpoint(Path(folder) / "model", Path(folder) / "plain", position=None)
        plain = GatedLlamaForCausalLM.from_pretrained(Path(folder) / "plain", dtype=model.dtype)
    return plain.to(model.device).eval()


def transplant_rows(
    source: nn.Module,
    rows: torch.Tensor,
    first: int,
    *,
    first_token: str = "",
    granularity: str = "headwise",
    options: WalkOptions | None = None,
    progress: Progress = lambda what, done, total: None,
) -> tuple[GatedLlamaForCausalLM, TransplantReport]:
    """
    Makes a gated model without a sink from a gated_llama model without gates.

    Args:
        source: a `GatedLlamaForCausalLM` with gate_position None, as `convert_checkpoint(..., position=None)` writes
            it, in float32; it is left as it is.
        rows: token ids [rows, context] of calibration text, without the first token.
        first: the token on which the source's sink sits.
        granularity: "headwise", or "elementwise" with the same score for every coordinate of a head.
        options: of the fits.
        progress: told (what, done, total).

    Raises:
        ValueError: the source has gates, ids are none of its own, or it has no sink that a gate could take over
            (the identity is offered instead).
    """
    options = options or WalkOptions()
    _check(source, rows, first)
    with attention_by("sdpa", source), eval_mode(source):
        return _transplant(source, rows, first, first_token, granularity, options, progress)


@contextlib.contextmanager
def attention_by(implementation: str, model: nn.Module) -> Iterator[None]:
    """Layers are called one by one and without a mask, which other implementations would take for no causality."""
    own = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(own)


def _transplant(source, rows, first, first_token, granularity, options, progress):
    progress("measuring the sink", 0, 1)
    sink = measure_sink(source, rows[_spread(len(rows), MEASURED_ROWS)], first, first_token)
    refuse_without_sink(sink)
    progress("measuring the sink", 1, 1)
    gated = gated_copy(source, granularity)
    edits, layers = [], []
    with scratch(Walk.scratch_bytes(source.config, rows)) as files:
        walk = Walk(source.model, gated.model, rows, first, files, options)
        for index in range(source.config.num_hidden_layers):
            progress("matching layers", index, source.config.num_hidden_layers)
            quiet = sorted(writer.unit for writer in sink.spike_writers if writer.layer == index)
            fit = walk.layer(index, sink.transplantable(index), quiet)
            layers.append(fit)
            edits += _edits(fit, options)
    progress("matching layers", len(layers), len(layers))
    every = range(source.config.num_attention_heads)
    for fit in layers:
        _leave_at_identity(gated, fit.layer, [head for head in every if head not in fit.heads])
    return gated, TransplantReport(sink, layers, edits, options, rows.numel(), rows.shape[1])


def _check(source: nn.Module, rows: torch.Tensor, first: int) -> None:
    config = source.config
    if config.model_type != GatedLlamaConfig.model_type or config.gate_position is not None:
        raise ValueError(
            "A transplant starts from a model without gates in this package's format: convert the checkpoint with "
            "position=None first."
        )
    if source.dtype != torch.float32:
        raise ValueError(f"The fits need float32, and the model is {source.dtype}: load it with dtype=torch.float32.")
    if rows.shape[1] >= config.max_position_embeddings:
        raise ValueError(
            f"context={rows.shape[1]} and the first token do not fit into the model's "
            f"{config.max_position_embeddings} positions: choose a smaller context."
        )
    if (largest := max(int(rows.max()), first)) >= config.vocab_size:
        raise ValueError(
            f"The tokenizer gives the id {largest} and the model has embeddings for 0 to {config.vocab_size - 1}: it "
            "is another model's tokenizer."
        )
    sliding = "sliding_attention" in config.layer_types
    if sliding and rows.shape[1] >= config.sliding_window:
        raise ValueError(
            f"context={rows.shape[1]} must be smaller than the sliding window ({config.sliding_window}): beyond it "
            "the first token is out of sight."
        )


def refuse_without_sink(sink: SinkReport) -> None:
    """ValueError when there is nothing that a gate could take over."""
    if sink.mean >= SMALLEST_SINK and sink.count:
        return
    heads = sum(len(layer) for layer in sink.heads)
    raise ValueError(
        f"There is no sink to transplant: mean attention on the first token {sink.first_token!r} is {sink.mean:.3f}, "
        f"where at least {SMALLEST_SINK} is needed, and {sink.count} of {heads} heads give it {SMALLEST_ATTENTION} or "
        "more. "
        "Use --policy identity, or name another first token with --bos; a sink also shows less in longer rows."
    )


def _spread(total: int, wanted: int) -> list[int]:
    """At most `wanted` indices, evenly spread, so that every calibration file has its say."""
    return sorted({i * total // min(total, wanted) for i in range(min(total, wanted))})


def gated_copy(source: nn.Module, granularity: str) -> GatedLlamaForCausalLM:
    """The source's weights in a model with zero gates at G1 and the biases that a transplant writes."""
    fields = source.config.to_dict() | {
        "gate_position": "sdpa_output",
        "gate_granularity": granularity,
        "gate_bias": True,
        "qkv_bias": True,
        "o_bias": True,
        "gate_retrofit": {
            "policy": "transplant",
            "fold": {},
            "source_model_type": (source.config.gate_retrofit or {}).get("source_model_type"),
            "package_version": __version__,
        },
    }
    config = build_config(fields)
    gated = GatedLlamaForCausalLM(config).to(source.device, source.dtype).eval()
    absent = gated.load_state_dict(source.state_dict(), strict=False).missing_keys
    with torch.no_grad():
        for name, parameter in gated.named_parameters():
            if name in absent and (name.endswith("_proj.bias") or ".g_proj." in name):
                parameter.zero_()
    return gated


def _leave_at_identity(gated: nn.Module, layer: int, heads: list[int]) -> None:
    """Records that these heads of a layer have the score 1/2 and a doubled output projection."""
    if heads:
        record = gated.config.gate_retrofit or {}
        left = (record.get("identity_heads") or {}) | {str(layer): heads}
        gated.config.gate_retrofit = record | {"identity_heads": left}


def _edits(fit: LayerFit, options: WalkOptions) -> list[dict]:
    layer = {"layer": fit.layer}
    edits = [layer | {"edit": "values"}, layer | {"edit": "gates", "heads": fit.heads}]
    if fit.quieted:
        edits.append(layer | {"edit": "units", "units": fit.quieted})
    if options.ridge is not None:
        edits.append(layer | {"edit": "refit"})
    return edits


# Tensors that each edit touches, below a layer.
EDITED = {
    "values": ("self_attn.v_proj.bias", "self_attn.o_proj.bias"),
    "gates": ("self_attn.g_proj.weight", "self_attn.g_proj.bias", "self_attn.o_proj.weight"),
    "units": ("mlp.down_proj.weight",),
    "refit": ("self_attn.o_proj.weight", "self_attn.o_proj.bias", "mlp.down_proj.weight"),
}


@torch.no_grad()
def undo_transplant(gated: nn.Module, source: nn.Module, edits: Iterable[dict]) -> None:
    """
    Takes edits back in place, from the source's weights; all of them leave the identity retrofit of the source.

    edits: of a report, or of transplant.json. Each names a layer, and every tensor that it touched there becomes the
    source's again, its gates becoming zero; so taking back one kind of edit of a layer also takes back the others that
    touched the same tensors. o_proj's bias carries W_O v_0 for as long as v_proj's takes v_0 away. What lies in files
    stays as the transplant left it: the tokenizer and the generation settings, without the first token, and the policy
    in the config. Raises ValueError for an unknown edit, for a model that is no transplant, and for a source that it
    cannot be from.
    """
    edits, depth = list(edits), gated.config.num_hidden_layers
    if not all(isinstance(edit, dict) for edit in edits):
        raise ValueError('Edits are mappings with "edit" and "layer": of transplant.json, pass what is under "edits".')
    for edit in edits:
        if edit.get("edit") not in EDITED:
            raise ValueError(f"edit {edit.get('edit')!r} is none of {', '.join(EDITED)}.")
        if edit.get("layer") not in range(depth):
            raise ValueError(f"layer {edit.get('layer')!r} of an edit is none of 0 to {depth - 1}.")
    _check_source(gated, source)
    for edit in edits:
        if edit["edit"] == "gates":
            _leave_at_identity(gated, edit["layer"], list(range(gated.config.num_attention_heads)))
        for name in EDITED[edit["edit"]]:
            _restore(gated, source, edit["layer"], name)
    for layer in sorted({edit["layer"] for edit in edits if "self_attn.o_proj.bias" in EDITED[edit["edit"]]}):
        _carry_constant(gated, source, layer)


def _check_source(gated: nn.Module, source: nn.Module) -> None:
    """ValueError unless the two are a transplant and a model that it can be from."""
    if (gated.config.gate_retrofit or {}).get("policy") != "transplant":
        raise ValueError("Only a transplant has edits to take back: its config.gate_retrofit says so.")
    origins = {name: parameter.shape for name, parameter in source.named_parameters()}
    if any(".g_proj." in name or ".g_param" in name for name in origins):
        raise ValueError("The source has gates itself: pass the model that was transplanted, without gates.")
    absent = [name for name, parameter in gated.named_parameters() if _is_weight(name) and name not in origins]
    if absent:
        raise ValueError(f"The source, a {type(source).__name__}, has no parameter {absent[0]}: pass the whole model.")
    for name, parameter in gated.named_parameters():
        if name in origins and origins[name] != parameter.shape:
            raise ValueError(
                f"{name} is {tuple(parameter.shape)}, and {tuple(origins[name])} in the source: it is another model's."
            )


def _is_weight(name: str) -> bool:
    """Whether a parameter of a transplant is one of its source, too."""
    return ".g_proj." not in name and not name.endswith("_proj.bias")


def _carry_constant(gated: nn.Module, source: nn.Module, layer: int) -> None:
    """o_proj's bias carries W_O v_0 for as long as v_proj's takes v_0 away."""
    biases = [model.model.layers[layer].self_attn.v_proj.bias for model in (gated, source)]
    first = -biases[0] if biases[1] is None else biases[1] - biases[0]
    config, output = gated.config, source.model.layers[layer].self_attn.o_proj.weight
    heads = first.to(output).unflatten(0, (config.num_key_value_heads, -1))
    groups = config.num_attention_heads // config.num_key_value_heads
    gated.model.layers[layer].self_attn.o_proj.bias.add_(output @ heads.repeat_interleave(groups, 0).flatten())


def _restore(gated: nn.Module, source: nn.Module, layer: int, place: str) -> None:
    name = f"model.layers.{layer}.{place}"
    target, origins = gated.get_parameter(name), dict(source.named_parameters())
    if name not in origins and (name.endswith("_proj.bias") or ".g_proj." in name):
        target.zero_()
        return
    target.copy_(origins[name])
    if place == "self_attn.o_proj.weight":  # a gate at the identity has the score 1/2, which o_proj makes up for
        left = (gated.config.gate_retrofit or {}).get("identity_heads") or {}
        target.unflatten(1, (gated.config.num_attention_heads, -1))[:, left.get(str(layer), [])] *= 2
