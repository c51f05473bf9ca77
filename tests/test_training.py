"""Training: checkpointing, accumulation, unused parameters, autocast, Trainer checkpoints and heads."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from gated_llama import (
    GatedLlamaForCausalLM,
    GatedLlamaForQuestionAnswering,
    GatedLlamaForSequenceClassification,
    GatedLlamaForTokenClassification,
)


IDS = torch.randint(3, 96, (3, 12), generator=torch.Generator().manual_seed(1))

GATES = {
    "none": {"gate_position": None},
    "G1": {},
    "G1 headwise, some layers": {"gate_granularity": "headwise", "gate_layers": [0, 2], "gate_bias": True},
    "G1 zeros": {"gate_init": "zeros"},
    "G1 fp32": {"gate_in_fp32": True},
    "G2 shared": {"gate_position": "G2", "gate_head_shared": True},
    "G3 constant": {"gate_position": "G3", "gate_input": "constant"},
    "G4 additive silu": {"gate_position": "G4", "gate_operation": "add", "gate_activation": "silu", "qk_norm": True},
    "G4 silu zeros": {"gate_position": "G4", "gate_activation": "silu", "gate_init": "zeros"},
    "G5": {"gate_position": "G5", "o_bias": True},
    "states, norm": {"gate_input": "states", "sdpa_output_norm": True, "qkv_bias": True, "mlp_bias": True},
    "identity constant": {"gate_input": "constant", "gate_activation": "identity"},
}


def gradients(model, **inputs):
    """Loss and every gradient of one batch."""
    model.train()
    model.zero_grad()
    loss = model(**{"input_ids": IDS, "labels": IDS, **inputs}).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: parameter.grad for name, parameter in model.named_parameters()}}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", GATES)
def test_activation_checkpointing_changes_no_bit(name, reentrant, tiny_model):
    """Also with dropout in the attention, whose masks are drawn again, and with a cache asked for."""
    model = tiny_model(**GATES[name], attention_dropout=0.3)
    torch.manual_seed(7)
    expected = gradients(model)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    forwards = []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: forwards.append(1))
    torch.manual_seed(7)
    found = gradients(model, use_cache=True)
    assert len(forwards) == 2
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_scores_are_recorded_once_under_checkpointing(tiny_model):
    """The forward runs again in the backward pass; what was recorded does not grow."""
    model = tiny_model().train()
    expected = model.model(IDS, output_gate_scores=True).gate_scores
    model.activation_checkpointing_enable()
    output = model.model(IDS, output_gate_scores=True)
    output.last_hidden_state.sum().backward()
    assert len(output.gate_scores) == 3
    assert all(torch.equal(a, b) for a, b in zip(output.gate_scores, expected, strict=True))
    assert not hasattr(model.model(IDS), "gate_scores")


# Gates that start closed: what they close learns from the second step on.
CLOSED = {
    # Queries of zero: no gradient reaches them or the keys.
    "G4 silu zeros": {"q_proj", "k_proj", "q_norm", "k_norm"},
    # The whole branch is zero.
    "identity constant": {"q_proj", "k_proj", "v_proj", "o_proj", "input_layernorm"},
}


@pytest.mark.parametrize("name", GATES)
def test_every_trainable_parameter_gets_a_gradient(name, tiny_model):
    """No parameter without a gradient, as distributed training demands, and none that is zero but for CLOSED."""
    found = gradients(tiny_model(**GATES[name]))
    assert not any(gradient is None for gradient in found.values())
    zero = {key.split(".")[-2] for key, gradient in found.items() if not gradient.any()}
    assert zero <= CLOSED.get(name, set())


def test_dropout_in_training_is_the_librarys(tiny_config):
    """With the same seed, the ungated decoder drops the same attention weights as Llama."""
    config = tiny_config(gate_position=None, attention_dropout=0.5)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shared = {name: getattr(config, name) for name in (*sizes, "num_key_value_heads", "head_dim", "attention_dropout")}
    ours, theirs = GatedLlamaForCausalLM(config), LlamaForCausalLM(LlamaConfig(**shared))
    theirs.load_state_dict(ours.state_dict())
    logits = []
    for model in (ours, theirs):
        model.train().set_attn_implementation("eager")
        torch.manual_seed(3)
        logits.append(model(IDS).logits)
    assert torch.equal(*logits)
    assert not torch.equal(ours(IDS).logits, ours.eval()(IDS).logits)


# Accumulation.

LENGTHS = [12, 3, 7, 2, 9, 5, 12, 4]


def examples():
    """Eight sequences of unequal lengths, padded to 12; padding carries no label."""
    ids = torch.randint(3, 96, (8, 12), generator=torch.Generator().manual_seed(5))
    real = torch.arange(12) < torch.tensor(LENGTHS)[:, None]
    rows = zip(ids * real, real.long(), ids.masked_fill(~real, -100), strict=True)
    return [{"input_ids": i, "attention_mask": m, "labels": label} for i, m, label in rows]


def trainer(model, folder, **overrides) -> Trainer:
    arguments = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "seed": 0,
        **overrides,
    }
    return Trainer(model=model, args=TrainingArguments(**arguments), train_dataset=examples())


def test_the_loss_counts_items_over_the_whole_step(tiny_model):
    """One batch of eight equals eight batches of one that are told the number of items in all."""
    model, rows = tiny_model(), examples()
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    items = int((batch["labels"][:, 1:] != -100).sum())
    expected = gradients(model, **batch)
    pieces = [gradients(model, num_items_in_batch=items, **{k: v[None] for k, v in row.items()}) for row in rows]
    for key, value in expected.items():
        torch.testing.assert_close(sum(piece[key] for piece in pieces), value, rtol=1e-4, atol=1e-6)


def test_trainer_accumulates_without_bias(tiny_model, tmp_path):
    """Batch 8 and batch 1 with 8 accumulation steps take the same optimizer step."""
    weights, losses = [], []
    for batch, steps in ((8, 1), (1, 8)):
        model = tiny_model()
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps}
        run = trainer(model, tmp_path, max_steps=1, **sizes)
        assert run.model_accepts_loss_kwargs
        losses.append(run.train().training_loss)
        weights.append(model.state_dict())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_resuming_from_a_checkpoint_ends_where_an_uninterrupted_run_does(tiny_model, tmp_path):
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 2}
    options["optim"] = "adamw_torch"
    whole = tiny_model()
    trainer(whole, tmp_path, **options).train()
    resumed = tiny_model()
    trainer(resumed, tmp_path, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    loaded = GatedLlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    assert torch.equal(loaded(IDS).logits, whole.eval()(IDS).logits)


def test_there_is_no_router(tiny_model):
    """A dense decoder has neither router logits nor an auxiliary loss, also when they are asked for."""
    output = tiny_model()(IDS, labels=IDS, output_router_logits=True)
    assert "router_logits" not in output
    assert "aux_loss" not in output


@pytest.mark.parametrize(("in_fp32", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_scores_under_autocast(in_fp32, dtype, tiny_model, randomize_gates):
    """bf16 autocast reaches the gate unless it is kept in fp32; then scores are exact for their input."""
    model = randomize_gates(tiny_model(gate_in_fp32=in_fp32)).train()
    seen = []
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.autocast("cpu", torch.bfloat16):
        output = model.model(IDS, output_gate_scores=True)
        output.last_hidden_state.float().sum().backward()
    assert {score.dtype for score in output.gate_scores} == {dtype}
    exact = torch.sigmoid(seen[0].float() @ attention.g_proj.weight.T).view(3, 12, 4, 16)
    tolerance = {"rtol": 0, "atol": 1e-6 if in_fp32 else 2e-2}
    torch.testing.assert_close(output.gate_scores[0].float(), exact, **tolerance)
    assert attention.g_proj.weight.grad.any()


# Heads.


@pytest.mark.parametrize("side", ["left", "right"])
def test_sequence_classification_reads_the_last_real_token(side, tiny_config):
    model = GatedLlamaForSequenceClassification(tiny_config(num_labels=5, pad_token_id=0)).eval()
    alone = model(IDS[:1, :8]).logits
    padded, mask = torch.zeros(1, 12, dtype=torch.long), torch.zeros(1, 12, dtype=torch.long)
    place = slice(4, 12) if side == "left" else slice(0, 8)
    padded[:, place], mask[:, place] = IDS[:1, :8], 1
    torch.testing.assert_close(model(padded, attention_mask=mask).logits, alone, rtol=1e-4, atol=1e-5)
    assert alone.shape == (1, 5)


@pytest.mark.parametrize(
    ("head", "labels"),
    [
        (GatedLlamaForSequenceClassification, {"labels": torch.tensor([0, 1, 1])}),
        (GatedLlamaForTokenClassification, {"labels": IDS % 2}),
        (
            GatedLlamaForQuestionAnswering,
            {"start_positions": torch.tensor([1, 2, 3]), "end_positions": torch.tensor([4, 5, 6])},
        ),
    ],
)
def test_heads_train_every_parameter(head, labels, tiny_config):
    model = head(tiny_config(num_labels=2, pad_token_id=0))
    loss = model(IDS, **labels).loss
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad.any() for parameter in model.parameters())
