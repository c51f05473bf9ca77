"""`gated-llama convert-adapter`: a LoRA adapter of the source, made to fit its gated conversion."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from .console import out


def register(app: typer.Typer):
    app.command(name="convert-adapter")(convert_adapter)


def convert_adapter(
    adapter: Annotated[Path, typer.Argument(help="Folder that PEFT wrote for the ungated source.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="What `convert` made of that source.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write: new or empty.")],
):
    """Scale a LoRA adapter of the source by what `convert` folded, so that it does the same on the gated model."""
    from gated_llama.retrofit.adapter_conversion import convert_adapter as scale

    report = scale(adapter, model, output)
    factors = ", ".join(f"{factor:g}" for factor in sorted(set(report.scaled.values())))
    done = f"{len(report.scaled)} of {report.tensors} tensors times {factors}" if report.scaled else "nothing to scale"
    out.print(escape(f"{adapter} -> {report.output}: {done}."), soft_wrap=True)
