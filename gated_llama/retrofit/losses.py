"""What a retrofit is trained for: one row of `LOSSES` per term, each a mean over the tokens of a batch.

A term is a function of a `Batch`: the ids, and what was recorded of the student's and the source's forward pass.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..diagnostics import attention_modules
from ..parts_gated import rotate
from .settings import Loss


BLOCK = 1 << 21  # elements of float32 that are held at a time: a few times the processor's cache
# What accelerate, FSDP, checkpointing and torch.compile put into the names of modules and parameters.
WRAPPERS = re.compile(r"(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|module)(?=\.|$)")
RESIDUAL_NORMS = re.compile(r"(^|\.)(layers\.\d+\.(input|post_attention)_layernorm|model\.norm)$")
MLP_OUTPUTS = re.compile(r"(^|\.)layers\.\d+\.mlp\.down_proj$")


def plain_name(name: str) -> str:
    """The name of a module or parameter without what wrappers add."""
    return WRAPPERS.sub(r"\1", name).replace("..", ".").strip(".")


@dataclass
class Record:
    """
    What one forward pass left: logits [batch, seq, vocab], and by kind of recorder, lists in the order of the layers.

    attention: outputs of the attention branch [batch, seq, hidden]. norms: inputs and outputs of the residual norms.
    down_proj: its inputs. keys: (module, query, key, position embeddings). scores: of the gates.
    """

    logits: torch.Tensor | None = None
    attention: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    down_proj: list[torch.Tensor] = field(default_factory=list)
    keys: list[tuple] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Batch:
    """
    One forward pass of both models over the same rows. ids [batch, seq] are the student's, with its first token.

    tokens: positions that both have, counted from the end: a first token of one of them is left out.
    """

    ids: torch.Tensor
    tokens: int
    student: Record
    source: Record | None = None
    targets: tuple[torch.Tensor, torch.Tensor] | None = None


@contextlib.contextmanager
def recording(model: nn.Module, kinds: set[str]) -> Iterator[Record]:
    """Records of `kinds` are filled by forward passes inside the context; hooks go with it."""
    record, handles = Record(), []
    try:
        for kind in sorted(kinds & RECORDERS.keys()):
            handles += RECORDERS[kind](model, getattr(record, kind))
        yield record
    finally:
        # Layers that are recomputed in the backward pass, under activation checkpointing, are not recorded again.
        for handle in handles:
            handle.remove()


def _attention(model: nn.Module, kept: list):
    def keep(module, args, output):
        kept.append(output[0] if isinstance(output, tuple) else output)

    return [module.register_forward_hook(keep) for _, module in sorted(attention_modules(model).items())]


def _norms(model: nn.Module, kept: list):
    def keep(module, args, output):
        kept.extend((args[0], output))

    norms = [module for name, module in model.named_modules() if RESIDUAL_NORMS.search(plain_name(name))]
    return [norm.register_forward_hook(keep) for norm in norms]


def _down_proj(model: nn.Module, kept: list):
    def keep(module, args):
        kept.append(args[0])

    modules = [module for name, module in model.named_modules() if MLP_OUTPUTS.search(plain_name(name))]
    return [module.register_forward_pre_hook(keep) for module in modules]


def _keys(model: nn.Module, kept: list):
    """Queries and keys as they leave QK-norm, which is there as an identity where a model has none."""
    seen: dict[nn.Module, dict] = {}

    def begin(attention, args, kwargs):
        seen[attention] = {"rotary": kwargs["position_embeddings"]}

    def keep(attention, name, module, args, output):
        seen[attention][name] = output

    def end(attention, args, output):
        found = seen.pop(attention)
        kept.append((attention, found["q_norm"], found["k_norm"], found["rotary"]))

    handles = []
    for _, attention in sorted(attention_modules(model).items()):
        handles.append(attention.register_forward_pre_hook(begin, with_kwargs=True))
        for name in ("q_norm", "k_norm"):
            hook = functools.partial(keep, attention, name)
            handles.append(getattr(attention, name).register_forward_hook(hook))
        handles.append(attention.register_forward_hook(end))
    return handles


def _scores(model: nn.Module, kept: list):
    def keep(module, args, output):
        kept.append(output[1])

    gates = [module for name, module in model.named_modules() if name.endswith(".attn_gate")]
    return [gate.register_forward_hook(keep) for gate in gates]


RECORDERS: dict[str, Callable[[nn.Module, list], list]] = {
    "attention": _attention,
    "norms": _norms,
    "down_proj": _down_proj,
    "keys": _keys,
    "scores": _scores,
}


def next_token(batch: Batch, settings: Loss) -> torch.Tensor:
    """-log p(next token), in nats, over all tokens that are followed by one."""
    logits = batch.student.logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits.float(), batch.ids[:, 1:].flatten())


def kl(batch: Batch, settings: Loss) -> torch.Tensor:
    """
    KL(p_source || p_student) in nats per token, of the whole vocabulary or of its top k and the rest together.

    Where both models read a first token, what follows it counts too, but not with stored targets.
    """
    tokens = batch.tokens if batch.targets is None else batch.targets[0].shape[1]
    student = batch.student.logits[:, -tokens:].flatten(0, 1)
    if batch.targets is not None:
        ids, log_probabilities = (target.flatten(0, 1) for target in batch.targets)
        return top_k_divergence(student, ids, log_probabilities).mean()
    source = batch.source.logits[:, -batch.tokens :].flatten(0, 1)
    if settings.top_k is not None and settings.top_k < source.shape[-1]:
        return top_k_divergence(student, *top_k_targets(source, settings.top_k)).mean()
    return divergence(student, source).mean()


def divergence(student: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """KL(softmax(source) || softmax(student)) of logits [n, vocab] each: [n] in float32, over blocks of rows."""
    return _Divergence.apply(student, source)


class _Divergence(torch.autograd.Function):
    """
    Only the gradient is kept for the backward pass, in the dtype of the student's logits; what the softmaxes need is
    held for one block of rows at a time.
    """

    @staticmethod
    def forward(ctx, student, source):
        values = torch.empty(len(student), dtype=torch.float32, device=student.device)
        gradient = torch.empty_like(student)
        for rows in blocks(len(student), student.shape[-1]):
            log_q = student[rows].float().log_softmax(dim=-1)
            log_p = source[rows].float().log_softmax(dim=-1)
            p = log_p.exp()
            values[rows] = (p * log_p.sub_(log_q)).sum(dim=-1)
            gradient[rows] = log_q.exp_().sub_(p)
        ctx.save_for_backward(gradient)
        return values

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[:, None].to(gradient.dtype), None


def blocks(count: int, width: int) -> Iterator[slice]:
    """Slices over `count` rows of `width` elements, BLOCK elements at a time."""
    size = max(1, BLOCK // width)
    return (slice(start, start + size) for start in range(0, count, size))


def top_k_targets(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the k largest of logits [n, vocab] and their log-probabilities in float32: [n, k] each."""
    values, ids = logits.float().topk(k, dim=-1)
    normaliser = torch.cat([logits[rows].float().logsumexp(-1) for rows in blocks(*logits.shape)])
    return ids, values - normaliser[:, None]


def top_k_divergence(student: torch.Tensor, ids: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """
    KL over k tokens and one class for all others: [n]. Never above the divergence over the whole vocabulary.

    student: logits [n, vocab]; ids and log_p [n, k]: the source's most likely tokens and their log-probabilities.
    """
    log_q = student.gather(-1, ids).float() - student.float().logsumexp(-1, keepdim=True)
    log_p, log_q = (torch.cat([values, _rest(values)], dim=-1) for values in (log_p, log_q))
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def _rest(log_probabilities: torch.Tensor) -> torch.Tensor:
    """log(1 - sum of probabilities), kept away from log 0."""
    tiny = torch.finfo(torch.float32).eps
    return (1 - log_probabilities.exp().sum(dim=-1, keepdim=True)).clamp(min=tiny).log()


def attention_output(batch: Batch, settings: Loss) -> torch.Tensor:
    """
    |a_student - a_source|^2 / |a_source|^2 of the attention branch's output, mean over layers and rows.

    Norms are over all tokens of a row: a token that the source writes little for counts little.
    """
    shares = []
    for student, source in zip(batch.student.attention, batch.source.attention, strict=True):
        target = source[:, -batch.tokens :].float()
        apart = (student[:, -batch.tokens :].float() - target).square().sum(dim=(1, 2))
        shares.append(apart / target.square().sum(dim=(1, 2)).clamp(min=torch.finfo(torch.float32).tiny))
    return torch.stack(shares).mean()


def outlier(batch: Batch, settings: Loss) -> torch.Tensor:
    """
    sum_j relu(|u_j| - tau)^2 with u = x / rms(x), at inputs and outputs of the residual norms: mean over these sites
    and over rows of the weighted mean over tokens. In each row and at each site the token of the largest sum counts
    `worst_token_weight` times, the first token `first_token_weight` times; the larger weight where they are one.

    The worst token is the one to weigh: where only the first one is, the next one becomes the sink.
    """
    weights = torch.ones(batch.ids.shape, device=batch.ids.device)
    weights[:, 0] = settings.first_token_weight
    values = []
    for states in batch.student.norms + batch.student.down_proj:
        excess = _excess(states, settings.tau)
        worst = excess.detach().argmax(dim=1, keepdim=True)
        weighed = weights.scatter(1, worst, weights.gather(1, worst).clamp(min=settings.worst_token_weight))
        values.append(((excess * weighed).sum(dim=1) / weighed.sum(dim=1)).mean())
    return torch.stack(values).mean()


def _excess(states: torch.Tensor, tau: float) -> torch.Tensor:
    """[batch, seq, width] -> [batch, seq]"""
    states = states.float()
    # The gradient at a state of zeros takes this to the power -3/2, so it is not the smallest number there is.
    normed = states * torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + 1e-12)
    return (normed.abs() - tau).relu().square().sum(dim=-1)


def sink(batch: Batch, settings: Loss) -> torch.Tensor:
    """
    relu(a_i0 - eps), mean over layers, heads and all queries but the first; a_i0 = exp(s_i0 - LSE_i).

    A first key that is hidden from its row (`first_key_dropout`) counts as if it were seen.
    """
    layers = [first_key_attention(*call)[:, :, 1:] for call in batch.student.keys]
    return torch.stack([(weights - settings.eps).relu().mean() for weights in layers]).mean()


def first_key_attention(attention: nn.Module, query, key, rotary) -> torch.Tensor:
    """
    Attention of each query on the row's first key: [batch, heads, seq] in float32.

    query and key [batch, seq, heads, width] before the rotary. Scores are computed over blocks of queries, and again
    in the backward pass: no map is kept.
    """
    query, key = rotate(query.transpose(1, 2), key.transpose(1, 2), *rotary)
    query = (query.float() * attention.scaling).unflatten(1, (key.shape[1], -1))
    key = key.float()
    batch, heads, group, seq, _ = query.shape  # key/value heads, and query heads of each
    weights = [
        checkpoint(_first_weights, query[..., rows, :], key, rows.start, attention.sliding_window, use_reentrant=False)
        for rows in blocks(seq, batch * heads * group * seq)
    ]
    return torch.cat(weights, dim=-1).flatten(1, 2)


def _first_weights(query: torch.Tensor, key: torch.Tensor, start: int, window: int | None) -> torch.Tensor:
    with torch.autocast(query.device.type, enabled=False):
        keys = min(key.shape[2], start + query.shape[-2])
        scores = query @ key[:, :, None, :keys].transpose(-1, -2)
    distance = torch.arange(start, start + query.shape[-2], device=key.device)[:, None] - torch.arange(
        keys, device=key.device
    )
    hidden = (distance < 0) | (distance >= (window or math.inf))
    return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)[..., 0]


def gate(batch: Batch, settings: Loss) -> torch.Tensor:
    """Mean |gate score|, over layers, tokens, heads and coordinates."""
    return torch.stack([scores.float().abs().mean() for scores in batch.student.scores]).mean()


@dataclass(frozen=True)
class Term:
    """value: the mean over a batch. student and source: what to record of each, beside the student's logits."""

    value: Callable[[Batch, Loss], torch.Tensor]
    student: tuple[str, ...] = ()
    source: tuple[str, ...] = ()


LOSSES = {
    "next_token": Term(next_token),
    "kl": Term(kl, source=("logits",)),
    "attention_output": Term(attention_output, student=("attention",), source=("attention",)),
    "outlier": Term(outlier, student=("norms",)),
    "sink": Term(sink, student=("keys",)),
    "gate": Term(gate, student=("scores",)),
}


def student_kinds(name: str, settings: Loss) -> set[str]:
    """What a term needs of the student's forward pass."""
    return {*LOSSES[name].student, *(["down_proj"] if getattr(settings, "down_proj", False) else [])}


def hidden_first_key(ids: torch.Tensor, hidden: list[bool]) -> torch.Tensor | None:
    """
    Causal mask [batch, 1, seq, seq], true where a key is seen, in which chosen rows' first key is seen by the first
    query only; None when no row is chosen.
    """
    if not any(hidden):
        return None
    batch, seq = ids.shape
    mask = torch.ones(seq, seq, dtype=torch.bool, device=ids.device).tril().expand(batch, 1, seq, seq).clone()
    mask[torch.tensor(hidden, device=ids.device), :, 1:, 0] = False
    return mask
