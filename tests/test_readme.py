"""The command line starts light, and README tells the truth: its commands exist and its Python runs."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import gated_llama_cli
from gated_llama.convert import convert_checkpoint
from gated_llama.convert.inspection import inspect_checkpoint
from gated_llama.convert.serving import serving_table
from gated_llama.diagnostics.corpus import read_texts
from gated_llama.retrofit.settings import (
    LOSS_SETTINGS,
    PARTS,
    Data,
    Gates,
    Loss,
    Measure,
    Settings,
    Stage,
    Text,
    read_settings,
)


ROOT = Path(__file__).parents[1]
STORIES = ROOT / "tests" / "data" / "stories260K"
README = (ROOT / "README.md").read_text(encoding="utf-8")
SOURCE_IN_README = '"HuggingFaceTB/SmolLM2-135M-Instruct"'


def command_line() -> dict:
    return typer.main.get_command(gated_llama_cli.app).commands


def test_help_needs_no_torch(run_fresh):
    code = """
        import sys
        from gated_llama_cli import main
        for arguments in (["--help"], *([name, "--help"] for name in sys.argv[1:])):
            assert main(arguments) == 0
        heavy = {"torch", "transformers", "huggingface_hub", "numpy", "gated_llama"} & set(sys.modules)
        assert not heavy, heavy
    """
    result = run_fresh(code, *command_line())
    assert result.returncode == 0, result.stderr
    assert "convert" in result.stdout


def test_help_answers_within_a_second(run_fresh):
    """In CPU time, which is the wall time of a machine that has nothing else to do."""
    code = """
        import sys, time
        from gated_llama_cli import main
        main(["--help"])
        print(time.process_time(), file=sys.stderr)
    """
    assert min(float(run_fresh(code).stderr) for _ in range(2)) < 1


def readme_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


def readme_commands() -> list[str]:
    blocks = readme_blocks("bash")
    inline = re.findall(r"`((?:gated-llama|make) [^`\n]+)`", README)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in [*lines, *inline] if line.startswith(("gated-llama ", "make "))]


def test_readme_commands_exist():
    known = command_line()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    lines = readme_commands()
    assert {"make demo", "make test"} <= set(lines)
    assert {line.split()[1] for line in lines if line.startswith("gated-llama ")} >= set(known)
    for line in lines:
        program, name, *arguments = line.split()
        if program == "make":
            assert name in targets, line
        elif not name.startswith("-"):
            assert name in known, line
            options = {option for parameter in known[name].params for option in parameter.opts}
            options |= {"--tasks"} if name == "eval" else set()  # the harness's own
            assert {word.split("=")[0] for word in arguments if word.startswith("--")} <= options, line


def test_the_serving_table_is_the_generated_one():
    """A change in the records is brought here by pasting what `serving_table()` gives."""
    tables = re.findall(r"<!-- serving table[^\n]*-->\n(.*?)<!-- end of serving table -->", README, flags=re.S)
    assert tables == [serving_table()]


def test_the_fields_of_a_run_are_listed(tmp_path):
    """The run in README is read, and its tables name every field, loss and option."""
    (block,) = readme_blocks("yaml")
    (tmp_path / "run.yaml").write_text(block)
    assert read_settings(tmp_path / "run.yaml").losses["outlier"].start == 0.1
    training = README.partition("## Training\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", training))
    kinds = [Settings, Data, Gates, Stage, Measure, Text, Loss, *LOSS_SETTINGS.values()]
    fields = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert fields | {"extends", *LOSS_SETTINGS, *PARTS} <= named


@pytest.fixture
def tiny_llama(tmp_path) -> Path:
    """Folder of a random Llama with a byte-level tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    folder = tmp_path / "tiny-llama"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_readme_python_runs(tiny_llama, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = "\n".join(readme_blocks("python"))
    assert text.count(SOURCE_IN_README) == 1
    exec(text.replace(SOURCE_IN_README, repr(str(tiny_llama))), {})
    generated, scores = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert generated.startswith("The capital of France is")
    assert scores == "2 torch.Size([1, 24, 4, 1]) tensor(0.5000, grad_fn=<MeanBackward0>)"


def test_readme_retrofits_run(tmp_path, monkeypatch):
    """The blocks that need a model with a sink, one after the other."""
    monkeypatch.chdir(tmp_path)
    (story,), _ = read_texts(None)
    (tmp_path / "prose.txt").write_text(story)
    convert_checkpoint(STORIES, "gated")
    run = {"model": "gated", "source": str(STORIES), "output": "run", "losses": {"kl": 1.0, "outlier": 0.01}}
    run |= {"data": {"context": 32, "texts": {"prose": "prose.txt"}}, "training": {"max_steps": 2}}
    (tmp_path / "polish.yaml").write_text(yaml.safe_dump(run))
    names = {"source": str(STORIES), "texts": [story[:8000]]}
    names["model"] = AutoModelForCausalLM.from_pretrained("gated")
    before = [layer.self_attn.g_proj.weight.clone() for layer in names["model"].model.layers]
    for block in readme_blocks("py"):
        exec(block.replace("context=511", "context=60"), names)  # in longer rows this model has no sink
    taken_back = [not layer.self_attn.g_proj.weight.any() for layer in names["gated"].model.layers]
    assert taken_back == [False, False, False, True, False]
    steps = [entry for entry in names["trainer"].state.log_history if "loss" in entry]
    assert len(steps) == 2
    assert {"loss_kl", "loss_outlier", "learning_rate_gates"} <= steps[0].keys()
    after = [layer.self_attn.g_proj.weight for layer in names["model"].model.layers]
    assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.slow  # the extra `quantize`, which `make slow` installs
def test_readme_quantises(tmp_path, monkeypatch):
    for name in ("torchao", "bitsandbytes"):
        pytest.importorskip(name, reason=f"{name} is optional")
    monkeypatch.chdir(tmp_path)
    convert_checkpoint(STORIES, "smollm2-gated", policy="normal")
    (block,) = readme_blocks("python3")
    exec(block, {})
    assert inspect_checkpoint("smollm2-int8").quantiser == "bitsandbytes"
    exec("\n".join(line for line in block.splitlines() if "BitsAndBytesConfig(" not in line), {})
    assert inspect_checkpoint("smollm2-int8").quantiser == "torchao"


@pytest.mark.slow
def test_readme_python_runs_on_smollm2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(readme_blocks("python")[0].replace(SOURCE_IN_README, repr(gated_llama_cli.demo.find_smollm2())), {})
    printed = capsys.readouterr().out
    assert "Paris" in printed
    assert "30 torch.Size([1, 5, 9, 1])" in printed


@pytest.mark.slow
def test_forward_benchmark_prints_ratio_and_theory():
    command = [sys.executable, ROOT / "benchmarks" / "forward.py", "--rounds", "2", "--json"]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [(row["phase"], row["gate"]) for row in rows] == [
        ("prefill", "headwise"),
        ("prefill", "elementwise"),
        ("decode", "headwise"),
        ("decode", "elementwise"),
    ]
    for row in rows:
        assert 1 < row["theoretical_ratio"] < 1.1
        assert 0.5 < row["ratio"] < 2


def test_recorded_retrofits_are_what_the_example_shows():
    """The tables of examples/continued_pretraining are those that summary.py makes of the recorded results."""
    folder = ROOT / "examples" / "continued_pretraining"
    text = (folder / "README.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- tables: summary.py results/results.json -->")[2].partition("<!-- end of tables -->")[
        0
    ]
    command = [sys.executable, folder / "summary.py", folder / "results" / "results.json"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == printed.strip()
    assert printed.count("\n") > 30
