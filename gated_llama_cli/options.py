"""Values that options accept: those of `GatedLlamaConfig`, whose import would be slow. A test compares them."""

from typing import Literal

import typer


Position = Literal["sdpa_output", "value", "key", "query", "dense_output", "G1", "G2", "G3", "G4", "G5"]
Granularity = Literal["elementwise", "headwise"]
Operation = Literal["multiply", "add"]
Activation = Literal["sigmoid", "silu", "identity", "ns_sigmoid"]
GateInput = Literal["hidden_states", "constant", "states"]
Policy = Literal["identity", "open", "normal", "transplant"]
Layout = Literal["separate", "per_kv_group", "per_head", "megatron", "megatron_tail", "halves"]
Dtype = Literal["float32", "bfloat16", "float16"]


def layer_list(text: str | None) -> list[int] | None:
    """`"0-3,8"` -> [0, 1, 2, 3, 8]; None stays None, for all layers."""
    if text is None:
        return None
    layers = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)):
            raise typer.BadParameter(f"{part.strip()!r} is neither a layer nor a range: write layers as 0-3,8")
        if dash and int(last) < int(first):
            raise typer.BadParameter(f"the range {part.strip()!r} runs backwards")
        layers += range(int(first), int(last if dash else first) + 1)
    return layers


def layer_ranges(layers: list[int]) -> str:
    """[0, 1, 2, 3, 8] -> `"0-3,8"`, as `layer_list` reads it."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
