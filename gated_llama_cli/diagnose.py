"""`gated-llama diagnose`: sinks, massive activations and gates of a model, as numbers and pictures."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .console import err, hide_bars, out
from .options import layer_list


def register(app: typer.Typer):
    app.command()(diagnose)


def diagnose(
    model: Annotated[str, typer.Argument(help="Hub id, folder or .gguf file of any causal language model.")],
    folder: Annotated[Path, typer.Option("--out", help="Folder to write: new or empty.")],
    against: Annotated[str | None, typer.Option(help="A second model, on the same token ids.")] = None,
    text: Annotated[
        Path | None, typer.Option(help="A .txt file, or .jsonl with a field 'text' a line; built in by default.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens in all, at most.")] = 4096,
    context: Annotated[int, typer.Option(help="Tokens in a row.")] = 512,
    bos: Annotated[str, typer.Option(help="What rows begin with: auto (the tokenizer's), none, or a token.")] = "auto",
    batch_size: Annotated[int, typer.Option(min=1, help="Rows in a forward pass.")] = 1,
    interventions: Annotated[bool, typer.Option(help="Gates reset, first tokens evicted, numbers rounded.")] = True,
    map_layers: Annotated[str | None, typer.Option(help="Layers whose maps are drawn, such as 0,5,11.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "file"], typer.Option(help="Dtype to load in.")] = "float32",
    attn: Annotated[Literal["sdpa", "eager", "flex_attention"], typer.Option(help="Attention backend.")] = "sdpa",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
):
    """Measure attention sinks, massive activations and gate scores; writes report.json, report.html and PNG files."""
    layers = layer_list(map_layers)
    hide_bars()
    from dataclasses import replace

    from gated_llama.convert.checkpoint import building, check_output
    from gated_llama.convert.loading import Loadable
    from gated_llama.diagnostics.corpus import build_corpus, read_texts
    from gated_llama.diagnostics.figures import new_figure
    from gated_llama.diagnostics.page import write_report
    from gated_llama.diagnostics.report import diagnose as measure

    folder = check_output(folder, model)
    new_figure(1, 1)  # a missing matplotlib is told before the work, not after
    texts, source = read_texts(text)
    names = [model, *([against] if against else [])]
    loadables = [Loadable.open(name, revision if name == model else None) for name in names]
    if not loadables[0].has_tokenizer:
        raise ValueError(f"{model} has no tokenizer, so no text can be given to it.")
    tokenizer = loadables[0].load_tokenizer()
    corpus = build_corpus(tokenizer, texts, source, tokens=tokens, context=context, bos=bos)
    reports = []
    for loadable in loadables:
        if int(corpus.ids.max()) >= loadable.config.get_text_config().vocab_size:
            raise ValueError(f"{loadable} has fewer embeddings than {model}'s tokenizer has ids: compare relatives.")
        with Steps(str(loadable)) as steps:
            loaded = loadable.load_model(dtype if dtype != "file" else loadable.stored_dtype, attn_implementation=attn)
            report = measure(
                loaded,
                tokenizer,
                corpus,
                name=str(loadable),
                batch_size=batch_size,
                interventions=interventions,
                map_layers=layers,
                progress=steps.update,
            )
        del loaded
        reports.append(report)
    report = replace(reports[0], against=reports[1] if against else None)
    with building(folder, 0) as unfinished:
        write_report(report, unfinished)
    show(report)
    out.print(f"Written: {escape(str(folder / 'report.html'))}, report.json and pictures.")


class Steps:
    """A progress bar per kind of work."""

    def __init__(self, title: str):
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
        self.title = escape(Path(title).name)
        self.tasks: dict[str, int] = {}

    def __enter__(self) -> "Steps":
        self.bar.start()
        return self

    def __exit__(self, *exception):
        self.bar.stop()

    def update(self, what: str, done: int, total: int):
        if what not in self.tasks:
            self.tasks[what] = self.bar.add_task(f"{self.title}: {what}", total=total)
        self.bar.update(self.tasks[what], completed=done)


def show(report):
    from gated_llama.diagnostics.figures import both, label
    from gated_llama.diagnostics.page import (
        divergence_line,
        intervention_rows,
        left_out_line,
        spike_rows,
        summary_rows,
    )

    print_table("Diagnosis", summary_rows(report))
    if parted := divergence_line(report):
        out.print(parted)
    for each in both(report):
        if each.spike_writers:
            print_table(f"Spike writers of {label(each)}", spike_rows(each))
        if each.interventions is not None:
            print_table(f"Interventions on {label(each)}", intervention_rows(each))
            if left_out := left_out_line(each):
                out.print(left_out, style="dim")


def print_table(title: str, rows: list[list[str]]):
    table = Table(title=escape(title), title_justify="left")
    for index, heading in enumerate(rows[0]):
        table.add_column(escape(heading), justify="right" if index else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*map(escape, row))
    out.print(table)
