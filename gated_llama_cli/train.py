"""`gated-llama train`: a retrofit, from one YAML file; can be stopped and continued at any point."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .console import INTERRUPTED, err, facts, hide_bars, number, out


LINES = 20  # progress lines of a whole run where stderr is no terminal


def register(app: typer.Typer):
    app.command()(train)


def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.yaml", help="The run; README.md lists its fields under Training.")
    ],
    resume: Annotated[
        Literal["auto", "none"],
        typer.Option(help="auto: from the last checkpoint in the output; none: delete the run in it and start anew."),
    ] = "auto",
    output: Annotated[Path | None, typer.Option(help="Folder of the run, instead of the file's `output`.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the run, instead of the file's `seed`.")] = None,
):
    """Train a converted checkpoint. Ctrl-C saves, and the same command continues."""
    hide_bars()
    from gated_llama.retrofit.settings import read_settings
    from gated_llama.retrofit.training import train as run

    settings = read_settings(config, output=None if output is None else str(output), seed=seed)
    with Bar() as bar:
        report = run(settings, resume=resume, progress=bar.update, say=bar.say)
    if report.interrupted:
        err.print(f"Saved at step {report.steps} of {report.max_steps}; the same command continues.")
        raise typer.Exit(INTERRUPTED)
    if os.environ.get("RANK", "0") == "0":  # of torchrun
        show(report)


class Bar:
    """Steps, loss and time left; now and then a line where stderr is no terminal."""

    def __init__(self):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.terminal = err.is_terminal
        self.progress = Progress(
            *columns, TimeRemainingColumn(), console=err, transient=True, disable=not self.terminal
        )
        self.task = self.progress.add_task("preparing", total=None)
        self.printed = -1

    def __enter__(self) -> "Bar":
        self.progress.start()
        return self

    def __exit__(self, *exception):
        self.progress.stop()

    def say(self, line: str):
        self.progress.update(self.task, description=escape(line))

    def update(self, step: int, steps: int, log: dict):
        if "loss" not in log:
            self.progress.update(self.task, completed=step, total=steps)
            return
        line = loss_line(log)
        self.progress.update(self.task, completed=step, total=steps, description=escape(line))
        part = step * LINES // steps
        if not self.terminal and part != self.printed:
            self.printed = part
            err.print(f"step {step}/{steps}  {line}  {log['tokens']:,} tokens  {log['seconds']:.0f} s")


def loss_line(log: dict) -> str:
    terms = (f"{name.removeprefix('loss_')} {value:.4g}" for name, value in log.items() if name.startswith("loss_"))
    return f"loss {log['loss']:.4g} ({', '.join(terms)})"


def show(report):
    steps = [entry for entry in report.log if "loss" in entry]
    watched = report.watched()
    rows = [("trained", f"{report.steps:,} steps, {report.tokens:,} tokens, {report.seconds:,.0f} s")]
    if steps:
        rows += [("first logged", loss_line(steps[0])), ("last logged", loss_line(steps[-1]))]
    if watched:
        rows += [
            (title, f"{number(watched[0][f'watch_{name}'])} -> {number(watched[-1][f'watch_{name}'])}")
            for title, name in (
                ("first-token attention", "first_token_attention"),
                ("attention on the most attended key", "most_attended"),
                ("largest activation", "max_activation"),
                ("mean gate score", "gate_mean"),
            )
            if f"watch_{name}" in watched[0]
        ]
    out.print(facts(str(report.output / "model"), rows))
    out.print(f"Log and settings: {escape(str(report.output / 'training.json'))}", soft_wrap=True)
