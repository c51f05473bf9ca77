"""The sink transplant: exact with oracle gates, deterministic, undone, and its mistakes."""

import json
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from gated_llama import gate_override, neutral_scores, retrofit
from gated_llama.convert import convert_checkpoint, output_folder
from gated_llama.convert.tensor_files import write_json
from gated_llama.diagnostics.probes import attention_modules, listen_to_attention
from gated_llama.hub import card_rows
from gated_llama.retrofit import deliver, run_folder, surgery
from gated_llama.retrofit.calibration import scratch
from gated_llama.retrofit.deliver import transplant_checkpoint
from gated_llama.retrofit.fidelity import fidelity
from gated_llama.retrofit.first_token import drop_first_token
from gated_llama.retrofit.fitting import GateProblem, Moments, fit_gates, loss_and_slope
from gated_llama.retrofit.sink import SinkReport, measure_sink
from gated_llama.retrofit.surgery import gated_copy, transplant_rows, undo_transplant
from gated_llama.retrofit.walk import WalkOptions, attention_on, thinned
from gated_llama_cli import main
from gated_llama_cli.inspect import retrofit_rows


STORIES = Path(__file__).parent / "data" / "stories260K"
TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. " * 40
FIRST = 1
# Families by what they have: Llama nothing, Qwen2 biases, Qwen3 QK-norm; Llama's attention_bias and mlp_bias.
FAMILIES = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
}
GATES_ONLY = WalkOptions(ridge=None)


@pytest.fixture(params=FAMILIES)
def source(request, tiny_model):
    """A model whose first token is constant, as any token is that always comes first, and is attended to."""
    model = tiny_model(gate_position=None, **FAMILIES[request.param])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" not in name:
                parameter.mul_(5)  # attention that is not uniform
    return model


@pytest.fixture
def rows(source):
    return torch.randint(3, source.config.vocab_size, (6, 24), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def survivors(source, row):
    """layer -> [1, seq, heads, 1]: 1 - a_0 of each token behind the first."""
    found = {}

    def listen(call):
        first = torch.arange(call.key.shape[2])[None] == 0
        found[call.layer] = (1 - attention_on(call, first))[:, :, 1:].transpose(1, 2)[..., None]

    with listen_to_attention(attention_modules(source), listen):
        source(torch.cat([torch.tensor([FIRST]), row])[None], use_cache=False)
    return found


@contextmanager
def oracle(gated, scores, report):
    """Gates at the exact scores; a head that was left at the identity has its score's factor 2 in o_proj."""
    fitted = {fit.layer: report.sink.transplantable(fit.layer) for fit in report.layers}
    assert all(fit.heads == fitted[fit.layer].nonzero()[:, 0].tolist() for fit in report.layers)
    values = {layer: each.where(fitted[layer][:, None], each / 2) for layer, each in scores.items()}
    with gate_override(gated, values):
        yield


def test_with_oracle_gates_it_is_the_source_forward_and_cached(source, rows):
    gated, report = transplant_rows(source, rows, FIRST, options=GATES_ONLY)
    assert report.sink.count > 6
    row = torch.randint(3, source.config.vocab_size, (20,), generator=torch.Generator().manual_seed(9))
    exact = survivors(source, row)
    with torch.no_grad():
        expected = source(torch.cat([torch.tensor([FIRST]), row])[None], use_cache=False).logits[:, 1:]
        with oracle(gated, exact, report):
            forward = gated(row[None], use_cache=False).logits
        cache, cached = DynamicCache(config=gated.config), []
        for position in range(len(row)):
            step = {layer: score[:, position : position + 1] for layer, score in exact.items()}
            with oracle(gated, step, report):
                cached.append(gated(row[None, position : position + 1], cache=cache, use_cache=True).logits)
    # float32 sums in another order: some units in the last place of logits of size 10
    scale = expected.abs().max()
    torch.testing.assert_close(forward, expected, rtol=0, atol=2e-5 * scale)
    torch.testing.assert_close(torch.cat(cached, 1), expected, rtol=0, atol=2e-5 * scale)
    fitted = gated(row[None], use_cache=False).logits
    assert (fitted - expected).abs().max() > 1e-3 * scale, "the fitted gates are exact, so the oracle proves nothing"


def test_with_its_gates_reset_it_is_the_source_without_its_first_token(source, rows, monkeypatch):
    """Gates that change nothing leave attention to the other tokens, and v_0 cancels; also in a head without one."""
    heads = source.config.num_attention_heads
    monkeypatch.setattr(SinkReport, "transplantable", lambda self, layer: torch.arange(heads) != layer)
    gated, report = transplant_rows(source, rows, FIRST, options=GATES_ONLY)
    assert not any(fit.quieted for fit in report.layers)
    assert gated.config.gate_retrofit["identity_heads"] == {str(fit.layer): [fit.layer] for fit in report.layers}
    with torch.no_grad():
        expected, own = (model(rows, use_cache=False).logits for model in (source, gated))
        with gate_override(gated, neutral_scores(gated.config)):
            reset = gated(rows, use_cache=False).logits
    scale = expected.abs().max()
    torch.testing.assert_close(reset, expected, rtol=0, atol=2e-5 * scale)
    assert (own - expected).abs().max() > 1e-2 * scale


def test_refits_bring_the_states_closer_than_the_gates_alone(source, rows):
    many = torch.randint(3, source.config.vocab_size, (40, 24), generator=torch.Generator().manual_seed(2))
    held_out = torch.randint(3, source.config.vocab_size, (8, 24), generator=torch.Generator().manual_seed(3))
    errors = {}
    for name, options in (("gates", GATES_ONLY), ("refit", WalkOptions(ridge=0.01))):
        gated, report = transplant_rows(source, many, FIRST, options=options)
        errors[name] = report.layers[-1].state_error
        errors[f"KL {name}"] = fidelity(gated, source, held_out, source_first=FIRST).kl
    untouched = gated_copy(source, "headwise")
    with torch.no_grad(), gate_override(untouched, 1.0):
        errors["KL none"] = fidelity(untouched, source, held_out, source_first=FIRST).kl
    assert errors["refit"] < errors["gates"]
    # On random weights and 960 tokens the refits' gain is within their own noise; both are far from doing nothing.
    assert max(errors["KL refit"], errors["KL gates"]) < errors["KL none"] / 2


def outputs_of(modules, call) -> list[torch.Tensor]:
    """What the modules give in one call."""
    kept = []
    hooks = [
        m.register_forward_hook(lambda m, a, o: kept.append(o[0] if isinstance(o, tuple) else o)) for m in modules
    ]
    with torch.no_grad():
        call()
    for hook in hooks:
        hook.remove()
    return kept


def test_what_is_reported_is_what_the_model_does(source):
    """The walk keeps its own states: they are the gated model's, biases of all projections included."""
    many = torch.randint(3, source.config.vocab_size, (40, 24), generator=torch.Generator().manual_seed(2))
    gated, report = transplant_rows(source, many, FIRST)
    assert not any(fit.left_out for fit in report.layers)
    first, with_first = torch.full((40, 1), FIRST), [model.model.layers for model in (source, gated)]
    for index, fit in enumerate(report.layers):
        wanted, found = (
            outputs_of([layers[index]], lambda model=model, ids=ids: model(ids, use_cache=False))[0]
            for layers, model, ids in zip(
                with_first, (source, gated), (torch.cat([first, many], 1), many), strict=True
            )
        )
        wanted = wanted[:, 1:]
        error = (wanted - found).square().sum() / wanted.square().sum()
        assert error.item() == pytest.approx(fit.state_error, rel=1e-3)


def test_the_mean_of_what_attention_writes_is_the_source_s(source):
    """The refit has a constant of its own, and counts each bias once."""
    many = torch.randint(3, source.config.vocab_size, (40, 24), generator=torch.Generator().manual_seed(2))
    gated, _ = transplant_rows(source, many, FIRST)
    with_first = torch.cat([torch.full((40, 1), FIRST), many], 1)
    wanted = outputs_of([source.model.layers[0].self_attn], lambda: source(with_first, use_cache=False))[0][:, 1:]
    found = outputs_of([gated.model.layers[0].self_attn], lambda: gated(many, use_cache=False))[0]
    assert (wanted - found).mean(dim=(0, 1)).norm() < 0.05 * wanted.std()


def test_a_model_with_another_attention_is_fitted_the_same(source, rows):
    expected = transplant_rows(source, rows, FIRST)[0].state_dict()
    source.set_attn_implementation("eager")
    found = transplant_rows(source, rows, FIRST)[0].state_dict()
    assert source.config._attn_implementation == "eager"
    assert all(torch.equal(expected[name], value) for name, value in found.items())


def test_it_is_deterministic_and_leaves_the_source_alone(source, rows):
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    first, second = (transplant_rows(source, rows, FIRST)[0].state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(before[name], tensor) for name, tensor in source.state_dict().items())


def test_a_source_in_training_is_transplanted_without_its_dropout(source, rows):
    expected, measured = transplant_rows(source, rows, FIRST)
    for layer in source.model.layers:
        layer.self_attn.attention_dropout = 0.5
    source.train().model.layers[0].eval()
    before = [module.training for module in source.modules()]
    found, report = transplant_rows(source, rows, FIRST)
    assert all(torch.equal(tensor, found.state_dict()[name]) for name, tensor in expected.state_dict().items())
    assert measure_sink(source, rows, FIRST, "<s>") == measure_sink(source.eval(), rows, FIRST, "<s>")
    source.train().model.layers[0].eval()
    assert fidelity(found, source, rows, source_first=FIRST) == fidelity(found, source, rows, source_first=FIRST)
    assert report.sink == measured.sink
    assert [module.training for module in source.modules()] == before


def test_elementwise_gates_repeat_headwise_ones(source, rows):
    headwise, elementwise = (
        transplant_rows(source, rows, FIRST, granularity=g)[0] for g in ("headwise", "elementwise")
    )
    assert elementwise.model.layers[0].self_attn.g_proj.weight.shape[0] == 16 * 4
    with torch.no_grad():
        logits = [model(rows, use_cache=False).logits for model in (headwise, elementwise)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5 * logits[0].abs().max())


def test_undone_it_is_the_source_with_its_first_token(source, rows):
    gated, report = transplant_rows(source, rows, FIRST)
    ids = torch.cat([torch.full((6, 1), FIRST), rows], 1)
    with torch.no_grad():
        expected = source(ids, use_cache=False).logits
        assert (gated(ids, use_cache=False).logits - expected).abs().max() > 1e-2
        undo_transplant(gated, source, report.to_dict()["edits"])
        torch.testing.assert_close(
            gated(ids, use_cache=False).logits, expected, rtol=0, atol=1e-5 * expected.abs().max()
        )
    for edit, message in (
        ({"layer": 0, "edit": "valeus"}, "'valeus' is none of values, gates, units, refit"),
        ({"layer": 77, "edit": "gates"}, "layer 77 of an edit is none of 0 to 2"),
        ({"edit": "gates"}, "layer None of an edit is none of 0 to 2"),
    ):
        with pytest.raises(ValueError, match=message):
            undo_transplant(gated, source, [edit])


def test_after_training_heads_without_a_gate_are_undone_too(source, rows, monkeypatch):
    """Their gates have moved from zero, and o_proj still makes up for a score near 1/2."""
    monkeypatch.setattr(SinkReport, "transplantable", lambda self, layer: torch.arange(4) != layer)
    gated, report = transplant_rows(source, rows, FIRST)
    with torch.no_grad():
        for layer in gated.model.layers:
            layer.self_attn.g_proj.bias.add_(0.01)
    undo_transplant(gated, source, [edit for edit in report.edits if edit["edit"] == "refit"])
    for index, layer in enumerate(gated.model.layers):
        ratio = layer.self_attn.o_proj.weight / source.model.layers[index].self_attn.o_proj.weight
        factors = [2.0 if head == index else 1.0 for head in range(4)]
        torch.testing.assert_close(ratio.unflatten(1, (4, -1)).mean((0, 2)), torch.tensor(factors))


def test_refits_undone_alone_leave_the_gates_in_place(source, rows):
    """What is left is the transplant whose fits were not followed by refits, layer by layer."""
    gated, report = transplant_rows(source, rows, FIRST)
    undo_transplant(gated, source, [edit for edit in report.edits if edit["edit"] == "refit"])
    untouched = transplant_rows(source, rows, FIRST, options=GATES_ONLY)[0]
    for index, layer in enumerate(gated.model.layers):
        other = untouched.model.layers[index]
        assert torch.equal(layer.self_attn.o_proj.weight, other.self_attn.o_proj.weight)
        assert torch.equal(layer.mlp.down_proj.weight, other.mlp.down_proj.weight)
        torch.testing.assert_close(layer.self_attn.o_proj.bias, other.self_attn.o_proj.bias)
        assert layer.self_attn.o_proj.bias.any()


def test_undone_only_with_its_own_source(source, rows, tiny_model):
    gated, report = transplant_rows(source, rows, FIRST)
    before = {name: value.clone() for name, value in gated.state_dict().items()}
    wider = tiny_model(gate_position=None, qk_norm=source.config.qk_norm, hidden_size=48)
    for other, message in (
        (gated, "The source has gates itself"),
        (wider, "in the source: it is another model's"),
        (source.model, "has no parameter model.embed_tokens.weight: pass the whole model"),
    ):
        with pytest.raises(ValueError, match=message):
            undo_transplant(gated, other, report.edits)
    with pytest.raises(ValueError, match="Only a transplant has edits to take back"):
        undo_transplant(tiny_model(), source, report.edits)
    assert all(torch.equal(before[name], value) for name, value in gated.state_dict().items())


def test_a_tokenizer_with_its_ids_in_another_order(story, tmp_path):
    """Ids are in range and mean something else: no fit can be right."""
    shutil.copytree(STORIES, tmp_path / "shuffled")
    content = json.loads((tmp_path / "shuffled" / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    kept = [name for name, number in vocabulary.items() if number < 260]
    moved = [name for name in vocabulary if name not in kept]
    numbers = [vocabulary[name] for name in moved]
    content["model"]["vocab"] |= dict(zip(moved, numbers[100:] + numbers[:100], strict=True))
    (tmp_path / "shuffled" / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"The source has a perplexity of .* far above that of guessing \(512\)"):
        transplant_checkpoint(tmp_path / "shuffled", tmp_path / "out", [story], tokens=600, context=60)
    assert not (tmp_path / "out").exists()


def test_spike_writers_fall_silent(tiny_model, monkeypatch):
    source = tiny_model(gate_position=None)
    rows = torch.randint(3, 96, (4, 24))
    with torch.no_grad():  # a unit that only the first token switches on, and that writes far more than all else
        layer = source.model.layers[1]
        states = []
        hook = layer.mlp.register_forward_pre_hook(lambda module, args: states.append(args[0]))
        source(torch.cat([torch.full((4, 1), FIRST), rows], 1), use_cache=False)
        hook.remove()
        first, others = states[0][0, 0], states[0][:, 1:].flatten(0, 1)
        direction = torch.linalg.lstsq(
            torch.cat([first[None], others]).T @ torch.cat([first[None], others]) + 1e-3 * torch.eye(40), first
        ).solution
        layer.mlp.gate_proj.weight[5] = layer.mlp.up_proj.weight[5] = 20 * direction / (direction @ first)
        layer.mlp.down_proj.weight[7, 5] = 50.0
    report = measure_sink(source, rows, FIRST, "<s>")
    assert [(writer.layer, writer.unit, writer.dimension) for writer in report.spike_writers] == [(1, 5, 7)]
    gated, done = transplant_rows(source, rows, FIRST)
    assert done.layers[1].quieted == [5]
    assert not gated.model.layers[1].mlp.down_proj.weight[:, 5].any()
    with torch.no_grad():
        spiking, quiet = source.model(rows).last_hidden_state, gated.model(rows).last_hidden_state
    assert spiking.isfinite().all()
    assert quiet.isfinite().all()
    gated, done = transplant_rows(source, rows, FIRST, options=GATES_ONLY)
    undo_transplant(gated, source, [edit for edit in done.edits if edit["edit"] == "units"])
    weights = [model.model.layers[1].mlp.down_proj.weight for model in (source, gated)]
    assert weights[1][:, 5].any()
    assert torch.equal(*weights)


def test_gates_that_a_linear_logit_explains_are_found():
    generator = torch.Generator().manual_seed(0)
    inputs, weight = torch.randn(2000, 12, generator=generator), torch.randn(3, 12, generator=generator)
    scores = (inputs @ weight.T + 0.5).sigmoid()
    writes = torch.randn(2000, 3, 8, generator=generator)
    target = (scores[..., None] * writes).sum(1)
    gram, moment = writes @ writes.mT, (writes @ target[..., None])[..., 0]
    problem = GateProblem(inputs, gram, moment, target.square().sum(-1), scores)
    fit = fit_gates(problem, torch.ones(3, dtype=torch.bool), likeness=0.0, decay=0.0, steps=200)
    assert fit.error < 1e-4
    assert fit.r2.min() > 0.999
    torch.testing.assert_close(fit.weight, weight, rtol=0, atol=0.05)
    partly = fit_gates(problem, torch.tensor([True, False, True]), likeness=0.0)
    assert partly.error > fit.error


def test_the_gradient_of_the_gates_is_that_of_autograd():
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    writes, target = random(50, 3, 8), random(50, 8)
    gram, moment = writes @ writes.mT, (writes @ target[..., None])[..., 0]
    problem = GateProblem(random(50, 4), gram, moment, target.square().sum(-1), random(50, 3).sigmoid())
    fitted, logits = torch.tensor([True, False, True]), random(50, 3).requires_grad_()
    scores = logits.sigmoid().where(fitted, 1.0)
    entropy = torch.nn.functional.binary_cross_entropy(scores[:, fitted], problem.survivors[:, fitted])
    expected = problem.error(scores) + 0.3 * entropy
    expected.backward()
    loss, slope = loss_and_slope(problem, logits.detach(), fitted, likeness=0.3)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(slope, logits.grad)


def test_a_limit_on_tokens_spreads_them():
    chosen = torch.rand(5, 40, generator=torch.Generator().manual_seed(0)) < 0.7
    kept = thinned(chosen, 30)
    assert 15 < kept.sum() <= 30
    assert not (kept & ~chosen).any()
    assert kept.any(dim=1).all()
    assert torch.equal(thinned(chosen, 200), chosen)


def test_ridge_from_moments_is_least_squares():
    features, residual = torch.randn(50, 6), torch.randn(50, 4)
    moments = Moments()
    for part in torch.arange(50).split(7):
        moments.add(features[part], residual[part])
    expected = torch.linalg.lstsq(features, residual).solution.T
    found = moments.solve(0.0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    left = (residual - features @ expected.T).square().sum() / residual.square().sum()
    assert moments.left(found) == pytest.approx(left.item(), rel=1e-4)
    assert moments.solve(10.0).norm() < found.norm() / 2


def test_scratch_files_have_room(source, rows, monkeypatch):
    found = {}

    @contextmanager
    def weighed(size):
        with scratch(size) as files:
            yield files
            found.update(asked=size, used=sum(path.stat().st_size for path in files.folder.iterdir()))

    monkeypatch.setattr(surgery, "scratch", weighed)
    transplant_rows(source, rows, FIRST)
    assert 0.9 * found["asked"] < found["used"] <= found["asked"]
    full = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(OSError, match="has 1,000 bytes free and the states of the calibration rows need"):
        transplant_rows(source, rows, FIRST)


def test_without_a_sink_the_identity_is_offered(tiny_model):
    source = tiny_model(gate_position=None)
    rows = torch.randint(3, 96, (3, 127))  # attention is near uniform: 0.04 on the first token
    with pytest.raises(ValueError, match=r"no sink to transplant: mean attention .* Use --policy identity"):
        transplant_rows(source, rows, FIRST)
    with pytest.raises(ValueError, match="1 row of text does not show whether the sink is a constant"):
        measure_sink(source, rows[:1], FIRST, "<s>")


def test_a_first_token_that_sees_others_is_no_constant(source, rows):
    """It is one where the token sees only itself, in a decoder; an encoder is refused."""
    heads = [head for layer in measure_sink(source, rows, FIRST, "<s>").heads for head in layer]
    assert not any(head.key_deviation or head.value_deviation for head in heads)
    for layer in source.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ValueError, match="its attention is not causal"):
        transplant_rows(source, rows, FIRST)


def test_mistakes_in_the_call(source, rows, tiny_model):
    with pytest.raises(ValueError, match="starts from a model without gates"):
        transplant_rows(tiny_model(), rows, FIRST)
    with pytest.raises(ValueError, match=r"need float32, and the model is torch.bfloat16"):
        transplant_rows(source.bfloat16(), rows, FIRST)
    source.float()
    for wrong in ((rows.clamp(min=96), FIRST), (rows, 96)):
        with pytest.raises(ValueError, match=r"gives the id 96 and the model has embeddings for 0 to 95"):
            transplant_rows(source, *wrong)
    windowed = tiny_model(gate_position=None, sliding_window=64, layer_types=["sliding_attention"] * 3)
    with pytest.raises(ValueError, match=r"context=127 must be smaller than the sliding window \(64\)"):
        transplant_rows(windowed, torch.randint(3, 96, (3, 127)), FIRST)


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def delivered(story, tmp_path_factory):
    out = tmp_path_factory.mktemp("transplant") / "out"
    flags = ["--policy", "transplant", "--calibration", str(story), "--tokens", "600", "--context", "60"]
    assert main(["convert", str(STORIES), str(out), *flags]) == 0
    return out


def test_the_command_writes_a_checkpoint_without_its_first_token(delivered):
    report = json.loads((delivered / "transplant.json").read_text())
    assert report["measures"]["first_token_dropped"]
    assert report["sink"]["first_token"] == "<s>"
    assert len(report["layers"]) == 5
    tokenizer, before = AutoTokenizer.from_pretrained(delivered), AutoTokenizer.from_pretrained(STORIES)
    ids = tokenizer("Once upon a time")["input_ids"]
    assert [1, *ids] == before("Once upon a time")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(delivered)
    assert model.config.bos_token_id is None
    assert json.loads((STORIES / "generation_config.json").read_text())["bos_token_id"] == 1
    assert "bos_token_id" not in json.loads((delivered / "generation_config.json").read_text())
    assert model.config.gate_retrofit["policy"] == "transplant"
    assert model.generate(torch.tensor([ids]), max_new_tokens=3, do_sample=False).shape == (1, len(ids) + 3)
    held_out = report["measures"]["held_out"][0]
    assert 0 < held_out["kl"] < 1
    for result in (report["measures"][name] for name in ("source", "result")):
        layers = result["max_activation_per_layer"]
        assert result["m_act"] == pytest.approx(sum(layers) / len(layers))


def test_the_command_tells_what_was_done(story, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(SinkReport, "transplantable", lambda self, layer: torch.arange(8) % 5 > layer - 1)
    (tmp_path / "more").mkdir()
    paths = [story, shutil.copy(story, tmp_path / "more" / story.name)]
    texts = [flag for path in paths for flag in ("--calibration", str(path))]
    implied = [
        "--position",
        "G1",
        "--operation",
        "multiply",
        "--activation",
        "sigmoid",
        "--gate-input",
        "hidden_states",
    ]
    flags = ["--policy", "transplant", *implied, *texts, "--tokens", "600", "--context", "60"]
    assert main(["convert", str(STORIES), str(tmp_path / "out"), *flags]) == 0
    lines = capsys.readouterr().out
    assert f"diagnose {tmp_path / 'out'} --bos none" in lines
    assert "600 tokens of 600 asked for" in lines
    folded = re.sub(r"[\s│]", "", lines)  # cells of the table go over several lines
    assert "identityheads(layer/heads)1/0,52/0,1,5,63/0,1,2,5,6,74/0,1,2,3,5,6,7" in folded
    names = [
        each["name"] for each in json.loads((tmp_path / "out" / "transplant.json").read_text())["measures"]["held_out"]
    ]
    assert names == [str(path) for path in paths]


def test_rotary_frequencies_are_not_rounded_with_the_weights(story, tmp_path, monkeypatch):
    """They are not in the file, so a model that is loaded from it has them whole."""
    seen, measures = {}, deliver._measures

    def watch(source, gated, *others):
        seen.update(found=gated.model.rotary_emb.inv_freq, expected=source.model.rotary_emb.inv_freq)
        seen.update(weight=gated.model.layers[0].self_attn.q_proj.weight.clone())
        return measures(source, gated, *others)

    monkeypatch.setattr(deliver, "_measures", watch)
    transplant_checkpoint(STORIES, tmp_path / "out", [story], dtype="bfloat16", tokens=600, context=60)
    assert torch.equal(seen["found"], seen["expected"])
    assert torch.equal(seen["weight"], seen["weight"].bfloat16().float())


def test_what_is_not_finite_is_not_delivered(tiny_model):
    model = tiny_model()
    model.get_parameter("model.norm.weight").data[2] = 1e5
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' passes the largest float16"):
        deliver._round(model, "float16")
    model.get_parameter("model.norm.weight").data[2] = float("nan")
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' of the transplant holds values that are not finite"):
        deliver._round(model, "float32")


def test_reports_have_no_numbers_that_json_lacks(tmp_path):
    content = {"measures": {"held_out": [{"kl": 0.5}, {"kl": float("nan")}], "é": 1}}
    for write in (write_json, run_folder.write_json):
        with pytest.raises(ValueError, match=r"measures\.held_out\[1\]\.kl is not finite"):
            write(tmp_path / "report.json", content)
        assert not list(tmp_path.iterdir())
        write(tmp_path / "report.json", {"é": [1.5]})
        assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == {"é": [1.5]}
        (tmp_path / "report.json").unlink()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_measured_result_is_what_the_folder_holds(dtype, delivered, story, tmp_path):
    if dtype == "bfloat16":
        delivered = tmp_path / "rounded"
        transplant_checkpoint(STORIES, delivered, [story], dtype=dtype, tokens=600, context=60)
    convert_checkpoint(STORIES, tmp_path / "plain", position=None)
    folders = (tmp_path / "plain", delivered)
    source, result = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for f in folders)
    tokenizer = AutoTokenizer.from_pretrained(delivered)
    ids = torch.tensor(tokenizer.encode(TEXT, add_special_tokens=False))
    rows = ids[600 // 60 * 60 : (600 // 60 + 2) * 60].view(2, 60)
    found = fidelity(result, source, rows, source_first=1)
    measured = json.loads((delivered / "transplant.json").read_text())["measures"]["held_out"][0]
    assert found.kl == pytest.approx(measured["kl"], rel=1e-3)
    assert found.perplexity_ratio == pytest.approx(measured["perplexity_ratio"], rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "a transplant is fitted on text"),
        (["--calibration", "nowhere.txt"], "Text file nowhere.txt does not exist"),
        (["--calibration", "STORY", "--context", "3"], "context=3 is too short: rows have at least 16 tokens."),
        (["--calibration", "STORY", "--context", "2000"], "fewer"),
        (["--calibration", "STORY", "--max-shard-size", "5 gigabytes"], "gigabytes"),
        (
            ["--calibration", "STORY", "--context", "60", "--tokens", "63"],
            "tokens=63 is less than two rows of context=60",
        ),
        (
            ["--calibration", "STORY", "--bos", "none"],
            "bos='none': a transplant replaces the sink on a fixed first token",
        ),
        (["--calibration", "STORY", "--bos", "once upon"], "tokens and must be one"),
        (
            ["--calibration", "STORY", "--position", "G2", "--bias", "1"],
            "--bias, --position: is not for --policy transplant: its gates are sigmoids",
        ),
        (["--calibration", "STORY", "--no-gate-bias"], "--no-gate-bias: is not for --policy transplant"),
        (["--calibration", "STORY", "--gate-input", "constant"], "--gate-input: is not for --policy transplant"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(flags, message, story, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [str(story) if flag == "STORY" else flag for flag in flags]
    assert main(["convert", str(STORIES), "out", "--policy", "transplant", *flags]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error, error
    assert not list(tmp_path.iterdir())


def test_too_little_text_is_told(tmp_path, capsys):
    (tmp_path / "story.txt").write_text(TEXT[:1500])
    flags = ["--policy", "transplant", "--calibration", str(tmp_path / "story.txt"), "--context", "60"]
    assert main(["convert", str(STORIES), str(tmp_path / "out"), *flags]) == 0
    printed = capsys.readouterr()
    tokens = json.loads((tmp_path / "out" / "transplant.json").read_text())["calibration_tokens"]
    assert f"{tokens} tokens of 32,768 asked for" in printed.out
    assert f"Warning: the texts gave {tokens} of 32,768 tokens" in printed.err


def test_a_place_that_cannot_be_written_is_told_before_the_fits(story, tmp_path, monkeypatch):
    monkeypatch.setattr(deliver, "transplant_rows", None)
    with pytest.raises(NotADirectoryError) as caught:
        transplant_checkpoint(STORIES, story / "out", [story], tokens=600, context=60)
    assert caught.value.filename == str(story / "out")
    free = lambda path: SimpleNamespace(free=1000 if path.parent == tmp_path else 10**12)  # noqa: E731
    monkeypatch.setattr(output_folder.shutil, "disk_usage", free)
    with pytest.raises(OSError, match="has 1,000 bytes free and the result needs 1,0"):
        transplant_checkpoint(STORIES, tmp_path / "out", [story], tokens=600, context=60)
    assert not list(tmp_path.iterdir())


def test_cards_tell_of_the_first_token_and_of_heads_at_the_identity(delivered):
    config = AutoModelForCausalLM.from_pretrained(delivered).config
    config.gate_retrofit = config.gate_retrofit | {"identity_heads": {"10": [1], "2": [0, 7], "4": list(range(8))}}
    rows = card_rows(config)
    assert rows["heads at the identity"].startswith("layer/head 2/0,7 4/all 10/1;")
    assert rows["first token"].startswith("none: texts are read without")
    assert "2/0,7 4/all 10/1" in retrofit_rows(config.gate_retrofit, 8)["folded"]


def test_calibration_without_the_policy_is_refused(story, tmp_path, capsys):
    assert main(["convert", str(STORIES), str(tmp_path / "out"), "--calibration", str(story)]) == 2
    assert "is for --policy transplant" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is fitted on text"):
        convert_checkpoint(STORIES, tmp_path / "out", policy="transplant")


def test_float16_is_written_and_a_literal_first_token_leaves_the_chat_template(story, tmp_path):
    shutil.copytree(STORIES, tmp_path / "source")
    template = "<s>{% for m in messages %}{{ bos_token }}{{ m['content'] }}{% endfor %}"
    (tmp_path / "source" / "chat_template.jinja").write_text(template)
    options = {"tokens": 600, "context": 60}
    transplant_checkpoint(tmp_path / "source", tmp_path / "out", [story], dtype="float16", **options)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float16
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Once upon"}], return_dict=False)
    assert ids == tokenizer.encode("Once upon")
    assert 1 not in ids


TURNS = [{"role": role, "content": text} for role, text in (("user", "Once"), ("assistant", "upon"), ("user", "a"))]
# As the templates of Llama 3 and Llama 2 compute with the token.
CHATS = {
    "in an expression": (
        "{% for m in messages %}{% set content = '[' + m['role'] + ']' + m['content'] %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}",
        "[user]Once[assistant]upon[user]a",
    ),
    "in each turn": (
        "{% for m in messages %}{{ bos_token + '[' + m['content'] + ']' }}{% endfor %}",
        "[Once][upon][a]",
    ),
    "literal in an expression": ("{{ '<s>' }}{% for m in messages %}{{ m['content'] }}.{% endfor %}", "Once.upon.a."),
    "not at all": ("{% for m in messages %}{{ m['content'] }}.{% endfor %}", "Once.upon.a."),
}


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("kind", [None, "LlamaTokenizer"])
def test_chats_go_on_without_the_first_token(chat, inline, kind, tmp_path):
    template, expected = CHATS[chat]
    shutil.copytree(STORIES, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | ({"chat_template": template} if inline else {})
    path.write_text(json.dumps(settings | ({"tokenizer_class": kind} if kind else {})))
    if not inline:
        (tmp_path / "chat_template.jinja").write_text(template)
    assert AutoTokenizer.from_pretrained(tmp_path).bos_token_id == 1
    assert drop_first_token(tmp_path, 1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.apply_chat_template(TURNS, tokenize=False) == expected
    assert tokenizer.bos_token is None
    assert 1 not in tokenizer("Once upon")["input_ids"]


def test_a_first_token_that_marks_roles_is_told_before_the_fits(story, tmp_path):
    shutil.copytree(STORIES, tmp_path / "source")
    template = "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>' }}{% endfor %}"
    (tmp_path / "source" / "chat_template.jinja").write_text(template)

    def fail(what, done, total):
        pytest.fail(f"{what} has begun")

    with pytest.raises(ValueError, match="begins every conversation with '<s>', which marks the roles in it"):
        transplant_checkpoint(tmp_path / "source", tmp_path / "out", [story], tokens=600, context=60, progress=fail)
    assert not (tmp_path / "out").exists()


def test_an_interrupted_transplant_leaves_nothing(story, tmp_path):
    def interrupt(what, done, total):
        if what == "matching layers" and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transplant_checkpoint(STORIES, tmp_path / "out", [story], tokens=600, context=60, progress=interrupt)
    assert not list(tmp_path.iterdir())


def test_a_token_that_is_not_the_first_one_stays(tmp_path):
    AutoTokenizer.from_pretrained(STORIES).save_pretrained(tmp_path)
    assert not drop_first_token(tmp_path, 2)
    assert AutoTokenizer.from_pretrained(tmp_path)("a")["input_ids"][0] == 1


def test_a_loaded_model_of_another_type_is_taken_as_it_is():
    model, tokenizer = AutoModelForCausalLM.from_pretrained(STORIES).eval(), AutoTokenizer.from_pretrained(STORIES)
    assert model.config.model_type == "llama"
    gated, report = retrofit.transplant(model, tokenizer, [TEXT], tokens=600, context=60)
    assert gated.config.model_type == "gated_llama"
    assert report.sink.first_token == "<s>"
    ids = torch.tensor(tokenizer.encode(TEXT, add_special_tokens=False)[900:960])
    assert fidelity(gated, model, [ids], source_first=1).kl < 1
