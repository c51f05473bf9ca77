"""`gated-llama verify`: are two checkpoints the same model?"""

import json
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from .console import err, hide_bars, out


DTYPES = {
    "both": ["float32", "file"],
    "float32": ["float32"],
    "bfloat16": ["bfloat16"],
    "float16": ["float16"],
    "file": ["file"],
}


def register(app: typer.Typer):
    app.command()(verify)


def verify(
    source: Annotated[str, typer.Argument(help="Hub id, folder or .gguf file.")],
    result: Annotated[str, typer.Argument(help="The converted folder.")],
    dtype: Annotated[
        Literal["both", "float32", "bfloat16", "float16", "file"],
        typer.Option(help="Where to compare; both: in float32 and in the dtype that the result is stored in."),
    ] = "both",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in a row.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    text: Annotated[
        typer.FileText | None, typer.Option(encoding="utf-8", help="File whose text is used; built in by default.")
    ] = None,
    attn: Annotated[Literal["sdpa", "eager"], typer.Option(help="Attention backend of both models.")] = "sdpa",
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Accept this difference of the logits instead of none at all.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub source.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
):
    """Prove that a result computes what its source computes: exit code 0 if equal, 1 if not."""
    hide_bars()
    from gated_llama.convert.verify import verify_dtypes

    with err.status("loading") as status:
        reports = verify_dtypes(
            source,
            result,
            DTYPES[dtype],
            text=text.read() if text else None,
            tokens=tokens,
            batch=batch,
            attn_implementation=attn,
            revision=revision,
            progress=status.update,
        )
    if as_json:
        typer.echo(json.dumps(summary(reports, tolerance), ensure_ascii=False))
    else:
        show(reports)
    if not all(report.passes(tolerance) for report in reports):
        raise typer.Exit(1)


def summary(reports: list, tolerance: float | None) -> dict[str, Any]:
    """The report of the dtype that is furthest off, whether all pass, and every report under `runs`."""
    worst = max(reports, key=lambda report: (not report.passes(tolerance), report.max_abs_difference))
    equal = all(report.passes(tolerance) for report in reports)
    return {**worst.to_dict(), "equal": equal, "tolerance": tolerance, "runs": [run.to_dict() for run in reports]}


AGREEMENT = {
    True: "the result's tokenizer gives the same ids",
    False: "[red]the result's tokenizer gives other ids[/]",
    None: "no second tokenizer to compare with",
}


NOT_EQUAL = {  # policy -> why a result is not its source's equal, and what to look at
    "open": "open gates begin near the source, not at it",
    "normal": "random gates make another model of it until they are trained",
    "transplant": "a transplant is close to its source, not equal: transplant.json in the result says how close",
}


def show(reports: list):
    from gated_llama.diagnostics.divergence import place_name

    table = Table(title=escape(f"{reports[0].source} = {reports[0].result}?"), title_justify="left")
    for heading in ("dtype", "tokens", "bitwise equal", "max |difference|", "first diverging layer", "greedy text"):
        table.add_column(heading)
    for report in reports:
        place = report.first_diverging_layer
        table.add_row(
            report.dtype,
            str(report.tokens),
            "[green]yes" if report.bitwise else "[red]no",
            f"{report.max_abs_difference:.3g}",
            "none" if place is None else place_name(place),
            "equal" if report.greedy_equal else "[red]differs",
        )
    out.print(table)
    out.print(f"Token ids: {reports[0].ids}; {AGREEMENT[reports[0].ids_equal]}.")
    if reports[0].policy in NOT_EQUAL and not all(report.bitwise for report in reports):
        out.print(f"By design: {NOT_EQUAL[reports[0].policy]}.")
