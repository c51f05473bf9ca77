"""Every cell of the gate's grid against the equations, forward and gradients; cells without meaning refused."""

import pytest
import reference
import torch
from grid import AXES, cells, refusals, valid_cells
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from gated_llama import GatedLlamaConfig, GatedLlamaForCausalLM, GatedLlamaModel
from gated_llama.parts_gated import GATE_ACTIVATIONS, AttentionGate


DECODER = {
    "vocab_size": 24,
    "hidden_size": 20,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}
TOKENS = [3, 17, 5, 3]

# In float64 the model and the loops differ by the order of additions only: a few units of 2e-16 on values below 100.
EXACT = {"rtol": 0, "atol": 1e-11}


def exact_model(**overrides) -> GatedLlamaForCausalLM:
    """A float64 model. The library's RMSNorm computes in fp32 whatever its input, so torch's takes its place."""
    model = GatedLlamaForCausalLM(GatedLlamaConfig(**{**DECODER, **overrides})).double().eval()
    for name, module in list(model.named_modules()):
        if isinstance(module, Qwen3RMSNorm):
            norm = nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon, dtype=torch.float64)
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            model.set_submodule(name, norm)
    return model


def gate_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if ".self_attn.g_p" in name}


def loops(model, tokens=TOKENS):
    """The loops' logits and the leaves that they were computed from."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.state_dict().items()}
    # The library takes frequencies and angles in fp32, also in a float64 model.
    inv_freq = model.model.rotary_emb.inv_freq.float()
    return reference.decoder_logits(model.config, leaves, tokens, inv_freq), leaves


def assert_equals_loops(model, gradients=True, tokens=TOKENS, **tolerance):
    logits = model(torch.tensor([tokens])).logits[0]
    expected, leaves = loops(model, tokens)
    torch.testing.assert_close(logits, expected, **tolerance)
    if gradients:
        probe = torch.randn_like(expected)
        (logits * probe).sum().backward()
        (expected * probe).sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, leaves[name].grad, msg=name, **tolerance)


def decoder_of(index: int, cell: dict) -> dict:
    """Decoder switches that change from cell to cell with coprime periods, so that the grid crosses them."""
    options = {
        "qk_norm": index % 2 == 0,
        "sdpa_output_norm": index % 3 == 0,
        "gate_layers": [1] if index % 5 == 0 else None,
        "qkv_bias": index % 7 == 0,
        "o_bias": index % 7 < 2,
        "tie_word_embeddings": index % 11 == 0,
        "sliding_window": 2 if index % 3 == 1 else None,
        "num_key_value_heads": (2, 4, 1)[index % 3],
    }
    if refusals(cell, options["qk_norm"]):
        options["qk_norm"] = False
    return options


@pytest.mark.parametrize("operation", AXES["gate_operation"])
@pytest.mark.parametrize("activation", AXES["gate_activation"])
@pytest.mark.parametrize("position", AXES["gate_position"])
def test_every_cell_equals_the_loops(position, activation, operation):
    """At initialisation (forward) and with random gates and biases (forward and all gradients)."""
    grid = valid_cells(gate_position=position, gate_activation=activation, gate_operation=operation)
    assert len(grid) == (4 if position == "dense_output" else 13)
    for index, cell in enumerate(grid):
        options = decoder_of(index + len(position) + len(activation), cell)
        model = exact_model(**cell, **options)
        assert_equals_loops(model, gradients=False, tokens=TOKENS[:2], **EXACT)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".self_attn.g_p" in name or name.endswith("bias"):
                    parameter.normal_(std=0.7)
        assert_equals_loops(model, **EXACT)


@pytest.mark.parametrize("position", AXES["gate_position"])
def test_shipped_precision_equals_the_loops(position):
    """The model as users run it: fp32 with the library's own norms, against the loops in fp32."""
    model = GatedLlamaForCausalLM(GatedLlamaConfig(**DECODER, gate_position=position, qk_norm=True)).eval()
    # Two layers of sums over 20 products of order 1 in fp32 (eps 1.2e-7), logits of order 5.
    assert_equals_loops(model, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "cell", [{"gate_granularity": "headwise"}, {"gate_input": "constant"}, {"gate_input": "states"}]
)
def test_fp32_gate_equals_the_loops(cell):
    """With `gate_in_fp32` a float64 model's logits are rounded to fp32 on both sides, not always the same way."""
    model = exact_model(gate_position="sdpa_output", gate_in_fp32=True, **cell)
    with torch.no_grad():
        for parameter in gate_parameters(model).values():
            parameter.normal_(std=0.7)
    # Not to fp32: the gate's weights keep the model's dtype when that is wider.
    assert_equals_loops(model, gradients=False, rtol=0, atol=1e-5)


def test_size_of_the_grid():
    """4 positions with heads x 104 cells and the dense output's 32; QK-norm takes 24 from keys and 24 from queries."""
    assert len(valid_cells()) == 4 * 104 + 32
    assert len(valid_cells(qk_norm=True)) == 448 - 48


@pytest.mark.parametrize("qk_norm", [False, True])
def test_cells_are_accepted_exactly_when_they_have_a_meaning(qk_norm):
    for cell in cells():
        words = refusals(cell, qk_norm)
        if not words:
            GatedLlamaConfig(**DECODER, **cell, qk_norm=qk_norm)
            continue
        with pytest.raises(StrictDataclassError) as error:
            GatedLlamaConfig(**DECODER, **cell, qk_norm=qk_norm)
        assert any(word in str(error.value) for word in words), (cell, error.value)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("gate_position", "attention", "sdpa_output"),
        ("gate_position", "G6", "dense_output"),
        ("gate_granularity", "per_head", "headwise"),
        ("gate_operation", "mul", "multiply"),
        ("gate_activation", "tanh", "ns_sigmoid"),
        ("gate_input", "query", "hidden_states"),
        ("gate_init", "identity", "zeros"),
        ("gate_bias", "yes", "bool"),
        ("gate_layers", [], "gate_position=None"),
        ("gate_layers", [0, 0], "once"),
        ("gate_layers", [0, 2], "layers are 0 to 1"),
        ("gate_layers", [-1], "layers are 0 to 1"),
        ("gate_format_version", 2, "update gated-llama"),
    ],
)
def test_unknown_values_are_refused_with_the_allowed_ones(field, value, words):
    with pytest.raises(StrictDataclassError) as error:
        GatedLlamaConfig(**{**DECODER, "gate_position": "sdpa_output", field: value})
    message = str(error.value)
    assert field in message
    assert words in message


@pytest.mark.parametrize("alias", ["G1", "G2", "G3", "G4", "G5"])
def test_aliases_are_normalised(alias):
    position = AXES["gate_position"][int(alias[1]) - 1]
    assert GatedLlamaConfig(**DECODER, gate_position=alias).gate_position == position


# The hand checks.


def attention_gate(**overrides) -> AttentionGate:
    return AttentionGate(GatedLlamaConfig(**{**DECODER, "gate_position": "sdpa_output", **overrides}))


def logit(scores) -> torch.Tensor:
    return torch.logit(torch.tensor(scores, dtype=torch.float64))


def test_two_heads_by_hand():
    """Heads that read [4, -2] and [1, 3] with gates 0.1 and 0.5 write [0.4, -0.2] and [0.5, 1.5]."""
    states = torch.tensor([[4.0, -2.0], [1.0, 3.0]], dtype=torch.float64)
    gated, scores = attention_gate(gate_granularity="headwise")(states, logit([[0.1], [0.5]]))
    torch.testing.assert_close(gated, torch.tensor([[0.4, -0.2], [0.5, 1.5]], dtype=torch.float64))
    torch.testing.assert_close(scores, torch.tensor([[0.1], [0.5]], dtype=torch.float64))


def test_one_read_by_hand():
    """Weights (0.4, 0.6) over values (2, 1) and (0, 3) read (0.8, 2.2); gate (0.1, 0.8) writes (0.08, 1.76)."""
    weights, values = torch.tensor([0.4, 0.6]).double(), torch.tensor([[2.0, 1.0], [0.0, 3.0]]).double()
    states = (weights @ values).unsqueeze(0)
    torch.testing.assert_close(states, torch.tensor([[0.8, 2.2]]).double(), rtol=0, atol=1e-7)
    gated, _ = attention_gate()(states, logit([[0.1, 0.8]]))
    torch.testing.assert_close(gated, torch.tensor([[0.08, 1.76]]).double(), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("activation", "at_zero", "at_two"),
    [
        ("sigmoid", 0.5, 0.880797077978),
        ("silu", 0.0, 1.761594155956),
        ("identity", 0.0, 2.0),
        ("ns_sigmoid", 0.75, 0.940398538989),
    ],
)
def test_activations_by_hand(activation, at_zero, at_two):
    values = GATE_ACTIVATIONS[activation](torch.tensor([0.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(values, torch.tensor([at_zero, at_two], dtype=torch.float64), rtol=0, atol=1e-11)


def test_shared_scores_average_logits_before_the_activation():
    """Logits 0 and 4 average to 2: both heads get sigmoid(2) = 0.8808, not the mean score (0.5 + 0.982) / 2."""
    gated, scores = attention_gate(gate_head_shared=True)(torch.ones(2, 1), torch.tensor([[0.0], [4.0]]))
    torch.testing.assert_close(gated, torch.full((2, 1), 0.880797077978))
    assert scores.shape == (1, 1)


def test_scores_for_more_heads_than_there_are_fail():
    """One head and logits of two must not broadcast to two heads, as an unsharded gate on one rank's heads would."""
    with pytest.raises(RuntimeError, match="shape"):
        attention_gate()(torch.ones(1, 3, 1, 8), torch.zeros(2, 8))


def test_a_tensor_that_gates_itself_is_silu():
    states = torch.randn(2, 3, 4, 8)
    gated, _ = attention_gate(gate_input="states")(states, states)
    torch.testing.assert_close(gated, nn.functional.silu(states))


@pytest.mark.parametrize("position", AXES["gate_position"])
def test_zero_sigmoid_gates_halve_the_gated_tensor(position):
    """With W_g = 0 the score is exactly 0.5, so a plain model with that projection doubled gives the same bits."""
    gated = GatedLlamaForCausalLM(GatedLlamaConfig(**DECODER, gate_position=position, gate_init="zeros", o_bias=True))
    doubled = {
        "sdpa_output": "o_proj.weight",
        "value": "v_proj",
        "key": "k_proj",
        "query": "q_proj",
        "dense_output": "o_proj",
    }
    plain = GatedLlamaForCausalLM(GatedLlamaConfig(**DECODER, o_bias=True))
    plain.load_state_dict({k: v for k, v in gated.state_dict().items() if ".g_proj." not in k})
    ids = torch.tensor([TOKENS])
    before = plain(ids).logits
    with torch.no_grad():
        for name, parameter in gated.named_parameters():
            if f".self_attn.{doubled[position]}" in name:
                parameter.mul_(2)
    assert torch.equal(gated(ids).logits, before)


def forced(activation_bias: float, **overrides):
    """A headwise G1 model whose gate is held at sigmoid(activation_bias), and its ids."""
    config = GatedLlamaConfig(
        **DECODER,
        gate_position="sdpa_output",
        gate_bias=True,
        gate_granularity="headwise",
        gate_init="zeros",
        **overrides,
    )
    model = GatedLlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.g_proj.bias.fill_(activation_bias)
    return model


def test_gate_forced_to_one_is_plain_attention():
    model = forced(50.0)  # sigmoid(50) is 1 in fp32
    plain = GatedLlamaForCausalLM(GatedLlamaConfig(**DECODER)).eval()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if ".g_proj." not in k})
    ids = torch.tensor([TOKENS])
    assert torch.equal(model(ids).logits, plain(ids).logits)


def test_gate_forced_to_zero_leaves_the_residual_alone():
    model = forced(-200.0)  # sigmoid(-200) is 0 in fp32
    seen = {}
    model.model.layers[0].self_attn.register_forward_hook(lambda module, args, output: seen.update(branch=output[0]))
    model(torch.tensor([TOKENS]))
    assert not seen["branch"].any()


def derivative(activation: str, u: torch.Tensor) -> torch.Tensor:
    """d act / du, written out."""
    s = 1 / (1 + torch.exp(-u))
    return {
        "sigmoid": s * (1 - s),
        "silu": s + u * s * (1 - s),
        "identity": torch.ones_like(u),
        "ns_sigmoid": s * (1 - s) / 2,
    }[activation]


@pytest.mark.parametrize("operation", AXES["gate_operation"])
@pytest.mark.parametrize("activation", AXES["gate_activation"])
def test_jacobian(activation, operation):
    """With y = A x and g = act(B x): J = diag(g) A + diag(y) diag(g') B for y * g, and A + diag(g') B for y + g."""
    read, write, x = torch.randn(6, 5).double(), torch.randn(6, 5).double(), torch.randn(5).double()
    gate = attention_gate(gate_activation=activation, gate_operation=operation)

    def branch(x):
        return gate((read @ x).unsqueeze(0), (write @ x).unsqueeze(0))[0].squeeze(0)

    y, u = read @ x, write @ x
    scores, slopes = reference.ACTIVATIONS[activation](u), derivative(activation, u)
    if operation == "multiply":
        expected = torch.diag(scores) @ read + torch.diag(y) @ torch.diag(slopes) @ write
    else:
        expected = read + torch.diag(slopes) @ write
    torch.testing.assert_close(torch.autograd.functional.jacobian(branch, x), expected, **EXACT)


# Parameter counts.


def test_parameter_counts_equal_the_built_modules():
    for cell in valid_cells(gate_activation="sigmoid", gate_operation="multiply"):
        for gate_layers in (None, [1]):
            config = GatedLlamaConfig(**DECODER, **cell, gate_layers=gate_layers)
            with torch.device("meta"):
                built = gate_parameters(GatedLlamaModel(config))
            expected = config.gate_parameters_per_layer * len(config.gated_layers)
            assert sum(parameter.numel() for parameter in built.values()) == expected, cell


MOE_15A2B = {
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


@pytest.mark.parametrize(
    ("position", "granularity", "count"),
    [
        ("G1", "elementwise", 201_326_592),
        ("G4", "elementwise", 201_326_592),
        ("G1", "headwise", 1_572_864),
        ("G4", "headwise", 1_572_864),
        ("G2", "elementwise", 25_165_824),
        ("G3", "elementwise", 25_165_824),
        ("G2", "headwise", 196_608),
        ("G3", "headwise", 196_608),
        ("G5", "elementwise", 100_663_296),
    ],
)
def test_added_parameters_of_the_papers_model(position, granularity, count):
    """Table 1 of the paper prints 201, 1.6, 25, 0.2 and 100 million."""
    config = GatedLlamaConfig(**MOE_15A2B, gate_position=position, gate_granularity=granularity)
    assert config.gate_parameters_per_layer * len(config.gated_layers) == count


def test_sharing_heads_keeps_the_full_projection():
    """Table 1, row 12: the shared gate counts like the head-specific one."""
    shared = GatedLlamaConfig(**MOE_15A2B, gate_position="G1", gate_head_shared=True)
    assert shared.gate_parameters_per_layer * 24 == 201_326_592


@pytest.mark.parametrize(("granularity", "scalars"), [("elementwise", 16_777_216), ("headwise", 131_072)])
def test_gate_buffer_at_4096_tokens(granularity, scalars):
    heads, width = GatedLlamaConfig(**MOE_15A2B, gate_position="G1", gate_granularity=granularity).gate_shape
    assert heads * width * 4096 == scalars


@pytest.mark.parametrize(
    ("gate", "ffn", "total"),
    [
        ({}, 6144, 1_720_837_120),
        ({"gate_position": "G1", "gate_granularity": "headwise"}, 6144, 1_721_754_624),
        ({"gate_position": "G1"}, 5504, 1_728_177_152),
    ],
)
def test_totals_of_the_released_models(gate, ffn, total):
    """The released 1.7B models: baseline, headwise, and elementwise with a narrower FFN."""
    config = GatedLlamaConfig(
        vocab_size=152064,
        hidden_size=2048,
        intermediate_size=ffn,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        qk_norm=True,
        tie_word_embeddings=True,
        **gate,
    )
    with torch.device("meta"):
        model = GatedLlamaForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == total
