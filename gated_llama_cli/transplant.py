"""`gated-llama convert --policy transplant`: an attention sink becomes gates."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from .console import Steps, err, facts, number, out, print_table


# Below it, a small perplexity says little about answers.
SAFE_TOKENS = 20_000
SHOWN_LINES = 10  # progress lines of one kind of work where stderr is no terminal

Calibration = Annotated[
    list[Path] | None,
    typer.Option(help="Policy transplant: .txt or .jsonl (also .gz) to fit on; can be repeated."),
]
Tokens = Annotated[int, typer.Option(help="Policy transplant: calibration tokens in all.")]
Context = Annotated[int, typer.Option(help="Policy transplant: tokens in a row.")]
FirstToken = Annotated[str, typer.Option("--bos", help="Policy transplant: the first token that carries the sink.")]

# Options of `convert` that are this policy's own, and those of the others that it shares.
OPTIONS = ("calibration", "tokens", "context", "bos")
SHARED = ("source", "output", "granularity", "dtype", "max_shard_size", "revision")
# Values that say what a transplant writes anyway.
IMPLIED = {
    "position": ("sdpa_output", "G1"),
    "operation": ("multiply",),
    "activation": ("sigmoid",),
    "gate_input": ("hidden_states",),
    "gate_bias": (True,),
}


def flags(ctx: typer.Context, names) -> str:
    """Those of the named options that were given, as they are written."""
    given = (name for name in sorted(names) if ctx.get_parameter_source(name).name == "COMMANDLINE")
    return ", ".join(f"--{'no-' if ctx.params[name] is False else ''}{name.replace('_', '-')}" for name in given)


def refuse_options(ctx: typer.Context):
    """For the other policies."""
    if given := flags(ctx, OPTIONS):
        raise typer.BadParameter("is for --policy transplant", param_hint=given)


def run(ctx: typer.Context):
    """Transplants and shows the report."""
    implied = {name for name, values in IMPLIED.items() if ctx.params[name] in values}
    if others := flags(ctx, ctx.params.keys() - {*OPTIONS, *SHARED, *implied, "policy"}):
        raise typer.BadParameter(
            "is not for --policy transplant: its gates are sigmoids at G1 that multiply, with biases, in all layers; "
            "they are fitted, not drawn",
            param_hint=others,
        )
    if not ctx.params["calibration"]:
        raise typer.BadParameter(
            "a transplant is fitted on text: name one or more .txt or .jsonl files with --calibration",
            param_hint="--policy transplant",
        )
    from gated_llama.retrofit.deliver import transplant_checkpoint

    options = {name: ctx.params[name] for name in (*OPTIONS, *SHARED)}
    with Steps(options["source"]) as steps:
        report = transplant_checkpoint(**options, progress=told(steps))
    show(report, options["source"], options["output"], options["tokens"])


def told(steps: Steps):
    """Progress as a bar, or as some lines where stderr is no terminal."""

    def update(what: str, done: int, total: int):
        steps.update(what, done, total)
        if not err.is_terminal and done * SHOWN_LINES // total != (done - 1) * SHOWN_LINES // total:
            err.print(f"{what}: {done} of {total}")

    return update


def show(report, source: str, output: Path, asked: int):
    """asked: for calibration tokens."""
    from gated_llama.hub import heads_at_identity

    measures, sink = report.measures, report.sink
    heads = sum(len(layer) for layer in sink.heads)
    before, after = measures["source"], measures["result"]
    rows = [["", "source", "result"]]
    rows.append(["reads first", sink.first_token, "the text"])
    for name, key in (
        ("first-token attention", "first_token_attention"),
        ("attention on the most attended key", "most_attended"),
        ("largest activation", "max_activation"),
        ("mean over layers of the largest", "m_act"),
    ):
        if None not in (before[key], after[key]):  # rows may be too short for a most attended key
            rows.append([name, number(before[key]), number(after[key])])
    for result, floor in zip(measures["held_out"], measures["source_without_first_token"], strict=True):
        rows.append(
            [f"KL to source, {result['name']}", f"{floor['kl']:.3f} without {sink.first_token}", f"{result['kl']:.3f}"]
        )
        rows.append(
            [f"perplexity, {result['name']}", f"{result['source_perplexity']:.2f}", f"{result['perplexity']:.2f}"]
        )
    print_table("Sink transplant, on text that was kept back", rows)
    width = len(sink.heads[0])
    left = {fit.layer: [head for head in range(width) if head not in fit.heads] for fit in report.layers}
    fitted = [r2 for layer in report.layers for r2 in layer.r2 if r2 is not None]
    quieted = ", ".join(f"{layer.layer}/{unit}" for layer in report.layers for unit in layer.quieted)
    rows = [
        ("calibration", f"{report.calibration_tokens:,} tokens of {asked:,} asked for"),
        ("heads with a transplanted sink", f"{sink.count} of {heads}"),
        ("identity heads (layer/heads)", heads_at_identity(left, width) or "none"),
        ("median R2 of the gates, on the calibration", f"{sorted(fitted)[len(fitted) // 2]:.2f}" if fitted else "-"),
        ("quieted units (layer/unit)", quieted or "none"),
        ("tokenizer", f"no longer begins with {sink.first_token}" if measures["first_token_dropped"] else "unchanged"),
    ]
    out.print(facts(f"{source} -> {output}", rows))
    if report.calibration_tokens < SAFE_TOKENS:
        err.print(
            f"[bold yellow]Warning:[/] {report.calibration_tokens:,} tokens of calibration are few: the perplexity of "
            f"plain text can stay almost as it was while answers become wrong. Give {SAFE_TOKENS:,} or more, "
            "conversations among them, and ask the result something before you use it.",
            soft_wrap=True,
        )
    if report.calibration_tokens < asked / 2:
        err.print(
            f"[bold yellow]Warning:[/] the texts gave {report.calibration_tokens:,} of {asked:,} tokens; "
            "with few, gates fit them well and other text badly.",
            soft_wrap=True,
        )
    # Not against the source: both would read what the result's tokenizer puts first, and the source needs its token.
    command = shlex.join(["gated-llama", "diagnose", str(output), "--bos", "none", "--out", f"{output}-diagnosis"])
    out.print(f"Next: {escape(command)}", soft_wrap=True)
