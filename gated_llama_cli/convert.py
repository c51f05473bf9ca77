"""`gated-llama convert`: a checkpoint becomes a gated one."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from . import transplant
from .console import byte_progress, facts, hide_bars, out
from .options import Activation, Dtype, GateInput, Granularity, Layout, Operation, Policy, Position, layer_list


SMOLLM3 = "smollm3: with rotary positions in every layer only, which SmolLM3-3B has not."


def register(app: typer.Typer):
    app.command()(convert)


def convert(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(help=f"Hub id, folder or .gguf file of a checkpoint. {SMOLLM3}")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write: new or empty.")],
    position: Annotated[
        Position, typer.Option(case_sensitive=False, help="What is gated (G1 is sdpa_output).")
    ] = "sdpa_output",
    granularity: Annotated[Granularity, typer.Option(help="One score per head, or per coordinate.")] = "headwise",
    activation: Annotated[Activation, typer.Option(help="From logits to scores.")] = "sigmoid",
    operation: Annotated[Operation, typer.Option(help="How scores meet the gated tensor.")] = "multiply",
    head_shared: Annotated[bool, typer.Option("--head-shared", help="Average the logits over heads.")] = False,
    gate_input: Annotated[GateInput, typer.Option(help="What the scores depend on.")] = "hidden_states",
    gate_bias: Annotated[
        bool | None, typer.Option(help="Bias of the gate projection; by default as the policy needs.")
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Gated layers, such as 0-3,8; all by default.")] = None,
    policy: Annotated[
        Policy,
        typer.Option(
            help="identity: provably the same model; open: scores near 1; normal: random gates; transplant: the sink "
            "becomes gates."
        ),
    ] = "identity",
    bias: Annotated[float | None, typer.Option(help="Start of the gate's bias, for policy open.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of policy normal.")] = 0,
    calibration: transplant.Calibration = None,
    tokens: transplant.Tokens = 32768,
    context: transplant.Context = 511,
    bos: transplant.FirstToken = "auto",
    layout: Annotated[
        Layout | None, typer.Option(help="How a source that has gates stores them, if not as its format says.")
    ] = None,
    gate_scale: Annotated[
        float, typer.Option(help="c of a source whose own gate is c * sigmoid; a power of two, folded into o_proj.")
    ] = 1.0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the original tokenizer, for a .gguf file.", metavar="FOLDER")
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Dtype to write; the source's by default.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file.")] = "5GB",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub source.")] = None,
):
    """Give a checkpoint a gate, or take over the one it has."""
    hide_bars()
    options = {name: value for name, value in ctx.params.items() if name not in transplant.OPTIONS}
    options["layers"] = layer_list(layers)
    if policy == "transplant":
        transplant.run(ctx)
        return
    transplant.refuse_options(ctx)
    from gated_llama.convert import convert_checkpoint

    with byte_progress() as bar:
        task = bar.add_task("converting", total=None, tensor="")
        report = convert_checkpoint(
            **options,
            progress=lambda done, total, name: bar.update(task, completed=done, total=total, tensor=name),
        )
    show(report)


def next_step(report) -> str:
    """A command to paste into a shell."""
    imported = "layout" in (report.config.gate_retrofit or {})
    if imported and report.source_model_type not in ("qwen3_next", "qwen3_5_text"):  # no class loads it as it is
        return shlex.join(["gated-llama", "inspect", str(report.output)])
    return shlex.join(["gated-llama", "verify", report.source, str(report.output)])


def show(report):
    rows = [
        ("read", f"{report.tensors_read} tensors of type {report.source_model_type}"),
        (
            "written",
            f"{report.tensors_written} tensors, {report.bytes_written / 1e6:,.1f} MB, {report.shards} file(s)",
        ),
        ("folded", ", ".join(f"{name} x {factor:g}" for name, factor in report.folded.items()) or "nothing"),
        ("tokenizer", report.tokenizer_class or "none in the source"),
        *(("note", note) for note in report.notes),
    ]
    out.print(facts(f"{report.source} -> {report.output}", rows))
    out.print(f"Next: {escape(next_step(report))}", soft_wrap=True)
