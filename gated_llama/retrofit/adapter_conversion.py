"""LoRA adapters of an ungated source, made to fit its gated conversion."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..convert.config_file import library_config
from ..convert.opening import Checkpoint, open_checkpoint
from ..convert.output_folder import building, check_output
from ..convert.policies import FOLD_SITES
from ..convert.tensor_files import check_finite, one_line, read_json
from ..hub import read_card, write_card
from .adapter_base import require_gated_llama
from .adapters import PEFT_FILE, WEIGHTS_FILE


MODULE = re.compile(r"(?P<module>layers\.(?P<layer>\d+)\.self_attn\.(?P<projection>\w+))\.(?P<part>.+)$")

# Parts of an adapted projection. With W -> cW and b -> cb in the base, W + s B A becomes c (W + s B A) where B does,
# and DoRA's m (W + s B A) / |W + s B A| where m and B do. Whole copies of weight and bias are scaled as the base's.
WEIGHTS = ("lora_B.weight", "lora_magnitude_vector", "lora_magnitude_vector.weight", "weight")
BIASES = ("lora_B.bias", "bias", "base_layer.bias")
UNCHANGED = ("lora_A.weight",)

# Settings of LoRA with which the rule above holds. Others have to be left at nothing.
PLAIN = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    *("bias", "lora_bias", "use_dora", "trainable_token_indices", "ensure_weight_tying", "init_lora_weights"),
    *("fan_in_fan_out", "megatron_core", "qalora_group_size", "eva_config", "runtime_config"),
}
# Other starts take a part out of the base's weights.
STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterConversion:
    """
    What `convert_adapter` did. scaled: name in the adapter -> factor; tensors: of the adapter in all; output: folder.
    """

    scaled: dict[str, float]
    tensors: int
    output: Path


def convert_adapter(adapter: str | Path, gated: str | Path, output: str | Path) -> AdapterConversion:
    """
    Scales a LoRA adapter of an ungated model by what `convert` folded into the gated one, and writes it to `output`.

    On the gated model it then computes what it did on the source: bitwise, where the fold is a power of two, else to
    rounding. As it is, it would count with 1/c, where c is the fold: half, beside sigmoid gates.

    Args:
        adapter: folder that PEFT wrote for the source: LoRA, also with DoRA, rsLoRA, trained biases, whole modules.
        gated: Hub id or folder of the gated model, whose config says what was folded.
        output: a folder that is empty or does not exist.

    Raises:
        ValueError: no adapter of that kind, one of another model, or a gated model whose gates do not start at the
            identity, so that no adapter of the source fits it.
    """
    adapter, checkpoint = Path(adapter).expanduser(), open_checkpoint(gated)
    target = check_output(Path(output), adapter)
    fields, tensors = _open(adapter)
    _check_fields(fields, str(gated))
    folds = _folds(checkpoint)
    _check_tensors(tensors, checkpoint, str(gated))
    scaled = {name: factor for name in tensors if (factor := _factor(name, *folds)) != 1}
    for name, factor in scaled.items():
        wide = torch.promote_types(tensors[name].dtype, torch.float32)
        tensors[name] = (tensors[name].to(wide) * factor).to(tensors[name].dtype)
    check_finite(tensors, f"the converted {adapter.name}")
    fields |= {"base_model_name_or_path": str(gated), "revision": None}
    with building(target, sum(tensor.nbytes for tensor in tensors.values())) as folder:
        for path in adapter.iterdir():
            if path.is_file() and path.name not in (PEFT_FILE, WEIGHTS_FILE):
                shutil.copyfile(path, folder / path.name)
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / PEFT_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        _name_base(folder / "README.md", checkpoint.hub_id)
    return AdapterConversion(scaled, len(tensors), target)


def _open(adapter: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    if not (adapter / PEFT_FILE).is_file():
        raise ValueError(f"{adapter} has no {PEFT_FILE}: name the folder of an adapter that PEFT wrote.")
    if not (adapter / WEIGHTS_FILE).is_file():
        raise ValueError(f"{adapter} has no {WEIGHTS_FILE}: load the adapter with PEFT and save it once more.")
    try:
        tensors = load_file(adapter / WEIGHTS_FILE)
    except SafetensorError as error:
        raise ValueError(f"{adapter / WEIGHTS_FILE} cannot be read ({one_line(error)}): fetch it again.") from error
    check_finite(tensors, str(adapter))
    return read_json(adapter / PEFT_FILE), tensors


def _check_fields(fields: Mapping[str, Any], gated: str) -> None:
    """ValueError for adapters of a kind whose scaling is not known, and for those that are of the gated model."""
    if (kind := fields.get("peft_type")) != "LORA":
        raise ValueError(f"The adapter is of type {kind!r}, and only 'LORA' can be converted: merge it into its base.")
    if unknown := sorted(name for name, value in fields.items() if name not in PLAIN and value):
        raise ValueError(
            f"The adapter uses {', '.join(unknown)}, for which no conversion is known: merge it into its base."
        )
    if (start := fields.get("init_lora_weights")) not in STARTS:
        raise ValueError(
            f"The adapter has init_lora_weights={start!r}, which changes its base's weights: save it for the "
            "unchanged base with PEFT's path_initial_model_for_weight_conversion first."
        )
    if fields.get("base_model_name_or_path") == gated:
        raise ValueError(f"The adapter is one of {gated} already: it fits as it is.")


def _folds(checkpoint: Checkpoint) -> tuple[dict[str, float], set[int]]:
    """Factor of each site below `self_attn`, and the layers in which it was folded in."""
    config = require_gated_llama(library_config(checkpoint.folder))
    record = config.gate_retrofit or {}
    if (policy := record.get("policy")) != "identity" or record.get("fold") is None:
        reason = "its weights are not multiples of the source's" if policy == "transplant" else "nothing was folded"
        raise ValueError(
            f"The gates of {checkpoint.folder} come from policy {policy!r}: {reason}, and an adapter of the source "
            "has no exact counterpart. Merge the adapter into the source and convert that."
        )
    factors = {site.split(".")[0]: factor for site, factor in record["fold"].items()}
    sites = FOLD_SITES[config.gate_position] if factors else ()
    return {site: factors[site.split(".")[0]] for site in sites}, set(config.gated_layers)


def _check_tensors(tensors: Mapping[str, torch.Tensor], checkpoint: Checkpoint, gated: str) -> None:
    """ValueError unless every adapted projection is one of the model, of its size."""
    weights = checkpoint.reader.tensors
    for name, tensor in tensors.items():
        if not (match := MODULE.search(name)):
            continue
        if match["projection"] == "g_proj":
            raise ValueError(f"The adapter holds {name}: it is one of a gated model, not of an ungated source.")
        info = weights.get(f"model.{match['module']}.weight")
        if info is None:
            raise ValueError(f"The adapter holds {name}, and {gated} has no {match['module']}: it is another model's.")
        if match["part"] not in (*WEIGHTS, *BIASES, *UNCHANGED):
            raise ValueError(f"The adapter holds {name}, a kind of tensor for which no conversion is known.")
        width = info.shape[1 if match["part"] in UNCHANGED else 0]
        if width not in tensor.shape:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} and {match['module']}.weight of {gated} {tuple(info.shape)}: the "
                "adapter is another model's."
            )


def _factor(name: str, factors: Mapping[str, float], layers: set[int]) -> float:
    match = MODULE.search(name)
    if not match or int(match["layer"]) not in layers:
        return 1.0
    part = {**dict.fromkeys(WEIGHTS, "weight"), **dict.fromkeys(BIASES, "bias")}.get(match["part"])
    return factors.get(f"{match['projection']}.{part}", 1.0)


def _name_base(card: Path, hub_id: str | None) -> None:
    """The card's metadata name the base, too."""
    if not card.is_file():
        return
    content = ModelCard(read_card(card), ignore_metadata_errors=True)
    if hub_id is None and content.data.get("base_model") is None:
        return
    content.data.base_model = hub_id
    write_card(card, str(content))
