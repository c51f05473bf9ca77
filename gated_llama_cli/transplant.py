"""`gated-llama convert --policy transplant`: an attention sink becomes gates."""

import shlex
from pathlib import Path

import typer
from rich.markup import escape

from .console import err, facts, out
from .diagnose import Steps, print_table


SHOWN_LINES = 10  # progress lines of one kind of work where stderr is no terminal


def run(source: str, output: Path, calibration: list[Path], others: dict, **options):
    """Transplants and shows the report. others: options of `convert` that differ from their defaults, refused here."""
    if others:
        raise typer.BadParameter(
            f"{', '.join(sorted(others))} cannot be chosen: a transplant writes sigmoid gates at G1 that multiply",
            param_hint="--policy transplant",
        )
    if not calibration:
        raise typer.BadParameter(
            "a transplant is fitted on text: name one or more .txt or .jsonl files with --calibration",
            param_hint="--policy transplant",
        )
    from gated_llama.retrofit.deliver import transplant_checkpoint

    with Steps(source) as steps:
        report = transplant_checkpoint(source, output, calibration, progress=told(steps), **options)
    show(report, source, output)


def told(steps: Steps):
    """Progress as a bar, or as some lines where stderr is no terminal."""

    def update(what: str, done: int, total: int):
        steps.update(what, done, total)
        if not err.is_terminal and done * SHOWN_LINES // total != (done - 1) * SHOWN_LINES // total:
            err.print(f"{what}: {done} of {total}")

    return update


def show(report, source: str, output: Path):
    measures, sink = report.measures, report.sink
    heads = sum(len(layer) for layer in sink.heads)
    before, after = measures["source"], measures["result"]
    rows = [["", "source", "result"]]
    rows.append(["reads first", escape(sink.first_token), "the text"])
    for name, key in (("first-token attention", "first_token_attention"), ("largest activation", "max_activation")):
        rows.append([name, f"{before[key]:,.4g}", f"{after[key]:,.4g}"])
    for result, floor in zip(measures["held_out"], measures["source_without_first_token"], strict=True):
        rows.append(
            [f"KL to source, {result['name']}", f"{floor['kl']:.3f} without {sink.first_token}", f"{result['kl']:.3f}"]
        )
        rows.append(
            [f"perplexity, {result['name']}", f"{result['source_perplexity']:.2f}", f"{result['perplexity']:.2f}"]
        )
    print_table("Sink transplant, on text that was kept back", rows)
    fitted = [r2 for layer in report.layers for r2 in layer.r2 if r2 is not None]
    quieted = ", ".join(f"{layer.layer}/{unit}" for layer in report.layers for unit in layer.quieted)
    rows = [
        ("heads with a transplanted sink", f"{sink.count} of {heads}; the others keep the score 1"),
        ("median R2 of 1 - a_0", f"{sorted(fitted)[len(fitted) // 2]:.2f}"),
        ("quieted units (layer/unit)", quieted or "none"),
        ("tokenizer", f"no longer begins with {sink.first_token}" if measures["first_token_dropped"] else "unchanged"),
    ]
    out.print(facts(f"{source} -> {output}", rows))
    command = shlex.join(["gated-llama", "diagnose", str(output), "--against", source, "--out", f"{output}-diagnosis"])
    out.print(f"Next: {escape(command)}", soft_wrap=True)
