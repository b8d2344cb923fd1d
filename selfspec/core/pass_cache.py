"""What a stock model is handed as its cache in one pass. Only this file touches transformers' cache.

Keys and values lie in static buffers that passes write into by index (see `selfspec.core.cache`). What changes from
pass to pass is a tensor: how long each row is, which entries a pass writes, which nodes see which. So the same
functions serve eager and compiled passes.

A cache is handed to each layer, so it also carries what a part of a model needs in one pass: the hidden states that
enter its first layer, and the outputs of the layers that are read (see `selfspec.core.target`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from selfspec.core.recurrent.mixers import LayerState, TreeStates, replayed


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


class _Layer(DynamicLayer):
    """What one layer sees in one pass. Sliding layers keep everything; their window is in the mask."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0  # positions are the caller's


class _GrowingLayer(_Layer):
    """Keeps keys and values of all passes, one behind another."""

    update = DynamicLayer.update


class TextCache(PassCache):
    """For passes over whole texts without draft trees. With `kept`, keys and values of earlier passes stay visible;
    masks and positions are then the caller's."""

    def __init__(self, n_layers: int, kept: bool = False) -> None:
        super().__init__([_GrowingLayer() if kept else _Layer() for _ in range(n_layers)], over_trees=kept)
        self.kept = kept

    def see(self, below: Tensor | None) -> None:
        """What nodes of the next pass descend from, among all so far: bool [B, n, m]; None: a chain."""
        self.over_trees, self.below, self._indices = self.kept or below is not None, below, {}
        for part in (part for parts in self.parts.values() for part in parts.values()):
            part.below = below


class Buffer(NamedTuple):
    """Keys or values of one layer. flat: [rows * heads * capacity, D], which passes write into; shape: [rows, heads,
    capacity, D]; filled: entries of each row that a pass attends over."""

    flat: Tensor
    shape: tuple[int, int, int, int]
    filled: int


class Buffers(list[tuple[Buffer, Buffer] | None]):
    """Keys and values of each layer, None for layers that do not run. layout: a key for compiled code; tensors: all of
    them, for graphs. Both are set once: a list whose tensors change is replaced by another."""

    layout: Hashable = None
    tensors: list[Tensor] | None = None


class KV(NamedTuple):
    """A KV cache as tensors, for one pass or several in a row. lengths: int64 [B], the kept entries of each row;
    states: of each layer that keeps one, as the cache holds it; `committed` appends the next."""

    buffers: Buffers
    lengths: Tensor
    states: dict[int, list[LayerState]]

    def committed(self, counts: Tensor) -> KV:
        """With the first `counts`, int64 [B], nodes of the last pass, which ran a chain, committed: for passes behind
        them in the same function."""
        if self.states:
            last = {layer: stages[-1] for layer, stages in self.states.items()}
            nodes = max(state.nodes for state in last.values())
            path = torch.arange(nodes, device=counts.device).expand(len(counts), -1)
            for layer, state in replayed(last, path, counts).items():
                self.states[layer].append(state)
        return self._replace(lengths=self.lengths + counts)

    @property
    def size(self) -> int:
        """Entries that a pass attends over."""
        return next((pair[0].filled for pair in self.buffers if pair is not None), 0)


class _BufferLayer(_Layer):
    """Writes the pass's nodes into buffers by index. places: where its entries go, by heads (see `places_of`)."""

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


def places_of(entries: Tensor, heads: int, capacity: int) -> Tensor:
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
            places[heads, device] = places_of(entries, heads, capacity).to(device)
        layers.append(_BufferLayer(*pair, places[heads, device]))
    return PassCache(layers, entering, True, below, {layer: stages[-1] for layer, stages in kv.states.items()})
