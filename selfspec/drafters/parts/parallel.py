"""EAGLE-3's layers draft all depths in one pass, with masks in place of drafted tokens (P-EAGLE, arXiv 2602.01469).

Entry t of the layers' cache is EAGLE-3's: the target's features at position t and token t + 1. Behind the root's entry
come masks, a token and features that are learned, each reading the text and the masks before it. Rows do not know which
tokens were drafted before them, so all nodes of a depth have the same children's scores.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec.core.masks import additive, restarting
from selfspec.core.pass_cache import TextCache
from selfspec.core.tree import chain
from selfspec.drafters.parts.draft_layers import read
from selfspec.drafters.parts.eagle3_layer import Eagle3Layer
from selfspec.drafters.parts.expansion import Growth, Nodes, Ranking, grow
from selfspec.drafters.parts.feature_cache import PendingRows
from selfspec.drafters.parts.feature_layer import DraftView
from selfspec.drafters.parts.unrolled import Unrolled


def hidden_along(
    layer: Eagle3Layer,
    depth: int,
    tokens: Tensor,
    features: dict[int, Tensor],
    hosts: Tensor,
    documents: Tensor | None = None,
) -> Tensor:
    """Hidden states [B, A, depth, H] of the drafts behind entries `hosts`, int64 [B, A], of whole texts: tokens int64
    [B, S], features [B, S, H] by layer. documents: int64 [B, S], see `Batch`."""
    n, (rows, count), more, block = tokens.shape[1] - 1, hosts.shape, depth - 1, layer.tail
    states = layer.fused(layer.stacked({i: part[:, :n] for i, part in features.items()}))
    after, device = tokens[:, 1:], tokens.device
    at = torch.arange(n, device=device)
    documents = torch.zeros_like(after) if documents is None else documents[:, :n]
    places, cache = restarting(documents), TextCache(block.layer + 1, kept=True)
    seen = (at[:, None] >= at) & (documents[:, :, None] == documents[:, None])
    mask = additive(seen, block.dtype)[:, None]
    out = block.text(layer.entry(states, after), after, True, False, cache, mask, places).hidden
    hidden = out.gather(1, hosts[:, :, None].expand(-1, -1, out.shape[-1]))[:, :, None]
    if not more:
        return hidden
    text = seen.gather(1, hosts[:, :, None].expand(-1, -1, n)).repeat_interleave(more, 1)
    own = torch.block_diag(*[torch.ones(more, more, device=device).tril()] * count).bool()
    mask = additive(torch.cat([text, own.expand(rows, -1, -1)], 2), block.dtype)[:, None]
    behind = (places.gather(1, hosts)[:, :, None] + torch.arange(1, more + 1, device=device)).flatten(1)
    states, masks = layer.masks(rows, count * more)
    out = block.text(layer.entry(states, masks), masks, True, False, cache, mask, behind).hidden
    return torch.cat([hidden, out.unflatten(1, (count, more))], 2)


def forecast(drafter: Unrolled, pending: PendingRows[tuple[DraftView, ...]]) -> Tensor:
    """Logits [B, depth, V'] of all depths, from what the layers read up to each root."""
    draft_head, layer = drafter.draft_head, cast(Eagle3Layer, drafter.layer)
    (root,) = read([layer], pending, draft_head is None)
    logits, hidden = root.logits, root.hidden
    if drafter.depth > 1:
        states, masks = layer.masks(len(hidden), drafter.depth - 1)
        more, behind, _ = layer.step(root, states, chain(masks), drafter.depth - 1)
        hidden = torch.cat([hidden, behind], 1)
        logits = None if logits is None or more is None else torch.cat([logits, more], 1)
    scores = logits if draft_head is None else F.linear(hidden, draft_head)
    assert scores is not None
    return scores


def parallel_tree(
    drafter: Unrolled, growth: Growth, ranking: Ranking, pending: PendingRows[tuple[DraftView, ...]]
) -> Nodes:
    """A tree behind roots, from what the layers read up to there; see `drafted_by`."""
    scores, vocabulary = forecast(drafter, pending), drafter.vocabulary
    ids = None if vocabulary is None else vocabulary.expand(len(scores), -1)

    def step(growth: Growth, d: int) -> tuple[Tensor, Tensor | None]:
        return scores[:, d, None].expand(-1, growth.frontier.shape[1], -1), ids

    return grow(growth, step, drafter.depth, ranking).best()
