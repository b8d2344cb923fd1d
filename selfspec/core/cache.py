"""The KV cache of tree decoding: keys, values and states of kept tokens, which passes read and add to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.core.memory import enough, own_storage, zeros
from selfspec.core.pass_cache import KV, Buffer, Buffers, TextCache, places_of
from selfspec.core.recurrent.mixers import LayerState, over_trees, replayed
from selfspec.core.support import cache_name, decoder_of, unhooked
from selfspec.core.verify import Kept
from selfspec.engine.engine import Engine
from selfspec.engine.keys import bucket

SMALLEST, COMPILED = 256, 1024  # entries of the smallest buffer, and in compiled passes: each size is compiled
STEP = 64  # eager passes attend over the filled entries, rounded up to a multiple of this


def compact(stores: list[Tensor], lengths: Tensor, paths: Tensor) -> None:
    """Move the entries of the nodes `paths`, int64 [B, D], of the last pass to the end of each row's kept ones.

    stores: [G, rows, heads, capacity, D] each, G buffers of one shape, of at least B rows.
    """
    to = lengths[:, None] + torch.arange(paths.shape[1], device=paths.device)
    for store in stores:
        groups, rows, heads, capacity, width = store.shape
        group = (torch.arange(groups, device=paths.device) * rows * heads * capacity)[:, None]
        source, place = (
            (group + places_of(at, heads, capacity)).flatten().to(store.device) for at in (lengths[:, None] + paths, to)
        )
        flat = store.view(-1, width)
        flat.index_copy_(0, place, flat.index_select(0, source))


@torch.no_grad()
def one_token(
    model: PreTrainedModel, layers: int, device: torch.device
) -> tuple[list[tuple[Tensor, Tensor] | None], dict[int, LayerState]]:
    """Keys and values [1, heads, 1, D] of one token in each layer, by which buffers are made, and what layers with a
    state keep of one row at the beginning."""
    cache, ids = TextCache(layers, kept=True), torch.zeros(1, 2, dtype=torch.long, device=device)
    decoder = decoder_of(unhooked(model))
    over_trees(decoder)
    decoder(input_ids=ids, use_cache=True, **{cache_name(decoder): cache})
    pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    return [None if k is None or v is None else (k[:, :, :1], v[:, :, :1]) for k, v in pairs], cache.beginning()


class KVCache:
    """Keys and values of B rows with one length each, in static buffers of `capacity` entries, a power of two times
    256 (1,024 for compiled passes).

    A pass writes N entries behind every row's own length; `commit` compacts those of the accepted nodes and drops the
    rest. Buffers have `Engine.size(B)` rows; those beyond B are idle.
    """

    def __init__(
        self,
        like: Sequence[tuple[Tensor, Tensor] | None],
        rows: int,
        capacity: int,
        limit: int,
        engine: Engine,
        device: torch.device,
        states: dict[int, LayerState] | None = None,
        fixed: bool = False,
    ) -> None:
        """like: keys and values [1, heads, 1, D] of one token in each layer, None where a layer keeps none; limit: the
        most entries that any row will need; device: of the tokens; states: the initial state of one row, by recurrent
        layer; fixed: whether every pass runs all rows over all entries, rows that ended too."""
        self.like, self.engine, self.limit, self.device = like, engine, limit, device
        self.lengths, self.fixed = [0] * rows, fixed
        self.idle = engine.size(rows) - rows
        self.store_rows = engine.size(rows)  # rows of the stores
        self.smallest = SMALLEST if engine.eager else COMPILED
        self.capacity = bucket(capacity, self.smallest)
        self.stores: list[Tensor] = []  # [G, store_rows, heads, capacity, D]
        self.members: list[list[tuple[int, int]]] = []  # of each store, (layer, 0 for keys or 1 for values)
        self._views: dict[tuple[int, int, int, int], Buffers] = {}  # of the present stores
        first, self.beginning = torch.zeros(self.rows, dtype=torch.long, device="cpu"), states or {}
        # Of each layer: the state at the last commit, then those that `KV.committed` appended
        self.states = {layer: [state.rows(first)] for layer, state in (states or {}).items()}
        self._closed = False
        self._lengths: Tensor | None = None  # `lengths` on the device, of all rows; None: to be uploaded

    @property
    def rows(self) -> int:
        """Rows of the buffers: the first ones of the stores."""
        return len(self.lengths) + self.idle

    def view(self, start: int, stop: int, nodes: int, rows: int | None = None) -> KV:
        """Buffers of layers start to stop - 1 with room for `nodes` more entries. They serve one pass: a later call may
        allocate larger ones. rows: of the first ones alone, where not every pass runs all of them.

        Raises ValueError where the call that the cache was made for has ended, MemoryError where what it will need at
        most does not fit.
        """
        if self._closed:
            raise ValueError(
                "this call of generate has ended; a session and its context serve one call, make others by "
                "drafter.session(target, rows)"
            )
        need = max(self.lengths) + nodes + (1 if self.states else 0)  # see `tree_pass`
        if need > self.capacity:
            self._grow(bucket(need, self.smallest))
        grows = self.engine.eager and not self.fixed
        filled = min(self.capacity, -(-need // STEP) * STEP) if grows else self.capacity
        rows = self.rows if rows is None else rows
        if (key := (start, stop, filled, rows)) not in self._views:
            self._allocate(start, stop)
            self._views[key] = self._buffers(*key)
        return KV(self._views[key], self.row_lengths()[:rows], self._opened(start, stop))

    def _opened(self, start: int, stop: int) -> dict[int, list[LayerState]]:
        """What layers of this range keep, for one pass or several over the same tree. Drops what was not committed."""
        opened = {layer: stages for layer, stages in self.states.items() if start <= layer < stop}
        for stages in opened.values():
            stages[:] = [stages[-1].first(0)]
        return opened

    def leave(self, left: dict[int, LayerState]) -> None:
        """Take in what the nodes of a pass left, for `commit`."""
        for layer, state in left.items():
            self.states[layer][-1] = self.states[layer][-1]._replace(written=state.written)

    def row_lengths(self, device: torch.device | None = None) -> Tensor:
        """int64 [rows], on the tokens' device unless another is named. Never written to."""
        if self._lengths is None:
            self._lengths = torch.tensor(self.lengths + [0] * self.idle, device=self.device)
        return self._lengths if device is None else self._lengths.to(device)

    def _buffers(self, start: int, stop: int, filled: int, rows: int) -> Buffers:
        parts = {member: (s, i) for s, group in enumerate(self.members) for i, member in enumerate(group)}
        pairs: list[tuple[Buffer, Buffer] | None] = []
        for layer, like in enumerate(self.like):
            if like is None or not start <= layer < stop:
                pairs.append(None)
                continue
            made = []
            for which in (0, 1):
                (store, place), (_, heads, _, width) = parts[layer, which], like[which].shape
                part = self.stores[store][place, :rows].flatten(0, 2)
                part = part if self.engine.eager or part.device.type != "cpu" else own_storage(part)
                made.append(Buffer(part, (rows, heads, self.capacity, width), filled))
            pairs.append((made[0], made[1]))
        buffers = Buffers(pairs)
        buffers.layout = tuple(
            None if pair is None else tuple((b.shape, b.filled, b.flat.dtype, b.flat.device) for b in pair)
            for pair in pairs
        )
        buffers.tensors = [buffer.flat for pair in pairs if pair is not None for buffer in pair]
        return buffers

    def _allocate(self, start: int, stop: int) -> None:
        """Allocate stores for layers of this range that have none. Tensors of one shape share a store, so that a commit
        is one copy. In compiled passes on a GPU each has its own, since compiled code must not write to a part of an
        input."""
        known = {member for group in self.members for member in group}
        groups: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        for layer, like in enumerate(self.like):
            for which in (0, 1):
                if like is not None and start <= layer < stop and (layer, which) not in known:
                    part = like[which]
                    alike = (part.shape[1], part.shape[3], part.dtype, part.device)
                    whole = self.engine.eager or part.device.type == "cpu"
                    groups.setdefault(alike if whole else (*alike, layer, which), []).append((layer, which))
        entries, sizes = bucket(max(self.limit, self.capacity), self.smallest), Counter[torch.device]()
        for (heads, width, dtype, device, *_), group in groups.items():
            sizes[device] += len(group) * self.store_rows * heads * entries * width * dtype.itemsize
        for state in (part for stages in self.states.values() for part in stages[0].states.values()):
            sizes[state.device] += state.nbytes
        enough(sizes, self.rows, entries)
        for (heads, width, dtype, device, *_), group in groups.items():
            self.stores.append(zeros((len(group), self.store_rows, heads, self.capacity, width), dtype, device))
            self.members.append(group)

    def _grow(self, capacity: int) -> None:
        for i in range(len(self.stores)):
            old = self.stores[i][:, : self.rows]
            self.stores[i] = zeros((*old.shape[:3], capacity, old.shape[4]), old.dtype, old.device)
            self.stores[i][:, :, :, : self.capacity] = old
            self._views = {}
            del old  # before the next one is made
        self.capacity, self.store_rows, self._views = capacity, self.rows, {}

    def commit(self, paths: list[list[int]], kept: Kept | None = None, lengths: Tensor | None = None) -> None:
        """Keep of the last pass only these nodes of each row (ascending; may be empty) and drop all others. kept:
        `paths` on the device, which spares an upload; lengths: int64 [B] on the device, how many nodes each row keeps,
        given only where these are its first ones."""
        moves = bool(self.stores) and any(path != list(range(len(path))) for path in paths)
        replays = bool(self.states) and any(paths)
        if moves or replays:
            kept = Kept.of(paths, paths, self.device) if kept is None else kept
            depth = self.engine.size(max(map(len, paths)))
            each = torch.arange(depth, device=self.device)  # idle rows, and places behind a path, move nowhere
            path = kept.path[:, :depth]
            if path.shape[1] < depth:
                path = torch.cat([path, each[path.shape[1] :].expand(len(paths), -1)], 1)
            path = torch.cat([path, each.expand(self.idle, -1)]) if self.idle else path
            if replays:
                counts = nn.functional.pad(kept.lengths, (0, self.idle))
                self._advance(torch.where(each < counts[:, None], path, 0), counts)
        if moves:
            assert max(self.lengths) + depth <= self.capacity, "a pass leaves room for the paths through its tree"
            for device in {store.device for store in self.stores}:
                stores = [store for store in self.stores if store.device == device]
                moved = self.row_lengths(device), path.to(device).contiguous()
                self.engine.run(compact, stores, *moved, compiled=device.type != "cpu")  # on a CPU it is a few copies
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]
        more = lengths if kept is None else kept.lengths
        if more is None or self._lengths is None:
            self._lengths = None
        else:
            self._lengths = self._lengths + (nn.functional.pad(more, (0, self.idle)) if self.idle else more)

    def _advance(self, paths: Tensor, counts: Tensor) -> None:
        """Replay the accepted paths, int64 [rows, D], of so many nodes, int64 [rows], in layers that keep a state."""
        done = replayed({i: stages[0] for i, stages in self.states.items() if len(stages) == 1}, paths, counts)
        for layer, stages in self.states.items():  # those of others were replayed by `KV.committed` already
            stages[:] = [done[layer]] if layer in done else stages[1:]

    def select(self, left: list[int]) -> None:
        """Keep these rows of the batch, in this order. Entries that were not committed are lost."""
        size = self.rows if self.fixed else self.engine.size(len(left))
        self._move({to: row for to, row in enumerate(left) if to != row})  # buffers are the first rows of the stores
        index = torch.tensor(left + left[:1] * (size - len(left)), device="cpu")
        self.states = {layer: [stages[0].rows(index)] for layer, stages in self.states.items()}
        self.lengths, self.idle, self._views = [self.lengths[row] for row in left], size - len(left), {}
        self._lengths = None

    def restart(self, row: int) -> None:
        """Keep nothing of a row. Entries that were not committed are lost, of all rows."""
        for layer, stages in self.states.items():
            stages[:] = [stages[0].first(0)]
            for name, part in stages[0].states.items():
                part[row] = self.beginning[layer].states[name][0]
        self.lengths[row], self._lengths = 0, None

    def _move(self, rows: dict[int, int]) -> None:
        """Copy entries to rows from others."""
        if not rows:
            return
        filled = max(self.lengths[row] for row in rows.values())
        for store in self.stores:
            entries = store[:, :, :, :filled]
            entries[:, list(rows)] = entries[:, list(rows.values())]

    def close(self) -> None:
        """The call is over; a later pass is refused."""
        self._closed = True
