"""Every loss against a naive reference, its gradient, and its schedule."""

import math

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import LlamaConfig, LlamaForCausalLM

from gated_llama.retrofit import losses
from gated_llama.retrofit.losses import LOSSES, Batch, Record, recording, student_kinds
from gated_llama.retrofit.settings import LOSS_SETTINGS, NEED_SOURCE, Divergence, Loss, Outlier, Schedule, Sink


IDS = torch.randint(3, 96, (2, 11), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def student(tiny_model, randomize_gates):
    return randomize_gates(tiny_model(initializer_range=0.3, gate_granularity="headwise")).train()


@pytest.fixture
def source(tiny_config):
    """An ungated Llama of other weights."""
    config = tiny_config()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {name: getattr(config, name) for name in (*names, "num_key_value_heads", "head_dim")}
    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)).eval()


def batch_of(student, name, settings, source=None, first=0, ids=IDS) -> Batch:
    """The student sees `ids`; the source has `first` more tokens before them."""
    with recording(student, student_kinds(name, settings)) as record:
        record.logits = student(ids, use_cache=False).logits
    reference = None
    if source is not None:
        before = torch.full((len(ids), first), 1)
        with torch.no_grad(), recording(source, set(LOSSES[name].source)) as reference:
            reference.logits = source(torch.cat([before, ids], dim=1), use_cache=False).logits
    return Batch(ids, ids.shape[1], record, reference)


def test_the_tables_agree():
    assert LOSSES.keys() == LOSS_SETTINGS.keys()
    assert set(NEED_SOURCE) == {name for name, term in LOSSES.items() if term.source}


def test_next_token_is_the_models_own_loss(student):
    value = losses.next_token(batch_of(student, "next_token", Loss()), Loss())
    torch.testing.assert_close(value, student(IDS, labels=IDS).loss)


@pytest.mark.parametrize("first", [0, 1])
def test_kl_over_the_shared_positions(first, student, source):
    """The sum over the vocabulary, written out; a source with a first token of its own is shifted by it."""
    value = losses.kl(batch_of(student, "kl", Divergence(), source, first), Divergence())
    expected = []
    reference = source(torch.cat([torch.full((2, first), 1), IDS], dim=1)).logits[:, first:].double()
    p, q = reference.softmax(-1), student(IDS).logits.double().softmax(-1)
    for row in range(2):
        for position in range(IDS.shape[1]):
            expected.append((p[row, position] * (p[row, position] / q[row, position]).log()).sum())
    assert value.item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-5)
    assert value > 0.1


@pytest.mark.parametrize("block", [1, 96 * 4, 1 << 21])
def test_the_gradient_of_kl_is_that_of_the_library(block, monkeypatch):
    """In blocks of one row, of four, and all at once; also where rows count differently."""
    monkeypatch.setattr(losses, "BLOCK", block)
    logits = torch.randn(11, 96, requires_grad=True)
    target = torch.randn(11, 96)
    weights = torch.rand(11)
    (losses.divergence(logits, target) * weights).sum().backward()
    found, logits.grad = logits.grad, None
    elements = torch.nn.functional.kl_div(
        logits.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="none"
    )
    (elements.sum(-1) * weights).sum().backward()
    torch.testing.assert_close(found, logits.grad, rtol=1e-5, atol=1e-7)


def test_kl_of_bfloat16_logits_is_computed_in_float32():
    logits, target = (torch.randn(7, 96, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (1, 2))
    exact = losses.divergence(logits.double().float(), target.double().float())
    torch.testing.assert_close(losses.divergence(logits, target), exact)


def test_kl_to_itself_is_zero_with_its_gradient(student):
    logits = student(IDS).logits.flatten(0, 1).detach().requires_grad_()
    value = losses.divergence(logits, logits.detach())
    value.sum().backward()
    assert value.abs().max() < 1e-6
    assert logits.grad.abs().max() < 1e-6


def test_top_k_is_a_divergence_of_k_tokens_and_the_rest(student, source):
    batch = batch_of(student, "kl", Divergence(), source)
    value = losses.kl(batch, Divergence(top_k=5))
    p, q = (record.logits.flatten(0, 1).double().softmax(-1) for record in (batch.source, batch.student))
    expected = 0.0
    for row in range(len(p)):
        top = p[row].topk(5).indices
        rest = [1 - p[row, top].sum(), 1 - q[row, top].sum()]
        expected += (p[row, top] * (p[row, top] / q[row, top]).log()).sum() + rest[0] * (rest[0] / rest[1]).log()
    assert value.item() == pytest.approx(expected.item() / len(p), rel=1e-4)
    full = losses.kl(batch, Divergence()).item()
    growing = [losses.kl(batch, Divergence(top_k=k)).item() for k in (1, 5, 20, 60, 95)]
    assert growing == sorted(growing)
    assert growing[-1] == pytest.approx(full, rel=1e-4)
    assert losses.kl(batch, Divergence(top_k=500)).item() == pytest.approx(full, rel=1e-6)


def test_precomputed_targets_give_the_same(student, source):
    batch = batch_of(student, "kl", Divergence(), source)
    ids, values = losses.top_k_targets(batch.source.logits.flatten(0, 1), 7)
    targets = tuple(target.view(2, -1, 7) for target in (ids, values))
    stored = Batch(batch.ids, batch.tokens, batch.student, targets=targets)
    assert losses.kl(stored, Divergence()) == losses.kl(batch, Divergence(top_k=7))


@pytest.mark.parametrize("first", [0, 1])
def test_attention_outputs_against_each_layer(first, student, source):
    value = losses.attention_output(batch_of(student, "attention_output", Loss(), source, first), Loss())
    outputs = {}
    for name, model in (("student", student), ("source", source)):
        handles = [
            layer.self_attn.o_proj.register_forward_hook(
                lambda _, args, output, n=name: outputs.setdefault(n, []).append(output)
            )
            for layer in model.model.layers
        ]
        before = torch.full((2, first if name == "source" else 0), 1)
        model(torch.cat([before, IDS], dim=1))
        for handle in handles:
            handle.remove()
    expected = []
    for mine, theirs in zip(outputs["student"], outputs["source"], strict=True):
        for row in range(2):
            target = theirs[row, first:]
            expected.append(((mine[row] - target) ** 2).sum() / (target**2).sum())
    torch.testing.assert_close(value, torch.stack(expected).mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("down_proj", [False, True])
def test_outliers_at_both_ends_of_every_residual_norm(down_proj, student):
    """tau is low enough that something lies above it at most sites."""
    settings = Outlier(tau=1.5, first_token_weight=10.0, worst_token_weight=30.0, down_proj=down_proj)
    sites = []
    handles = []
    for name, module in student.named_modules():
        if name.endswith(("input_layernorm", "post_attention_layernorm", "model.norm")):
            handles.append(module.register_forward_hook(lambda _, args, output: sites.extend([args[0], output])))
        if down_proj and name.endswith("down_proj"):
            handles.append(module.register_forward_hook(lambda _, args, output: sites.append(args[0])))
    value = losses.outlier(batch_of(student, "outlier", settings), settings)
    for handle in handles:
        handle.remove()
    assert len(sites) == 2 * 7 + 3 * down_proj
    expected = []
    for states in sites:
        for row in range(2):
            total = weight = 0.0
            sums = []
            for x in states[row]:
                u = x / (x**2).mean().sqrt()
                sums.append(((u.abs() - 1.5).clamp(min=0) ** 2).sum())
            for position, value_there in enumerate(sums):
                w = 10.0 if position == 0 else 1.0
                if value_there == max(sums):
                    w = 30.0
                total += w * value_there
                weight += w
            expected.append(total / weight)  # rows count the same
    torch.testing.assert_close(value, torch.stack(expected).mean(), rtol=1e-4, atol=1e-6)
    assert value > 0.1


def test_a_state_of_zeros_has_a_gradient():
    states = torch.randn(1, 4, 40).mul(torch.tensor([1.0, 0.0, 1.0, 1.0])[:, None]).requires_grad_()
    losses.outlier(Batch(IDS[:1, :4], 4, Record(norms=[states])), Outlier(tau=1.0)).backward()
    assert states.grad.isfinite().all()
    assert states.grad[0, 0].any()


def test_modules_inside_wrappers_are_recorded(student):
    """As FSDP leaves them where activations are checkpointed."""
    settings = Outlier(down_proj=True)
    expected = len(batch_of(student, "outlier", settings).student.norms)
    for index, layer in enumerate(student.model.layers):
        student.model.layers[index] = checkpoint_wrapper(layer)
    found = batch_of(student, "outlier", settings).student
    assert (len(found.norms), len(found.down_proj)) == (expected, 3)
    assert (
        losses.plain_name("_fsdp_wrapped_module.model.layers.0._checkpoint_wrapped_module.mlp") == "model.layers.0.mlp"
    )


@pytest.mark.parametrize("position", [0, 5])
def test_tokens_count_as_often_as_told(position):
    """An outlier on the first token, or on another one, where weighing the first token helps it away instead."""
    states = torch.ones(2, 8, 40)
    states[1, position, 3] = 100.0
    u = 100 / math.sqrt((100**2 + 39) / 40)

    def value(first, worst):
        batch = Batch(IDS[:2, :8], 8, Record(norms=[states]))
        return losses.outlier(batch, Outlier(first_token_weight=first, worst_token_weight=worst)).item() / (u - 4) ** 2

    assert value(1.0, 1.0) == pytest.approx(1 / 16, rel=1e-5)
    assert value(1.0, 256.0) == pytest.approx(256 / (2 * 263), rel=1e-5)
    assert value(256.0, 1.0) == pytest.approx((256 if position == 0 else 1) / (2 * 263), rel=1e-5)
    # The first row has no outlier. In the second one the worst token is the first one, or another.
    assert value(64.0, 256.0) == pytest.approx(256 / (2 * (263 if position == 0 else 263 + 63)), rel=1e-5)


SINK_MODELS = {
    "grouped heads": {},
    "QK-norm": {"qk_norm": True},
    "partial rotary": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
    "sliding": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "G4": {"gate_position": "G4", "gate_granularity": "elementwise"},
}


@pytest.mark.parametrize("block", [1 << 21, 40])
@pytest.mark.parametrize("name", SINK_MODELS)
def test_attention_on_the_first_key(name, block, tiny_model, monkeypatch):
    """Against the maps of eager attention, in one block of queries and in many."""
    monkeypatch.setattr(losses, "BLOCK", block)
    model = tiny_model(initializer_range=0.4, **SINK_MODELS[name]).train()
    settings = Sink(eps=0.1)
    batch = batch_of(model, "sink", settings)
    maps = model.set_attn_implementation("eager") or model(IDS, output_attentions=True).attentions
    found = [losses.first_key_attention(*call) for call in batch.student.keys]
    for mine, theirs in zip(found, maps, strict=True):
        torch.testing.assert_close(mine, theirs[..., 0], rtol=1e-4, atol=1e-6)
    expected = torch.stack([(a[:, :, 1:, 0] - 0.1).clamp(min=0).mean() for a in maps]).mean()
    value = losses.sink(batch, settings)
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)
    assert value > 0.01


def test_the_gradient_of_the_sink_penalty(tiny_model):
    """That of the maps of eager attention, for queries, keys and what is below them."""
    gradients = []
    for route in ("ours", "maps"):
        model = tiny_model(initializer_range=0.4).train()
        if route == "ours":
            value = losses.sink(batch_of(model, "sink", Sink(eps=0.1)), Sink(eps=0.1))
        else:
            model.set_attn_implementation("eager")
            maps = model(IDS, output_attentions=True).attentions
            value = torch.stack([(a[:, :, 1:, 0] - 0.1).clamp(min=0).mean() for a in maps]).mean()
        value.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[1].items():
        apart = (gradients[0][name] - gradient).norm() / gradient.norm()
        assert apart < 1e-4, (name, apart)
    assert gradients[0]["model.layers.0.self_attn.k_proj.weight"].any()


def test_no_map_is_kept_for_the_backward_pass(tiny_model, monkeypatch):
    """What autograd keeps grows with the length, not with its square."""

    def kept(length):
        model = tiny_model(num_hidden_layers=1)
        ids = torch.randint(3, 96, (1, length))
        call = batch_of(model, "sink", Sink(), ids=ids).student.keys[0]
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
            losses.first_key_attention(*call)
        return max(sizes)

    monkeypatch.setattr(losses, "BLOCK", 1 << 12)
    assert kept(120) <= 2.5 * kept(60)


@pytest.mark.parametrize("activation", ["sigmoid", "identity"])
def test_gate_is_the_mean_size_of_scores(activation, tiny_model, randomize_gates):
    student = randomize_gates(tiny_model(gate_granularity="headwise", gate_activation=activation)).train()
    value = losses.gate(batch_of(student, "gate", Loss()), Loss())
    scores = student.model(IDS, output_gate_scores=True).gate_scores
    assert any((s < 0).any() for s in scores) == (activation == "identity")
    torch.testing.assert_close(value, torch.stack([s.abs().mean() for s in scores]).mean())


@pytest.mark.parametrize("name", LOSSES)
def test_recording_changes_nothing_and_leaves_nothing(name, student, source):
    settings = LOSS_SETTINGS[name](**({"down_proj": True} if name == "outlier" else {}))
    before = student(IDS).logits
    batch = batch_of(student, name, settings, source)
    assert torch.equal(batch.student.logits, before)
    hooks = [h for m in (*student.modules(), *source.modules()) for h in (*m._forward_hooks, *m._forward_pre_hooks)]
    assert not hooks


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_under_activation_checkpointing(name, student, source):
    """Layers run twice; what is recorded, and every gradient, is as without."""
    settings = LOSS_SETTINGS[name](**({"tau": 1.5, "down_proj": True} if name == "outlier" else {}))
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            student.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        student.zero_grad()
        LOSSES[name].value(batch_of(student, name, settings, source), settings).backward()
        gradients.append({n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert any(gradient.any() for gradient in gradients[0].values())
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, rtol=1e-5, atol=1e-8, msg=key)


@pytest.mark.parametrize("hidden", [[True, False], [True, True], [False, False]])
def test_a_hidden_first_key_is_out_of_sight_of_later_queries(hidden, tiny_model):
    model = tiny_model(initializer_range=0.4)
    mask = losses.hidden_first_key(IDS, hidden)
    given = {} if mask is None else {"attention_mask": mask}
    changed = IDS.clone()
    changed[:, 0] = 95
    first, second = (model.model(ids, use_cache=False, **given).last_hidden_state for ids in (IDS, changed))
    for row in range(2):
        assert torch.equal(first[row, 1:], second[row, 1:]) == hidden[row]
    plain = model.model(IDS, use_cache=False).last_hidden_state
    for row in range(2):
        torch.testing.assert_close(first[row, 0], plain[row, 0])
        if not hidden[row]:
            torch.testing.assert_close(first[row], plain[row])


def test_schedules():
    def factors(**fields):
        return [Schedule(**fields).factor(step, 10) for step in range(10)]

    assert factors() == [1.0] * 10
    assert factors(start=0.3) == [0.0] * 3 + [1.0] * 7
    assert factors(start=3, stop=0.5) == [0.0] * 3 + [1.0] * 2 + [0.0] * 5
    assert factors(ramp=4) == [0.25, 0.5, 0.75] + [1.0] * 7
    assert factors(start=2, ramp=0.2, stop=8) == [0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
