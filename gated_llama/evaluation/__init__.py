"""
lm-evaluation-harness for gated models: the model class `gated-llama`, comparison with a base, tasks, RULER.

Importing this package registers the model class with the harness (and `gated_llama` with Transformers, as always).
"""

from .compare import Comparison, compare
from .harness import GatedLlamaLM
from .run import Job, build_model, evaluate, load, parse, run


__all__ = ["Comparison", "GatedLlamaLM", "Job", "build_model", "compare", "evaluate", "load", "parse", "run"]
