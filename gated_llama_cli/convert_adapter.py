"""`gated-llama convert-adapter`: a PEFT adapter of the ungated source, for its gated model."""

from pathlib import Path
from typing import Annotated

import typer

from .console import facts, hide_bars, out


def register(app: typer.Typer):
    app.command(name="convert-adapter")(convert_adapter)


def convert_adapter(
    adapter: Annotated[str, typer.Argument(help="PEFT adapter that was trained on the source: Hub id or folder.")],
    gated: Annotated[str, typer.Argument(help="What `convert` made of the source: Hub id or folder.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write: new or empty.")],
):
    """Make an adapter of the source fit its gated model."""
    hide_bars()
    from gated_llama.retrofit import convert_adapter as convert

    report = convert(adapter, gated, output)
    scaled = ", ".join(f"{name} x {factor:g}" for name, factor in report.scaled.items())
    same = "gated + converted adapter = source + adapter, " + ("bit for bit" if report.exact else "to rounding")
    rows = [("adapter", f"{report.method}, {report.tensors} tensors"), ("scaled", scaled or "nothing"), ("then", same)]
    out.print(facts(f"{adapter} -> {report.output}", rows))
