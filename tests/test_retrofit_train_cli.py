"""`gated-llama train`: mistakes in one line, stopping and continuing, the result, and the recipes of the example."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from retrofit_runs import STORIES, prepare, write
from safetensors.torch import load_file, save_file

from gated_llama.configuration_gated import OWN_FILES
from gated_llama.convert.extend_context import extend_context
from gated_llama.retrofit.settings import PARTS, read_settings
from gated_llama_cli import main


ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "examples" / "continued_pretraining"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    return folder, prepare(folder)


def command(*arguments, capsys=None) -> tuple[int, str]:
    code = main(["train", *map(str, arguments)])
    return code, " ".join(capsys.readouterr().err.split())


MISTAKES = {
    "key": ({"lossses": {}}, "key 'lossses' is unknown: did you mean 'losses'?"),
    "section key": ({"data": {"contxt": 64}}, "data.contxt is unknown: did you mean 'context'?"),
    "far key": ({"banana": 1}, "key 'banana' is unknown: known are model, output, data"),
    "loss": ({"losses": {"kld": 1.0}}, "losses.kld is unknown: did you mean 'kl'?"),
    "loss option": ({"losses": {"outlier": {"tua": 4.0}}}, "losses.outlier.tua is unknown: did you mean 'tau'?"),
    "option of another loss": ({"losses": {"kl": {"eps": 0.1}}}, "losses.kl.eps is unknown"),
    "no losses": ({"losses": {}}, "losses is empty: name at least one of next_token, kl"),
    "weight": ({"losses": {"kl": "much"}}, "losses.kl.weight='much' must be a number."),
    "negative weight": ({"losses": {"kl": -1.0}}, "losses.kl.weight=-1.0 must be a finite number of at least 0."),
    "no number as weight": ({"losses": {"kl": float("nan")}}, "losses.kl.weight=nan must be a finite number"),
    "nothing to train for": ({"losses": {"kl": 0.0}}, "Every weight in losses is 0"),
    "uphill gates": (
        {"gates": {"learning_rate": -1e-3}},
        "gates.learning_rate=-0.001 must be a finite number of at least 0",
    ),
    "negative threshold": ({"losses": {"outlier": {"tau": -4.0}}}, "losses.outlier.tau=-4.0 must be a finite number"),
    "a word as rate": ({"training": {"learning_rate": "fast"}}, "training.learning_rate='fast' must be a number"),
    "moment": ({"losses": {"kl": {"start": 1.5}}}, "losses.kl.start=1.5 must be an integer, which counts steps, or a"),
    "no source": ({"source": None}, "losses.kl compares with a source model: set `source`."),
    "targets": ({"losses": {"kl": {"targets": "kept.bin"}}}, "holds the source's top k tokens: set losses.kl.top_k."),
    "more targets than tokens": (
        {"losses": {"kl": {"top_k": 10_000, "targets": "kept.bin"}}},
        "losses.kl.top_k=10000 of a vocabulary of 512: keep fewer.",
    ),
    "missing model": ({"model": None}, "model is missing."),
    "training": (
        {"training": {"learning_rat": 1.0}},
        "training.learning_rat is unknown: did you mean 'learning_rate'?",
    ),
    "training elsewhere": ({"training": {"output_dir": "x"}}, "training.output_dir is not set here: set `output`."),
    "steps": ({"training": {"max_steps": 0}}, "training.max_steps=0 must be an integer of at least 1"),
    "scheduler": (
        {"training": {"lr_scheduler_type": "cosin"}},
        "training: cosin is not a valid SchedulerType, please select",
    ),
    "scheduler options": (
        {"training": {"lr_scheduler_kwargs": {"min_lr_rat": 0.1}}},
        "training.lr_scheduler_kwargs={'min_lr_rat': 0.1} does not fit lr_scheduler_type=cosine: ",
    ),
    "scheduler option missing": (
        {"training": {"lr_scheduler_type": "warmup_stable_decay"}},
        "training.lr_scheduler_kwargs=None does not fit lr_scheduler_type=warmup_stable_decay: ",
    ),
    "optimizer": ({"training": {"optim": "adam"}}, "training: adam is not a valid OptimizerNames, please select"),
    "part": ({"stages": [{"train": ["gate"]}]}, "stages[0].train: 'gate' is unknown: did you mean 'gates'?"),
    "stage key": ({"stages": [{"trian": ["gates"]}]}, "stages[0].trian is unknown: did you mean 'train'?"),
    "stage order": (
        {"stages": [{"train": ["gates"], "until": 4}, {"train": ["mlp"], "until": 2}, {"train": ["all"]}]},
        "stages end at steps [4, 2] of 6: each must end later than the one before.",
    ),
    "stage end": ({"stages": [{"train": ["gates"]}, {"train": ["all"]}]}, "Every stage but the last needs `until`"),
    "two rates": ({"gates": {"learning_rate": 1.0}}, "gates.learning_rate and gates.multiplier say the same"),
    "pattern": ({"gates": {"parameters": ["*.v_proj.bias"]}}, "'*.v_proj.bias' matches no parameter"),
    "text": ({"data": {"texts": {"a": "nowhere.txt"}}}, "Text file nowhere.txt does not exist."),
    "text kind": ({"data": {"texts": {"a": __file__}}}, "is neither .txt nor .jsonl"),
    "too short": ({"data": {"context": 4000}}, "is too short: it gives 1 rows of 4000 tokens and its share of 6 rows"),
    "no texts": ({"data": {"texts": {}}}, "data.texts is empty"),
    "share": (
        {"data": {"texts": {"a": {"path": "a.txt", "share": 0}}}},
        "data.texts.a.share=0.0 must be a finite number above 0.",
    ),
    "no model": ({"model": "no/such/folder"}, "no/such/folder does not exist."),
    "ungated model": ({"model": str(STORIES)}, "is of type 'llama' and has no gates: convert it first"),
    "first token": ({"source_bos": "<nothing>"}, "source_bos='<nothing>' is "),
    "dropout": ({"first_key_dropout": 2.0}, "first_key_dropout=2.0 must lie between 0 and 1."),
    "gap": ({"losses": {"kl": {"stop": 2}}}, "No loss is on at step 2 of 6: change a start or a stop"),
    "never measured": ({"measure": {"every": 0}}, "measure.every=0 must be a finite number above 0."),
    "no number as moment": ({"losses": {"kl": {"start": float("nan")}}}, "losses.kl.start=nan must be an integer"),
    "another text as switch": (
        {"training": {"activation_checkpointing": "no"}},
        "training.activation_checkpointing='no' must be true or false.",
    ),
    "a text as switch": ({"training": {"bf16": "false"}}, "training.bf16='false' must be true or false."),
    "betas": (
        {"training": {"adam_beta1": 2.0}},
        "optim_args=None: Invalid beta parameter at index 0: 2.0",
    ),
    "an empty loss": ({"losses": {"kl": None, "gate": 1.0}}, "losses.kl is empty: give it a value, or leave it out."),
    "late start": ({"losses": {"kl": {"start": 0.5}}}, "No loss is on at step 0 of 6"),
    "no gates to rate": ({"stages": [{"train": ["mlp"]}]}, "and no stage trains parameters of gates: leave it out."),
    "batches": (
        {"training": {"accelerator_config": {"split_batches": True}}},
        "training.accelerator_config is not set",
    ),
    "half a token": ({"losses": {"outlier": {"worst_token_weight": 0.5}}}, "worst_token_weight=0.5 must be"),
    "a rate of nothing": (
        {
            "training": {
                "learning_rate": 0.0,
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr": 1e-5},
            },
        },
        "training.lr_scheduler_kwargs=",
    ),
    "never on": (
        {"losses": {"kl": 1.0, "outlier": {"start": 0.8, "stop": 0.5}}},
        "losses.outlier is never on: of 6 steps it starts at 5 and stops at 3.",
    ),
    "no rows": (
        {"training": {"per_device_train_batch_size": 0}},
        "training.per_device_train_batch_size=0 must be an integer of at least 1.",
    ),
    "no micro-batches": ({"training": {"gradient_accumulation_steps": -2}}, "gradient_accumulation_steps=-2 must be"),
    "a word as number": ({"training": {"adam_epsilon": "x"}}, "training.adam_epsilon='x' must be a number."),
    "reports": ({"training": {"report_to": "comet_ml"}}, "training.report_to: comet_ml is not installed, or unknown"),
    "hub": ({"training": {"push_to_hub": True}}, "upload the folder `model` of the finished run"),
    "one who reports": ({"training": {"report_to": 5}}, "training.report_to: 5 is not installed, or unknown"),
    "log level": ({"training": {"log_level": "bogus"}}, "training: unknown value 'bogus'"),
    "weights alone": (
        {"training": {"save_only_model": True}},
        "training.save_only_model is not set here: a run that is",
    ),
    "rows again": ({"training": {"ignore_data_skip": True}}, "would read the same rows again"),
    "long rows": (
        {"data": {"context": 512, "repeat": True}, "student_bos": "<s>"},
        "data.context=512 with the first token passes the 512 positions of",
    ),
    "seed": ({"seed": -1}, "seed=-1 must lie between 0 and 2**32 - 1."),
    "no patterns": ({"gates": {"parameters": []}}, "gates.parameters is empty"),
    "compiled": ({"training": {"torch_compile": True}, "losses": {"gate": 1.0}}, "training.torch_compile runs past"),
    "targets in a folder": (
        {"losses": {"kl": {"top_k": 5, "targets": str(STORIES)}}},
        f"losses.kl.targets={STORIES} is a folder: name a file in it.",
    ),
    "an empty path": ({"source": ""}, "source is empty: give a path."),
    "evaluation": (
        {"training": {"eval_strategy": "steps"}},
        "training.eval_strategy is not set here: there is nothing to evaluate on",
    ),
    "the best": ({"training": {"save_strategy": "best"}}, "training.save_strategy='best' needs an evaluation"),
    "a batch": (
        {"training": {"batch_size": 2}},
        "training.batch_size is unknown: did you mean 'per_device_train_batch_size'?",
    ),
    "null for none": (
        {"student_bos": None},
        "student_bos is empty: give it a value, or leave it out.",
    ),
    "null in a loss": (
        {"losses": {"kl": 1.0, "outlier": {"tau": None}}},
        "losses.outlier.tau is empty: give it a value, or leave it out.",
    ),
    "a text without path": ({"data": {"texts": {"a": ""}}}, "data.texts.a.path is empty: name a file."),
    "null below": ({"data": {"separator": None}}, "data.separator is empty: give it a value"),
    "too many tokens": ({"losses": {"kl": {"top_k": 5000}}}, "losses.kl.top_k=5000 of a vocabulary of 512"),
    "text folder": ({"data": {"texts": {"a": str(STORIES)}}}, "is a folder: name the file in it."),
    "watched text": ({"measure": {"text": str(STORIES / "no.txt")}}, "no.txt does not exist."),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_clear_line(name, workshop, capsys, tmp_path):
    _, recipe = workshop
    changes, expected = MISTAKES[name]
    path = write(tmp_path, recipe, output=str(tmp_path / "run"), **changes)
    code, message = command(path, capsys=capsys)
    assert expected in message
    assert message.count("Error: ") == 1
    assert code == 2
    assert not (tmp_path / "run").exists()


def test_a_model_that_no_run_wrote_is_not_replaced(workshop, capsys, tmp_path):
    _, recipe = workshop
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "weights").write_text("mine")
    for resume in ("auto", "none"):
        path = write(tmp_path, recipe, output=str(tmp_path / "run"))
        code, message = command(path, "--resume", resume, capsys=capsys)
        assert (code, "holds model, which is no part of a run" in message) == (2, True)
    assert (tmp_path / "run" / "model" / "weights").read_text() == "mine"


def test_inputs_are_not_written_over(workshop, capsys, tmp_path):
    """Also with --resume none, which clears the folder."""
    _, recipe = workshop
    kept = tmp_path / "run" / "model"
    shutil.copytree(recipe["model"], kept)
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    for field in ("model", "source"):
        path = write(tmp_path, recipe, output=str(tmp_path / "run"), **{field: str(kept)})
        code, message = command(path, "--resume", "none", capsys=capsys)
        assert (code, f"{field}={kept} lies in output=" in message) == (2, True)
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before


def test_paths_at_home(workshop, tmp_path, monkeypatch):
    _, recipe = workshop
    monkeypatch.setenv("HOME", str(tmp_path))
    texts = {"prose": "~/prose.txt", "other": {"path": "~/other.txt"}}
    path = write(tmp_path, recipe, output="~/run", data=recipe["data"] | {"texts": texts})
    chosen = read_settings(path)
    assert chosen.output == str(tmp_path / "run")
    assert [text.path for text in chosen.data.texts.values()] == [str(tmp_path / f"{name}.txt") for name in texts]


def test_rows_beyond_the_source_are_refused(workshop, capsys, tmp_path):
    _, recipe = workshop
    extend_context(recipe["model"], tmp_path / "long", factor=4)
    changes = {"model": str(tmp_path / "long"), "data": recipe["data"] | {"context": 600, "repeat": True}}
    path = write(tmp_path, recipe, output=str(tmp_path / "run"), **changes)
    code, message = command(path, capsys=capsys)
    assert (code, f"passes the 512 positions of {STORIES}" in message) == (2, True)


def test_a_short_run_logs_its_last_step(workshop, capsys, tmp_path):
    """Also when it is asked for again; what it saves may be read with a cache, as before."""
    _, recipe = workshop
    training = recipe["training"] | {"logging_steps": 100, "max_steps": 2}
    path = write(tmp_path, recipe, output=str(tmp_path / "run"), training=training)
    for _ in range(2):
        assert main(["train", str(path)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "2 steps, 64 tokens" in shown
        assert re.search(r"last logged\s+loss", shown)
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["use_cache"] is True


BAD_FILES = {
    "not yaml": ("losses: [kl", "is not readable YAML"),
    "no mapping": ("- kl\n- outlier", "must hold keys and values"),
    "key twice": ("losses:\n  kl: 1\n  kl: 2", "kl is given twice"),
    "no base": ("extends: other.yaml", "other.yaml does not exist."),
    "itself": ("extends: bad.yaml", "extends itself"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_be_read(name, capsys, tmp_path):
    content, expected = BAD_FILES[name]
    (tmp_path / "bad.yaml").write_text(content)
    code, message = command(tmp_path / "bad.yaml", capsys=capsys)
    assert (code, expected in message) == (2, True), message


def test_a_configuration_that_does_not_exist(capsys, tmp_path):
    code, message = command(tmp_path / "none.yaml", capsys=capsys)
    assert (code, f"Configuration {tmp_path / 'none.yaml'} does not exist." in message) == (2, True)


def test_another_tokenizer(workshop, capsys, tmp_path):
    _, recipe = workshop
    other = tmp_path / "other"
    other.mkdir()
    for file in STORIES.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    vocabulary["normalizer"] = {"type": "Lowercase"}
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    path = write(tmp_path, recipe, source=str(other), output=str(tmp_path / "run"))
    code, message = command(path, capsys=capsys)
    assert code == 2
    assert "give" in message
    assert "different ids: the two can only be compared on the same ones." in message


def test_another_vocabulary(workshop, capsys, tmp_path):
    """Two tokens exchanged that the texts begin without; a first document without text."""
    _, recipe = workshop
    other = shutil.copytree(STORIES, tmp_path / "other")
    rules = json.loads((other / "tokenizer.json").read_text())
    vocabulary = rules["model"]["vocab"]
    rare = [token for token in vocabulary if token.isdecimal()][:2]
    vocabulary[rare[0]], vocabulary[rare[1]] = vocabulary[rare[1]], vocabulary[rare[0]]
    (other / "tokenizer.json").write_text(json.dumps(rules))
    texts = ["", "Once upon a time there was a dog. " * 99]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    data = recipe["data"] | {"texts": {"a": str(tmp_path / "text.jsonl")}}
    path = write(tmp_path, recipe, source=str(other), output=str(tmp_path / "run"), data=data)
    code, message = command(path, capsys=capsys)
    assert code == 2
    assert any(f"give the token {token!r} different ids" in message for token in rare), message


def test_a_text_without_rows_is_told(workshop, caplog, tmp_path):
    _, recipe = workshop
    prose = recipe["data"]["texts"]["prose"]
    data = recipe["data"] | {"texts": {"a": prose, "b": {"path": prose, "share": 0.01}}}
    assert main(["train", str(write(tmp_path, recipe, output=str(tmp_path / "run"), data=data))]) == 0
    assert "data.texts.b: its share of 6 rows is none; it is not trained on." in caplog.messages


def test_numbers_moments_and_shorthands(workshop, tmp_path):
    _, recipe = workshop
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "own.yaml").write_text(
        "extends: base.yaml\nlosses:\n  kl: null\n  next_token: 1e-1\n  outlier: {weight: 3E-3, ramp: 0.5}\n"
        "training: {learning_rate: 5e-5}\ngates: {multiplier: 50}\nfirst_key_dropout: 0.25\n"
    )
    chosen = read_settings(tmp_path / "own.yaml", output="elsewhere")
    assert chosen.output == "elsewhere"
    assert {name: loss.weight for name, loss in chosen.losses.items()} == {"next_token": 0.1, "outlier": 0.003}
    assert chosen.losses["outlier"].factor(0, 6) == pytest.approx(1 / 3)
    assert chosen.training["learning_rate"] == 5e-5
    assert chosen.training["max_steps"] == 6
    assert chosen.gates.multiplier == 50.0
    assert chosen.first_key_dropout.probability == 0.25
    (tmp_path / "merge.yaml").write_text(
        "extends: base.yaml\nlosses:\n  kl: &own {weight: 0.5, start: 1}\n  gate: {<<: *own, start: 0}\n"
    )
    (tmp_path / "mixed.yaml").write_text("extends: own.yaml\nlosses:\n  outlier: 0.5\n  next_token: {start: 2}\n")
    mixed = read_settings(tmp_path / "mixed.yaml").losses
    assert (mixed["outlier"].weight, mixed["outlier"].ramp) == (0.5, 0.5)
    assert (mixed["next_token"].weight, mixed["next_token"].start) == (0.1, 2)
    gate = read_settings(tmp_path / "merge.yaml").losses["gate"]
    assert (gate.weight, gate.start) == (0.5, 0)
    assert chosen.data.texts["prose"].share == 1.0


# Runs.


def test_a_run_from_the_command_line(workshop, capsys, run_fresh):
    """
    The result is a whole checkpoint, which loads where the package is not and can be trained again; and a second call
    finds it done.
    """
    folder, recipe = workshop
    path = write(folder, recipe, "run.yaml", losses={"kl": 1.0, "sink": {"weight": 0.1}})
    with open(folder / "gated" / "README.md", "ab") as card:
        card.write(b"Not UTF-8: na\xefve\n")
    assert main(["train", str(path)]) == 0
    captured = capsys.readouterr()
    assert "step 6/6" in captured.err
    assert re.search(r"trained\s+6 steps, 192 tokens", captured.out)
    assert sorted(p.name for p in (folder / "run").iterdir()) == ["model", "run.json", "training.json"]
    record = json.loads((folder / "run" / "training.json").read_text())
    assert record["complete"]
    assert record["rows"] == {"prose": 2, "paragraphs": 4}
    assert record["versions"]["torch"] == torch.__version__
    assert record["seconds"] > 0
    result = folder / "run" / "model"
    config = json.loads((result / "config.json").read_text())
    assert config["gate_retrofit"]["policy"] == "identity"
    assert config["gate_retrofit"]["training"]["tokens"] == 192
    assert config["auto_map"]
    names = {p.name for p in result.iterdir()}
    assert {f"{name}.py" for name in OWN_FILES} <= names
    assert {"tokenizer.json", "README.md"} <= names
    assert "training_args.bin" not in names
    assert (result / "tokenizer.json").read_bytes() == (folder / "gated" / "tokenizer.json").read_bytes()
    card = (result / "README.md").read_bytes()
    assert b"6 steps, 192 tokens" in card
    assert b"na\xefve" in card
    code = """
        import sys
        sys.modules["gated_llama"] = None  # as where it is not installed
        from transformers import AutoModelForCausalLM, AutoTokenizer
        folder = sys.argv[1]
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
        print(type(model).__module__, model.generate(ids, min_new_tokens=3, max_new_tokens=3).shape[1] - ids.shape[1])
    """
    process = run_fresh(code, result, PYTHONPATH="")
    assert process.returncode == 0, process.stderr[-2000:]
    assert re.fullmatch(r"transformers_modules\S+ 3", process.stdout.strip()), process.stdout
    weights = (result / "model.safetensors").stat().st_mtime_ns
    assert main(["train", str(path)]) == 0
    assert "6 steps, 192 tokens" in capsys.readouterr().out
    assert (result / "model.safetensors").stat().st_mtime_ns == weights
    again = write(folder, recipe, "again.yaml", model=str(result), output=str(folder / "again"))
    assert main(["train", str(again)]) == 0
    first, second = (load_file(path / "model.safetensors") for path in (result, folder / "again" / "model"))
    assert first.keys() == second.keys()
    assert not any(torch.equal(first[name], second[name]) for name in first if "g_proj" in name)


@pytest.mark.parametrize("what", ["weights", "texts"])
def test_other_inputs_at_the_same_paths_are_another_run(what, tmp_path, capsys):
    """Also when the run is complete; what has been removed since is not asked for."""
    recipe = prepare(tmp_path)
    path = write(tmp_path, recipe)
    assert main(["train", str(path)]) == 0
    if what == "weights":
        file = tmp_path / "gated" / "model.safetensors"
        tensors = load_file(file)
        tensors["model.norm.weight"][0] += 1
        save_file(tensors, file, {"format": "pt"})
    else:
        with (tmp_path / "prose.txt").open("a") as file:
            file.write("And another end.")
    code, message = command(path, capsys=capsys)
    assert (code, f"holds a run with {what}." in message) == (2, True), message
    (file if what == "weights" else tmp_path / "prose.txt").unlink()
    shutil.rmtree(tmp_path / "gated")
    (tmp_path / "prose.txt").unlink(missing_ok=True)
    assert main(["train", str(path)]) == 0


def test_a_copy_of_a_checkpoint_is_not_lost(workshop, tmp_path, capsys):
    """The library deletes whatever begins like an old checkpoint."""
    folder, recipe = workshop
    (tmp_path / "run" / "checkpoint-3-good").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    for resume in ("auto", "none"):
        path = write(folder, recipe, "kept.yaml", output=str(tmp_path / "run"))
        code, message = command(path, "--resume", resume, capsys=capsys)
        assert (code, "holds checkpoint-3-good, which would be deleted as" in message) == (2, True)
    assert (tmp_path / "run" / "checkpoint-3-good").is_dir()


@pytest.mark.parametrize("what", ["optimizer", "weights", "record", "first token"])
def test_a_damaged_or_changed_run_is_not_continued(what, tmp_path, capsys):
    recipe = prepare(tmp_path)
    training = {"save_steps": 3, "max_steps": 6}
    path = write(tmp_path, recipe, training=training, student_bos="auto", keep_checkpoints=True)
    assert main(["train", str(path)]) == 0
    run = tmp_path / "run"
    shutil.rmtree(run / "model")  # as where it ended before the result was written
    if what == "optimizer":
        (run / "checkpoint-6" / "optimizer.pt").unlink()
    elif what == "weights":
        (run / "checkpoint-6" / "model.safetensors").write_bytes(b"torn")
    elif what == "record":
        (run / "run.json").write_text("{")
    else:
        config = tmp_path / "gated" / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"bos_token": "</s>"}))
    expected = {
        "optimizer": "checkpoint-6 has lost the optimizer's state",
        "weights": "checkpoint-6 is damaged",
        "record": "run.json cannot be read",
        "first token": "holds a run with weights.model=",
    }
    code, message = command(path, capsys=capsys)
    assert (code, expected[what] in message) == (2, True), message


def test_a_late_mistake_leaves_a_finished_run(workshop, capsys, tmp_path):
    """With --resume none: the earlier result goes only when all that can be checked has been."""
    folder, recipe = workshop
    output = str(tmp_path / "run")
    assert main(["train", str(write(folder, recipe, "good.yaml", output=output))]) == 0
    for training in ({"optim": "adamw_torch", "optim_args": "beta"}, {"optim": "adalomo"}, {"eval_on_start": True}):
        bad = write(folder, recipe, "bad.yaml", output=output, training=training)
        code, message = command(bad, "--resume", "none", capsys=capsys)
        assert (code, "Error: " in message) == (2, True), message
        assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_other_settings_do_not_continue_a_run(workshop, capsys, tmp_path):
    folder, recipe = workshop
    path = write(folder, recipe, "first.yaml", output=str(tmp_path / "run"))
    assert main(["train", str(path)]) == 0
    other = write(folder, recipe, "second.yaml", output=str(tmp_path / "run"), seed=1)
    for arguments in ((path, "--seed", 1), (other,)):
        code, message = command(*arguments, capsys=capsys)
        assert code == 2
        assert "holds a run with seed=0, and now it is 1" in message
    assert main(["train", str(other), "--resume", "none"]) == 0
    assert json.loads((tmp_path / "run" / "training.json").read_text())["seed"] == 1


def test_a_folder_with_other_files_is_refused(workshop, capsys, tmp_path):
    folder, recipe = workshop
    (tmp_path / "thesis.tex").write_text("")
    code, message = command(write(folder, recipe), "--output", tmp_path, capsys=capsys)
    assert (code, "holds thesis.tex, which is no part of a run" in message) == (2, True)


def test_ctrl_c_saves_and_the_same_command_continues(workshop, tmp_path):
    """A process of its own, as a user runs it."""
    folder, recipe = workshop
    changes = {"training": {"max_steps": 60}, "data": {"repeat": True}}
    path = write(folder, recipe, "long.yaml", output=str(tmp_path / "run"), **changes)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-m", "gated_llama_cli", "train", str(path)]
    process = subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("step"):
            break
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 130, rest
    found = re.search(r"Saved at step (\d+) of 60; the same command continues", rest)
    assert found, rest
    assert "Traceback" not in rest
    assert (tmp_path / "run" / f"checkpoint-{found[1]}").is_dir()
    assert subprocess.run(arguments, env=environment, capture_output=True, timeout=300).returncode == 0
    whole = write(folder, recipe, "whole.yaml", output=str(tmp_path / "whole"), **changes)
    assert main(["train", str(whole)]) == 0
    records = [json.loads((tmp_path / name / "training.json").read_text())["log"] for name in ("run", "whole")]
    losses = [[entry["loss"] for entry in log if "loss" in entry] for log in records]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 60
    results = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "whole")]
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())


# The recipes of the example.


def test_recipes_are_read():
    names = {path.stem for path in RECIPES.glob("*.yaml")}
    controls = {"control_next_token", "control_random", "control_open", "control_gates_only", "control_first_token"}
    assert names == {"base", "polish", "polish_100k", "polish_1m", "polish_half", "pressure", "staged"} | controls
    for name in names:
        chosen = read_settings(RECIPES / f"{name}.yaml")
        assert chosen.output == f"runs/{name}"
        tokens = {"polish_100k": 100_000, "polish_1m": 1_000_000}.get(name, 200_000)
        rows = chosen.steps * chosen.training.get("gradient_accumulation_steps", 1)
        assert rows * chosen.data.context == pytest.approx(tokens, rel=2e-3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    work = tmp_path_factory.mktemp("recipes")
    run_script("prepare.py", work, "--tiny")
    return work


def run_script(name: str, *arguments) -> str:
    """What a script of the example prints."""
    command = [sys.executable, RECIPES / name, *arguments]
    result = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_recipes_run_on_the_tiny_model(recipe, tiny, monkeypatch):
    monkeypatch.chdir(tiny)
    assert main(["train", f"{recipe}.yaml"]) == 0
    record = json.loads(Path("runs", recipe, "training.json").read_text())
    assert record["complete"]
    assert record["settings"]["student_bos"] == ("none" if recipe.startswith("polish") else "<s>")
    trained = {group for group, size in record["parameters"].items() if size}
    assert ("frozen" in trained) == (recipe in ("control_gates_only", "polish_1m"))


@pytest.fixture(scope="module")
def held_out(tiny):
    """A folder with a text of each domain."""
    texts = {path.stem: Path(path).read_text() for path in (tiny / "text").glob("*.jsonl")}
    for domain in ("literature_en", "law_en", "math_en", "code_python", "literature_zh", "wikitext"):
        folder = tiny / "data" / domain
        folder.mkdir(parents=True)
        name = "test.jsonl" if domain == "wikitext" else "validation.jsonl"
        (folder / name).write_text(texts.get(domain, texts["wiki_en"]))
    return tiny / "data"


TINY_ROWS = ["--first", "<s>", "--context", "63"]


def test_results_are_evaluated_and_shown(tiny, held_out, monkeypatch):
    """evaluate.py and summary.py on the source and a transplant, one row of each domain."""
    monkeypatch.chdir(tiny)
    models = ["source", "models/transplanted"]
    for _ in range(2):  # what is there already stays
        run_script("evaluate.py", ".", held_out, "results.json", *models, *TINY_ROWS, "--rows", "1", "--stream", "300")
    results = json.loads(Path("results.json").read_text())["models"]
    assert list(results) == models
    assert [result["reads_first"] for result in results.values()] == [True, False]
    assert results["source"]["domains"]["law_en"]["kl"] == pytest.approx(0, abs=1e-6)
    transplanted = results["models/transplanted"]
    assert transplanted["sink"]["first_token_attention"] < results["source"]["sink"]["first_token_attention"] / 2
    kept, reset = transplanted["gates"]["kept"]["law_en"]["kl"], transplanted["gates"]["reset"]["law_en"]["kl"]
    assert 0 < kept < reset
    tables = run_script("summary.py", "results.json", "sink.png")
    assert f"| transplanted | {transplanted['domains']['literature_en']['kl']:.3f} |" in tables
    assert "| source without its first token | " in tables
    assert Path("sink.png").stat().st_size > 10_000


def test_exact_gates(tiny, held_out, tmp_path):
    """The source's own scores make the gated copy the source; fitted gates come only near."""
    run_script("exact_gates.py", tiny, held_out, tmp_path / "exact.json", *TINY_ROWS)
    found = json.loads((tmp_path / "exact.json").read_text())
    for domain, kl in found["nothing silenced, the first token"].items():
        assert kl == pytest.approx(0, abs=1e-5)
        assert found["transplant"][domain] > 1e-3


def test_parts_are_disjoint_but_for_all(tiny_model):
    from gated_llama.retrofit.trainer import matches

    names = [name for name, _ in tiny_model(qk_norm=True).named_parameters()]
    for name in names:
        parts = [part for part, patterns in PARTS.items() if part != "all" and matches(name, patterns)]
        assert len(parts) == 1, (name, parts)
