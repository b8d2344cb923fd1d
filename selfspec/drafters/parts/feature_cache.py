"""What layers over the target's features have not read yet, their KV cache, and the session of drafters that have such
layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec.core.cache import KVCache
from selfspec.core.contract import Accepted, Context
from selfspec.core.rows import PREFILL
from selfspec.core.tree import DraftTree, chain, trusted
from selfspec.drafters.base import Trained
from selfspec.drafters.parts.feature_layer import FeatureReader
from selfspec.drafters.parts.tree_function import Grower, drafted_by

V = TypeVar("V")  # what a function that drafts is given of the layers: a `DraftView`, several, or a cache alone


class PendingRows(NamedTuple, Generic[V]):
    """Features of verified positions that draft layers have not read yet, up to each row's root. features: [B, n, H] of
    each layer read; paths: int64 [B, t], which of the n are read; tokens: int64 [B, t] after them; last: int64 [B],
    which of the t is the root's; carried: [B, K - 1, H], where K layers run in a row: what each but the last
    gave at the last entry of its cache."""

    layers: V
    features: tuple[Tensor, ...]
    paths: Tensor
    tokens: Tensor
    last: Tensor
    carried: Tensor | None = None

    @property
    def stacked(self) -> Tensor:
        """The features of the rows, side by side [B, t, F*H]."""
        stacked = torch.cat(self.features, -1)
        return stacked.gather(1, self.paths[:, :, None].expand(-1, -1, stacked.shape[-1]))


L = TypeVar("L", bound=FeatureReader)


class FeatureCache(Generic[L, V], ABC):
    """The KV caches of draft layers in one call, and their pending rows: features of verified positions that they have
    not read. caches: of layers in a row, of which the k-th has k entries fewer than the first; carried: see
    `PendingRows`; pending: per row [n, F*H]; late: what the last pass accepted, which comes after them; reading: how
    many positions of each row the last function read (a list, and on the device); the next call commits them."""

    def __init__(self, layer: L) -> None:
        self.layer = layer
        self.caches: list[KVCache] = []
        self.carried: Tensor | None = None
        self.pending: list[Tensor] = []
        self.late: Accepted | None = None
        self.reading: tuple[list[int], Tensor | None] | None = None

    def observe(self, accepted: Accepted) -> None:
        """Take in the features of what a pass accepted."""
        self._finish()
        if self.caches and len(accepted.rows) < len(accepted.hidden):
            self._select(accepted.rows)
        self._settle()
        self.late = accepted

    def _finish(self) -> None:
        """What the last function read is committed."""
        if self.reading is not None:
            self._commit(*self.reading)
            self.reading = None

    def _settle(self) -> None:
        """What the last pass accepted is pending."""
        if self.late is None:
            return
        new = self.layer.stacked(self.late.features)
        before = self.pending or [new[0, :0]] * len(new)
        accepted = zip(self.late.rows, self.late.paths, strict=True)
        self.pending, self.late = [torch.cat([before[row], new[row, path]]) for row, path in accepted], None

    @property
    def ready(self) -> bool:
        """Whether there is something to read of every row; not so behind prompts of one token."""
        if self.late is not None and all(self.late.paths):
            return True
        self._settle()
        return bool(self.pending) and min(map(len, self.pending)) > 0

    def rows(self, context: Context, logits: bool, depth: int, more: int = 0) -> PendingRows[V]:
        """The pending rows of a pass, for the function that drafts. A long backlog, such as a prompt, is read at once
        but for the last rows, of which a walk through `depth` levels accepts no more. logits: whether later steps want
        them; more: entries that drafting writes. In compiled passes shapes depend on the budget and the depth alone."""
        engine, late = context.target.engine, self.late
        self._finish()
        if not self.caches:
            self.caches = self._open(len(context.lengths), context.cache)
        most = min(engine.size(depth + 1), engine.size(context.nodes))
        width = engine.size(0 if late is None else late.width, context.nodes)
        if late is None or any(map(len, self.pending)) or max(map(len, late.paths)) > most or late.width > width:
            self._settle()
            self._read_but(context, most)
            paths = [list(range(len(part))) for part in self.pending]
            stacked = self._stacked([len(path) for path in paths], engine.size(most, context.nodes))
            features = list(stacked.split(stacked.shape[-1] // len(self.layer.layers), -1))
        else:
            paths, features = late.paths, [late.features[layer] for layer in self.layer.layers]
            if len(paths) < len(features[0]):
                features = [part[late.rows] for part in features]
            if late.width < width:
                features = [F.pad(part, (0, 0, 0, width - late.width)) for part in features]
        count, device = [len(path) for path in paths], self.layer.device
        read, kept = engine.size(max(count), most), None if self.late is None else self.late.kept
        if kept is None:
            places = torch.tensor([path + [0] * (read - len(path)) for path in paths], device=device)
            tokens, last = self._tokens(context, count, read), torch.tensor([n - 1 for n in count], device=device)
        else:  # what follows the kept nodes is what they emitted
            last, short = (kept.lengths - 1).to(device), max(0, read - kept.path.shape[1])
            both = (kept.path, kept.tokens) if not short else (F.pad(x, (0, short)) for x in (kept.path, kept.tokens))
            places, tokens = (part[:, :read].to(device) for part in both)
        layers = self._view(read + more, logits)
        self.reading, self.pending, self.late = (count, None if kept is None else kept.lengths), [], None
        padded = (engine.padded(one) for one in (*(part.to(device) for part in features), places, tokens, last))
        *read_features, places, tokens, last = padded
        carried = None if self.carried is None else engine.padded(self.carried)
        return PendingRows(layers, tuple(read_features), places, tokens, last, carried)

    @abstractmethod
    def _open(self, rows: int, verified: KVCache) -> list[KVCache]:
        """Caches for so many rows, of the target's capacity."""

    @abstractmethod
    def _view(self, entries: int, logits: bool) -> V:
        """What reads rows and drafts, with room for `entries` more in its cache."""

    @abstractmethod
    def _enter(self, context: Context, count: list[int]) -> None:
        """Read the next `count` positions of each row."""

    def _commit(self, count: list[int], lengths: Tensor | None = None) -> None:
        """So many positions of each row were read; lengths: the same on the device, int64 [B]."""
        starts = self.caches[0].lengths
        for k, cache in enumerate(self.caches):
            rows = zip(starts, count, strict=True)
            paths = [list(range(max(0, start + n - k) - max(0, start - k))) for start, n in rows]
            cache.commit(paths, lengths=lengths if min(starts) >= k else None)

    def _select(self, rows: list[int]) -> None:
        for cache in self.caches:
            cache.select(rows)
        if self.carried is not None:
            self.carried = self.carried[rows]

    def _read_but(self, context: Context, few: int) -> None:
        """Read what is pending until no row has more than `few` left."""
        while max(map(len, self.pending)) > few:
            count = [min(PREFILL, len(part) - 1) for part in self.pending]
            self._enter(context, count)
            self._commit(count)
            self.pending = [part[n:] for part, n in zip(self.pending, count, strict=True)]

    def _stacked(self, count: list[int], width: int) -> Tensor:
        """The features of the next `count` positions of each row, [B, width, F*H]."""
        stacked = self.pending[0].new_zeros(len(count), width, self.pending[0].shape[-1])
        for row, (part, n) in enumerate(zip(self.pending, count, strict=True)):
            stacked[row, :n] = part[:n]
        return stacked

    def _tokens(self, context: Context, count: list[int], width: int) -> Tensor:
        """The tokens after the next `count` positions of each row, int64 [B, width]."""
        ends = zip(context.tokens, self.caches[0].lengths, count, strict=True)
        ids = [tokens[start + 1 : start + 1 + n] + [0] * (width - n) for tokens, start, n in ends]
        return torch.tensor(ids, device=self.layer.device)


class DraftSession:
    """The session of drafters whose layers read the target's features: in each pass one function reads what was
    accepted and grows a tree behind it."""

    def __init__(
        self,
        drafter: Trained,
        cache: FeatureCache[Any, Any],
        grower: Grower,
        inputs: tuple[Any, ...] = (),
        entries: int = 0,
        logits: bool = False,
        depth_cost: float = 0.0,
    ) -> None:
        """cache: of the layers; grower: given `inputs` and the pending rows, it returns what layers in a row carry on
        behind the tree; entries: that drafting writes; logits: whether it reads the layers' own; depth_cost: see
        `drafted_by`."""
        self.drafter, self.cache, self.grower, self.inputs = drafter, cache, grower, inputs
        self.entries, self.logits, self.depth_cost = entries, logits, depth_cost

    def propose(self, context: Context) -> DraftTree:
        drafter, cache = self.drafter, self.cache
        if not cache.ready or context.nodes == 1:  # behind the shortest prompts nothing was seen of a row yet
            return chain(context.roots[:, None])
        pending = cache.rows(context, self.logits, drafter.depth, self.entries)
        parts = drafted_by(self.grower, drafter, context, (*self.inputs, pending), self.depth_cost)
        if len(parts) > 3:
            cache.carried = parts[3]
        return trusted(*parts[:3], deepest=drafter.depth)

    def observe(self, accepted: Accepted) -> None:
        self.cache.observe(accepted)
