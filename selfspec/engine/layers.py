"""Layers of one class in a row: while a function is compiled, they are compiled once for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn

REPEATED = 4  # layers of a class from which on it pays


@contextmanager
def compiled_once(modules: Iterable[nn.Module]) -> Iterator[bool]:
    """Inside, torch.compile takes the layers of these modules for nested regions, and compiles those that differ by
    nothing but their tensors once. Yields whether there are any. Outside, the modules are what they were."""
    marked: list[nn.Module] = []
    if hasattr(torch.compiler, "nested_compile_region"):
        lists = [part for module in modules for part in module.modules() if isinstance(part, nn.ModuleList)]
        for layers in lists:
            counts = Counter(type(layer) for layer in layers)
            for layer in layers:
                kind: Any = type(layer)
                if counts[kind] >= REPEATED and "forward" not in vars(layer):
                    layer.forward = MethodType(_region(kind), layer)
                    marked.append(layer)
    try:
        yield bool(marked)
    finally:
        for layer in marked:
            del layer.forward


class _Mark:
    """An argument of a kind that torch does not compare, made while it traces: one with a name it does."""


@cache
def _region(kind: Any) -> Callable[..., Any]:
    """The forward of a class of layers as a nested region."""
    forward = kind.forward

    # With the mark every layer is traced, and graphs that turn out to be equal are compiled once. Without it torch 2.13
    # traces one layer and may give its weights to the others.
    def run(mark: _Mark, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    region = torch.compiler.nested_compile_region(run)

    def marked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # another thread, which runs the layer as it is
            return forward(self, *args, **kwargs)
        return region(_Mark(), self, *args, **kwargs)

    return marked
