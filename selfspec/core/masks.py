"""Attention masks: of trees over a KV cache, and of rows that hold several documents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def tree_masks(
    below: Tensor, lengths: Tensor, ran: int, size: int, windows: Sequence[int | None], dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """Depths int64 [B, n] of the nodes behind the first `ran`, and for each window an additive mask [B, 1, n, size]: 0
    or the dtype's lowest value.

    below: bool [B, N, N], True where node i is node j or descends from it (see `tree.ancestors`); lengths: int64 [B],
    kept entries of each row. A node sees every kept entry, its ancestors and itself; under a sliding window, only those
    whose position is less than `window` behind its own.
    """
    depth = below.sum(-1) - 1
    at = torch.arange(size, device=lengths.device) - lengths[:, None]  # [B, S]: each entry's node; negative: kept
    node = at.clamp(0, below.shape[2] - 1)
    inside, rows = (at >= 0) & (at < below.shape[2]), below[:, ran:]
    seen = rows.gather(2, node[:, None].expand(-1, rows.shape[1], -1)) & inside[:, None] | (at < 0)[:, None]
    masks = []
    for window in windows:
        allowed = seen
        if window is not None:
            behind = torch.where(at < 0, at, depth.gather(1, node))  # positions, counted from the root's
            allowed = seen & (depth[:, ran:, None] - behind[:, None] < window)
        masks.append(additive(allowed, dtype)[:, None])
    return depth[:, ran:], masks


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where attention is allowed, the dtype's lowest value elsewhere."""
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)


def within(documents: Tensor, dtype: torch.dtype, window: int | None) -> Tensor:
    """The additive causal mask [B, 1, S, S] of rows that hold several documents, int64 [B, S], one behind another."""
    at = torch.arange(documents.shape[1], device=documents.device)
    far = at[:, None] - at
    seen = far >= 0 if window is None else (far >= 0) & (far < window)
    return additive(seen & (documents[:, :, None] == documents[:, None]), dtype)[:, None]


def restarting(documents: Tensor) -> Tensor:
    """int64 [B, S]: the position of every token in its own document."""
    at = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    new = torch.ones_like(documents, dtype=torch.bool)
    new[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return at - at.where(new, torch.zeros_like(at)).cummax(1).values
