"""Row orders of stored gates: fixtures written by hand, bitwise round trips, and what tells layouts apart."""

import itertools

import pytest
import torch

from gated_llama.convert import layouts
from gated_llama.convert.layouts import LAYOUTS, HeadGeometry


# Which stored rows hold which projection, written out by hand for heads of two rows: (layout, query heads, key/value
# heads, gate rows a head) -> rows of each projection in the order of its heads.
HAND_WRITTEN = {
    ("per_kv_group", 4, 2, 2): {"q": [0, 1, 2, 3, 8, 9, 10, 11], "g": [4, 5, 6, 7, 12, 13, 14, 15]},
    ("per_kv_group", 4, 4, 2): {"q": [0, 1, 4, 5, 8, 9, 12, 13], "g": [2, 3, 6, 7, 10, 11, 14, 15]},
    ("per_kv_group", 4, 1, 2): {"q": [0, 1, 2, 3, 4, 5, 6, 7], "g": [8, 9, 10, 11, 12, 13, 14, 15]},
    ("per_kv_group", 4, 2, 1): {"q": [0, 1, 2, 3, 6, 7, 8, 9], "g": [4, 5, 10, 11]},
    ("per_kv_group", 4, 4, 1): {"q": [0, 1, 3, 4, 6, 7, 9, 10], "g": [2, 5, 8, 11]},
    ("per_kv_group", 4, 1, 1): {"q": [0, 1, 2, 3, 4, 5, 6, 7], "g": [8, 9, 10, 11]},
    ("per_head", 4, 2, 2): {"q": [0, 1, 4, 5, 8, 9, 12, 13], "g": [2, 3, 6, 7, 10, 11, 14, 15]},
    ("per_head", 4, 4, 2): {"q": [0, 1, 4, 5, 8, 9, 12, 13], "g": [2, 3, 6, 7, 10, 11, 14, 15]},
    ("per_head", 4, 1, 2): {"q": [0, 1, 4, 5, 8, 9, 12, 13], "g": [2, 3, 6, 7, 10, 11, 14, 15]},
    ("megatron", 4, 2, 2): {
        "q": [0, 1, 2, 3, 12, 13, 14, 15],
        "g": [4, 5, 6, 7, 16, 17, 18, 19],
        "k": [8, 9, 20, 21],
        "v": [10, 11, 22, 23],
    },
    ("megatron", 4, 4, 2): {
        "q": [0, 1, 8, 9, 16, 17, 24, 25],
        "g": [2, 3, 10, 11, 18, 19, 26, 27],
        "k": [4, 5, 12, 13, 20, 21, 28, 29],
        "v": [6, 7, 14, 15, 22, 23, 30, 31],
    },
    ("megatron", 4, 1, 2): {
        "q": [0, 1, 2, 3, 4, 5, 6, 7],
        "g": [8, 9, 10, 11, 12, 13, 14, 15],
        "k": [16, 17],
        "v": [18, 19],
    },
    ("megatron_tail", 4, 2, 1): {
        "q": [0, 1, 2, 3, 8, 9, 10, 11],
        "k": [4, 5, 12, 13],
        "v": [6, 7, 14, 15],
        "g": [16, 17, 18, 19],
    },
    ("megatron_tail", 4, 4, 1): {
        "q": [0, 1, 6, 7, 12, 13, 18, 19],
        "k": [2, 3, 8, 9, 14, 15, 20, 21],
        "v": [4, 5, 10, 11, 16, 17, 22, 23],
        "g": [24, 25, 26, 27],
    },
    ("megatron_tail", 4, 1, 1): {
        "q": [0, 1, 2, 3, 4, 5, 6, 7],
        "k": [8, 9],
        "v": [10, 11],
        "g": [12, 13, 14, 15],
    },
    ("halves", 4, 2, 2): {"q": [0, 1, 2, 3, 4, 5, 6, 7], "g": [8, 9, 10, 11, 12, 13, 14, 15]},
    ("halves", 4, 2, 1): {"q": [0, 1, 2, 3, 4, 5, 6, 7], "g": [8, 9, 10, 11]},
    ("separate", 4, 2, 2): {"q": [0, 1, 2, 3, 4, 5, 6, 7]},
}

GEOMETRIES = [
    HeadGeometry(heads=groups * kv, kv_heads=kv, head_dim=dim, gate_width=width)
    for groups, kv, dim in itertools.product((1, 2, 3, 8), (1, 2, 4), (2, 6))
    for width in (1, dim)
]


@pytest.mark.parametrize("case", HAND_WRITTEN, ids=str)
def test_rows_are_where_the_format_puts_them(case):
    name, heads, kv_heads, gate_width = case
    geometry = HeadGeometry(heads, kv_heads, 2, gate_width)
    expected = HAND_WRITTEN[case]
    numbered = torch.arange(sum(map(len, expected.values())))
    for tensor in (numbered, numbered[:, None] * 10 + torch.arange(3)):  # a bias, a weight
        parts = LAYOUTS[name].split(tensor, geometry)
        assert parts.keys() == expected.keys()
        for part, rows in expected.items():
            assert torch.equal(parts[part], tensor[rows]), part
        assert torch.equal(LAYOUTS[name].join(parts, geometry), tensor)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_and_join_are_inverse_bit_for_bit(name, dtype):
    layout = LAYOUTS[name]
    for seed, geometry in enumerate(GEOMETRIES):
        rows = {part: geometry.rows(part) for part in layout.pattern + layout.tail}
        for trailing in ((), (5,)):
            torch.manual_seed(seed)
            stored = torch.randn(sum(rows.values()), *trailing).to(dtype)
            parts = layout.split(stored, geometry)
            assert {part: tensor.shape[0] for part, tensor in parts.items()} == rows
            assert torch.equal(layout.join(parts, geometry), stored)
            again = layout.split(layout.join(parts, geometry), geometry)
            assert all(torch.equal(again[part], parts[part]) for part in parts)


def test_split_tensors_own_their_memory():
    stored = torch.zeros(16, 3)
    parts = LAYOUTS["per_kv_group"].split(stored, HeadGeometry(4, 2, 2, 2))
    parts["q"].fill_(1), parts["g"].fill_(2)
    assert not stored.any()
    assert all(part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes for part in parts.values())


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_layouts_of_equal_shape_agree_only_without_grouping(geometry):
    stored = torch.arange(geometry.rows("q") + geometry.rows("g"))
    group, head, halves = (LAYOUTS[name].split(stored, geometry) for name in ("per_kv_group", "per_head", "halves"))
    assert torch.equal(group["q"], head["q"]) == (geometry.heads == geometry.kv_heads)
    assert torch.equal(group["q"], halves["q"]) == (geometry.kv_heads == 1)
    assert torch.equal(head["q"], halves["q"]) == (geometry.heads == 1)


def test_the_paper_and_megatron_share_their_order():
    geometry = HeadGeometry(6, 2, 4, 4)
    torch.manual_seed(0)
    parts = {part: torch.randn(geometry.rows(part), 3) for part in "qgkv"}
    rows_of_k_and_v = {24 + r for r in range(8)} | {56 + r for r in range(8)}
    kept = [row for row in range(64) if row not in rows_of_k_and_v]
    linear_qkv = LAYOUTS["megatron"].join(parts, geometry)
    paper = LAYOUTS["per_kv_group"].join({part: parts[part] for part in "qg"}, geometry)
    assert torch.equal(linear_qkv[kept], paper)


def test_wrong_sizes_are_refused():
    geometry = HeadGeometry(4, 2, 2, 2)
    with pytest.raises(ValueError, match=r"has 8 rows; the layout \[q g\] per group .* needs 16"):
        LAYOUTS["per_kv_group"].split(torch.zeros(8, 3), geometry)
    with pytest.raises(ValueError, match="needs 12"):
        LAYOUTS["per_kv_group"].split(torch.zeros(16, 3), HeadGeometry(4, 2, 2, 1))
    with pytest.raises(ValueError, match=r"needs {'q': 8, 'g': 8}"):
        LAYOUTS["per_head"].join({"q": torch.zeros(8, 3)}, geometry)
    with pytest.raises(ValueError, match=r"needs {'q': 8}"):
        LAYOUTS["separate"].join({"q": torch.zeros(8), "g": torch.zeros(8)}, geometry)
    with pytest.raises(ValueError, match="Unknown gate layout 'interleaved'; use one of separate, per_kv_group"):
        layouts.get_layout("interleaved")
    assert layouts.get_layout("per-kv-group") is LAYOUTS["per_kv_group"]


@pytest.mark.parametrize("shape", [(3,), (3, 5)])
def test_headwise_gates_repeat_and_merge(shape):
    torch.manual_seed(0)
    gate = torch.randn(shape)
    elementwise = layouts.repeat_headwise(gate, 4)
    assert [torch.equal(elementwise[row], gate[row // 4]) for row in range(12)] == [True] * 12
    assert torch.equal(layouts.merge_elementwise(elementwise, 4), gate)
    elementwise[9] += 1e-6
    with pytest.raises(ValueError, match=r"differ within head 2 and 0 more"):
        layouts.merge_elementwise(elementwise, 4)


def test_narrow_gates_are_padded_with_zeros():
    torch.manual_seed(0)
    gate, hidden_states = torch.randn(4, 12), torch.randn(7, 40)
    wide = layouts.widen_gate(gate, 40)
    torch.testing.assert_close(hidden_states @ wide.T, hidden_states[:, :12] @ gate.T)
    with pytest.raises(ValueError, match="reads 12 coordinates of a hidden state that has 8"):
        layouts.widen_gate(gate, 8)


def test_zero_centred_norms_shift_exactly_where_stated():
    torch.manual_seed(0)
    gain = torch.empty(4096).uniform_(0.5, 2)
    assert torch.equal(layouts.norm_from_zero_centred(layouts.norm_to_zero_centred(gain)), gain)
    stored = (torch.randn(4096) * 0.3).bfloat16()
    stored = stored[stored.abs() >= 2**-16]
    assert torch.equal(layouts.norm_to_zero_centred(layouts.norm_from_zero_centred(stored)).bfloat16(), stored)
    # bf16 cannot hold the gain itself, so the shift must not return the dtype that it was given.
    assert layouts.norm_from_zero_centred(stored).dtype == torch.float32
    assert not torch.equal(layouts.norm_from_zero_centred(stored).bfloat16().float(), stored.float() + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_doubled_sigmoid_folds_into_o_proj_and_back(dtype):
    torch.manual_seed(0)
    weight, states, logits = torch.randn(6, 8, dtype=dtype), torch.randn(5, 8, dtype=dtype), torch.randn(5, 8)
    gate = torch.sigmoid(logits).to(dtype)
    folded = layouts.fold_scale(weight, 2.0)
    assert torch.equal((states * gate) @ folded.T, (states * (2 * gate)) @ weight.T)
    assert torch.equal(layouts.fold_scale(folded, 0.5), weight)


def test_folds_that_would_round_or_overflow_are_refused():
    weight = torch.tensor([[40000.0]])
    for scale in (3.0, 0.3, 0.0, -2.0, float("inf")):
        with pytest.raises(ValueError, match="not a positive power of two"):
            layouts.fold_scale(weight, scale)
    with pytest.raises(ValueError, match=r"torch\.float16 cannot hold the weight times 2.0"):
        layouts.fold_scale(weight.half(), 2.0)


@pytest.mark.parametrize("true", ["per_kv_group", "per_head", "halves"])
@pytest.mark.parametrize("gate_width", [1, 16])
def test_the_size_of_rows_gives_a_wrong_layout_away(true, gate_width):
    geometry = HeadGeometry(heads=8, kv_heads=2, head_dim=16, gate_width=gate_width)

    def contrasts(ratio, seed):
        torch.manual_seed(seed)
        # Heads of a trained model differ in size among themselves: 10 % here.
        sizes = {"q": 1.0, "g": ratio}
        parts = {
            part: torch.randn(geometry.rows(part), 64) * size * (1 + 0.1 * torch.randn(geometry.rows(part), 1))
            for part, size in sizes.items()
        }
        return layouts.layout_contrasts(LAYOUTS[true].join(parts, geometry), geometry)

    layers = [contrasts(1.25, seed) for seed in range(12)]
    for declared in layouts.CONFUSABLE:
        named = layouts.implausible_layout(declared, layers)
        assert named == (None if declared == true else true), declared
    assert layouts.implausible_layout(true, [contrasts(1.0, seed) for seed in range(12)]) is None


def test_layouts_without_a_rival_are_never_doubted():
    assert layouts.implausible_layout("separate", [{"per_head": 1.0, "per_kv_group": 0.0, "halves": 0.0}]) is None
    assert layouts.implausible_layout("per_head", []) is None
