"""Which positions are real tokens, where documents begin, and which keys a query sees."""

import functools
from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask


@dataclass(frozen=True)
class Layout:
    """
    Which positions of a batch are real tokens and where the document of each begins.

    real: [batch, seq] bool. start: [batch, seq] index of the first real token of the position's document.
    """

    real: torch.Tensor
    start: torch.Tensor

    @functools.cached_property
    def position(self) -> torch.Tensor:
        """[batch, seq] distance to the start of the document; meaningful where `real`."""
        return torch.arange(self.start.shape[1], device=self.start.device) - self.start

    @property
    def first(self) -> torch.Tensor:
        """[batch, seq] bool, the first real token of each document."""
        return self.real & (self.position == 0)

    def to(self, device) -> "Layout":
        """The same on another device."""
        if self.real.device == torch.device(device):
            return self
        return Layout(self.real.to(device), self.start.to(device))

    @functools.cached_property
    def documents(self) -> list[tuple[int, int, int]]:
        """(row, first index, length) of each document."""
        bounds = []
        for row, first in self.first.nonzero().tolist():
            length = int((self.real[row] & (self.start[row] == first)).sum())
            bounds.append((row, first, length))
        return bounds


def sequence_layout(batch: int, seq: int, device, attention_mask=None, position_ids=None, cu_seq_lens=None) -> Layout:
    """
    Real tokens and document starts, from what the decoder was given.

    A 2-D mask marks padding, and each row is one document. Without a mask, a document starts where positions do not
    continue (Transformers' rule for packed sequences) or at cumulative lengths. In a 4-D mask or block mask a token
    is real if it sees itself, and a document starts at a real token that cannot see its predecessor.
    """
    if isinstance(attention_mask, dict):  # prepared masks by layer type; the widest tells documents from windows
        attention_mask = attention_mask.get("full_attention", next(iter(attention_mask.values())))
    index = torch.arange(seq, device=device)
    real = torch.ones(batch, seq, dtype=torch.bool, device=device)
    starts = index.eq(0).expand(batch, seq)
    if isinstance(attention_mask, BlockMask) or (attention_mask is not None and attention_mask.ndim == 4):
        visibility = Visibility(attention_mask, None)
        itself, previous = (visibility.pairs((index - shift).clamp(min=0).expand(batch, seq)) for shift in (0, 1))
        real = (itself > float("-inf"))[:, 0]
        starts = real & ((previous == float("-inf"))[:, 0] | index.eq(0))
    elif attention_mask is not None:
        real = attention_mask[:, :seq].to(device).bool()
        starts = real & (real.cumsum(-1) == 1)
    elif cu_seq_lens is not None:
        starts = torch.isin(index, cu_seq_lens.to(device)).expand(batch, seq)
    elif position_ids is not None:
        position_ids = position_ids[0] if position_ids.ndim == 3 else position_ids  # 3-D: text positions come first
        steps = torch.diff(position_ids.to(device), dim=-1).ne(1)
        starts = torch.cat([steps.new_ones(steps.shape[0], 1), steps], dim=-1).expand(batch, seq)
    return Layout(real, torch.where(starts, index, 0).cummax(dim=-1).values)


class Visibility:
    """
    Which keys a query sees, as the attention function itself was told.

    4-D tensors (bool, or additive) and flex block masks say it all. Otherwise attention is causal, and kernels of the
    flash family are given the rest apart: padding (in `layout`), packed documents, and a sliding window.

    All answers are additive biases in float32: 0 or the mask's own value where visible, -inf elsewhere.
    """

    def __init__(self, mask, layout: Layout | None, window: int | None = None, separate_documents: bool = False):
        self.mask = mask if isinstance(mask, BlockMask) or (mask is not None and mask.ndim == 4) else None
        self.layout = layout
        self.window = window
        self.given = mask  # kept alive, since layers are told apart by the identity of their masks
        self.masks_padding = mask is not None
        self.separate_documents = separate_documents

    def block(self, rows: torch.Tensor, keys: int) -> torch.Tensor:
        """Bias of the queries `rows` [n] on the first `keys` keys: [batch or 1, heads or 1, n, keys]."""
        if isinstance(self.mask, BlockMask):
            modifier, (batch, heads) = self.mask.mask_mod, self.mask.kv_num_blocks.shape[:2]
            return _bias(
                create_mask(lambda b, h, q, k: modifier(b, h, rows[q], k), batch, heads, len(rows), keys, rows.device)
            )
        if self.mask is not None:
            return _bias(self.mask[:, :, rows, :keys])
        query, key = rows[:, None], torch.arange(keys, device=rows.device)
        visible = (key <= query)[None]
        if self.window is not None:
            visible = visible & (key > query - self.window)
        if self.masks_padding:
            visible = visible & self.layout.real[:, None, :keys]
        if self.separate_documents:
            visible = visible & (key >= self.layout.start[:, rows, None])
        return _bias(visible[:, None])

    def pairs(self, key: torch.Tensor) -> torch.Tensor:
        """Bias of each query on one key of its own; key [batch, seq] -> [batch, heads or 1, seq]."""
        batch, seq = key.shape
        if isinstance(self.mask, BlockMask):
            modifier, heads = self.mask.mask_mod, self.mask.kv_num_blocks.shape[1]
            chosen = create_mask(lambda b, h, q, k: modifier(b, h, q, key[b, q]), batch, heads, seq, 1, key.device)
            return _bias(chosen[..., 0])
        if self.mask is not None:
            mask = self.mask.expand(batch, -1, -1, -1)
            index = key[:, None, :, None].expand(-1, mask.shape[1], -1, -1)
            return _bias(mask[:, :, :seq].gather(-1, index)[..., 0])
        distance = torch.arange(seq, device=key.device) - key
        visible = distance >= 0
        if self.window is not None:
            visible = visible & (distance < self.window)
        return _bias(visible[:, None])

    @functools.cached_property
    def lonely(self) -> torch.Tensor:
        """[batch or 1, seq] bool: the query sees a single key, so that its weight is 1 by necessity."""
        seq = self.layout.real.shape[1]
        if self.mask is None:
            only_itself = self.layout.position == 0
            return torch.ones_like(only_itself) if self.window == 1 else only_itself
        device = self.layout.real.device
        rows = torch.arange(seq, device=device).split(max(1, 2**20 // seq))
        counts = [(self.block(chunk, seq) > float("-inf")).sum(-1).amax(1) for chunk in rows]
        return torch.cat(counts, dim=-1) <= 1


def _bias(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return mask.float().masked_fill(hidden, float("-inf"))
