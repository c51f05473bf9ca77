"""`gated-llama export`: a gated checkpoint as an architecture that engines serve."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from .console import byte_progress, facts, hide_bars, out
from .options import Dtype


# `gated_llama.convert.targets.TARGET_NAMES`, whose import would be slow; a test compares them.
Target = Literal["qwen3_5_text", "qwen3_next", "afmoe", "step3p5", "qwen3", "llama", "paper", "gguf"]


def register(app: typer.Typer):
    app.command()(export)


def export(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a gated_llama checkpoint.")],
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder to write, new or empty; for gguf a new *.gguf too.")
    ],
    target: Annotated[Target, typer.Option(help="What to write; the card in OUT says who serves it.")],
    dtype: Annotated[Dtype | None, typer.Option(help="Dtype to write; the model's by default.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file.")] = "5GB",
    verify: Annotated[
        bool, typer.Option(help="Compare logits before OUT appears; takes memory for the model in float32.")
    ] = True,
):
    """Write a gated model in a format that engines serve. vLLM, SGLang, llama.cpp and MLX-LM need no custom code."""
    hide_bars()
    from gated_llama.convert.export import export_checkpoint

    with byte_progress() as bar:
        task = bar.add_task("exporting", total=None, tensor="")

        def advance(done: int, total: int, name: str):
            step = {"description": "comparing logits", "tensor": ""} if verify and done == total else {"tensor": name}
            bar.update(task, completed=done, total=total, **step)

        report = export_checkpoint(
            model,
            output,
            target=target,
            dtype=dtype,
            max_shard_size=max_shard_size,
            verify=verify,
            progress=advance,
        )
    show(report)


def show(report):
    parity = report.parity
    rows = [
        (
            "written",
            f"{report.tensors_written} tensors, {report.bytes_written / 1e6:,.1f} MB, {report.shards} file(s), "
            f"{report.dtype}",
        ),
        *(("rewritten", sentence) for sentence in report.rewritten),
        ("never quantise", ", ".join(report.never_quantise) or "no limit"),
        ("tokenizer", report.tokenizer_class or "none in the source"),
        (
            "logits",
            f"differ by {parity.usual_difference:.2g}, at the worst token by {parity.max_abs_difference:.2g} (allowed "
            f"{parity.tolerance:.2g}, largest logit {parity.largest_logit:.3g}), KL {parity.kl:.2g}"
            if parity
            else "not compared",
        ),
        *([("proof", report.proof)] if report.proof else []),
        *(("note", note) for note in report.notes),
    ]
    out.print(facts(f"{report.source} -> {report.output} ({report.target})", rows))
