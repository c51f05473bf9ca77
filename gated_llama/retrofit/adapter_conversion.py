"""PEFT adapters of an ungated source, brought to its identity conversion, where projections are scaled."""

import contextlib
import copy
import json
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from huggingface_hub import ModelCard, snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ..configuration_gated import GatedLlamaConfig
from ..convert.checkpoint import convert_part
from ..convert.output_folder import building, check_output
from ..convert.policies import FOLD_SITES
from ..convert.tensor_files import one_line, read_json
from ..modeling_gated import GatedLlamaForCausalLM, GatedLlamaModel
from .adapter_base import Weights, moved_gate, open_weights
from .adapters import PEFT_FILE, RECORD_FILE, WEIGHTS_FILE


if TYPE_CHECKING:
    from peft import PeftConfig


# Where a factor c of a projection's weight, or of its bias, goes; None: the method works for any scale.
WEIGHT, BIAS = "weight", "bias"

# A whole copy of a projection (`modules_to_save`), or a bias that was trained in place (`bias`).
COPIES = {"weight": WEIGHT, "bias": BIAS, "base_layer.bias": BIAS}

# Method -> tensor of a projection -> what it scales with. Exactly one factor of each product takes c. DoRA divides by
# the norm of the rows of c (W + BA): the direction does not see c, and the magnitude carries it. IA3 and OFT multiply.
METHODS: dict[str, dict[str, str | None]] = {
    "LORA": {"lora_A.weight": None, "lora_B.weight": WEIGHT, "lora_B.bias": BIAS, "lora_magnitude_vector": WEIGHT},
    "ADALORA": {"lora_A": None, "lora_E": None, "lora_B": WEIGHT},
    "LOHA": {"hada_w1_a": WEIGHT, "hada_w1_b": None, "hada_w2_a": None, "hada_w2_b": None},
    "LOKR": {
        "lokr_w1": WEIGHT,
        "lokr_w1_a": WEIGHT,
        "lokr_w1_b": None,
        "lokr_w2": None,
        "lokr_w2_a": None,
        "lokr_w2_b": None,
    },
    "VERA": {"vera_lambda_b": WEIGHT, "vera_lambda_d": None},
    "IA3": {"ia3_l": None},
    "OFT": {"oft_R.weight": None},
    "LN_TUNING": {"ln_tuning_layers.weight": WEIGHT, "ln_tuning_layers.bias": BIAS},
    "TRAINABLE_TOKENS": {},
}

# Starts of LoRA that leave the base as it is; the others put a part of it into the adapter.
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")

# Settings of LoRA that change nothing in `METHODS`. Any other one must be empty.
LORA_SETTINGS = (
    *("base_model_name_or_path", "revision", "peft_type", "peft_version", "task_type", "auto_mapping"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "bias", "lora_bias"),
    *("lora_dropout", "init_lora_weights", "eva_config", "trainable_token_indices", "ensure_weight_tying"),
    *("inference_mode", "megatron_core", "qalora_group_size"),
    # AdaLoRA's, which work in training alone.
    *("target_r", "init_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step"),
)

PROJECTION = re.compile(r"(?:^|\.)layers\.(?P<layer>\d+)\.self_attn\.(?P<projection>[qkvo]_proj)\.(?P<tensor>.+)$")
IN_LAYERS = re.compile(r"(^|\.)layers\.\d+\.")
GATE = "self_attn.g_proj"

# Weights that are not the adapter's, and what describes a training run or the ungated base.
LEFT_BEHIND = re.compile(r"\..*|.*\.(safetensors|bin|pt|pth|gguf)|.*\.index\.json|trainer_state\.json|config\.json")


@dataclass(frozen=True)
class AdapterConversion:
    """
    What a conversion of an adapter did.

    Args:
        output: the folder that was written.
        method: PEFT's name of its kind, such as "LORA".
        tensors: how many the adapter has.
        scaled: name pattern (`*` for the layer) -> the factor that its tensors were multiplied with.
        exact: whether all factors are powers of two, so that the result computes the same to the bit.
    """

    output: Path
    method: str
    tensors: int
    scaled: dict[str, float]
    exact: bool


def convert_adapter(adapter: str | Path, gated: str | Path, output: str | Path) -> AdapterConversion:
    """
    Makes an adapter that was trained on the ungated source fit the identity conversion of that source.

    The conversion multiplies a projection W, in gated layers, by the inverse c of the starting score, and what an
    adapter adds to W would be weighed with the score alone: c (W + BA) = c W + (c B) A. Afterwards
    `gated + converted` computes what `source + adapter` does, bit for bit where c is a power of two (sigmoid gates),
    else to rounding.

    Args:
        adapter: a folder of PEFT, or its Hub id.
        gated: what `convert --policy identity` wrote, before any training; folder or Hub id. The result also goes on
            what was trained from there.
        output: the folder to write; it must not exist, or be empty.

    Raises:
        ValueError: the adapter's method is not in `METHODS`, it does not fit the model or was trained on a gated one,
            or `gated` is not an identity conversion at its start.
        ImportError: PEFT is not installed.
        OSError: reading, writing or fetching failed. In all cases nothing is left at `output`.
    """
    output = check_output(Path(output), adapter)
    folder = find_adapter(adapter)
    raw = read_json(folder / PEFT_FILE)
    check_method(raw, folder)
    weights = open_weights(gated)
    check_gated(weights)
    check_origin(raw, gated)
    tensors, metadata = read_tensors(folder / WEIGHTS_FILE)
    targets = check_fit(folder, weights.config, tensors)
    factors = {name: factor_of(name, raw["peft_type"], weights.config) for name in tensors}
    scaled = {name: convert_part(name, tensor, tensor.dtype, factors[name]) for name, tensor in tensors.items()}
    changes = {"base_model_name_or_path": str(gated), "revision": None} | targets
    with building(output, sum(tensor.nbytes for tensor in scaled.values())) as target:
        save_file(scaled, target / WEIGHTS_FILE, metadata=metadata)
        text = json.dumps(raw | changes, indent=2, ensure_ascii=False)
        (target / PEFT_FILE).write_text(f"{text}\n", encoding="utf-8")
        for path in folder.iterdir():
            if path.is_file() and not LEFT_BEHIND.fullmatch(path.name) and path.name != PEFT_FILE:
                shutil.copyfile(path, target / path.name)
        mark_card(target / "README.md", raw.get("base_model_name_or_path"), str(gated))
    patterns = {IN_LAYERS.sub(".layers.*.", name): factor for name, factor in factors.items() if factor != 1}
    exact = all(is_power_of_two(factor) for factor in patterns.values())
    return AdapterConversion(output, raw["peft_type"], len(scaled), patterns, exact)


def find_adapter(adapter: str | Path) -> Path:
    """The folder of an adapter, fetched from the Hub where it is a Hub id; ValueError where there is none."""
    path = Path(adapter).expanduser()
    if not path.exists() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(adapter)):
        path = Path(snapshot_download(str(adapter), ignore_patterns=["*.bin", "*.pt", "*.pth", "*/*"]))
    if (path / RECORD_FILE).is_file():
        raise ValueError(f"{adapter} holds gates of a gated model already: attach it with GateAdapter.load.")
    if not (path / PEFT_FILE).is_file():
        raise ValueError(f"{adapter} has no {PEFT_FILE}: name the folder, or the Hub id, of a PEFT adapter.")
    if not (path / WEIGHTS_FILE).is_file():
        raise ValueError(f"{adapter} has no {WEIGHTS_FILE}: load it with PEFT and save it with save_pretrained.")
    return path


def check_method(raw: dict[str, Any], folder: Path) -> None:
    """ValueError unless the scale is known for every part of the method."""
    method = raw.get("peft_type")
    if method not in METHODS:
        raise ValueError(
            f"{folder} is of type {method!r}; supported are {', '.join(METHODS)}. Merge it into the source "
            "(merge_and_unload, save_pretrained) and convert the result."
        )
    if method not in ("LORA", "ADALORA"):
        return
    if (start := raw.get("init_lora_weights")) not in PLAIN_STARTS:
        raise ValueError(
            f"{folder} has init_lora_weights={start!r}, which moves a part of the base's weights into the adapter. "
            "Save it with path_initial_model_for_weight_conversion, which makes an ordinary LoRA of it."
        )
    if other := [name for name, value in raw.items() if name not in LORA_SETTINGS and value]:
        raise ValueError(
            f"{folder} has {', '.join(f'{name}={raw[name]!r}' for name in other)}, for which the scale is not known. "
            "Merge it into the source (merge_and_unload, save_pretrained) and convert the result."
        )


def check_origin(raw: dict[str, Any], gated: str | Path) -> None:
    """ValueError where the adapter was trained on a gated model, or was converted before."""
    base = raw.get("base_model_name_or_path") or ""
    config = Path(base).expanduser() / "config.json"
    known = config.is_file() and read_json(config).get("model_type") == GatedLlamaConfig.model_type
    if base and (known or base == str(gated)):
        raise ValueError(f"The adapter's base {base} is gated already: the adapter fits as it is.")


def check_gated(weights: Weights) -> None:
    """ValueError unless the model is an identity conversion whose gates have not moved."""
    policy = (weights.config.gate_retrofit or {}).get("policy")
    if policy == "transplant":
        raise ValueError(
            f"{weights.name} is a transplant: its values, o_proj and down_proj were fitted anew, so no scale makes an "
            "adapter of the source fit. Merge the adapter into the source (merge_and_unload, save_pretrained) and "
            "transplant the result."
        )
    if policy in ("open", "normal"):
        raise ValueError(
            f"{weights.name} was converted with policy={policy!r}, which folds nothing: an adapter of its source goes "
            "on it as it is."
        )
    if policy != "identity":
        raise ValueError(
            f"{weights.name} is no identity conversion (policy {policy!r}), so there is no ungated source whose "
            "adapters could be converted."
        )
    if name := moved_gate(weights):
        raise ValueError(
            f"{weights.name}: {name} has moved from its start. Convert the adapter for the folder that `convert` "
            "wrote; the result goes on what was trained from there, too."
        )


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of the adapter's file."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        return load_file(path), {"format": "pt"} | metadata
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({one_line(error)}): fetch it again.") from error


def check_fit(folder: Path, config: GatedLlamaConfig, tensors: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """
    ValueError unless PEFT, on the gated model, makes an adapter of just these tensors in the layers.

    Returns `target_modules` for adapter_config.json where the adapter's own would also match the gate.
    """
    if gate := next((name for name in tensors if f".{GATE}." in name), None):
        raise ValueError(f"The adapter holds {gate}: it was trained on a gated model, and fits that as it is.")
    try:
        from peft import PeftConfig
    except ImportError as error:
        raise ImportError("Adapters need PEFT: pip install 'gated-llama[peft]'") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_config = PeftConfig.from_pretrained(str(folder))
        kind = GatedLlamaForCausalLM if any("model.model." in name for name in tensors) else GatedLlamaModel
        with torch.device("meta"):
            model = kind(config)
        targets = without_gate(peft_config, model)
        expected = adapter_shapes(peft_config, model)
    found = {name: tensor.shape for name, tensor in tensors.items() if IN_LAYERS.search(name)}
    for name in found.keys() | {name for name in expected if not name.endswith(".bias")}:
        if found.get(name) != expected.get(name):
            sizes = [tuple(shapes[name]) if name in shapes else None for shapes in (found, expected)]
            raise ValueError(
                f"The adapter holds {name} as {sizes[0]}, and on this model PEFT makes it {sizes[1]}: it was trained "
                "on another decoder, or on whole modules that have a gate here."
            )
    return targets


def without_gate(config: "PeftConfig", model: torch.nn.Module) -> dict[str, list[str]]:
    """Takes the gate, which the source does not have, out of the target modules, where they match it."""
    from peft.tuners.tuners_utils import check_target_module_exists

    matched = [name for name, _ in model.named_modules() if check_target_module_exists(config, name)]
    kept = [name for name in matched if not name.endswith(f".{GATE}")]
    if kept == matched:
        return {}
    config.target_modules = set(kept)
    # Modules are named one by one now, so what chose among layers has nothing left to do.
    others = [name for name in ("layers_to_transform", "layers_pattern") if getattr(config, name, None) is not None]
    for name in others:
        setattr(config, name, None)
    return {"target_modules": kept, **dict.fromkeys(others)}


def adapter_shapes(config: "PeftConfig", model: torch.nn.Module) -> dict[str, torch.Size]:
    """Names and shapes of the tensors in the layers that an adapter of this configuration has on this model."""
    from peft import PeftModel, get_peft_model_state_dict

    config = copy.deepcopy(config)
    config.task_type = None  # a task brings its head, which is not in the layers
    adapted = PeftModel(model, config, low_cpu_mem_usage=True)
    state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    return {name: tensor.shape for name, tensor in state.items() if IN_LAYERS.search(name)}


def factor_of(name: str, method: str, config: GatedLlamaConfig) -> float:
    """What the adapter's tensor is multiplied with; ValueError for one that the method is not known to have."""
    match = PROJECTION.search(name)
    if match is None or int(match["layer"]) not in config.gated_layers:
        return 1.0
    projection, tensor = match["projection"], match["tensor"]
    factor = config.gate_retrofit["fold"].get(f"{projection}.weight", 1.0)
    known = METHODS[method] | COPIES
    if factor != 1 and tensor not in known:
        raise ValueError(f"The adapter holds {name}, and for {tensor} of {method} the scale is not known.")
    # A bias of o_proj lies behind a gate at G1 and is not folded. Adapters can bring one that the model lacks.
    sites = FOLD_SITES[config.gate_position] if factor != 1 else ()
    return factor if f"{projection}.{known.get(tensor)}" in sites else 1.0


def is_power_of_two(factor: float) -> bool:
    return torch.frexp(torch.tensor(factor, dtype=torch.float64)).mantissa.abs().item() == 0.5


def mark_card(path: Path, source: str | None, gated: str) -> None:
    """Names the new base in the adapter's card and says what was done."""
    if not path.is_file():
        return
    note = f"> Converted by `gated-llama convert-adapter` for the gated model {gated}; what follows is the original.\n"
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    header = ""
    with contextlib.suppress(yaml.YAMLError, UnicodeError):  # a card that cannot be read is no reason not to convert
        if text.startswith("---"):
            card = ModelCard(text, ignore_metadata_errors=True)
            card.data.base_model = gated
            tags = {f"base_model:adapter:{source}": f"base_model:adapter:{gated}"}
            card.data.tags = [tags.get(tag, tag) for tag in card.data.tags or []] or None
            header, text = f"---\n{card.data.to_yaml()}\n---\n\n", card.text.lstrip()
    path.write_text(f"{header}{note}\n{text}", encoding="utf-8", errors="surrogateescape")
