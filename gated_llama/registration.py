"""Registration of `gated_llama` with the Auto classes of Transformers."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from . import modeling_gated
from .configuration_gated import AUTO_MAP, GatedLlamaConfig


AUTO_MODELS = (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoModelForQuestionAnswering,
)


def register() -> None:
    """
    Makes the Auto classes resolve model type `gated_llama` to this package. Calling it again is harmless.

    Once registered, `AutoModelForCausalLM.from_pretrained(folder)` uses this package, also with
    `trust_remote_code=True`: Transformers prefers registered code to a folder's.

    Raises:
        ImportError: another class, not a copy of this package's, already owns the model type.
    """
    model_type = GatedLlamaConfig.model_type
    if model_type in CONFIG_MAPPING:
        owner = CONFIG_MAPPING[model_type]
        if (owner.__module__.rsplit(".", 1)[-1], owner.__name__) != tuple(AUTO_MAP["AutoConfig"].split(".")):
            raise ImportError(
                f"Model type {model_type!r} is already registered by {owner.__module__}.{owner.__qualname__}, so "
                f"{GatedLlamaConfig.__module__}.{GatedLlamaConfig.__qualname__} cannot own it: import gated_llama "
                "first, or remove the other registration."
            )
    AutoConfig.register(model_type, GatedLlamaConfig, exist_ok=True)
    for auto_model in AUTO_MODELS:
        model_class = getattr(modeling_gated, AUTO_MAP[auto_model.__name__].split(".")[1])
        auto_model.register(GatedLlamaConfig, model_class, exist_ok=True)
