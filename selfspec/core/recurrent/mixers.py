"""Modules of stock models that keep a state, and the passes of views through them.

transformers' modules call a few functions by their global names: a convolution over time and a recurrence. In a view
their own forward runs with ours in their place, over the tree and the states that came with the cache. All else, the
projections, norms and gates of a family, is the module's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from types import FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from selfspec.core.recurrent import convolution, mamba1
from selfspec.core.recurrent.convolution import causal_conv1d_fn, tap_indices, taps
from selfspec.core.recurrent.delta_rule import chunk_gated_delta_rule
from selfspec.core.recurrent.mamba1 import mamba_selective_scan
from selfspec.core.recurrent.mamba2 import mamba2_chunk_scan
from selfspec.core.recurrent.recurrence import Recurrence, Written, advanced, beginning

OURS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "chunk_kimi_delta_attention": chunk_gated_delta_rule,
    "mamba2_chunk_scan": mamba2_chunk_scan,
    "mamba_selective_scan": mamba_selective_scan,
}


@cache
def _over_trees(cls: Any) -> FunctionType | None:
    """The forward of a class of modules with our functions; None where it calls none of those that we replace."""
    forward = inspect.unwrap(cls.forward)
    if not isinstance(forward, FunctionType):
        return None
    if not OURS.keys() & set(forward.__code__.co_names) & forward.__globals__.keys():
        return None
    names = forward.__globals__ | OURS
    names.pop("__name__")  # by which torch.compile would look names up in transformers' module
    made = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


_STATES = {"update_conv_state", "update_recurrent_state", "set_linear_cache", "get_linear_cache"}


def keeps_state(module: nn.Module) -> bool:
    """Whether a module asks its cache for a state that trees can not run over."""
    names = getattr(getattr(inspect.unwrap(type(module).forward), "__code__", None), "co_names", ())
    return _over_trees(cast(Any, type(module))) is None and not _STATES.isdisjoint(names)


def mixers(module: nn.Module) -> Iterator[nn.Module]:
    """The parts of a module that keep a state which trees can run over."""
    return (part for part in module.modules() if _over_trees(cast(Any, type(part))) is not None)


def over_trees(module: nn.Module) -> None:
    """Rebind the forward of each mixer of a view: to ours where the call's cache asks for trees, else the stock one."""
    for part in mixers(module):
        part.forward = MethodType(_forward(cast(Any, type(part))), part)


@cache
def _forward(cls: Any) -> Callable[..., Any]:
    ours, stock = _over_trees(cls), cls.forward
    assert ours is not None
    scans = "mamba_selective_scan" in ours.__code__.co_names

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        states = next((a for a in (*args, *kwargs.values()) if isinstance(a, TreeStates)), None)
        if states is None or not states.over_trees:
            args = tuple(None if a is states else a for a in args)
            return stock(self, *args, **{name: None if a is states else a for name, a in kwargs.items()})
        if scans:
            mamba1.pending.scans = states.scans(self.layer_idx)  # type: ignore[arg-type]
        out = ours(self, *args, **kwargs)
        if scans:
            mamba1.pending.scans = None  # it holds the call's cache
        return out

    return forward


class LayerState(NamedTuple):
    """What one layer keeps, as tensors by the names of its parts. states: the last inputs of each convolution, the
    state of each recurrence; written: what the nodes of a pass fed into either, on which later passes over the same
    tree build."""

    states: dict[str, Tensor]
    written: dict[str, Tensor | Written]

    @property
    def nodes(self) -> int:
        """Nodes of the passes since the last commit."""
        return _of(next(iter(self.written.values()))).shape[2] if self.written else 0

    def advanced(self, paths: Tensor, counts: Tensor) -> LayerState:
        """What is kept behind the first `counts`, int64 [B], nodes of each row's path, int64 [B, D], of the last
        pass."""
        states = dict(self.states)
        for name, part in self.written.items():
            if isinstance(part, Tensor):
                states[name] = convolution.advanced(states[name], part, paths, counts)
            else:
                states[name] = advanced(states[name], part, paths, counts)
        return LayerState(states, {})

    def rows(self, index: Tensor) -> LayerState:
        """The kept part of these rows, int64 [B']."""
        return LayerState({n: part.index_select(0, index.to(part.device)) for n, part in self.states.items()}, {})

    def first(self, nodes: int) -> LayerState:
        """With what the first so many nodes left alone."""
        parts = self.written.items() if nodes else ()
        written = {n: part[:, :, :nodes] if isinstance(part, Tensor) else part.first(nodes) for n, part in parts}
        return LayerState(self.states, written)


def _of(written: Tensor | Written) -> Tensor:
    return written if isinstance(written, Tensor) else written.keys


def replayed(layers: dict[int, LayerState], paths: Tensor, counts: Tensor) -> dict[int, LayerState]:
    """`LayerState.advanced` of all layers that ran."""
    moved: dict[torch.device, tuple[Tensor, Tensor]] = {}
    made = {}
    for i, state in layers.items():
        if state.written:
            device = _of(next(iter(state.written.values()))).device
            if device not in moved:
                moved[device] = paths.to(device), counts.to(device)
            state = state.advanced(*moved[device])
        made[i] = state
    return made


class TreeStates:
    """The part of a pass's cache that layers with a state see. over_trees: False where they run over whole texts, as
    they are, from no state; below: see `recurrence.Recurrence`; layers: what each of them keeps, from no state if it is
    not in it. parts: convolutions and recurrences of each layer, by name."""

    def __init__(self, over_trees: bool, below: Tensor | None = None, layers: dict[int, LayerState] | None = None):
        self.over_trees, self.below = over_trees, below
        self.parts: dict[int, dict[str, Recurrence]] = {}
        self._indices: dict[tuple[int, torch.device], Tensor] = {}
        for i, (states, written) in (layers or {}).items():
            self.parts[i] = {name: Recurrence(state, written.get(name), below) for name, state in states.items()}

    def leave(self, layers: dict[int, list[LayerState]], nodes: int) -> None:
        """Put what the first so many nodes left into what the layers keep, for `LayerState.advanced`."""
        for i, parts in self.parts.items():
            written = {name: part.written for name, part in parts.items() if part.written is not None}
            layers[i][-1] = LayerState(layers[i][-1].states, written).first(nodes)

    def beginning(self) -> dict[int, LayerState]:
        """What the layers of this pass, which began without a state, keep at the beginning: zeros."""
        made = {}
        for layer, parts in self.parts.items():
            states = {}
            for name, part in parts.items():
                if isinstance(part.written, Tensor) and part.state is not None:
                    states[name] = torch.zeros_like(part.state)
                elif isinstance(part.written, Written):
                    states[name] = beginning(part.written)
            made[layer] = LayerState(states, {})
        return made

    def part(self, layer: int, name: str) -> Recurrence:
        parts = self.parts.setdefault(layer, {})
        if name not in parts:
            parts[name] = Recurrence(None, None, self.below)
        return parts[name]

    def taps(self, new: Tensor, layer: int, index: int, width: int) -> Tensor:
        """See `convolution.taps`."""
        indices = None
        if self.below is not None:
            key = width, new.device
            if key not in self._indices:
                self._indices[key] = tap_indices(self.below, width).to(new.device)
            indices = self._indices[key]
        return taps(self.part(layer, f"convolution {index}"), new, width, indices)

    def recurrence(self, layer: int, index: int) -> Recurrence:
        return self.part(layer, f"recurrence {index}")

    def scans(self, layer: int) -> Iterator[Recurrence]:
        """The recurrences of a layer in turn."""
        return (self.recurrence(layer, i) for i in count())
