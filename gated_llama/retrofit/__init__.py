"""
Retrofits: transplanted sinks, continued pretraining of gated models, gates as adapters.

report = transplant_checkpoint("model", "out", ["text.jsonl"])     # the sink becomes gates, without training
train(read_settings("polish.yaml"))                                # KL to the source, under pressure or without
GateAdapter.extract(model, "base").save("adapter")                 # gates alone, to attach to the base again

Names are imported when they are asked for: the trainer brings accelerate, `gate_adapter_config` needs peft.
"""

from importlib import import_module


_HOME = {
    "surgery": ("TransplantReport", "transplant", "transplant_rows", "undo_transplant"),
    "deliver": ("transplant_checkpoint",),
    "sink": ("SinkReport", "measure_sink"),
    "adapters": ("GateAdapter", "MergedGates", "gate_adapter_config"),
    "settings": ("Settings", "read_settings"),
    "trainer": ("RetrofitTrainer",),
    "training": ("TrainingReport", "train"),
}


def __getattr__(name: str):
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
