"""What others do to the modules: LoRA, offload, device maps, int8 replacements. The gate follows."""

import copy

import peft
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, TorchAoConfig

from gated_llama import GatedLlamaForCausalLM, gate_override


IDS = torch.randint(3, 96, (2, 10), generator=torch.Generator().manual_seed(1))

GATES = {
    "elementwise": {},
    "headwise bias": {"gate_granularity": "headwise", "gate_bias": True},
    "value shared": {"gate_position": "value", "gate_head_shared": True},
    "dense fp32": {"gate_position": "dense_output", "gate_in_fp32": True},
    "constant": {"gate_input": "constant"},
}
PROJECTED = [name for name in GATES if name != "constant"]


@pytest.fixture
def gated(tiny_model, randomize_gates):
    return lambda name="elementwise", **overrides: randomize_gates(tiny_model(**GATES[name], **overrides))


# LoRA.

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "g_proj"]


def trained(model, **options):
    """Two steps of an adapter; the adapted model in eval mode."""
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **options)).train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(2):
        loss = adapted(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] < losses[0]
    return adapted.eval()


def adapted_modules(model) -> set[str]:
    return {name.split(".lora_A")[0] for name, _ in model.named_modules() if name.endswith("lora_A")}


@pytest.mark.parametrize("name", PROJECTED)
def test_lora_merges_and_reloads(name, gated, tmp_path):
    """The adapter alone reloads to equal logits; merged weights give them too and survive a save."""
    before = gated(name)(IDS).logits
    model = trained(gated(name), target_modules=TARGETS)
    assert {module.rsplit(".", 1)[1] for module in adapted_modules(model)} == set(TARGETS)
    expected = model(IDS).logits.detach()
    assert not torch.allclose(expected, before, atol=1e-2)

    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(gated(name), tmp_path / "adapter").eval()
    assert torch.equal(again(IDS).logits, expected)

    merged = model.merge_and_unload()
    # The sum of two products against the product of a sum, in fp32.
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert type(loaded) is GatedLlamaForCausalLM
    assert torch.equal(loaded(IDS).logits, merged(IDS).logits)


ZERO_GATES = {
    "lora": (peft.LoraConfig(target_modules=["g_proj"]), "trains"),
    "adalora": (peft.AdaLoraConfig(target_modules=["g_proj"], total_step=9), "trains"),
    "loha": (peft.LoHaConfig(target_modules=["g_proj"]), "trains"),
    "lokr": (peft.LoKrConfig(target_modules=["g_proj"]), "trains"),
    "vera": (peft.VeraConfig(target_modules=["g_proj"], r=4), "trains"),
    "copy": (peft.LNTuningConfig(target_modules=["g_proj"]), "trains"),
    "dora": (peft.LoraConfig(target_modules=["g_proj"], use_dora=True), "nan"),
    "pissa": (peft.LoraConfig(target_modules=["g_proj"], init_lora_weights="pissa"), "no gradient"),
    "ia3": (peft.IA3Config(target_modules=["g_proj"], feedforward_modules=[]), "no gradient"),
    "oft": (peft.OFTConfig(target_modules=["g_proj"], r=0, oft_block_size=4), "no gradient"),
}


@pytest.mark.parametrize("name", ZERO_GATES)
def test_which_methods_fit_gates_that_start_at_zero(name, tiny_model):
    """As README says: what adds to the weights fits, what multiplies them does not."""
    config, outcome = ZERO_GATES[name]
    model = get_peft_model(tiny_model(gate_init="zeros"), config)
    model(input_ids=IDS, labels=IDS).loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    if outcome == "nan":
        assert any(gradient.isnan().any() for gradient in gradients)
    else:
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert any(gradient.any() for gradient in gradients) == (outcome == "trains")


def test_mlp_recipes_touch_no_attention_gate(gated):
    """`gate_proj` is the MLP's: the usual list of targets leaves the attention gate alone."""
    model = trained(gated(), target_modules=["gate_proj"])
    assert {name.split(".layers.")[1] for name in adapted_modules(model)} == {f"{i}.mlp.gate_proj" for i in range(3)}


def test_all_linear_includes_the_gate(gated):
    model = trained(gated(), target_modules="all-linear")
    leaves = {name.rsplit(".", 1)[1] for name in adapted_modules(model)}
    assert leaves == {*TARGETS, "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("name", PROJECTED)
def test_fully_trained_gates_travel_in_the_adapter(name, gated, tmp_path):
    """`modules_to_save=["g_proj"]` trains and stores whole gates beside LoRA on the projections."""
    model = trained(gated(name), target_modules=["q_proj", "v_proj"], modules_to_save=["g_proj"])
    expected = model(IDS).logits.detach()
    moved = [not torch.equal(a, b) for a, b in zip(gate_tensors(model), gate_tensors(gated(name)), strict=True)]
    assert all(moved)
    model.save_pretrained(tmp_path)
    assert torch.equal(PeftModel.from_pretrained(gated(name), tmp_path).eval()(IDS).logits, expected)
    torch.testing.assert_close(model.merge_and_unload()(IDS).logits, expected, rtol=1e-4, atol=1e-4)


def gate_tensors(model):
    """The gate tensors in use, by layer."""
    gates = [module for name, module in model.named_modules() if name.endswith("self_attn.g_proj")]
    return [
        parameter for gate in gates for name, parameter in gate.named_parameters() if "original_module" not in name
    ]


def test_lora_under_checkpointing_with_a_frozen_base(gated):
    """Frozen embeddings give inputs without gradients; the adapter's gradients are the same."""
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(1)
        model = get_peft_model(gated(), LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False)).train()
        if checkpointing:
            model.base_model.model.activation_checkpointing_enable()
        model(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert gradients[0]
    assert all(torch.equal(gradients[1][name], gradient) for name, gradient in gradients[0].items())


@pytest.mark.filterwarnings("ignore:.*tie:UserWarning")  # PEFT says that it unties
@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens"])
def test_merging_into_tied_embeddings(saved, gated, tmp_path):
    """An adapter that trains one of two tied matrices unties them: what is saved is what was in memory."""
    model = trained(gated(tie_word_embeddings=True), target_modules=TARGETS, modules_to_save=[saved])
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)
    assert torch.equal(loaded(IDS).logits, merged(IDS).logits)


# Offload and device maps.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("name", GATES)
@torch.no_grad()
def test_offloaded_weights_give_the_same_logits(name, place, dtype, gated, tmp_path):
    """Weights that are on the meta device between uses, also those of a gate kept in fp32."""
    gated(name).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype).eval()
    expected = model(IDS).logits
    if place == "cpu":
        cpu_offload(model, execution_device="cpu")
    else:
        disk_offload(model, tmp_path / "offload", execution_device="cpu")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert torch.equal(model(IDS).logits, expected)
    prompt = {"input_ids": IDS[:1], "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert model.generate(**prompt).shape == (1, 14)


@pytest.mark.parametrize("name", GATES)
@torch.no_grad()
def test_a_device_map_keeps_layers_whole(name, gated, tmp_path):
    """With little memory a part goes to disk, whole layers at a time, and nothing changes."""
    source = gated(name)
    source.save_pretrained(tmp_path / "model")
    size = sum(parameter.nbytes for parameter in source.model.layers[0].parameters())
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map="auto", max_memory={"cpu": 3 * size}, offload_folder=tmp_path / "offload"
    ).eval()
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    layers = {module for module in model.hf_device_map if ".layers" in module}
    assert all(module.count(".") <= 2 for module in layers), layers
    assert torch.equal(model(IDS).logits, source(IDS).logits)


# Replaced linear layers.


class Int8Linear(nn.Module):
    """As quantisers replace nn.Linear: int8 rows with a scale each, and no attribute `weight`."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (linear.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.detach())
        self.bias = linear.bias

    def forward(self, x):
        return nn.functional.linear(x, (self.qweight * self.scale).to(x.dtype), self.bias)


def replace_linear(module: nn.Module):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, Int8Linear(child))
        else:
            replace_linear(child)


def assert_quantised(quantised, model):
    """Rounding to 8 bits moves logits; losing the gate moves them at least three times as far."""
    expected = model(IDS).logits
    with gate_override(model, 1.0):
        lost = (model(IDS).logits - expected).abs().mean()
    assert 0 < (quantised(IDS).logits - expected).abs().mean() < lost / 3


@pytest.mark.parametrize("name", GATES)
@torch.no_grad()
def test_replaced_projections_keep_the_gate_working(name, gated):
    model = gated(name, initializer_range=0.1)
    quantised = copy.deepcopy(model)
    replace_linear(quantised.model)
    assert name == "constant" or isinstance(quantised.model.layers[0].self_attn.g_proj, Int8Linear)
    assert_quantised(quantised, model)


# PyTorch is retiring the tensors that its own quantisation makes.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("name", GATES)
@torch.no_grad()
def test_dynamic_int8(name, gated):
    """PyTorch's dynamic quantisation replaces nn.Linear by exact type: it leaves the gate as it is."""
    model = gated(name, initializer_range=0.1)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert isinstance(quantised.model.layers[0].self_attn.q_proj, torch.ao.nn.quantized.dynamic.Linear)
    assert_quantised(quantised, model)


@pytest.mark.slow  # the extra `quantize`, which `make slow` installs
@pytest.mark.parametrize("name", GATES)
@torch.no_grad()
def test_torchao_int8_survives_a_save(name, gated, tmp_path):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is optional")
    model = gated(name, initializer_range=0.1)
    model.save_pretrained(tmp_path / "model")
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    quantised = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=config).eval()
    assert_quantised(quantised, model)
    quantised.save_pretrained(tmp_path / "int8")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "int8").eval()
    assert torch.equal(again(IDS).logits, quantised(IDS).logits)
