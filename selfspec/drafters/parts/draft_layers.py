"""The KV caches of draft layers, of one or of several in a row, and how they read what was accepted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.core.cache import KVCache
from selfspec.core.contract import Context
from selfspec.drafters.parts.feature_cache import FeatureCache, PendingRows
from selfspec.drafters.parts.feature_layer import DraftView, FeatureLayer, RootState
from selfspec.drafters.parts.views import Block


def behind(k: int, starts: Tensor, carried: Tensor, outputs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What layer k reads of rows that the layer before it ran: states [B, t, H], the tokens after them, int64 [B, t],
    and int64 [B]: how many of the first rows it has no entry for. starts: int64 [B], entries of the first layer before
    them; carried: [B, H], the output of the layer before at its last entry so far; outputs: [B, t, H], its new ones."""
    order = torch.arange(tokens.shape[1], device=tokens.device)
    missing = (k - starts).clamp(min=0)[:, None]
    places = (order + (missing > 0).long())[:, :, None].expand(-1, -1, outputs.shape[-1])
    states = torch.cat([carried[:, None], outputs], 1).gather(1, places)
    return states, tokens.gather(1, (order + missing).clamp(max=len(order) - 1)), missing[:, 0]


def read(layers: Sequence[FeatureLayer], pending: PendingRows[tuple[DraftView, ...]], logits: bool) -> list[RootState]:
    """Read pending rows with every layer, up to each row's root."""
    tokens, starts = pending.tokens, pending.layers[0].kv.lengths
    entering, last, after = layers[0].entry(layers[0].fused(pending.stacked), tokens), pending.last, tokens
    roots: list[RootState] = []
    outputs = entering  # of the layer before
    for k, (layer, view) in enumerate(zip(layers, pending.layers, strict=True)):
        if k and pending.carried is not None:
            states, after, missing = behind(k, starts, pending.carried[:, k - 1], outputs, tokens)
            entering, last = layer.entry(states, after), (pending.last - missing).clamp(min=0)
        root, outputs = layer.read_entries(view, entering, after, last, logits and k == 0)
        roots.append(root)
    return roots


def carried_by(roots: Sequence[RootState]) -> Tensor:
    """What layers in a row carry on, [B, K - 1, H]: the outputs of each but the last at the roots."""
    return torch.cat([roots[0].states[:, :0], *(root.states for root in roots[:-1])], 1)


class LayersCache(FeatureCache[FeatureLayer, tuple[DraftView, ...]]):
    """The caches of a draft layer, or of several in a row."""

    def __init__(self, layers: Sequence[FeatureLayer]) -> None:
        super().__init__(layers[0])
        self.layers = layers

    @property
    def ready(self) -> bool:
        """Whether every layer has an entry to begin from in every row."""
        if not super().ready:
            return False
        if len(self.layers) == 1 or (self.caches and min(self.caches[0].lengths) >= len(self.layers)):
            return True
        self._settle()  # before rows are counted: some may have ended
        before = self.caches[0].lengths if self.caches else [0] * len(self.pending)
        return min(n + len(part) for n, part in zip(before, self.pending, strict=True)) >= len(self.layers)

    def _open(self, rows: int, verified: KVCache) -> list[KVCache]:
        shape = rows, len(self.layers) - 1, self.layer.width
        self.carried = torch.zeros(shape, dtype=self.layer.tail.dtype, device=self.layer.device)
        return [one.tail.target.cache(rows, verified.capacity, verified.limit) for one in self.layers]

    def _view(self, entries: int, logits: bool) -> tuple[DraftView, ...]:
        caches = zip(self.layers, self.caches, strict=True)
        return tuple(draft_view(layer.tail, one, entries, logits) for layer, one in caches)

    def _enter(self, context: Context, count: list[int]) -> None:
        assert self.carried is not None
        width, engine, device = max(count), context.target.engine, self.layer.device
        order = torch.arange(width, device=device).expand(len(count), -1)
        tensors = (
            *self._stacked(count, width).chunk(len(self.layer.layers), -1),
            order,
            self._tokens(context, count, width),
            torch.tensor([max(0, n - 1) for n in count], device=device),
            self.carried,
        )
        *features, paths, tokens, last, carried = (engine.padded(part) for part in tensors)
        pending = PendingRows(self._view(width, False), tuple(features), paths, tokens, last, carried)
        roots = engine.run(read, self.layers, pending, False, compiled=False)
        read_some = torch.tensor([n > 0 for n in count], device=device)[:, None, None]
        self.carried = torch.where(read_some, carried_by(roots)[: len(count)], self.carried)


def draft_view(block: Block, cache: KVCache, entries: int, logits: bool) -> DraftView:
    """A draft layer with room for `entries` more in its cache; drafting parts have lm_head where logits are wanted."""
    layers, target = (block.first, block.layer + 1), block.target
    part = target.part(*layers, (block.layer,), logits=False)
    drafting = target.part(*layers, (block.layer,)) if logits else part
    target.part(block.layer + 1, block.layer + 1)  # norm and lm_head alone; no view is built inside a graph
    return DraftView(part, cache.view(*layers, entries), drafting)
