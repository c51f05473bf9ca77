"""Fixtures shared by all tests: tiny models, fixed seeds, no network."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path


os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported, which reads it once
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("FORCE_COLOR", None)  # consoles are made on import, and tests read plain text
os.environ.pop("TTY_COMPATIBLE", None)

import pytest
import torch

from gated_llama import GatedLlamaConfig, GatedLlamaForCausalLM


TINY = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "gate_position": "sdpa_output",
}

torch.set_num_threads(1)  # tiny models gain nothing from more, and lose much on a busy machine


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture
def tiny_config():
    """`tiny_config(**overrides)`: a valid config with grouped heads (4/2), head_dim 16 and hidden 40, gated at G1."""

    def make(**overrides) -> GatedLlamaConfig:
        return GatedLlamaConfig(**{**TINY, **overrides})

    return make


@pytest.fixture
def tiny_model(tiny_config):
    """`tiny_model(**overrides)`: a GatedLlamaForCausalLM of that config in eval mode, the same weights every time."""

    def make(**overrides) -> GatedLlamaForCausalLM:
        torch.manual_seed(0)
        return GatedLlamaForCausalLM(tiny_config(**overrides)).eval()

    return make


@pytest.fixture
def randomize_gates():
    """`randomize_gates(model, std=0.5, seed=0)`: fills g_proj and g_param with normal values; returns the model."""

    def fill(model: torch.nn.Module, std: float = 0.5, seed: int = 0) -> torch.nn.Module:
        generator = torch.Generator().manual_seed(seed)
        gates = [parameter for name, parameter in model.named_parameters() if ".self_attn.g_p" in name]
        assert gates, "the model has no gate parameters to fill"
        with torch.no_grad():
            for parameter in gates:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        return model

    return fill


@pytest.fixture
def run_fresh():
    """`run_fresh(code, *arguments, **environment)`: runs code in an interpreter of its own; the CompletedProcess."""

    def run(code: str, *arguments, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run
