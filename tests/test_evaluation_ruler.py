"""The RULER runner: same prompts for all, contexts from configurations, truncation, difference in differences."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from evaluation_support import ROOTS, STORIES

from gated_llama.convert import convert_checkpoint
from gated_llama.evaluation.ruler import MODELS, PAPER, Ruler, main, run_ruler, to_markdown


pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("quick_harness"),
]
pytest_plugins = ["evaluation_fixtures"]

LENGTH = 1024
QUICK = ["--limit", "2", "--device", "cpu", "--gen_kwargs", "max_gen_toks=4", "--model_args", "dtype=float32"]


@pytest.fixture
def few_words(monkeypatch):
    """The harness sorts six million pairs of words when RULER is imported; a few hundred do here."""
    wonderwords = pytest.importorskip("wonderwords", reason="RULER needs wonderwords and nltk")
    real = wonderwords.RandomWord()._categories
    few = {kind: list(words)[:20] for kind, words in real.items()}
    monkeypatch.setattr(wonderwords, "RandomWord", lambda: SimpleNamespace(_categories=few))


@pytest.fixture
def long_base(tmp_path) -> Path:
    """The tiny model, said to have a context of 1,024 tokens."""
    folder = Path(shutil.copytree(STORIES, tmp_path / "base"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LENGTH}))
    return folder


def scored(base, gated, base_x, gated_x) -> Ruler:
    """A result of one task at one length, with these scores of its documents."""
    cells = zip(MODELS, (base, gated, base_x, gated_x), strict=True)
    scores = {label: {LENGTH: {"task": list(map(float, values))}} for label, values in cells}
    return Ruler({label: label for label in MODELS}, 0, dict.fromkeys(MODELS, LENGTH), scores)


def test_difference_in_differences():
    change, low, high = scored([1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 0], [1, 1, 1, 0]).difference_in_differences(
        LENGTH
    )
    assert change == pytest.approx(0.5)
    assert 0 <= low < change < high <= 1
    assert scored([1], [0], [1], [0]).difference_in_differences(LENGTH) == (0, 0, 0)
    unpaired = scored([1], [1], [1], [1])
    del unpaired.scores["base, extended"]
    assert unpaired.difference_in_differences(LENGTH) is None


def test_averages_weigh_tasks_alike():
    ruler = scored([1, 0], [1, 0], [1, 0], [1, 0])
    for label in MODELS:
        ruler.scores[label][LENGTH]["other"] = [1.0] * 8
    assert ruler.mean("base", LENGTH) == pytest.approx(0.75)
    assert ruler.mean("base", LENGTH, "task") == pytest.approx(0.5)
    assert ruler.mean("base", 2 * LENGTH) is None


def test_paper_figures_read_as_in_its_table():
    text = to_markdown(scored([1], [1], [1], [1]))
    gain = PAPER["gated, extended"][0] - PAPER["gated"][0] - (PAPER["base, extended"][0] - PAPER["base"][0])
    assert gain == pytest.approx(3.56)
    assert "| difference in differences | 3.56 | 7.26 | 14.05 | 34.67 | - | - |" in text


def test_runner_before_and_after_extension(few_words, long_base, tmp_path, capsys):
    convert_checkpoint(long_base, tmp_path / "gated")
    arguments = ["--base", long_base, "--gated", tmp_path / "gated", "--factor", 2, "--lengths", LENGTH, 2 * LENGTH]
    arguments += ["--reserve", 64]
    arguments = [*map(str, arguments), "--tasks", "ruler_fwe", "--out", str(tmp_path / "out"), *QUICK]
    assert main(arguments) == 0
    result = json.loads((tmp_path / "out" / "ruler.json").read_text())
    assert list(result["models"]) == list(MODELS)
    assert [result["contexts"][label] for label in MODELS] == [LENGTH, LENGTH, 2 * LENGTH, 2 * LENGTH]
    assert {label: sorted(cells) for label, cells in result["scores"].items()} == {
        "base": ["1024"],
        "gated": ["1024"],
        "base, extended": ["1024", "2048"],
        "gated, extended": ["1024", "2048"],
    }
    for before, gated in (MODELS[:2], MODELS[2:]):  # the gates change nothing
        assert result["scores"][before] == result["scores"][gated]
    assert np.shape(result["scores"]["base"]["1024"]["ruler_fwe"]) == (2,)
    assert result["difference_in_differences"]["1024"] == [0, 0, 0]
    assert result["difference_in_differences"]["2048"] is None
    assert "difference in differences" in capsys.readouterr().out


def test_a_prompt_that_would_be_cut_fails(few_words, long_base):
    too_long = [*QUICK, "--gen_kwargs", "max_gen_toks=500"]
    with pytest.raises(ValueError, match=r"2 of 2 prompts of ruler_fwe do not fit.*--reserve 128"):
        run_ruler({"base": str(long_base)}, [LENGTH], ["ruler_fwe"], too_long)


def test_lengths_that_hold_no_prompt_are_refused(long_base, tmp_path, capsys):
    arguments = ["--base", str(long_base), "--gated", str(long_base), "--lengths", "512", "--out", str(tmp_path)]
    assert main(arguments) == 2
    assert "length 512 is too short for RULER" in capsys.readouterr().err
    for reserve in (512, -1):
        with pytest.raises(ValueError, match=rf"--reserve {reserve} must be between 0 and 128 at length 1024"):
            run_ruler({"base": str(long_base)}, [LENGTH], ["ruler_fwe"], QUICK, reserve=reserve)


def test_cut_prompts_are_no_way_out(few_words, long_base):
    arguments = [*QUICK[:-1], "dtype=float32,on_truncation=count"]
    with pytest.raises(ValueError, match="RULER's prompts are never cut"):
        run_ruler({"base": str(long_base)}, [LENGTH], ["ruler_fwe"], arguments)


def test_extended_folders_are_made_once(long_base, tmp_path):
    from gated_llama.evaluation.ruler import extended

    first = extended(str(long_base), 2, tmp_path, "base")
    stamp = (Path(first) / "config.json").stat().st_mtime_ns
    assert extended(str(long_base), 2, tmp_path, "base") == first
    assert (Path(first) / "config.json").stat().st_mtime_ns == stamp
    other = Path(shutil.copytree(long_base, tmp_path / "other"))
    with pytest.raises(ValueError, match=r"base-yarn-2 was not made from .*other as it is now"):
        extended(str(other), 2, tmp_path, "base")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "hellaswag"], "hellaswag is no RULER task"),
        (["--log_samples"], "--log_samples has no use here"),
        (["--out", __file__], "is a file"),
        (["--base", "/no/where"], "/no/where does not exist"),
    ],
)
def test_mistakes_are_told_before_prompts_are_made(arguments, message, long_base, tmp_path, capsys, monkeypatch):
    models = ["--base", str(long_base), "--gated", str(long_base), "--lengths", str(LENGTH), "--out", str(tmp_path)]
    roots = [part for root in ROOTS for part in ("--data-root", str(root))]
    monkeypatch.setattr("gated_llama.evaluation.ruler.build_model", lambda *_: pytest.fail("a model was loaded"))
    assert main([*models, *roots, *QUICK, *arguments]) == 2
    assert message in capsys.readouterr().err
