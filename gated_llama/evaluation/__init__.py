"""
lm-evaluation-harness for gated models: the model class `gated-llama`, comparison with a base, tasks, RULER.

Importing this package registers the model class with the harness (and `gated_llama` with Transformers, as always).
"""

try:
    import lm_eval  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError("Evaluation needs lm-evaluation-harness: pip install 'gated-llama[eval]'") from error

from .compare import Comparison, compare
from .harness import GatedLlamaLM
from .run import Job, build_model, evaluate, load, parse, run


__all__ = ["Comparison", "GatedLlamaLM", "Job", "build_model", "compare", "evaluate", "load", "parse", "run"]
