"""`gated-llama verify`: are two checkpoints the same model?"""

import json
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from .console import Listing, err, hide_bars, out


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
    """Prove that a result computes what its source does. Exit code 0 if equal, 1 if not."""
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
    rows = [
        (
            report.dtype,
            str(report.tokens),
            Text("yes", "green") if report.bitwise else Text("no", "red"),
            f"{report.max_abs_difference:.3g}",
            "equal" if report.greedy_equal else Text("differs", "red"),
        )
        for report in reports
    ]
    headings = ("dtype", "tokens", "bitwise equal", "max |difference|", "greedy text")
    out.print(Listing(f"{reports[0].source} = {reports[0].result}?", rows, headings))
    for line in first_differences(reports):
        out.print(line)
    out.print(f"Token ids: {reports[0].ids}; {AGREEMENT[reports[0].ids_equal]}.")
    if not all(report.bitwise for report in reports):
        for reason in reasons(reports[0]):
            out.print(f"By design: {reason}.")


def reasons(report) -> list[str]:
    """Why such a result is not its source's equal, if it is not meant to be."""
    found = [NOT_EQUAL[report.policy]] if report.policy in NOT_EQUAL else []
    if report.quantiser:
        found.append(f"weights quantised by {report.quantiser} are near the source's, not equal: see --tolerance")
    return found


def first_differences(reports: list) -> list[str]:
    """A line for each place where the models part, with its dtypes where there are several places."""
    from gated_llama.diagnostics.divergence import place_name

    dtypes: dict[str, list[str]] = {}
    for report in reports:
        place = report.first_diverging_layer
        dtypes.setdefault("none" if place is None else place_name(place), []).append(report.dtype)
    if len(dtypes) == 1:
        return [f"first difference: {place}" for place in dtypes]
    return [f"first difference: {place} ({', '.join(names)})" for place, names in dtypes.items()]
