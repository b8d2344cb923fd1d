"""The KV cache of tree decoding and the attention masks over it. Only this file touches transformers' cache.

Keys and values lie in static buffers that passes write into by index. What changes from pass to pass is a tensor: how
long each row is, which entries a pass writes, which nodes see which. So the same functions serve eager and compiled
passes.

A cache is what a stock model hands to each of its layers, so it also carries what a part of a model needs in one pass:
the hidden states that enter its first layer, and the outputs of the layers that are read (see `selfspec.core.target`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from selfspec.core.memory import enough, own_storage, zeros
from selfspec.core.recurrent.mixers import LayerState, TreeStates, replayed
from selfspec.engine.engine import Engine, bucket

SMALLEST, COMPILED = 256, 1024  # entries of the smallest buffer, and in compiled passes: each size is compiled
STEP = 64  # eager passes attend over the filled entries, rounded up to a multiple of this


class PassCache(Cache, TreeStates):
    """entering: hidden states [B, N, H] that enter the first layer of this pass, where it is not layer 0. outputs:
    [B, N, H] of the layers read in this pass, by index; -1 is the decoder's, after its final norm."""

    def __init__(
        self,
        layers: list[CacheLayerMixin],
        entering: Tensor | None = None,
        over_trees: bool = True,
        below: Tensor | None = None,
        states: dict[int, LayerState] | None = None,
    ) -> None:
        Cache.__init__(self, layers=layers)  # type: ignore[arg-type]
        TreeStates.__init__(self, over_trees, below, states)
        self.entering = entering
        self.outputs: dict[int, Tensor] = {}

    # What stock modules that keep a state ask of their cache.

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: modules then take the inputs of all nodes to `update_conv_state`, however many there are."""

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 4, **kwargs: Any
    ) -> Tensor:
        return self.taps(conv_states, layer_idx, state_idx, conv_kernel_size)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        return self.recurrence(layer_idx, state_idx)

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        return True


class _Layer(CacheLayerMixin):
    """What one layer sees in one pass. Sliding layers keep everything; their window is in the mask."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class _GrowingLayer(_Layer):
    """Keeps keys and values of all passes, one behind another."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.keys is not None and self.values is not None:
            key_states = torch.cat([self.keys, key_states], 2)
            value_states = torch.cat([self.values, value_states], 2)
        self.keys, self.values = key_states, value_states
        return key_states, value_states


class TextCache(PassCache):
    """For passes over whole texts without draft trees. With `kept`, keys and values of earlier passes stay visible;
    masks and positions are then the caller's."""

    def __init__(self, n_layers: int, kept: bool = False) -> None:
        super().__init__([_GrowingLayer() if kept else _Layer() for _ in range(n_layers)], over_trees=kept)
        self.kept = kept

    def see(self, below: Tensor | None) -> None:
        """What nodes of the next pass descend from, among all so far: bool [B, n, m]; None: a chain."""
        self.over_trees, self.below, self._indices = self.kept or below is not None, below, {}
        for recurrence in (one for of in self.recurrences.values() for one in of):
            recurrence.below = below


class Buffer(NamedTuple):
    """Keys or values of one layer. flat: [rows * heads * capacity, D], which passes write into; shape: [rows, heads,
    capacity, D]; filled: entries of each row that a pass attends over."""

    flat: Tensor
    shape: tuple[int, int, int, int]
    filled: int


class Buffers(list[tuple[Buffer, Buffer] | None]):
    """Keys and values of each layer, None for layers that do not run. layout: stands for all of them where compiled
    code is looked up; set once, other tensors are another list."""

    layout: Hashable = None


class KV(NamedTuple):
    """A KV cache as tensors, for one pass or several in a row. lengths: int64 [B], the kept entries of each row;
    states: of layers that keep one, as the cache holds them, and once more behind each `committed`; empty where no
    layer keeps one."""

    buffers: Buffers
    lengths: Tensor
    states: list[dict[int, LayerState]]

    def committed(self, counts: Tensor) -> KV:
        """With the first `counts`, int64 [B], nodes of the last pass, which ran a chain, committed: for passes behind
        them in the same function."""
        if self.states:
            nodes = max(n for state in self.states[-1].values() for n in (x.shape[2] for x in state.inputs.values()))
            path = torch.arange(nodes, device=counts.device).expand(len(counts), -1)
            self.states.append(replayed(self.states[-1], path, counts))
        return self._replace(lengths=self.lengths + counts)

    @property
    def size(self) -> int:
        """Entries that a pass attends over."""
        return next((pair[0].filled for pair in self.buffers if pair is not None), 0)


class _BufferLayer(_Layer):
    """Writes the pass's nodes into buffers by index. places: where its entries go, by heads (see `_places`)."""

    def __init__(self, keys: Buffer, values: Buffer, places: Tensor) -> None:
        super().__init__()
        self.buffers, self.places = (keys, values), places

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = (
            _written(buffer, self.places, states)
            for buffer, states in zip(self.buffers, (key_states, value_states), strict=True)
        )
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.buffers[0].filled, 0

    def get_max_length(self) -> int:
        return self.buffers[0].filled


def _written(buffer: Buffer, places: Tensor, states: Tensor) -> Tensor:
    """The layer's entries [B, heads, filled, D] after `states` [B, heads, N, D] were written."""
    buffer.flat.index_copy_(0, places, states.reshape(-1, states.shape[-1]))
    return buffer.flat.view(buffer.shape)[:, :, : buffer.filled]


def _places(entries: Tensor, heads: int, capacity: int) -> Tensor:
    """int64 [B * heads * n]: where entries [B, n] of each row lie in a flat buffer."""
    rows = torch.arange(len(entries), device=entries.device)[:, None] * heads
    starts = (rows + torch.arange(heads, device=entries.device)) * capacity  # [B, heads]
    return (starts[:, :, None] + entries[:, None]).flatten()


def pass_cache(kv: KV, entries: Tensor, entering: Tensor | None, below: Tensor | None) -> PassCache:
    """The cache that a model is given in one pass; entries: int64 [B, n], where its nodes are written; below: bool [B,
    n, m], see `recurrent.recurrence.Recurrence`."""
    places: dict[tuple[int, torch.device], Tensor] = {}
    layers: list[CacheLayerMixin] = []
    for pair in kv.buffers:
        if pair is None:
            layers.append(_Layer())
            continue
        (_, heads, capacity, _), device = pair[0].shape, pair[0].flat.device
        if (heads, device) not in places:
            places[heads, device] = _places(entries, heads, capacity).to(device)
        layers.append(_BufferLayer(*pair, places[heads, device]))
    return PassCache(layers, entering, True, below, kv.states[-1] if kv.states else None)


def compact(stores: list[Tensor], heads: list[int], capacity: int, lengths: Tensor, paths: Tensor) -> None:
    """Move the entries of the nodes `paths`, int64 [B, D], of the last pass to the end of each row's kept ones.

    stores: [G, rows * heads * capacity, D] each, G buffers of one shape, of at least B rows; heads: of each store.
    """
    to = lengths[:, None] + torch.arange(paths.shape[1], device=paths.device)
    for store, count in zip(stores, heads, strict=True):
        groups, entries, width = store.shape
        group = (torch.arange(groups, device=paths.device) * entries)[:, None]
        source, place = (
            (group + _places(at, count, capacity)).flatten().to(store.device) for at in (lengths[:, None] + paths, to)
        )
        flat = store.view(-1, width)
        flat.index_copy_(0, place, flat.index_select(0, source))


def _kept(state: LayerState) -> LayerState:
    return state._replace(inputs={}, written=[])


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
    ) -> None:
        """like: keys and values [1, heads, 1, D] of one token in each layer, None where a layer keeps none; limit:
        entries that the longest row will need at most; device: of the tokens; states: of one row at the beginning, of
        layers that keep one."""
        self.like, self.engine, self.limit, self.device = like, engine, limit, device
        self.lengths = [0] * rows
        self.idle = engine.size(rows) - rows
        self.store_rows = engine.size(rows)  # rows of the stores
        self.smallest = SMALLEST if engine.eager else COMPILED
        self.capacity = bucket(capacity, self.smallest)
        self.stores: list[Tensor] = []  # [G, store_rows * heads * capacity, D]
        self.members: list[list[tuple[int, int]]] = []  # of each store, (layer, 0 for keys or 1 for values)
        self._views: dict[tuple[int, int, int], Buffers] = {}  # of the present stores
        self._open: dict[tuple[int, int], list[dict[int, LayerState]]] = {}  # of passes since a commit
        self._due: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # paths and their lengths, by what is open
        first = torch.zeros(self.rows, dtype=torch.long)
        self.states = {layer: state.rows(first) for layer, state in (states or {}).items()}
        self._closed = False

    @property
    def rows(self) -> int:
        """Rows of the buffers: the first ones of the stores."""
        return len(self.lengths) + self.idle

    def view(self, start: int, stop: int, nodes: int, ran: int = 0) -> KV:
        """Layers start to stop - 1 with room for `nodes` entries more, for one pass: a later one may need larger
        buffers. ran: nodes of the same tree that an earlier pass ran.

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
        filled = min(self.capacity, -(-need // STEP) * STEP) if self.engine.eager else self.capacity
        if (start, stop, filled) not in self._views:
            self._allocate(start, stop)
            self._views[start, stop, filled] = self._buffers(start, stop, filled)
        return KV(self._views[start, stop, filled], self.row_lengths(self.device), self._opened(start, stop, ran))

    def _opened(self, start: int, stop: int, ran: int) -> list[dict[int, LayerState]]:
        """What layers of this range keep, for one pass or several over the same tree."""
        self._settle()
        for stages in self._open.values():
            self.states |= stages[-1]
        states = {layer: state for layer, state in self.states.items() if start <= layer < stop}
        if not states:
            return []
        # What a pass left that was not committed is lost, but for the nodes on which this one builds.
        states = {layer: state.first(ran) if ran else _kept(state) for layer, state in states.items()}
        self._open[start, stop] = [states]
        return self._open[start, stop]

    def _settle(self) -> None:
        """Take over the states behind what was committed before the function ran that was to run its nodes."""
        for at, replay in self._due.items():
            stages = self._open.pop(at)
            done = stages[1] if len(stages) > 1 else replayed(stages[0], *replay)  # [1]: by `KV.committed`
            self.states |= {layer: _kept(state) for layer, state in done.items()}
        self._due = {}

    def leave(self, start: int, stop: int, left: dict[int, LayerState]) -> None:
        """Take in what the nodes of a pass over these layers left, for `commit`."""
        for layer, state in left.items():
            layers = self._open[start, stop][-1]
            layers[layer] = layers[layer]._replace(inputs=state.inputs, written=state.written)

    def row_lengths(self, device: torch.device) -> Tensor:
        """int64 [rows]."""
        return torch.tensor(self.lengths + [0] * self.idle, device=device)

    def _buffers(self, start: int, stop: int, filled: int) -> Buffers:
        parts = {member: (s, i) for s, group in enumerate(self.members) for i, member in enumerate(group)}
        pairs: list[tuple[Buffer, Buffer] | None] = []
        for layer, like in enumerate(self.like):
            if like is None or not start <= layer < stop:
                pairs.append(None)
                continue
            made = []
            for which in (0, 1):
                (store, place), (_, heads, _, width) = parts[layer, which], like[which].shape
                part = self.stores[store][place, : self.rows * heads * self.capacity]
                part = part if self.engine.eager or part.device.type != "cpu" else own_storage(part)
                made.append(Buffer(part, (self.rows, heads, self.capacity, width), filled))
            pairs.append((made[0], made[1]))
        buffers = Buffers(pairs)
        buffers.layout = tuple(
            None if pair is None else tuple((b.shape, b.filled, b.flat.dtype, b.flat.device) for b in pair)
            for pair in pairs
        )
        return buffers

    def _allocate(self, start: int, stop: int) -> None:
        """Stores for the layers of this range that have none: one for all of a shape, so that a commit is one copy; one
        for each in compiled passes elsewhere than on the CPU, which must not write to a part of an input."""
        known = {member for group in self.members for member in group}
        groups: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        for layer, like in enumerate(self.like):
            for which in (0, 1):
                if like is not None and start <= layer < stop and (layer, which) not in known:
                    part = like[which]
                    alike = (part.shape[1], part.shape[3], part.dtype, part.device)
                    whole = self.engine.eager or part.device.type == "cpu"
                    groups.setdefault(alike if whole else (*alike, layer, which), []).append((layer, which))
        entries, sizes = bucket(max(self.limit, self.capacity), self.smallest), dict[torch.device, int]()
        for (heads, width, dtype, device, *_), group in groups.items():
            size = len(group) * self.store_rows * heads * entries * width * dtype.itemsize
            sizes[device] = sizes.get(device, 0) + size
        for state in self.states.values():
            for device, size in state.sizes().items():
                sizes[device] = sizes.get(device, 0) + size
        enough(sizes, self.rows, entries)
        for (heads, width, dtype, device, *_), group in groups.items():
            flat = len(group), self.store_rows * heads * self.capacity, width
            self.stores.append(zeros(flat, dtype, device))
            self.members.append(group)

    def _shaped(self, store: int) -> Tensor:
        """A store as [G, store_rows, heads, capacity, D]."""
        whole = self.stores[store]
        return whole.view(len(whole), self.store_rows, self._heads(store), self.capacity, whole.shape[2])

    def _heads(self, store: int) -> int:
        layer, which = self.members[store][0]
        like = self.like[layer]
        assert like is not None
        return like[which].shape[1]

    def _grow(self, capacity: int) -> None:
        for store in range(len(self.stores)):
            old = self._shaped(store)[:, : self.rows]
            new = zeros((*old.shape[:3], capacity, old.shape[4]), old.dtype, old.device)
            new[:, :, :, : self.capacity] = old
            self.stores[store] = new.view(len(new), -1, old.shape[4])
            self._views = {}
            del old
        self.capacity, self.store_rows, self._views = capacity, self.rows, {}

    def commit(self, paths: list[list[int]]) -> None:
        """Keep of the last pass only these nodes of each row (ascending; may be empty) and drop all others."""
        if self.stores and any(path != list(range(len(path))) for path in paths):
            depth = self.engine.size(max(map(len, paths)))
            assert max(self.lengths) + depth <= self.capacity, "a pass leaves room for the paths through its tree"
            # Rows that keep fewer copy further entries onto themselves.
            padded = [path + list(range(len(path), depth)) for path in paths] + [list(range(depth))] * self.idle
            for device in {store.device for store in self.stores}:
                at = [i for i, store in enumerate(self.stores) if store.device == device]
                stores, heads = [self.stores[i] for i in at], [self._heads(i) for i in at]
                moved = self.row_lengths(device), torch.tensor(padded, device=device)
                worth = device.type != "cpu"  # there it is few copies
                self.engine.run(compact, stores, heads, self.capacity, *moved, compiled=worth)
        if self.states and any(paths):
            self._advance(paths)
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]

    def _advance(self, paths: list[list[int]]) -> None:
        """Replay the accepted paths in layers that keep a state."""
        self._settle()
        depth = self.engine.size(max(map(len, paths)))
        padded = torch.tensor([path + [0] * (depth - len(path)) for path in paths] + [[0] * depth] * self.idle)
        counts = torch.tensor([*map(len, paths), *[0] * self.idle])
        for at, stages in list(self._open.items()):
            if len(stages) == 1 and not any(state.ran for state in stages[0].values()):
                self._due[at] = padded, counts  # drafters commit what the next function is to run
                continue
            if len(stages) > 1:  # replayed by `KV.committed` already; what later passes left belongs to the next commit
                stages.pop(0)
                self.states |= {layer: _kept(state) for layer, state in stages[0].items()}
            else:
                self.states |= replayed(stages[0], padded, counts)
                del self._open[at]

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, int64 [B'], in this order. Entries that were not committed are lost."""
        left = rows.tolist()
        size = self.engine.size(len(left))
        if self.engine.eager:
            self.stores = [self._shaped(i)[:, rows.to(s.device)].flatten(1, 3) for i, s in enumerate(self.stores)]
            self.store_rows = size
        else:  # only moved rows are copied; smaller buffers are the first rows of the present ones
            self._move({to: row for to, row in enumerate(left) if to != row})
        index = torch.tensor(left + left[:1] * (size - len(left)))
        self._settle()
        self.states = {layer: state.rows(index) for layer, state in self.states.items()}
        self._open = {}
        self.lengths, self.idle, self._views = [self.lengths[row] for row in left], size - len(left), {}

    def _move(self, rows: dict[int, int]) -> None:
        """Copy entries to rows from others."""
        if not rows:
            return
        filled = max(self.lengths[row] for row in rows.values())
        for i in range(len(self.stores)):
            entries = self._shaped(i)[:, :, :, :filled]
            entries[:, list(rows)] = entries[:, list(rows.values())]

    def close(self) -> None:
        """The call is over; a later pass is refused."""
        self._closed = True
