"""The model class `gated-llama` in lm-evaluation-harness: same numbers every way, beginnings, fits, probes, cache."""

import inspect
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from evaluation_support import ROOTS, STORIES, make_job
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig, get_peft_model
from test_gguf_tokenizer import byte_level_keys, write
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from gated_llama.convert import convert_checkpoint
from gated_llama.diagnostics import FirstTokenAttention, GateScores
from gated_llama.evaluation import GatedLlamaLM, build_model, evaluate
from gated_llama.evaluation.cache import cache_name
from gated_llama.evaluation.harness import BESIDE_A_MODEL
from gated_llama.evaluation.probes import TIMED_BATCHES


# The harness and `datasets` are not ours to keep free of deprecations.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("quick_harness"),
]
pytest_plugins = ["evaluation_fixtures"]

CPU = {"device": "cpu", "dtype": "float32"}
TASKS = "hellaswag,perplexity_law_en"
TEXT = "Once upon a time, there was a little girl named Lily."


def request(kind: str, *arguments, task: str = "task", index: int = 0) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=index, metadata=(task, index, 1))


REQUESTS = {
    "loglikelihood": request("loglikelihood", TEXT, " She was happy."),
    "empty context": request("loglikelihood", "", TEXT),
    "loglikelihood_rolling": request("loglikelihood_rolling", TEXT),
    "generate_until": request("generate_until", TEXT, {"until": ["."], "max_gen_toks": 4}),
}


def scores(results: dict) -> dict[str, float]:
    return {
        f"{task} {key}": value
        for task, metrics in results["results"].items()
        for key, value in metrics.items()
        if "," in key and "stderr" not in key and "token_perplexity" not in key
    }


def seen_by(lm: HFLM, monkeypatch) -> list[list[list[int]]]:
    """Rows of token ids that reach the model, batch by batch, as a list that grows."""
    seen: list[list[list[int]]] = []
    embed = lm.model.get_input_embeddings()
    monkeypatch.setattr(embed, "forward", lambda ids, f=embed.forward: (seen.append(ids.tolist()), f(ids))[1])
    return seen


# The same numbers every way


def test_three_ways_give_the_same_numbers(identity, tmp_path):
    job = make_job(identity, TASKS)
    ours = scores(evaluate(job, build_model(job.config)))
    assert len(ours) == 5

    # (1) plain lm_eval on the folder, which knows nothing of this package but the code inside it
    plain = subprocess.run(
        [sys.executable, "-c", PLAIN, identity, str(tmp_path), *map(str, ROOTS)], capture_output=True, text=True
    )
    assert plain.returncode == 0, plain.stderr[-2000:]
    remote = json.loads(plain.stdout.splitlines()[-1])
    assert remote.pop("code") == "transformers_modules"
    assert remote == pytest.approx({key: ours[key] for key in remote}, abs=0)
    assert remote.keys() == {"hellaswag acc,none", "hellaswag acc_norm,none"}

    # (2) the harness's `hf` where the package is imported, without trust_remote_code
    registered = make_job(identity, "hellaswag", "--model", "hf")
    found = scores(evaluate(registered, build_model(registered.config)))
    assert found == {key: ours[key] for key in found}

    # (3) an in-memory model
    model = AutoModelForCausalLM.from_pretrained(identity, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(identity)
    assert scores(evaluate(job, GatedLlamaLM(model, tokenizer=tokenizer, batch_size=1))) == ours


# A stand-in for the command `lm_eval run` that reads one task file instead of all; the package is not imported.
PLAIN = """
import json, os, sys, tempfile
folder, work, *roots = sys.argv[1:]
os.chdir(roots[0])
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
import lm_eval.tasks, pathlib
lm = HFLM(folder, trust_remote_code=True, device="cpu", dtype="float32", batch_size=1)
stock = pathlib.Path(lm_eval.tasks.__file__).parent / "hellaswag"
manager = TaskManager(include_defaults=False, include_path=str(stock))
results = simple_evaluate(lm, tasks=["hellaswag"], task_manager=manager, limit=4)
assert "gated_llama" not in sys.modules
found = {f"hellaswag {k}": v for k, v in results["results"]["hellaswag"].items() if "," in k and "stderr" not in k}
print(json.dumps(found | {"code": type(lm.model).__module__.split(".")[0]}))
"""


def test_batch_sizes_agree_in_float32(random_gates):
    found = {}
    for size in ("1", "3", "auto"):
        job = make_job(random_gates, TASKS, "--batch_size", size, "--max_batch_size", "8")
        found[size] = scores(evaluate(job, build_model(job.config)))
    # Kernels may add in another order for another number of rows: 1e-5 of float32's 6e-8 a step.
    assert found["3"] == pytest.approx(found["1"], rel=1e-5)
    assert found["auto"] == pytest.approx(found["1"], rel=1e-5)


def test_single_task_batches_are_those_of_hf(random_gates):
    job = make_job(random_gates, "hellaswag", "--batch_size", "3")
    ours = evaluate(job, build_model(job.config))
    theirs = evaluate(job, HFLM(random_gates, batch_size=3, **CPU))
    assert [s["resps"] for s in ours["samples"]["hellaswag"]] == [s["resps"] for s in theirs["samples"]["hellaswag"]]


def test_auto_batch_size_is_detected_once_for_shorter_tasks(random_gates, monkeypatch):
    calls = []
    detect = HFLM._detect_batch_size
    monkeypatch.setattr(HFLM, "_detect_batch_size", lambda self, *a: calls.append(1) or detect(self, *a))
    lm = GatedLlamaLM(random_gates, batch_size="auto", max_batch_size=4, **CPU)
    long = request("loglikelihood", TEXT * 3, " Yes.", task="long")
    short = request("loglikelihood", TEXT, " Yes.", task="short")
    lm.loglikelihood([long, short], disable_tqdm=True)
    assert len(calls) == 1
    calls.clear()
    lm = GatedLlamaLM(random_gates, batch_size="auto", max_batch_size=4, **CPU)
    lm.loglikelihood([short, long], disable_tqdm=True)  # what holds for a shorter one may not for a longer one
    assert len(calls) == 2


def test_adapters_are_applied(random_gates, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(random_gates, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "g_proj"], init_lora_weights=False, r=2))
    adapted.save_pretrained(tmp_path / "adapter")
    asked = [REQUESTS["loglikelihood"], REQUESTS["loglikelihood_rolling"]]
    lms = {
        "without": GatedLlamaLM(random_gates, **CPU),
        "with": GatedLlamaLM(random_gates, peft=str(tmp_path / "adapter"), probes="gates", **CPU),
        "in memory": GatedLlamaLM(adapted, tokenizer=AutoTokenizer.from_pretrained(random_gates)),
    }
    found = {
        name: [getattr(lm, request.request_type)([request], disable_tqdm=True)[0] for request in asked]
        for name, lm in lms.items()
    }
    assert found["with"] == found["in memory"]
    assert found["with"] != found["without"]
    assert lms["with"].get_model_info()["probes"]["task"]["gate_scores"]["mean"] > 0


# A loaded model

LOADING = (
    *("peft", "delta", "dtype", "revision", "subfolder", "device", "parallelize", "tp_plan", "gguf_file", "autogptq"),
    *("gptqmodel", "max_memory_per_gpu", "max_cpu_memory", "offload_folder", "trust_remote_code"),
    *("use_fast_tokenizer", "load_in_4bit", "attn_implementation", "quantization_config", "nonsense"),
)


@pytest.fixture
def loaded(random_gates):
    model = AutoModelForCausalLM.from_pretrained(random_gates, attention_dropout=0.5)
    return model, AutoTokenizer.from_pretrained(random_gates)


@pytest.mark.parametrize("name", LOADING)
def test_options_that_a_loaded_model_makes_meaningless_are_refused_by_name(name, loaded):
    model, tokenizer = loaded
    with pytest.raises(ValueError, match=rf"^{name} beside a loaded model would change nothing: load the GatedLlama"):
        GatedLlamaLM(model, tokenizer=tokenizer, **{name: "auto"})


def test_every_other_option_is_taken_beside_a_loaded_model(loaded, random_gates):
    model, _ = loaded
    known = set(inspect.signature(HFLM.__init__).parameters) - {"self", "pretrained", "kwargs"}
    assert known - set(LOADING) == set(BESIDE_A_MODEL)
    unset = {"peft": None, "parallelize": False}
    named = GatedLlamaLM(model, tokenizer=random_gates, use_fast_tokenizer=True, max_length=99, **unset)
    assert named.max_length == 99
    assert GatedLlamaLM(model).tokenizer.name_or_path == random_gates  # the model's own
    model.name_or_path = ""
    with pytest.raises(ValueError, match="loaded from no folder: give tokenizer="):
        GatedLlamaLM(model)


def test_a_loaded_model_goes_on_in_its_mode_and_is_measured_without_dropout(loaded):
    model, tokenizer = loaded
    tokenizer.pad_token = None
    asked = [REQUESTS["loglikelihood"], REQUESTS["loglikelihood_rolling"], REQUESTS["generate_until"]]
    expected = [
        getattr(GatedLlamaLM(model, tokenizer=tokenizer), each.request_type)([each], disable_tqdm=True)
        for each in asked
    ]
    model.train().model.layers[1].eval()  # a layer that is kept from dropout stays so
    before = [module.training for module in model.modules()]
    lm = GatedLlamaLM(model, tokenizer=tokenizer, probes="gates,sink")
    assert [module.training for module in model.modules()] == before
    for each, answer in zip(asked, expected, strict=True):
        assert getattr(lm, each.request_type)([each], disable_tqdm=True) == answer
        assert [module.training for module in model.modules()] == before
    with pytest.raises(ValueError, match="do not fit"):
        lm.loglikelihood([request("loglikelihood", TEXT * 50, " Yes.")], disable_tqdm=True)
    assert [module.training for module in model.modules()] == before
    assert tokenizer.pad_token is None
    assert lm.tokenizer.pad_token is not None


def test_a_path_is_a_folder(identity):
    assert GatedLlamaLM(Path(identity), **CPU).pretrained == identity


# Beginnings


@pytest.mark.parametrize("bos", ["auto", "none", "always", "</s>"])
def test_first_ids_of_every_request_type(bos, identity, capsys):
    base_ids, gated_ids = (
        {name: lm.request_ids(asked) for name, asked in REQUESTS.items()}
        for lm in (GatedLlamaLM(folder, bos=bos, **CPU) for folder in (str(STORIES), identity))
    )
    with capsys.disabled():
        sys.stdout.write(f"\nbos={bos}: {'; '.join(f'{name} {ids[:4]}' for name, ids in gated_ids.items())}\n")
    assert base_ids == gated_ids
    begin = {"auto": 1, "none": None, "always": 1, "</s>": 2}[bos]  # this tokenizer adds <s> (1) by itself
    for name, ids in gated_ids.items():
        wanted = 1 if begin is None and name == "empty context" else begin
        assert (ids[0] == wanted) if wanted else (ids[0] > 2), name
        assert ids[1] > 2, f"{name} begins twice: {ids[:3]}"


@pytest.mark.parametrize("add_bos_token", [None, True, False])
@pytest.mark.parametrize("text", [TEXT, f"<s>{TEXT}"], ids=["plain", "with the token in the text"])
def test_the_harness_own_flag_never_begins_twice(add_bos_token, text, identity):
    lm = GatedLlamaLM(identity, add_bos_token=add_bos_token, **CPU)
    for asked in (
        request("loglikelihood", text, " Yes."),
        request("loglikelihood", "", text),
        request("loglikelihood_rolling", text),
        request("generate_until", text, {}),
    ):
        assert lm.request_ids(asked).count(1) <= 1


@pytest.mark.parametrize("bos", ["auto", "none", "always"])
def test_request_ids_are_what_the_model_reads(bos, identity, monkeypatch):
    lm = GatedLlamaLM(identity, bos=bos, batch_size=1, **CPU)
    seen = seen_by(lm, monkeypatch)
    lm.loglikelihood([REQUESTS["loglikelihood"]], disable_tqdm=True)
    lm.loglikelihood([REQUESTS["empty context"]], disable_tqdm=True)
    lm.loglikelihood_rolling([REQUESTS["loglikelihood_rolling"]], disable_tqdm=True)
    lm.generate_until([REQUESTS["generate_until"]], disable_tqdm=True)
    *scored, prompt = [lm.request_ids(asked) for asked in REQUESTS.values()]
    assert [row[0] for row in seen[:3]] == [ids[:-1] for ids in scored]  # the last token is predicted, not read
    assert seen[3][0] == prompt


def test_harness_begins_documents_twice_and_we_do_not(identity):
    document = [REQUESTS["loglikelihood_rolling"]]
    ours = GatedLlamaLM(identity, **CPU).loglikelihood_rolling(document, disable_tqdm=True)
    doubled = HFLM(identity, **CPU).loglikelihood_rolling(document, disable_tqdm=True)
    single = HFLM(identity, add_bos_token=False, **CPU).loglikelihood_rolling(document, disable_tqdm=True)
    assert ours == single
    assert doubled != single  # once this fails, the harness has been mended and `split_bos` in rolling_ids can go


def test_chat_template_with_bos_begins_once(identity):
    lm = GatedLlamaLM(identity, **CPU)
    lm.tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    text = lm.apply_chat_template([{"role": "user", "content": TEXT}])
    assert text.startswith("<s>")
    asked = request("generate_until", text, {"max_gen_toks": 2})
    assert lm.request_ids(asked)[:2] == [1, lm.tok_encode(TEXT)[1]]
    ids, _ = lm.tok_batch_encode([text, TEXT])  # one prompt with the token in its text, one without
    assert (ids == 1).sum(dim=1).tolist() == [1, 1]


@pytest.mark.parametrize(("bos", "first"), [("auto", [1]), ("none", [1]), ("always", [1]), ("</s>", [2, 1])])
def test_markup_that_is_also_the_bos_token_stays(bos, first, identity):
    """ChatML: every turn begins with the token that is the tokenizer's beginning of sequences."""
    lm = GatedLlamaLM(identity, bos=bos, **CPU)
    turn = lm.tokenizer.encode("user", add_special_tokens=False)
    ids = lm.tok_encode("<s>user<s>assistant")
    assert ids[: len(first) + len(turn)] == first + turn
    assert ids.count(1) == 2
    assert lm.rolling_ids("<s>user<s>assistant")[1].count(1) == (1 if bos == "none" else 2)


def test_chat_template_through_the_harness(identity, monkeypatch):
    job = make_job(identity, "gsm8k", "--apply_chat_template", "--gen_kwargs", "max_gen_toks=2", "--num_fewshot", "1")
    lm = build_model(job.config)
    lm.tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    )
    seen = seen_by(lm, monkeypatch)
    evaluate(job, lm)
    prompts = [rows[0] for rows in seen if len(rows[0]) > 1]
    assert len(prompts) == 3
    assert all(ids[0] == 1 and ids.count(1) == 1 for ids in prompts)
    assert "assistant:" in lm.tokenizer.decode(prompts[0])  # the example is a turn of its own


@pytest.mark.parametrize(("size", "padding"), [(2, 5), (4, 5), (8, 20), (1, 3)])
def test_windows_that_only_keep_processes_in_step_count_for_nothing(size, padding, identity, monkeypatch):
    """Padding may fill several batches behind the last real window."""
    lm = GatedLlamaLM(identity, batch_size=size, max_length=16, **CPU)
    asked = [request("loglikelihood_rolling", TEXT * 3, index=0), request("loglikelihood_rolling", TEXT, index=1)]
    expected = lm.loglikelihood_rolling(asked, disable_tqdm=True)
    monkeypatch.setattr(lm, "_padding", lambda windows: padding)
    assert lm.loglikelihood_rolling(asked, disable_tqdm=True) == pytest.approx(expected, rel=1e-5)


def test_gates_that_loading_would_lose_are_refused(random_gates, tmp_path):
    folder = shutil.copytree(random_gates, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kept = {name: config[name] for name in (*names, "num_key_value_heads", "tie_word_embeddings")}
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(kept | llama))
    with pytest.raises(ValueError, match=r"holds 5 gate tensors that its architecture has no place for"):
        GatedLlamaLM(str(folder), **CPU)
    (folder / "config.json").write_text(json.dumps(kept | llama | {"hidden_size": 2 * kept["hidden_size"]}))
    with pytest.raises(ValueError, match=r"tensors do not have the shapes that its config.json calls for"):
        GatedLlamaLM(str(folder), **CPU)


def test_the_tokenizer_of_a_gguf_file_is_not_guessed(tmp_path):
    path = write(tmp_path / "tiny.gguf", byte_level_keys("smollm"))
    lm = GatedLlamaLM(path, **CPU)
    ids = lm.tok_encode("12 a")
    assert [lm.tokenizer.convert_ids_to_tokens(index) for index in ids][:2] == ["1", "2"]
    with pytest.raises(ValueError, match="--tokenizer FOLDER"):
        GatedLlamaLM(write(tmp_path / "unknown.gguf", byte_level_keys("unknown")), **CPU)


def test_a_model_that_computes_no_numbers_has_no_scores(identity):
    """Of log-likelihoods that are nan, the largest is any one."""
    lm = GatedLlamaLM(identity, **CPU)
    lm.model.get_parameter("model.norm.weight").data[0] = float("nan")
    with pytest.raises(ValueError, match="gives nan as logits"):
        lm.loglikelihood([request("loglikelihood", "Once", " upon")])
    with pytest.raises(ValueError, match="gives nan as logits"):
        lm.loglikelihood_rolling([request("loglikelihood_rolling", "Once upon a time")])


def test_none_scores_from_the_second_token(identity):
    lm = GatedLlamaLM(identity, bos="none", **CPU)
    prefix, tokens = lm.rolling_ids(TEXT)
    assert [prefix, *tokens] == lm.tokenizer.encode(TEXT, add_special_tokens=False)
    assert lm.rolling_ids("") == (None, [])
    assert lm.loglikelihood_rolling([request("loglikelihood_rolling", "")], disable_tqdm=True) == [0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bos": "no such token"}, "neither a policy"),
        ({"bos": "none", "add_bos_token": True}, "contradict"),
        ({"probes": "gate"}, "choose from gates, sink"),
        ({"on_truncation": "warn"}, "error, count"),
    ],
)
def test_bad_options_are_refused(options, message, identity):
    with pytest.raises(ValueError, match=message):
        GatedLlamaLM(identity, **CPU, **options)


# What does not fit


@pytest.mark.parametrize(
    "asked",
    [
        request("loglikelihood", TEXT * 10, " The end."),
        request("generate_until", TEXT * 10, {"max_gen_toks": 4}),
    ],
    ids=["loglikelihood", "generate_until"],
)
def test_prompt_that_would_be_cut_is_an_error_or_counted(asked, identity):
    lm = GatedLlamaLM(identity, max_length=64, **CPU)
    with pytest.raises(ValueError, match=r"1 of 1 prompts of task do not fit.*on_truncation=count"):
        getattr(lm, asked.request_type)([asked], disable_tqdm=True)
    counting = GatedLlamaLM(identity, max_length=64, on_truncation="count", **CPU)
    getattr(counting, asked.request_type)([asked], disable_tqdm=True)
    assert counting.count_truncated({"task": SimpleNamespace(instances=[asked])}) == {"task": 1}


def test_prompts_that_were_cut_are_counted_though_answers_come_from_a_cache(identity, tmp_path):
    options = ["--num_fewshot", "2", "--limit", "1", "--gen_kwargs", "max_gen_toks=8"]
    job = make_job(identity, "gsm8k", *options, "--use_cache", str(tmp_path / "answers"))
    job.config.model_args |= {"on_truncation": "count", "max_length": 128}
    for _ in range(2):
        assert evaluate(job, build_model(job.config))["config"]["truncated_prompts"] == {"gsm8k": 1}


def test_a_prompt_that_just_fits_is_not_refused(identity):
    asked = request("loglikelihood", TEXT, " The end.")
    length = len(GatedLlamaLM(identity, **CPU).request_ids(asked))
    GatedLlamaLM(identity, max_length=length - 1, **CPU).loglikelihood([asked], disable_tqdm=True)
    with pytest.raises(ValueError, match="do not fit"):
        GatedLlamaLM(identity, max_length=length - 2, **CPU).loglikelihood([asked], disable_tqdm=True)


def test_an_answer_longer_than_the_context_is_refused_even_where_prompts_are_cut(identity):
    whole = GatedLlamaLM(identity, **CPU).request_ids(REQUESTS["empty context"])
    lms = [GatedLlamaLM(identity, max_length=len(whole) - n, on_truncation="count", **CPU) for n in (1, 2)]
    lms[0].loglikelihood([REQUESTS["empty context"]], disable_tqdm=True)
    with pytest.raises(ValueError, match=rf"An answer of task has {len(whole) - 1} tokens and the context"):
        lms[1].loglikelihood([REQUESTS["empty context"]], disable_tqdm=True)


@pytest.mark.parametrize("kind", ["loglikelihood", "generate_until"])
def test_requests_at_the_edge_of_the_context_are_counted_as_they_are_cut(kind, identity, monkeypatch):
    """What the model reads is the whole request where there is room for it, and shorter where there is not."""
    asked = request("generate_until", TEXT, {"max_gen_toks": 1}) if kind == "generate_until" else REQUESTS[kind]
    whole = GatedLlamaLM(identity, **CPU).request_ids(asked)
    read = whole if kind == "generate_until" else whole[:-1]
    fits = len(read) + (1 if kind == "generate_until" else 0)
    for length, cut in ((fits, 0), (fits - 1, 1)):
        lm = GatedLlamaLM(identity, max_length=length, on_truncation="count", **CPU)
        seen = seen_by(lm, monkeypatch)
        getattr(lm, asked.request_type)([asked], disable_tqdm=True)
        assert (seen[0][0] == read) is not bool(cut)
        assert lm.count_truncated({"task": SimpleNamespace(instances=[asked])}) == ({"task": 1} if cut else {})


@pytest.mark.parametrize("bos", ["auto", "none", "always", "</s>"])
@pytest.mark.parametrize("added", [[1], [1, 1]])
def test_a_tokenizer_that_begins_twice_begins_once(bos, added, identity):
    lm = GatedLlamaLM(identity, bos=bos, **CPU)
    body = lm.tokenizer.encode(TEXT, add_special_tokens=False)
    assert lm.begin(added + body) == {"auto": [1], "none": [], "always": [1], "</s>": [2]}[bos] + body


def test_no_room_for_a_prompt(identity):
    asked = request("generate_until", TEXT, {"max_gen_toks": 600}, task="essay")
    with pytest.raises(ValueError, match=r"essay generates up to 600 tokens.*--gen_kwargs max_gen_toks"):
        GatedLlamaLM(identity, **CPU).generate_until([asked], disable_tqdm=True)


def test_model_without_head_or_generation(identity, tmp_path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(identity)
    with pytest.raises(ValueError, match=r"GatedLlamaModel has no language-model head.*AutoModelForCausalLM"):
        GatedLlamaLM(AutoModel.from_pretrained(identity), tokenizer=tokenizer)
    AutoModel.from_pretrained(STORIES).save_pretrained(tmp_path / "headless")
    tokenizer.save_pretrained(tmp_path / "headless")
    config = json.loads((tmp_path / "headless" / "config.json").read_text())
    (tmp_path / "headless" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ValueError, match=r"headless has no weights for 1 tensors of LlamaForCausalLM.*lm_head.weight"):
        GatedLlamaLM(str(tmp_path / "headless"), **CPU)
    lm = GatedLlamaLM(identity, **CPU)
    monkeypatch.setattr(type(lm.model), "can_generate", classmethod(lambda cls: False))
    with pytest.raises(ValueError, match="cannot generate, which task needs"):
        lm.generate_until([REQUESTS["generate_until"]])


# Probes


def hooks_of(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_probes_change_no_score_and_leave_nothing(random_gates):
    job = make_job(random_gates, "hellaswag,perplexity_law_en,gsm8k", "--batch_size", "3", "--limit", "3")
    job.config.gen_kwargs = {"max_gen_toks": 8}
    job.config.num_fewshot = 0
    plain = build_model(job.config)
    probed = build_model(job.config, job.config.model_args | {"probes": ["gates", "sink"]})
    assert plain.probes is None
    before = hooks_of(probed.model)
    results = [evaluate(job, lm) for lm in (plain, probed)]
    for task in results[0]["samples"]:
        assert [s["resps"] for s in results[0]["samples"][task]] == [s["resps"] for s in results[1]["samples"][task]]
    assert hooks_of(probed.model) == before
    reports = results[1]["config"]["probes"]
    assert set(reports) == {"hellaswag", "perplexity_law_en", "gsm8k"}
    assert "probes" not in results[0]["config"]
    for task, report in reports.items():
        assert 0 < report["gate_scores"]["mean"] < 1
        assert 0 < report["first_token_attention"]["mean"] < 1
        assert report["max_activation"]["m_act"] > 0
        if task != "gsm8k":  # generation is not timed
            assert report["logits_unchanged"]
            assert report["overhead"] is not None


def test_probes_measure_exactly_the_scored_tokens(random_gates):
    """Batches padded on the right measure what the rows do one by one; a task's tokens are its own."""
    texts = [TEXT, TEXT * 2, "Lily had a red ball.", "The dog ran."]
    asked = [request("loglikelihood", t, " The end.", task="ab"[i % 2], index=i) for i, t in enumerate(texts)]
    lm = GatedLlamaLM(random_gates, batch_size=4, probes="gates,sink", **CPU)
    lm.loglikelihood(asked, disable_tqdm=True)
    for task, of_task in (("a", asked[::2]), ("b", asked[1::2])):
        rows = [torch.tensor([lm.request_ids(r)[:-1]]) for r in of_task]
        with torch.no_grad(), FirstTokenAttention(lm.model) as attention, GateScores(lm.model) as gates:
            for row in rows:
                lm.model(row)
        report = lm.get_model_info()["probes"][task]
        assert report["tokens"] == sum(row.numel() for row in rows)
        assert report["requests"] == 2
        # Sums over the same float32 scores in another order.
        assert report["first_token_attention"]["mean"] == pytest.approx(attention.result().mean, rel=1e-5)
        assert report["gate_scores"]["mean"] == pytest.approx(gates.result().mean, rel=1e-5)


def test_only_the_first_batches_are_run_twice(random_gates, monkeypatch):
    lm = GatedLlamaLM(random_gates, batch_size=1, probes="sink", **CPU)
    seen = seen_by(lm, monkeypatch)
    asked = [request("loglikelihood", TEXT[: 5 * n], " Yes.", index=n) for n in range(1, 6)]
    lm.loglikelihood(asked, disable_tqdm=True)
    assert len(seen) == len(asked) + TIMED_BATCHES


def test_a_row_that_ends_in_zeros_keeps_them(random_gates):
    """Token 0 is also what the harness pads with."""
    lm = GatedLlamaLM(random_gates, batch_size=2, probes="sink", **CPU)
    with lm.probes.on("task", 2):
        lm.probes.expect([[5, 6, 0], [7, 0, 0, 8]])
        real = lm.probes.real_tokens(torch.tensor([[5, 6, 0, 0], [7, 0, 0, 8]]))
    assert real.tolist() == [[True, True, True, False], [True] * 4]


def test_gate_probe_needs_gates():
    with pytest.raises(ValueError, match="No attention gate is known"):
        GatedLlamaLM(str(STORIES), probes="gates", **CPU)


def test_probes_detach_after_an_interrupt(random_gates, monkeypatch):
    lm = GatedLlamaLM(random_gates, probes="gates,sink", **CPU)
    before = hooks_of(lm.model)
    monkeypatch.setattr(HFLM, "_model_call", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        lm.loglikelihood([REQUESTS["loglikelihood"]], disable_tqdm=True)
    assert hooks_of(lm.model) == before


# Cache


@pytest.mark.parametrize("task", ["hellaswag", "perplexity_literature_en", "gsm8k"])
def test_interrupt_and_resume(task, random_gates, tmp_path, monkeypatch):
    arguments = ["--limit", "3", "--use_cache", str(tmp_path / "answers"), "--gen_kwargs", "max_gen_toks=8"]
    plain = make_job(random_gates, task, *arguments[:2], *arguments[4:])
    plain.config.num_fewshot = 0
    whole = evaluate(plain, build_model(plain.config))

    job = make_job(random_gates, task, *arguments)
    job.config.num_fewshot = 0
    stage = "_model_generate" if task == "gsm8k" else "_model_call"
    run, calls = getattr(HFLM, stage), []

    def stop_at_third(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run(self, *args, **kwargs)

    monkeypatch.setattr(HFLM, stage, stop_at_third)
    first = build_model(job.config)
    with pytest.raises(KeyboardInterrupt):
        evaluate(job, first)
    monkeypatch.setattr(HFLM, stage, lambda self, *a, **k: calls.append(1) or run(self, *a, **k))
    resumed = evaluate(job, build_model(job.config))
    total = {"hellaswag": 12, "perplexity_literature_en": 6, "gsm8k": 3}[task]
    assert len(calls) <= total + 2, "answers from before the interrupt were computed again"
    assert [s["resps"] for s in resumed["samples"][task]] == [s["resps"] for s in whole["samples"][task]]


def test_cache_names_tell_models_and_options_apart(identity, random_gates):
    variants = [
        GatedLlamaLM(identity, **CPU),
        GatedLlamaLM(random_gates, **CPU),
        GatedLlamaLM(identity, bos="none", **CPU),
        GatedLlamaLM(identity, device="cpu", dtype="bfloat16"),
        GatedLlamaLM(identity, batch_size=2, **CPU),
        GatedLlamaLM(identity, max_length=100, **CPU),
        GatedLlamaLM(identity, on_truncation="count", **CPU),
        GatedLlamaLM(identity, attn_implementation="eager", **CPU),
        GatedLlamaLM(identity, softmax_dtype="float64", **CPU),
        GatedLlamaLM(identity, think_end_token="</s>", **CPU),
        GatedLlamaLM(identity, **CPU),
    ]
    variants[-1].model.generation_config.repetition_penalty = 2.0
    names = [cache_name("answers", lm) for lm in variants]
    assert len(set(names)) == len(names)
    assert names[0] == cache_name("answers", GatedLlamaLM(identity, **CPU))
    with torch.no_grad():
        next(variants[0].model.parameters()).view(-1)[7] += 1
    assert cache_name("answers", variants[0]) != names[0]


def test_extended_context_is_read_from_the_configuration(base):
    config = json.loads((base / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    (base / "config.json").write_text(json.dumps(config))  # max_position_embeddings stays 512, as in Qwen's cards
    assert GatedLlamaLM(str(base), **CPU).max_length == 2048
    assert GatedLlamaLM(str(base), max_length=300, **CPU).max_length == 300


def test_the_amplitude_of_yarn_is_that_of_the_conversion(base, tmp_path):
    """A source with `attn_factor`, which the library ignores: both sides of a comparison are read alike."""
    config = json.loads((base / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attn_factor": 0.5}
    config["rope_parameters"]["original_max_position_embeddings"] = 128
    (base / "config.json").write_text(json.dumps(config))
    convert_checkpoint(base, tmp_path / "gated")
    found = [GatedLlamaLM(str(folder), device="cpu").model for folder in (base, tmp_path / "gated")]
    expected = 0.5 * (0.1 * math.log(4) + 1)
    assert [model.model.rotary_emb.attention_scaling for model in found] == pytest.approx([expected, expected])
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(*(model(ids).logits for model in found))
