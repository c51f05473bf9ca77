"""One folder in MLX-LM on the CPU: `ask_mlx.py FOLDER REFERENCE.npz DTYPE`."""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from figures import answer, compare, equal_prefix, read_reference
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model


def main(folder: str, reference: str, dtype: str) -> None:
    mx.set_default_device(mx.cpu)
    expected = read_reference(reference)
    ids, greedy = expected["ids"], expected["greedy"]
    model, _ = load_model(Path(folder))
    model.set_dtype(getattr(mx, dtype))
    cache = make_prompt_cache(model)
    logits = scores(model, ids, cache)
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < len(greedy):
        tokens.append(int(scores(model, np.array(tokens[-1:]), cache)[-1].argmax()))
    tops = [dict(enumerate(row.tolist())) for row in logits]
    answer(compare(expected["logits"][: len(ids)], tops) | equal_prefix(greedy, tokens))


def scores(model, ids: np.ndarray, cache: list) -> np.ndarray:
    return np.array(model(mx.array(ids)[None], cache=cache).astype(mx.float32))[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
