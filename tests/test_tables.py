"""What commands print, in a terminal of 80 columns and in a pipe: nothing is cut off; a row in a pipe is a line."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.text import Text
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import gated_llama_cli
from gated_llama.convert import convert_checkpoint
from gated_llama.convert.verify import verify
from gated_llama_cli.console import Listing, facts, out, print_table


STORIES = Path(__file__).parent / "data" / "stories260K"
FOLDER = "a-folder-whose-name-is-longer-than-a-terminal-of-eighty-columns-is-wide-and-has-to-go-on-below"
BOX = "┏┳┓┡╇┩└┴┘┌┬┐━─"


@pytest.fixture(params=["terminal", "pipe"])
def place(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if request.param == "terminal" else "0")
    return request.param


@pytest.fixture
def printed(place, capsys):
    """`printed()`: the lines on stdout since the last call, without escape sequences; no line is cut off."""

    def lines() -> list[str]:
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
        assert "…" not in text
        lines = text.splitlines()
        if place == "terminal":
            assert all(len(line) <= 80 for line in lines if line[:1] in "│┃" or set(line) & set(BOX))
        else:
            assert not set(text) & set(BOX + "│┃")
            assert all(line == line.rstrip() for line in lines)
        return lines

    return lines


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    """A model, and one that differs from its layer 2 on; both in folders with long names."""
    folder = tmp_path_factory.mktemp("tables") / FOLDER
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"vocab_size": 96, "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 3}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder / "source")
    convert_checkpoint(folder / "source", folder / "result")
    model = AutoModelForCausalLM.from_pretrained(folder / "result")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.mul_(2)
    model.save_pretrained(folder / "result")
    return folder / "source", folder / "result"


def test_only_the_console_makes_tables():
    """So that what holds for its one kind, below, holds for every command."""
    for path in Path(gated_llama_cli.__file__).parent.glob("*.py"):
        assert "rich.table" not in path.read_text(encoding="utf-8") or path.name == "console.py", path


@pytest.mark.parametrize("width", [80, 40])
def test_every_character_of_a_cell_is_shown(place, printed, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    rows = [["a" * 30, "b" * 100, Text("c" * 50, "red")], ["one [red] two", "", ":smile:"]]
    out.print(Listing("d" * 120, rows, ("e" * 20, "f", "g" * 60), left=2))
    lines = printed()
    for letter, count in zip("abcdefg", (30, 100, 50, 120, 20, 1, 60), strict=True):
        if letter not in "de":  # which are in words as well
            assert sum(line.count(letter) for line in lines) == count
    if place == "pipe":
        assert len(lines) == 4
        assert lines[0] == "d" * 120
        assert lines[2] == f"{'a' * 30}  {'b' * 100}  {'c' * 50}"
        assert lines[3].split("  ")[0] == "one [red] two"
        assert lines[3].endswith(":smile:")


def test_rows_of_a_pipe_are_lines(place, printed):
    facts_rows = [("note", "words " * 40), ("another note", "two\nlines")]
    out.print(facts("facts", facts_rows))
    lines = printed()
    if place == "pipe":
        assert lines == ["facts", f"note          {'words ' * 40}".rstrip(), "another note  two lines"]
    else:
        assert max(map(len, lines)) == 80
    print_table("numbers", [["", "source", "result"], ["KL to source, prose", "0.1", "12"]])
    lines = printed()
    if place == "pipe":
        assert lines == ["numbers", "                     source  result", "KL to source, prose  0.1     12"]
    else:
        assert "│ KL to source, prose │    0.1 │     12 │" in lines


@pytest.mark.parametrize("place", ["pipe"], indirect=True)  # a console asks once whether to break its sentences
def test_sentences_of_a_pipe_are_lines(printed):
    sentence = "word " * 39 + "word."
    out.print(sentence)
    assert printed() == [sentence]


def test_verify_names_the_first_difference_on_a_line_of_its_own(place, printed, checkpoints):
    source, result = checkpoints
    assert gated_llama_cli.main(["verify", str(source), str(result), "--tokens", "8"]) == 1
    lines = printed()
    assert "first difference: model.layers.2" in lines
    if place == "pipe":
        assert lines[0] == f"{source} = {result}?"
        assert re.fullmatch(r"float32  8       no             [0-9.e-]+ +(differs|equal)", lines[2])
    assert gated_llama_cli.main(["verify", str(source), str(source), "--tokens", "8"]) == 0
    assert "first difference: none" in printed()


def test_dtypes_that_part_at_different_places_have_a_line_each(printed, checkpoints):
    from gated_llama_cli.verify import show

    report = verify(*checkpoints, tokens=8)
    places = {"float32": "embed_tokens", "bfloat16": 0, "float16": None}
    show([replace(report, dtype=dtype, first_diverging_layer=at) for dtype, at in places.items()])
    assert [line for line in printed() if line.startswith("first difference")] == [
        "first difference: embed_tokens (float32)",
        "first difference: model.layers.0 (bfloat16)",
        "first difference: none (float16)",
    ]


def test_commands_show_their_facts_whole(place, printed, checkpoints, tmp_path):
    source, _ = checkpoints
    assert gated_llama_cli.main(["convert", str(source), str(tmp_path / "out")]) == 0
    lines = printed()
    assert f"Next: gated-llama verify {source} {tmp_path / 'out'}" in lines  # to be pasted, also from a terminal
    assert gated_llama_cli.main(["inspect", str(tmp_path / "out")]) == 0
    lines = printed()
    assert sum("model.layers.*.self_attn.g_proj.weight [4, 40]" in line for line in lines) == 1
    assert gated_llama_cli.main(["inspect", str(source)]) == 0
    assert f"Next: gated-llama convert {source} OUT" in printed()


def test_diagnose_shows_two_models_side_by_side(place, printed, tmp_path):
    arguments = ["diagnose", str(STORIES), "--against", str(STORIES), "--out", str(tmp_path / FOLDER)]
    assert gated_llama_cli.main([*arguments, "--tokens", "64", "--context", "32", "--no-interventions"]) == 0
    lines = printed()
    if place == "pipe":
        assert lines[1].split() == ["stories260K"] * 2
        assert [line for line in lines if line.startswith("without the first four queries")]
        assert lines[-1] == f"Written: {tmp_path / FOLDER / 'report.html'}, report.json and pictures."


def test_help_names_every_command_and_choice_in_whole(printed):
    assert gated_llama_cli.main(["--help"]) == 0
    text = "\n".join(printed())
    assert "..." not in text.partition("Commands:")[2]
    for command in gated_llama_cli.COMMANDS:
        assert re.search(rf"^  {command.replace('_', '-')} +[A-Z].*\.$", text, re.MULTILINE)
        assert gated_llama_cli.main([command.replace("_", "-"), "--help"]) == 0
        printed()
    assert gated_llama_cli.main(["convert", "--help"]) == 0
    assert "sdpa_output|value|key|query|dense_output" in "\n".join(printed())
