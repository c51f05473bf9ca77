"""Adapters: LoRA beside fully trained gates, and gates alone that go on the checkpoint they were trained from."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ..configuration_gated import GatedLlamaConfig
from ..convert.checkpoint import GATE_TENSOR
from ..convert.output_folder import building, check_output
from ..convert.tensor_files import check_finite, one_line, read_json, write_json
from .adapter_base import (
    CARRIED_FIELDS,
    check_base,
    check_fields,
    check_start,
    describe,
    fields_of,
    open_weights,
    require_gated_llama,
)


if TYPE_CHECKING:
    from peft import PeftConfig


RECORD_FILE = "gate_adapter.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PEFT_FILE = "adapter_config.json"
FORMAT_VERSION = 1

# How a projection is called -> its name in a layer. A bare "gate_proj" could be meant for the gate of attention.
ATTENTION = {name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
MLP = {"mlp.gate_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj", "down_proj": "mlp.down_proj"}
PROJECTIONS = ATTENTION | MLP

BIAS_FIELDS = {"qkv_bias": {"q_proj", "k_proj", "v_proj"}, "o_bias": {"o_proj"}, "mlp_bias": set(MLP)}

NOT_FOR_PEFT = {
    "constant": "Its gates are bare parameters (g_param), and PEFT adapts modules: train them with all else frozen, "
    "then take them out with GateAdapter.extract.",
    "states": "Its gates have no parameters.",
}


def gate_adapter_config(
    model: nn.Module | GatedLlamaConfig,
    projections: Iterable[str] = tuple(ATTENTION),
    *,
    biases: bool = False,
    **options,
) -> "PeftConfig":
    """
    PEFT configuration that trains the gates of `model` wholly, and LoRA on chosen projections beside them.

    The gates travel in the adapter as copies of `g_proj` (`modules_to_save`), so they move at full rank. Without
    projections nothing else is trained: the gates are then copies under PEFT's `LN_TUNING`, which trains, merges and
    unmerges copies of whatever modules it is given, bit for bit. Copies have the dtype of the base: load it in float32
    where the learning rate is too small for bfloat16.

    Args:
        model: a gated model or its config.
        projections: of `q_proj`, `k_proj`, `v_proj`, `o_proj`, `up_proj`, `down_proj` and `mlp.gate_proj`.
        biases: train the biases that the projections have, wholly as well (PEFT's `bias="lora_only"`: they live in the
            base, so `disable_adapter()` does not take them back).
        options: more fields of `peft.LoraConfig`, such as `r`, `lora_alpha`, `layers_to_transform`, `modules_to_save`;
            `task_type` is `"CAUSAL_LM"` unless given.

    Raises:
        ValueError: the model has no `g_proj`, a projection is unknown, or `biases` finds none.
        ImportError: PEFT is not installed.
    """
    try:
        from peft import LNTuningConfig, LoraConfig
    except ImportError as error:
        raise ImportError("Adapters need PEFT: pip install 'gated-llama[peft]'") from error
    config = require_gated_llama(getattr(model, "config", model))
    if not config.has_gate_projection:
        reason = NOT_FOR_PEFT[config.gate_input] if config.gate_position else "It is not gated."
        raise ValueError(f"This model has no g_proj to train. {reason}")
    names = _checked([projections] if isinstance(projections, str) else list(projections))
    options = {"task_type": "CAUSAL_LM", **options}
    if biases and not any(getattr(config, field) and owners & set(names) for field, owners in BIAS_FIELDS.items()):
        switches = ", ".join(f"{field}={getattr(config, field)}" for field in BIAS_FIELDS)
        raise ValueError(f"biases=True, but none of the projections {names} has a bias in this model ({switches}).")
    if not names:
        foreign = options.keys() - {field.name for field in fields(LNTuningConfig)}
        if foreign:
            raise ValueError(f"{', '.join(sorted(foreign))}: for LoRA, and without projections there is none.")
        return LNTuningConfig(target_modules=["g_proj"], **options)
    others = options.pop("modules_to_save", None) or ()
    whole = ["g_proj", *([others] if isinstance(others, str) else others)]
    options.setdefault("bias", "lora_only" if biases else "none")
    targets = [PROJECTIONS[name] for name in names]
    return LoraConfig(target_modules=targets, modules_to_save=list(dict.fromkeys(whole)), **options)


def _checked(projections: list[str]) -> list[str]:
    for name in projections:
        if name == "gate_proj":
            raise ValueError("'gate_proj' is the MLP's: say 'mlp.gate_proj' for it. The gate, g_proj, always trains.")
        if name == "g_proj":
            raise ValueError("'g_proj' is trained wholly as it is: leave it out of the projections.")
        if name not in PROJECTIONS:
            raise ValueError(f"Projection {name!r} is unknown; choose from {', '.join(PROJECTIONS)}.")
    return projections


@dataclass(frozen=True)
class GateAdapter:
    """
    What training, or a transplant, made of the gates of an identity retrofit, without the model.

    At strength s, each parameter theta that the adapter holds is `(1 - s) * theta_base + s * theta_trained`; a bias
    that the base lacks counts as 0, and a scaled column has the factor `1 - s + s * c`. At 0 the model is the base, at
    1 the trained one, both to the bit. Where the base's gates are zero, the logits of a gate are s times what the
    trained weights make of its input: a folded sigmoid weighs with `2 * sigmoid(s * (x W_g + b))`, which is 1 at
    s = 0. Neither these scores nor the model's output are linear in s.

    Args:
        tensors: name in the model -> value at strength 1: every gate tensor, vectors (biases, norms) that differ, and
            matrices that differ where they were asked for.
        column_scales: name of a matrix -> factor c of each of its columns [in_features], at strength 1.
        config: the config fields that differ, at strength 1.
        base: what the base is: its name and architecture, and what `adapter_base.describe` says of it.

    Raises ValueError for a tensor with values that are not finite.
    """

    tensors: dict[str, torch.Tensor]
    column_scales: dict[str, torch.Tensor]
    config: dict[str, Any]
    base: dict[str, Any]

    def __post_init__(self):
        for name, tensor in (*self.tensors.items(), *self.column_scales.items()):
            check_finite(name, tensor, "the adapter")

    @classmethod
    def extract(
        cls,
        trained: nn.Module | str | Path,
        base: nn.Module | str | Path,
        *,
        matrices: bool = False,
        base_name: str | None = None,
    ) -> "GateAdapter":
        """
        What `trained` has more than `base`, the folder that `convert --policy identity` wrote and training started
        from. Folders are read one tensor at a time.

        Args:
            trained, base: a model or its folder, in different dtypes only where one holds the other's values.
            matrices: also hold, whole, other matrices that differ; a transplant refits o_proj and down_proj. The
                adapter is then as large as they are.
            base_name: the name under which others find the base, for instance its Hub id.

        Raises:
            ValueError: the base is not an identity retrofit, the two are different decoders, matrices differ that
                the adapter would lose, or the trained model holds nan or infinities.
        """
        if hasattr(trained, "peft_config"):
            raise ValueError("The trained model carries an adapter of PEFT: merge_and_unload() it first.")
        before, after = open_weights(base), open_weights(trained)
        check_start(before)
        check_fields(before.config, fields_of(after.config), "The trained model has")
        tensors, scales = {}, {}
        lost = sorted(set(before.shapes) - set(after.shapes))
        for name, shape in after.shapes.items():
            value = after.read(name)
            check_finite(name, value, "the trained model")
            added_bias = name not in before.shapes and name.endswith(".bias")
            start = before.read(name) if before.shapes.get(name) == shape else None
            if GATE_TENSOR.search(name) or added_bias:
                tensors[name] = value.detach().cpu().clone()
            elif start is None:
                lost.append(name)
            elif _same(start, value):
                continue
            elif value.ndim == 2 and (scale := _column_scale(start, value)) is not None:
                scales[name] = scale
            elif value.ndim == 1 or matrices:
                tensors[name] = value.detach().cpu().clone()
            else:
                lost.append(name)
        if lost:
            raise ValueError(
                f"The trained model differs from its base {before.name} in {len(lost)} tensors that are neither gates "
                f"nor vectors, the first {lost[0]!r}, which an adapter of gates would lose: pass matrices=True, keep "
                "the whole model, or train with gate_adapter_config."
            )
        changes = {field: getattr(after.config, field) for field in CARRIED_FIELDS}
        changes = {field: value for field, value in changes.items() if value != getattr(before.config, field)}
        # Always there, so that a model that carries a part of the adapter can say so.
        changes["gate_retrofit"] = after.config.gate_retrofit
        named = {"name": base_name or before.name, "architecture": before.architecture}
        return cls(tensors, scales, changes, named | describe(before))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (*self.tensors.values(), *self.column_scales.values()))

    @property
    def fits_peft(self) -> bool:
        """
        Whether the saved folder is also an adapter for `PeftModel.from_pretrained`: it is, when it replaces `g_proj`
        only and in a base whose `g_proj` has the same tensors.
        """
        projected = all(".self_attn.g_proj." in name for name in self.tensors)
        return projected and not self.column_scales and set(self.config) == {"gate_retrofit"}

    def save(self, folder: str | Path) -> Path:
        """
        Writes the adapter to a folder that is empty or does not exist: weights, a record, and where `fits_peft` the
        configuration by which PEFT loads the same weights. Returns the folder.
        """
        output = check_output(Path(folder), self.base["name"])
        record = {
            "format_version": FORMAT_VERSION,
            "base": self.base,
            "config": self.config,
            "tensors": sorted(self.tensors),
            "column_scales": sorted(self.column_scales),
        }
        weights = {_key(name): tensor for name, tensor in self.tensors.items()}
        weights |= {_scale_key(name): tensor for name, tensor in self.column_scales.items()}
        with building(output, self.nbytes) as target:
            save_file(weights, target / WEIGHTS_FILE, metadata={"format": "pt"})
            write_json(target / RECORD_FILE, record)
            if self.fits_peft:
                write_json(target / PEFT_FILE, _peft_fields(self.base))
        return output

    @classmethod
    def load(cls, folder: str | Path) -> "GateAdapter":
        """The adapter that `save` wrote; ValueError when the folder holds none, or a damaged one."""
        folder = Path(folder)
        path = folder / RECORD_FILE
        if not path.is_file():
            peft = (folder / PEFT_FILE).is_file()
            advice = "it is PEFT's, load it with PeftModel.from_pretrained" if peft else "it holds no gate adapter"
            raise ValueError(f"{folder} has no {RECORD_FILE}: {advice}.")
        record = read_json(path)
        if (version := record.get("format_version")) != FORMAT_VERSION:
            raise ValueError(f"{path} has format_version {version!r}; this code reads {FORMAT_VERSION}.")
        try:
            weights = load_file(folder / WEIGHTS_FILE)
            tensors = {name: weights[_key(name)] for name in record["tensors"]}
            scales = {name: weights[_scale_key(name)] for name in record["column_scales"]}
            _check_record(record, weights, tensors, scales)
            return cls(tensors, scales, record["config"], record["base"])
        except (SafetensorError, KeyError, TypeError, FileNotFoundError) as error:
            raise ValueError(f"The gate adapter in {folder} is not whole ({one_line(error)}): fetch it.") from error

    def merge(self, model: nn.Module, strength: float = 1.0) -> "MergedGates":
        """
        Writes the adapter into a model loaded from the base's folder, in place; the result turns it up, down and out.

        What `model.save_pretrained` writes then is an ordinary gated checkpoint of that strength. Tokenizers are not
        the adapter's: one that a transplant keeps from adding BOS comes from the transplant's folder.

        Raises:
            ValueError: the strength lies outside 0 to 1, or `model` is not the base: other fields or shapes, another
                fold or policy, other weights, gates that have moved, or tensors that are quantised or elsewhere.
        """
        _check_strength(strength)
        if hasattr(model, "peft_config"):
            raise ValueError("The model carries an adapter of PEFT: merge_and_unload() it, or load the base again.")
        weights = open_weights(model)
        check_fields(weights.config, self.base["config"], "The adapter's base has")
        self._check_tensors(model, weights.shapes)
        check_base(weights, self.base)
        return MergedGates(self, model, strength)

    def _check_tensors(self, model: nn.Module, shapes: dict[str, torch.Size]) -> None:
        for name in (*self.tensors, *self.column_scales, *self.base["sample"]):
            if name not in shapes:
                if name in self.tensors and f"{name.removesuffix('.bias')}.weight" in shapes:
                    continue  # a bias that the base lacks
                raise ValueError(
                    f"This {type(model).__name__} has no tensor {name!r}, which the adapter needs: it is another "
                    "decoder, or quantised."
                )
            if name in self.tensors and shapes[name] != self.tensors[name].shape:
                sizes = f"{tuple(self.tensors[name].shape)} in the adapter, {tuple(shapes[name])} in the model"
                raise ValueError(f"{name} is {sizes}: attach it to the folder that it was trained from.")
            tensor = model.get_parameter(name).data
            if type(tensor) is not torch.Tensor or tensor.is_meta or not tensor.is_floating_point():
                raise ValueError(
                    f"{name} is not a plain tensor of floats in memory: merge before the model is quantised, sharded "
                    "or offloaded."
                )


class MergedGates:
    """
    A gate adapter in a model: `strength` reads and sets how much of it, `unmerge()` takes it out again.

    The base's tensors are kept and put back as they were, so unmerging is exact; training in between is forgotten.
    """

    def __init__(self, adapter: GateAdapter, model: nn.Module, strength: float):
        self.adapter = adapter
        self.model = model
        self._base = {name: _tensor(model, name) for name in (*adapter.tensors, *adapter.column_scales)}
        self._config = {field: getattr(model.config, field) for field in adapter.config}
        self._strength = 0.0
        self.strength = strength

    @property
    def strength(self) -> float:
        """From 0, the base, to 1, the trained gates."""
        return self._strength

    @strength.setter
    def strength(self, value: float) -> None:
        _check_strength(value)
        if value == 0:
            self.unmerge()
            return
        for name, tensor in self._at(value).items():
            _put(self.model, name, tensor)
        for field, setting in self.adapter.config.items():
            setattr(self.model.config, field, setting)
        if value < 1:
            self.model.config.gate_retrofit = self._partial_record(value)
        self._strength = float(value)

    def _at(self, strength: float) -> dict[str, torch.Tensor]:
        """The parameters at a strength; ValueError for what the dtype of the base cannot hold."""
        tensors = {}
        for name, end in self.adapter.tensors.items():
            start = self._base[name]
            tensors[name] = _between(self._absent_bias(name) if start is None else start, end, strength)
        for name, scale in self.adapter.column_scales.items():
            start = self._base[name]
            tensors[name] = _scaled(start, _between(torch.ones_like(scale), scale, strength), start.dtype)
        for name, tensor in tensors.items():
            check_finite(name, tensor, f"the merged model in {tensor.dtype}")
        return tensors

    def unmerge(self) -> None:
        """Puts the base back, bit for bit; the same as strength 0."""
        for name, tensor in self._base.items():  # the copy stays, whatever is trained next
            _put(self.model, name, None if tensor is None else tensor.clone())
        for field, setting in self._config.items():
            setattr(self.model.config, field, setting)
        self._strength = 0.0

    def _absent_bias(self, name: str) -> torch.Tensor:
        weight = self.model.get_parameter(f"{name.removesuffix('.bias')}.weight")
        return torch.zeros(len(weight), dtype=weight.dtype, device=weight.device)

    def _partial_record(self, strength: float) -> dict[str, Any]:
        record = {**(self.adapter.config["gate_retrofit"] or {}), "strength": float(strength)}
        # On the way from one fold to another there is none that could be undone.
        if record.get("fold") != (self._config["gate_retrofit"] or {}).get("fold"):
            record.pop("identity_heads", None)
            record["fold"] = None
        return record


def _check_record(record: dict, weights: dict, tensors: dict, scales: dict) -> None:
    """KeyError or TypeError for a record that `save` did not write, or that belongs to other weights."""
    needed = {"base": ("name", "architecture", "config", "start", "sample"), "config": ("gate_retrofit",)}
    for name, keys in needed.items():
        fields = record[name] if isinstance(record[name], dict) else {}
        if absent := [key for key in keys if key not in fields]:
            raise TypeError(f"{RECORD_FILE}: {name} lacks {', '.join(absent)}")
    named = len(tensors) + len(scales)
    if len(weights) != named:
        raise TypeError(f"{WEIGHTS_FILE} holds {len(weights)} tensors, {RECORD_FILE} names {named}")
    if broken := [name for name, tensor in weights.items() if not tensor.is_floating_point()]:
        raise TypeError(f"{broken[0]} holds no numbers")


def _check_strength(value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= 1:
        raise ValueError(f"strength={value!r} is not a number from 0 (the base) to 1 (the trained gates).")


def _tensor(model: nn.Module, name: str) -> torch.Tensor | None:
    owner, _, leaf = name.rpartition(".")
    parameter = getattr(model.get_submodule(owner), leaf)
    return None if parameter is None else parameter.data


def _put(model: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    """Sets a parameter's tensor; the parameter stays, since others may hold it, but a bias can come and go."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if tensor is None:
        setattr(module, leaf, None)
    elif (parameter := getattr(module, leaf)) is None:
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=module.weight.requires_grad))
    else:
        parameter.data = tensor


def _between(start: torch.Tensor, end: torch.Tensor, share: float) -> torch.Tensor:
    """(1 - share) start + share end, exact at both ends, in the dtype and on the device of `start`."""
    wide = torch.promote_types(start.dtype, torch.float32)
    return torch.lerp(start.to(wide), end.to(start.device, wide), float(share)).to(start.dtype)


def _scaled(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) * scale.to(weight.device, wide)).to(dtype)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    wide = torch.promote_types(a.dtype, b.dtype)
    return torch.equal(a.to(wide), b.to(a.device, wide))


def _column_scale(start: torch.Tensor, end: torch.Tensor) -> torch.Tensor | None:
    """Factors [columns] that make `end` of `start` to the bit (a fold undone, a unit silenced), if there are such."""
    start, end = start.detach(), end.detach().to(start.device)
    largest = start.abs().argmax(0, keepdim=True)
    ratio = end.gather(0, largest).double() / start.gather(0, largest).double()
    scale = ratio[0].nan_to_num(nan=1.0).float()
    return scale.cpu() if torch.equal(_scaled(start, scale, end.dtype), end) else None


def _key(name: str) -> str:
    """Name of a tensor in the file; for g_proj, the one that PEFT's LN_TUNING gives it."""
    return "base_model.model." + name.replace(".self_attn.g_proj.", ".self_attn.g_proj.ln_tuning_layers.")


def _scale_key(name: str) -> str:
    return f"{_key(name)}.column_scale"


def _peft_fields(base: dict[str, Any]) -> dict[str, Any]:
    return {
        "peft_type": "LN_TUNING",
        "task_type": "CAUSAL_LM" if base["architecture"].endswith("ForCausalLM") else None,
        "base_model_name_or_path": base["name"],
        "target_modules": ["g_proj"],
        "inference_mode": True,
    }
