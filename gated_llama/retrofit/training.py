"""A whole run: models, texts and trainer put together, checkpoints found again, the result written as a checkpoint."""

import math
import platform
import shutil
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from transformers import TrainerCallback
from transformers.utils import logging

from .. import __version__
from ..convert.loading import Loadable
from ..convert.output_folder import building
from ..convert.tensor_files import one_line
from ..diagnostics.corpus import first_token, read_documents, with_first
from ..hub import read_card, write_card
from .callbacks import Clock, Interruption, Told, Watch
from .data import Rows, mix_rows, same_tokens, token_stream
from .losses import plain_name
from .run_folder import (
    IRRELEVANT,
    MODEL,
    RECORD,
    TrainingReport,
    check_folder,
    checkpoints,
    finished,
    prepare_folder,
    write_json,
)
from .settings import Settings, training_arguments
from .targets import stored_targets
from .trainer import RetrofitTrainer, check_run, parameter_groups


logger = logging.get_logger(__name__)

CARD = """
## Training

{steps:,} steps, {tokens:,} tokens with gated-llama {version}; losses {losses}; seed {seed}.
"""


def train(
    settings: Settings,
    *,
    resume: str = "auto",
    progress: Callable[[int, int, dict], None] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> TrainingReport:
    """
    Carries out a run, from its last complete checkpoint if there is one.

    resume: "auto", or "none" to start anew and replace what an earlier run left. progress: called as
    progress(step, steps, latest log). say: called with what is being prepared. A signal (Ctrl-C) ends the run with a
    checkpoint; the same call then continues to the losses that an uninterrupted run has.

    Raises ValueError for a mistake in the settings or texts, before anything but tokenised texts (and the file of
    `losses.kl.targets`) is written.
    """
    if resume not in ("auto", "none"):
        raise ValueError(f"resume={resume!r} is unknown; choose auto or none.")
    output = Path(settings.output)
    check_folder(output, settings)
    if resume == "auto" and (done := finished(output, settings)) is not None:
        return done
    trainer, identity = build_trainer(settings, say)
    checkpoint = prepare_folder(output, identity, resume) if trainer.args.should_save else None
    if trainer.args.world_size > 1:
        found = [checkpoint]
        torch.distributed.broadcast_object_list(found)
        checkpoint = found[0]
    interruption = Interruption()
    for callback in (interruption, Journal(trainer, output)):
        trainer.add_callback(callback)
    if progress is not None:
        trainer.add_callback(Told(progress))
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except SafetensorError as error:
        raise ValueError(
            f"{checkpoint} is damaged ({one_line(error)}): remove it, and the run begins at an earlier one or anew."
        ) from error
    except ValueError:
        if trainer.state.global_step:
            report(trainer, output, complete=False)  # with what was logged since the last checkpoint
        raise
    finally:
        interruption.release()
    if interruption.happened:
        return report(trainer, output, complete=False)
    return finish(trainer, output)


def build_trainer(settings: Settings, say: Callable[[str], None] = lambda line: None) -> tuple[RetrofitTrainer, dict]:
    """The trainer of a run, and what identifies the run: all that its losses depend on."""
    arguments = training_arguments(settings)
    loadable = Loadable.open(settings.model)
    if loadable.config.model_type != "gated_llama":
        raise ValueError(
            f"model={settings.model} is of type {loadable.config.model_type!r} and has no gates: convert it first "
            "with `gated-llama convert`."
        )
    if not loadable.has_tokenizer:
        raise ValueError(f"model={settings.model} has no tokenizer, so no text can be given to it.")
    tokenizer = loadable.load_tokenizer()
    student_bos = first_token(tokenizer, settings.student_bos, field="student_bos")
    source, source_bos = open_source(settings, tokenizer)
    say("loading models")
    student = loadable.load_model("float32")
    check_run(student, source, arguments, settings)
    parameter_groups(student, settings)
    if settings.measure.text is not None:
        next(read_documents(settings.measure.text), None)  # says so where there is no such file
    per_step = arguments.train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    cache = Path(settings.data.cache or Path(settings.output) / "tokens")
    rows = mix_rows(
        tokenizer,
        settings.data,
        settings.steps * per_step,
        seed=settings.seed,
        cache=cache,
        progress=lambda path, documents: say(f"tokenising {path}: {documents} documents"),
    )
    watched = watched_rows(settings, tokenizer, rows, cache)
    check_size(loadable, rows, watched, settings, student_bos)
    if source is not None:
        check_first(source, settings, source_bos)
    opened = {"model": loadable, "source": source}
    weights = {name: each.checkpoint.digest() for name, each in opened.items() if each is not None}
    kl = settings.losses.get("kl")
    if kl is not None and kl.targets is not None:
        rows.targets = kept_targets(settings, arguments, rows, source, weights["source"], source_bos, say)
        source = source if "attention_output" in settings.losses else None
    trainer = RetrofitTrainer(
        student,
        arguments,
        settings=settings,
        rows=rows,
        source=None if source is None else source.load_model("float32"),
        student_bos=student_bos,
        source_bos=source_bos,
        files=loadable.checkpoint.folder,
        callbacks=[Clock()],
    )
    trainer.pop_callback(transformers.PrinterCallback)
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        logger.warning("Gates and sinks are not watched: under FSDP and DeepSpeed no process has whole layers.")
    else:
        trainer.add_callback(Watch(trainer, with_first(watched, student_bos)))
    fields = {name: value for name, value in settings.to_dict().items() if name not in IRRELEVANT}
    identity = {"settings": fields, "world_size": arguments.world_size, "weights": weights}
    return trainer, identity | {"texts": rows.digests, "rows": rows.order}


def open_source(settings: Settings, tokenizer) -> tuple[Loadable | None, int | None]:
    """The source, not yet loaded, and the id of its first token; ValueError where its tokens are other ones."""
    if settings.source is None:
        return None, None
    loadable = Loadable.open(settings.source)
    other = loadable.carried_tokenizer() if loadable.has_tokenizer else tokenizer
    if what := same_tokens(tokenizer, other, [text.path for text in settings.data.texts.values()]):
        raise ValueError(
            f"The tokenizers of model={settings.model} and source={settings.source} give {what} different ids: the "
            "two can only be compared on the same ones."
        )
    return loadable, first_token(other, settings.source_bos, field="source_bos")


def kept_targets(settings: Settings, arguments, rows: Rows, source: Loadable, digest: str, bos: int | None, say):
    """The records of `losses.kl.targets`, which are computed by one process. digest: of the source."""
    path, kl = Path(settings.losses["kl"].targets), settings.losses["kl"]
    if arguments.world_size > 1 and not path.is_file():
        raise ValueError(f"losses.kl.targets={path} does not exist: make it with one process, by starting the run so.")
    return stored_targets(
        path,
        rows,
        kl.top_k,
        source=f"{source} {digest}",
        first=bos,
        load=lambda: source.load_model("float32").to(arguments.device),
        say=say,
    )


def watched_rows(settings: Settings, tokenizer, rows: Rows, cache: Path) -> torch.Tensor:
    """The fixed batch [rows, context]."""
    count, context = settings.measure.rows, settings.data.context
    if settings.measure.text is None:
        return torch.stack([item["input_ids"] for item in islice(rows, min(count, len(rows)))])
    stream = token_stream(tokenizer, settings.measure.text, settings.data.separator, cache)
    if len(stream) < count * context:
        raise ValueError(
            f"measure.text={settings.measure.text} gives {len(stream)} tokens; {count} rows of {context} are needed."
        )
    return torch.from_numpy(stream[: count * context].astype("int64")).view(count, context)


def check_positions(loadable: Loadable, settings: Settings, bos: int | None) -> None:
    """ValueError for rows that are longer than what the model was made for."""
    positions = getattr(loadable.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and settings.data.context + (bos is not None) > positions:
        raise ValueError(
            f"data.context={settings.data.context} with the first token passes the {positions} positions of "
            f"{loadable}: choose a smaller one, or stretch it with `gated-llama extend-context`."
        )


def check_first(source: Loadable, settings: Settings, bos: int | None) -> None:
    """ValueError for rows, and a token before them, that the source is too small for."""
    check_positions(source, settings, bos)
    size = source.config.get_text_config().vocab_size
    if bos is not None and bos >= size:
        raise ValueError(f"source_bos={settings.source_bos!r} is the id {bos}, and {source} has {size} embeddings.")


def check_size(
    loadable: Loadable, rows: Rows, watched: torch.Tensor, settings: Settings, student_bos: int | None
) -> None:
    """ValueError for rows that the student is too small for."""
    check_positions(loadable, settings, student_bos)
    largest = max(*(int(stream.max()) for stream in rows.streams.values()), int(watched.max()), student_bos or 0)
    if largest >= loadable.config.vocab_size:
        raise ValueError(
            f"{loadable}: its tokenizer gives ids up to {largest} and it has {loadable.config.vocab_size} embeddings."
        )
    kl = settings.losses.get("kl")
    if kl is not None and (kl.top_k or 0) > loadable.config.vocab_size:
        raise ValueError(f"losses.kl.top_k={kl.top_k} of a vocabulary of {loadable.config.vocab_size}: keep fewer.")


# Results.


class Journal(TrainerCallback):
    """Writes training.json with each checkpoint."""

    def __init__(self, trainer: RetrofitTrainer, output: Path):
        self.trainer, self.output = trainer, output

    def on_save(self, args, state, control, **kwargs):
        report(self.trainer, self.output, complete=False)


def report(trainer: RetrofitTrainer, output: Path, *, complete: bool) -> TrainingReport:
    """What is known of the run; on the main process also written to training.json."""
    settings, state = trainer.settings, trainer.state
    # The library's summary of a run counts this session alone.
    entries = (entry for entry in state.log_history if "train_loss" not in entry)
    log = [{key: plain(value) for key, value in entry.items() if key != "epoch"} for entry in entries]
    seconds = next((entry["seconds"] for entry in reversed(log) if "seconds" in entry), 0.0)
    tokens = state.global_step * trainer.tokens_per_step
    found = TrainingReport(output, complete, state.global_step, settings.steps, tokens, seconds, log)
    if trainer.args.should_save:
        sizes = Counter()
        for name, parameter in trainer.model.named_parameters():
            sizes[trainer.groups.get(plain_name(name), "frozen")] += parameter.numel()
        record = {
            "complete": complete,
            "steps": found.steps,
            "max_steps": found.max_steps,
            "tokens": found.tokens,
            "seconds": found.seconds,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()) if complete else None,
            "seed": settings.seed,
            "rows": dict(Counter(trainer.train_dataset.names)),
            "first_tokens": {"student": trainer.student_bos, "source": trainer.source_bos},
            "parameters": dict(sizes),
            "versions": versions(),
            "device": str(trainer.args.device),
            "threads": torch.get_num_threads(),
            "world_size": trainer.args.world_size,
            "settings": settings.to_dict(),
            "log": log,
        }
        write_json(output / RECORD, record)
    return found


def plain(value):
    """JSON has no numbers that are not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def versions() -> dict[str, str]:
    libraries = {"torch": torch.__version__, "transformers": transformers.__version__, "gated_llama": __version__}
    return libraries | {"python": platform.python_version()}


def finish(trainer: RetrofitTrainer, output: Path) -> TrainingReport:
    """The result as a complete checkpoint folder, and the record of the run; checkpoints go unless they are kept."""
    settings, target = trainer.settings, output / MODEL
    weights = {name: loss.weight for name, loss in settings.losses.items()}
    training = {"steps": settings.steps, "tokens": settings.steps * trainer.tokens_per_step, "losses": weights}
    training |= {"seed": settings.seed, "package_version": __version__}
    config = trainer.accelerator.unwrap_model(trainer.model).config
    record = config.gate_retrofit or {}
    if "training" in record:
        training["earlier"] = record["training"]
    config.gate_retrofit = {**record, "training": training}
    if not trainer.args.should_save:
        trainer.save_model(str(target))  # takes part in gathering the weights
        return report(trainer, output, complete=True)
    if target.is_dir():  # of a run that ended before its record was written
        shutil.rmtree(target)
    with building(target, 0) as folder:
        trainer.save_model(str(folder))
        (folder / "training_args.bin").unlink(missing_ok=True)
        card = Path(trainer.files) / "README.md"
        text = read_card(card) if card.is_file() else f"# {output.name}\n"
        text = text.replace(f"# {card.parent.name}\n", f"# {output.name}\n", 1).replace(
            f'from_pretrained("{card.parent.name}"', f'from_pretrained("{output.name}"'
        )
        losses = ", ".join(f"{name} x {weight:g}" for name, weight in weights.items())
        section = CARD.format(
            steps=training["steps"], tokens=training["tokens"], version=__version__, losses=losses, seed=settings.seed
        )
        write_card(folder / "README.md", text + section)
    found = report(trainer, output, complete=True)
    if not settings.keep_checkpoints:
        for path in checkpoints(output).values():
            shutil.rmtree(path, ignore_errors=True)
    return found
