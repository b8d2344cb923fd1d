"""The KV cache of tree decoding, and the attention masks over it. Only this file and `slots`, which serves the compiled
engine, touch transformers' cache.

A cache is what a stock model hands to each of its layers, so it also carries what a part of a model needs in one pass:
the hidden states that enter its first layer, and the outputs of layers that are watched (see `selfspec.core.target`).
"""

from __future__ import annotations

from typing import Any

import psutil
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from selfspec.core.tree import DraftTree


class PassCache(Cache):
    """given: hidden states [B, N, H] that enter the first layer of this pass, where it is not layer 0. seen: outputs
    [B, N, H] of the layers watched in this pass, by index; -1 is the decoder's, after its final norm."""

    def __init__(self, layers: list[CacheLayerMixin]) -> None:
        super().__init__(layers=layers)  # type: ignore[arg-type]
        self.given: Tensor | None = None
        self.seen: dict[int, Tensor] = {}

    def enter(self, given: Tensor | None) -> None:
        """Forget the pass before; `given` enters the next."""
        self.given, self.seen = given, {}


class _TextLayer(CacheLayerMixin):
    """Passes keys and values through; with `kept`, behind those of the passes before."""

    is_sliding = False

    def __init__(self, kept: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self.is_initialized = kept, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.kept:
            if self.keys is not None and self.values is not None:
                key_states = torch.cat([self.keys, key_states], 2)
                value_states = torch.cat([self.values, value_states], 2)
            self.keys, self.values = key_states, value_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class TextCache(PassCache):
    """For passes over whole texts without draft trees. With `kept`, keys and values of earlier passes stay visible;
    masks and positions are then the caller's."""

    def __init__(self, n_layers: int, kept: bool = False) -> None:
        super().__init__([_TextLayer(kept) for _ in range(n_layers)])


class _Layer(CacheLayerMixin):
    """What transformers sees of one layer: a window onto the cache's storage."""

    is_sliding = False  # sliding layers keep everything here; their window is in the mask

    def __init__(self, cache: TreeCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = cache
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:  # the first pass: `keep` allocates storage from these
            self.cache.first[self] = (key_states, value_states)
            return key_states, value_states
        return self.cache.append(self.keys, key_states), self.cache.append(self.values, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return max(self.cache.lengths) + self.cache.ran + query_length, 0

    def get_seq_length(self) -> int:
        return max(self.cache.lengths)

    def get_max_length(self) -> int:
        return -1


class TreeCache(PassCache):
    """Keys and values of B rows with one length each.

    A pass appends N slots to every row behind that row's own length; `keep` compacts the slots of the accepted nodes
    and drops the rest. All tensors of one shape live in one storage [G, B, heads, capacity, head_dim], so that
    compaction is one gather and one copy, and storage grows by doubling. State changes in `begin`, `append`, `keep`,
    `select` and `close` alone.
    """

    def __init__(self, n_layers: int, rows: int, capacity: int, dtype: torch.dtype, limit: int = 0) -> None:
        """dtype: of masks; limit: slots per row that the whole generation will need (0: not known); MemoryError where
        they would not fit."""
        super().__init__([_Layer(self) for _ in range(n_layers)])
        self.lengths = [0] * rows
        self.capacity, self.limit, self.dtype = capacity, limit, dtype
        self.storage: list[Tensor] = []
        self.first: dict[_Layer, tuple[Tensor, Tensor]] = {}
        self.ran = 0  # nodes of this pass's tree that its layers hold already
        self._members: list[list[tuple[_Layer, str]]] = []
        self._slots: tuple[Tensor, Tensor] | None = None  # (row, slot) of every appended node where lengths differ
        self._below: tuple[Tensor, Tensor] | None = None  # parents of the last tree and its additive mask
        self._closed = False

    def begin(self, tree: DraftTree, given: Tensor | None = None, ran: int = 0) -> None:
        """Make room for a pass over `tree`, of which the first `ran` nodes went through the same layers before.

        Raises ValueError where the call that the cache was made for has ended.
        """
        if self._closed:
            raise ValueError(
                "this call of generate has ended; a session and its context serve one call, make others by "
                "drafter.session(target, rows)"
            )
        self.enter(given)
        nodes, device = tree.tokens.shape[1], tree.tokens.device
        self.ran, longest = ran, max(self.lengths)
        if longest + nodes > self.capacity:
            self.capacity = max(min(2 * self.capacity, (self.limit or 2**62) + nodes), longest + nodes)
            for i, old in enumerate(self.storage):  # one at a time, so that only one is held twice
                new = old.new_zeros(*old.shape[:3], self.capacity, old.shape[4])
                new[:, :, :, : old.shape[3]] = old
                self.storage[i] = new
                self._share()
                del old
        self._slots = None
        if min(self.lengths) != longest:
            lengths = torch.tensor(self.lengths, device=device)[:, None]
            rows = torch.arange(len(self.lengths), device=device)[:, None]
            self._slots = (rows, lengths + torch.arange(ran, nodes, device=device))
        elif self._below is None or self._below[0] is not tree.parents:
            self._below = (tree.parents, additive(tree.mask, self.dtype)[:, None])

    def positions(self, tree: DraftTree) -> Tensor:
        """int64 [B, N]: each node's position, which is its row's length plus its depth, not its slot."""
        if len(set(self.lengths)) == 1:
            return tree.depth + self.lengths[0]
        return tree.depth + torch.tensor(self.lengths, device=tree.tokens.device)[:, None]

    def close(self) -> None:
        """The call is over; a later pass is refused."""
        self._closed = True

    def append(self, kept: Tensor, new: Tensor) -> Tensor:
        """Write new [B, heads, N, D] behind every row's length and what ran before; returns the row up to there."""
        end = max(self.lengths) + self.ran + new.shape[2]
        if self._slots is None:
            kept[:, :, end - new.shape[2] : end] = new
        else:
            rows, slots = (index.to(new.device) for index in self._slots)
            kept[rows, :, slots] = new.transpose(1, 2)
        return kept[:, :, :end]

    def keep(self, paths: list[list[int]]) -> None:
        """Keep of the last pass only these nodes of each row (ascending; may be empty) and drop all others."""
        if not self.storage:
            self._allocate()
        depth = max(map(len, paths))
        if len(paths) == 1 and paths[0] != list(range(depth)):
            first = self.lengths[0]
            for store in self.storage:
                source = torch.tensor([first + node for node in paths[0]], device=store.device)
                store[:, :, :, first : first + depth] = store.index_select(3, source)
        elif any(path != list(range(len(path))) for path in paths):
            # Rows that keep fewer copy their last slot again; it lies beyond their length and is overwritten later.
            padded = [path + [path[-1] if path else 0] * (depth - len(path)) for path in paths]
            for store in self.storage:
                start = torch.tensor(self.lengths, device=store.device)[:, None]
                source = start + torch.tensor(padded, device=store.device)
                rows = torch.arange(len(paths), device=store.device)[:, None]
                target = start + torch.arange(depth, device=store.device)
                store[:, rows, :, target] = store[:, rows, :, source]
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, int64 [B']."""
        self.storage = [s.index_select(1, rows.to(s.device)) for s in self.storage]
        self.lengths = [self.lengths[r] for r in rows.tolist()]
        self._share()

    def mask(self, tree: DraftTree, window: int | None = None) -> Tensor:
        """Additive attention mask [B or 1, 1, N - ran, S] for the pass over `tree` that `begin` prepared: 0 or the
        dtype's lowest value.

        A node sees every kept slot, its ancestors and itself; under a sliding `window`, only those whose position is
        less than `window` behind its own.
        """
        nodes, longest = tree.tokens.shape[1], max(self.lengths)
        device = tree.tokens.device
        if self._slots is None and window is None:
            assert self._below is not None
            below = self._below[1]
            kept = below.new_zeros(1, 1, 1, 1).expand(*below.shape[:3], longest)
            return torch.cat([kept, below], -1)[:, :, self.ran :]
        lengths = torch.tensor(self.lengths, device=device)[:, None, None]
        slots = torch.arange(longest + nodes, device=device)
        allowed = (slots < lengths).expand(-1, nodes, -1).clone()
        index = (lengths + torch.arange(nodes, device=device)).expand(-1, nodes, -1)
        allowed.scatter_(2, index, tree.mask.expand(len(self.lengths), -1, -1))
        if window is not None:
            own = self.positions(tree).expand(len(self.lengths), -1)
            positions = slots.expand(len(self.lengths), -1).clone().scatter_(1, index[:, 0], own)
            allowed &= own[:, :, None] - positions[:, None, :] < window
        return additive(allowed, self.dtype)[:, None, self.ran :]

    def _allocate(self) -> None:
        groups: dict[tuple[Any, ...], list[tuple[_Layer, str, Tensor]]] = {}
        for layer, pair in self.first.items():
            for name, tensor in zip(("keys", "values"), pair, strict=True):
                key = (tensor.shape[1], tensor.shape[3], tensor.dtype, tensor.device)
                groups.setdefault(key, []).append((layer, name, tensor))
        slots, sizes = max(self.capacity, self.limit), dict[torch.device, int]()
        for key, members in groups.items():
            need = len(members) * key[0] * key[1] * key[2].itemsize * len(self.lengths) * slots
            sizes[key[3]] = sizes.get(key[3], 0) + need
        enough(sizes, len(self.lengths), slots)
        for (heads, width, dtype, device), members in groups.items():
            rows, nodes = members[0][2].shape[0], members[0][2].shape[2]
            store = torch.zeros(len(members), rows, heads, self.capacity, width, dtype=dtype, device=device)
            for i, (_, _, tensor) in enumerate(members):
                store[i, :, :, :nodes] = tensor
            self.storage.append(store)
            self._members.append([(layer, name) for layer, name, _ in members])
        self.first = {}
        self._share()

    def _share(self) -> None:
        for store, members in zip(self.storage, self._members, strict=True):
            for i, (layer, name) in enumerate(members):
                setattr(layer, name, store[i])


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


def enough(sizes: dict[torch.device, int], rows: int, slots: int) -> None:
    """Raises MemoryError where a cache of so many rows and slots, of `sizes` bytes on each device, does not fit."""
    for device, size in sizes.items():
        if size > (free := free_memory(device)):
            raise MemoryError(
                f"the cache of {rows} rows of {slots} tokens needs {size / 2**30:.1f} GiB on {device}, "
                f"where {free / 2**30:.1f} GiB are free; give fewer rows or a smaller max_new_tokens"
            )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device; 2**62 where the device does not report them."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2**62
