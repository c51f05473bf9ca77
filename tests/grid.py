"""The grid of gate cells, and which of them have a meaning."""

from itertools import product


AXES = {
    "gate_position": ["sdpa_output", "value", "key", "query", "dense_output"],
    "gate_activation": ["sigmoid", "silu", "identity", "ns_sigmoid"],
    "gate_operation": ["multiply", "add"],
    "gate_granularity": ["elementwise", "headwise"],
    "gate_head_shared": [False, True],
    "gate_input": ["hidden_states", "constant", "states"],
    "gate_bias": [False, True],
}


def refusals(cell: dict, qk_norm: bool) -> list[str]:
    """The words that a refusal of `cell` must hold, from the definition of each axis; empty when the cell is valid."""
    headwise, shared = cell["gate_granularity"] == "headwise", cell["gate_head_shared"]
    before_norm = qk_norm and cell["gate_position"] in ("key", "query")
    rules = {
        "no head axis": cell["gate_position"] == "dense_output" and (headwise or shared),
        "cancels exactly": before_norm and headwise and cell["gate_operation"] == "multiply",
        "each coordinate gate itself": cell["gate_input"] == "states" and (headwise or shared),
        "no projection to carry a bias": cell["gate_input"] != "hidden_states" and cell["gate_bias"],
    }
    return [words for words, broken in rules.items() if broken]


def cells(**fixed) -> list[dict]:
    """All cells of the grid, the axes named in `fixed` held."""
    axes = {name: [fixed[name]] if name in fixed else values for name, values in AXES.items()}
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def valid_cells(qk_norm: bool = False, **fixed) -> list[dict]:
    """The cells with a meaning, the axes named in `fixed` held."""
    return [cell for cell in cells(**fixed) if not refusals(cell, qk_norm)]
