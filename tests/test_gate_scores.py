"""`output_gate_scores=True`: from the decoder and from every head, with gradients, and through what wraps a model."""

import copy
import pickle

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils import _pytree as pytree
from transformers import GenerationMixin

from gated_llama import (
    GatedLlamaForCausalLM,
    GatedLlamaForQuestionAnswering,
    GatedLlamaForSequenceClassification,
    GatedLlamaForTokenClassification,
)


IDS = torch.randint(3, 96, (3, 12), generator=torch.Generator().manual_seed(1))
SPANS = {"start_positions": torch.tensor([1, 2, 3]), "end_positions": torch.tensor([4, 5, 6])}
HEADS = {
    GatedLlamaForCausalLM: {"labels": IDS},
    GatedLlamaForSequenceClassification: {"labels": torch.tensor([0, 1, 1])},
    GatedLlamaForTokenClassification: {"labels": IDS % 2},
    GatedLlamaForQuestionAnswering: SPANS,
}
heads = pytest.mark.parametrize("head", HEADS)


@pytest.fixture
def build(tiny_config, randomize_gates):
    """`build(head, **overrides)`: a model in eval mode with random gates; layer 1 has none."""

    def make(head=GatedLlamaForCausalLM, **overrides):
        torch.manual_seed(0)
        return randomize_gates(
            head(tiny_config(**{"num_labels": 2, "pad_token_id": 0, "gate_layers": [0, 2], **overrides}))
        ).eval()

    return make


def assert_equal(found, expected):
    assert len(found) == len(expected) == 2
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@heads
def test_every_head_returns_them(head, build):
    """Beside everything else, as its last field; without being asked it returns None there."""
    model = build(head)
    expected = model.model(IDS, output_gate_scores=True).gate_scores
    output = model(IDS, **HEADS[head], output_gate_scores=True)
    assert_equal(output.gate_scores, expected)
    assert [score.shape for score in output.gate_scores] == [(3, 12, 4, 16)] * 2
    plain = model(IDS, **HEADS[head])
    assert plain.gate_scores is None
    assert "gate_scores" not in plain
    assert type(output) is type(plain)
    assert list(output)[-1] == "gate_scores"
    for name, value in plain.items():
        assert name == "cache" or torch.equal(output[name], value), name
    assert torch.equal(plain.loss, super(head, model).forward(IDS, **HEADS[head]).loss)


@heads
def test_tuples_and_the_configuration(head, build):
    model = build(head)
    expected = model(IDS, output_gate_scores=True, output_hidden_states=True)
    as_tuple = model(IDS, output_gate_scores=True, output_hidden_states=True, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert len(as_tuple) == len(expected)
    assert_equal(as_tuple[-1], expected.gate_scores)
    assert torch.equal(as_tuple[0], expected[0])
    model.config.output_gate_scores = True
    assert_equal(model(IDS).gate_scores, expected.gate_scores)
    assert_equal(model.model(IDS).gate_scores, expected.gate_scores)
    assert model(IDS, output_gate_scores=False).gate_scores is None


@heads
def test_a_penalty_on_scores_trains_the_gates(head, build):
    """Also under activation checkpointing: the same gradients."""
    model, gradients = build(head).train(), []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        sum(score.square().mean() for score in model(IDS, output_gate_scores=True).gate_scores).backward()
        gradients.append([layer.self_attn.g_proj.weight.grad.clone() for layer in model.model.layers[::2]])
    assert all(gradient.any() for gradient in gradients[0])
    assert_equal(*gradients)


@heads
def test_reentrant_checkpointing_is_refused(head, build):
    """Its scores have no gradient. Where nothing is checkpointed there is nothing to refuse."""
    model = build(head).train()
    expected = model(IDS, output_gate_scores=True).gate_scores
    model.activation_checkpointing_enable({"use_reentrant": True})
    for call in (model, model.model):
        with pytest.raises(ValueError, match="use_reentrant=False"):
            call(IDS, output_gate_scores=True)
        call(IDS)
        with torch.no_grad():
            assert_equal(call(IDS, output_gate_scores=True).gate_scores, expected)
    assert_equal(model.eval()(IDS, output_gate_scores=True).gate_scores, expected)


def test_generate_says_that_it_has_no_place_for_them(build):
    """Rather than dropping them; those of a text that was generated come from a pass over it."""
    model = build()
    with pytest.raises(ValueError, match="output_gate_scores"):
        model.generate(IDS, max_new_tokens=2, output_gate_scores=True, return_dict_in_generate=True)


def test_generation_is_declared():
    assert GenerationMixin in GatedLlamaForCausalLM.__bases__


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's compiler imports it
def test_a_compiled_model_returns_them(build):
    model = build(num_hidden_layers=2, gate_layers=None)
    expected = model(IDS, output_gate_scores=True)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found = compiled(IDS, output_gate_scores=True)
    assert_equal(found.gate_scores, expected.gate_scores)
    assert compiled(IDS).gate_scores is None


@pytest.mark.parametrize("decoder", [False, True])
@heads
def test_outputs_can_be_mapped_and_pickled(head, decoder, build):
    """As FSDP, DDP and exporters take them apart and build them again."""
    model = build(head)
    output = (model.model if decoder else model)(IDS, output_gate_scores=True, use_cache=False)
    doubled = pytree.tree_map(lambda tensor: 2 * tensor, output)
    assert type(doubled) is type(output)
    assert_equal(doubled.gate_scores, [2 * score for score in output.gate_scores])
    assert_equal(pickle.loads(pickle.dumps(output)).gate_scores, output.gate_scores)


@pytest.fixture
def mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")  # a linear map does
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)])
@heads
def test_a_sharded_model_returns_them(head, policy, build, mesh):
    """FSDP2 takes inputs and outputs apart and builds them again."""
    model = build(head)
    sharded = copy.deepcopy(model)
    for module in (*sharded.model.layers, sharded):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    found = sharded(IDS, output_gate_scores=True).gate_scores
    if policy.param_dtype is None:
        assert_equal(found, model(IDS, output_gate_scores=True).gate_scores)
    assert {score.dtype for score in found} == {policy.param_dtype or torch.float32}


@heads
def test_a_sharded_decoder_says_that_nothing_is_recorded(head, build, mesh):
    """The library's records are kept by the name of the class, which `fully_shard` changes."""
    sharded = build(head)
    fully_shard(sharded.model, mesh=mesh)
    with pytest.raises(ValueError, match="records nothing in a FSDPGatedLlamaModel"):
        sharded(IDS, output_gate_scores=True)
    assert sharded(IDS).gate_scores is None


@heads
def test_an_offloaded_decoder_returns_them(head, build, tmp_path):
    model = build(head)
    model.save_pretrained(tmp_path / "model")
    places = dict.fromkeys([name for name, _ in model.named_children() if name != "model"], "cpu")
    places |= {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    offloaded = head.from_pretrained(tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk").eval()
    with torch.no_grad():
        found = offloaded(IDS, output_gate_scores=True)
    assert_equal(found.gate_scores, model(IDS, output_gate_scores=True).gate_scores)
