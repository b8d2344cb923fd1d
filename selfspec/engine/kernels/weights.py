"""Weights laid out in advance, for the kernel that multiplies few rows with them fastest on this machine.

Only frozen weights are laid out: those of linear maps in modules that the engine compiles functions for.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from selfspec.engine.kernels.fastest import IN_PLACE, Kernel, choose

# Bytes of a module's weights from which on it pays: fewer stay in a cache, and looking them up costs more.
LEAST = 2**26
_frozen: dict[int, weakref.ref[Tensor]] = {}  # weights that may be laid out, by address
_laid_out: dict[int, LaidOut] = {}  # by the address of the first of the weights side by side
_read_in_place: set[int] = set()  # addresses of frozen weights that are read where they are
_fixed: dict[int, Kernel] = {}  # kernels of frozen weights for which none is measured, by address
_lock = threading.RLock()


class LaidOut(NamedTuple):
    """Weights side by side, as their kernel reads them. addresses, lengths, versions, samples: of the weights when they
    were laid out."""

    kernel: Kernel
    weights: Any
    addresses: tuple[int, ...]
    lengths: tuple[int, ...]
    versions: tuple[int, ...]
    samples: tuple[Tensor, ...]


def freeze(module: nn.Module, least: int = LEAST) -> None:
    """The weights of this module's frozen linear maps may be laid out from now on, where they are `least` bytes."""
    parts = (part.weight for part in module.modules() if isinstance(part, nn.Linear))
    frozen = [
        weight
        for weight in parts
        if not weight.requires_grad and not weight.is_inference() and weight.is_contiguous()
        if weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    ]
    if sum(2 * weight.numel() for weight in frozen) < least:
        return
    for weight in frozen:
        _freeze(weight)


def fix(weights: Iterable[Tensor], kernel: Kernel) -> None:
    """These weights [N, K], bfloat16 on the CPU and contiguous, may be laid out from now on, for this kernel. What it
    computes need not have the bits of others."""
    for weight in weights:
        if weight.data_ptr() not in _frozen and not weight.is_inference():  # a target's are exact
            _fixed[weight.data_ptr()] = kernel
            _freeze(weight)


def _freeze(weight: Tensor) -> None:
    address = weight.data_ptr()
    if address not in _frozen or _frozen[address]() is None:
        _frozen[address] = weakref.ref(weight, lambda _, address=address: _forget(address))  # type: ignore[misc]


def sampled(weight: Tensor) -> Tensor:
    """Some of a weight's numbers [N, K], of every row and every column: a view."""
    stride = max(1, min(weight.shape) - 1)
    while math.gcd(stride, weight.shape[1]) > 1:  # columns would come again before all of them came
        stride -= 1
    return weight.detach().flatten()[::stride]


def forget_changed(merged: Collection[int] = ()) -> None:
    """Drop what was laid out of weights that have moved, or were written to past their version counter, as `.data`
    is: at the start of a call. merged: ids of weights that may have been in any case."""
    for known in list(_laid_out.values()):
        for address, sample in zip(known.addresses, known.samples, strict=True):
            reference = _frozen.get(address)
            weight = None if reference is None else reference()
            if weight is None or weight.data_ptr() != address:
                _forget(address)
            elif id(weight) in merged or not torch.equal(sampled(weight), sample):
                with _lock:
                    _laid_out.pop(known.addresses[0], None)


def _forget(address: int) -> None:
    """The weight that lay there is gone."""
    with _lock:
        _frozen.pop(address, None)
        _fixed.pop(address, None)
        _read_in_place.discard(address)
        for first in [first for first, known in _laid_out.items() if address in known.addresses]:
            del _laid_out[first]


def laid_out(weights: Sequence[Tensor]) -> LaidOut | None:
    """Weights [N, K] side by side as the chosen kernel reads them; None where one of them is not frozen, or no kernel
    serves them. What was changed in place since is laid out anew."""
    first = weights[0].data_ptr()  # called hundreds of times a pass: no frames but this one
    if first not in _frozen or first in _read_in_place:
        return None
    known = _laid_out.get(first)
    if known is None or len(weights) != len(known.addresses):
        return _lay_out(weights)
    for weight, address, length, version in zip(weights, *known[2:5], strict=True):
        if weight._version != version or weight.data_ptr() != address or len(weight) != length:
            return _lay_out(weights)
    return known


def _lay_out(weights: Sequence[Tensor]) -> LaidOut | None:
    addresses = tuple(weight.data_ptr() for weight in weights)
    with _lock:
        for address, weight in zip(addresses, weights, strict=True):
            frozen = None if address not in _frozen else _frozen[address]()
            if frozen is None or frozen.shape != weight.shape:  # such as a part of one
                return None
        fixed = {_fixed.get(address) for address in addresses}
        kernel = fixed.pop() if len(fixed) == 1 else None
        kernel = kernel or choose(sum(len(weight) for weight in weights), weights[0].shape[1])
        if kernel is None or kernel is IN_PLACE:
            if addresses[0] not in _laid_out:
                _read_in_place.add(addresses[0])  # later calls need no look-up
            return None
        versions = tuple(weight._version for weight in weights)
        together = torch.cat([*weights]) if len(weights) > 1 else weights[0].detach()
        samples = tuple(sampled(weight).clone() for weight in weights)
        what = kernel.lay_out(together), addresses, tuple(map(len, weights))
        known = _laid_out[addresses[0]] = LaidOut(kernel, *what, versions, samples)
    return known


def laid_out_bytes() -> int:
    """Memory that laid-out weights take, beside the model's own."""
    laid = [each.weights for each in list(_laid_out.values())]  # a thread may add to it
    tensors = [part for one in laid for part in ((one,) if isinstance(one, Tensor) else one)]
    return sum(part.numel() * part.element_size() for part in tensors)
