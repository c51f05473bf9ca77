"""`gated-llama diagnose`: corpus, report, pictures, page and the command's mistakes."""

import gzip
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from gated_llama.convert import convert_checkpoint
from gated_llama.diagnostics import corpus as corpora
from gated_llama.diagnostics.figures import figures, gate_means
from gated_llama.diagnostics.page import as_json, divergence_line, no_spikes, page, spans, write_report
from gated_llama.diagnostics.report import SCHEMA_VERSION, diagnose
from gated_llama_cli import main


STORIES = Path(__file__).parent / "data" / "stories260K"
TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. " * 12


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(STORIES)


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    """The real 260K-parameter model with a random headwise gate."""
    folder = tmp_path_factory.mktemp("diagnose") / "gated"
    convert_checkpoint(STORIES, folder, policy="normal", seed=1)
    return folder


@pytest.fixture(scope="module")
def corpus(tokenizer):
    return corpora.build_corpus(tokenizer, [TEXT], "a story", tokens=192, context=64)


@pytest.fixture(scope="module")
def report(gated, tokenizer, corpus):
    model = AutoModelForCausalLM.from_pretrained(gated)
    base = AutoModelForCausalLM.from_pretrained(STORIES)
    reports = [
        diagnose(m, tokenizer, corpus, name=n, map_layers=[1, 4]) for m, n in ((model, "gated"), (base, "base"))
    ]
    return replace(reports[0], against=reports[1])


def test_rows_begin_with_the_chosen_token(tokenizer):
    for bos, first in (("auto", 1), ("none", tokenizer.encode(TEXT, add_special_tokens=False)[0]), ("</s>", 2)):
        ids = corpora.build_corpus(tokenizer, [TEXT], "a story", tokens=100, context=20, bos=bos).ids
        assert ids.shape == (5, 20)
        assert ids[0, 0] == first
    rows = corpora.build_corpus(tokenizer, [TEXT], "a story", tokens=100, context=20).ids[:, 1:].flatten()
    assert rows.tolist() == tokenizer.encode(TEXT, add_special_tokens=False)[: rows.numel()]


def test_a_short_text_gives_one_short_row(tokenizer):
    ids = corpora.build_corpus(tokenizer, ["Once upon"], "two words", tokens=100, context=20).ids
    assert ids.tolist() == [[1, *tokenizer.encode("Once upon", add_special_tokens=False)]]


@pytest.mark.parametrize(
    ("texts", "options", "words"),
    [
        ([""], {}, "is empty"),
        (["Once"], {}, "has one token; at least two are needed"),
        (["Once upon"], {"tokens": 1}, "tokens=1 is too few"),
        (["Once upon"], {"context": 0}, "context=0 is too few"),
        (["Once upon"], {"bos": "two tokens"}, "must be one"),
    ],
)
def test_unfit_texts_are_refused(tokenizer, texts, options, words):
    with pytest.raises(ValueError, match=words):
        corpora.build_corpus(tokenizer, texts, "a text", **{"tokens": 8, "context": 8, **options})


def test_texts_are_read_from_txt_and_jsonl(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "source": "x"}\n', encoding="utf-8")
    assert corpora.read_texts(tmp_path / "a.txt")[0] == ["one\ntwo"]
    assert corpora.read_texts(tmp_path / "a.jsonl")[0] == ["one", "two"]
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        assert corpora.read_texts(tmp_path / f"{name}.gz")[0] == corpora.read_texts(tmp_path / name)[0]
    damaged = bytearray(gzip.compress(b"one two three " * 100))
    damaged[20] ^= 255
    (tmp_path / "d.txt.gz").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"d.txt.gz is not a complete gzip file"):
        corpora.read_texts(tmp_path / "d.txt.gz")
    built_in, _ = corpora.read_texts(None)
    assert len(built_in[0]) > 20_000
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"body": "two"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="Line 2"):
        corpora.read_texts(tmp_path / "b.jsonl")
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        corpora.read_texts(tmp_path / "c.txt")


def test_report_holds_the_documented_keys(report):
    content = json.loads(as_json(report.to_dict()))
    assert content["schema_version"] == SCHEMA_VERSION
    for side in (content, content["against"]):
        attention = side["first_token_attention"]
        assert len(attention["per_layer"]) == 5
        assert attention["mean"] == pytest.approx(sum(attention["per_layer"]) / 5, rel=1e-4)
        assert attention["first_tokens"] == [{"id": 1, "count": 3, "token": "<s>"}]
        assert side["max_activation"]["max"] == max(side["max_activation"]["per_layer"])
        assert side["spike_writers"] == []  # this small model has no massive activations
        names = [outcome["name"] for outcome in side["interventions"]]
        assert names[0] == "unchanged"
        assert {"window 32, 0 first kept", "W8A8", "A4 per token"} <= set(names)
    assert content["gate_scores"]["granularity"] == "headwise"
    assert {"gates reset", "gates = mean"} <= {outcome["name"] for outcome in content["interventions"]}
    assert content["against"]["gate_scores"] is None
    assert "no known gate" in content["against"]["left_out"]["gates"]


def test_report_agrees_with_eager_attention(report, gated, corpus):
    model = AutoModelForCausalLM.from_pretrained(gated, attn_implementation="eager")
    with torch.no_grad():
        maps = model(corpus.ids, output_attentions=True).attentions
    expected = [layer[:, :, 1:, 0].mean().item() for layer in maps]
    assert report.first_token_attention["per_layer"] == pytest.approx(expected, abs=1e-5)
    assert torch.allclose(report.maps[4], maps[4][0, :, :48, :48], atol=1e-5)


def test_a_model_in_training_has_the_same_report(report, gated, tokenizer, corpus):
    model = AutoModelForCausalLM.from_pretrained(gated, attention_dropout=0.5).train()
    found = diagnose(model, tokenizer, corpus, name="gated", map_layers=[1, 4])
    assert found.to_dict() == replace(report, against=None).to_dict()
    assert all(module.training for module in model.modules())


def test_models_are_told_to_part_where_they_do(report, tokenizer, corpus):
    content = report.to_dict()["divergence"]
    assert [entry["place"] for entry in content] == ["embed_tokens", 0, 1, 2, 3, 4, "norm"]
    assert content[0]["bitwise"]
    assert not content[1]["bitwise"]  # the first gate
    assert "part at model.layers.0" in divergence_line(report)
    base = AutoModelForCausalLM.from_pretrained(STORIES)
    same = diagnose(base, tokenizer, corpus, name="again", map_layers=[0], interventions=False)
    assert "bitwise equal" in divergence_line(replace(report.against, against=same))
    assert divergence_line(report.against) == ""


def test_pictures_and_page_hold_everything(report, tmp_path):
    write_report(report, tmp_path)
    names = set(figures(report))
    assert names >= {"first_token_attention", "max_activation", "attention_maps", "sparsity", "gate_means"}
    assert {path.stem for path in tmp_path.glob("*.png")} == names
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert html.count("data:image/png;base64,") == len(names)
    assert not re.findall(r'(?:src|href)="(?!data:)', html)  # needs no other file
    assert "gates = mean" in html


def test_page_escapes_what_it_shows(report):
    named = replace(report, model=report.model | {"name": "<script>alert(1)</script>"})
    assert "<script>" not in page(named, {})


def test_layers_are_written_as_ranges():
    assert spans([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
    assert spans([]) == "none"


def test_command_writes_a_report(gated, tmp_path, capsys):
    arguments = ["diagnose", str(gated), "--against", str(STORIES), "--tokens", "96", "--context", "32"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "first-token attention, mean" in printed
    content = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert content["text"] == {
        "source": "A Scandal in Bohemia (built in)",
        "rows": 3,
        "context": 32,
        "bos": "<s>",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--text", "missing.txt"], "does not exist"),
        (["--tokens", "1"], "too few"),
        (["--map-layers", "99"], "99"),
        (["--bos", "two tokens"], "must be one"),
        (["--against", "missing-model"], "missing-model"),
    ],
)
def test_mistakes_give_one_line_and_write_nothing(gated, tmp_path, capsys, options, words):
    assert main(["diagnose", str(gated), "--out", str(tmp_path / "out"), *options]) == 2
    printed = capsys.readouterr().err
    errors = [line for line in printed.splitlines() if line.startswith("Error:")]
    assert len(errors) == 1
    assert words in errors[0]
    assert "Traceback" not in printed
    assert not list(tmp_path.iterdir())


def test_lines_hold_any_character_and_a_byte_order_mark_is_none(tmp_path):
    path = tmp_path / "texts.jsonl"
    texts = ["once\u2028upon\x85a time", "and then"]
    path.write_text("\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in texts), encoding="utf-8-sig")
    assert corpora.read_texts(path)[0] == texts


def test_a_model_of_another_tokenizer_is_refused(gated, tmp_path, capsys):
    shutil.copytree(STORIES, tmp_path / "other")
    content = json.loads((tmp_path / "other" / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    names = list(vocab)[300:]
    content["model"]["vocab"] |= dict(zip(names, [vocab[name] for name in reversed(names)], strict=True))
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    arguments = ["diagnose", str(gated), "--against", str(tmp_path / "other"), "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "reads the text as other tokens than" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_models_of_other_depths_are_not_compared_and_say_so(report):
    short = replace(report.against, states={p: s for p, s in report.against.states.items() if p != 4})
    assert "not compared. The models have 7 and 6" in divergence_line(replace(report, against=short))
    assert replace(report, against=short).divergence() is None


def test_positions_beyond_the_models_are_told(tokenizer):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=32, n_embd=16, n_layer=2, n_head=2)).eval()
    long = corpora.build_corpus(tokenizer, [TEXT], "a story", tokens=128, context=64)
    with pytest.raises(ValueError, match="has 32 positions and a row has 64 tokens: choose a smaller context"):
        diagnose(model, tokenizer, long)
    found = diagnose(model, tokenizer, corpora.build_corpus(tokenizer, [TEXT], "a story", tokens=64, context=32))
    assert found.max_activation["unit_layers"] == []
    assert "Not looked for" in no_spikes(found)


def test_hidden_states_that_are_no_numbers_are_named(tokenizer, corpus):
    model = AutoModelForCausalLM.from_pretrained(STORIES).eval()
    with torch.no_grad():
        model.model.layers[4].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"Hidden states are not finite in layers \[4\]"):
        diagnose(model, tokenizer, corpus)


def test_heads_of_different_numbers_have_a_picture(report):
    gates = report.gate_scores | {
        "per_head": [heads[: 4 + i] for i, heads in enumerate(report.gate_scores["per_head"])]
    }
    assert gate_means(replace(report, gate_scores=gates)).axes[0].images[0].get_array().shape == (5, 8)
