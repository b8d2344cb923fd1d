"""Compiled functions as CUDA graphs: one launch instead of one for each kernel."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_MOST = 16  # graphs kept of one function; each holds its inputs and outputs


@dataclass(frozen=True)
class _Graph:
    """inputs: copies of the loose tensors, which every replay is given anew; outputs: overwritten by every replay."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: Any


class Captured:
    """A function on CUDA tensors that is captured where it is called a second time over the same storage.

    Tensors in lists, which functions may write to, and weights of modules are used where they lie; there is a graph for
    each set of their addresses. All other tensors are copied in, results are copied out. The first call over a storage
    runs as it is: it loads kernels, which a capture can not.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.graphs: OrderedDict[tuple[int, ...], _Graph | None] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        found = list(parts_of(args))
        place = tuple(tensor.data_ptr() for tensor, stays in found if stays)
        with self._lock:
            if place not in self.graphs:
                self.graphs[place] = None
                while len(self.graphs) > _MOST:
                    self.graphs.popitem(last=False)
                return self.function(*args)
            self.graphs.move_to_end(place)
            made = self.graphs[place] = self.graphs[place] or self._capture(args)
            for own, (given, _) in zip(made.inputs, (pair for pair in found if not pair[1]), strict=True):
                own.copy_(given)
            made.graph.replay()
            return _mapped(made.outputs, Tensor.clone)

    def _capture(self, args: Any) -> _Graph:
        own = _mapped(args, Tensor.clone)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = self.function(*own)
        return _Graph(graph, [tensor for tensor, stays in parts_of(own) if not stays], outputs)


def parts_of(argument: Any, stays: bool = False) -> Iterator[tuple[Tensor, bool]]:
    """All tensors of an argument, and whether each is used where it lies."""
    if isinstance(argument, Tensor):
        yield argument, stays
    elif isinstance(argument, nn.Module):
        yield from ((tensor, True) for tensor in (*argument.parameters(), *argument.buffers()))
    elif isinstance(argument, (list, tuple)):
        for part in argument:
            yield from parts_of(part, stays or isinstance(argument, list))
    elif isinstance(argument, dict):
        for part in argument.values():
            yield from parts_of(part, stays)


def _mapped(argument: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with its loose tensors changed."""
    if isinstance(argument, Tensor):
        return change(argument)
    if isinstance(argument, tuple):
        parts = [_mapped(part, change) for part in argument]
        return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
    if isinstance(argument, dict):
        return {name: _mapped(part, change) for name, part in argument.items()}
    return argument
