"""Export of a gated checkpoint to an architecture that engines serve: tensor by tensor, proven before it appears."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from ..configuration_gated import GatedLlamaConfig
from .checkpoint import building, check_output, choose_dtype, expected_tensors, is_finite
from .export_card import export_card
from .loading import Loadable
from .opening import Checkpoint, open_checkpoint
from .parity import Parity, compare
from .rewriting import Recipe, Rewriting, storable_eps
from .targets import Target, features, get_target, require_served_cell
from .tensor_files import one_line, write_shards
from .tokenizer import carry_files


# Feature -> config field, and the tensors that must be zero for it to be dropped.
BIASES = {
    "gate bias": ("gate_bias", "self_attn.g_proj.bias"),
    "q/k/v bias": ("qkv_bias", ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")),
    "o_proj bias": ("o_bias", "self_attn.o_proj.bias"),
    "MLP bias": ("mlp_bias", ("mlp.gate_proj.bias", "mlp.up_proj.bias", "mlp.down_proj.bias")),
}


@dataclass(frozen=True)
class ExportReport:
    """
    What an export did.

    Args:
        source, output: the model and the folder that was written.
        target, model_type, dtype: what it was written as.
        tensors_written, bytes_written, shards: size of the result.
        served_by: engines that serve it.
        rewritten: what was rewritten to represent the model, one sentence each.
        never_quantise: names of linear maps that quantisation destroys.
        tokenizer_class: class pinned in tokenizer_config.json; `None` without a tokenizer.
        notes: what deserves attention, one sentence each.
        parity: the comparison with the source; `None` when it was not asked for.
    """

    source: str
    output: Path
    target: str
    model_type: str
    dtype: str
    tensors_written: int
    bytes_written: int
    shards: int
    served_by: list[str]
    rewritten: list[str]
    never_quantise: list[str]
    tokenizer_class: str | None
    notes: list[str]
    parity: Parity | None


@dataclass(frozen=True)
class ExportPlan:
    """Everything that is decided before a byte is written; `config` is the model's without biases that are zero."""

    checkpoint: Checkpoint
    config: GatedLlamaConfig
    target: Target
    dtype: torch.dtype
    recipes: dict[str, Recipe]
    notes: list[str]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Shapes and dtypes of what is written, as meta tensors."""
        return {
            name: torch.empty(recipe.shape, dtype=self.dtype, device="meta") for name, recipe in self.recipes.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def export_checkpoint(
    model: str | Path,
    output: str | Path,
    *,
    target: str,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    verify: bool = True,
    progress: Callable[[int, int, str], None] | None = None,
) -> ExportReport:
    """
    Writes a gated checkpoint as one of an architecture that engines serve.

    Tensors are streamed into a folder beside `output`, which is compared with the source and takes its name only when
    both compute the same.

    Args:
        model: folder or Hub id of a `gated_llama` checkpoint, gated at the SDPA output by a multiplied sigmoid.
        output: the folder to write; it must not exist, or be empty.
        target: a name of `targets.TARGETS`.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`; `None` keeps the source's.
        max_shard_size: largest file, in bytes or such as `"5GB"`.
        verify: compare logits before the folder appears. That holds one whole model in float32 in memory at a time:
            switch it off for models that do not fit, and compare a smaller one of the same configuration instead.
        progress: called as `progress(done_bytes, total_bytes, tensor_name)` after each tensor.

    Raises:
        ValueError: the model has what the target cannot represent, or the export does not compute the same.
        OSError: reading or writing failed. In all cases, and when interrupted, nothing is left at `output`.
    """
    record = get_target(target)
    output = check_output(Path(output), model)
    plan = plan_export(open_checkpoint(model), record, dtype)
    with building(output, plan.nbytes) as folder:
        write_config(plan, folder)
        tokenizer_class, notes = carry_files(plan.checkpoint, folder)
        shards = write_shards(folder, plan.tensors, max_shard_size, Stream(plan, progress).parts)
        parity = prove(plan, folder) if verify else None
        report = ExportReport(
            source=str(model),
            output=output,
            target=record.name,
            model_type=record.model_type,
            dtype=str(plan.dtype).removeprefix("torch."),
            tensors_written=len(plan.recipes),
            bytes_written=plan.nbytes,
            shards=len(shards),
            served_by=[str(service) for service in record.services_for(features(plan.config))],
            rewritten=record.tricks_for(features(plan.config)),
            never_quantise=record.neutralises(plan.config),
            tokenizer_class=tokenizer_class,
            notes=plan.notes + notes + ([] if verify else ["Logits were not compared with the source's."]),
            parity=parity,
        )
        (folder / "README.md").write_text(export_card(report, record, plan.checkpoint.folder), encoding="utf-8")
    return report


def plan_export(checkpoint: Checkpoint, target: Target, dtype: str | torch.dtype | None) -> ExportPlan:
    """Decides what is written; ValueError where the target does not fit the model."""
    config = read_config(checkpoint)
    require_served_cell(config)
    source_tensors = check_tensors(checkpoint, config)
    config = without_zero_biases(checkpoint, config, target)
    if missing := target.missing(features(config)):
        name, reason = next(iter(missing.items()))
        raise ValueError(f"Target {target.name} cannot represent this model's {name}: {reason}.")
    notes = check_gates_are_zero(checkpoint, config) if target.gate is None else []
    dtype, dtype_notes = choose_dtype(checkpoint, dtype)
    if dtype == torch.float16 and target.neutralises(config):
        raise ValueError(
            f"Target {target.name} scales {', '.join(target.neutralises(config))} of this model by 2^-30, which "
            "float16 cannot hold: use dtype='bfloat16' or 'float32'."
        )
    if dtype == torch.bfloat16 and target.neutralises(config):
        config.rms_norm_eps = storable_eps(config.rms_norm_eps, target.zero_centred)
        notes.append(f"rms_norm_eps is {config.rms_norm_eps:.6g}, so that bfloat16 holds the neutral gains exactly.")
    kept = expected_tensors(config, dtype)
    tensors = {
        name: Recipe(shape, partial(read_rounded, checkpoint, name, dtype))
        for name, shape in source_tensors.items()
        if name in kept
    }
    recipes = Rewriting(config, target, dtype).rewrite(tensors)
    notes += dtype_notes + reader_notes(checkpoint, config, target)
    return ExportPlan(checkpoint, config, target, dtype, recipes, notes)


def read_config(checkpoint: Checkpoint) -> GatedLlamaConfig:
    """The model's configuration; ValueError for another architecture or for quantised weights."""
    raw = checkpoint.raw_config
    if raw.get("model_type") != GatedLlamaConfig.model_type:
        raise ValueError(
            f"{checkpoint.folder} is of type {raw.get('model_type')!r}: exports start from a gated_llama checkpoint. "
            "Make one with `gated-llama convert SOURCE OUT`."
        )
    if raw.get("quantization_config"):
        raise ValueError(f"{checkpoint.folder} is quantised: export the unquantised model and quantise the result.")
    try:
        return GatedLlamaConfig.from_dict(copy.deepcopy(raw))
    except StrictDataclassError as error:
        raise ValueError(f"{checkpoint.folder}/config.json: {one_line(error.__cause__ or error)}") from error


def check_tensors(checkpoint: Checkpoint, config: GatedLlamaConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's tensors; ValueError unless the files hold exactly what its config calls for."""
    expected = {name: tuple(tensor.shape) for name, tensor in expected_tensors(config, torch.float32).items()}
    found = {name: info.shape for name, info in checkpoint.reader.tensors.items()}
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            raise ValueError(
                f"{checkpoint.folder}: the files hold tensor {name!r} as {found.get(name)}, and config.json calls for "
                f"{expected.get(name)}."
            )
    return expected


def without_zero_biases(checkpoint: Checkpoint, config: GatedLlamaConfig, target: Target) -> GatedLlamaConfig:
    """The config without the biases that the target lacks and that are zero in every layer."""
    config = copy.deepcopy(config)
    for feature in target.missing(features(config)):
        field, suffixes = BIASES.get(feature, (None, ()))
        names = [name for name in checkpoint.reader.tensors if name.endswith(suffixes)]
        if field and not any(checkpoint.reader.read(name).any() for name in names):
            setattr(config, field, False)
    return config


def check_gates_are_zero(checkpoint: Checkpoint, config: GatedLlamaConfig) -> list[str]:
    """Notes on what un-gating restores; ValueError names the first gate tensor that is not zero."""
    if config.gate_position is None:
        return []
    for name in checkpoint.reader.tensors:
        if ".self_attn.g_proj." in name and checkpoint.reader.read(name).any():
            raise ValueError(
                f"{name} is not zero, so this gate is not constant and no model without a gate computes the same. "
                "Use a target with a gate."
            )
    record = config.gate_retrofit or {}
    if record.get("policy") == "identity" and record.get("fold") == {"o_proj.weight": 2.0}:
        origin = record.get("source_model_type", "unknown")
        return [f"The fold of the conversion is undone: o_proj is that of the source (type {origin}), bit for bit."]
    return ["The model carries no record of an identity conversion; o_proj was halved, as its zero gates demand."]


def reader_notes(checkpoint: Checkpoint, config: GatedLlamaConfig, target: Target) -> list[str]:
    """What readers of this target do not get right with this model."""
    names = features(config)
    notes = [
        f"{service.engine} does not serve this export ({feature}): {service.lacks[feature]}."
        for service in target.services
        for feature in names
        if feature in service.lacks
    ]
    if target.small_gains and config.qk_norm:
        norms = [name for name in checkpoint.reader.tensors if name.endswith(("q_norm.weight", "k_norm.weight"))]
        large = [name for name in norms if checkpoint.reader.read(name).float().mean() >= 1.5]
        if large:
            notes.append(
                f"MLX-LM misreads {len(large)} norms, the first {large[0]}: it takes stored gains with a mean of 0.5 "
                "or more for plain ones, and these have one. Do not serve this export with it."
            )
    return notes


def write_config(plan: ExportPlan, folder: Path):
    """config.json, field by field as the target's readers want it."""
    config: dict[str, Any] = {
        "architectures": [plan.target.architecture],
        "model_type": plan.target.model_type,
        **plan.target.config(plan.config),
        "torch_dtype" if plan.target.name == "paper" else "dtype": str(plan.dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_rounded(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> torch.Tensor:
    """
    The tensor rounded to `dtype`, in float32.

    Rounding comes before any rewriting, so that the export is the source in that dtype and not another rounding of it.

    Raises: ValueError for values that are not finite, before or after.
    """
    tensor = checkpoint.reader.read(name)
    if not is_finite(tensor):
        raise ValueError(f"Tensor {name!r} of the source holds values that are not finite (nan or inf).")
    return checked(name, tensor.to(dtype)).float()


def checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if its dtype holds it; ValueError otherwise."""
    if not is_finite(tensor):
        raise ValueError(f"Tensor {name!r} passes the largest {tensor.dtype}: use dtype='bfloat16' or 'float32'.")
    return tensor


@dataclass
class Stream:
    """Builds the tensors of a plan one by one and reports progress."""

    plan: ExportPlan
    progress: Callable[[int, int, str], None] | None
    done: int = 0

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        """The tensor in its dtype, in one part."""
        recipe = self.plan.recipes[name]
        tensor = checked(name, recipe.build().to(self.plan.dtype)).contiguous()
        yield tensor
        self.done += tensor.nbytes
        if self.progress is not None:
            self.progress(self.done, self.plan.nbytes, name)


def prove(plan: ExportPlan, folder: Path) -> Parity:
    """Compares the written folder with the source; ValueError when they do not compute the same."""
    parity = compare(Loadable(str(plan.checkpoint.folder), plan.checkpoint), folder, plan.target, plan.dtype)
    if not parity.passes:
        raise ValueError(
            f"The export as {plan.target.name} does not compute what its source computes: logits differ by "
            f"{parity.usual_difference:.3g} (at the worst token by {parity.max_abs_difference:.3g}) where "
            f"{parity.tolerance:.3g} is allowed in {parity.dtype}, with logits up to {parity.largest_logit:.3g}. "
            "Nothing was written; please report this."
        )
    return parity
