"""
Whether a GGUF file is the model that it was written from.

It is read back by the rules of llama.cpp: every tensor of the source must come out again bit for bit, every rotary
frequency to rounding. Where llama.cpp itself is installed (`pip install xllamacpp`), it runs the file besides, and its
token ids and log-probabilities are compared with the source's.
"""

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import ceil, floor, log, pi, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..configuration_gated import GatedLlamaConfig
from . import llama_cpp
from .checkpoint import expected_tensors
from .gguf_source import GgufFile
from .gguf_target import INSIDE, MLP_NORM, stays_float32
from .loading import Loadable
from .parity import Parity, judge, text_ids
from .rewriting import NEUTRAL_SCALE
from .rotary import frequencies, yarn_amplitude
from .targets import Target
from .tokenizer import PROBES, expected_ids


# Keys of the file (below the architecture's name) -> the field of the config that they must hold.
FACTS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}

# What is lost of a weight that is scaled by 2^-30 lies below the smallest float32 times 2^30.
LOST = 2.0**-119

# Prompts for llama.cpp: text, and ids at random over as much of the context as this; tokens decoded after each, and
# how many of the likeliest tokens are compared at each step.
TEXT, RANDOM = 48, 384
STEPS, WIDTH = 8, 1000

# As in `parity`, for log-probabilities; llama.cpp rounds what it multiplies with matrices of a short dtype to that.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def prove_gguf(
    source: Loadable, config: GatedLlamaConfig, target: Target, dtype: torch.dtype, path: Path
) -> tuple[Parity | None, str]:
    """
    Proves a file that was just written.

    Returns: the comparison with llama.cpp, `None` where that is not installed, and what was proven in words.
    Raises: ValueError where the file is not the model.
    """
    read_back(source, config, target, dtype, path)
    proof = "Every tensor of the source was read back from the file, bit for bit, and every rotary frequency."
    if not llama_cpp.is_installed():
        return None, f"{proof} llama.cpp was not run: pip install {llama_cpp.PACKAGE} for that."
    parity = run_llama_cpp(source, config, dtype, path)
    version = importlib.metadata.version(llama_cpp.PACKAGE)
    rounding = "" if dtype == torch.float32 else ", which rounds what it multiplies with matrices to their dtype"
    return parity, (
        f"{proof} The logits were llama.cpp's ({llama_cpp.PACKAGE} {version}{rounding}), as log-probabilities among "
        f"the {min(WIDTH, config.vocab_size)} likeliest tokens. Its tokenizer gives the source's ids."
    )


def require(condition: bool, what: str):
    if not condition:
        raise ValueError(f"The written file does not give back the source's {what}. Please report this.")


def read_back(source: Loadable, config: GatedLlamaConfig, target: Target, dtype: torch.dtype, path: Path):
    """ValueError unless the source's tensors and rotary frequencies come out of the file."""
    file = GgufFile(path)
    reading = Reading(file, config, target)
    reading.check_metadata()
    reader = source.checkpoint.reader
    seen = set()
    for name, tensor in reading.tensors():
        expected = reader.read(name)
        if not stays_float32(name, tensor.shape):
            expected = expected.to(source.rounding(dtype))
        expected = expected.float()
        if config.gate_head_shared and ".g_proj." in name:
            expected = averaged(expected, config)
        if not stays_float32(name, tensor.shape):
            expected = expected.to(dtype).float()
        require(tensor.shape == expected.shape and bool(((tensor - expected).abs() <= LOST).all()), f"tensor {name}")
        seen.add(name)
    dropped = {name for name in reader.tensors if name.endswith("bias") or name == "lm_head.weight"}
    # What the file lacks, a writer may have left out; what only the source has, must be there for nothing.
    require(seen >= set(expected_tensors(config, torch.float32)), "tensors, all of them")
    require(seen | dropped >= set(reader.tensors), "tensors, all of them")
    require(not reading.left, f"tensors and nothing else (also {', '.join(sorted(reading.left))})")


def averaged(rows: torch.Tensor, config: GatedLlamaConfig) -> torch.Tensor:
    """What each head has of a gate that the heads share: the average over heads."""
    heads = rows.unflatten(0, config.gate_shape)
    return heads.mean(0, keepdim=True).expand_as(heads).flatten(0, 1)


@dataclass
class Reading:
    """A file read as llama.cpp reads it; `left` are the tensors that nothing has asked for yet."""

    file: GgufFile
    config: GatedLlamaConfig
    target: Target
    left: set[str] = field(init=False)

    def __post_init__(self):
        self.left = set(self.file.tensors)

    def value(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.target.model_type}.{key}", default)

    def take(self, name: str) -> torch.Tensor:
        require(name in self.left, f"tensor {name}")
        self.left.remove(name)
        return torch.from_numpy(np.array(self.file.dequantise(name)))

    def check_metadata(self):
        config = self.config
        require(self.file.metadata["general.architecture"] == self.target.model_type, "architecture")
        require(self.value("block_count") == config.num_hidden_layers + 1, "number of layers")
        for key, name in FACTS.items():
            require(np.float32(self.value(key)) == np.float32(getattr(config, name)), name)
        if self.target.model_type == "step35":
            windows = [kind == "sliding_attention" for kind in config.layer_types] + [True]
            require(self.value("attention.sliding_window_pattern") == windows, "sliding windows")
            width = self.value("attention.sliding_window")
            require(width == config.sliding_window or config.sliding_window is None, "sliding_window")
        else:
            kinds = [False] * config.num_hidden_layers + [True]
            require(self.value("attention.recurrent_layers") == kinds, "kinds of layers")
        self.check_rotary()

    def check_rotary(self):
        expected, scale = frequencies(self.config)
        factors = self.take("rope_freqs.weight").double() if "rope_freqs.weight" in self.left else 1.0
        step = self.target.model_type == "step35"
        count, base = self.value("rope.dimension_count"), self.value("rope.freq_base")
        found = scaled_frequencies(self, count // 2 if step else count, base, factors)
        slides = "sliding_attention" in self.config.layer_types
        plain = self.config.rope_parameters["rope_type"] == "default"
        if step and slides:
            require(plain, "rotary frequencies under sliding windows")
            swa = self.value("rope.dimension_count_swa"), self.value("rope.freq_base_swa", 10000.0)
            sliding = scaled_frequencies(self, *swa, 1.0)
            require(torch.allclose(sliding, expected.double(), rtol=1e-5, atol=0), "rotary frequencies of its windows")
        same = found.shape == expected.shape and torch.allclose(found, expected.double(), rtol=1e-5, atol=0)
        require(same, "rotary frequencies")
        require(abs(attention_scale(self) - scale) < 1e-5, "scale of rotary embeddings")
        if not step:
            sections, pairs = self.value("rope.dimension_sections"), count // 2
            require(sections == [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0], "rotary sections")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The source's tensors, made of the file's."""
        embeddings = self.take("token_embd.weight")
        yield "model.embed_tokens.weight", embeddings
        yield "model.norm.weight", self.take("output_norm.weight")
        if "output.weight" in self.left:
            head = self.take("output.weight")
            if self.config.tie_word_embeddings:
                require(torch.equal(head, embeddings), "tied head")
            else:
                yield "lm_head.weight", head
        for index in range(self.config.num_hidden_layers):
            for name, tensor in self.layer(index):
                yield f"model.layers.{index}.{name}", tensor
        self.check_added_layer(f"blk.{self.config.num_hidden_layers}.")

    def layer(self, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        prefix, config = f"blk.{index}.", self.config
        gated = index in config.gated_layers
        fused = self.target.gate.name is None
        neutral = self.target.qk_norm and not config.qk_norm
        names = INSIDE | {"post_attention_layernorm": MLP_NORM[self.target.model_type]}
        for module, stored in names.items():
            for kind in ("weight", "bias"):
                name = f"{prefix}{stored}.{kind}"
                if name not in self.left:
                    continue
                tensor = self.take(name)
                if fused and module == "self_attn.q_proj":
                    tensor, gate = self.split(tensor)
                    yield from self.gate(gate, kind, gated)
                if module == "self_attn.g_proj":
                    yield from self.gate(tensor, kind, gated)
                    continue
                if neutral and module in ("self_attn.q_norm", "self_attn.k_norm"):
                    undo = sqrt(config.rms_norm_eps) / NEUTRAL_SCALE
                    require(bool((tensor / undo - 1).abs().max() < 1e-6), f"lack of {module}")
                    continue
                if neutral and module in ("self_attn.q_proj", "self_attn.k_proj"):
                    tensor = tensor / NEUTRAL_SCALE
                if module == "self_attn.o_proj" and not gated:
                    tensor = tensor / 2
                if kind == "bias" and not config.qkv_bias:
                    require(not tensor.any(), f"lack of a bias of {module}")
                    continue
                yield f"{module}.{kind}", tensor

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and gates [heads, head_dim, ...], which alternate from head to head."""
        heads = rows.unflatten(0, (self.config.num_attention_heads, 2, self.config.head_dim))
        return heads[:, 0].flatten(0, 1), heads[:, 1]

    def gate(self, rows: torch.Tensor, kind: str, gated: bool) -> Iterator[tuple[str, torch.Tensor]]:
        if not gated or (kind == "bias" and not self.config.gate_bias):
            require(not rows.any(), f"lack of a gate's {kind}")
            return
        if self.target.gate.name is None and self.config.gate_granularity == "headwise":
            require(bool((rows == rows[:, :1]).all()), "scores of whole heads")
            rows = rows[:, 0]
        elif self.target.gate.name is None:
            rows = rows.flatten(0, 1)
        yield f"self_attn.g_proj.{kind}", rows

    def check_added_layer(self, prefix: str):
        """Nothing may leave the added layer."""
        for name in sorted(name for name in self.left if name.startswith(prefix)):
            tensor = self.take(name)
            require("norm" in name or not tensor.any(), f"function under the added layer ({name} is not zero)")


def scaled_frequencies(reading: Reading, count: int, base: float, factors: torch.Tensor | float) -> torch.Tensor:
    """Radians per position of `count` / 2 pairs as ggml computes them [count / 2], in float64."""
    pairs = torch.arange(count // 2, dtype=torch.float64)
    plain = base ** (-2 * pairs / count) / factors
    kind, factor = reading.value("rope.scaling.type", "none"), reading.value("rope.scaling.factor", 1.0)
    if kind != "yarn":
        return plain / factor
    window = reading.value("rope.scaling.original_context_length")

    def border(key: str) -> float:
        turns = reading.value(f"rope.scaling.yarn_beta_{key}")
        return count * log(window / (turns * 2 * pi)) / (2 * log(base))

    low, high = max(0, floor(border("fast"))), min(count - 1, ceil(border("slow")))
    kept = 1 - ((pairs - low) / max(0.001, high - low)).clamp(0, 1)
    return plain / factor * (1 - kept) + plain * kept


def attention_scale(reading: Reading) -> float:
    """The factor on cosine and sine."""
    if reading.value("rope.scaling.type") != "yarn":
        return 1.0
    return reading.value("rope.scaling.attn_factor", 1.0) * yarn_amplitude(reading.value("rope.scaling.factor"))


@torch.inference_mode()
def run_llama_cpp(source: Loadable, config: GatedLlamaConfig, dtype: torch.dtype, path: Path) -> Parity:
    """Token ids and log-probabilities of llama.cpp against the source's; ValueError where ids differ."""
    room = min(config.max_position_embeddings, RANDOM + STEPS) - STEPS
    generator = torch.Generator().manual_seed(0)
    rows = [text_ids(source, config.vocab_size)[: min(TEXT, room)]]
    rows.append(torch.randint(config.vocab_size, (room,), generator=generator).tolist())
    size = {"context": room + STEPS, "threads": torch.get_num_threads(), "width": min(WIDTH, config.vocab_size)}
    question = {"model": str(path), "texts": PROBES, "prompts": rows, "steps": STEPS}
    reply = llama_cpp.ask(question | size)
    expected, _ = expected_ids(source.load_tokenizer(), source.checkpoint.folder)
    for text, ids, found in zip(PROBES, expected, reply["ids"], strict=True):
        if found != ids.full:
            raise ValueError(f"llama.cpp makes {found} of {text!r}, and the source's tokenizer {ids.full}.")
    model = source.load_model("float32")
    for parameter in model.parameters():
        if not stays_float32("", parameter.shape):
            parameter.copy_(parameter.to(dtype))
    pairs = [compare_steps(model, ids, found) for ids, found in zip(rows, reply["completions"], strict=True)]
    expected, found = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    parity = judge(expected, found, dtype)
    return replace(parity, tolerance=TOLERANCES[dtype] * max(1.0, parity.largest_logit))


def compare_steps(model, ids: list[int], completion: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Log-probabilities of the model and of llama.cpp among the tokens that the latter names [steps, width].

    They are normalised over these tokens: llama.cpp adds the whole vocabulary up in float32, which shifts all of its
    log-probabilities by up to 2e-4 (49152 tokens), while differences between them are exact to 4e-5.
    """
    steps = completion["likeliest"]
    row = torch.tensor([ids + completion["tokens"][:-1]])
    logits = model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False).logits[0, -len(steps) :]
    named = torch.tensor([[index for index, _ in step] for step in steps])
    found = torch.tensor([[value for _, value in step] for step in steps], dtype=torch.float64)
    return logits.double().gather(1, named).log_softmax(-1), found.log_softmax(-1)
