"""The KV cache of the compiled engine: buffers of fixed size that passes write into by index, and masks over them.

Everything that changes from pass to pass is a tensor: how long each row is, which slots a pass writes, which nodes see
which. So one compiled pass serves all lengths up to a buffer's size.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from selfspec.core.cache import PassCache, additive, enough
from selfspec.core.tree import DraftTree, ancestors
from selfspec.core.verify import walk
from selfspec.engine.engine import Engine, bucket, signature

SMALLEST = 256  # slots of the smallest buffer
LONG = 32  # longer chains get a triangular mask without products


class Buffers(list[tuple[Tensor, Tensor] | None]):
    """Keys and values [B, heads, S, D] of each layer, None where it does not run. layout: by which compiled code is
    found; set once, a list of other tensors is another list."""

    layout: Hashable = None


class _Layer(CacheLayerMixin):
    """What a layer sees in one pass: its buffers, into which it writes its nodes."""

    is_sliding = False  # the window of sliding layers is in the mask

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values, self.slots = keys, values, slots
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        _put(self.keys, self.slots, key_states.transpose(1, 2))
        _put(self.values, self.slots, value_states.transpose(1, 2))
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        assert self.keys is not None
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        assert self.keys is not None
        return int(self.keys.shape[2])


def _put(store: Tensor, slots: Tensor, states: Tensor) -> None:
    """store[row, :, slots[row]] = states [B, n, heads, D]: by index, which inductor does in place, unlike a scatter."""
    rows = torch.arange(len(store), device=store.device)[:, None]
    store[rows, :, slots.to(store.device)] = states


class _Unused(_Layer):
    """Stands for a layer that does not run."""

    def __init__(self) -> None:
        CacheLayerMixin.__init__(self)
        self.is_initialized = True


def layers(buffers: Buffers, slots: Tensor) -> PassCache:
    """The cache that a model is given in one pass; slots: int64 [B, n], where its nodes are written."""
    return PassCache([_Unused() if pair is None else _Layer(*pair, slots) for pair in buffers])


def masks(
    parents: Tensor | None,
    lengths: Tensor,
    ran: Tensor,
    nodes: int,
    slots: int,
    windows: Sequence[int | None],
    dtype: torch.dtype,
) -> tuple[Tensor, list[Tensor]]:
    """Depths int64 [B, nodes] of the nodes behind `ran` of trees of parents [B, N] (None: chains of `nodes` nodes), and
    for each window an additive mask [B, 1, nodes, slots]: 0 or the dtype's lowest value.

    lengths: int64 [B], kept slots of each row; ran: int64 []. A node sees every kept slot, its ancestors and itself;
    under a sliding window, only those whose position is less than `window` behind its own.
    """
    if parents is None:
        below = torch.ones(nodes, nodes, dtype=torch.bool, device=lengths.device).tril().expand(len(lengths), -1, -1)
    else:
        below = ancestors(parents)  # [B, N, N]
    depth = below.sum(-1) - 1
    own = ran + torch.arange(nodes, device=lengths.device)
    at = torch.arange(slots, device=lengths.device) - lengths[:, None]  # [B, S]: each slot's node; negative: kept
    node = at.clamp(0, below.shape[2] - 1)
    inside = (at >= 0) & (at < below.shape[2])
    below = below.index_select(1, own)
    seen = below.gather(2, node[:, None].expand(-1, nodes, -1)) & inside[:, None] | (at < 0)[:, None]
    mine, found = depth.index_select(1, own), []
    for window in windows:
        allowed = seen
        if window is not None:
            behind = torch.where(at < 0, at, depth.gather(1, node))  # positions, counted from the root's
            allowed = seen & (mine[:, :, None] - behind[:, None] < window)
        found.append(additive(allowed, dtype)[:, None])
    return mine, found


class Opened(NamedTuple):
    """Some layers of a target and their cache as modules and tensors, for passes inside a graph. module: the part, or
    its decoder where no logits are wanted; lengths: int64 [B], kept slots of each row; windows: by layer type; last:
    the largest position; dtype: of masks."""

    module: nn.Module
    buffers: Buffers
    lengths: Tensor
    windows: dict[str, int | None]
    last: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Picking:
    """How the target's tokens are picked in a pass that walks its tree. noise: float64 [B, D, V] of the positions
    behind the root, for D above every depth, None when greedy."""

    noise: Tensor | None
    temperature: float

    def tensors(self, idle: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Noise, with idle rows behind, and the temperature [], in the dtype that logits of `dtype` are warped in."""
        if self.noise is None:
            return None, None
        noise = nn.functional.pad(self.noise, (0, 0, 0, 0, 0, idle)) if idle else self.noise.contiguous()
        exact = torch.promote_types(dtype, torch.float32)
        return noise, torch.tensor(self.temperature, dtype=exact, device=noise.device)


def static_pass(
    opened: Opened,
    given: Tensor | None,
    tokens: Tensor,
    parents: Tensor | None,
    ran: Tensor,
    picking: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor | None, dict[int, Tensor], Tensor | None]:
    """One pass over buffers, as it is compiled: logits, the outputs of the layers watched, and the walk.

    given: hidden states [B, n, H] that enter, where the part does not begin at layer 0; tokens: int64 [B, n] of the
    nodes behind `ran`, int64 []; parents: int64 [B, N] of the whole tree, None for a chain; picking: noise and
    temperature, None where nothing is walked. See `Target.forward`.
    """
    buffers, nodes = opened.buffers, tokens.shape[1]
    slots = next(pair[0].shape[2] for pair in buffers if pair is not None)
    start, windows = opened.lengths[:, None], opened.windows
    depth, found = masks(parents, opened.lengths, ran, nodes, slots, list(windows.values()), opened.dtype)
    cache = layers(buffers, start + ran + torch.arange(nodes, device=tokens.device))
    cache.enter(given)
    out = opened.module(
        input_ids=tokens,
        attention_mask=dict(zip(windows, found, strict=True)) if len(windows) > 1 else found[0],
        position_ids=(start + depth).clamp(max=opened.last),
        past_key_values=cache,
        use_cache=True,
    )
    logits: Tensor | None = getattr(out, "logits", None)
    if picking is None or logits is None or parents is None:
        return logits, cache.seen, None
    return logits, cache.seen, walk(logits, tokens, parents, *picking)


def compact(buffers: list[Tensor], lengths: Tensor, paths: Tensor) -> None:
    """Move the slots of the nodes `paths`, int64 [B, D], of the last pass to the end of each row's kept slots."""
    source = lengths[:, None] + paths
    place = lengths[:, None] + torch.arange(paths.shape[1], device=paths.device)
    rows = torch.arange(len(paths), device=paths.device)[:, None]
    for store in buffers:
        _put(store, place, store[rows, :, source].clone())


class SlotCache:
    """Keys and values of B rows with one length each, in buffers for `capacity` slots, a power of two times 256.

    As `TreeCache`: a pass appends N slots to every row behind that row's own length, and `keep` compacts the slots of
    the accepted nodes and drops the rest. Buffers have a power of two of rows; those beyond B are idle.
    """

    def __init__(
        self, like: Sequence[tuple[Tensor, Tensor] | None], rows: int, capacity: int, limit: int, engine: Engine
    ):
        """like: keys and values of one token in each layer, None where a layer keeps none; limit: slots a row that will
        be needed at most."""
        self.like, self.engine, self.limit = like, engine, limit
        self.lengths = [0] * rows
        self.idle = bucket(rows) - rows
        self.capacity = bucket(capacity, SMALLEST)
        self.buffers: list[tuple[Tensor, Tensor] | None] = [None for _ in like]
        self._ranges: dict[tuple[int, int], Buffers] = {}  # of the layers that passes ran, of the present buffers
        self._closed = False

    def begin(self, start: int, stop: int, nodes: int) -> Buffers:
        """Buffers of layers start to stop - 1, with room for so many nodes; None for the others. They are those of this
        pass: a later one may need larger ones.

        Raises ValueError where the call that the cache was made for has ended, MemoryError where what it will need at
        most does not fit.
        """
        if self._closed:
            raise ValueError(
                "this call of generate has ended; a session and its context serve one call, make others by "
                "drafter.session(target, rows)"
            )
        rows = len(self.lengths) + self.idle
        if max(self.lengths) + nodes > self.capacity:
            self.capacity = bucket(max(self.lengths) + nodes, SMALLEST)
            self._ranges = {}
            for layer, pair in enumerate(self.buffers):
                if pair is not None:
                    self.buffers[layer] = self._grown(pair[0]), self._grown(pair[1])
        if (known := self._ranges.get((start, stop))) is not None:
            return known
        missing = {
            layer: like
            for layer, like in enumerate(self.like)
            if start <= layer < stop and like is not None and self.buffers[layer] is None
        }
        if missing:
            slots, sizes = bucket(max(self.limit, self.capacity), SMALLEST), dict[torch.device, int]()
            for part in (part for like in missing.values() for part in like):
                sizes[part.device] = sizes.get(part.device, 0) + rows * slots * part.numel() * part.itemsize
            enough(sizes, rows, slots)
            for layer, like in missing.items():
                self.buffers[layer] = (
                    like[0].new_zeros(rows, like[0].shape[1], self.capacity, like[0].shape[3]),
                    like[1].new_zeros(rows, like[1].shape[1], self.capacity, like[1].shape[3]),
                )
        made = Buffers(pair if start <= layer < stop else None for layer, pair in enumerate(self.buffers))
        made.layout = tuple(map(signature, made))
        self._ranges[start, stop] = made
        return made

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros(old.shape[0], old.shape[1], self.capacity, old.shape[3])
        new[:, :, : old.shape[2]] = old
        return new

    def row_lengths(self, device: torch.device) -> Tensor:
        """int64 [rows of the buffers]."""
        return torch.tensor(self.lengths + [0] * self.idle, device=device)

    def keep(self, paths: list[list[int]]) -> None:
        """Keep of the last pass only these nodes of each row (ascending; may be empty) and drop all others."""
        if any(path != list(range(len(path))) for path in paths):
            depth = bucket(max(map(len, paths)))
            assert max(self.lengths) + depth <= self.capacity, "a pass leaves room for the paths through its tree"
            padded = [path + list(range(len(path), depth)) for path in paths] + [list(range(depth))] * self.idle
            for device in {pair[0].device for pair in self.buffers if pair is not None}:
                stores = [
                    part for pair in self.buffers if pair is not None and pair[0].device == device for part in pair
                ]
                self.engine.run(compact, stores, self.row_lengths(device), torch.tensor(padded, device=device))
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, int64 [B']."""
        kept = rows.tolist()
        total, self._ranges = bucket(len(kept)), {}
        whole = torch.tensor(kept + [kept[0]] * (total - len(kept)))
        self.buffers = [
            None if pair is None else (pair[0][whole.to(pair[0].device)], pair[1][whole.to(pair[1].device)])
            for pair in self.buffers
        ]
        self.lengths, self.idle = [self.lengths[row] for row in kept], total - len(kept)

    def close(self) -> None:
        """The call is over; a later pass is refused."""
        self._closed = True


def padded(tree: DraftTree, ran: int, rows: int) -> tuple[Tensor, Tensor | None, int]:
    """Tokens [rows, n] of the nodes behind `ran` and parents [rows, N] of a tree (None: a long chain) with spare nodes
    and idle rows, so that n, N and rows are sizes that passes are compiled for; and how many of the n nodes are
    real."""
    nodes = tree.tokens.shape[1] - ran
    n = bucket(nodes)
    wide = bucket(ran + n)
    tokens, parents = tree.tokens[:, ran:], tree.parents
    idle = rows - len(tokens)
    if n > nodes or idle:
        tokens = nn.functional.pad(tokens, (0, n - nodes, 0, idle))
    if not ran and n > LONG and tree.is_chain:
        return tokens.contiguous(), None, nodes
    if wide > parents.shape[1] or idle:
        parents = nn.functional.pad(parents, (0, wide - parents.shape[1], 0, idle), value=-1)
    return tokens.contiguous(), parents.contiguous(), nodes
