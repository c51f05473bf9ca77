"""Sharding: every attention parameter has a rule, head counts are read from the tensors, two ranks equal one."""

import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from grid import valid_cells

from gated_llama import GatedLlamaModel


SPLIT, WHOLE = "colwise", "colwise_gather_output"


def gate_rules(cell: dict) -> dict[str, str]:
    """The rules that a cell needs besides those of the ungated decoder."""
    dense, shared = cell["gate_position"] == "dense_output", cell["gate_head_shared"]
    if cell["gate_input"] == "hidden_states":
        return {"self_attn.g_proj": WHOLE if dense or shared else SPLIT}
    if cell["gate_input"] == "states" or dense:
        return {}
    if shared:
        return {"self_attn": "replicated_with_grad_allreduce"}
    return {"self_attn.g_param": SPLIT, "self_attn": "local_params"}


def test_plan_covers_every_cell(tiny_config):
    """Each rule names something in the model, and each attention projection has a rule."""
    plain = tiny_config(gate_position=None).base_model_tp_plan
    for cell in valid_cells(gate_activation="sigmoid", gate_operation="multiply"):
        config = tiny_config(**cell)
        expected = {f"layers.*.{name}": style for name, style in gate_rules(cell).items()}
        assert config.base_model_tp_plan == plain | expected, cell
        with torch.device("meta"):
            model = GatedLlamaModel(config)
        names = {re.sub(r"\d+", "*", name) for name, _ in [*model.named_modules(), *model.named_parameters()]}
        assert set(config.base_model_tp_plan) <= names
        projections = {name for name in names if re.search(r"_proj$", name)}
        assert projections <= set(config.base_model_tp_plan)


def test_plan_covers_the_norms_per_head(tiny_config):
    plan = tiny_config(qk_norm=True, sdpa_output_norm=True).base_model_tp_plan
    for name in ("q_norm", "k_norm", "sdpa_norm"):
        assert plan[f"layers.*.self_attn.{name}"] == "replicated_with_grad_allreduce"


def test_others_may_add_to_the_plan(tiny_config):
    """Quantisers do, through the attribute; it never reaches the file."""
    config = tiny_config()
    config.base_model_tp_plan.update({"layers.*.self_attn.q_proj.scale": "replicate"})
    assert config.base_model_tp_plan["layers.*.self_attn.q_proj.scale"] == "replicate"
    assert "base_model_tp_plan" not in config.to_dict()


@pytest.mark.parametrize("overrides", [{}, {"gate_position": None}, {"gate_input": "constant"}, {"gate_layers": [1]}])
def test_layers_that_must_stay_whole_exist(overrides, tiny_model):
    model = tiny_model(**overrides)
    classes = {type(module).__name__ for module in model.modules()}
    assert model._no_split_modules == {"GatedLlamaDecoderLayer"}
    assert model._no_split_modules <= classes


HALVES = [slice(0, 2), slice(2, 4)]


def keep_heads(attention, queries, groups):
    """Cuts one attention module to the given query heads and key groups; its config stays as it was."""
    width = attention.head_dim

    def rows(heads):
        return torch.cat([torch.arange(head * width, (head + 1) * width) for head in range(heads.start, heads.stop)])

    def cut(parameter, index, dim=0):
        parameter.data = parameter.data.index_select(dim, index)

    for name, heads in (("q_proj", queries), ("k_proj", groups), ("v_proj", groups)):
        cut(getattr(attention, name).weight, rows(heads))
    cut(attention.o_proj.weight, rows(queries), dim=1)
    if attention.config.gate_position == "dense_output":
        return
    gated = groups if attention.config.gate_position in ("key", "value") else queries
    headwise = attention.config.gate_granularity == "headwise"
    cut(attention.g_proj.weight, torch.arange(gated.start, gated.stop) if headwise else rows(gated))


@pytest.mark.parametrize(
    ("position", "granularity"),
    [*product(["sdpa_output", "value", "key", "query"], ["elementwise", "headwise"]), ("dense_output", "elementwise")],
)
def test_halves_of_the_heads_add_up(position, granularity, tiny_config):
    """q, k, v, o and the gate cut to half the heads, as a rank or an engine does it, give that half's contribution."""
    config = tiny_config(
        gate_position=position, gate_granularity=granularity, num_hidden_layers=1, initializer_range=0.3
    )
    torch.manual_seed(1)
    model = GatedLlamaModel(config).eval()
    states = torch.randn(2, 7, config.hidden_size)
    rotary = model.rotary_emb(states, torch.arange(7)[None])
    mask = torch.full((7, 7), float("-inf")).triu(1)[None, None]

    def branch(attention):
        return attention(states, position_embeddings=rotary, attention_mask=mask)[0]

    full = branch(model.layers[0].self_attn)
    parts = []
    for half, (queries, groups) in enumerate(zip(HALVES, (slice(0, 1), slice(1, 2)), strict=True)):
        part = GatedLlamaModel(config).eval()
        part.load_state_dict(model.state_dict())
        keep_heads(part.layers[0].self_attn, queries, groups)
        parts.append(branch(part.layers[0].self_attn))
        assert not torch.allclose(parts[half], full)
    torch.testing.assert_close(sum(parts), full, rtol=1e-4, atol=1e-4)


PARALLEL_CELLS = {
    "none": {"gate_position": None},
    "G1": {},
    "G2": {"gate_position": "G2"},
    "G3": {"gate_position": "G3"},
    "G4": {"gate_position": "G4", "qk_norm": True},
    "G5": {"gate_position": "G5"},
    "headwise": {"gate_granularity": "headwise"},
    "shared": {"gate_head_shared": True},
    "shared headwise": {"gate_head_shared": True, "gate_granularity": "headwise"},
    "constant": {"gate_input": "constant"},
    "constant value headwise": {"gate_input": "constant", "gate_position": "G2", "gate_granularity": "headwise"},
    "constant shared": {"gate_input": "constant", "gate_head_shared": True},
    "constant dense": {"gate_input": "constant", "gate_position": "G5"},
    "states": {"gate_input": "states"},
    "fp32": {"gate_in_fp32": True, "gate_bias": True},
    "fp32 shared": {"gate_in_fp32": True, "gate_head_shared": True},
    "all biases and norms": {
        "gate_bias": True,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "qk_norm": True,
        "sdpa_output_norm": True,
    },
}


@pytest.mark.slow
def test_two_ranks_equal_one(tiny_model, tmp_path):
    """Tensor parallelism over gloo: logits and every gradient, for each kind of gate."""
    for name, overrides in PARALLEL_CELLS.items():
        model = tiny_model(num_hidden_layers=2, initializer_range=0.2, **overrides)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if ".self_attn.g_p" in parameter_name or parameter_name.endswith("bias"):
                    parameter.normal_(std=0.5)
        model.save_pretrained(tmp_path / name)
    script = Path(__file__).with_name("parallel_ranks.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run([*launcher, script, tmp_path], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
