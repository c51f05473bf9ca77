"""The vLLM plugin, with a stand-in for vLLM: what it registers, and where the entry point leads."""

import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from gated_llama import GatedLlamaConfig, GatedLlamaForCausalLM, GatedLlamaModel


GROUP = "vllm.general_plugins"


@pytest.fixture
def registered(monkeypatch):
    """Architectures registered with the stand-in, name -> class as vLLM wants it: `module:Class`."""
    found = {}
    vllm = ModuleType("vllm")
    vllm.ModelRegistry = type("ModelRegistry", (), {"register_model": staticmethod(found.__setitem__)})
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    return found


def test_the_declared_plugin_registers_the_architecture(registered):
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    (name, value), *others = project["entry-points"][GROUP].items()
    assert not others
    for _ in range(2):
        EntryPoint(name, value, GROUP).load()()
        assert registered == {
            "GatedLlamaForCausalLM": "vllm.model_executor.models.transformers:TransformersForCausalLM"
        }
    assert type(AutoConfig.for_model("gated_llama")) is GatedLlamaConfig
    # The backend builds the decoder through AutoModel, and asks whether its attention can be replaced.
    assert AutoModel._model_mapping[GatedLlamaConfig] is GatedLlamaModel
    assert AutoModelForCausalLM._model_mapping[GatedLlamaConfig] is GatedLlamaForCausalLM
    assert GatedLlamaForCausalLM.is_backend_compatible()
