"""What every command shares towards the terminal: two consoles, silence from the libraries, one line for a mistake."""

import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
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
from rich.text import Text


out = Console(highlight=False)
err = Console(stderr=True, highlight=False)
for console in (out, err):
    console.soft_wrap = not console.is_terminal  # a line in a pipe is a line, whatever its length
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


class Listing:
    """
    Rows under a title: a table in a terminal, where long cells go on below; elsewhere a line for each row, in whole.

    rows: cells are strings, or `Text` where they have a style. headings: none where the first column names the second.
    left: columns of words; those behind hold numbers.
    """

    def __init__(self, title: str, rows: Sequence[Sequence[str | Text]], headings: Sequence[str] = (), left: int = 1):
        self.title, self.rows, self.headings, self.left = title, rows, headings, left

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table() if console.is_terminal else self.lines()

    def table(self) -> Table:
        title = Text(self.title, style="table.title")
        table = Table(title=title, title_justify="left", show_header=bool(self.headings))
        for index, heading in enumerate(self.headings or ("", "")):
            style = "" if index or self.headings else "bold"
            justify = "left" if index < self.left else "right"
            table.add_column(Text(heading), style=style, justify=justify, overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        return table

    def lines(self) -> Text:
        """For pipes: columns are aligned, with two spaces at least between them."""
        rows = [self.headings, *self.rows] if self.headings else self.rows
        rows = [[" ".join(str(cell).split()) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return Text("\n".join([self.title, *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)]))


def facts(title: str, rows: Sequence[tuple[str, str]]) -> Listing:
    """Names and what is to be said of them."""
    return Listing(title, rows, left=2)


def print_table(title: str, rows: Sequence[Sequence[str]]):
    """The first row holds the headings."""
    out.print(Listing(title, rows[1:], headings=rows[0]))


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
