"""The configuration of a training run: a YAML file read into dataclasses, with one clear error per mistake.

A moment of the run is written as an integer, which counts optimizer steps, or as a decimal, which is a fraction of the
run: `200` and `0.5`.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import TrainingArguments, get_scheduler
from transformers.integrations import get_available_reporting_integrations
from transformers.utils import logging

from ..convert.tensor_files import one_line
from .reading import at_home, build, check_name, read_yaml


logger = logging.get_logger(__name__)

GATES = ("*.self_attn.g_proj.*", "*.self_attn.g_param")

# What a stage may train: name patterns of parameters; "gates" are those of the section `gates`.
PARTS = {
    "gates": (),
    "attention": ("*.self_attn.*",),
    "mlp": ("*.mlp.*",),
    "norms": ("*layernorm.weight", "*model.norm.weight"),  # those of queries and keys belong to the attention
    "embeddings": ("*embed_tokens.weight", "lm_head.weight"),
    "all": ("*",),
}

# Fields of TrainingArguments that differ from the library's defaults here.
TRAINING_DEFAULTS = {
    "per_device_train_batch_size": 1,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
    "logging_nan_inf_filter": False,
    "save_steps": 100,
    "save_total_limit": 1,
    "report_to": [],
    "disable_tqdm": True,
}

# Fields that follow from the rest of the configuration.
TRAINING_FIXED = {
    "output_dir": "set `output`",
    **dict.fromkeys(("seed", "data_seed"), "set `seed`"),
    "num_train_epochs": "set `training.max_steps`",
    "remove_unused_columns": "leave it out",
    "train_sampling_strategy": "rows come in the order that `seed` gives",
    "resume_from_checkpoint": "use `--resume`",
    "label_smoothing_factor": "it has no meaning for these losses",
    "use_liger_kernel": "it replaces the logits that the losses need",
    "auto_find_batch_size": "a run with another batch size would be another run",
    "save_only_model": "a run that is stopped could not be continued",
    "ignore_data_skip": "a run that is continued would read the same rows again",
    "load_best_model_at_end": "the result is what the last step leaves",
    "accelerator_config": "it would change the batch after rows were counted",
    **dict.fromkeys(("push_to_hub", "hub_model_id"), "upload the folder `model` of the finished run"),
}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """
    When something counts: from the moment `start` on, growing linearly over `ramp`, until `stop`.

    The factor is 0 before `start` and from `stop` on, and 1 in between; defaults: 1 throughout.
    """

    start: int | float = 0
    ramp: int | float = 0
    stop: int | float = 1.0

    def factor(self, step: int, steps: int) -> float:
        """Between 0 and 1, for optimizer step `step` (counted from 0) of `steps`."""
        start, ramp, stop = (in_steps(moment, steps) for moment in (self.start, self.ramp, self.stop))
        if not start <= step < stop:
            return 0.0
        return min(1.0, (step - start + 1) / ramp) if ramp else 1.0


def in_steps(moment: int | float, steps: int) -> int:
    """An integer counts steps, a decimal is a fraction of the run."""
    return moment if isinstance(moment, int) else round(moment * steps)


@dataclass(frozen=True, kw_only=True)
class Loss(Schedule):
    """What every loss has: its value times `weight` and the schedule's factor is added to the total."""

    SHORTHAND: ClassVar[str] = "weight"
    weight: float = 1.0

    @classmethod
    def kind(cls, name: str) -> "type[Loss]":
        """The settings of the loss `name`; ValueError for an unknown one."""
        check_name(name, LOSS_SETTINGS, f"losses.{name}")
        return LOSS_SETTINGS[name]


@dataclass(frozen=True, kw_only=True)
class Divergence(Loss):
    """
    top_k: compare the source's k most likely tokens and all others together; None compares the whole vocabulary.

    targets: file of the source's top k for the rows of this run; it is written first where it does not exist.
    """

    top_k: int | None = None
    targets: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outlier(Loss):
    """
    tau: threshold in units of the root mean square. down_proj: the inputs of down_proj as well.

    worst_token_weight and first_token_weight: how many times the token with the most outliers and the first token of
    a row count.
    """

    tau: float = 4.0
    worst_token_weight: float = 256.0
    first_token_weight: float = 1.0
    down_proj: bool = False


@dataclass(frozen=True, kw_only=True)
class Sink(Loss):
    """eps: attention on the first token that costs nothing."""

    eps: float = 0.05


LOSS_SETTINGS: dict[str, type[Loss]] = {
    "next_token": Loss,
    "kl": Divergence,
    "attention_output": Loss,
    "outlier": Outlier,
    "sink": Sink,
    "gate": Loss,
}
NEED_SOURCE = ("kl", "attention_output")


@dataclass(frozen=True, kw_only=True)
class Dropout(Schedule):
    """probability: of hiding a row's first key from all later queries."""

    SHORTHAND: ClassVar[str] = "probability"
    probability: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Text:
    """path: a .txt file (one text) or .jsonl (field "text" of each line), also with .gz; share: of the rows."""

    SHORTHAND: ClassVar[str] = "path"
    path: str
    share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Data:
    """
    Rows of `context` tokens of each text's own, cut from its documents one after the other, joined by `separator`.

    repeat: use a text again when it has fewer rows than its share asks for. cache: folder of tokenised texts.
    """

    texts: dict[str, Text]
    context: int = 511
    separator: str = "\n\n"
    repeat: bool = False
    cache: str | None = None


@dataclass(frozen=True, kw_only=True)
class Gates:
    """
    parameters: name patterns of what counts as gate (the gate's own weights by default; biases for a transplant).

    learning_rate, or multiplier of the base's; no weight decay in either case.
    """

    parameters: list[str] = field(default_factory=lambda: list(GATES))
    learning_rate: float | None = None
    multiplier: float | None = None


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What is trained until a moment; the last stage has no `until`."""

    train: list[str]
    until: int | float | None = None


@dataclass(frozen=True, kw_only=True)
class Measure:
    """
    What is watched on a fixed batch: `rows` rows, every so often and at both ends.

    text: a file as in `data.texts`; the first rows of the training data without. warn_after and least_change: a
    warning when by then the gate scores on the batch have changed by less, in the mean.
    """

    every: int | float = 0.1
    rows: int = 1
    text: str | None = None
    warn_after: int | float = 0.25
    least_change: float = 0.01


@dataclass(frozen=True, kw_only=True)
class Settings:
    """
    A training run.

    Args:
        model: folder of a gated_llama checkpoint, the student.
        output: folder of the run: the result in `model`, the record in training.json, checkpoints until it is done.
        data: the texts and how rows are cut from them.
        losses: name in `LOSS_SETTINGS` -> its weight, schedule and options; their sum is trained for.
        training: `max_steps`, and fields of transformers.TrainingArguments but those of `TRAINING_FIXED`.
        source: what `NEED_SOURCE` losses compare the student with: Hub id, folder or .gguf file.
        student_bos, source_bos: the token before each row: auto (the tokenizer's), none, or a token.
        seed: of the rows' order, dropout and the library's own random numbers.
        gates: which parameters are gates, and their learning rate.
        stages: what is trained until when; in the default everything throughout.
        first_key_dropout: rows whose first key is hidden from later queries.
        measure: what is watched on a fixed batch.
        keep_checkpoints: leave checkpoints in `output` when the run is complete.
    """

    model: str
    output: str
    data: Data
    losses: dict[str, Loss]
    training: dict[str, Any]
    source: str | None = None
    student_bos: str = "auto"
    source_bos: str = "auto"
    seed: int = 0
    gates: Gates = field(default_factory=Gates)
    stages: list[Stage] = field(default_factory=lambda: [Stage(train=["all"])])
    first_key_dropout: Dropout = field(default_factory=Dropout)
    measure: Measure = field(default_factory=Measure)
    keep_checkpoints: bool = False

    @property
    def steps(self) -> int:
        return self.training["max_steps"]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_settings(path: str | Path, **overrides: Any) -> Settings:
    """
    The run that a YAML file describes; `extends: other.yaml` (beside it) gives what the file itself leaves out.

    overrides: top-level fields that win over the file. A value that begins with ~/ is a path at home. Raises
    ValueError, with the place in the file, for a mistake.
    """
    raw = at_home(read_yaml(Path(path), Settings))
    try:
        settings = build(Settings, raw | {name: value for name, value in overrides.items() if value is not None})
        _check(settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return settings


def _check(settings: Settings) -> None:
    """What a type does not say."""
    if empty := [name for name in ("model", "source", "output") if getattr(settings, name) == ""]:
        raise ValueError(f"{empty[0]} is empty: give a path.")
    if not settings.losses:
        raise ValueError(f"losses is empty: name at least one of {', '.join(LOSS_SETTINGS)}.")
    for name in NEED_SOURCE:
        if name in settings.losses and settings.source is None:
            raise ValueError(f"losses.{name} compares with a source model: set `source`.")
    if not settings.data.texts:
        raise ValueError("data.texts is empty: name at least one file.")
    for name, text in settings.data.texts.items():
        if not text.path:
            raise ValueError(f"data.texts.{name}.path is empty: name a file.")
        _at_least(f"data.texts.{name}.share", text.share, 0, above=True)
    _at_least("data.context", settings.data.context, 2)
    _at_least("measure.rows", settings.measure.rows, 1)
    _at_least("measure.every", settings.measure.every, 0, above=True)
    for name in ("learning_rate", "multiplier"):
        if (rate := getattr(settings.gates, name)) is not None:
            _at_least(f"gates.{name}", rate, 0)
    for name, loss in settings.losses.items():
        # A token counts once by itself.
        least = {"weight": 0, "tau": 0, "worst_token_weight": 1, "first_token_weight": 0, "eps": 0, "top_k": 1}
        for option in least:
            if (value := getattr(loss, option, None)) is not None:
                _at_least(f"losses.{name}.{option}", value, least[option])
    if not any(loss.weight for loss in settings.losses.values()):
        raise ValueError("Every weight in losses is 0: there is nothing to train for.")
    if not 0 <= settings.seed < 2**32:
        raise ValueError(f"seed={settings.seed} must lie between 0 and 2**32 - 1.")
    if not settings.gates.parameters:
        raise ValueError("gates.parameters is empty: leave it out for the gates' own weights, or name patterns.")
    if not 0 <= settings.first_key_dropout.probability <= 1:
        raise ValueError(f"first_key_dropout={settings.first_key_dropout.probability} must lie between 0 and 1.")
    if getattr(settings.losses.get("kl"), "targets", None) is not None and settings.losses["kl"].top_k is None:
        raise ValueError("losses.kl.targets holds the source's top k tokens: set losses.kl.top_k.")
    if settings.gates.learning_rate is not None and settings.gates.multiplier is not None:
        raise ValueError("gates.learning_rate and gates.multiplier say the same thing twice: give one of them.")
    _check_training(settings.training)
    _check_moments(settings)
    _check_stages(settings)


def _at_least(place: str, value: float, least: float, above: bool = False) -> None:
    if not math.isfinite(value) or value < least or (above and value == least):
        raise ValueError(f"{place}={value} must be a finite number {'above' if above else 'of at least'} {least}.")


def _check_training(training: dict) -> None:
    known = {f.name: f.default for f in dataclasses.fields(TrainingArguments) if f.init}
    switches = {f.name for f in dataclasses.fields(TrainingArguments) if f.type in (bool, bool | None)}
    free = [name for name in known if name not in TRAINING_FIXED and "eval" not in name]
    for name, value in training.items():
        if name in known and name not in free:
            reason = TRAINING_FIXED.get(name, "there is nothing to evaluate on; `measure` watches the run")
            raise ValueError(f"training.{name} is not set here: {reason}.")
        check_name(name, free, f"training.{name}")
        number = isinstance(known[name], int | float) and not isinstance(known[name], bool)
        if number and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"training.{name}={value!r} must be a number.")
        if name in switches and not isinstance(value, bool):
            raise ValueError(f"training.{name}={value!r} must be true or false.")
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if type(count := training.get(name, 1)) is not int or count < 1:
            raise ValueError(f"training.{name}={count!r} must be an integer of at least 1.")
    for name in ("learning_rate", "weight_decay", "warmup_steps", "max_grad_norm"):
        value = training.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"training.{name}={value!r} must be a number, 0 or more.")
    if training.get("save_strategy") == "best":
        raise ValueError("training.save_strategy='best' needs an evaluation: choose steps, epoch or no.")
    steps = training.get("max_steps")
    if type(steps) is not int or steps < 1:
        raise ValueError(f"training.max_steps={steps!r} must be an integer of at least 1: the run's optimizer steps.")


def _check_moments(settings: Settings) -> None:
    places = {f"losses.{name}": loss for name, loss in settings.losses.items()}
    moments = {
        f"{place}.{name}": getattr(schedule, name)
        for place, schedule in {**places, "first_key_dropout": settings.first_key_dropout}.items()
        for name in ("start", "ramp", "stop")
    }
    moments |= {f"measure.{name}": getattr(settings.measure, name) for name in ("every", "warn_after")}
    moments |= {f"stages[{index}].until": stage.until or 0 for index, stage in enumerate(settings.stages)}
    for place, moment in moments.items():
        if not moment >= 0 or (isinstance(moment, float) and moment > 1):
            raise ValueError(
                f"{place}={moment} must be an integer, which counts steps, or a fraction of the run from 0.0 to 1.0."
            )
    for place, schedule in {**places, "first_key_dropout": settings.first_key_dropout}.items():
        start, stop = (in_steps(moment, settings.steps) for moment in (schedule.start, schedule.stop))
        if start >= stop:
            raise ValueError(
                f"{place} is never on: of {settings.steps} steps it starts at {start} and stops at {stop}."
            )
    _check_gaps(settings)


def _check_gaps(settings: Settings) -> None:
    """Schedules change at their starts and stops: at the first of them where no loss is on, a step would have none."""
    steps, losses = settings.steps, [loss for loss in settings.losses.values() if loss.weight]
    for step in sorted({0, *(in_steps(loss.stop, steps) for loss in losses)}):
        if step < steps and not any(loss.factor(step, steps) for loss in losses):
            raise ValueError(f"No loss is on at step {step} of {steps}: change a start or a stop in losses.")


def _check_stages(settings: Settings) -> None:
    stages = settings.stages
    if not stages:
        raise ValueError("stages is empty: leave it out to train everything throughout.")
    for index, stage in enumerate(stages):
        if not stage.train:
            raise ValueError(f"stages[{index}].train is empty: name some of {', '.join(PARTS)}.")
        for part in stage.train:
            check_name(part, PARTS, f"stages[{index}].train: {part!r}")
        if (stage.until is None) != (index == len(stages) - 1):
            raise ValueError("Every stage but the last needs `until`, and the last has none: it runs to the end.")
    ends = [in_steps(stage.until, settings.steps) for stage in stages[:-1]]
    if any(later <= earlier for earlier, later in zip([0, *ends], [*ends, settings.steps], strict=True)):
        raise ValueError(f"stages end at steps {ends} of {settings.steps}: each must end later than the one before.")


def training_arguments(settings: Settings) -> TrainingArguments:
    """The library's own arguments; ValueError in one line for a value that it refuses."""
    fixed = {
        "output_dir": settings.output,
        "seed": settings.seed,
        "remove_unused_columns": False,
        "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": torch.cuda.is_available(),
        "use_cpu": not torch.accelerator.is_available(),
    }
    if fixed["use_cpu"] and settings.training.get("fp16"):
        logger.warning("training.fp16 is for GPUs: on this processor everything is computed in float32.")
    if len(settings.stages) > 1:
        fixed["ddp_find_unused_parameters"] = True
    if fixed["use_cpu"] and settings.training.get("bf16") and torch.backends.cpu.get_cpu_capability() == "AVX2":
        logger.warning("This processor has no bfloat16 instructions: training.bf16 makes it slower, not faster.")
    try:
        arguments = TrainingArguments(**{**TRAINING_DEFAULTS, **fixed, **settings.training})
        arguments.get_process_log_level()
    except Exception as error:  # a wrong type surfaces as almost any
        what = f"unknown value {error}" if isinstance(error, KeyError) else one_line(error)
        raise ValueError(f"training: {what}") from error
    if absent := set(arguments.report_to) - set(get_available_reporting_integrations()):
        raise ValueError(f"training.report_to: {', '.join(sorted(map(str, absent)))} is not installed, or unknown.")
    _check_schedule(arguments)
    return arguments


def _check_schedule(arguments: TrainingArguments) -> None:
    """The library makes the learning rate's schedule after the models are loaded; this one is thrown away."""
    name, options = arguments.lr_scheduler_type, arguments.lr_scheduler_kwargs
    warmup, steps = arguments.get_warmup_steps(arguments.max_steps), arguments.max_steps
    try:
        get_scheduler(name, torch.optim.SGD([torch.zeros(1)], lr=arguments.learning_rate), warmup, steps, options)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(
            f"training.lr_scheduler_kwargs={options} does not fit lr_scheduler_type={name.value}: {one_line(error)}"
        ) from error
