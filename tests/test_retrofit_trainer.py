"""RetrofitTrainer: accumulation, resuming, ranks, parameter groups, stages, texts, and what watches."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import get_peft_model
from retrofit_runs import ALL_LOSSES, STORIES, prepare, run, settings, steps
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from gated_llama import GatedLlamaConfig, GatedLlamaForCausalLM
from gated_llama.convert import convert_checkpoint
from gated_llama.convert.tensor_files import read_json
from gated_llama.diagnostics import corpus
from gated_llama.diagnostics.corpus import read_documents
from gated_llama.modeling_gated import AttentionGate
from gated_llama.retrofit import data, losses, run_folder, targets
from gated_llama.retrofit.adapters import gate_adapter_config
from gated_llama.retrofit.callbacks import Interruption
from gated_llama.retrofit.settings import Data, Text
from gated_llama.retrofit.trainer import RetrofitTrainer, check_run, frozen, parameter_groups
from gated_llama.retrofit.training import build_trainer, train


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """(folder, recipe) of an identity conversion with biases in the attention, as a transplant has them."""
    folder = tmp_path_factory.mktemp("retrofit")
    return folder, prepare(folder)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(STORIES)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


# What a step is.


def test_micro_batches_do_not_matter(workshop):
    """Eight rows at once, one at a time, and two at a time take the same steps, with every loss."""
    folder, recipe = workshop
    results = {}
    for batch, accumulation in ((8, 1), (1, 8), (2, 4)):
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        training = recipe["training"] | sizes | {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1}
        name = f"accumulate-{batch}"
        report = run(folder, recipe, name, losses=ALL_LOSSES, training=training, first_key_dropout=0.5)
        results[batch] = steps(report), weights(folder / name)
    for batch in (1, 2):
        for mine, theirs in zip(results[batch][0], results[8][0], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
        for name, value in results[8][1].items():
            torch.testing.assert_close(results[batch][1][name], value, rtol=1e-4, atol=1e-6, msg=name)
    start = load_file(folder / "gated" / "model.safetensors")
    moved = [name for name, value in results[8][1].items() if not torch.equal(value, start[name])]
    assert len(moved) == len(start)


def test_the_loss_is_the_weighted_sum_of_its_terms(workshop):
    folder, recipe = workshop
    report = run(folder, recipe, "sum", losses=ALL_LOSSES)
    for entry in steps(report):
        weights = {"next_token": 0.3, "kl": 1.0, "attention_output": 0.5, "outlier": 0.1, "sink": 1.0, "gate": 0.1}
        total = sum(weight * entry[f"loss_{name}"] for name, weight in weights.items())
        assert entry["loss"] == pytest.approx(total, rel=1e-5)
        assert entry["learning_rate_gates"] == pytest.approx(10 * entry["learning_rate"])
        assert entry["tokens"] == entry["step"] * 32


def test_identity_starts_at_the_source(workshop):
    """With the same first token on both sides, KL and output matching are zero at the first step."""
    folder, recipe = workshop
    report = run(folder, recipe, "same", losses={"kl": 1.0, "attention_output": 1.0}, student_bos="<s>")
    first = steps(report)[0]
    assert first["loss_kl"] == pytest.approx(0, abs=1e-6)
    assert first["loss_attention_output"] == pytest.approx(0, abs=1e-9)


def test_kl_falls(tmp_path):
    """From random gates, which break the model; the student runs without the first token of the source."""
    recipe = prepare(tmp_path, policy="normal")
    sizes = {"per_device_train_batch_size": 4, "max_steps": 25}
    report = run(tmp_path, recipe, data={"repeat": True}, training=sizes)
    values = [entry["loss_kl"] for entry in steps(report)]
    assert sum(values[-5:]) / 5 < 0.5 * values[0]


def test_schedules_switch_terms(workshop):
    folder, recipe = workshop
    losses = {"next_token": {"weight": 1.0, "stop": 3}, "gate": {"weight": 2.0, "start": 2, "ramp": 2}}
    log = steps(run(folder, recipe, "schedule", losses=losses))
    assert [("loss_next_token" in e, "loss_gate" in e) for e in log] == [(True, False)] * 2 + [(True, True)] + [
        (False, True)
    ] * 3
    assert log[2]["loss"] == pytest.approx(log[2]["loss_next_token"] + log[2]["loss_gate"])
    assert log[3]["loss"] == pytest.approx(2 * log[3]["loss_gate"])


class Killed(Exception):
    """What ends a computation half-way."""


def test_targets_of_the_source_are_kept_in_a_file(workshop, monkeypatch):
    """They are computed once, also in two attempts, and give the losses of the source itself."""
    folder, recipe = workshop
    live = run(folder, recipe, "live", losses={"kl": {"top_k": 20}})
    kl = {"kl": {"top_k": 20, "targets": str(folder / "kept" / "targets.bin")}}

    def stop(line):
        if line.startswith("source: row 4"):
            raise Killed

    inside = {"kl": {"top_k": 20, "targets": str(folder / "inside" / "targets.bin")}}
    chosen = settings(folder, recipe, output=str(folder / "inside"), losses=inside)
    with pytest.raises(Killed):
        train(chosen, say=stop)
    assert train(chosen).complete
    with pytest.raises(Killed):
        build_trainer(settings(folder, recipe, output=str(folder / "stored"), losses=kl), stop)
    partial = folder / "kept" / ".targets.bin.partial"
    assert partial.stat().st_size == targets.HEADER + 3 * 32 * 20 * 8
    with partial.open("ab") as file:
        file.write(b"a record that was cut off")
    lines = []
    trainer, _ = build_trainer(settings(folder, recipe, losses=kl), lines.append)
    assert sum(line.startswith("source: row") for line in lines) == 3
    assert trainer.source is None
    monkeypatch.setattr(targets, "compute", lambda *_: pytest.fail("computed again"))
    stored = run(folder, recipe, "stored", losses=kl)
    for mine, theirs in zip(steps(stored), steps(live), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    with_states = run(folder, recipe, "stored-states", losses=kl | {"attention_output": 1.0}, student_bos="<s>")
    assert steps(with_states)[0]["loss_attention_output"] == pytest.approx(0, abs=1e-9)
    assert steps(with_states)[0]["loss_kl"] == pytest.approx(0, abs=1e-6)
    other = folder / "other.txt"
    other.write_text(Path(next(iter(recipe["data"]["texts"].values()))).read_text().replace("the", "a"))
    texts = dict.fromkeys(recipe["data"]["texts"], str(other))
    for changes in (
        {"seed": 1},
        {"losses": {"kl": kl["kl"] | {"top_k": 21}}},
        {"source_bos": "none"},
        {"data": recipe["data"] | {"texts": texts}},
    ):
        with pytest.raises(ValueError, match="was made for other rows or texts, another source or another top_k"):
            build_trainer(settings(folder, recipe, **({"losses": kl} | changes)))


# Stopping and continuing.


class Stop:
    """A progress callback that sends a signal once a step is reached, as Ctrl-C does."""

    def __init__(self, step: int, number=signal.SIGINT):
        self.step, self.number = step, number

    def __call__(self, step, steps, log):
        if step == self.step and "loss" in log:
            self.step = None
            os.kill(os.getpid(), self.number)


STAGES = [{"train": ["gates"], "until": 2}, {"train": ["gates", "attention"], "until": 4}, {"train": ["all"]}]


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_run_that_was_interrupted_has_the_losses_of_one_that_was_not(stop, workshop):
    """Bit for bit: losses, measurements and weights, with stages, dropout of keys and of attention."""
    handler = signal.getsignal(signal.SIGINT)
    folder, recipe = workshop
    gated = folder / "gated"
    config = json.loads((gated / "config.json").read_text())
    (gated / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    try:
        options = {"losses": ALL_LOSSES, "stages": STAGES, "first_key_dropout": 0.5, "measure": {"every": 2}}
        if not (folder / "whole").is_dir():
            run(folder, recipe, "whole", **options)
        whole = train(settings(folder, recipe, output=str(folder / "whole"), **options))
        chosen = settings(folder, recipe, output=str(folder / f"stopped-{stop}"), **options)
        stopped = train(chosen, progress=Stop(stop))
        assert stopped.interrupted
        assert stopped.steps == stop + 1  # the step that was under way
        assert signal.getsignal(signal.SIGINT) is handler
        assert not (folder / f"stopped-{stop}" / "model").exists()
        record = json.loads((folder / f"stopped-{stop}" / "training.json").read_text())
        assert (record["complete"], record["steps"]) == (False, stop + 1)
        resumed = train(chosen)
    finally:
        (gated / "config.json").write_text(json.dumps(config))
    assert resumed.complete
    assert [{k: v for k, v in e.items() if "seconds" not in k} for e in resumed.log] == [
        {k: v for k, v in e.items() if "seconds" not in k} for e in whole.log
    ]
    for name, value in weights(folder / "whole").items():
        assert torch.equal(weights(folder / f"stopped-{stop}")[name], value), name
    assert not list((folder / f"stopped-{stop}").glob("checkpoint-*"))


def test_steps_between_two_logs_are_not_lost(workshop):
    """What is saved is logged first: sums over the steps since the last log are in no checkpoint."""
    folder, recipe = workshop
    training = recipe["training"] | {"max_steps": 8}
    single = {entry["step"]: entry["loss_kl"] for entry in steps(run(folder, recipe, "single", training=training))}
    training |= {"logging_steps": 4}
    chosen = settings(folder, recipe, output=str(folder / "seldom"), training=training)
    assert train(chosen, progress=Stop(4)).steps == 5
    found = {entry["step"]: entry["loss_kl"] for entry in steps(train(chosen))}
    spans = {4: [1, 2, 3, 4], 5: [5], 8: [6, 7, 8]}
    assert found == {end: pytest.approx(sum(single[s] for s in span) / len(span)) for end, span in spans.items()}


def test_the_last_step_is_logged_whatever_is_saved(workshop):
    """Also where the library's own logs look like its summary of a run."""
    folder, recipe = workshop
    training = recipe["training"] | {
        "max_steps": 5,
        "logging_steps": 3,
        "save_strategy": "no",
        "include_num_input_tokens_seen": True,
    }
    report = run(folder, recipe, "rare", training=training)
    assert [entry["step"] for entry in steps(report)] == [3, 5]


def test_weights_that_are_not_finite_are_not_saved(workshop, monkeypatch):
    """The loss and the gradient of the last step may still be finite."""
    folder, recipe = workshop
    training = recipe["training"] | {"max_steps": 1, "save_steps": 1}
    chosen = settings(folder, recipe, output=str(folder / "overflowed"), training=training)
    save = RetrofitTrainer._save

    def overflowed(self, output_dir=None, state_dict=None):
        self.model.model.norm.weight.data[3] = torch.inf
        save(self, output_dir, state_dict)

    monkeypatch.setattr(RetrofitTrainer, "_save", overflowed)
    with pytest.raises(ValueError, match=r"model\.norm\.weight holds values that are not finite at step 1: lower"):
        train(chosen)
    assert not list((folder / "overflowed").rglob("*.safetensors"))


def test_a_gradient_that_is_no_number_ends_the_run_before_it_is_saved(workshop, monkeypatch):
    folder, recipe = workshop
    training = recipe["training"] | {"max_steps": 4, "save_steps": 1}
    chosen = settings(folder, recipe, output=str(folder / "broken"), training=training)
    compute = RetrofitTrainer.compute_loss

    def broken(self, model, *arguments, **options):
        """At the third step a square root of zero is added, whose gradient is none."""
        loss, weight = compute(self, model, *arguments, **options), next(model.parameters())
        return loss + (weight - weight.detach()).abs().sum().sqrt() if self.state.global_step == 2 else loss

    monkeypatch.setattr(RetrofitTrainer, "compute_loss", broken)
    with pytest.raises(ValueError, match=r"The grad_norm is nan at step 3: lower .* start anew \(with --resume none"):
        train(chosen)
    text = (folder / "broken" / "training.json").read_text()
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [entry["step"] for entry in record["log"] if "loss" in entry] == [1, 2, 3]
    assert record["log"][-1]["grad_norm"] is None
    assert not record["complete"]
    saved = load_file(folder / "broken" / "checkpoint-2" / "model.safetensors")
    assert all(value.isfinite().all() for value in saved.values())
    assert not (folder / "broken" / "checkpoint-3").exists()


@pytest.mark.parametrize("saving", ["no", "steps"])
def test_weights_that_are_no_numbers_are_not_saved(saving, workshop, monkeypatch):
    """The last step's update has been through no loss: neither a checkpoint nor the result may hold it."""
    folder, recipe = workshop
    training = recipe["training"] | {"max_steps": 2, "save_strategy": saving, "save_steps": 1}
    chosen = settings(folder, recipe, output=str(folder / f"spoilt-{saving}"), training=training)

    class Spoil(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            if state.global_step == 2:
                model.get_parameter("model.layers.1.self_attn.g_proj.weight").data[0, 0] = float("nan")

    monkeypatch.setattr("gated_llama.retrofit.training.Told", lambda progress: Spoil())
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.g_proj\.weight holds .* not finite at step 2"):
        train(chosen, progress=lambda *told: None)
    written = {path.parent.name for path in (folder / f"spoilt-{saving}").rglob("model.safetensors")}
    assert written == ({"checkpoint-1"} if saving == "steps" else set())


def test_what_is_watched_is_no_number(workshop, monkeypatch):
    """Measured before the step itself is logged."""
    folder, recipe = workshop
    training = recipe["training"] | {"learning_rate": 1e9, "optim": "sgd", "max_grad_norm": 0.0}
    chosen = settings(folder, recipe, output=str(folder / "diverged"), training=training, measure={"every": 1})
    with pytest.raises(ValueError, match=r"not finite .* at step (\d): lower the learning rate") as caught:
        train(chosen)
    step = int(re.search(r"at step (\d)", str(caught.value))[1])
    text = (folder / "diverged" / "training.json").read_text()
    log = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["log"]
    assert [entry["step"] for entry in log if "loss" in entry] == list(range(1, step + 1))


def test_gates_alone_are_rated(workshop):
    folder, recipe = workshop
    gates = {"learning_rate": 0.01, "multiplier": None}
    training = recipe["training"] | {"learning_rate": 0.0, "max_steps": 3, "lr_scheduler_type": "linear"}
    report = run(folder, recipe, "gates-rate", gates=gates, training=training)
    rates = [entry["learning_rate_gates"] for entry in steps(report)]
    assert rates == pytest.approx([0.01, 0.01 * 2 / 3, 0.01 / 3])
    assert all(entry["learning_rate"] == 0 for entry in steps(report))


def test_a_gate_without_parameters_is_trained_through(workshop):
    folder, recipe = workshop
    gate = {"gate_input": "states", "granularity": "elementwise"}
    convert_checkpoint(STORIES, folder / "states", policy="normal", **gate)
    changes = {"model": str(folder / "states"), "losses": {"next_token": 1.0}}
    rated = settings(folder, recipe, **changes)
    with pytest.raises(ValueError, match="no stage trains parameters of gates"):
        build_trainer(rated)
    free = {**changes, "gates": {"multiplier": None}}
    with pytest.raises(ValueError, match=r"A stage trains gates, which .* has no parameters for"):
        build_trainer(settings(folder, recipe, stages=[{"train": ["gates"], "until": 2}, {"train": ["all"]}], **free))
    report = run(folder, recipe, "through", **free)
    assert report.complete
    assert report.watched()[-1]["watch_gate_change"] > 0


def test_results_say_what_they_were_trained_from(workshop):
    folder, recipe = workshop
    run(folder, recipe, "first", training=recipe["training"] | {"max_steps": 2})
    model = str(folder / "first" / "model")
    run(folder, recipe, "second", model=model, training=recipe["training"] | {"max_steps": 1})
    record = read_json(folder / "second" / "model" / "config.json")["gate_retrofit"]["training"]
    assert (record["steps"], record["earlier"]["steps"]) == (1, 2)


def test_from_python_mistakes_are_values(workshop):
    folder, recipe = workshop
    trainer, _ = build_trainer(settings(folder, recipe))
    make = partial(RetrofitTrainer, trainer.model, settings=trainer.settings)
    arguments, rows = trainer.args, trainer.train_dataset
    with pytest.raises(ValueError, match="rows are a list: make them with `mix_rows`"):
        make(arguments, rows=[1])
    with pytest.raises(ValueError, match=r"losses\.kl compares with a source: pass one"):
        make(arguments, rows=rows)
    with pytest.raises(ValueError, match="max_steps=7 in the arguments and 6 in the settings"):
        make(replace(arguments, max_steps=7), rows=rows)
    with pytest.raises(ValueError, match="`training_arguments\\(settings\\)` makes the arguments"):
        make(replace(arguments, remove_unused_columns=True), rows=rows)


def test_an_unfinished_checkpoint_is_passed_over(workshop):
    """As a process that was killed while it wrote leaves one."""
    folder, recipe = workshop
    changes = {"training": recipe["training"] | {"save_steps": 2, "save_total_limit": 3}}
    whole = run(folder, recipe, "saved", **changes)
    chosen = settings(folder, recipe, output=str(folder / "killed"), **changes)
    train(chosen, progress=Stop(4))
    broken = folder / "killed" / "checkpoint-5"
    state = (broken / "trainer_state.json").read_text()
    (broken / "trainer_state.json").write_text(state[: len(state) // 2])
    (broken / "optimizer.pt").unlink()
    assert steps(train(chosen)) == steps(whole)


def test_a_terminal_that_is_lost_is_heard_but_under_nohup():
    for before, heard in ((signal.SIG_DFL, True), (signal.SIG_IGN, False)):
        kept = signal.signal(signal.SIGHUP, before)
        interruption = Interruption()
        try:
            interruption.on_train_begin(None, None, None)
            assert (signal.getsignal(signal.SIGHUP) == interruption._hear) == heard
            assert signal.getsignal(signal.SIGINT) == interruption._hear
            interruption.release()
            assert signal.getsignal(signal.SIGHUP) is before
        finally:
            interruption.release()
            signal.signal(signal.SIGHUP, kept)


def test_a_signal_is_heard_twice(workshop):
    """The second one ends the run at once; what was saved before is there."""
    folder, recipe = workshop
    chosen = settings(folder, recipe, output=str(folder / "twice"), training=recipe["training"] | {"save_steps": 2})

    def twice(step, steps, log):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        train(chosen, progress=twice)
    assert signal.getsignal(signal.SIGTERM) is before
    assert (folder / "twice" / "checkpoint-2").is_dir()
    assert train(chosen).complete


def two_ranks(folder: Path, recipe: dict, changes: dict, *, sharded: bool = False, stop: int | None = None) -> dict:
    """The record of a run by torchrun, two processes over gloo."""
    job = {"folder": str(folder), "recipe": recipe, "changes": changes, "sharded": sharded, "stop": stop}
    (folder / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("retrofit_ranks.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run([*launcher, script, folder / "job.json"], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads((folder / "two" / "training.json").read_text())


def assert_equal_runs(folder: Path, record: dict, one):
    """Losses and weights of two ranks, and of one process: sums in another order, in float32."""
    assert record["complete"]
    assert record["world_size"] == 2
    log = [{k: v for k, v in entry.items() if k != "seconds"} for entry in record["log"] if "loss" in entry]
    for mine, theirs in zip(log, steps(one), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    mine, theirs = (weights(folder / name) for name in ("two", "one"))
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-3, atol=1e-5, msg=name)


def test_two_ranks_equal_one(workshop):
    """With stages, and without the logits at first: rows, losses and weights of one process with twice the batch."""
    folder, recipe = workshop
    late = {"next_token": {"weight": 0.3, "start": 1}, "kl": {"top_k": 50, "start": 1}}
    options = {"losses": ALL_LOSSES | late, "stages": STAGES, "first_key_dropout": 0.5}
    sizes = recipe["training"] | {"optim": "sgd", "learning_rate": 0.1}
    one = run(folder, recipe, "one", training=sizes | {"per_device_train_batch_size": 2}, **options)
    assert_equal_runs(folder, two_ranks(folder, recipe, options | {"training": sizes}), one)


def test_sharded_ranks_equal_one(workshop):
    """FSDP2, stopped and continued in the middle: the same losses and weights, and a folder like any other."""
    folder, recipe = workshop[0] / "sharded", workshop[1]
    folder.mkdir()
    sizes = recipe["training"] | {"optim": "sgd", "learning_rate": 0.1}
    one = run(folder, recipe, "one", training=sizes | {"per_device_train_batch_size": 2}, losses=ALL_LOSSES)
    sharding = {"transformer_layer_cls_to_wrap": "GatedLlamaDecoderLayer", "state_dict_type": "SHARDED_STATE_DICT"}
    sizes |= {"fsdp": True, "fsdp_config": sharding}
    changes = {"losses": ALL_LOSSES, "training": sizes}
    record = two_ranks(folder, recipe, changes, sharded=True, stop=3)
    assert (record["complete"], record["steps"]) == (False, 4)  # the next step is under way when the signal comes
    assert (folder / "two" / "checkpoint-4" / "pytorch_model_fsdp_0").is_dir()  # shards: it was no DDP
    assert_equal_runs(folder, two_ranks(folder, recipe, changes, sharded=True), one)
    names, configs = [], []
    for name in ("one", "two"):
        model = folder / name / "model"
        names.append(sorted(path.name for path in model.iterdir()))
        configs.append({k: v for k, v in read_json(model / "config.json").items() if k != "gate_retrofit"})
    assert names[0] == names[1]
    assert configs[0] == configs[1]


def test_sharding_that_would_not_happen_is_refused(workshop):
    folder, recipe = workshop[0] / "refused", workshop[1]
    folder.mkdir()
    with pytest.raises(AssertionError, match="accelerate shards over accelerators only"):
        two_ranks(folder, recipe, {"training": recipe["training"] | {"fsdp": True}})
    assert not (folder / "two").exists()


# Parameters.


def test_groups(workshop):
    """Gates at their own rate; no decay on gates and vectors; every parameter in one group."""
    folder, recipe = workshop
    for rate, gates in (
        (1e-2, {"multiplier": 10}),
        (2e-3, {"multiplier": None, "learning_rate": 2e-3}),
        (1e-3, {"multiplier": None}),
    ):
        trainer, _ = build_trainer(settings(folder, recipe, gates=gates, training={"weight_decay": 0.1}))
        optimizer = trainer.create_optimizer()
        names = {id(p): name for name, p in trainer.model.named_parameters()}
        groups = {group["name"]: group for group in optimizer.param_groups}
        found = {name: sorted(names[id(p)] for p in group["params"]) for name, group in groups.items()}
        assert sorted(chain(*found.values())) == sorted(names.values())
        assert all(name.endswith("g_proj.weight") for name in found["gates"])
        assert len(found["gates"]) == 5
        assert all(name.endswith("norm.weight") for name in found["vectors"])
        assert [groups[name]["weight_decay"] for name in ("weights", "vectors", "gates")] == [0.1, 0.0, 0.0]
        assert [groups[name]["lr"] for name in ("weights", "vectors", "gates")] == pytest.approx([1e-3, 1e-3, rate])


def test_gates_named_by_patterns(tiny_model, workshop):
    folder, recipe = workshop
    patterns = ["*.g_proj.*", "*.v_proj.bias", "*.o_proj.bias"]
    chosen = settings(folder, recipe, gates={"parameters": patterns}, stages=[{"train": ["gates"]}])
    model = tiny_model(qkv_bias=True, o_bias=True, gate_bias=True)
    groups = parameter_groups(model, chosen)
    assert set(groups.values()) == {"gates"}
    assert {name.split("self_attn.")[1] for name in groups} == {
        "g_proj.weight",
        "g_proj.bias",
        "v_proj.bias",
        "o_proj.bias",
    }
    with pytest.raises(ValueError, match=r"'\*\.v_proj\.bias' matches no parameter"):
        parameter_groups(tiny_model(), chosen)
    with pytest.raises(ValueError, match="has no gates to train"):
        parameter_groups(tiny_model(gate_position=None), settings(folder, recipe))


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_stages_train_what_they_name_and_nothing_else(decay, workshop):
    """After each stage, the parameters that were not its own are bitwise what they were; decay does not reach them."""
    folder, recipe = workshop
    seen = []
    chosen = settings(
        folder,
        recipe,
        output=str(folder / f"stages-{decay}"),
        stages=STAGES,
        losses={"kl": 1.0, "outlier": 0.1},
        training=recipe["training"] | {"weight_decay": decay},
    )
    trainer, _ = build_trainer(chosen)
    trainer.args.save_strategy = "no"
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}

    def moved(step):
        now = dict(trainer.model.named_parameters())
        seen.append({name for name in now if not torch.equal(now[name], start[name])})
        start.update({name: p.detach().clone() for name, p in now.items()})

    original = trainer.enter_stage
    trainer.enter_stage = lambda step: (moved(step), original(step))
    trainer.train()
    moved(6)
    names = set(start)
    gates = {name for name in names if ".g_proj." in name}
    attention = {name for name in names if ".self_attn." in name}
    assert seen == [set(), gates, gates, attention, attention, names, names]


@pytest.mark.parametrize("bf16", [False, True])
def test_the_source_keeps_what_autocast_makes_of_it(bf16, workshop):
    """Its weights in bfloat16 give the logits of the float32 model under autocast, bit for bit; embeddings stay."""
    folder, recipe = workshop
    trainer, _ = build_trainer(settings(folder, recipe, training={"bf16": bf16}))
    ids = torch.arange(3, 40)[None]
    source = AutoModelForCausalLM.from_pretrained(STORIES)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        expected = source(ids).logits
        found = frozen(AutoModelForCausalLM.from_pretrained(STORIES), trainer.args)(ids).logits
    assert torch.equal(found, expected)
    assert found.dtype == (torch.bfloat16 if bf16 else torch.float32)
    assert not any(parameter.requires_grad for parameter in trainer.source.parameters())
    assert trainer.source.model.embed_tokens.weight.dtype == torch.float32


def test_a_gated_source_keeps_float32_gates(tiny_model, randomize_gates):
    """Autocast does not reach them, and neither does what stands for it."""
    source = randomize_gates(tiny_model(gate_in_fp32=True))
    ids = torch.arange(3, 40)[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = source(ids).logits
        found = frozen(source, SimpleNamespace(device="cpu", bf16=True))(ids).logits
    assert torch.equal(found, expected)
    assert source.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16


def test_bf16_with_checkpointing(workshop, monkeypatch):
    """Every layer computes once more in each backward pass, to the same losses."""
    folder, recipe = workshop
    forward, calls, found = AttentionGate.forward, Counter(), {}
    for again in (False, True):

        def counted(self, *inputs, again=again):
            calls[again] += 1
            return forward(self, *inputs)

        monkeypatch.setattr(AttentionGate, "forward", counted)
        training = recipe["training"] | {"bf16": True, "activation_checkpointing": again, "max_steps": 3}
        found[again] = steps(run(folder, recipe, f"bf16-{again}", losses=ALL_LOSSES, training=training))
    layers = json.loads((folder / "gated" / "config.json").read_text())["num_hidden_layers"]
    assert calls[True] - calls[False] == 3 * layers
    for mine, theirs in zip(found[True], found[False], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


# What watches.


def test_watching_does_not_disturb(workshop):
    """Measured at every step or at both ends: the same losses, bit for bit, under dropout."""
    folder, recipe = workshop
    often, never = (run(folder, recipe, f"watch-{n}", measure={"every": n}, losses=ALL_LOSSES) for n in (1, 100))
    assert steps(often) == steps(never)
    assert len(often.watched()) == 7
    assert [entry["step"] for entry in never.watched()] == [0, 2, 6]  # the second for the warning
    first, last = often.watched()[0], often.watched()[-1]
    assert first["watch_gate_mean"] == 0.5
    assert first["watch_gate_change"] == first["watch_gate_movement"] == 0
    assert last["watch_gate_change"] > 0
    assert last["watch_gate_norm"] > 0
    assert 0 < last["watch_first_token_attention"] < 1


def test_the_movement_of_gates(workshop):
    """Relative to what random gates would weigh, as identity gates weigh nothing."""
    folder, recipe = workshop
    last = run(folder, recipe, "movement").watched()[-1]
    now = torch.cat([w.flatten() for n, w in weights(folder / "movement").items() if "g_proj" in n])
    assert last["watch_gate_norm"] == pytest.approx(now.norm().item(), rel=1e-5)
    assert last["watch_gate_movement"] == pytest.approx((now.norm() / (0.02 * now.numel() ** 0.5)).item(), rel=1e-5)


def test_gates_that_have_not_moved_are_told(workshop, caplog):
    folder, recipe = workshop
    still = {"gates": {"multiplier": 0.0}, "measure": {"every": 1.0, "warn_after": 2}}
    run(folder, recipe, "still", **still)
    assert "The gates have not moved: after 2 steps" in caplog.text
    caplog.clear()
    moving = {"gates": {"multiplier": 100}, "training": {"learning_rate": 1e-2}}
    run(folder, recipe, "moving", measure={"every": 1.0, "warn_after": 5}, **moving)
    assert "not moved" not in caplog.text


def test_gates_of_a_transplant_may_stay(workshop, caplog, tmp_path):
    """They began where they belong."""
    folder, recipe = workshop
    start = shutil.copytree(recipe["model"], tmp_path / "transplanted")
    config = json.loads((start / "config.json").read_text())
    config["gate_retrofit"]["policy"] = "transplant"
    (start / "config.json").write_text(json.dumps(config))
    still = {"gates": {"multiplier": 0.0}, "measure": {"every": 1.0, "warn_after": 2}}
    run(folder, recipe, "transplanted", model=str(start), **still)
    assert "not moved" not in caplog.text


# Texts.


def test_texts_are_mixed_in_proportion(workshop, tokenizer):
    folder, recipe = workshop
    chosen = settings(folder, recipe)
    cache = folder / "tokens"
    rows = data.mix_rows(tokenizer, chosen.data, 40, seed=3, cache=cache)
    assert Counter(rows.names) == {"prose": 10, "paragraphs": 30}
    assert rows.names != sorted(rows.names)
    again = data.mix_rows(tokenizer, chosen.data, 40, seed=3, cache=cache)
    other = data.mix_rows(tokenizer, chosen.data, 40, seed=4, cache=cache)
    assert again.places == rows.places
    assert other.places != rows.places
    assert len(set(rows.places)) == 40
    assert (again.order == rows.order, other.order == rows.order) == (True, False)
    stream = tokenizer.encode((folder / "prose.txt").read_text(), add_special_tokens=False)
    name, place = next(place for place in rows.places if place[0] == "prose")
    index = rows.places.index((name, place))
    assert rows[index]["input_ids"].tolist() == stream[place * 32 : place * 32 + 32]
    assert rows[index]["row"] == index


def test_each_choice_of_rows_depends_on_the_seed(tokenizer, tmp_path):
    """Which texts follow each other, and which rows of a text are taken, are drawn apart; so are two equal texts."""
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time there was a cat. " * 200)
    texts = {name: Text(path=str(path), share=1.0) for name in ("one", "two")}
    seeds = [
        data.mix_rows(tokenizer, Data(texts=texts, context=16), 20, seed=seed, cache=tmp_path / "tokens")
        for seed in (0, 1)
    ]
    assert seeds[0].names != seeds[1].names
    taken = {(rows is seeds[0], name): [p for n, p in rows.places if n == name] for rows in seeds for name in texts}
    assert len({tuple(sorted(rows)) for rows in taken.values()}) == 4


def checkpoint(folder: Path, state: str = "{}", optimizer: str = "optimizer.pt") -> str:
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(state)
    if optimizer:
        (folder / optimizer).touch()
    return str(folder)


def test_a_run_goes_on_from_its_latest_whole_checkpoint(tmp_path):
    assert run_folder.last_checkpoint(tmp_path) is None
    paths = {step: checkpoint(tmp_path / f"checkpoint-{step}") for step in (9, 10, 100)}  # by number, not by name
    assert run_folder.last_checkpoint(tmp_path) == paths[100]
    checkpoint(tmp_path / "checkpoint-200", state="{")  # the disk was full
    (tmp_path / "checkpoint-300").mkdir()
    checkpoint(tmp_path / "checkpoint-best")
    assert run_folder.last_checkpoint(tmp_path) == paths[100]
    sharded = checkpoint(tmp_path / "checkpoint-400", optimizer="global_step400")
    assert run_folder.last_checkpoint(tmp_path) == sharded
    checkpoint(tmp_path / "checkpoint-500", optimizer="")
    with pytest.raises(ValueError, match="checkpoint-500 has lost the optimizer's state"):
        run_folder.last_checkpoint(tmp_path)


def test_documents_are_joined_by_the_separator(tokenizer, tmp_path):
    path = tmp_path / "two.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write('{"text": "Once upon a time"}\n\n{"text": "there was a cat"}\n')
    stream = data.token_stream(tokenizer, path, "\n\n", tmp_path / "cache")
    parts = [tokenizer.encode(t, add_special_tokens=False) for t in ("Once upon a time", "\n\n", "there was a cat")]
    assert stream.tolist() == [*parts[0], *parts[1], *parts[2], *parts[1]]


def test_tokens_are_cached_by_content(tokenizer, tmp_path, monkeypatch):
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_text("Once upon a time there was a cat.")
    first = data.token_stream(tokenizer, path, "", cache)
    monkeypatch.setattr(data, "_encode", lambda *_: pytest.fail("tokenised again"))
    assert np.array_equal(data.token_stream(tokenizer, path, "", cache), first)
    monkeypatch.undo()
    path.write_text("Once upon a time there was a dog.")
    assert not np.array_equal(data.token_stream(tokenizer, path, "", cache), first)
    assert len(list(cache.iterdir())) == 2


def test_an_interrupted_tokenisation_leaves_nothing(tokenizer, tmp_path):
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    path.write_text("\n".join('{"text": "Once upon a time"}' for _ in range(200)))

    def interrupt(name, documents):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        data.token_stream(tokenizer, path, "", cache, interrupt)
    assert not cache.exists()


def test_a_long_text_is_read_in_pieces(tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "long.txt"
    path.write_text("".join(f"line {n} of a long text\n" for n in range(300)))
    whole = data.token_stream(tokenizer, path, "", tmp_path / "whole")
    monkeypatch.setattr(corpus, "PIECE", 1000)
    assert len(next(read_documents(path))) >= 1000
    pieces = data.token_stream(tokenizer, path, "", tmp_path / "pieces")
    assert tokenizer.decode(pieces).split() == tokenizer.decode(whole).split()


def test_short_texts_repeat_only_when_told(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("Once upon a time there was a cat who lived in a house. " * 20)
    texts = {"a": Text(path=str(tmp_path / "a.txt"))}
    rows = data.mix_rows(tokenizer, Data(texts=texts, context=16, repeat=True), 100, seed=0, cache=tmp_path)
    counts = Counter(rows.places)
    assert max(counts.values()) - min(counts.values()) <= 1
    with pytest.raises(
        ValueError, match=r"is too short: it gives \d+ rows of 16 tokens and its share of 100 rows is 100"
    ):
        data.mix_rows(tokenizer, Data(texts=texts, context=16), 100, seed=0, cache=tmp_path)
    with pytest.raises(ValueError, match="is too short: it gives 0 rows"):
        data.mix_rows(tokenizer, Data(texts=texts, context=100_000, repeat=True), 1, seed=0, cache=tmp_path)


def test_a_draw_belongs_to_its_row():
    values = [data.draw(0, row) for row in range(500)]
    assert values == [data.draw(0, row) for row in range(500)]
    assert values[:5] != [data.draw(1, row) for row in range(5)]
    assert 0.45 < sum(value < 0.5 for value in values) / 500 < 0.55


@pytest.mark.parametrize("shares", [{"a": 1, "b": 1, "c": 1}, {"a": 0.2, "b": 0.5, "c": 5}])
def test_proportions_add_up(shares):
    for count in (1, 2, 10, 101):
        found = data.proportional(shares, count)
        assert sum(found.values()) == count
        total = sum(shares.values())
        assert all(abs(found[name] - share / total * count) < 1 for name, share in shares.items())


def test_every_loss_of_the_table_was_trained_here():
    assert ALL_LOSSES.keys() == losses.LOSSES.keys()


def test_a_model_of_peft_is_refused(workshop):
    """Its base would be trained too, and lost when the adapter is saved."""
    folder, recipe = workshop
    trainer, _ = build_trainer(settings(folder, recipe))
    base = AutoModelForCausalLM.from_pretrained(folder / "gated")
    model = get_peft_model(base, gate_adapter_config(base, []))
    with pytest.raises(ValueError, match=r"use transformers.Trainer for PEFT's"):
        RetrofitTrainer(model, trainer.args, settings=trainer.settings, rows=trainer.train_dataset)


def test_a_source_of_another_width_is_refused(workshop):
    folder, recipe = workshop
    trainer, _ = build_trainer(settings(folder, recipe, losses={"attention_output": 1.0}))
    config = trainer.model.config.to_dict() | {"hidden_size": 48}
    other = GatedLlamaForCausalLM(GatedLlamaConfig(**config))
    with pytest.raises(ValueError, match="attention_output: 64 coordinates cannot be matched with 48"):
        check_run(trainer.model, other, trainer.args, trainer.settings)


def test_texts_are_known_again_whatever_the_tokenizer_pads(tmp_path):
    """Encoding resets padding and truncation: what identifies the tokens must not see them."""
    tokenizer, path = AutoTokenizer.from_pretrained(STORIES), tmp_path / "text.txt"
    path.write_text("Once upon a time.")
    tokenizer.backend_tokenizer.enable_padding(pad_id=2)
    tokenizer.backend_tokenizer.enable_truncation(8)
    for _ in range(2):
        data.token_stream(tokenizer, path, "", tmp_path / "cache")
    data.token_stream(AutoTokenizer.from_pretrained(STORIES), path, "", tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_half_a_character_is_named(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "a"}\n{"text": "\\ud800"}\n')
    with pytest.raises(ValueError, match=r"Line 2 of .*text.jsonl holds half a surrogate pair"):
        list(read_documents(path))
