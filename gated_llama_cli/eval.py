"""`gated-llama eval`: lm-evaluation-harness on a model, gated or not, or on two side by side."""

from pathlib import Path
from typing import Annotated, Literal

import typer


EPILOG = (
    "All other options are those of `lm_eval run` and are handed on: --tasks, --limit, --batch_size, --use_cache ..."
)


def register(app: typer.Typer):
    app.command(
        name="eval", epilog=EPILOG, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
    )(evaluate)


def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, folder or .gguf file; comes first.")],
    against: Annotated[
        str | None, typer.Option(metavar="BASE", help="Compare with this model: same requests, same token ids.")
    ] = None,
    probes: Annotated[str, typer.Option(help="Measure along: gates, sink, or gates,sink.")] = "",
    data_root: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Folder with data sets under their Hub ids; repeatable.")
    ] = None,
    bos: Annotated[
        str,
        typer.Option(
            help="Beginning of requests: auto, none, always, or a token; with --against several, as auto,none."
        ),
    ] = "auto",
    noise_floor: Annotated[
        Literal["auto", "off", "float64", "float32", "bfloat16", "float16"],
        typer.Option(help="With --against: run the base again in this dtype and another batch size; auto: bfloat16."),
    ] = "auto",
    card: Annotated[bool, typer.Option("--card", help="Write the scores into the model card of the folder.")] = False,
):
    """Evaluate with lm-evaluation-harness, also against a base."""
    from gated_llama.evaluation.command import evaluate_command

    evaluate_command(
        model,
        context.args,
        against=against,
        probes=probes,
        data_roots=[str(root) for root in data_root or []],
        bos=bos,
        noise_floor=noise_floor,
        card=card,
        show=typer.echo,
    )
