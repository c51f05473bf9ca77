"""What every command shares towards the terminal: two consoles, silence from the libraries, one line for a mistake."""

import logging
import os
import warnings
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table


out = Console(highlight=False)
err = Console(stderr=True, highlight=False)
INTERRUPTED = 130  # what typer, and a shell, make of Ctrl-C


def byte_progress() -> Progress:
    """A bar for bytes written, with the name of the tensor that is; nothing where stderr is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[tensor]}", style="dim"),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


class Steps:
    """A progress bar per kind of work."""

    def __init__(self, title: str):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
        self.title = escape(Path(title).name)
        self.tasks: dict[str, int] = {}

    def __enter__(self) -> "Steps":
        self.bar.start()
        return self

    def __exit__(self, *exception):
        self.bar.stop()

    def update(self, what: str, done: int, total: int):
        if what not in self.tasks:
            self.tasks[what] = self.bar.add_task(f"{self.title}: {what}", total=total)
        self.bar.update(self.tasks[what], completed=done)


def number(value: float) -> str:
    """Four digits, or all before the point: 0.01611, 287.3, 24,548."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def facts(title: str, rows: list[tuple[str, str]]) -> Table:
    """A table of names and what is to be said of them."""
    table = Table(title=escape(title), title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def print_table(title: str, rows: list[list[str]]):
    table = Table(title=escape(title), title_justify="left")
    for index, heading in enumerate(rows[0]):
        table.add_column(escape(heading), justify="right" if index else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*map(escape, row))
    out.print(table)


def quiet():
    """Silences warnings and load reports of the libraries."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_VERBOSITY"] = "error"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def hide_bars():
    """For commands that show their own progress: no bars of libraries not yet imported. Downloads keep theirs."""
    os.environ["TQDM_DISABLE"] = "1"


def report_error(error: Exception) -> bool:
    """Prints `error` as one line on stderr if it is the user's to mend; False, and nothing printed, if it is not."""
    message = _message(error)
    if message is None:
        return False
    if message:  # asking for nothing at all shows the help, which is message enough
        err.print(f"[bold red]Error:[/] {escape(' '.join(message.split()))}", soft_wrap=True)
    return True


def _message(error: Exception) -> str | None:
    from huggingface_hub.errors import StrictDataclassError

    if hasattr(error, "format_message"):  # a usage error of typer
        return error.format_message()
    if isinstance(error, StrictDataclassError):
        return str(error.__cause__ or error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    if isinstance(error, (ValueError, OSError)) or _lacks_package(error):
        return str(error)
    return None


def _lacks_package(error: Exception) -> bool:
    """An optional package that is not installed, or advice to install one; a name that a module lacks is a defect."""
    if isinstance(error, ModuleNotFoundError):
        return not (error.name or "").startswith("gated_llama")
    return isinstance(error, ImportError) and error.name is None
