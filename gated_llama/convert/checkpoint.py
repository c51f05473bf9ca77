"""Conversion of a checkpoint: source tensors in, gated checkpoint out, one tensor at a time."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from .. import __version__
from ..checkpoint_gated import copy_code
from ..configuration_gated import GatedLlamaConfig
from ..hub import model_card
from ..modeling_gated import GatedLlamaForCausalLM
from .exported import without_added_layer
from .gated_source import GatedSource
from .imports import source_for
from .layouts import fold_scale
from .opening import Checkpoint, open_checkpoint
from .output_folder import building, check_output
from .policies import GateStart, plan_start
from .source_rotary import plain_rotary
from .sources import Origin, decoder_fields
from .tensor_files import DTYPES, FileRange, check_finite, is_finite, one_line, plan_shards, write_shards
from .tokenizer import carry_files, with_tokenizer


# Elements that are checked, scaled and written at a time: a part stays in the processor's cache.
PART_ELEMENTS = 1 << 21

KEPT_DTYPE = (
    "{kept} norm gains are stored in float32 and loaded in it (norms_in_fp32), since 1 + w needs more digits than "
    "{dtype} has."
)

ADAPTERS = (
    "A LoRA or other adapter of the source does not fit as it is ({folded}): `gated-llama convert-adapter ADAPTER "
    "GATED OUT` scales it."
)

# Names in state dicts of other code (see `state_dicts`).
FOREIGN_TENSOR = re.compile(r"linear_qkv|gqkv|\.w_(g|q|out)\.|(attn|attention)\w*\.(g_proj|gate_proj|attn_gate)\.")

GATE_TENSOR = re.compile(r"\.self_attn\.(g_proj\.(weight|bias)|g_param)$")


@dataclass(frozen=True)
class ConversionReport:
    """
    What a conversion did.

    Args:
        output: the folder that was written.
        source: the source as it was given.
        source_model_type: its `model_type`.
        config: the configuration that was written.
        tensors_read, tensors_written: numbers of source and target tensors.
        folded: name pattern (`*` for the layer) -> the factor that its tensors were multiplied with.
        bytes_written: size of the weights.
        shards: number of safetensors files.
        tokenizer_class: class pinned in tokenizer_config.json; `None` without a tokenizer.
        notes: what deserves attention, one sentence each.
    """

    output: Path
    source: str
    source_model_type: str
    config: GatedLlamaConfig
    tensors_read: int
    tensors_written: int
    folded: dict[str, float]
    bytes_written: int
    shards: int
    tokenizer_class: str | None
    notes: list[str]


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before a byte is written."""

    checkpoint: Checkpoint
    config: GatedLlamaConfig
    start: GateStart
    targets: dict[str, torch.Tensor]
    origins: dict[str, Origin]
    notes: list[str]

    def factor(self, name: str) -> float:
        """What the source tensor of the target `name` is multiplied with."""
        match = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.(.+)", name)
        if match is None or int(match[1]) not in self.config.gated_layers:
            return 1.0
        return self.start.fold.get(match[2], 1.0)


def convert_checkpoint(
    source: str | Path,
    output: str | Path,
    *,
    position: str | None = "sdpa_output",
    granularity: str = "headwise",
    head_shared: bool = False,
    operation: str = "multiply",
    activation: str = "sigmoid",
    gate_input: str = "hidden_states",
    gate_bias: bool | None = None,
    layers: list[int] | None = None,
    policy: str = "identity",
    bias: float | None = None,
    seed: int = 0,
    layout: str | None = None,
    gate_scale: float = 1.0,
    tokenizer: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    revision: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> ConversionReport:
    """
    Converts a checkpoint of type llama, qwen2, qwen3, mistral or smollm3 (with rotary positions in every layer, which
    SmolLM3-3B has not) into a gated one, or takes over the gate of one that has it already: the paper release,
    qwen3_next, qwen3_5_text, step3p5 and afmoe (`imports` says how far), what `export_checkpoint` wrote, and state
    dicts of other code (`state_dicts`).

    Tensors are streamed; the folder appears under its name only when it is complete.

    Args:
        source: Hub id, local folder, or a .gguf file.
        output: the folder to write; it must not exist, or be empty.
        position, granularity, head_shared, operation, activation, gate_input, layers: the gate's axes, as in
            `GatedLlamaConfig` (`gate_*`).
        gate_bias: bias of the gate projection; `None` for what the policy needs.
        policy: `"identity"` (same function as the source), `"open"` (scores start at act(bias), nothing folded) or
            `"normal"` (random weights).
        bias: the start of policy `"open"`.
        seed: seed of policy `"normal"`.
        layout: how the source stores a gate of its own, a name of `layouts.LAYOUTS`; `None` for what its format
            declares. The options above describe a gate to add, and are refused for such a source. For a plain
            architecture, the layout of the gate that its tensors hold (see `state_dicts`).
        gate_scale: c of a source whose own gate multiplies by c sigmoid(u), a power of two; it is folded into o_proj.
        tokenizer: folder of the original tokenizer of a `.gguf` source, which must have the tokens that the file
            lists; `None` for the one that the file describes.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`; `None` keeps the source's (float32 for GGUF).
        max_shard_size: largest file, in bytes or such as `"5GB"`.
        revision: branch, tag or commit of a Hub source.
        progress: called as `progress(done_bytes, total_bytes, tensor_name)` after each part that was written.

    Raises:
        ValueError: the request or the source is not valid; the message says what to do.
        OSError: reading or writing failed. In both cases, and when interrupted, nothing is left at `output`.
    """
    output = check_output(Path(output), source)
    if layers is not None and not (isinstance(layers, list) and all(type(layer) is int for layer in layers)):
        raise ValueError(f"layers={layers!r} is not a list of layer numbers, such as [0, 1, 5].")
    gate = {
        "gate_position": position,
        "gate_granularity": granularity,
        "gate_head_shared": head_shared,
        "gate_operation": operation,
        "gate_activation": activation,
        "gate_input": gate_input,
        "gate_layers": None if layers is None else sorted(layers),
    }
    checkpoint = open_checkpoint(source, revision)
    checkpoint = with_tokenizer(checkpoint, None if tokenizer is None else Path(tokenizer).expanduser())
    start = {"policy": policy, "bias": bias, "gate_bias": gate_bias, "seed": seed}
    with checkpoint.in_its_words():
        plan = make_plan(checkpoint, gate, start, layout=layout, gate_scale=gate_scale, dtype=dtype)
    plan_shards(plan.targets, max_shard_size)
    with building(output, sum(target.nbytes for target in plan.targets.values())) as folder:
        tokenizer_class, notes = write_files(plan, folder, output)
        shards = write_shards(folder, plan.targets, max_shard_size, Stream(plan, progress).written)
    return ConversionReport(
        output=output,
        source=str(source),
        source_model_type=plan.checkpoint.raw_config["model_type"],
        config=plan.config,
        tensors_read=len({origin.source for origin in plan.origins.values()}),
        tensors_written=len(plan.targets),
        folded={f"model.layers.*.self_attn.{site}": factor for site, factor in plan.start.fold.items()},
        bytes_written=sum(target.nbytes for target in plan.targets.values()),
        shards=len(shards),
        tokenizer_class=tokenizer_class,
        notes=plan.notes + notes,
    )


def make_plan(
    checkpoint: Checkpoint,
    gate: Mapping[str, Any],
    start_options: Mapping[str, Any],
    *,
    layout: str | None,
    gate_scale: float = 1.0,
    dtype: str | torch.dtype | None,
) -> Plan:
    """Decides configuration, start and the origin of every tensor; ValueError where the source does not fit."""
    checkpoint, added = without_added_layer(checkpoint)
    raw, rotary_notes = plain_rotary(checkpoint.raw_config)
    record = source_for(raw, layout)
    fields = decoder_fields(record, raw)
    imported = isinstance(record, GatedSource)
    if imported:
        refuse_request(record.model_type, {**gate, **start_options})
        fold_scale(torch.ones(()), gate_scale)  # refuses what is no power of two
        record, fields = record.settled(checkpoint.reader, fields)
        start = record.start(checkpoint.reader, fields, gate_scale)
    elif gate_scale != 1:
        raise ValueError(
            f"gate_scale={gate_scale} belongs to a source with a gate, and this {record.model_type} has none."
        )
    else:
        fields |= gate
        start = plan_start(build_config(fields), **start_options)
    dtype, notes = choose_dtype(checkpoint, dtype)
    config = build_config(
        fields
        | {
            "architectures": ["GatedLlamaForCausalLM"],
            "dtype": dtype,
            "gate_bias": start.gate_bias,
            "gate_retrofit": start.record(record.model_type, __version__),
        }
    )
    targets = expected_tensors(config, dtype)
    origins = record.origins([name for name in targets if imported or not GATE_TENSOR.search(name)], fields)
    kept = {name: targets[name].to(origin.dtype) for name, origin in origins.items() if origin.dtype}
    if kept and dtype != torch.float32:
        config.norms_in_fp32 = True
        notes = [*notes, KEPT_DTYPE.format(kept=len(kept), dtype=str(dtype).removeprefix("torch."))]
    if start.fold and not imported:
        notes = [*notes, ADAPTERS.format(folded=", ".join(f"{name} x {c:g}" for name, c in start.fold.items()))]
    plan = Plan(checkpoint, config, start, targets | kept, origins, notes + list(start.notes) + added + rotary_notes)
    check_tensors(plan, record.dropped_tensors)
    return plan


def refuse_request(model_type: str, options: Mapping[str, Any]) -> None:
    """ValueError for options that describe a gate to add and are not at their defaults."""
    defaults = {name: option.default for name, option in inspect.signature(convert_checkpoint).parameters.items()}
    options = {name if name in defaults else name.removeprefix("gate_"): value for name, value in options.items()}
    if asked := [f"{name}={value!r}" for name, value in options.items() if value != defaults[name]]:
        raise ValueError(
            f"{', '.join(asked)} would describe a gate to add, but this {model_type} source brings its own, which is "
            "taken over as it is: leave the option out."
        )


def build_config(fields: Mapping[str, Any]) -> GatedLlamaConfig:
    """The configuration; ValueError in one line where the library raises its own kind of error."""
    try:
        return GatedLlamaConfig(**fields)
    except StrictDataclassError as error:
        raise ValueError(one_line(error.__cause__ or error)) from error


def choose_dtype(checkpoint: Checkpoint, dtype: str | torch.dtype | None) -> tuple[torch.dtype, list[str]]:
    """The one dtype of the result, and a note when the source has several."""
    names = {str(value).removeprefix("torch."): value for value in DTYPES.values()}
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        if name not in names:
            raise ValueError(f"dtype={name!r} is not supported; choose one of {', '.join(names)}.")
        return names[name], []
    found = {info.dtype for info in checkpoint.reader.tensors.values()}
    if len(found) == 1:
        return found.pop(), []
    declared = checkpoint.raw_config.get("dtype") or checkpoint.raw_config.get("torch_dtype")
    chosen = names.get(declared, torch.float32)
    listed = ", ".join(sorted(str(value).removeprefix("torch.") for value in found))
    chosen_name = str(chosen).removeprefix("torch.")
    return chosen, [f"The source mixes {listed}; everything was written as {chosen_name}."]


def expected_tensors(config: GatedLlamaConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Names and shapes of the tensors that a checkpoint of this configuration has, as meta tensors of `dtype`."""
    try:
        with torch.device("meta"):
            model = GatedLlamaForCausalLM(config)
    except (AssertionError, ArithmeticError, KeyError, RuntimeError, TypeError) as error:
        # The layers of torch and of the library check their own arguments, each in its own way.
        raise ValueError(f"No model can be built from this config.json: {one_line(error)}.") from error
    tied = set(GatedLlamaForCausalLM._tied_weights_keys) if config.tie_word_embeddings else set()
    return {
        name: torch.empty(tensor.shape, dtype=dtype, device="meta")
        for name, tensor in model.state_dict().items()
        if name not in tied
    }


def check_tensors(plan: Plan, dropped: str) -> None:
    """ValueError unless every target has one source of its shape and every source tensor is used."""
    found = plan.checkpoint.reader.tensors
    for name, origin in plan.origins.items():
        if origin.source not in found:
            advice = " (tie_word_embeddings is false in config.json)" if origin.source == "lm_head.weight" else ""
            advice = advice or other_layout(plan)
            raise ValueError(f"The source has no tensor {origin.source!r}, which its config.json calls for{advice}.")
        shape, wanted = found[origin.source].shape, tuple(plan.targets[name].shape)
        if origin.take is None and shape != wanted:
            raise ValueError(
                f"Tensor {origin.source!r} has shape {list(shape)}, but config.json calls for {list(wanted)}: "
                "weights and configuration do not belong together."
            )
    extra = sorted(set(found) - {origin.source for origin in plan.origins.values()})
    for name in extra:
        if name == "lm_head.weight" and plan.config.tie_word_embeddings:
            check_tied_head(plan)
        elif not re.fullmatch(dropped, name):
            raise ValueError(
                f"The source has a tensor {name!r} that a {plan.checkpoint.raw_config['model_type']} model of this "
                f"configuration does not have: converting without it would give another model{other_layout(plan)}."
            )


def other_layout(plan: Plan) -> str:
    """A hint where the tensors look as if a gate, or other code, had written them."""
    names = plan.checkpoint.reader.tensors
    gate = next((name for name in names if FOREIGN_TENSOR.search(name)), None)
    if gate is None or plan.config.gate_retrofit.get("policy") == "imported":
        return ""
    return f" ({gate!r} looks like another layout: if the source has a gate, name how it is stored with --layout)"


def check_tied_head(plan: Plan) -> None:
    """A tied source may also store its head, as long as it is the embedding, bit for bit."""
    head, embedding = (plan.checkpoint.reader.read(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    if head.dtype != embedding.dtype or not torch.equal(head.view(torch.uint8), embedding.view(torch.uint8)):
        raise ValueError(
            "config.json says tie_word_embeddings=true, but lm_head.weight differs from model.embed_tokens.weight: "
            "set it to false in a copy of the source if the head was trained or merged on its own."
        )
    plan.notes.append("The source stores its tied head as well; it equals the embedding and was not written again.")


@dataclass
class Stream:
    """Produces target tensors in parts and reports progress."""

    plan: Plan
    progress: Callable[[int, int, str], None] | None
    done: int = 0

    def __post_init__(self):
        self.total = sum(target.nbytes for target in self.plan.targets.values())

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        """The target `name`, in parts along its first axis, checked and in the result's dtype."""
        target = self.plan.targets[name]
        rows = max(1, PART_ELEMENTS // (target.numel() // len(target)))
        for part in self.tensor(name, target).split(rows):
            yield convert_part(name, part, target.dtype, self.plan.factor(name))

    def written(self, name: str) -> Iterator[torch.Tensor | FileRange]:
        """As `parts`, with what is to be written as it is stored named by its place in the source's files."""
        position = self.stored_at(name)
        for part in self.parts(name):
            if position is None:
                yield part
            else:
                yield position._replace(size=part.nbytes)
                position = position._replace(offset=position.offset + part.nbytes)
            self.done += part.nbytes
            if self.progress is not None:
                self.progress(self.done, self.total, name)

    def stored_at(self, name: str) -> FileRange | None:
        """Where the bytes of the target `name` lie in the source, if the target has the same ones."""
        origin = self.plan.origins.get(name)
        if origin is None or origin.take is not None or self.plan.factor(name) != 1:
            return None
        info = self.plan.checkpoint.reader.tensors[origin.source]
        if info.offset is None or info.dtype != self.plan.targets[name].dtype:
            return None
        return FileRange(info.file, info.offset, 0)

    def tensor(self, name: str, target: torch.Tensor) -> torch.Tensor:
        origin = self.plan.origins.get(name)
        if origin is None:
            return self.plan.start.tensor(name, target.shape)
        tensor = self.plan.checkpoint.reader.read(origin.source)
        if origin.take is not None:
            tensor = origin.take(tensor if origin.dtype is None else tensor.to(origin.dtype))
            if tensor.shape != target.shape:
                raise ValueError(
                    f"Tensor {origin.source!r} gives {name!r} the shape {list(tensor.shape)}, but config.json calls "
                    f"for {list(target.shape)}: weights and configuration do not belong together."
                )
        return tensor


def convert_part(name: str, part: torch.Tensor, dtype: torch.dtype, factor: float) -> torch.Tensor:
    """`part * factor`, rounded once to `dtype`; ValueError for values that are not finite before or after."""
    check_finite(name, part, "the source")
    if part.dtype == dtype and factor == 1:
        return part.contiguous()
    result = part.to(torch.promote_types(part.dtype, dtype))
    result = (result if factor == 1 else result * factor).to(dtype).contiguous()
    if not is_finite(result):
        raise ValueError(
            f"Tensor {name!r}{f' times {factor:g}' if factor != 1 else ''} passes the largest {str(dtype)[6:]} "
            f"({torch.finfo(dtype).max:g}): convert with dtype='bfloat16' or 'float32'."
        )
    return result


def write_files(plan: Plan, folder: Path, output: Path) -> tuple[str | None, list[str]]:
    """Configuration, code, tokenizer and model card; returns the pinned tokenizer class and notes."""
    copy_code(folder)
    plan.config.save_pretrained(folder)
    tokenizer_class, notes = carry_files(plan.checkpoint, folder)
    card = model_card(
        plan.config, name=output.name, source_folder=plan.checkpoint.folder, base_model=plan.checkpoint.hub_id
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    return tokenizer_class, notes
