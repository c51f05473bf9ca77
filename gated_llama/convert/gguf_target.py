"""GGUF as a target: one file for llama.cpp with metadata, tokenizer and tensors, written one tensor at a time."""

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..configuration_gated import GatedLlamaConfig
from .gguf_configs import needs_rope_factors, rope_factors
from .output_folder import building, check_output
from .rewriting import Recipe
from .targets import Target


GGUF_FILE = "model.gguf"

# Names of the format: dtype -> type of a tensor, and type of a file whose matrices are mostly that.
KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
FILE_TYPES = {torch.float32: "ALL_F32", torch.float16: "MOSTLY_F16", torch.bfloat16: "MOSTLY_BF16"}

OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.g_proj": "attn_gate",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MLP_NORM = {"step35": "ffn_norm", "qwen35": "post_attention_norm"}


def require_package():
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("Writing GGUF files needs the gguf package: pip install 'gated-llama[gguf]'.")


def stored_name(name: str, architecture: str) -> str:
    """The name in the file of a tensor with this name in Transformers; added layers may bring names of the file."""
    module, _, kind = name.rpartition(".")
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.{kind}"
    index, inner = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name).groups()
    module, _, kind = inner.rpartition(".")
    names = INSIDE | {"post_attention_layernorm": MLP_NORM[architecture]}
    return f"blk.{index}.{names[module]}.{kind}" if module in names else f"blk.{index}.{inner}"


def stays_float32(name: str, shape: tuple[int, ...]) -> bool:
    """llama.cpp multiplies and adds vectors, and convolves, in float32 only."""
    return len(shape) == 1 or "conv1d" in name


def gguf_recipes(recipes: Mapping[str, Recipe], config: GatedLlamaConfig, target: Target) -> dict[str, Recipe]:
    """The tensors of the file, by their names in it."""
    named = {stored_name(name, target.model_type): recipe for name, recipe in recipes.items()}
    assert len(named) == len(recipes)
    if needs_rope_factors(config):
        factors = rope_factors(config)
        named["rope_freqs.weight"] = Recipe(tuple(factors.shape), lambda: factors)
    return named


def gguf_metadata(
    config: GatedLlamaConfig, target: Target, dtype: torch.dtype, name: str, tokenizer: Mapping[str, Any]
) -> dict[str, Any]:
    """Every key of the file but its architecture, which the writer adds."""
    from gguf import GGML_QUANT_VERSION, LlamaFileType

    architecture = {"vocab_size": config.vocab_size, **target.config(config)}
    return {
        "general.type": "model",
        "general.name": name,
        "general.file_type": int(LlamaFileType[FILE_TYPES[dtype]]),
        "general.quantization_version": GGML_QUANT_VERSION,
        **{f"{target.model_type}.{key}": value for key, value in architecture.items()},
        **tokenizer,
    }


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    parts: Callable[[str], Iterable[torch.Tensor]],
):
    """
    Writes a GGUF file front to back.

    Args:
        tensors: name -> meta tensor of the shape and dtype that it has in the file.
        parts: called with each name in turn; yields the tensor, whole.
    """
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        writer.add_key_value(key, value, value_type(value))
    for name, tensor in tensors.items():
        kind = GGMLQuantizationType[KINDS[tensor.dtype]]
        writer.add_tensor_info(name, tuple(tensor.shape), None, tensor.nbytes, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in tensors:
            for part in parts(name):
                writer.write_tensor_data(part.reshape(-1).view(torch.uint8).numpy())
    finally:
        writer.close()


def value_type(value: Any):
    """Integers are unsigned, as llama.cpp reads them; elements of a list are typed by the library."""
    from gguf import GGUFValueType

    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    return GGUFValueType[kinds[type(value)]]


def quantisation_note(names: Iterable[str]) -> str:
    """How to quantise an export whose matrices `names` must stay as they are."""
    flags = "".join(f" --tensor-type {name}=bf16" for name in names)
    if not flags:
        return "llama-quantize takes this file as it is, without exceptions for any tensor."
    return f"Quantise with `llama-quantize{flags} {GGUF_FILE} OUT TYPE`: without these options the result is noise."


def check_file(output: Path, source: str | Path) -> Path:
    """The absolute path of a file to write; ValueError when something is there or it lies in the source."""
    if output.expanduser().exists():
        raise ValueError(f"Output {output} exists: name another file, or remove it first.")
    return check_output(output, source)


class building_file(building):
    """As `building`, for a single file: only `GGUF_FILE` of the folder survives, under the name of the output."""

    def __exit__(self, error_type, error, traceback) -> None:
        try:
            if error_type is None:
                (self.folder / GGUF_FILE).rename(self.output)
        finally:
            self.discard()
