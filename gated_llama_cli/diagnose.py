"""`gated-llama diagnose`: sinks, massive activations and gates of a model, as numbers and pictures."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from .console import Steps, err, hide_bars, out, print_table
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
    attn: Annotated[
        Literal["auto", "sdpa", "eager", "flex_attention"],
        typer.Option(help="Attention backend; auto is what Transformers chooses for the model."),
    ] = "auto",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
):
    """Measure attention sinks, massive activations and gates. Writes report.json, report.html and PNG files."""
    layers = layer_list(map_layers)
    hide_bars()
    from dataclasses import replace

    from gated_llama.convert.output_folder import building, check_output
    from gated_llama.convert.verify import PROOF_TEXT
    from gated_llama.diagnostics.corpus import build_corpus, read_texts
    from gated_llama.diagnostics.figures import new_figure
    from gated_llama.diagnostics.page import write_report
    from gated_llama.diagnostics.report import diagnose as measure

    folder = check_output(folder, model)
    new_figure(1, 1)  # a missing matplotlib is told before the work, not after
    texts, source = read_texts(text)
    loadables = opened(model, revision, against)
    tokenizer = tokenizer_of(loadables[0])
    corpus = build_corpus(tokenizer, texts, source, tokens=tokens, context=context, bos=bos)
    backend = {} if attn == "auto" else {"attn_implementation": attn}
    for loadable in loadables:
        check_reading(loadable, loadables[0], tokenizer, f"{PROOF_TEXT}\n{''.join(texts[:8])}", corpus)
    reports = []
    for loadable in loadables:
        with Steps(str(loadable)) as steps:
            report = measure(
                loadable.load_model(dtype if dtype != "file" else loadable.stored_dtype, **backend),
                tokenizer,
                corpus,
                name=str(loadable),
                batch_size=batch_size,
                interventions=interventions,
                map_layers=layers,
                progress=steps.update,
            )
        reports.append(report)
    report = replace(reports[0], against=reports[1] if against else None)
    with building(folder, 0) as unfinished:
        write_report(report, unfinished)
    show(report)
    out.print(f"Written: {escape(str(folder / 'report.html'))}, report.json and pictures.")


def opened(model: str, revision: str | None, against: str | None) -> list:
    from gated_llama.convert.loading import Loadable

    named = [(model, revision), *([(against, None)] if against else [])]
    return [Loadable.open(name, given, quantised=True) for name, given in named]


def tokenizer_of(loadable):
    if not loadable.has_tokenizer:
        raise ValueError(f"{loadable} has no tokenizer, so no text can be given to it.")
    return loadable.load_tokenizer()


def check_reading(loadable, first, tokenizer, text: str, corpus):
    """ValueError for a model that reads other tokens than the first; a notice for rows beyond its positions."""
    config = loadable.config.get_text_config()
    if int(corpus.ids.max()) >= config.vocab_size:
        raise ValueError(f"{loadable} has fewer embeddings than {first}'s tokenizer has ids: compare relatives.")
    sample = text[:4000]
    if loadable is not first and loadable.has_tokenizer:
        other = loadable.load_tokenizer().encode(sample, add_special_tokens=False)
        if other != tokenizer.encode(sample, add_special_tokens=False):
            raise ValueError(
                f"{loadable} reads the text as other tokens than {first}: compare models with one tokenizer."
            )
    limit, context = getattr(config, "max_position_embeddings", None), corpus.ids.shape[1]
    if limit and context > limit:
        err.print(escape(f"Note: rows of {context} tokens go beyond the {limit} positions of {loadable}."))


def show(report):
    from gated_llama.diagnostics.figures import both, label
    from gated_llama.diagnostics.page import (
        divergence_line,
        intervention_rows,
        left_out_line,
        no_spikes,
        spike_rows,
        summary_rows,
    )

    print_table("Diagnosis", summary_rows(report))
    if parted := divergence_line(report):
        out.print(parted)
    for each in both(report):
        if not each.max_activation["unit_layers"]:
            out.print(f"Spike writers of {escape(label(each))}: {no_spikes(each)}", style="dim")
        if each.spike_writers:
            print_table(f"Spike writers of {label(each)}", spike_rows(each))
        if each.interventions is not None:
            print_table(f"Interventions on {label(each)}", intervention_rows(each))
            if left_out := left_out_line(each):
                out.print(left_out, style="dim")
