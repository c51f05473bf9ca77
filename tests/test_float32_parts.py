"""What is float32 in a model of half precision: gates that ask for it and imported norm gains, by every route."""

import copy

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from gated_llama import GatedLlamaForCausalLM
from gated_llama.parts_gated import AttentionGate


IDS = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))

# Name -> fields, and which parameters they keep.
KEPT = {
    "projection": ({"gate_in_fp32": True, "gate_bias": True}, (".g_proj.",)),
    "constant": ({"gate_in_fp32": True, "gate_input": "constant"}, (".g_param",)),
    "states": ({"gate_in_fp32": True, "gate_input": "states"}, ()),
    "no gate": ({"gate_in_fp32": True, "gate_position": None}, ()),
    "norms": ({"norms_in_fp32": True, "qk_norm": True, "sdpa_output_norm": True}, ("norm.",)),
    "both": ({"gate_in_fp32": True, "norms_in_fp32": True, "gate_granularity": "headwise"}, (".g_proj.", "norm.")),
}


@pytest.fixture
def half(tiny_model, tmp_path):
    """`half(name)`: a model of bfloat16 with random gates and gains of many digits, as loaded; and its folder."""

    def make(name):
        model, generator = tiny_model(**KEPT[name][0]), torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if ".g_p" in parameter_name or parameter.ndim == 1:
                    noise = torch.randn(parameter.shape, generator=generator) / 2
                    parameter.copy_(1 + noise / 8 if "norm" in parameter_name else noise)
        model.save_pretrained(tmp_path / name)
        return AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16).eval(), tmp_path / name

    return make


def kept(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}


def expected(model, name) -> set[str]:
    return {parameter for parameter, _ in model.named_parameters() if any(part in parameter for part in KEPT[name][1])}


@pytest.mark.parametrize("name", KEPT)
def test_a_load_a_build_and_a_save_keep_them(name, half, tmp_path):
    """Of a model that was built in bfloat16, too: before, a save and a load changed its logits."""
    loaded, folder = half(name)
    built = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.bfloat16).eval()
    built.load_state_dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())
    assert bool(kept(loaded)) == bool(KEPT[name][1])
    assert kept(loaded) == kept(built) == expected(loaded, name)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(built(IDS).logits, loaded(IDS).logits)
    built.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert kept(again) == kept(built)
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in built.state_dict().items())
    assert torch.equal(again(IDS).logits, loaded(IDS).logits)


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_is_there(name, half):
    """The library matches these names with those of modules and parameters."""
    model, _ = half(name)
    names = {part for key in model.state_dict() for part in key.split(".")}
    assert model._keep_in_fp32_modules_strict <= names
    assert {type(module).__name__ for module in model.modules()} >= model._no_split_modules


@pytest.mark.parametrize("name", KEPT)
def test_layers_on_disk_compute_the_same(name, half, tmp_path):
    loaded, folder = half(name)
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "disk", "lm_head": "cpu"}
    places |= {f"model.layers.{layer}": "cpu" if layer == 1 else "disk" for layer in range(3)}
    offloaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=places, offload_folder=tmp_path / "disk"
    ).eval()
    assert next(offloaded.model.layers[0].parameters()).device.type == "meta"
    with torch.no_grad():
        assert torch.equal(offloaded(IDS).logits, loaded(IDS).logits)


@pytest.mark.parametrize("cast", ["to", "bfloat16", "half"])
@pytest.mark.parametrize("name", ["projection", "constant", "states"])
def test_a_cast_rounds_weights_but_not_scores(name, cast, half, tiny_model):
    """`.to(bfloat16)` is the user's word on storage; logits and scores are float32 all the same."""
    dtype = torch.float16 if cast == "half" else torch.bfloat16
    model = tiny_model(**KEPT[name][0])
    model.load_state_dict(half(name)[0].state_dict())
    model = model.to(dtype) if cast == "to" else getattr(model, cast)()
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    attention, seen = model.model.layers[0].self_attn, []
    attention.register_forward_pre_hook(lambda m, a, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True)
    attention.attn_gate.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    scores = model(IDS, output_gate_scores=True).gate_scores[0]
    hidden, states = seen
    logits = {
        "projection": lambda: torch.nn.functional.linear(
            hidden.float(), attention.g_proj.weight.float(), attention.g_proj.bias.float()
        ),
        "constant": lambda: attention.g_param.float(),
        "states": lambda: states.float(),
    }[name]()
    assert scores.dtype == torch.float32
    assert torch.equal(scores, torch.sigmoid(logits).view(scores.shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operation", ["multiply", "add"])
def test_logits_are_raised_before_the_activation(dtype, operation, tiny_config):
    """A tensor that gates itself: SiLU in float32, rounded once. In its own dtype it is rounded twice."""
    gate = AttentionGate(tiny_config(gate_input="states", gate_in_fp32=True, gate_operation=operation))
    states = torch.randn(4, 64).to(dtype)
    gated, scores = gate(states, states)
    wide = states.float()
    exact = wide * torch.sigmoid(wide) if operation == "multiply" else wide + torch.sigmoid(wide)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, torch.sigmoid(wide))
    assert torch.equal(gated, exact.to(dtype))
    narrow = states * torch.sigmoid(states) if operation == "multiply" else states + torch.sigmoid(states)
    assert not torch.equal(gated, narrow)


@pytest.fixture
def mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")  # a linear map does
@pytest.mark.parametrize("name", ["projection", "states", "norms", "both"])
def test_fsdp2_shards_a_bfloat16_model(name, half, mesh):
    """A group for each class that must not be split, as accelerate makes them: a group has one dtype."""
    loaded, _ = half(name)
    sharded = copy.deepcopy(loaded).train()
    for module in reversed(list(sharded.modules())):
        if type(module).__name__ in loaded._no_split_modules:
            fully_shard(module, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    output = sharded(IDS, labels=IDS)
    output.loss.backward()
    loaded.train()(IDS, labels=IDS).loss.backward()
    assert torch.equal(output.logits, loaded(IDS).logits)
    for key, parameter in loaded.named_parameters():
        found = sharded.get_parameter(key).grad.full_tensor()
        assert found.dtype == parameter.dtype
        assert torch.equal(found, parameter.grad), key


def test_float64_models_are_not_narrowed(tiny_config):
    torch.set_default_dtype(torch.float64)
    try:
        model = GatedLlamaForCausalLM(tiny_config(gate_in_fp32=True, norms_in_fp32=True))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
