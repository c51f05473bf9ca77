"""The folder of a training run: what is refused, what is found again, and whether it is the same run."""

import json
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..convert.loading import Loadable
from ..convert.tensor_files import one_line, to_json
from .data import text_digest
from .settings import Settings
from .targets import unfinished


MODEL, RECORD, RUN = "model", "training.json", "run.json"
IRRELEVANT = ("output", "keep_checkpoints")  # fields that may differ when a run is continued


@dataclass(frozen=True)
class TrainingReport:
    """
    What a run did so far. output: its folder; the result is in `model` below it when `complete`. log: what was logged,
    one dict per entry with "step". seconds: of training, over all sessions.
    """

    output: Path
    complete: bool
    steps: int
    max_steps: int
    tokens: int
    seconds: float
    log: list[dict]

    @property
    def interrupted(self) -> bool:
        return not self.complete

    def watched(self) -> list[dict]:
        """The measurements on the fixed batch, by step."""
        return [entry for entry in self.log if "watch_gate_mean" in entry]


def check_folder(output: Path, settings: Settings) -> None:
    """ValueError for a folder that holds something else than this run's results, or what the run reads."""
    if output.is_file():
        raise ValueError(f"output={output} is a file: name a folder.")
    for field in ("model", "source"):
        given = getattr(settings, field)
        if given is not None and Path(given).exists() and Path(given).resolve().is_relative_to(output.resolve()):
            raise ValueError(f"{field}={given} lies in output={output}, which is written anew: name another output.")
        if given is not None and Path(given).is_dir() and output.resolve().is_relative_to(Path(given).resolve()):
            raise ValueError(f"output={output} lies in {field}={given}, which stays as it is: name another output.")
    alike = {path.name for path in output.glob("checkpoint-*")} - {path.name for path in checkpoints(output).values()}
    if found := min(alike, default=None):
        raise ValueError(
            f"output={output} holds {found}, which would be deleted as an old checkpoint: move it elsewhere."
        )
    if not output.is_dir() or (output / RUN).is_file():
        return
    kept = settings.losses["kl"].targets if "kl" in settings.losses else None
    given = [Path(path).resolve() for path in (settings.data.cache, kept) if path is not None]
    # A run writes RUN before all else but texts: a model beside which there is none is somebody else's.
    ours = [output.resolve() / "tokens", *given, *(unfinished(path) for path in given)]
    paths = [path.resolve() for path in output.iterdir()]
    if foreign := [path.name for path in paths if not any(own.is_relative_to(path) for own in ours)]:
        raise ValueError(f"output={output} holds {min(foreign)}, which is no part of a run: name another folder.")


def finished(output: Path, settings: Settings) -> TrainingReport | None:
    """The report of a run that is complete; ValueError when it was a run of other settings."""
    if not (output / MODEL).is_dir() or not (output / RECORD).is_file():
        return None
    record = read_record(output / RECORD)
    if not record["complete"]:
        return None
    compare(output, {"settings": record["settings"]}, {"settings": settings.to_dict()})
    earlier = read_record(output / RUN) if (output / RUN).is_file() else {}
    for section, now in inputs_of(settings).items():
        compare(output, {section: {name: earlier.get(section, {}).get(name) for name in now}}, {section: now})
    names = ("complete", "steps", "max_steps", "tokens", "seconds", "log")
    return TrainingReport(output=output, **{name: record[name] for name in names})


def inputs_of(settings: Settings) -> dict[str, dict[str, str]]:
    """Digests as in the identity of a run, of the files that are there: after it they need not be kept."""
    named = {field: getattr(settings, field) for field in ("model", "source")}
    local = {name: Loadable.open(path) for name, path in named.items() if path is not None and Path(path).exists()}
    found = {"weights": {name: loadable.checkpoint.digest() for name, loadable in local.items()}}
    if "model" in local and local["model"].has_tokenizer:
        tokenizer, separator = local["model"].load_tokenizer(), settings.data.separator
        found["texts"] = {
            name: text_digest(tokenizer, text.path, separator)
            for name, text in settings.data.texts.items()
            if Path(text.path).is_file()
        }
    return found


def prepare_folder(output: Path, identity: dict, resume: str) -> str | None:
    """Makes or clears the folder; returns the checkpoint to continue from."""
    found = None if resume == "none" else last_checkpoint(output)
    if resume == "none":
        for path in [*checkpoints(output).values(), output / MODEL]:
            shutil.rmtree(path, ignore_errors=True)
        for name in (RECORD, RUN):
            (output / name).unlink(missing_ok=True)
    elif found is not None:
        compare(output, read_record(output / RUN), identity)
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / RUN, identity)
    return found


def read_record(path: Path) -> dict:
    """RECORD or RUN; ValueError where it is damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({one_line(error)}): start anew with --resume none.") from error


def compare(output: Path, earlier: dict, now: dict) -> None:
    """ValueError that names the first difference between two runs, as far as both say what they depend on."""
    earlier, now = (dict(flat(json.loads(json.dumps(run)))) for run in (earlier, now))
    for name in dict.fromkeys([*earlier, *now]):
        before, after = (run.get(name) for run in (earlier, now))
        if before != after and name not in IRRELEVANT:
            had = f"with {name}={before!r}" if name in earlier else f"without {name}"
            has = repr(after) if name in now else "left out"
            raise ValueError(
                f"{output} holds a run {had}, and now it is {has}: continue with the same configuration, name another "
                "output, or start anew with --resume none."
            )


def flat(content: dict, place: str = "") -> Iterator[tuple[str, Any]]:
    """("data.context", 511) and so on; what stands under "settings" has no prefix."""
    for name, value in content.items():
        if isinstance(value, dict) and value:
            yield from flat(value, "" if not place and name == "settings" else f"{place}{name}.")
        else:
            yield f"{place}{name}", value


def checkpoints(output: Path) -> dict[int, Path]:
    """The folders that the library writes, by step."""
    return {int(path.name[11:]): path for path in output.glob("checkpoint-*") if path.name[11:].isdecimal()}


def last_checkpoint(output: Path) -> str | None:
    """The latest checkpoint that was written to its end; its state is what is written last."""
    for _, folder in sorted(checkpoints(output).items(), reverse=True):
        try:
            json.loads((folder / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        if not [*folder.glob("optimizer*"), *folder.glob("global_step*")]:  # the latter is DeepSpeed's
            raise ValueError(f"{folder} has lost the optimizer's state: remove it, or start anew with --resume none.")
        return str(folder)
    return None


def write_json(path: Path, content: dict) -> None:
    text = to_json(content, indent=1, ensure_ascii=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    partial.write_text(text)
    partial.replace(path)
