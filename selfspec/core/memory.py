"""Memory: what is free, whether a cache fits into it, and tensors that are uploaded once."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import psutil
import torch
from torch import Tensor

from selfspec.utils.machine import private_memory


def constant(values: float | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of these numbers, uploaded once; never written to."""
    values = values if isinstance(values, (int, float)) else tuple(values)
    return _constant(values, dtype, device, torch.is_inference_mode_enabled())


@lru_cache(maxsize=256)
def _constant(values: Any, dtype: torch.dtype, device: torch.device, inference: bool) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def enough(sizes: dict[torch.device, int], rows: int, entries: int) -> None:
    """Raises MemoryError where a cache of so many rows and entries, of `sizes` bytes on each device, does not fit."""
    for device, size in sizes.items():
        if size > (free := free_memory(device)):
            raise MemoryError(
                f"the cache of {rows} rows of {entries} tokens needs {size / 2**30:.1f} GiB on {device}, "
                f"where {free / 2**30:.1f} GiB are free; give fewer rows or a smaller max_new_tokens"
            )


@contextmanager
def no_room(what: str) -> Iterator[None]:
    """Raises MemoryError where a device has no room for what the block allocates."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"no room for {what}: {' '.join(str(error).split()):.300}") from error


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device; 2**62 where the device does not report them."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2**62


def own_storage(part: Tensor) -> Tensor:
    """A contiguous part of a tensor on the CPU, as a tensor whose storage is that part: compiled functions must not
    write to parts of larger inputs."""
    memory: Any = (ctypes.c_byte * (part.numel() * part.element_size())).from_address(part.data_ptr())
    memory.part = part  # lives as long as its memory is used
    return torch.frombuffer(memory, dtype=part.dtype).view(part.shape)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch.zeros; on CPUs memory is taken where it is first written to, since much of a cache never is."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        with no_room("a cache; give fewer rows or a smaller max_new_tokens"):
            return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(private_memory(size), dtype=dtype).view(shape)
