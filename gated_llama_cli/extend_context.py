"""`gated-llama extend-context`: a longer context by rotary parameters alone."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from .console import out


def register(app: typer.Typer):
    app.command(name="extend-context")(extend_context)


def extend_context(
    source: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id or folder, gated or not.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write: new or empty.")],
    factor: Annotated[float, typer.Option(help="Extended length / length of pre-training.")],
    method: Annotated[Literal["yarn", "linear"], typer.Option(help="How frequencies are stretched.")] = "yarn",
    rope_theta: Annotated[
        float | None, typer.Option(help="Another base of the frequencies; asks for training.")
    ] = None,
    link: Annotated[
        bool, typer.Option("--link", help="Hard links to the weights; writing to one folder then changes the other.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub source.")] = None,
):
    """Give a checkpoint a longer context without training. Weights are copied as they are."""
    from gated_llama.convert.extend_context import extend_context as extend

    report = extend(source, output, factor=factor, method=method, rope_theta=rope_theta, link=link, revision=revision)
    before = f"{report.original_length:,} tokens" if report.original_length else "the pre-training length"
    done = "was extended already and is copied as it is" if report.unchanged else "is extended"
    length = f"{before} x{report.factor:g} = {report.length:,} tokens ({report.method})."
    out.print(f"{escape(source)} {done}: {length}")
    if report.left_behind:
        out.print(f"Not copied, as no part of the model: {escape(', '.join(report.left_behind))}", soft_wrap=True)
    out.print(escape(str(report.output)))
