"""Proof that two checkpoints are the same model: the same token ids through both, compared layer by layer."""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..diagnostics.divergence import (
    LayerDifference,
    Place,
    first_divergence,
    layer_divergence,
    place_name,
    recorded_states,
)
from . import llama_cpp
from .loading import Loadable
from .tokenizer import PROBES, check_against_file


DTYPES = ("float32", "bfloat16", "float16")
GREEDY_TOKENS = 8

# Digits, runs of spaces, line ends, code, four scripts, emoji with joiners: where tokenizers differ.
PROOF_TEXT = """Attention reads; the gate decides how much of what was read is written on.
In 2025, 1234567 tokens   cost 3.14 units (and 1,000,000 cost 0.5e-3).

def gate(y, x, w):
\treturn y * sigmoid(x @ w)  # [batch, seq, heads, width]

注意力读取信息，门控决定写入多少。ゲートは出力を調整します。Внимание читает, затвор решает. ¿Qué escribe la compuerta?
🙂🚀👩‍💻 naïve café — “quoted” … <|end|>
"""


class TokenIds(NamedTuple):
    """Ids [batch, tokens], consecutive windows of a text; their origin; whether the result's tokenizer agrees."""

    ids: torch.Tensor
    origin: str
    equal: bool | None


@dataclass(frozen=True)
class VerifyReport:
    """
    What `verify` found, in one dtype.

    bitwise: every bit of every layer's output and of the logits is equal.
    max_abs_difference: of the logits; infinite when the result's are not finite.
    first_diverging_layer: the first place that is not bitwise equal: `"embed_tokens"`, N for `model.layers.N`,
        `"norm"` or `"logits"`; None when all are equal.
    layers: every place in order.
    greedy_equal: 8 tokens decoded greedily with the cache are equal.
    policy: the result's own record of how its gates began, such as "identity" or "transplant"; None without one.
    quantiser: what the result's weights are quantised by, such as "torchao"; None if they are not.
    ids: where the token ids came from. ids_equal: the result's tokenizer gives the source's ids; None when the source
        has no tokenizer.
    tokens: token positions compared.
    """

    source: str
    result: str
    dtype: str
    attn_implementation: str
    tokens: int
    ids: str
    ids_equal: bool | None
    bitwise: bool
    max_abs_difference: float
    first_diverging_layer: Place | None
    greedy_equal: bool
    layers: tuple[LayerDifference, ...]
    policy: str | None = None
    quantiser: str | None = None

    def passes(self, tolerance: float | None = None) -> bool:
        """
        Whether result and source are the same model: bitwise, in greedy decoding and in token ids; with a tolerance,
        in token ids and within `tolerance` on the logits.
        """
        same = self.bitwise and self.greedy_equal if tolerance is None else self.max_abs_difference <= tolerance
        return same and self.ids_equal is not False

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: a difference that is not finite becomes None."""
        report = asdict(self)
        report["layers"] = [_finite(layer) for layer in report["layers"]]
        return _finite(report)


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    difference = record["max_abs_difference"]
    return {**record, "max_abs_difference": difference if math.isfinite(difference) else None}


@torch.inference_mode()
def _run(model: torch.nn.Module, ids: torch.Tensor) -> tuple[dict[Place, torch.Tensor], torch.Tensor]:
    """States of one forward with the logits last, and the tokens of a cached greedy decode after the same ids."""
    mask = torch.ones_like(ids)
    with recorded_states(model) as states:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    greedy = model.generate(ids, attention_mask=mask, max_new_tokens=GREEDY_TOKENS, do_sample=False)
    return {**states, "logits": logits.cpu()}, greedy[:, ids.shape[1] :].cpu()


def _load_and_run(loadable: Loadable, ids: torch.Tensor, dtype: str, attn_implementation: str):
    model = loadable.load_model(dtype, attn_implementation=attn_implementation)
    recorded = _run(model, ids)
    del model
    gc.collect()  # modules hold cycles; the next model must not find this one still in memory
    return recorded


def _token_ids(source: Loadable, result: Loadable, text: str, tokens: int, batch: int) -> TokenIds:
    vocabulary = source.config.vocab_size
    if not source.has_tokenizer:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (batch, tokens), generator=generator)
        return TokenIds(ids, "random with seed 0: the source has no tokenizer", None)
    stream, origin, equal = _encode(source, result, text)
    if not stream:
        raise ValueError("The text gives no tokens: use a longer text.")
    if max(stream) >= vocabulary:
        raise ValueError(f"{source}: its tokenizer gives id {max(stream)}, but the model has {vocabulary} embeddings.")
    if source.checkpoint.gguf_file and llama_cpp.is_installed():
        origin, equal = _ask_llama_cpp(source, result, text, origin, equal)
    repeated = stream * math.ceil(batch * tokens / len(stream))
    return TokenIds(torch.tensor(repeated[: batch * tokens]).view(batch, tokens), origin, equal)


def _ask_llama_cpp(
    source: Loadable, result: Loadable, text: str, origin: str, equal: bool | None
) -> tuple[str, bool | None]:
    """Origin and agreement, now also with the ids that llama.cpp gives to `text` and the probes."""
    path = source.checkpoint.folder / source.checkpoint.gguf_file
    texts = [text, *PROBES]
    question = {"model": str(path), "texts": texts, "prompts": [], "context": 64, "threads": torch.get_num_threads()}
    try:
        reply = llama_cpp.ask(question)
    except ValueError:
        return f"{origin}, not compared with llama.cpp, which does not run this file", equal
    tokenizer = (result if result.has_tokenizer else source).load_tokenizer()
    for each, ids in zip(texts, reply["ids"], strict=True):
        if tokenizer(each)["input_ids"] != ids:
            return f"{origin}, and llama.cpp gives other ids for {each[:40]!r}", False
    return f"{origin}, and llama.cpp's", True if equal is None else equal


def _encode(source: Loadable, result: Loadable, text: str) -> tuple[list[int], str, bool | None]:
    """
    Ids with the special tokens that the source's tokenizer adds, where they are from, and whether the result agrees.

    For some model types the library's tokenizer class overrules tokenizer.json; a result that keeps to the file is
    right, as long as it puts the same special tokens around a text as one of the two.
    """
    if result.has_tokenizer and (reason := source.guessed_tokenizer):
        tokenizer = result.load_tokenizer()
        check_against_file(tokenizer, f"The tokenizer of {result}", source.checkpoint)
        origin = f"the result's tokenizer, which has the tokens of {source}, whose own cannot be rebuilt: {reason}"
        return tokenizer(text)["input_ids"], origin, None
    own = source.load_tokenizer()
    stream = own(text)["input_ids"]
    if not result.has_tokenizer:
        return stream, "the source's tokenizer", False
    tokenizer, raw = result.load_tokenizer(), source.raw_tokenizer()
    found = tokenizer(text)["input_ids"]
    if found != stream and raw is not None:
        plain = tokenizer(text, add_special_tokens=False)["input_ids"]
        around = (own("")["input_ids"], raw.encode("").ids)
        if plain == raw.encode(text, add_special_tokens=False).ids and tokenizer("")["input_ids"] in around:
            return found, "the source's tokenizer.json, which its own tokenizer class does not follow", True
    return stream, "the source's tokenizer", found == stream


def verify(
    source: str | Path | Loadable, result: str | Path | Loadable, *, dtype: str = "float32", **options
) -> VerifyReport:
    """
    Runs the same token ids through two checkpoints and compares every layer's output, the logits and greedy decoding.

    Args:
        dtype: `"float32"`, `"bfloat16"`, `"float16"`, or `"file"` for the one in which the result is stored.
        source, result, options, errors: as in `verify_dtypes`.
    """
    return verify_dtypes(source, result, [dtype], **options)[0]


def verify_dtypes(
    source: str | Path | Loadable,
    result: str | Path | Loadable,
    dtypes: Sequence[str] = ("float32", "file"),
    *,
    text: str | None = None,
    tokens: int = 64,
    batch: int = 1,
    attn_implementation: str = "sdpa",
    revision: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[VerifyReport]:
    """
    `verify` in several dtypes, each once. One model is in memory at a time.

    A quantised `.gguf` is de-quantised in the dtype in which it runs; other quantised weights are those of their
    quantiser, which Transformers runs.

    Args:
        source: Hub id, folder or `.gguf` file.
        result: the same; usually a folder that the converter wrote.
        text: what is tokenized; by default a multilingual sample. It repeats until `batch` rows of `tokens` are full.
        attn_implementation: attention backend of both models.
        revision: branch, tag or commit of a Hub source.
        progress: called with a line of text before each slow step.

    Raises:
        ValueError: unknown dtype, a checkpoint that cannot be loaded or lacks weights, models of different shape, or a
            source whose own outputs are not finite in this dtype (equality would prove nothing).
        OSError: no such checkpoint.
    """
    if unknown := set(dtypes) - {*DTYPES, "file"}:
        raise ValueError(f"dtype={unknown.pop()!r}: choose {', '.join(map(repr, DTYPES))} or 'file'.")
    if tokens < 1 or batch < 1:
        raise ValueError(f"tokens={tokens} and batch={batch} must be at least 1.")
    source, result = Loadable.open(source, revision, quantised=True), Loadable.open(result, quantised=True)
    if text is not None and not source.has_tokenizer:
        raise ValueError(f"{source} has no tokenizer, so the text cannot be used: leave it out for random ids.")
    tell = progress or (lambda line: None)
    tell("token ids")
    ids = _token_ids(source, result, PROOF_TEXT if text is None else text, tokens, batch)
    resolved = dict.fromkeys(result.stored_dtype if dtype == "file" else dtype for dtype in dtypes)
    return [_compare(source, result, ids, dtype, attn_implementation, tell) for dtype in resolved]


def _compare(
    source: Loadable,
    result: Loadable,
    ids: TokenIds,
    dtype: str,
    attn_implementation: str,
    tell: Callable[[str], None],
) -> VerifyReport:
    tell(f"{dtype}: {source}")
    states, greedy = _load_and_run(source, ids.ids, dtype, attn_implementation)
    _require_finite(states, source, dtype)
    tell(f"{dtype}: {result}")
    other_states, other_greedy = _load_and_run(result, ids.ids, dtype, attn_implementation)
    differences = layer_divergence(states, other_states)
    return VerifyReport(
        source=str(source),
        result=str(result),
        dtype=dtype,
        attn_implementation=attn_implementation,
        tokens=ids.ids.numel(),
        ids=ids.origin,
        ids_equal=ids.equal,
        bitwise=all(difference.bitwise for difference in differences),
        max_abs_difference=differences[-1].max_abs_difference,
        first_diverging_layer=first_divergence(differences),
        greedy_equal=torch.equal(greedy, other_greedy),
        layers=tuple(differences),
        policy=(getattr(result.config, "gate_retrofit", None) or {}).get("policy"),
        quantiser=result.checkpoint.quantiser,
    )


def _require_finite(states: Mapping[Place, torch.Tensor], loadable: Loadable, dtype: str):
    for place, state in states.items():
        if not torch.isfinite(state).all():
            raise ValueError(
                f"{loadable} gives values that are not finite at {place_name(place)} in {dtype}, so equality would "
                "prove nothing: use another dtype."
            )
