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
_capturing = threading.Lock()  # torch allows one capture at a time in a process
_streams: dict[torch.device, Any] = {}  # torch's own stream for captures is of one device


@dataclass(frozen=True)
class _Graph:
    """inputs: copies of the loose tensors, which every replay is given anew; outputs: overwritten by every replay;
    copied: the event behind the copies of the last outputs, for which a replay on another stream waits."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: Any
    copied: torch.cuda.Event


class Captured:
    """A function on tensors of one CUDA device that is captured where it is called a second time over the same storage.

    Tensors in lists, which functions may write to, and parameters and buffers of modules are used where they lie; there
    is a graph for each set of their addresses. A function may read no other storage. All other tensors are copied in,
    results are copied out. The first call over a storage runs as it is: it loads kernels, which a capture can not. If a
    capture fails, the function runs as it is from then on.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        device: torch.device,
        note: Callable[[Exception], None],
        not_replayed: Callable[[], None],
    ) -> None:
        """note: called with the error of a capture that fails; not_replayed: called before every pass that is none."""
        self.function, self.device, self.note, self.not_replayed = function, device, note, not_replayed
        self.graphs: OrderedDict[tuple[int, ...], _Graph | None] = OrderedDict()
        self.failed = self.full = False
        self.weights: list[Tensor] | None = None
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        """What the function gives, in tensors of its own. Raises what the function raises."""
        tensors = list(parts_of(args))
        weights = self.weights  # `engine.replaced_weights` drops them, perhaps in another thread
        if weights is None:  # found once: 0.6 ms for SmolLM2's
            weights = self.weights = list(weights_of(args))
        place = tuple(t.data_ptr() for t in (*weights, *(tensor for tensor, stays in tensors if stays)))
        with self._lock:
            if self.failed:
                return self.function(*args)
            if place not in self.graphs:
                self.not_replayed()
                result = self.function(*args)
                self.graphs[place] = None
                while len(self.graphs) > _MOST:
                    self.graphs.popitem(last=False)
                return result
            self.graphs.move_to_end(place)
            if (graph := self.graphs[place]) is None:
                self.not_replayed()
                try:
                    graph = self.graphs[place] = self._capture(args)
                except RuntimeError as error:
                    full = isinstance(error, torch.OutOfMemoryError)  # graphs let go of memory, and are made once more
                    self.failed, self.full, self.graphs = not full or self.full, full, OrderedDict()
                    self.note(error)
                    return self.function(*args)
            stream = torch.cuda.current_stream(self.device)
            graph.copied.wait(stream)
            for buffer, (value, _) in zip(graph.inputs, (pair for pair in tensors if not pair[1]), strict=True):
                buffer.copy_(value)
            graph.graph.replay()
            result = mapped(graph.outputs, Tensor.clone)
            graph.copied.record(stream)
            return result

    def _capture(self, args: Any) -> _Graph:
        inputs, graph = mapped(args, _copied), torch.cuda.CUDAGraph()
        with _capturing, torch.cuda.device(self.device):
            stream = _streams.setdefault(self.device, torch.cuda.Stream(self.device))
            torch.cuda.synchronize()
            with (
                torch.cuda.stream(torch.cuda.current_stream(self.device)),  # comes back also where a capture fails
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                outputs = self.function(*inputs)
        return _Graph(graph, [t for t, stays in parts_of(inputs) if not stays], outputs, torch.cuda.Event())


def _copied(tensor: Tensor) -> Tensor:
    """A copy with the same strides, for which the function was compiled."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def leaves(argument: Any, stays: bool = False) -> Iterator[tuple[Any, bool]]:
    """What is no list, tuple or dict in an argument, and whether a list holds it. A list with a layout brings its
    tensors along."""
    if isinstance(argument, (list, tuple)):
        if (tensors := getattr(argument, "tensors", None)) is not None:
            yield from ((tensor, True) for tensor in tensors)
            return
        for part in argument:
            yield from leaves(part, stays or isinstance(argument, list))
    elif isinstance(argument, dict):
        for part in argument.values():
            yield from leaves(part, stays)
    else:
        yield argument, stays


def modules_in(argument: Any) -> Iterator[nn.Module]:
    """The modules among the arguments of a function."""
    return (part for part, _ in leaves(argument) if isinstance(part, nn.Module))


def parts_of(argument: Any) -> Iterator[tuple[Tensor, bool]]:
    """All tensors of an argument but those of modules, and whether each is used where it lies."""
    return ((part, stays) for part, stays in leaves(argument) if isinstance(part, Tensor))


def weights_of(argument: Any) -> Iterator[Tensor]:
    """The parameters and buffers of the modules in an argument."""
    return (tensor for module in modules_in(argument) for tensor in (*module.parameters(), *module.buffers()))


def devices_of(argument: Any) -> set[torch.device]:
    """Where the tensors of an argument lie."""
    return {tensor.device for tensor, _ in parts_of(argument)} | {tensor.device for tensor in weights_of(argument)}


def mapped(argument: Any, change: Callable[[Tensor], Tensor], lists: bool = False) -> Any:
    """A copy of the argument in which `change` was applied to every tensor that is in no list. lists: to those in
    lists too, but for lists with a layout."""
    if isinstance(argument, Tensor):
        return change(argument)
    if isinstance(argument, tuple):
        parts = [mapped(part, change, lists) for part in argument]
        return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
    if isinstance(argument, dict):
        return {name: mapped(part, change, lists) for name, part in argument.items()}
    if lists and isinstance(argument, list) and getattr(argument, "layout", None) is None:
        return [mapped(part, change, lists) for part in argument]
    return argument
