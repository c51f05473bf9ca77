"""A transplant from checkpoint to checkpoint: calibration, measurement on held-out text, files."""

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from ..convert import convert_checkpoint
from ..convert.loading import Loadable
from ..convert.output_folder import building, check_output, check_writable
from ..convert.tensor_files import check_finite, is_finite, plan_shards, read_json, to_json, write_json
from ..convert.tokenizer import GENERATION_CONFIG, carry_files, load_tokenizer
from ..diagnostics import Activations, FirstTokenAttention
from ..diagnostics.corpus import read_texts, with_first
from ..hub import model_card
from ..modeling_gated import GatedLlamaForCausalLM
from .calibration import calibration_rows, check_rows, sink_token
from .fidelity import Fidelity, fidelity
from .first_token import drop_first_token
from .surgery import Progress, TransplantReport, transplant_rows
from .walk import WalkOptions


REPORT = "transplant.json"
HELD_OUT_ROWS = 2  # of each calibration file, behind those that the fits see


def transplant_checkpoint(
    source: str | Path,
    output: str | Path,
    calibration: Sequence[str | Path],
    *,
    tokens: int = 32768,
    context: int = 511,
    bos: str = "auto",
    granularity: str = "headwise",
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    revision: str | None = None,
    options: WalkOptions | None = None,
    progress: Progress = lambda what, done, total: None,
) -> TransplantReport:
    """
    Converts a checkpoint and replaces its attention sink by gates; see `transplant_rows`.

    Args:
        source, output, revision, max_shard_size: as in `convert_checkpoint`.
        calibration: .txt or .jsonl files (also .gz); each gives the same number of rows, or what it has. Text of every
            kind that matters should be among them: what they lack is matched worse.
        tokens, context: calibration tokens in all, at most but for one row of each file, and in a row.
        bos: the first token on which the sink sits: "auto" (the tokenizer's) or a token.
        dtype: to write in; `None` keeps the source's. Fits are in float32.

    Returns the report, which is also written to transplant.json in the output. Raises ValueError for bad input;
    nothing is left at `output` then, or when interrupted.
    """
    start, output = time.monotonic(), check_output(Path(output), source)
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype={dtype!r} is not supported; choose float32, bfloat16 or float16.")
    plan_shards({}, max_shard_size)  # a size that is none is told before the fits
    loadable = Loadable.open(source, revision)
    if not loadable.has_tokenizer:
        raise ValueError(f"{source} has no tokenizer, so no calibration text can be given to it.")
    with tempfile.TemporaryDirectory() as scratch:
        files = Path(scratch) / "tokenizer"
        files.mkdir()
        carry_files(loadable.checkpoint, files)
        tokenizer = load_tokenizer(files)
        first = sink_token(tokenizer, bos)
        first_token = tokenizer.convert_ids_to_tokens(first)
        rows, held_out = _rows(tokenizer, calibration, tokens, context)
        drop_first_token(files, first)  # where that is impossible, it is told before the fits
        plain = Path(scratch) / "plain"
        converted = convert_checkpoint(source, plain, position=None, dtype="float32", revision=revision)
        model = GatedLlamaForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
        written = dtype or loadable.stored_dtype
        check_writable(output, sum(p.numel() for p in model.parameters()) * getattr(torch, written).itemsize)
        _check_reading(model, held_out, first)
        gated, report = transplant_rows(
            model, rows, first, first_token=first_token, granularity=granularity, options=options, progress=progress
        )
        _round(gated, written)
        progress("measuring the result", 0, 1)
        report.measures.update(_measures(model, gated, held_out, first))
        progress("measuring the result", 1, 1)
        gated = gated.to(getattr(torch, written))
        with building(output, sum(tensor.nbytes for tensor in gated.parameters())) as folder:
            report.measures["first_token_dropped"] = _write(gated, plain, folder, first, max_shard_size)
            _write_card(gated, folder, output.name, loadable)
            origin = {"source": loadable.checkpoint.hub_id or Path(source).name}
            origin |= {"source_model_type": converted.source_model_type}
            _write_report(folder, report, origin | {"seconds": round(time.monotonic() - start, 1)})
    return report


def _round(gated: nn.Module, dtype: str) -> None:
    """
    Rounds the weights, in float32, to what `dtype` holds; ValueError where that overflows.

    Not with `to`, which would round rotary frequencies too, and these are not in the file.
    """
    for name, parameter in gated.named_parameters():
        check_finite(name, parameter.data, "the transplant")
        parameter.data = parameter.data.to(getattr(torch, dtype)).float()
        if not is_finite(parameter.data):
            raise ValueError(f"{name!r} passes the largest {dtype}: write bfloat16 or float32.")


def _rows(tokenizer, calibration: Sequence, tokens: int, context: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Rows of all files for the fits, and by file those that are kept back."""
    if not calibration:
        raise ValueError("A transplant needs calibration text: name one or more .txt or .jsonl files.")
    check_rows(tokens, context)
    kept, fitted = {}, []
    for path in calibration:
        texts, name = read_texts(path)
        share = max(1, tokens // context // len(calibration)) + HELD_OUT_ROWS
        rows = calibration_rows(tokenizer, texts, name, tokens=share * context, context=context)
        if len(rows) < 1 + HELD_OUT_ROWS:
            raise ValueError(
                f"{path} gives {len(rows)} rows of {context} tokens and at least {1 + HELD_OUT_ROWS} are needed: give "
                "more text or a smaller --context."
            )
        fitted.append(rows[:-HELD_OUT_ROWS])
        kept[str(path)] = rows[-HELD_OUT_ROWS:]
    return torch.cat(fitted), kept


def _check_reading(source: nn.Module, held_out: dict[str, torch.Tensor], first: int) -> None:
    """ValueError where the source is far worse than guessing: its tokens mean something else to it."""
    for name, rows in held_out.items():
        perplexity = fidelity(source, source, rows[:1], source_first=first, model_first=first).source_perplexity
        if perplexity > 10 * source.config.vocab_size:
            raise ValueError(
                f"The source has a perplexity of {perplexity:,.0f} on {name}, far above that of guessing "
                f"({source.config.vocab_size:,}): its tokenizer is another model's, or its weights are damaged."
            )


def _measures(source: nn.Module, gated: nn.Module, held_out: dict[str, torch.Tensor], first: int) -> dict:
    """The result on text that the fits did not see, the source's own noise floor, and sinks before and after."""
    compared: list[Fidelity] = []
    floor: list[Fidelity] = []
    for name, rows in zip(_short_names(list(held_out)), held_out.values(), strict=True):
        compared.append(fidelity(gated, source, rows, source_first=first, name=name))
        floor.append(fidelity(source, source, rows, source_first=first, name=name))
    rows = torch.cat(list(held_out.values()))
    return {
        "source": sink_measures(source, rows, first),
        "result": sink_measures(gated, rows, None),
        "held_out": [asdict(each) for each in compared],
        "source_without_first_token": [asdict(each) for each in floor],
    }


def _short_names(paths: Sequence[str]) -> list[str]:
    """Names of files without their suffix, or the paths where two have the same name."""
    stems = [Path(path).stem for path in paths]
    return stems if len(set(stems)) == len(stems) else list(paths)


@torch.no_grad()
def sink_measures(model: nn.Module, rows: torch.Tensor, first: int | None) -> dict:
    """
    First-token attention, the most attended key and the largest activations on rows of token ids, each after `first`
    if given; m_act is the mean over layers of the largest.
    """
    with FirstTokenAttention(model) as attention, Activations(model) as activations:
        for row in rows:
            model.base_model(with_first(row[None], first).to(model.device), use_cache=False)
    attended, spikes = attention.result(), activations.result()
    return {
        "first_token_attention": attended.mean,
        "first_token_attention_per_layer": attended.per_layer,
        "most_attended": attended.most_attended,
        "most_attended_keys": attended.most_attended_keys,
        "max_activation": spikes.max,
        "m_act": spikes.m_act,
        "max_activation_layer": spikes.max_layer,
        "max_activation_per_layer": spikes.per_layer,
    }


def _write_report(folder: Path, report: TransplantReport, origin: dict) -> None:
    text = to_json({**origin, **report.to_dict()}, indent=1)
    (folder / REPORT).write_text(f"{text}\n", encoding="utf-8")


def _write_card(gated: nn.Module, folder: Path, name: str, source: Loadable) -> None:
    origin = source.checkpoint
    card = model_card(gated.config, name=name, source_folder=origin.folder, base_model=origin.hub_id)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _write(gated: nn.Module, plain: Path, folder: Path, first: int, max_shard_size: int | str) -> bool:
    """Weights, code, tokenizer and generation settings; whether the first token was dropped from them."""
    for path in plain.iterdir():
        if not path.name.startswith("model") and path.name not in ("config.json", "README.md"):
            shutil.copytree(path, folder / path.name) if path.is_dir() else shutil.copyfile(path, folder / path.name)
    dropped = drop_first_token(folder, first)
    if gated.config.bos_token_id == first:
        gated.config.bos_token_id = None
    gated.save_pretrained(folder, max_shard_size=max_shard_size)
    path = folder / GENERATION_CONFIG
    # save_pretrained writes what the config says; where the source has settings of its own, those are kept.
    kept = next((place for place in (plain / GENERATION_CONFIG, path) if place.exists()), None)
    if kept is not None:
        settings = read_json(kept)
        if settings.get("bos_token_id") == first:
            del settings["bos_token_id"]
        write_json(path, settings)
    return dropped
