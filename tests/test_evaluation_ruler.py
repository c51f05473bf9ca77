"""The RULER runner: same prompts for all, contexts from configurations, truncation, difference in differences."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from evaluation_support import ROOTS, STORIES
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from gated_llama.convert import convert_checkpoint
from gated_llama.evaluation import command, load, parse, ruler_prompts
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


@pytest.mark.parametrize("task", ["ruler_cwe", "ruler_vt"])
def test_lengths_that_hold_no_prompt_are_refused(task, few_words, long_base, tmp_path, capfd, monkeypatch):
    """With 512 tokens of vocabulary the harness would search for ever, or divide by no answers."""
    monkeypatch.setattr("gated_llama.evaluation.ruler.build_model", lambda *_: pytest.fail("a model was loaded"))
    models = ["--base", str(long_base), "--gated", str(long_base), "--out", str(tmp_path)]
    assert main([*models, "--lengths", str(LENGTH), "--tasks", task, *QUICK]) == 2
    told = capfd.readouterr()
    takes = r"smallest prompt takes 1[12]\d\d .* room for 1024: choose longer" if task == "ruler_cwe" else (
        r"example takes 6\d\d .* room for 500: leave the task out"
    )  # fmt: skip
    assert re.match(rf"Error: {task} does not fit a length of 1024 tokens: its {takes}", told.err.splitlines()[-1])
    assert "Max length" not in told.out + told.err  # what the generator says at each step
    metadata = json.dumps({"tokenizer": str(long_base), "max_seq_lengths": [LENGTH]})
    assert command.main(["--model_args", f"pretrained={long_base}", "--tasks", task, "--metadata", metadata]) == 2
    assert capfd.readouterr().err.splitlines()[-1] == told.err.splitlines()[-1]


def test_reserve_is_within_the_shortest_length(long_base):
    for reserve in (LENGTH, -1):
        with pytest.raises(ValueError, match=rf"--reserve {reserve} must be between 0 and the shortest length, 1024"):
            run_ruler({"base": str(long_base)}, [LENGTH, 2 * LENGTH], ["ruler_fwe"], QUICK, reserve=reserve)


# Prompts


@pytest.fixture
def words(tmp_path) -> str:
    """A tokenizer of which each word, and each mark, is one token."""
    backend = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    backend.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?").save_pretrained(tmp_path / "words")
    return str(tmp_path / "words")


def prompts(tokenizer: str, length: int, *tasks: str, limit: int = 500, seed: int = 0) -> dict[str, list[dict]]:
    metadata = json.dumps({"tokenizer": tokenizer, "max_seq_lengths": [length]})
    arguments = ["--tasks", *tasks, "--metadata", metadata, "--limit", str(limit), "--seed", str(seed)]
    job = load(parse(arguments))
    return {name: list(task.eval_docs) for name, task in job.tasks.items()}


@pytest.mark.parametrize("task", ["ruler_cwe", "ruler_vt"])
def test_the_smallest_prompt_just_fits(task, few_words, words):
    with pytest.raises(ValueError, match=f"{task} does not fit a length of 100 tokens") as refused:
        prompts(words, 100, task)
    shortest = int(re.search(r"its smallest prompt takes (\d+)", str(refused.value))[1])
    assert 300 < shortest < 1000
    with pytest.raises(ValueError, match=f"takes {shortest} .* has room for {shortest - 1}: choose longer lengths"):
        prompts(words, shortest - 1, task)
    documents = prompts(words, shortest, task)[task]
    assert len(documents) == 500
    for document in documents:
        assert document["length"] <= shortest
        assert len(document["outputs"]) == {"ruler_cwe": 10, "ruler_vt": 5}[task]
        assert all(word in document["input"] for word in document["outputs"])


@pytest.mark.parametrize("seed", range(4))
def test_what_is_measured_is_what_the_generator_looks_at_first(seed, few_words):
    """Words differ in tokens, and so does the smallest prompt from draw to draw."""
    with pytest.raises(ValueError, match="its smallest prompt takes") as refused:
        prompts(str(STORIES), 100, "ruler_cwe", seed=seed)
    shortest = int(re.search(r"takes (\d+)", str(refused.value))[1])
    found = prompts(str(STORIES), shortest, "ruler_cwe", seed=seed)["ruler_cwe"]
    assert {len(document["outputs"]) for document in found} == {10}


@pytest.mark.parametrize(("name", "longest_refused"), [("words", 199), ("stories", 250)])
def test_texts_of_coded_words_hold_their_answers(name, longest_refused, few_words, words):
    tokenizer = words if name == "words" else str(STORIES)
    with pytest.raises(ValueError, match=f"ruler_fwe does not fit a length of {longest_refused} tokens: its smallest"):
        prompts(tokenizer, longest_refused, "ruler_fwe")
    lengths = range(longest_refused + 1, 1000, 20)
    shortest = next(length for length in lengths if not refused(tokenizer, length, "ruler_fwe"))
    for document in prompts(tokenizer, shortest, "ruler_fwe")["ruler_fwe"]:
        assert len(document["outputs"]) == 3
        assert all(word in document["input"] for word in document["outputs"])


def refused(tokenizer: str, length: int, task: str) -> bool:
    try:
        prompts(tokenizer, length, task)
    except ValueError:
        return True
    return False


def test_what_the_harness_refuses_names_the_task(few_words, words):
    with pytest.raises(ValueError, match=r"niah_single_1 at a length of 150 tokens: Could not generate any sample"):
        prompts(words, 150, "niah_single_1")


def test_prompts_are_made_once(few_words, words, tmp_path, monkeypatch):
    """For each tokenizer by its content, length, seed and number; whatever else is made before them."""
    alone = prompts(words, 600, "ruler_cwe", limit=5)
    assert len(alone["ruler_cwe"]) == 5
    (file,) = (tmp_path / "assets").rglob("*.json")
    assert [path.name for path in file.parent.iterdir()] == [file.name]  # nothing partial
    file.unlink()
    beside = prompts(words, 600, "niah_single_1", "ruler_cwe", limit=5)
    assert beside["ruler_cwe"] == alone["ruler_cwe"]

    copy = str(shutil.copytree(words, tmp_path / "copy"))
    made, resolve = [], ruler_prompts._import_fun_from_str
    monkeypatch.setattr(ruler_prompts, "_import_fun_from_str", lambda place: made.append(place) or resolve(place))
    assert prompts(copy, 600, "niah_single_1", "ruler_cwe", limit=5) == beside
    assert not [place for place in made if "cwe" in place or "niah" in place]
    for other in ({"length": 610}, {"limit": 6}, {"seed": 1}):
        asked = {"length": 600, "limit": 5, "seed": 0} | other
        found = prompts(words, asked.pop("length"), "ruler_cwe", **asked)
        assert found != alone
        assert [place.rpartition("/")[2] for place in made if "cwe" in place] == ["cwe_utils.get_cw_dataset"]
        made.clear()
    vocabulary = json.loads(Path(copy, "tokenizer.json").read_text())
    vocabulary["post_processor"] = None
    vocabulary["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    other = Path(shutil.copytree(copy, tmp_path / "other"))
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    prompts(str(other), 600, "ruler_cwe", limit=5)
    assert [place for place in made if "cwe" in place]


def test_prompts_that_were_not_finished_are_not_kept(few_words, words, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prompts(words, 600, "ruler_cwe", limit=5)
    assert not list((tmp_path / "assets").rglob("*.json"))


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
