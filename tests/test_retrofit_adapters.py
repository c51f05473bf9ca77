"""Gates as adapters: extracted, saved, merged at any strength, taken out again; and PEFT's LoRA beside them."""

import json
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from checkpoints import IDS, change_config, load, logits_of
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from gated_llama.convert import convert_checkpoint
from gated_llama.retrofit.adapters import GateAdapter, gate_adapter_config
from gated_llama.retrofit.surgery import transplant_rows, without_gates
from gated_llama.retrofit.walk import WalkOptions


GATES = {
    "headwise": {},
    "elementwise": {"granularity": "elementwise"},
    "bias, some layers": {"gate_bias": True, "layers": [0, 2]},
    "value, shared": {"position": "G2", "head_shared": True},
    "key": {"position": "G3", "granularity": "elementwise"},
    "query": {"position": "G4"},
    "dense": {"position": "G5", "granularity": "elementwise"},
    "silu": {"activation": "silu"},
    "added": {"operation": "add", "activation": "identity", "granularity": "elementwise"},
    "constant": {"gate_input": "constant", "granularity": "elementwise"},
}
PROJECTED = [name for name in GATES if name != "constant"]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=40,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("adapters") / "source"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def convert(source):
    """`convert(name)`: folder of the identity retrofit with that gate, converted once for each dtype."""

    def make(name: str = "headwise", dtype: torch.dtype = torch.float32):
        folder = source.with_name(f"{name} {dtype}")
        if not folder.exists():
            convert_checkpoint(source, folder, dtype=dtype, **GATES[name])
        return folder

    return make


@torch.no_grad()
def trained(folder, dtype=torch.float32):
    """The retrofit with random gates and gate biases."""
    model = load(folder, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if ".self_attn.g_p" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model


@torch.no_grad()
def transplanted(folder, dtype=torch.float32):
    """As a transplant edits: gates with a bias, a fold undone in some heads, values re-centred, a unit silenced."""
    options = {"qkv_bias": True, "o_bias": True, "gate_bias": True}
    base = load(folder, dtype=dtype)
    config = base.config.__class__.from_dict(base.config.to_dict() | options)
    config.gate_retrofit = {**base.config.gate_retrofit, "policy": "transplant", "fold": {}}
    model = type(base)._from_config(config, dtype=dtype, attn_implementation="eager").eval()
    model.load_state_dict(base.state_dict(), strict=False)
    generator = torch.Generator().manual_seed(4)
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj):
            projection.bias.zero_()
        for vector in (attention.v_proj.bias, attention.o_proj.bias, attention.g_proj.bias):
            vector.copy_(torch.randn(vector.shape, generator=generator) * 0.1)
        attention.g_proj.weight.copy_(torch.randn(attention.g_proj.weight.shape, generator=generator) * 0.5)
        attention.o_proj.weight[:, 16:48] *= 0.5
    model.model.layers[1].mlp.down_proj.weight[:, 7] = 0
    return model


def assert_same_state(model, expected):
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    ignored = {"_name_or_path", "architectures"}
    configs = [{k: v for k, v in m.config.to_dict().items() if k not in ignored} for m in (model, expected)]
    assert configs[0] == configs[1]


# Extraction, merging, the strength.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GATES)
def test_an_adapter_is_the_training_and_nothing_else(name, dtype, convert, tmp_path):
    """Saved and loaded, it gives the trained model at 1 and the base at 0, to the bit, in whatever order."""
    folder = convert(name, dtype=dtype)
    base, goal = load(folder, dtype=dtype), trained(folder, dtype)
    before, after = logits_of(base), logits_of(goal)
    assert not torch.equal(before, after)
    GateAdapter.extract(goal, folder).save(tmp_path / "adapter")
    adapter = GateAdapter.load(tmp_path / "adapter")
    layers = GATES[name].get("layers", [0, 1, 2])
    assert adapter.nbytes == len(layers) * goal.config.gate_parameters_per_layer * dtype.itemsize

    model = load(folder, dtype=dtype)
    merged = adapter.merge(model)
    assert torch.equal(logits_of(model), after)
    assert_same_state(model, goal)
    merged.strength = 0.5
    half = logits_of(model)
    assert not torch.equal(half, after)
    assert not torch.equal(half, before)
    merged.strength = 0
    assert torch.equal(logits_of(model), before)
    assert_same_state(model, base)
    merged.strength = 1
    assert torch.equal(logits_of(model), after)
    merged.unmerge()
    assert merged.strength == 0
    assert_same_state(model, base)


@pytest.mark.parametrize("name", GATES)
def test_gates_that_have_not_moved_make_an_adapter_that_does_nothing(name, convert):
    folder = convert(name)
    model = load(folder)
    GateAdapter.extract(folder, folder).merge(model, strength=0.3)
    assert torch.equal(logits_of(model), logits_of(load(folder)))


def test_the_strength_scales_logits(convert):
    """Scores are sigmoid(s l) at every s: layer 0 sees the same input whatever its gates do."""
    folder = convert("elementwise")
    model = load(folder)
    merged = GateAdapter.extract(trained(folder), folder).merge(model)
    seen = []
    model.model.layers[0].self_attn.attn_gate.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    for strength in (1, 0.75, 0.25, 0):
        merged.strength = strength
        logits_of(model)
        torch.testing.assert_close(seen[-1], strength * seen[0], rtol=1e-5, atol=1e-6)  # sums of 40 terms in fp32


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_transplant_is_an_adapter(dtype, convert, tmp_path):
    """Also with biases that the base lacks, columns of o_proj without the fold and a silenced unit."""
    folder = convert(dtype=dtype)
    goal = transplanted(folder, dtype)
    adapter = GateAdapter.extract(goal, folder)
    assert adapter.column_scales.keys() == {
        *(f"model.layers.{i}.self_attn.o_proj.weight" for i in range(3)),
        "model.layers.1.mlp.down_proj.weight",
    }
    assert adapter.column_scales["model.layers.1.mlp.down_proj.weight"].tolist() == [1.0] * 7 + [0.0] + [1.0] * 56
    adapter.save(tmp_path / "adapter")
    model = load(folder, dtype=dtype)
    merged = GateAdapter.load(tmp_path / "adapter").merge(model)
    assert torch.equal(logits_of(model), logits_of(goal))
    assert_same_state(model, goal)
    merged.strength = 0.5
    assert model.config.gate_retrofit == {**goal.config.gate_retrofit, "strength": 0.5, "fold": None}
    weights = [m.model.layers[0].self_attn.o_proj.weight for m in (model, load(folder, dtype=dtype))]
    assert torch.equal(weights[0][:, 16:48], weights[1][:, 16:48] * 0.75)
    merged.unmerge()
    with torch.no_grad():
        for parameter in model.parameters():  # as training would; the copy of the base stays
            parameter.add_(1.0)
    base = load(folder, dtype=dtype)
    merged.unmerge()
    for name, parameter in model.named_parameters():
        if name not in {*adapter.tensors, *adapter.column_scales}:
            parameter.data = base.get_parameter(name).data
    assert model.model.layers[0].self_attn.v_proj.bias is None
    assert_same_state(model, load(folder, dtype=dtype))
    assert torch.equal(logits_of(model), logits_of(load(folder, dtype=dtype)))


@pytest.mark.parametrize("ridge", [None, 0.01], ids=["gates", "refits"])
def test_the_transplant_itself_is_an_adapter(ridge, convert, source):
    """Of the same source's identity retrofit: gates and vectors, unless matrices were refitted too."""
    plain = without_gates(LlamaForCausalLM.from_pretrained(source))
    rows = torch.randint(3, 96, (6, 24))
    goal, _ = transplant_rows(plain, rows, 1, options=WalkOptions(ridge=ridge))
    goal.set_attn_implementation("eager")
    adapter = GateAdapter.extract(goal, convert(), matrices=ridge is not None)
    assert bool(adapter.column_scales) == (ridge is None)
    model = load(convert())
    merged = adapter.merge(model)
    assert torch.equal(logits_of(model), logits_of(goal))
    merged.unmerge()
    assert_same_state(model, load(convert()))


@pytest.mark.parametrize("strength", [0.4, 1.0])
@pytest.mark.parametrize("make", [trained, transplanted])
def test_a_merged_model_is_an_ordinary_checkpoint(make, strength, convert, tmp_path):
    folder = convert()
    model = load(folder)
    GateAdapter.extract(make(folder), folder).merge(model, strength)
    model.save_pretrained(tmp_path / "merged")
    again = load(tmp_path / "merged")
    assert torch.equal(logits_of(again), logits_of(model))
    assert again.config.gate_retrofit.get("strength") == (strength if strength < 1 else None)
    assert torch.equal(again.lm_head.weight, again.model.embed_tokens.weight)


@pytest.mark.parametrize("make", [trained, transplanted])
def test_folders_and_models_give_the_same_adapter(make, convert, tmp_path):
    folder = convert()
    goal = make(folder)
    goal.save_pretrained(tmp_path / "goal")
    adapters = [
        GateAdapter.extract(*pair, base_name="org/base")
        for pair in ((goal, load(folder)), (tmp_path / "goal", folder))
    ]
    assert adapters[0].base == adapters[1].base
    assert adapters[0].config == adapters[1].config
    for kind in ("tensors", "column_scales"):
        ours, theirs = (getattr(adapter, kind) for adapter in adapters)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_matrices_travel_when_they_are_asked_for(convert, tmp_path):
    """Among them one that is tied to the head."""
    folder = convert()
    goal = transplanted(folder)
    with torch.no_grad():
        goal.model.layers[0].self_attn.o_proj.weight += 0.1
        goal.model.embed_tokens.weight += 0.1
    with pytest.raises(ValueError, match=r"^The trained model differs from its base .* in 2 tensors .* matrices=True"):
        GateAdapter.extract(goal, folder)
    adapter = GateAdapter.extract(goal, folder, matrices=True)
    adapter.save(tmp_path / "adapter")
    model = load(folder)
    merged = GateAdapter.load(tmp_path / "adapter").merge(model)
    assert_same_state(model, goal)
    assert torch.equal(logits_of(model), logits_of(goal))
    merged.unmerge()
    assert_same_state(model, load(folder))


@pytest.mark.parametrize("name", ["headwise", "silu"])
def test_the_base_may_be_loaded_in_another_dtype(name, convert):
    """Trained in float32 on a base stored in bfloat16, merged into either."""
    folder = convert(name, dtype=torch.bfloat16)
    goal = trained(folder)
    adapter = GateAdapter.extract(goal, folder)
    model = load(folder, dtype=torch.float32)
    adapter.merge(model)
    assert torch.equal(logits_of(model), logits_of(goal))
    model = load(folder, dtype=torch.bfloat16)
    adapter.merge(model)
    for key, tensor in goal.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor.to(torch.bfloat16)), key


def test_a_merged_gate_goes_on_training(convert):
    """The parameters are those that an optimizer may hold already, and unmerging forgets what they learnt."""
    folder = convert()
    model = load(folder)
    gates = {name: parameter for name, parameter in model.named_parameters() if ".g_proj" in name}
    optimizer = torch.optim.SGD(gates.values(), lr=0.1)
    merged = GateAdapter.extract(trained(folder), folder).merge(model)
    before = logits_of(model)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert not torch.equal(logits_of(model), before)
    merged.unmerge()
    assert_same_state(model, load(folder))


# PEFT reads the same folder.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROJECTED)
def test_peft_loads_the_same_folder(name, dtype, convert, tmp_path):
    folder = convert(name, dtype=dtype)
    goal = trained(folder, dtype)
    before, after = logits_of(load(folder, dtype=dtype)), logits_of(goal)
    GateAdapter.extract(goal, folder).save(tmp_path / "adapter")
    model = PeftModel.from_pretrained(load(folder, dtype=dtype), tmp_path / "adapter")
    assert torch.equal(logits_of(model), after)
    with model.disable_adapter():
        assert torch.equal(logits_of(model), before)
    model.merge_adapter()
    assert torch.equal(logits_of(model), after)
    model.unmerge_adapter()
    assert torch.equal(logits_of(model.get_base_model()), after)
    model.save_pretrained(tmp_path / "again")
    again = PeftModel.from_pretrained(load(folder, dtype=dtype), tmp_path / "again")
    assert torch.equal(logits_of(again), after)
    assert_same_state(again.unload(), load(folder, dtype=dtype))
    assert_same_state(model.merge_and_unload(), goal)


@pytest.mark.parametrize("make", [transplanted, trained])
def test_peft_is_offered_only_what_it_can_load_whole(make, convert, tmp_path):
    """PEFT passes over tensors that it has no module for, so it must not find a configuration."""
    folder = convert("headwise" if make is transplanted else "constant")
    GateAdapter.extract(make(folder), folder).save(tmp_path / "adapter")
    with pytest.raises(ValueError, match="adapter_config"):
        PeftModel.from_pretrained(load(folder), tmp_path / "adapter")


# LoRA and gates, and gates alone, trained by PEFT.


def train(model, folder, **overrides):
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 96, (8, 12))]
    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "learning_rate": 0.02,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "save_steps": 1,
        "seed": 0,
    }
    resume = overrides.pop("resume", None)
    run = Trainer(model=model, args=TrainingArguments(**arguments | overrides), train_dataset=rows)
    run.train(resume_from_checkpoint=resume)
    return model.eval()


@pytest.mark.parametrize("projections", [("q_proj", "o_proj", "mlp.gate_proj"), ()], ids=["lora", "gates"])
@pytest.mark.parametrize("name", ["bias, some layers", "dense"])
def test_trainer_saves_and_resumes_adapters(name, projections, convert, tmp_path):
    """What the Trainer saved loads to equal logits, also when it went on from a checkpoint; merging unties nothing."""
    folder = convert(name)

    def adapted():
        torch.manual_seed(1)
        model = load(folder)
        return get_peft_model(model, gate_adapter_config(model, projections))

    torch.manual_seed(2)
    model = train(adapted(), tmp_path / "run")
    after = logits_of(model)
    assert not torch.equal(after, logits_of(load(folder)))
    trainable = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    leaves = {"q_proj", "o_proj", "gate_proj", "g_proj"} if projections else {"g_proj"}
    assert {leaf for leaf in leaves if any(f".{leaf}." in key for key in trainable)} == leaves
    assert all(any(f".{leaf}." in key for leaf in leaves) for key in trainable)

    again = PeftModel.from_pretrained(load(folder), tmp_path / "run" / "checkpoint-3")
    assert torch.equal(logits_of(again), after)
    torch.manual_seed(2)
    resumed = train(adapted(), tmp_path / "run", resume=str(tmp_path / "run" / "checkpoint-1"))
    assert torch.equal(logits_of(resumed), after)

    merged = model.merge_and_unload()
    # LoRA: the sum of two products against the product of a sum, in fp32.
    torch.testing.assert_close(logits_of(merged), after, rtol=1e-4, atol=1e-4 if projections else 0)
    merged.save_pretrained(tmp_path / "merged")
    saved = load(tmp_path / "merged")
    assert torch.equal(logits_of(saved), logits_of(merged))
    assert torch.equal(saved.lm_head.weight, saved.model.embed_tokens.weight)
    if projections:
        with pytest.raises(ValueError, match="neither gates nor vectors"):
            GateAdapter.extract(saved, folder)
    else:
        base = load(folder)
        GateAdapter.extract(saved, folder).merge(base)
        assert torch.equal(logits_of(base), after)


def test_biases_train_with_their_projections(convert, tmp_path):
    """The biases of a transplant: wholly, in the adapter."""
    goal = transplanted(convert())
    goal.save_pretrained(tmp_path / "goal")
    model = get_peft_model(goal, gate_adapter_config(goal, ["v_proj", "o_proj"], biases=True))
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    biases = {name.split(".self_attn.")[1] for name in trainable if "g_proj" not in name and name.endswith("bias")}
    assert biases == {"v_proj.base_layer.bias", "o_proj.base_layer.bias"}
    train(model, tmp_path / "run", max_steps=1)
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(tmp_path / "goal"), tmp_path / "adapter")
    assert torch.equal(logits_of(again), logits_of(model))


def test_the_configuration_of_peft(tiny_config):
    config = gate_adapter_config(tiny_config(), "up_proj", r=4, modules_to_save=["lm_head", "g_proj"])
    assert isinstance(config, LoraConfig)
    assert config.target_modules == {"mlp.up_proj"}
    assert config.modules_to_save == ["g_proj", "lm_head"]
    assert gate_adapter_config(tiny_config(), "up_proj", modules_to_save="lm_head").modules_to_save == [
        "g_proj",
        "lm_head",
    ]
    assert (config.r, config.task_type, config.bias) == (4, "CAUSAL_LM", "none")
    targets = gate_adapter_config(tiny_config()).target_modules
    assert targets == {f"self_attn.{name}_proj" for name in "qkvo"}


@pytest.mark.parametrize("option", [{"use_dora": True}, {"init_lora_weights": "pissa"}])
def test_variants_of_lora_leave_the_gate_alone(option, convert):
    """DoRA would divide by its zero rows, PiSSA would find no direction in them: it is copied instead."""
    model = get_peft_model(load(convert()), gate_adapter_config(load(convert()), ["q_proj", "o_proj"], r=4, **option))
    model(input_ids=IDS, labels=IDS).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not [name for name in gradients if "g_proj.lora" in name]
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert all(gradient.any() for name, gradient in gradients.items() if "g_proj" in name)


# Mistakes.


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(value, convert, tmp_path):
    """In whatever tensor of the trained model, and in an adapter made by hand."""
    folder = convert()
    for name in ("model.layers.1.self_attn.g_proj.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
        model = trained(folder)
        model.get_parameter(name).data.view(-1)[3] = value
        with pytest.raises(ValueError, match=f"'{name}' of .* holds values that are not finite"):
            GateAdapter.extract(model, folder)
    adapter = GateAdapter.extract(trained(folder), folder)
    for field in ("tensors", "column_scales"):
        with pytest.raises(ValueError, match="'x' of the adapter holds values that are not finite"):
            replace(adapter, **{field: {"x": torch.tensor([1.0, value])}})
    base = load(folder)
    base.get_parameter("model.layers.0.self_attn.g_proj.weight").data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.g_proj\.weight has moved from its start"):
        adapter.merge(base)


def test_values_that_the_base_cannot_hold(convert):
    """float32 gates in a float16 base: refused, and the model stays at the strength that it had."""
    folder = convert()
    goal = trained(folder)
    goal.get_parameter("model.layers.2.self_attn.g_proj.weight").data[0, 0] = 1e5
    adapter = GateAdapter.extract(goal, folder)
    model = load(folder, dtype=torch.float16)
    merged = adapter.merge(model, strength=0.5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"layers\.2\.self_attn\.g_proj\.weight' of the merged model in torch\.float16"
    ):
        merged.strength = 1.0
    assert merged.strength == 0.5
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("projections", "message"),
    [
        ("gate_proj", "say 'mlp.gate_proj'"),
        (["q_proj", "g_proj"], "leave it out"),
        (["query"], "'query' is unknown; choose from q_proj, k_proj, v_proj, o_proj, mlp.gate_proj"),
    ],
)
def test_unknown_projections(projections, message, tiny_config):
    with pytest.raises(ValueError, match=message):
        gate_adapter_config(tiny_config(), projections)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gate_input": "constant"}, "bare parameters"),
        ({"gate_input": "states"}, "no parameters"),
        ({"gate_position": None}, "not gated"),
    ],
)
def test_models_without_a_projected_gate(fields, message, tiny_config):
    with pytest.raises(ValueError, match=message):
        gate_adapter_config(tiny_config(**fields))


@pytest.mark.parametrize("projections", [(), ("v_proj",)])
def test_biases_that_are_not_there(projections, tiny_config):
    with pytest.raises(ValueError, match="has a bias in this model"):
        gate_adapter_config(tiny_config(o_bias=True), projections, biases=True)


def test_lora_without_projections(tiny_config):
    with pytest.raises(ValueError, match="lora_alpha, r: for LoRA"):
        gate_adapter_config(tiny_config(), (), r=4, lora_alpha=8)


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="type 'llama'"):
        gate_adapter_config(LlamaConfig())


def test_without_peft(tiny_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"gated-llama\[peft\]"):
        gate_adapter_config(tiny_config())


@pytest.mark.parametrize("strength", [-0.1, 1.5, float("nan"), "1", None, True])
def test_strengths_lie_between_0_and_1(strength, convert):
    folder = convert()
    model, adapter = load(folder), GateAdapter.extract(trained(folder), folder)
    with pytest.raises(ValueError, match="strength="):
        adapter.merge(model, strength)
    merged = adapter.merge(model, 0.5)
    with pytest.raises(ValueError, match="strength="):
        merged.strength = strength
    assert merged.strength == 0.5


def assert_refused(adapter, model, message):
    """One error, and the model is as it was."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        adapter.merge(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_wrong_bases(convert, source, tiny_model, tmp_path):
    folder = convert()
    adapter = GateAdapter.extract(trained(folder), folder)
    assert_refused(adapter, tiny_model(), "The adapter's base has")
    assert_refused(adapter, load(convert("elementwise")), "gate_granularity='headwise' where .* 'elementwise'")
    assert_refused(adapter, trained(folder), "has moved from its start")
    biased = convert_checkpoint(source, tmp_path / "biased", gate_bias=True).output
    assert_refused(adapter, load(biased), "start from .*'gate_bias': False.*'gate_bias': True")
    opened = convert_checkpoint(source, tmp_path / "open", policy="open", bias=4.0).output
    assert_refused(adapter, load(opened), "policy is 'open'")
    refolded = shutil.copytree(folder, tmp_path / "refolded")
    record = json.loads((folder / "config.json").read_text())["gate_retrofit"]
    change_config(refolded, gate_retrofit=record | {"fold": {}})
    assert_refused(adapter, load(refolded), r"start from .*'fold': \{'o_proj.weight': 2.0\}")
    for name in ("layers.2.self_attn.q_proj.weight", "layers.1.mlp.up_proj.weight", "embed_tokens.weight"):
        other = load(folder)
        with torch.no_grad():
            other.model.get_parameter(name).mul_(1.1)
        assert_refused(adapter, other, f"{name} holds other values")
    with pytest.raises(ValueError, match="type 'llama'"):
        adapter.merge(LlamaForCausalLM.from_pretrained(source))


def test_models_that_others_have_taken_apart(convert):
    folder = convert()
    adapter = GateAdapter.extract(trained(folder), folder)
    model = load(folder)
    with pytest.raises(ValueError, match="not a plain tensor of floats in memory"):
        adapter.merge(load(folder).to("meta"))
    model.model.layers[0].self_attn.g_proj = torch.nn.Identity()
    with pytest.raises(ValueError, match="has no tensor"):
        adapter.merge(model)
    adapted = get_peft_model(load(folder), LoraConfig(target_modules=["q_proj"]))
    for carrier in (adapted, adapted.get_base_model()):
        with pytest.raises(ValueError, match="carries an adapter of PEFT"):
            adapter.merge(carrier)


def test_what_no_adapter_of_gates_can_hold(convert, source, tmp_path):
    folder = convert()
    goal = trained(folder)
    with torch.no_grad():
        goal.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(ValueError, match=r"in 1 tensors .* 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        GateAdapter.extract(goal, folder)
    with pytest.raises(ValueError, match="has moved"):
        GateAdapter.extract(goal, goal)
    adapted = get_peft_model(load(folder), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="merge_and_unload"):
        GateAdapter.extract(adapted, folder)
    with pytest.raises(ValueError, match="gate_granularity='headwise' where this model has 'elementwise'"):
        GateAdapter.extract(goal, convert("elementwise"))
    with pytest.raises(ValueError, match="type 'llama'"):
        GateAdapter.extract(goal, source)
    with pytest.raises(ValueError, match="does not exist"):
        GateAdapter.extract(goal, tmp_path / "nowhere")
    ungated = convert_checkpoint(source, tmp_path / "ungated", position=None).output
    with pytest.raises(ValueError, match="no gate parameters"):
        GateAdapter.extract(ungated, ungated)


def test_damaged_folders(convert, tmp_path):
    folder = convert()
    adapter = GateAdapter.extract(trained(folder), folder)
    output = adapter.save(tmp_path / "adapter")
    with pytest.raises(ValueError, match="not empty"):
        adapter.save(output)
    with pytest.raises(ValueError, match="lies in the source"):
        adapter.save(folder / "adapter")
    with pytest.raises(ValueError, match="holds no gate adapter"):
        GateAdapter.load(folder)
    record = output / "gate_adapter.json"
    content = json.loads(record.read_text())
    for change, message in (
        ({"format_version": 2}, "format_version 2"),
        ({"tensors": ["model.norm.weight"]}, "not whole"),
        ({"tensors": content["tensors"][1:]}, "not whole .*holds 3 tensors, .* names 2"),
        ({"tensors": 5}, "not whole"),
        ({"config": []}, "not whole .*config lacks gate_retrofit"),
        ({"base": {}}, "not whole .*base lacks name, architecture"),
        ({"base": "x"}, "not whole .*base lacks name"),
    ):
        record.write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match=message):
            GateAdapter.load(output)
    record.write_text(json.dumps(content))
    weights = load_file(output / "adapter_model.safetensors")
    next(iter(weights.values()))[0, 0] = float("nan")
    save_file(weights, output / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"of the adapter holds values that are not finite"):
        GateAdapter.load(output)
    (output / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="not whole"):
        GateAdapter.load(output)
    record.unlink()
    with pytest.raises(ValueError, match=r"load it with PeftModel\.from_pretrained"):
        GateAdapter.load(output)


def test_lora_fits_gates_that_are_zero_and_dora_does_not(convert):
    for dora in (False, True):
        model = get_peft_model(load(convert()), LoraConfig(target_modules=["g_proj"], use_dora=dora))
        model(input_ids=IDS, labels=IDS).loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert all(gradient.isfinite().all() for gradient in gradients) != dora
    with_dora = gate_adapter_config(load(convert()), ["o_proj"], use_dora=True)
    model = get_peft_model(load(convert()), with_dora)  # the gates are copies beside it
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
