"""Base against gated: the same requests, the same token ids, paired differences, and how large noise alone is."""

import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..convert.verify import PROOF_TEXT
from .harness import GatedLlamaLM
from .pairing import Row, rows
from .probes import has_gates
from .run import MODEL_CLASS, Job, build_model, evaluate


# Arguments that say which weights MODEL has; those of the base are named by --against alone.
WEIGHTS = ("pretrained", "revision", "subfolder", "gguf_file", "peft", "delta")

NOISE_FLOORS = ("auto", "off", "float64", "float32", "bfloat16", "float16")

SHOWN_IDS = 8


@dataclass
class Comparison:
    """
    Two models on the same token ids, under one policy for the beginning of requests.

    identical: every answer (log-likelihood, greedy flag, text) is equal to the last digit. noise: how the base's
    second run differed from its first. left_out: (task, metric) whose aggregation has no paired difference here.
    results: the harness's own, of `base`, `model` and `noise`.
    """

    base: str
    model: str
    bos: str
    bos_token: str | None
    batch_size: int
    dtype: str
    context_length: int
    requests: int
    identical: bool
    noise: str | None
    rows: list[Row]
    left_out: list[tuple[str, str]] = field(default_factory=list)
    results: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Settings:
    """What must be equal for two models to be compared."""

    dtype: str
    context_length: int
    chat_template: str | None


@dataclass(frozen=True)
class BaseRun:
    """What the base's run leaves for the model's: settings, the token ids that were asked, and the results."""

    settings: Settings
    bos_token: str | None
    batch_size: int
    asked: dict[str, list[tuple[bytes, list[int]]]]
    results: dict[str, Any]


def compare(
    job: Job,
    base: str,
    *,
    bos: str = "auto",
    probes: Sequence[str] = (),
    noise_floor: str = "auto",
    progress: Callable[[str], None] = lambda message: None,
) -> Comparison:
    """
    Evaluates a base and the job's model, one after the other, and pairs them document by document.

    Args:
        job: its model arguments describe the model; the base is run with the same ones, but for those that name
            weights.
        base: Hub id, folder or .gguf file.
        bos: policy for the beginning of requests, as in `GatedLlamaLM`.
        probes: collectors that run along; `"gates"` for the one of the two, or both, that has gates.
        noise_floor: dtype of a second run of the base, at another batch size as well: `"auto"` is bfloat16 for a model
            in float32, else float32. `"off"` for no such run.
        progress: told what begins.

    Raises:
        ValueError: the two do not read the same token ids, or differ in dtype, length of context or chat template.
    """
    if noise_floor not in NOISE_FLOORS:
        raise ValueError(f"noise_floor={noise_floor!r} is not one of {', '.join(NOISE_FLOORS)}.")
    name = str(job.config.model_args.get("pretrained"))
    of_model = job.config.model_args | {"bos": bos}
    of_base = {key: value for key, value in of_model.items() if key not in WEIGHTS} | {"pretrained": base}

    expected = _reading(job, of_model, probes)  # what does not fit together is told before hours of work
    progress(f"base {base}")
    run = _run_base(job, of_base, probes, expected, (base, name))
    progress(f"model {name}")
    results = {"base": run.results, "model": _run_model(job, of_model, probes, run, (base, name))}
    noise = None
    if noise_floor != "off":
        other = _other_way(run, noise_floor)
        noise = f"batch size {other['batch_size']} and {other['dtype']}, instead of "
        noise += f"{run.batch_size} and {run.settings.dtype}"
        progress(f"base against itself: {noise}")
        results["noise"] = evaluate(job, _build(job, of_base | other))

    found, left_out = rows(job, results["base"], results["model"], results.get("noise"))
    return Comparison(
        base=base,
        model=name,
        bos=bos,
        bos_token=run.bos_token,
        batch_size=run.batch_size,
        dtype=run.settings.dtype,
        context_length=run.settings.context_length,
        requests=sum(len(of_task) for of_task in run.asked.values()),
        identical=_answers(results["base"]) == _answers(results["model"]),
        noise=noise,
        rows=found,
        left_out=left_out,
        results=results,
    )


def _reading(job: Job, model_args: dict[str, Any], probes: Sequence[str]) -> tuple[Settings, list[int]]:
    """A model's settings, and its token ids of a text in which tokenizers differ."""
    lm = _build(job, model_args, probes)
    return _settings(lm), lm.tok_encode(PROOF_TEXT)


def _run_base(
    job: Job,
    model_args: dict[str, Any],
    probes: Sequence[str],
    expected: tuple[Settings, list[int]],
    names: tuple[str, str],
) -> BaseRun:
    gc.collect()  # the model is gone: one at a time
    lm = _build(job, model_args, probes)
    _require_same_settings(_settings(lm), expected[0], *names)
    _require_same_tokens(lm.tok_encode(PROOF_TEXT), expected[1], *names)
    size = lm.batch_size_per_gpu = lm._detect_batch_size() if lm.batch_size == "auto" else lm.batch_size
    results = evaluate(job, lm)
    bos_token = None if lm.bos == "none" else lm.tokenizer.decode([lm.prefix_token_id])
    return BaseRun(_settings(lm), bos_token, size, digests(job, lm), results)


def _run_model(
    job: Job, model_args: dict[str, Any], probes: Sequence[str], base: BaseRun, names: tuple[str, str]
) -> dict[str, Any]:
    """The model's results on what the base was asked; names: of base and model."""
    gc.collect()  # the base is gone: one model at a time
    lm = _build(job, model_args | {"batch_size": base.batch_size}, probes)
    require_same_ids(base.asked, job, lm, *names)
    results = evaluate(job, lm)
    require_same_ids(base.asked, job, lm, *names)  # requests were built anew, with its own chat template
    return results


def _other_way(base: BaseRun, noise_floor: str) -> dict[str, Any]:
    opposite = "bfloat16" if base.settings.dtype == "float32" else "float32"
    return {
        "batch_size": 4 if base.batch_size == 1 else 1,
        "dtype": opposite if noise_floor == "auto" else noise_floor,
    }


def _build(job: Job, model_args: dict[str, Any], probes: Sequence[str] = ()) -> GatedLlamaLM:
    if job.config.model != MODEL_CLASS:
        raise ValueError(
            f"A comparison needs the model class {MODEL_CLASS}, not {job.config.model}: leave --model out."
        )
    lm = build_model(job.config, model_args)
    if lm.world_size > 1:
        raise ValueError("A comparison runs in one process: leave accelerate out.")
    lm.attach_probes([name for name in probes if name != "gates" or has_gates(lm.model)])
    return lm


def _settings(lm: GatedLlamaLM) -> Settings:
    return Settings(str(lm.model.dtype).removeprefix("torch."), lm.max_length, lm.tokenizer.chat_template)


def _require_same_settings(base: Settings, model: Settings, base_name: str, model_name: str) -> None:
    if base.dtype != model.dtype:
        raise ValueError(
            f"{base_name} is {base.dtype} and {model_name} is {model.dtype}: pass --model_args dtype=float32, or "
            "another dtype, for both."
        )
    if base.context_length != model.context_length:
        shorter = min(base.context_length, model.context_length)
        raise ValueError(
            f"{base_name} has a context of {base.context_length} tokens and {model_name} one of "
            f"{model.context_length}, so long documents would be cut differently: pass --model_args "
            f"max_length={shorter}."
        )
    if base.chat_template != model.chat_template:
        raise ValueError(
            f"The chat templates of {base_name} and {model_name} differ: pass --model_args tokenizer={base_name} for "
            "both."
        )


def _require_same_tokens(base: list[int], model: list[int], base_name: str, model_name: str) -> None:
    if base != model:
        first = next((i for i, (b, m) in enumerate(zip(base, model, strict=False)) if b != m), 0)
        raise ValueError(
            f"{model_name} reads other token ids than {base_name}: {model[first : first + SHOWN_IDS]}... instead of "
            f"{base[first : first + SHOWN_IDS]}... from token {first} of a sample text on. Their tokenizers differ: "
            f"pass --model_args tokenizer={base_name} if the model was made for its vocabulary."
        )


def digests(job: Job, lm: GatedLlamaLM) -> dict[str, list[tuple[bytes, list[int]]]]:
    """Of each request of each task: a digest of its token ids, and the first of them."""
    return {name: [_digest(ids) for ids in _ids(task, lm)] for name, task in job.tasks.items()}


def _ids(task: Any, lm: GatedLlamaLM) -> Iterator[list[int]]:
    return (lm.request_ids(request) for request in task.instances)


def _digest(ids: list[int]) -> tuple[bytes, list[int]]:
    return hashlib.blake2b(repr(ids).encode(), digest_size=16).digest(), ids[:SHOWN_IDS]


def require_same_ids(asked: dict, job: Job, lm: GatedLlamaLM, base: str, model: str) -> None:
    """ValueError unless `model` reads each request as the token ids that `base` was asked (digests by task)."""
    for name, task in job.tasks.items():
        for request, before, ids in zip(task.instances, asked[name], _ids(task, lm), strict=True):
            if (after := _digest(ids)) != before:
                shown = f"{after[1]}... instead of {before[1]}..."
                if after[1] == before[1]:
                    shown = f"equal ones to begin with, {before[1]}..., and others later"
                raise ValueError(
                    f"{model} reads other token ids than {base} in {name}: {shown} for {request.args[0][:40]!r}. "
                    f"Their tokenizers differ: pass --model_args tokenizer={base} if the model was made for its "
                    "vocabulary."
                )


def _answers(results: dict[str, Any]) -> dict[str, list]:
    return {name: [sample["resps"] for sample in samples] for name, samples in results["samples"].items()}
