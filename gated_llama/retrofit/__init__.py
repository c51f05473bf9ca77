"""
Retrofits: transplanted sinks, continued pretraining of gated models, gates as adapters.

report = transplant_checkpoint("model", "out", ["text.jsonl"])     # the sink becomes gates, without training
train(read_settings("polish.yaml"))                                # KL to the source, under pressure or without
GateAdapter.extract(model, "base").save("adapter")                 # gates alone, to attach to the base again

Names are imported when they are asked for: the trainer brings accelerate, `gate_adapter_config` needs peft.
"""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .adapter_conversion import AdapterConversion, convert_adapter
    from .adapters import GateAdapter, MergedGates, gate_adapter_config
    from .data import mix_rows
    from .deliver import transplant_checkpoint
    from .settings import Settings, read_settings, training_arguments
    from .sink import SinkReport, measure_sink
    from .surgery import TransplantReport, transplant, transplant_rows, undo_transplant
    from .trainer import RetrofitTrainer
    from .training import TrainingReport, train

_HOME = {
    "adapter_conversion": ("AdapterConversion", "convert_adapter"),
    "adapters": ("GateAdapter", "MergedGates", "gate_adapter_config"),
    "data": ("mix_rows",),
    "deliver": ("transplant_checkpoint",),
    "settings": ("Settings", "read_settings", "training_arguments"),
    "sink": ("SinkReport", "measure_sink"),
    "surgery": ("TransplantReport", "transplant", "transplant_rows", "undo_transplant"),
    "trainer": ("RetrofitTrainer",),
    "training": ("TrainingReport", "train"),
}

__all__ = [
    "AdapterConversion",
    "GateAdapter",
    "MergedGates",
    "RetrofitTrainer",
    "Settings",
    "SinkReport",
    "TrainingReport",
    "TransplantReport",
    "convert_adapter",
    "gate_adapter_config",
    "measure_sink",
    "mix_rows",
    "read_settings",
    "train",
    "training_arguments",
    "transplant",
    "transplant_checkpoint",
    "transplant_rows",
    "undo_transplant",
]


def __getattr__(name: str):
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
