"""`gate_override`: the documented formula, nesting, restoration, refusals."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gated_llama import GatedLlamaForCausalLM, gate_override, neutral_scores


IDS = torch.tensor([[5, 17, 33, 2, 60, 41]])
POSITIONS = ["sdpa_output", "value", "key", "query", "dense_output"]


def ungated(model):
    """The same weights without the gates."""
    plain = GatedLlamaForCausalLM(type(model.config)(**{**model.config.to_dict(), "gate_position": None})).eval()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if ".self_attn.g_p" not in k})
    return plain


@pytest.fixture
def gated(tiny_model, randomize_gates):
    def make(**overrides):
        return randomize_gates(tiny_model(**overrides))

    return make


@pytest.mark.parametrize("position", POSITIONS)
def test_one_is_plain_attention_bitwise(gated, position):
    model = gated(gate_position=position)
    plain, own = ungated(model)(IDS).logits, model(IDS).logits
    with gate_override(model, 1.0):
        assert torch.equal(model(IDS).logits, plain)
    assert not torch.allclose(own, plain)
    assert torch.equal(model(IDS).logits, own)


@pytest.mark.parametrize("activation", ["sigmoid", "silu", "identity", "ns_sigmoid"])
@pytest.mark.parametrize(
    "overrides", [{}, {"gate_head_shared": True}, {"gate_granularity": "headwise"}, {"gate_input": "constant"}]
)
def test_zero_is_what_an_additive_gate_adds(gated, activation, overrides):
    model = gated(gate_operation="add", gate_activation=activation, **overrides)
    with gate_override(model, 0.0):
        assert torch.equal(model(IDS).logits, ungated(model)(IDS).logits)


def test_zero_removes_the_branch(gated):
    """Without attention, tokens do not see each other: a token's logits are those of the token alone."""
    model = gated()
    with gate_override(model, 0.0):
        torch.testing.assert_close(model(IDS).logits[:, 3:4], model(IDS[:, 3:4]).logits)
    assert not torch.allclose(model(IDS).logits[:, 3:4], model(IDS[:, 3:4]).logits)


@pytest.mark.parametrize(("operation", "expected"), [("multiply", lambda y, s: y * s), ("add", lambda y, s: y + s)])
@pytest.mark.parametrize("shape", [(), (4, 1), (1, 16), (4, 16), (6, 4, 1), (1, 6, 1, 16)])
def test_formula(gated, operation, expected, shape):
    model, seen = gated(gate_operation=operation, gate_granularity="headwise"), []
    model.model.layers[1].self_attn.attn_gate.register_forward_hook(
        lambda module, args, output: seen.append((args[0], output))
    )
    scores = torch.randn(shape)
    with gate_override(model, scores):
        recorded = model.model(IDS, output_gate_scores=True).gate_scores
    states, (gated_states, applied) = seen[0]
    torch.testing.assert_close(gated_states, expected(states, scores), rtol=0, atol=0)
    assert recorded[1] is applied
    assert torch.equal(applied, scores.expand(torch.broadcast_shapes(shape, (1, 6, 4, 1))))


def test_layers(gated):
    """Overriding layer by layer equals overriding all; a mapping leaves the other layers alone."""
    model = gated(gate_layers=[0, 2])
    with gate_override(model, 1.0):
        everywhere = model(IDS).logits
    with gate_override(model, {0: 1.0, 2: torch.ones(4, 16)}):
        assert torch.equal(model(IDS).logits, everywhere)
    with gate_override(model, {2: 1.0}):
        scores = model.model(IDS, output_gate_scores=True).gate_scores
    assert torch.equal(scores[1], torch.ones_like(scores[1]))
    torch.testing.assert_close(scores[0], model.model(IDS, output_gate_scores=True).gate_scores[0])


def test_nesting_and_exceptions(gated):
    model = gated()
    own = model(IDS).logits
    with gate_override(model, 0.25):
        quarter = model(IDS).logits
        with gate_override(model, {1: 1.0}):
            scores = model.model(IDS, output_gate_scores=True).gate_scores
            assert [score.unique().tolist() for score in scores] == [[0.25], [1.0], [0.25]]
        assert torch.equal(model(IDS).logits, quarter)
        with pytest.raises(KeyboardInterrupt), gate_override(model, 1.0):
            raise KeyboardInterrupt
        assert torch.equal(model(IDS).logits, quarter)
    assert torch.equal(model(IDS).logits, own)


def test_gradients_still_reach_the_branch(gated):
    model = gated()
    with gate_override(model, 0.5):
        model(IDS, labels=IDS).loss.backward()
    assert model.model.layers[0].self_attn.v_proj.weight.grad.any()
    gradient = model.model.layers[0].self_attn.g_proj.weight.grad
    assert gradient is None or not gradient.any()


def test_a_compiled_model_follows(gated):
    model = gated()
    plain = ungated(model)(IDS).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    own = compiled(IDS).logits
    with gate_override(compiled, 1.0):
        torch.testing.assert_close(compiled(IDS).logits, plain)
    torch.testing.assert_close(compiled(IDS).logits, own)


def test_models_without_gates_are_refused(tiny_model):
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(ValueError, match="not a gated_llama model"), gate_override(llama, 1.0):
        pass
    with pytest.raises(ValueError, match="gate_position is None"), gate_override(tiny_model(gate_position=None), 1.0):
        pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({1: 1.0}, r"Layers \[1\] have no gate; the gated layers are \[0, 2\]"),
        ({"0": 1.0}, "the gated layers are"),
        ("open", "a number or a tensor"),
        (None, "a number or a tensor"),
        (torch.ones(3), r"\(3,\) do not broadcast"),
        (torch.ones(2, 16), "do not broadcast"),
        (torch.ones(1, 1, 1, 4, 16), "do not broadcast"),
    ],
)
def test_bad_values_are_refused(gated, value, words):
    model = gated(gate_layers=[0, 2])
    own = model(IDS).logits
    with pytest.raises(ValueError, match=words), gate_override(model, value):
        pass
    assert torch.equal(model(IDS).logits, own)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, 1.0),
        ({"gate_operation": "add", "gate_activation": "silu"}, 0.0),
        ({"gate_retrofit": {"policy": "identity", "fold": {"v_proj.weight": 2.0, "v_proj.bias": 2.0}}}, 0.5),
        ({"gate_retrofit": {"policy": "open", "bias": 4.0, "fold": {}}}, 1.0),
    ],
)
def test_neutral_scores(tiny_model, overrides, expected):
    assert neutral_scores(tiny_model(**overrides).config) == expected


def test_there_are_no_neutral_scores_between_two_folds(tiny_model):
    record = {"policy": "transplant", "fold": None, "strength": 0.5}
    with pytest.raises(ValueError, match=r"merged at strength 0\.5"):
        neutral_scores(tiny_model(gate_retrofit=record).config)


def test_neutral_scores_head_by_head(tiny_model):
    record = {"policy": "transplant", "fold": {}, "identity_heads": {"1": [0, 3]}}
    scores = neutral_scores(tiny_model(gate_retrofit=record).config)
    assert scores[0].item() == 1.0
    assert scores[1].flatten().tolist() == [0.5, 1.0, 1.0, 0.5]
