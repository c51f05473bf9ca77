"""
What a retrofit did to a model, on held-out text: evaluate.py WORK DATA OUT.json MODEL [MODEL ...]

DATA holds <domain>/validation.jsonl[.gz] and, for WikiText-2, wikitext/test.jsonl; WORK is what prepare.py made. MODEL
is a folder, known by the last two parts of its path, or "source". Results are kept in OUT.json, model by model; those
that are there already stay. The numbers below are those of the defaults; for prepare.py --tiny: --first "<s>"
--context 63.

For each model: KL(source || model) and perplexity over the source's on six rows of each domain, the source reading
<|endoftext|> first, the model too unless its record says that a transplant took that token away; first-token
attention, the key that is attended to most, and the largest activations, on three rows of literature and three of
WikiText-2; on each domain's first row the KL as it is and with all gates reset to where they change nothing; against
its own, perplexities with rounded numbers, on the same rows, and with a sliding window, on 4,096 tokens of literature.
Everything is in float32.
"""

import argparse
import gzip
import itertools
import json
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer

from gated_llama import GatedLlamaForCausalLM, gate_override, neutral_scores
from gated_llama.diagnostics import (
    FirstTokenAttention,
    measure_interventions,
    quantisation_interventions,
    streaming_interventions,
)
from gated_llama.diagnostics.corpus import first_token, with_first
from gated_llama.retrofit.deliver import sink_measures
from gated_llama.retrofit.fidelity import fidelity


DOMAINS = ("literature_en", "law_en", "wikitext", "math_en", "code_python", "literature_zh")


def documents(folder: Path):
    split = "test" if folder.name == "wikitext" else "validation"
    for name in (f"{split}.jsonl", f"{split}.jsonl.gz"):
        if (folder / name).exists():
            opener = gzip.open if name.endswith("gz") else open
            with opener(folder / name, "rt", encoding="utf-8") as file:
                for line in file:
                    content = json.loads(line)
                    yield content.get("text") or content["page"]
            return
    raise SystemExit(f"{folder} has no held-out text.")


def rows_of(tokenizer, folder: Path, rows: int, context: int) -> torch.Tensor:
    """The beginnings of the first documents that fill a row, two rows of each at most."""
    found = []
    for text in documents(folder):
        ids = tokenizer.encode(text, add_special_tokens=False)
        found += [ids[i * context : (i + 1) * context] for i in range(min(2, len(ids) // context))]
        if len(found) >= rows:
            break
    if len(found) < rows:
        raise SystemExit(f"{folder} gives {len(found)} rows of {context} tokens, fewer than {rows}.")
    return torch.tensor(found[:rows])


def load(work: Path, name: str) -> GatedLlamaForCausalLM:
    folder = work / "models" / "plain" if name == "source" else Path(name)
    return GatedLlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def first_of(model, first: int) -> int | None:
    """The token that the model reads before each row: the source's, unless a transplant took it away."""
    return None if (model.config.gate_retrofit or {}).get("policy") == "transplant" else first


def compare(model, source, texts: dict[str, torch.Tensor], first: int, own: int | None) -> dict:
    results = {}
    for domain, rows in texts.items():
        results[domain] = fidelity(model, source, rows, source_first=first, model_first=own, name=domain).to_dict()
        print(
            f"  {domain}: KL {results[domain]['kl']:.4f}, perplexity ratio {results[domain]['perplexity_ratio']:.4f}"
        )
    return results


def gates(model, source, texts: dict[str, torch.Tensor], first: int) -> dict:
    """KL and perplexity on each domain's first row with the gates as they are, and reset."""
    print("  gates as they are")
    part, own = {domain: rows[:1] for domain, rows in texts.items()}, first_of(model, first)
    kept = compare(model, source, part, first, own)
    print("  gates reset")
    with gate_override(model, neutral_scores(model.config)):
        return {"kept": kept, "reset": compare(model, source, part, first, own)}


@torch.no_grad()
def robustness(model, texts: dict[str, torch.Tensor], stream: torch.Tensor, own: int | None) -> dict:
    """Perplexity under a window and under rounding, over the model's own."""
    rounding = [with_first(rows[:1], own) for rows in texts.values()]
    outcomes = measure_interventions(model, rounding, quantisation_interventions(model))
    outcomes += measure_interventions(model, [with_first(stream, own)], streaming_interventions(model, 256))
    return {outcome.name: outcome.to_dict() for outcome in outcomes if outcome.name != "unchanged"}


@torch.no_grad()
def most_attended(model: GatedLlamaForCausalLM, rows: torch.Tensor, own: int | None) -> list[dict]:
    """
    Of each row, the key of its first half, counted from 1, that queries of the second half attend to most.

    A sink that is pressed off the first token may only move to the next one, where first-token attention misses it.
    """
    found = []
    for row in with_first(rows, own):
        with FirstTokenAttention(model, sink_window=len(row)) as probe:
            model(row[None], use_cache=False)
        result = probe.result()
        found.append({"key": result.most_attended_keys[0]["key"], "share": result.most_attended})
    return found


def evaluate(name: str, work: Path, texts: dict, stream: torch.Tensor, first: int) -> dict:
    start = time.perf_counter()
    source, model = load(work, "source"), load(work, name)
    own = first_of(model, first)
    result = {"reads_first": own is not None, "domains": compare(model, source, texts, first, own)}
    if name == "source":
        print("  without its first token")
        result["without_first"] = compare(model, source, texts, first, None)
    sample = torch.cat([texts["literature_en"][:3], texts["wikitext"][:3]])
    result["sink"] = sink_measures(model, sample, own)
    result["most_attended"] = most_attended(model, sample, own)
    if model.config.gate_position is not None:
        result["gates"] = gates(model, source, texts, first)
    result["robustness"] = robustness(model, texts, stream, own)
    return result | {"seconds": round(time.perf_counter() - start, 1)}


def arguments(description: str) -> argparse.ArgumentParser:
    """What exact_gates.py reads too."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("work", "data", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--first", default="<|endoftext|>", help="the token before each of the source's rows")
    parser.add_argument("--context", type=int, default=511, help="tokens of a row")
    return parser


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rows", type=int, default=6, help="of each domain")
    parser.add_argument("--stream", type=int, default=4096, help="tokens of literature under a window")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.work / "models" / "plain")
    first = first_token(tokenizer, options.first)
    texts = {domain: rows_of(tokenizer, options.data / domain, options.rows, options.context) for domain in DOMAINS}
    ids = itertools.chain.from_iterable(
        tokenizer.encode(text, add_special_tokens=False) for text in documents(options.data / "literature_en")
    )
    stream = torch.tensor(list(itertools.islice(ids, options.stream)))[None]
    found = json.loads(options.out.read_text()) if options.out.exists() else {"models": {}}
    asked = {name: getattr(options, name) for name in ("first", "context", "rows", "stream")}
    if found.setdefault("options", asked) != asked:
        raise SystemExit(f"{options.out} holds results of {found['options']}: name another file for {asked}.")
    found["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    for name in options.models:
        label = name if name == "source" else "/".join(Path(name).parts[-2:])
        if label in found["models"]:
            print(f"{label} is in {options.out} already")
            continue
        print(label)
        found["models"][label] = evaluate(name, options.work, texts, stream, first)
        partial = options.out.with_suffix(".partial")
        partial.write_text(json.dumps(found, indent=1) + "\n")
        partial.rename(options.out)


if __name__ == "__main__":
    main()
