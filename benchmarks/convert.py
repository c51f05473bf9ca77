"""
Streaming conversion of a synthetic sharded checkpoint: its time against `cp -r` of the same files, and its memory.

Each round copies the source with `cp -r` and converts it in a process of its own, in turn first and second; the ratio
is the median over rounds of (conversion / copy) within the round. Both read from a warm page cache and write to the
same file system, and nothing waits to be written when they start. Memory is the largest resident set of the converting
process, pages of mapped files included, above what it had after importing the package.

    python benchmarks/convert.py [--size 2.0] [--rounds 3] [--folder DIR] [--json]
"""

import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig


TIME_AIM, MEMORY_AIM = 2.5, 1.2
SHAPE = {
    "vocab_size": 64000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def write_source(folder: Path, size: float) -> int:
    """A Llama of about `size` GB in bfloat16, in shards of 500 MB; returns the size of its weights in bytes."""
    from gated_llama.convert.tensor_files import write_shards

    tensors = meta_tensors(LlamaConfig(**SHAPE, num_hidden_layers=1))
    layer = sum(tensor.nbytes for name, tensor in tensors.items() if ".layers." in name)
    rest = sum(tensor.nbytes for tensor in tensors.values()) - layer
    config = LlamaConfig(**SHAPE, num_hidden_layers=max(1, round((size * 1e9 - rest) / layer)), dtype="bfloat16")
    tensors = meta_tensors(config)
    noise = torch.randn(1 << 22).mul(0.02).bfloat16()

    def parts(name: str) -> Iterator[torch.Tensor]:
        left = tensors[name].numel()
        while left:
            yield noise[:left]
            left -= min(left, len(noise))

    write_shards(folder, tensors, "500MB", parts)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return sum(tensor.nbytes for tensor in tensors.values())


def meta_tensors(config: LlamaConfig) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return dict(model.state_dict())


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def convert(source: Path, output: Path, results: multiprocessing.Queue) -> None:
    """Body of the converting process: (seconds, bytes above the import)."""
    from gated_llama.convert import convert_checkpoint

    idle = peak_bytes()
    started = time.perf_counter()
    convert_checkpoint(source, output)
    results.put((time.perf_counter() - started, peak_bytes() - idle))


def run_conversion(source: Path, output: Path) -> tuple[float, int]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=convert, args=(source, output, results))
    process.start()
    process.join()
    shutil.rmtree(output, ignore_errors=True)
    if process.exitcode:
        raise SystemExit("The conversion failed.")
    return results.get()


def run_copy(source: Path, output: Path) -> float:
    started = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(output)], check=True)
    seconds = time.perf_counter() - started
    shutil.rmtree(output)
    return seconds


def measure(folder: Path, size: float, rounds: int) -> dict:
    source, output = folder / "source", folder / "result"
    source.mkdir()
    weights = write_source(source, size)
    run_copy(source, output)  # warms the page cache
    copies, conversions, peaks = [], [], []
    for index in range(rounds):
        for step in ("copy", "convert") if index % 2 else ("convert", "copy"):
            os.sync()
            if step == "copy":
                copies.append(run_copy(source, output))
            else:
                seconds, peak = run_conversion(source, output)
                conversions.append(seconds)
                peaks.append(peak)
    ratios = [conversion / copy for conversion, copy in zip(conversions, copies, strict=True)]
    return {
        "weights_gb": weights / 1e9,
        "rounds": rounds,
        "copy_seconds": statistics.median(copies),
        "convert_seconds": statistics.median(conversions),
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "peak_gb": max(peaks) / 1e9,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def show(found: dict) -> None:
    table = Table(title=f"Conversion of {found['weights_gb']:.2f} GB in bfloat16, {found['rounds']} rounds")
    for column in ("", "measured", "aim"):
        table.add_column(column)
    table.add_row("cp -r", f"{found['copy_seconds']:.2f} s", "")
    table.add_row("conversion", f"{found['convert_seconds']:.2f} s", "")
    low, high = found["ratio_range"]
    table.add_row("conversion / cp -r", f"{found['ratio']:.2f} ({low:.2f} to {high:.2f})", f"<= {TIME_AIM}")
    table.add_row("peak memory over the import", f"{found['peak_gb']:.2f} GB", f"<= {MEMORY_AIM} GB")
    Console().print(table)


def main(
    size: Annotated[float, typer.Option(help="GB of weights.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    folder: Annotated[Path | None, typer.Option(help="Where to work; cleaned up afterwards.")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Time and memory of the converter."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        found = measure(Path(work), size, rounds)
    print(json.dumps(found)) if as_json else show(found)


if __name__ == "__main__":
    typer.run(main)
