"""Which entries the rows of blocks read in training, and attention under that: dense on a CPU, sparse on a GPU.

On a GPU parts that no row of a tile reads are left out (FlexAttention, arXiv 2412.05496): of a batch's anchors each
reads the text before it and its own block alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import repeat_kv

from selfspec.core.masks import additive

# (row of the batch, row of the blocks, entry), int64 that broadcast -> whether it is read, in each kind of layer
Seen = Callable[[Tensor, Tensor, Tensor], list[Tensor]]
Mask = Tensor | BlockMask
ATTENTION = "selfspec_block"  # its name among transformers' kinds of attention


def sparse(device: torch.device) -> bool:
    """Whether attention in training leaves out what is not read. torch differentiates that on a GPU alone."""
    return device.type == "cuda"


def training_masks(seen: Seen, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> list[Mask]:
    """Masks for B rows of n queries over S entries, shape (B, n, S): additive [B, 1, n, S], or sparse ones."""
    of, row, entry = (torch.arange(size, device=device) for size in shape)
    if not sparse(device):
        return [additive(one, dtype)[:, None] for one in seen(of[:, None, None], row[:, None], entry)]
    kinds = range(len(seen(of[:1], row[:1], entry[:1])))

    def read(kind: int, of: Tensor, head: Tensor, row: Tensor, entry: Tensor) -> Tensor:
        return seen(of, row, entry)[kind]

    rows, queries, entries = shape
    return [create_block_mask(partial(read, kind), rows, None, queries, entries, device=device) for kind in kinds]


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def attention(
    module: nn.Module, queries: Tensor, keys: Tensor, values: Tensor, mask: Mask, **_: Any
) -> tuple[Tensor, None]:
    """[B, n, heads, D] of queries [B, heads, n, D] over keys and values [B, key heads, S, D], as transformers' modules
    call it. transformers' own sdpa takes another kernel for a single query."""
    queries, keys = queries.to(values.dtype), keys.to(values.dtype)
    if isinstance(mask, BlockMask):
        run: Any = _compiled() if queries.device.type == "cuda" else flex_attention
        read: Tensor = run(queries, keys, values, block_mask=mask, enable_gqa=True)
    else:
        keys, values = (repeat_kv(part, queries.shape[1] // part.shape[1]) for part in (keys, values))
        read = F.scaled_dot_product_attention(queries, keys, values, mask.to(values.dtype))
    return read.transpose(1, 2), None


AttentionInterface.register(ATTENTION, attention)
