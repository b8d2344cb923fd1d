"""Several draft layers in a row (DeepSeek-V3's multi-token prediction, arXiv 2412.19437), decoded.

The first layer reads the target's states, each further one the outputs of the one before; beyond them the last is
iterated. Entry t of layer k reads the output of layer k - 1 at entry t - 1 and token t + 1; it has none before entry k.
Every layer has a cache of its own, and runs over all nodes above those whose children it drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec.core.cache import KVCache
from selfspec.core.contract import Accepted, Context
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain, trusted
from selfspec.drafters.parts.expansion import Growth, Ranking, grow
from selfspec.drafters.parts.feature_layer import (
    DraftView,
    FeatureCache,
    FeatureLayer,
    PendingRows,
    RootState,
    draft_view,
)
from selfspec.drafters.parts.tree_function import drafted_by
from selfspec.drafters.parts.unrolled import Unrolled


def behind(k: int, starts: Tensor, carried: Tensor, outputs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What layer k reads of rows that the layer before it ran: states [B, t, H], the tokens after them, int64 [B, t],
    and int64 [B]: how many of the first rows it has no entry for. starts: int64 [B], entries of the first layer before
    them; carried: [B, H], the output of the layer before at its last entry so far; outputs: [B, t, H], its new ones."""
    order = torch.arange(tokens.shape[1], device=tokens.device)
    missing = (k - starts).clamp(min=0)[:, None]
    places = (order + (missing > 0).long())[:, :, None].expand(-1, -1, outputs.shape[-1])
    states = torch.cat([carried[:, None], outputs], 1).gather(1, places)
    return states, tokens.gather(1, (order + missing).clamp(max=len(order) - 1)), missing[:, 0]


def tree_of(
    drafter: Unrolled, growth: Growth, ranking: Ranking, carried: Tensor, pending: PendingRows[tuple[DraftView, ...]]
) -> tuple[Tensor, ...]:
    """A tree behind roots, from what the layers read up to there, and what they carry on, [B, K - 1, H]; see
    `drafted_by`."""
    vocabulary, draft_head, layers = drafter.vocabulary, drafter.draft_head, drafter.draft_layers
    roots = read(layers, carried, pending, draft_head is None)
    ids = None if vocabulary is None else vocabulary.expand(len(carried), -1)
    logits, hidden = roots[0].logits, roots[0].hidden
    states = roots[0].states  # [B, n, H]: of the root and the nodes, by the layer that ran last

    def step(growth: Growth, d: int) -> tuple[Tensor, Tensor | None]:
        nonlocal logits, hidden, states
        m = growth.frontier.shape[1]
        if d > 0:
            stem, k = growth.stem(), min(d, len(layers) - 1)
            tree = trusted(stem.tokens[:, 1:], stem.parents[:, 1:] - 1)  # the layers have read the root
            count = tree.tokens.shape[1] if d == k else m
            above = stem.parents[:, -count:, None].expand(-1, -1, states.shape[-1])
            logits, hidden, new = layers[k].step(roots[k], states.gather(1, above), tree, count)
            states = torch.cat([roots[k].states if d == k else states, new], 1)
        scores = logits if draft_head is None else F.linear(hidden, draft_head)
        assert scores is not None
        return scores[:, -m:], ids

    best = grow(growth, step, drafter.depth, ranking).best()
    return *best, torch.cat([root.states for root in roots[:-1]], 1)


def read(
    layers: Sequence[FeatureLayer], carried: Tensor, pending: PendingRows[tuple[DraftView, ...]], logits: bool
) -> list[RootState]:
    """Read pending rows with every layer, up to each row's root."""
    tokens, starts = pending.tokens, pending.layers[0].kv.lengths
    entering, last, after = layers[0].entry(layers[0].fused(pending.stacked), tokens), pending.last, tokens
    roots: list[RootState] = []
    outputs = entering  # of the layer before
    for k, (layer, view) in enumerate(zip(layers, pending.layers, strict=True)):
        if k:
            states, after, missing = behind(k, starts, carried[:, k - 1], outputs, tokens)
            entering, last = layer.entry(states, after), (pending.last - missing).clamp(min=0)
        root, outputs = layer.read_entries(view, entering, after, last, logits and k == 0)
        roots.append(root)
    return roots


class ModulesCache(FeatureCache[FeatureLayer, tuple[DraftView, ...]]):
    """The caches of draft layers in a row; layer k has k entries fewer than the first."""

    def __init__(self, layers: Sequence[FeatureLayer]) -> None:
        super().__init__(layers[0])
        self.layers = layers
        self.further: list[KVCache] = []
        self.carried: Tensor | None = None  # [B, K - 1, H]: outputs of each but the last layer at its last entry

    @property
    def ready(self) -> bool:
        """Whether every layer has an entry to begin from in every row."""
        if not super().ready:
            return False
        before = [0] * len(self.pending or []) if self.cache is None else self.cache.lengths
        if self.cache is not None and min(before) >= len(self.layers):
            return True
        self._settle()
        before = before or [0] * len(self.pending)
        return min(n + len(part) for n, part in zip(before, self.pending, strict=True)) >= len(self.layers)

    def _open(self, rows: int, verified: KVCache) -> KVCache:
        caches = [one.block.target.cache(rows, verified.capacity, verified.limit) for one in self.layers]
        self.further = caches[1:]
        first = self.layer.block
        shape = rows, len(self.further), self.layer.width
        self.carried = torch.zeros(shape, dtype=first.dtype, device=self.layer.device)
        return caches[0]

    def _view(self, cache: KVCache, entries: int, logits: bool) -> tuple[DraftView, ...]:
        caches = zip(self.layers, [cache, *self.further], strict=True)
        return tuple(draft_view(layer.block, one, entries, logits) for layer, one in caches)

    def _commit(self, count: list[int], lengths: Tensor | None = None) -> None:
        assert self.cache is not None
        for k, cache in enumerate(self.further, 1):
            rows = zip(self.cache.lengths, count, strict=True)
            paths = [list(range(max(0, start + n - k) - max(0, start - k))) for start, n in rows]
            cache.commit(paths, lengths=lengths if min(self.cache.lengths) >= k else None)
        super()._commit(count, lengths)

    def _select(self, rows: Tensor) -> None:
        super()._select(rows)
        assert self.carried is not None
        self.carried = self.carried[rows.to(self.carried.device)]
        for cache in self.further:
            cache.select(rows)

    def _enter(self, context: Context, cache: KVCache, count: list[int]) -> None:
        assert self.carried is not None
        width, engine, device = max(count), cache.engine, self.layer.device
        order = torch.arange(width, device=device).expand(len(count), -1)
        tensors = (
            *self._stacked(count, width).chunk(len(self.layer.layers), -1),
            order,
            self._tokens(context, count, width),
            torch.tensor(count, device=device) - 1,
            self.carried,
        )
        *features, paths, tokens, last, carried = (engine.padded(part) for part in tensors)
        pending = PendingRows(self._view(cache, width, False), tuple(features), paths, tokens, last)
        roots = engine.run(read, self.layers, carried, pending, False, compiled=False)
        self.carried = torch.cat([root.states for root in roots[:-1]], 1)[: len(count)]


class ModulesSession:
    """What one call keeps: the layers' caches; depth_cost: see `Unrolled.depth_cost`."""

    def __init__(self, drafter: Unrolled, target: Target) -> None:
        self.drafter, self.cache = drafter, ModulesCache(drafter.draft_layers)
        self.depth_cost = drafter.depth_cost(target)

    def propose(self, context: Context) -> DraftTree:
        drafter, config, cache = self.drafter, self.drafter.config, self.cache
        if not cache.ready or context.nodes == 1:  # behind the shortest prompts
            return chain(context.roots[:, None])
        pending = cache.rows(context, drafter.draft_head is None, config.depth, config.depth * config.width)
        given = cache.carried, pending
        growing = config.width, config.min_prob
        *tree, cache.carried = drafted_by(tree_of, drafter, context, given, *growing, depth_cost=self.depth_cost)
        return trusted(*tree, deepest=drafter.depth)

    def observe(self, accepted: Accepted) -> None:
        self.cache.observe(accepted)
