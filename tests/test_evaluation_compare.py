"""Base against gated: identity, differences, noise, refusals; statistics; reports, model card, command line."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from datasets import Dataset
from evaluation_support import ROOTS, STORIES, make_job
from huggingface_hub import ModelCard
from lm_eval.loggers.utils import get_git_commit_hash
from lm_eval.tasks import TaskManager
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import gated_llama.evaluation
from gated_llama.convert.verify import PROOF_TEXT
from gated_llama.evaluation import build_model, compare, evaluate
from gated_llama.evaluation.card import add_results
from gated_llama.evaluation.command import main
from gated_llama.evaluation.documents import openings
from gated_llama.evaluation.pairing import ENOUGH, Row, collect
from gated_llama.evaluation.programs import passes
from gated_llama.evaluation.report import _stems, to_markdown, write
from gated_llama.evaluation.run import TASKS, commit, local_data, parse
from gated_llama.evaluation.statistics import SCALES, Paired, interval, mcnemar, paired
from gated_llama.hub import read_card, write_card
from gated_llama_cli import eval as eval_command


# The harness and `datasets` are not ours to keep free of deprecations.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("quick_harness"),
]
pytest_plugins = ["evaluation_fixtures"]

EVERY_KIND = "hellaswag,perplexity_law_en,gsm8k"
SHORT_ANSWERS = ["--gen_kwargs", "max_gen_toks=8", "--num_fewshot", "0"]
SUBJECTS = """
group: subjects
task: [mmlu_anatomy, mmlu_astronomy]
aggregate_metric_list:
  - {metric: acc, aggregation: mean, weight_by_size: WEIGHTED}
"""


# Comparison


def test_identity_is_identical_to_the_last_digit(identity, tmp_path):
    job = make_job(identity, EVERY_KIND, *SHORT_ANSWERS)
    found = [compare(job, str(STORIES), bos=bos, noise_floor="off") for bos in ("auto", "none")]
    for comparison in found:
        assert comparison.identical
        assert {row.values.difference for row in comparison.rows} == {0.0}
        assert not any(row.values.changed or row.clear for row in comparison.rows)
        assert {row.name for row in comparison.rows} == set(EVERY_KIND.split(","))
    better = {row.metric: row.higher_is_better for row in found[0].rows}
    assert better.items() >= dict.fromkeys(("acc", "acc_norm", "exact_match"), True).items()
    assert not any(higher for metric, higher in better.items() if "perplexity" in metric)
    assert "token_perplexity" in better
    token = [row.values.base for c in found for row in c.rows if row.metric == "token_perplexity"]
    assert token[0] != token[1]  # the two policies are two measurements
    text = to_markdown(found)
    assert text.count("identical, to the last digit") == 2
    paths = write(found, tmp_path / "out")
    assert [path.name for path in paths] == [
        "comparison.md",
        "comparison-auto.json",
        "comparison-auto.png",
        "comparison-none.json",
        "comparison-none.png",
    ]
    content = json.loads(paths[1].read_text())
    assert content["identical"]
    assert content["rows"][0]["values"]["difference"] == 0
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_random_gates_differ_and_noise_is_told_apart(random_gates, monkeypatch):
    job = make_job(random_gates, "hellaswag,perplexity_law_en", "--limit", "20")
    comparison = compare(job, str(STORIES))
    assert not comparison.identical
    assert comparison.noise == "batch size 4 and bfloat16, instead of 1 and float32"
    rows = {(row.name, row.metric): row for row in comparison.rows}
    token = rows["perplexity_law_en", "token_perplexity"]
    assert token.unit == "nats per token"
    assert token.values.difference == pytest.approx(np.log(token.values.model / token.values.base))
    assert 0 < abs(token.noise.difference) < 0.05 < token.values.difference
    assert not token.clear  # too few documents for an interval
    monkeypatch.setattr("gated_llama.evaluation.pairing.ENOUGH", token.values.documents)
    assert token.clear
    for row in comparison.rows:
        assert row.values.low <= row.values.difference <= row.values.high
        reported = comparison.results["model"]["results"][row.name][f"{row.metric},{row.filter}"]
        assert row.values.model == pytest.approx(reported, rel=1e-12)
    assert 0 <= rows["hellaswag", "acc"].values.p_value <= 1


@pytest.mark.parametrize("bos", ["auto", "none"])
def test_token_perplexity_is_per_scored_token(bos, random_gates):
    """From the model's own logits of each document, which all fit its context."""
    job = make_job(random_gates, "perplexity_law_en", "--limit", "3")
    job.tasks["perplexity_law_en"].config.process_docs = None
    lm = build_model(job.config, job.config.model_args | {"bos": bos, "max_length": 4096})
    results = evaluate(job, lm)
    total = count = 0
    for sample in results["samples"]["perplexity_law_en"]:
        ((text,),) = sample["arguments"]
        ids = torch.tensor([lm.tokenizer.encode(text, add_special_tokens=bos == "auto")])
        with torch.no_grad():
            logits = lm.model(ids).logits[0, :-1].log_softmax(-1)
        score = logits.gather(1, ids[0, 1:, None]).sum().item()
        # Logarithms are added in another order, in float32.
        assert sample["token_perplexity"] == (pytest.approx(score, rel=1e-5), ids.shape[1] - 1)
        total, count = total + score, count + ids.shape[1] - 1
    found = results["results"]["perplexity_law_en"]
    assert found["token_perplexity,none"] == pytest.approx(np.exp(-total / count), rel=1e-5)


def test_probes_measure_both_where_they_can(random_gates):
    job = make_job(random_gates, "hellaswag", "--limit", "1")
    comparison = compare(job, str(STORIES), probes=["gates", "sink"], noise_floor="off")
    base, model = (comparison.results[label]["config"]["probes"]["hellaswag"] for label in ("base", "model"))
    assert "gate_scores" not in base  # it has no gates
    assert 0 < model["gate_scores"]["mean"] < 1
    assert base["tokens"] == model["tokens"]
    text = to_markdown([comparison])
    assert "Measured on the tokens that were read" in text
    assert f"| {model['first_token_attention']['mean']:.4f} |" in text
    assert "from the cache" not in text


def test_answers_from_a_cache_are_told_as_not_measured(random_gates, tmp_path):
    arguments = ["--limit", "1", "--use_cache", str(tmp_path / "answers")]
    job = make_job(random_gates, "hellaswag", *arguments)
    evaluate(job, build_model(job.config))
    comparison = compare(job, str(STORIES), probes=["gates", "sink"], noise_floor="off")
    counts = [comparison.results[label]["config"]["probes"]["hellaswag"] for label in ("base", "model")]
    assert [(found["requests"], found["cached"]) for found in counts] == [(4, 0), (0, 4)]
    assert "not measured: hellaswag (model) 4." in to_markdown([comparison])


@pytest.mark.parametrize("weighted", ["true", "false"])
def test_groups_are_aggregated_as_the_harness_does(weighted, random_gates, tmp_path):
    (tmp_path / "subjects.yaml").write_text(SUBJECTS.replace("WEIGHTED", weighted))
    job = make_job(random_gates, "subjects", "--include_path", str(tmp_path), "--limit", "6", "--num_fewshot", "0")
    comparison = compare(job, str(STORIES), noise_floor="off")
    group, *tasks = comparison.rows
    assert [row.name for row in comparison.rows] == ["subjects", "mmlu_anatomy", "mmlu_astronomy"]
    assert (group.values.documents, tasks[0].values.documents, tasks[1].values.documents) == (10, 6, 4)
    assert group.values.model == pytest.approx(comparison.results["model"]["groups"]["subjects"]["acc,none"])
    assert group.values.base == pytest.approx(comparison.results["base"]["groups"]["subjects"]["acc,none"])


@pytest.mark.parametrize(
    ("sample", "runs", "message"),
    [
        (PROOF_TEXT, 0, r"\[(\d+), .* instead of \[(?!\1,).* from token \d+ of a sample text"),
        ("1", 1, r"reads other token ids.*hellaswag.*--model_args tokenizer="),
    ],
)
def test_other_token_ids_are_refused(sample, runs, message, identity, base, monkeypatch):
    """Before the base is run where a sample text tells, and else before the model is."""
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["▁was"], vocabulary["▁the"] = vocabulary["▁the"], vocabulary["▁was"]
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    module, calls = sys.modules["gated_llama.evaluation.compare"], []
    monkeypatch.setattr(module, "PROOF_TEXT", sample)
    monkeypatch.setattr(module, "evaluate", lambda *arguments: calls.append(1) or evaluate(*arguments))
    with pytest.raises(ValueError, match=message):
        compare(make_job(identity, "hellaswag"), str(base), noise_floor="off")
    assert len(calls) == runs


def test_requests_that_become_others_in_the_model_s_run_are_refused(identity, monkeypatch):
    """They are built anew there, from what is the model's own."""
    module, runs = sys.modules["gated_llama.evaluation.compare"], []

    def changing(job, lm):
        results = evaluate(job, lm)
        runs.append(lm)
        if len(runs) == 2:
            request = job.tasks["hellaswag"].instances[-1]
            request.arguments = (request.arguments[0], f"{request.arguments[1]} And more.")
        return results

    monkeypatch.setattr(module, "evaluate", changing)
    with pytest.raises(ValueError, match=r"reads other token ids than .* in hellaswag"):
        compare(make_job(identity, "hellaswag", "--limit", "1"), str(STORIES), noise_floor="off")
    assert len(runs) == 2


def test_other_dtype_context_or_template_is_refused(identity, base):
    job = make_job(identity, "hellaswag", "--limit", "1")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ValueError, match="chat templates"):
        compare(job, str(base), noise_floor="off")
    (base / "chat_template.jinja").unlink()
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    with pytest.raises(ValueError, match=r"1024 tokens.*512.*max_length=512"):
        compare(job, str(base), noise_floor="off")
    (base / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    weights = {name: tensor.bfloat16() for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    job.config.model_args.pop("dtype")
    with pytest.raises(ValueError, match=r"bfloat16.*float32.*dtype="):
        compare(job, str(base), noise_floor="off")


@pytest.mark.parametrize(
    ("difference", "noise", "documents", "clear"),
    [
        (0.10, 0.09, ENOUGH, True),
        (0.10, -0.09, ENOUGH, True),
        (-0.10, 0.09, ENOUGH, True),
        (0.10, 0.10, ENOUGH, False),
        (0.10, 0.11, ENOUGH, False),
        (0.10, -0.11, ENOUGH, False),
        (-0.10, 0.11, ENOUGH, False),
        (0.10, None, ENOUGH, True),
        (0.10, None, ENOUGH - 1, False),
        (0.04, 0.01, ENOUGH, False),  # zero is inside
        (0.05, 0.01, ENOUGH, False),  # and at the end
    ],
)
def test_a_difference_is_clear_beyond_its_interval_and_the_noise(difference, noise, documents, clear):
    def moved(by: float) -> Paired:
        low, high = (round(by + side, 6) for side in (-0.05, 0.05))
        return Paired(documents, 0.5, 0.5 + by, by, low, high, p_value=None, changed=documents)

    row = Row("task", "acc", "none", "", True, moved(difference), None if noise is None else moved(noise))
    assert row.clear is clear


@pytest.mark.parametrize(
    ("told", "better"), [({"m": True}, True), ({"m": False}, False), ({"m": None}, True), ({}, True)]
)
def test_higher_is_better_unless_the_task_says_otherwise(told, better):
    def of(value):
        sample = {"filter": "none", "doc_id": 0, "doc_hash": "0", "metrics": ["m"], "m": value}
        return {"samples": {"task": [sample]}, "higher_is_better": {"task": told}}

    task = SimpleNamespace(aggregation=dict)
    assert collect({"task": task}, of(0.0), of(1.0)).by_task["task"]["m", "none"].higher_is_better is better
    other = of(1.0)
    other["samples"]["task"][0]["doc_hash"] = "1"
    with pytest.raises(ValueError, match="results of task are of different documents"):
        collect({"task": task}, of(0.0), other)


# Statistics


def test_paired_values_and_their_interval():
    generator = np.random.default_rng(0)
    base = generator.normal(size=400)
    model = base + generator.normal(0.3, 0.5, size=400)
    found = paired(list(zip(base, model, strict=True)), SCALES["mean"])
    assert found.difference == pytest.approx((model - base).mean())
    half = 1.96 * (model - base).std() / 20  # the normal interval; the bootstrap's own error is a few per cent of it
    assert (found.low, found.high) == pytest.approx(
        (found.difference - half, found.difference + half), abs=0.15 * half
    )
    assert found.p_value is None


def test_perplexities_are_weighted_by_length_and_compared_in_nats():
    pairs = [((-10.0, 5), (-12.0, 5)), ((-4.0, 1), (-4.0, 1))]
    found = paired(pairs, SCALES["weighted_perplexity"])
    assert found.base == pytest.approx(np.exp(14 / 6))
    assert found.model == pytest.approx(np.exp(16 / 6))
    assert found.difference == pytest.approx(2 / 6)
    assert (found.documents, found.changed) == (2, 1)


def test_mcnemar_is_exact():
    base, model = np.array([1, 1, 0, 0, 0, 0, 0.0]), np.array([1, 1, 1, 1, 1, 1, 1.0])
    assert mcnemar(base, model) == pytest.approx(2 * 0.5**5)
    assert mcnemar(base, base) == 1.0
    assert mcnemar(base, model / 2) is None


def test_interval_is_reproducible_and_covers_nothing_but_zero_for_equal_models():
    values = np.random.default_rng(1).normal(size=50)
    assert interval(values, np.ones(50)) == interval(values, np.ones(50))
    assert interval(np.zeros(50), np.ones(50)) == (0.0, 0.0)


def test_ruler_marks_of_other_lengths_are_left_out():
    assert paired([(-1, -1), (0.5, 1.0)], SCALES["aggregate_metrics"]).documents == 1
    assert paired([(-1, -1)], SCALES["aggregate_metrics"]) is None


# Tasks and data


def test_unknown_task_and_missing_data_name_the_fix(identity, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"Tasks not found: helloswag.*lm_eval ls tasks"):
        make_job(identity, "helloswag")
    with pytest.raises(
        ValueError, match=r"The data set of ceval-valid_\w+ was not found.*ceval/ceval-exam.*--data-root"
    ):
        make_job(identity, "ceval-valid", roots=[])
    with pytest.raises(ValueError, match=r"perplexity_math_en was not found.*eval/text"):
        make_job(identity, "perplexity_english")
    with pytest.raises(ValueError, match="No task was named"):
        parse(["--model_args", f"pretrained={identity}"])
    with pytest.raises(ValueError, match="is not a folder"):
        make_job(identity, "hellaswag", roots=[tmp_path / "nothing"])


def test_data_roots_are_merged_and_must_not_clash(tmp_path):
    with local_data([]):
        pass
    with pytest.raises(ValueError, match=r"Rowan is in more than one --data-root"), local_data([ROOTS[0], ROOTS[0]]):
        pass


def test_the_papers_suite_names_tasks_that_exist(identity):
    manager = parse(["--tasks", "gated_attention_paper", "--model_args", f"pretrained={identity}"]).process_tasks()
    group = manager.task_index["gated_attention_paper"].cfg["task"]
    names = [entry if isinstance(entry, str) else entry.get("group", entry.get("task")) for entry in group]
    assert names == ["hellaswag", "mmlu", "gsm8k", "humaneval_local", "ceval-valid", "cmmlu"]
    assert all(name in manager.task_index for name in names)
    tags = {tag: sorted(manager.task_index[tag].tags) for tag in ("perplexity_chinese", "perplexity_code")}
    assert tags["perplexity_code"] == ["perplexity_code_python"]
    assert len(tags["perplexity_chinese"]) == 3
    assert (TASKS / "gated_attention_paper.yaml").is_file()


def test_wikitext_and_unspaced_text(identity):
    job = make_job(identity, "wikitext_local,perplexity_literature_zh")
    results = evaluate(job, build_model(job.config))
    page = job.tasks["wikitext_local"].eval_docs[0]["page"]
    assert "30 @-@ odd" in page
    assert "30-odd" in results["samples"]["wikitext_local"][0]["target"]
    assert "word_perplexity,none" not in results["results"]["perplexity_literature_zh"]
    assert results["results"]["perplexity_literature_zh"]["token_perplexity,none"] > 1


def test_openings_are_cut_in_every_format():
    cut = openings(Dataset.from_dict({"text": ["a" * 5000, "b"]}))
    assert [len(text) for text in cut["text"]] == [4000, 1]
    assert openings(Dataset.from_dict({"page": ["\u5b57" * 5000]}))["page"][0] == "\u5b57" * 1333


def test_humaneval_runs_code_only_when_told(identity):
    options = ["--gen_kwargs", "max_gen_toks=4", "--model_args", "on_truncation=count"]
    with pytest.raises(ValueError, match=r"humaneval_local runs code .* --confirm_run_unsafe_code"):
        make_job(identity, "humaneval_local", *options)
    allowed = make_job(identity, "humaneval_local", *options, "--confirm_run_unsafe_code")
    results = evaluate(allowed, build_model(allowed.config))
    assert results["results"]["humaneval_local"]["pass_at_1,create_test"] == 0.0


def test_programs_are_run_against_their_tests(monkeypatch):
    docs = [json.loads(line) for line in (ROOTS[0] / "openai/openai_humaneval/test.jsonl").read_text().splitlines()]
    for doc in docs:
        tests = f"{doc['test']}\ncheck({doc['entry_point']})"
        assert passes(doc["prompt"] + doc["canonical_solution"], tests)
        assert not passes(doc["prompt"] + "    return None\n", tests)
    for code in (1, 2, 3, 255):
        assert not passes(f"raise SystemExit({code})", "")
    monkeypatch.setattr("gated_llama.evaluation.programs.TIMEOUT", 0.5)
    assert not passes("while True: pass", "")
    monkeypatch.setenv("SECRET", "x")
    assert passes("import os", "assert 'SECRET' not in os.environ")


# Card and command line


def test_card_carries_the_scores(identity, tmp_path):
    folder = shutil.copytree(identity, tmp_path / "model")
    with open(folder / "README.md", "ab") as card:
        card.write(b"A na\xefve note that is not UTF-8.\n")
    job = make_job(identity, "hellaswag")
    results = evaluate(job, build_model(job.config))
    for _ in range(2):  # a second time replaces
        add_results(folder, results, job.tasks)
    assert (folder / "README.md").read_bytes().endswith(b"A na\xefve note that is not UTF-8.\n")
    write_card(folder / "README.md", read_card(folder / "README.md").replace("\udcef", "i"))  # for the library
    data = ModelCard.load(folder / "README.md").data
    assert data.tags == ["gated-attention", "gated_llama"]
    found = {result.metric_type: result for result in data.eval_results}
    assert len(data.eval_results) == 2
    assert found["acc"].metric_value == pytest.approx(results["results"]["hellaswag"]["acc,none"], abs=1e-6)
    assert found["acc"].dataset_type == "Rowan/hellaswag"
    assert found["acc"].dataset_args == {"documents": 4, "num_few_shot": 0}
    with pytest.raises(ValueError, match="not a local folder"):
        add_results(tmp_path / "nothing", results, job.tasks)


def test_card_keeps_tasks_apart_that_share_a_data_set(identity, tmp_path):
    folder = shutil.copytree(identity, tmp_path / "model")
    job = make_job(identity, "hellaswag,perplexity_law_en", "--limit", "1")
    job.tasks["perplexity_law_en"].config.process_docs = openings
    results = evaluate(job, build_model(job.config))
    twin = {part: {"hellaswag_twin": results[part]["hellaswag"]} for part in ("results", "n-shot")}
    add_results(folder, results, job.tasks)
    add_results(folder, twin, {"hellaswag_twin": job.tasks["hellaswag"]})
    card = ModelCard.load(folder / "README.md")
    assert card.data.model_name == "model"
    found = {(result.dataset_name, result.metric_type): result.metric_value for result in card.data.eval_results}
    assert found["hellaswag", "acc"] == found["hellaswag_twin", "acc"] == results["results"]["hellaswag"]["acc,none"]
    perplexity = found["perplexity_law_en (first 4,000 bytes)", "token_perplexity"]
    assert perplexity == pytest.approx(results["results"]["perplexity_law_en"]["token_perplexity,none"], abs=1e-6)
    assert ("perplexity_law_en", "token_perplexity") not in found


@pytest.fixture
def command():
    app = typer.Typer()
    eval_command.register(app)
    app.callback()(lambda: None)
    runner = CliRunner()
    roots = [part for root in ROOTS for part in ("--data-root", str(root))]
    return lambda *arguments: runner.invoke(app, ["eval", *map(str, arguments), *roots])


def test_command_hands_the_harness_its_flags(command, identity, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(identity, tmp_path / "model")
    result = command(
        tmp_path / "model", "--tasks", "hellaswag", "-L", "2", "-b", "2", "--probes", "gates,sink", "--bos", "none",
        "--model_args", "dtype=float32", "--log_samples", "--output_path", out, "--card",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "hellaswag" in result.stdout
    assert "first-token attention" in result.stdout
    assert "from the cache" not in result.stdout
    saved = json.loads(next(out.rglob("results_*.json")).read_text())
    assert saved["config"]["batch_size"] == 2 or saved["config"]["batch_size"] == "2"
    assert saved["n-samples"]["hellaswag"]["effective"] == 2
    assert saved["config"]["bos"] == "none"
    assert saved["config"]["probes"]["hellaswag"]["gate_scores"]["mean"] == pytest.approx(0.5)
    assert next(out.rglob("samples_hellaswag_*.jsonl")).read_text().count("\n") == 2
    assert "model-index" in (tmp_path / "model" / "README.md").read_text()


def test_command_compares(command, identity, tmp_path):
    result = command(
        identity, "--against", STORIES, "--tasks", "hellaswag", "--limit", "2", "--noise-floor", "off",
        "--output_path", tmp_path, "--bos", "auto, none", "--model_args", "dtype=float32", "--log_samples",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout.count("identical, to the last digit") == 2
    samples = [json.loads(line) for line in (tmp_path / "samples-none" / "hellaswag.model.jsonl").open()]
    assert [sample["doc_id"] for sample in samples] == [0, 1]
    assert (tmp_path / "samples-auto" / "hellaswag.base.jsonl").is_file()
    assert (tmp_path / "comparison.md").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "hellaswag"], "No model was named"),
        (["--tasks", "hellaswag", "--model_args", "pretrained=MODEL", "--bos", "auto,none"], "several policies"),
        (["--tasks", "hellaswag", "--model_args", "pretrained=MODEL", "--bos", "auto, auto"], "names a policy twice"),
        (["--tasks", "hellaswag", "--model_args", "pretrained=MODEL", "--bos", "auto,"], "or an empty one"),
        (
            ["--tasks", "hellaswag", "--model", "hf", "--model_args", "pretrained=MODEL", "--probes", "sink"],
            "belong to",
        ),
        (["--tasks", "nothing", "--model_args", "pretrained=MODEL"], "Tasks not found: nothing"),
        (["--tasks", "hellaswag", "--model_args", "pretrained=/no/such/model"], "/no/such/model"),
        (["--tasks", "hellaswag", "--model_args", "pretrained=nowhere"], "nowhere"),
        (["--tasks", "hellaswag", "--model_args", "pretrained=MODEL,nonsense=3"], "look at --model_args and --device"),
        (["--tasks", "hellaswag", "--model_args", "pretrained=MODEL,dtype=float99"], "look at --model_args"),
        (["--tasks", "hellaswag", "--model_args", "pretrained=MODEL", "--batch_size", "0"], "--batch_size 0 must be"),
        (["--tasks", "hellaswag", "--model_args", "pretrained=MODEL", "--output_path", __file__], "name a folder"),
        (["--tasks", "hellaswag", "--model_args", "pretrained=nowhere", "--card"], "nowhere is not a local folder"),
        (["--tasks", "perplexity_openings", "--model_args", "pretrained=MODEL"], "put literature_en/validation.jsonl"),
        (
            ["--tasks", "hellaswag", "--model_args", "pretrained=MODEL", "--against", "MODEL", "--wandb_args", "x=1"],
            "leave --wandb_args",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, message, identity, capsys):
    arguments = [argument.replace("MODEL", identity) for argument in arguments]
    assert main([*arguments, "--data-root", str(ROOTS[0]), "--limit", "1"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("Error: ")
    assert message in line


@pytest.mark.parametrize("cache", [True, False])
def test_interrupt_says_how_to_go_on(cache, identity, tmp_path, capsys, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("gated_llama.evaluation.command.run", stop)
    arguments = ["--tasks", "hellaswag", "--model_args", f"pretrained={identity}", "--data-root", str(ROOTS[0])]
    assert main(arguments + (["--use_cache", str(tmp_path / "answers")] if cache else [])) == 130
    assert ("goes on from the cache" if cache else "--use_cache PATH keeps answers") in capsys.readouterr().err


def test_a_policy_that_fails_loses_nothing_of_the_others(command, identity, tmp_path):
    result = command(
        identity, "--against", STORIES, "--tasks", "hellaswag", "--limit", "1", "--noise-floor", "off",
        "--output_path", tmp_path, "--bos", "none,no such token", "--model_args", "dtype=float32",
    )  # fmt: skip
    assert result.exit_code != 0
    assert "identical, to the last digit" in result.stdout
    assert (tmp_path / "comparison.md").is_file()


def test_files_of_policies_have_names_of_their_own():
    assert _stems(["auto"]) == ["comparison"]
    assert _stems(["auto", "none"]) == ["comparison-auto", "comparison-none"]
    assert _stems(["<s>", "</s>", "!"]) == ["comparison-1s", "comparison-2s", "comparison-3"]


def test_flags_win_over_a_configuration_file_item_by_item(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("tasks: [hellaswag]\nmodel_args: {dtype: float32, pretrained: other}\ninclude_path: mine\n")
    found = parse(["--config", str(path), "--model_args", json.dumps({"pretrained": "model"})])
    assert found.model == "gated-llama"
    assert found.model_args == {"dtype": "float32", "pretrained": "model"}
    assert found.include_path[1:] == [str(Path("mine").absolute())]
    path.write_text("tasks: [hellaswag]\nmodel: hf\nmodel_args: dtype=float32,pretrained=other\n")
    found = parse(["--config", str(path)])
    assert (found.model, found.model_args) == ("hf", {"dtype": "float32", "pretrained": "other"})


def test_pictures_are_not_missed_at_the_end(command, identity, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = command(identity, "--against", STORIES, "--tasks", "hellaswag", "--output_path", tmp_path)
    assert isinstance(result.exception, ImportError)
    assert "Pictures need matplotlib" in str(result.exception)


def test_a_task_that_needs_a_package_names_it(identity, capsys, monkeypatch):
    def load(manager, names):
        raise ModuleNotFoundError("No module named 'langdetect'", name="langdetect")

    monkeypatch.setattr(TaskManager, "load", load)
    assert main(["--tasks", "hellaswag", "--model_args", f"pretrained={identity}"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "Error: hellaswag needs a package that is not installed: No module named 'langdetect'"


def test_missing_extra_names_the_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"pip install 'gated-llama\[eval\]'"):
        importlib.reload(gated_llama.evaluation)


def test_module_prints_the_table(identity, capfd, tmp_path, monkeypatch):
    """With headings (those of an old pytablewriter are A, B, C), and outside a repository without a word from git."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    arguments = ["--tasks", "hellaswag", "--model_args", f"pretrained={identity}", "--limit", "1"]
    assert main([*arguments, "--data-root", str(ROOTS[0].absolute())]) == 0
    printed = capfd.readouterr()
    heading = printed.out.splitlines()[0]
    assert [cell.strip() for cell in heading.split("|") if cell.strip()][:5] == [
        "Tasks", "Version", "Filter", "n-shot", "Metric",
    ]  # fmt: skip
    assert "acc_norm" in printed.out
    assert "fatal" not in printed.err


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert commit() is None
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for call in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", *call], check=True)
    assert commit() == get_git_commit_hash()
    assert len(commit()) >= 7
