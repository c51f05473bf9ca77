"""What an engine's answers are compared by; numpy only, since every engine has an environment of its own."""

import json
from pathlib import Path

import numpy as np


def read_reference(path: str | Path) -> dict[str, np.ndarray]:
    """`ids` of the prompt, `greedy` tokens after it, `logits` [prompt + greedy, vocabulary] in float32."""
    with np.load(path) as file:
        return dict(file)


def compare(expected: np.ndarray, found: list[dict[int, float]]) -> dict[str, float]:
    """
    Figures for scores [positions, vocabulary] and an engine's highest ones, token -> score for each position.

    Returns: the largest difference, the median over positions of the largest one there, the largest expected score,
    how many scores were compared, and the share of positions whose highest score belongs to the same token.
    """
    assert len(expected) == len(found) > 0
    worst = [
        max(abs(row[token] - score) for token, score in top.items()) for row, top in zip(expected, found, strict=True)
    ]
    agree = [int(row.argmax()) == max(top, key=top.get) for row, top in zip(expected, found, strict=True)]
    return {
        "max_abs_difference": float(max(worst)),
        "median_difference": float(np.median(worst)),
        "largest": float(np.abs(expected).max()),
        "scores": sum(map(len, found)),
        "positions": len(found),
        "argmax_agreement": sum(agree) / len(agree),
    }


def equal_prefix(expected: np.ndarray, found: list[int]) -> dict[str, int | bool]:
    """Whether greedy decoding gave the same tokens, and how many from the start are the same."""
    same = [int(a) == int(b) for a, b in zip(expected, found, strict=True)]
    return {"greedy_equal": all(same), "greedy_tokens": len(same), "greedy_prefix": [*same, False].index(False)}


def answer(figures: dict) -> None:
    """The last line of a program's output, for `run.py`."""
    print("\n" + json.dumps(figures), flush=True)
