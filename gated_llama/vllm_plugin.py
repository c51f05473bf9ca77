"""
Plugin of vLLM: serves gated checkpoints where this package is installed, without `trust_remote_code`.

vLLM calls `register` in each of its processes (entry points of group `vllm.general_plugins`). Its Transformers backend
then runs this package's own model: attention and cache are vLLM's, the gate is that of `modeling_gated`.
"""

from . import registration
from .modeling_gated import GatedLlamaForCausalLM


BACKEND = "vllm.model_executor.models.transformers:TransformersForCausalLM"


def register() -> None:
    """Makes Transformers know the model type and vLLM the architecture. Calling it again is harmless."""
    from vllm import ModelRegistry

    registration.register()
    ModelRegistry.register_model(GatedLlamaForCausalLM.__name__, BACKEND)
