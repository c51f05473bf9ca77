"""GGUF files as a source: de-quantised tensor by tensor, equal to what Transformers' own loader gives."""

import importlib.util
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .tensor_files import TensorInfo, one_line


# GGUF architecture -> model type; llama.cpp stores Mistral models as llama.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

# Metadata key below the architecture's name -> attribute of config.json.
CONFIG_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
REQUIRED = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")

TOKEN_KEYS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}

# Keys that change nothing for the values listed; the head width stands for "equal to the width of a head".
HEAD_WIDTH = object()
NEUTRAL_KEYS = {
    "rope.dimension_count": (HEAD_WIDTH,),
    "attention.value_length": (HEAD_WIDTH,),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "tensor_data_layout": ("Meta AI original pth",),
}

UNKNOWN = "the decoder does not know"
DROPPED = "Transformers drops when it loads GGUF, so that it would be another model"

EMBEDDING = "token_embd.weight"

# Weighted modules of a decoder, in Transformers' names; the `gguf` package knows its own name for each.
MODULES = ("model.embed_tokens", "model.norm", "lm_head")
LAYER_MODULES = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
)

# Metadata value types of the format: struct codes of the scalars, then string and array.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


class GgufTensor(NamedTuple):
    shape: tuple[int, ...]  # first axis slowest, as in torch
    kind: int
    offset: int


class GgufFile:
    """
    Metadata and tensor table of a GGUF file (versions 2 and 3, little endian); arrays of strings are only counted.

    Raises ValueError when the file is damaged, ImportError when the `gguf` package is not installed.
    """

    def __init__(self, path: Path):
        if importlib.util.find_spec("gguf") is None:
            raise ImportError("Reading GGUF files needs the gguf package: pip install 'gated-llama[gguf]'.")
        self.path = path
        try:
            with open(path, "rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
            raise ValueError(f"{path} is not a complete GGUF file ({one_line(error)}): fetch it again.") from error

    def _read_header(self) -> None:
        self.position = 4
        version, tensors, pairs = self._unpack("IQQ")
        if self.data[:4] != b"GGUF" or version not in (2, 3):
            raise ValueError("no GGUF header of version 2 or 3, little endian")
        self.metadata = {self._string(): self._value() for _ in range(pairs)}
        self.tensors = dict(self._tensor() for _ in range(tensors))
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-self.position // alignment) * alignment
        self.tensors = {name: info._replace(offset=start + info.offset) for name, info in self.tensors.items()}
        for name, info in self.tensors.items():
            if info.offset + self.bytes_of(info) > len(self.data):
                raise ValueError(f"tensor {name!r} ends after the file")

    def _unpack(self, format: str) -> tuple:
        values = struct.unpack_from(f"<{format}", self.data, self.position)
        self.position += struct.calcsize(f"<{format}")
        return values

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        text = self.data[self.position : self.position + length]
        if len(text) < length:
            raise ValueError("the file ends within its metadata")
        self.position += length
        return text.decode("utf-8")

    def _value(self) -> Any:
        (kind,) = self._unpack("I")
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._unpack(SCALARS[kind])[0]
        kind, count = self._unpack("IQ")
        if kind in SCALARS:
            return list(self._unpack(f"{count}{SCALARS[kind]}"))
        for _ in range(count):  # strings, which have to be walked to find the end
            (length,) = self._unpack("Q")
            self.position += length
        return count

    def _tensor(self) -> tuple[str, GgufTensor]:
        name = self._string()
        (axes,) = self._unpack("I")
        shape = self._unpack(f"{axes}Q")
        kind, offset = self._unpack("IQ")
        return name, GgufTensor(tuple(reversed(shape)), kind, offset)

    @staticmethod
    def bytes_of(info: GgufTensor) -> int:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(info.kind)]
        return int(np.prod(info.shape, dtype=np.int64)) // elements * size

    def dequantise(self, name: str) -> np.ndarray:
        """The tensor in float32."""
        from gguf import GGMLQuantizationType, dequantize

        info = self.tensors[name]
        blocks = np.frombuffer(self.data, np.uint8, self.bytes_of(info), info.offset)
        try:
            return dequantize(blocks.reshape(*info.shape[:-1], -1), GGMLQuantizationType(info.kind))
        except NotImplementedError as error:
            kind = GGMLQuantizationType(info.kind).name
            raise ValueError(f"Tensor {name!r} of {self.path} is of type {kind}, which gguf cannot unpack.") from error


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """config.json of a GGUF file; ValueError for an architecture or a key that is not known."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file.path} has GGUF architecture {architecture!r}; supported are {', '.join(sorted(ARCHITECTURES))}."
        )
    if file.metadata.get("split.count", 1) > 1:
        raise ValueError(f"{file.path} is one part of a split file: join the parts with llama-gguf-split --merge.")
    if "rope_freqs.weight" in file.tensors:
        raise ValueError(
            f"{file.path} stores rotary frequencies of its own (rope_freqs.weight), which the library drops when it "
            "loads GGUF: convert from the safetensors checkpoint."
        )
    prefix = f"{architecture}."
    stated = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    if absent := [prefix + key for key in REQUIRED if key not in stated]:
        raise ValueError(f"{file.path} lacks the metadata {', '.join(absent)}.")
    raw = {attribute: stated[key] for key, attribute in CONFIG_KEYS.items() if key in stated}
    raw |= {attribute: file.metadata[key] for key, attribute in TOKEN_KEYS.items() if key in file.metadata}
    raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    raw.setdefault("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    if "vocab_size" not in raw and EMBEDDING in file.tensors:
        raw["vocab_size"] = file.tensors[EMBEDDING].shape[0]
    for key, value in stated.items():
        if key not in CONFIG_KEYS and value not in _neutral_values(key, raw["head_dim"]):
            reason = DROPPED if key.startswith("rope.scaling.") else UNKNOWN
            raise ValueError(
                f"{file.path} has {prefix}{key}={value!r}, which {reason}: convert from the safetensors checkpoint."
            )
    raw["tie_word_embeddings"] = "output.weight" not in file.tensors
    return raw | {"model_type": ARCHITECTURES[architecture]}


def _neutral_values(key: str, head_dim: int) -> tuple:
    return tuple(head_dim if value is HEAD_WIDTH else value for value in NEUTRAL_KEYS.get(key, ()))


class GgufReader:
    """The tensors of a GGUF file under Transformers' names, in float32, with the interface of `SafetensorsReader`."""

    def __init__(self, file: GgufFile, raw_config: dict[str, Any]):
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        self.file = file
        architecture = file.metadata["general.architecture"]
        layers = raw_config["num_hidden_layers"]
        arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
        name_map = get_tensor_name_map(arch, layers)
        modules = [*MODULES, *(f"model.layers.{i}.{module}" for i in range(layers) for module in LAYER_MODULES)]
        known = {name_map.get_name(module): module for module in modules}
        # Rows of q and k are in another order for llama (rotary pairs), which the processor undoes.
        self.processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=raw_config)
        self.stored_names: dict[str, str] = {}
        for stored in file.tensors:
            module, _, kind = stored.rpartition(".")
            self.stored_names[f"{known[module]}.{kind}" if module in known else stored] = stored
        self.tensors = {
            name: TensorInfo(file.tensors[stored].shape, torch.float32, file.path)
            for name, stored in self.stored_names.items()
        }

    def read(self, name: str) -> torch.Tensor:
        stored = self.stored_names[name]
        weights = self.processor.process(weights=self.file.dequantise(stored), name=stored).weights
        return torch.from_numpy(np.copy(weights))
