"""Export of a gated checkpoint to an architecture that engines serve: tensor by tensor, proven before it appears."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError

from ..configuration_gated import GatedLlamaConfig
from .checkpoint import choose_dtype, expected_tensors
from .export_card import export_card
from .gguf_proof import prove_gguf
from .gguf_target import (
    GGUF_FILE,
    INSIDE,
    building_file,
    check_file,
    gguf_metadata,
    gguf_recipes,
    quantisation_note,
    require_package,
    stays_float32,
    write_gguf,
)
from .gguf_tokenizer import tokenizer_metadata
from .loading import Loadable
from .opening import Checkpoint, open_checkpoint
from .output_folder import building, check_output
from .parity import Parity, compare
from .rewriting import Recipe, Rewriting, storable_eps
from .targets import Target, features, get_targets, require_served_cell
from .tensor_files import check_finite, is_finite, one_line, write_json, write_shards
from .text_ends import gguf_ends, write_token_ids
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
        source, output: the model and the folder or file that was written.
        target, model_type, dtype: what it was written as.
        tensors_written, bytes_written, shards: size of the result.
        served_by: engines that serve it.
        rewritten: what was rewritten to represent the model, one sentence each.
        never_quantise: names of linear maps that quantisation destroys.
        tokenizer_class: class pinned in tokenizer_config.json, or kind of tokenizer of a GGUF file; `None` without.
        notes: what deserves attention, one sentence each.
        parity: the comparison of logits with the source; `None` when it was not made.
        proof: what was proven besides, in words.
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
    proof: str


@dataclass(frozen=True)
class ExportPlan:
    """
    Everything that is decided before a byte is written.

    `config` is the model's without biases that are zero, `metadata` what a GGUF file holds beside tensors.
    """

    checkpoint: Checkpoint
    config: GatedLlamaConfig
    target: Target
    dtype: torch.dtype
    recipes: dict[str, Recipe]
    notes: list[str]
    metadata: Mapping[str, Any] | None = None

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Shapes and dtypes of what is written, as meta tensors."""
        return {
            name: torch.empty(
                recipe.shape, dtype=stored_dtype(self.target, name, recipe.shape, self.dtype), device="meta"
            )
            for name, recipe in self.recipes.items()
        }

    @cached_property
    def source(self) -> Loadable:
        return Loadable(str(self.checkpoint.folder), self.checkpoint)

    @property
    def never_quantise(self) -> list[str]:
        """Names of linear maps, as the export has them, that quantisation destroys."""
        names = self.target.neutralises(self.config)
        return [INSIDE[name] for name in names] if self.target.gguf else names

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
        output: the folder to write; it must not exist, or be empty. For target gguf also the file to write, named
            `*.gguf`; it must not exist.
        target: one of `targets.TARGET_NAMES`.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`; `None` keeps the source's.
        max_shard_size: largest file, in bytes or such as `"5GB"`; a GGUF file is always one.
        verify: compare logits before the folder appears. That holds one whole model in float32 in memory at a time:
            switch it off for models that do not fit, and compare a smaller one of the same configuration instead.
        progress: called as `progress(done_bytes, total_bytes, tensor_name)` after each tensor.

    Raises:
        ValueError: the model has what the target cannot represent, or the export does not compute the same.
        OSError: reading or writing failed. In all cases, and when interrupted, nothing is left at `output`.
    """
    candidates = get_targets(target)
    gguf = candidates[0].gguf
    if gguf:
        require_package()
    single = gguf and Path(output).suffix == ".gguf"
    output = (check_file if single else check_output)(Path(output), model)
    plan = plan_export(open_checkpoint(model), candidates, dtype)
    with (building_file if single else building)(output, plan.nbytes) as folder:
        parts = Stream(plan, progress).parts
        written = write_file(plan, folder, parts) if gguf else write_folder(plan, folder, max_shard_size, parts)
        parity, proof = (prove_file(plan, folder) if gguf else (prove(plan, folder), "")) if verify else (None, "")
        names = features(plan.config)
        report = ExportReport(
            source=str(model),
            output=output,
            target=plan.target.name,
            model_type=plan.target.model_type,
            dtype=str(plan.dtype).removeprefix("torch."),
            tensors_written=len(plan.recipes),
            bytes_written=plan.nbytes,
            shards=written.files,
            served_by=[str(service) for service in plan.target.services_for(names)],
            rewritten=plan.target.tricks_for(names),
            never_quantise=plan.never_quantise,
            tokenizer_class=written.tokenizer,
            notes=plan.notes + written.notes + ([] if verify else ["Logits were not compared with the source's."]),
            parity=parity,
            proof=proof,
        )
        (folder / "README.md").write_text(export_card(report, plan.target, plan.checkpoint.folder), encoding="utf-8")
    return report


class Written(NamedTuple):
    """What writing adds to a report: number of weight files, tokenizer and notes."""

    files: int
    tokenizer: str | None
    notes: list[str]


def write_folder(plan: ExportPlan, folder: Path, max_shard_size: int | str, parts) -> Written:
    write_config(plan, folder)
    tokenizer_class, notes = carry_files(plan.checkpoint, folder)
    write_token_ids(plan.config, folder)
    return Written(len(write_shards(folder, plan.tensors, max_shard_size, parts)), tokenizer_class, notes)


def write_file(plan: ExportPlan, folder: Path, parts) -> Written:
    write_gguf(folder / GGUF_FILE, plan.target.model_type, plan.metadata, plan.tensors, parts)
    tokenizer = " ".join(plan.metadata[f"tokenizer.ggml.{key}"] for key in ("model", "pre"))
    return Written(1, tokenizer, [quantisation_note(plan.never_quantise)])


def plan_export(checkpoint: Checkpoint, candidates: list[Target], dtype: str | torch.dtype | None) -> ExportPlan:
    """Decides what is written, as the first target that fits the model; ValueError where none does."""
    config = read_config(checkpoint)
    require_served_cell(config)
    source_tensors = check_tensors(checkpoint, config)
    target, config = fitting_target(checkpoint, config, candidates)
    notes = check_gates_are_zero(checkpoint, config) if target.gate is None else []
    dtype, dtype_notes = choose_dtype(checkpoint, dtype)
    if dtype == torch.float16 and target.neutralises(config):
        raise ValueError(
            f"Target {target.name} scales {', '.join(target.neutralises(config))} of this model by 2^-30, which "
            "float16 cannot hold: use dtype='bfloat16' or 'float32'."
        )
    if dtype == torch.bfloat16 and target.neutralises(config) and not target.gguf:
        config.rms_norm_eps = storable_eps(config.rms_norm_eps, target.zero_centred)
        notes.append(f"rms_norm_eps is {config.rms_norm_eps:.6g}, so that bfloat16 holds the neutral gains exactly.")
    kept = expected_tensors(config, dtype)
    rounding = Loadable(str(checkpoint.folder), checkpoint).rounding(dtype)
    tensors = {
        name: Recipe(shape, partial(read_rounded, checkpoint, name, stored_dtype(target, name, shape, rounding)))
        for name, shape in source_tensors.items()
        if name in kept
    }
    recipes = Rewriting(config, target, dtype).rewrite(tensors)
    notes += dtype_notes + reader_notes(checkpoint, config, target)
    plan = ExportPlan(checkpoint, config, target, dtype, recipes, notes)
    return with_metadata(plan) if target.gguf else plan


def with_metadata(plan: ExportPlan) -> ExportPlan:
    """The plan of a GGUF file: its names, metadata and tokenizer; ValueError where llama.cpp has no such tokenizer."""
    tokenizer, notes = tokenizer_metadata(plan.source, plan.config.vocab_size)
    ends, end_notes = gguf_ends(plan.checkpoint.folder, plan.config, tokenizer)
    name = plan.checkpoint.hub_id or plan.checkpoint.folder.resolve().name
    return replace(
        plan,
        recipes=gguf_recipes(plan.recipes, plan.config, plan.target),
        metadata=gguf_metadata(plan.config, plan.target, plan.dtype, name, tokenizer | ends),
        notes=plan.notes + notes + end_notes,
    )


def fitting_target(
    checkpoint: Checkpoint, config: GatedLlamaConfig, candidates: list[Target]
) -> tuple[Target, GatedLlamaConfig]:
    """The first target that represents the model, and the model's config for it; ValueError says why none does."""
    reasons = []
    for target in candidates:
        trimmed = without_zero_biases(checkpoint, config, target)
        missing = target.missing(features(trimmed))
        if not missing:
            return target, trimmed
        name, reason = next(iter(missing.items()))
        where = f" as {target.model_type}" if len(candidates) > 1 else ""
        reasons.append(f"{name}{where}: {reason}")
    raise ValueError(f"Target {candidates[0].name} cannot represent this model's {'; nor its '.join(reasons)}.")


def stored_dtype(target: Target, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.dtype:
    """The dtype of one tensor of an export in `dtype`."""
    return torch.float32 if target.gguf and stays_float32(name, shape) else dtype


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
        return [f"The fold of the conversion (from type {origin}) is undone: o_proj is halved, bit for bit."]
    return ["The model carries no record of an identity conversion; o_proj was halved, as its zero gates demand."]


def reader_notes(checkpoint: Checkpoint, config: GatedLlamaConfig, target: Target) -> list[str]:
    """What readers of this target do not get right with this model."""
    names = features(config)
    notes = [
        f"{service.engine} does not serve this export ({feature}): {reason}."
        for service in target.services
        for feature, reason in service.missing(names).items()
    ]
    if (
        "o" not in target.biases
        and target.has_bias(config)
        and any(s.engine == "Transformers" for s in target.services)
    ):
        notes.append(
            "Transformers builds o_proj with a bias here, reports it as MISSING and fills it with zeros. This is "
            "expected: the model has none, and engines refuse a file that holds one."
        )
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
    write_json(folder / "config.json", config)


def read_rounded(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> torch.Tensor:
    """
    The tensor rounded to `dtype`, in float32.

    Rounding comes before any rewriting, so that the export is the source in that dtype and not another rounding of it.

    Raises: ValueError for values that are not finite, before or after.
    """
    tensor = checkpoint.reader.read(name)
    check_finite(name, tensor, "the source")
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
        tensor = checked(name, recipe.build().to(self.plan.tensors[name].dtype)).contiguous()
        yield tensor
        self.done += tensor.nbytes
        if self.progress is not None:
            self.progress(self.done, self.plan.nbytes, name)


def prove(plan: ExportPlan, folder: Path) -> Parity:
    """Compares the written folder with the source; ValueError when they do not compute the same."""
    return require_parity(plan, compare(plan.source, folder, plan.target, plan.dtype))


def prove_file(plan: ExportPlan, folder: Path) -> tuple[Parity | None, str]:
    """As `prove`, for a GGUF file; also what was proven, in words."""
    parity, proof = prove_gguf(plan.source, plan.config, plan.target, plan.dtype, folder / GGUF_FILE)
    return parity and require_parity(plan, parity), proof


def require_parity(plan: ExportPlan, parity: Parity) -> Parity:
    if not parity.passes:
        raise ValueError(
            f"The export as {plan.target.name} does not compute what its source computes: logits differ by "
            f"{parity.usual_difference:.3g} (at the worst token by {parity.max_abs_difference:.3g}) where "
            f"{parity.tolerance:.3g} is allowed in {parity.dtype}, with logits up to {parity.largest_logit:.3g}. "
            "Nothing was written; please report this."
        )
    return parity
