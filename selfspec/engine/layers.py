"""Layers of one class in a row: while a function is compiled, they are compiled once for all of them."""

from __future__ import annotations

import sys
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
                    vars(layer).update(forward=MethodType(_region(kind), layer), place_in_trace=len(marked))
                    marked.append(layer)
    try:
        yield bool(marked)
    finally:
        for layer in marked:
            del layer.forward, layer.place_in_trace


@cache
def _region(kind: Any) -> Callable[..., Any]:
    """The forward of a class of layers as a nested region."""
    forward = kind.forward

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    # By a key of its own every layer is traced, and graphs that turn out to be equal are compiled once. Without a key
    # torch 2.13 traces one layer and may give its weights to the others.
    def key(self: Any, *args: Any, **kwargs: Any) -> int:
        return int(self.place_in_trace)

    region: Callable[..., Any] = torch.compiler.nested_compile_region(
        run, reuse_hash_fn=key, max_reuse_entries=sys.maxsize
    )
    return region
