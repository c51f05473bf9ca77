"""The README of an export: what it is, who serves it, what was rewritten, what must not be quantised."""

from pathlib import Path

from huggingface_hub import ModelCardData

from ..hub import source_metadata
from .engines import READERS
from .targets import Target


CARD = """\
# {name}

A decoder with [Gated Attention](https://arxiv.org/abs/2505.06708), written by gated-llama as `{architecture}` \
(`model_type` {model_type}, {dtype}): {purpose}.

## Served by

{services}{versions}

## Rewritten

{rewritten}

## Quantisation

{quantisation}

## Proof

{proof}
{notes}"""

NO_REWRITING = "- Nothing but names and the order of rows."
NO_LIMIT = "Nothing in these weights stands against it."
LIMIT = """\
**Never quantise `{names}`** (and no norm): these weights are scaled by 2^-30, below the smallest scale of integer \
and fp8 formats, and the result is noise. Exclude them by name. float16 cannot hold them either: serve in bfloat16 or \
float32."""
COLUMNS = """\
 Where norm gains were moved into the columns that read them (bfloat16), start from an export in float32, where each \
column keeps its size."""


def export_card(report, target: Target, source_folder: Path) -> str:
    """Card of the export that `report` describes; licence and languages are those of the source's card."""
    data = ModelCardData(
        library_name="gguf" if target.gguf else "transformers",
        pipeline_tag="text-generation",
        tags=["gated-attention", target.model_type],
        **source_metadata(source_folder),
    )
    text = CARD.format(
        name=report.output.name,
        architecture=target.architecture,
        model_type=target.model_type,
        dtype=report.dtype,
        purpose=target.purpose,
        services=bullets(report.served_by) or "- the code of the paper release",
        versions=versions(target, report.served_by),
        rewritten=bullets(report.rewritten) or NO_REWRITING,
        quantisation=quantisation(report, target),
        proof=" ".join(filter(None, (proof(report), report.proof))),
        notes=f"\n## Notes\n\n{bullets(report.notes)}\n" if report.notes else "",
    )
    return f"---\n{data.to_yaml()}\n---\n\n{text}"


def versions(target: Target, served_by: list[str]) -> str:
    """Whose reading of config.json this export was written for; older releases may compute something else."""
    served = [service for service in target.services if str(service) in served_by]
    found = dict.fromkeys(READERS[service.reader or service.engine].version for service in served)
    return f"\n\nIts configuration is written as these read it: {', '.join(found)}." if found else ""


def bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def quantisation(report, target: Target) -> str:
    names = report.never_quantise
    text = LIMIT.format(names="`, `".join(names)) if names else NO_LIMIT
    return text + (COLUMNS if target.zero_centred and report.dtype == "bfloat16" else "")


def proof(report) -> str:
    parity = report.parity
    if parity is None:
        return "The logits were not compared with the source's when this was written."
    computed = "" if report.proof else " and computed in float32"
    return (
        f"Before this export appeared, its logits were compared with the source's on {parity.tokens} tokens, both "
        f"stored in {parity.dtype}{computed}: the largest difference is {parity.max_abs_difference:.2g} "
        f"(largest logit {parity.largest_logit:.3g}), the mean KL divergence {parity.kl:.2g} nats."
        + (" Its tokenizer gives the source's ids." if report.tokenizer_class and not report.proof else "")
    )
