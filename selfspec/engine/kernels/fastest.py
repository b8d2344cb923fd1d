"""Kernels that multiply few rows with a weight, and which of them is the fastest on this machine.

It is chosen by measurement, once for each shape on a machine, among the row-invariant ones: a row's bits do not depend
on the rows beside it, on its place or on their number. Then a pass over a tree has the bits of plain passes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import mmap
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec.engine.kernels.native import binding, has_avx512, has_tiles, in_place, served
from selfspec.utils.files import Figures, cache_folder, code_hash, private_folder, read_json, write_text
from selfspec.utils.machine import crowded, private_memory, processor

ROWS = (1, 8, 16, 32)  # row counts at which kernels are measured
VECTOR, STEP = 16, 32  # outputs of a vector, and inputs at a time; see packed.cpp
PANEL = 3 * VECTOR if has_avx512() else VECTOR  # outputs of a panel
INVARIANT = 32  # most rows of one call of oneDNN whose bits do not depend on their number (at 64 they do)
OURS = 1.1 ** len(ROWS)  # a library's kernel is taken where it is within a tenth of ours
_CHUNK = 2**26  # bytes of memory in huge pages that weights are laid out in
_COLD = 2**26  # bytes of weights that a measurement reads, so that they come from memory
COPIES = 128  # weights that it reads at most
_choices: dict[str, Figures] = {}  # of this machine, by shape
_shapes_used: set[tuple[int, int]] = set()  # shapes of this process's products
_lock = threading.Lock()  # of the pages


class Kernel(NamedTuple):
    """A way to multiply rows with weights [N, K]. lay_out: what it reads in their place, tensors or one; multiply: left
    [M, K], that, maybe a bias [N], and where the result [M, N] goes; serves: whether it takes weights of N and K
    here."""

    name: str
    lay_out: Callable[[Tensor], Any]
    multiply: Callable[[Tensor, Any, Tensor | None, Tensor], None]
    serves: Callable[[int, int], bool]


class _Pages:
    """Memory in huge pages, where the system has them: reading weights then misses no page table entries."""

    chunk: mmap.mmap | None = None
    used = 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """Room for `count` numbers: in a chunk that others share, or of its own."""
        size = -(-dtype.itemsize * count // 64) * 64
        if size >= _CHUNK:
            return torch.frombuffer(_huge(size), dtype=dtype, count=count)
        with _lock:
            if self.chunk is None or self.used + size > _CHUNK:
                self.chunk, self.used = _huge(_CHUNK), 0
            room = torch.frombuffer(self.chunk, dtype=dtype, count=count, offset=self.used)
            self.used += size
        return room


def _huge(size: int) -> mmap.mmap:
    memory = private_memory(size)
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


pages = _Pages()


def in_huge_pages(weight: Tensor) -> Tensor:
    """A copy of a weight there, contiguous."""
    return pages.take(weight.numel(), weight.dtype).view(weight.shape).copy_(weight)


def in_panels(weight: Tensor) -> Tensor:
    """A weight [N, K] as packed.cpp reads it."""
    outputs, width = weight.shape
    whole = outputs // PANEL * PANEL
    room = pages.take(weight.numel(), torch.bfloat16)
    for part, to in ((weight[:whole], room[: whole * width]), (weight[whole:], room[whole * width :])):
        if len(part):
            panels = part.view(-1, min(PANEL, len(part)) // VECTOR, VECTOR, width // 2, 2)
            to.view(len(panels), width // 2, -1, VECTOR, 2).copy_(panels.permute(0, 3, 1, 2, 4))
    return room


def _in_panels(left: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    rows, width = left.shape
    more = weight if bias is None else bias
    binding("packed.cpp")(left, weight, more, out, rows, width, out.shape[1], bias is not None)


def _in_place(left: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    more = weight if bias is None else bias
    sizes = 1, *left.shape, len(weight), 0, 0
    in_place([len(weight)])(left, weight, weight, weight, more, out, *sizes, bias is not None)


def _by_onednn(left: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    for start in range(0, len(left), INVARIANT):
        part = left[start : start + INVARIANT]
        out[start : start + INVARIANT] = torch.ops.mkldnn._linear_pointwise(part, weight, bias, "none", [], "")


def _by_torch(left: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    out.copy_(F.linear(left, weight, bias))


def _serves_panels(outputs: int, width: int) -> bool:
    return served() and not outputs % VECTOR and not width % STEP


IN_PLACE = Kernel("in place", lambda weight: weight, _in_place, lambda _, width: served() and not width % STEP)


PANELS = Kernel("panels", in_panels, _in_panels, _serves_panels)


KERNELS = (
    IN_PLACE,
    PANELS,
    Kernel(
        "onednn",
        lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight, 16),
        _by_onednn,
        lambda *_: torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    ),
    Kernel("torch", lambda weight: weight, _by_torch, lambda *_: True),
)


def choose(outputs: int, width: int) -> Kernel | None:
    """The fastest row-invariant kernel for weights [outputs, width]; None where none is. It is measured once and kept
    for later processes. Beside other work nothing is measured: it would hold up one kernel and not another, a hundred
    times as long as a product takes."""
    name = f"{outputs}x{width}"
    _shapes_used.add((outputs, width))
    if name not in _choices:
        path = cache_folder() / "kernels" / f"{_machine()}.json"
        with suppress(OSError, ValueError, AttributeError):
            saved = read_json(path).items()
            _choices.update({shape: of for shape, of in saved if isinstance(of, dict) and "kernel" in of})
        if name not in _choices:
            if crowded() and (usual := _usual(outputs, width)) is not None:
                return usual
            if not _choices:
                print("measuring once which kernel multiplies fastest on this machine", file=sys.stderr)
            _choices[name] = measure(outputs, width)
            with suppress(OSError):  # of a folder that can not be written to: measured again by the next process
                private_folder(path.parent)
                write_text(path, json.dumps(_choices, indent=1) + "\n")
    return next((kernel for kernel in KERNELS if kernel.name == _choices[name]["kernel"]), None)


def measured() -> dict[str, Figures]:
    """What was measured of the products that this process has met, by their shape; see `measure`."""
    names = (f"{outputs}x{width}" for outputs, width in sorted(_shapes_used))
    return {name: _choices[name] for name in names if name in _choices}


def _usual(outputs: int, width: int) -> Kernel | None:
    """The kernel that is fastest on most processors of this kind; None where none of ours serves."""
    ours = (IN_PLACE, PANELS) if has_tiles() else (PANELS, IN_PLACE)
    return next((kernel for kernel in ours if kernel.serves(outputs, width)), None)


@cache
def _machine() -> str:
    here = processor(), torch.backends.cpu.get_cpu_capability(), has_tiles(), torch.get_num_threads()
    parts = [torch.__version__, torch.__config__.show(), here, code_hash("engine")]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@torch.inference_mode()
def measure(outputs: int, width: int) -> Figures:
    """kernel: the name of the choice (None: no kernel is row-invariant); ms: of each kernel at each of ROWS; varies:
    kernels that are not row-invariant."""
    pages.chunk = None  # a chunk that weights in use share would stay for what is measured, and the other way round
    copies = min(COPIES, math.ceil(_COLD / (2 * outputs * width)))
    weights = [torch.randn(outputs, width, dtype=torch.bfloat16) for _ in range(copies)]
    if has_tiles():  # where targets' weights lie, too
        weights = [in_huge_pages(weight) for weight in weights]
    left = torch.randn(2 * INVARIANT, width, dtype=torch.bfloat16)
    out = torch.empty(2 * INVARIANT, outputs, dtype=torch.bfloat16)
    kernels = [kernel for kernel in KERNELS if kernel.serves(outputs, width)]
    ready = {kernel.name: [kernel.lay_out(weight) for weight in weights] for kernel in kernels}
    varies = [kernel.name for kernel in kernels if not row_invariant(kernel, ready[kernel.name][0], left, outputs)]
    seconds: dict[tuple[str, int], list[float]] = {(kernel.name, n): [] for kernel in kernels for n in ROWS}
    for turn in range(4):
        for kernel in kernels:
            for n, i in itertools.product(ROWS, range(copies)):
                start = time.perf_counter()
                kernel.multiply(left[:n], ready[kernel.name][i], None, out[:n])
                if turn:  # the first compiles and warms up
                    seconds[kernel.name, n].append(time.perf_counter() - start)
    # A low quantile: calls that other work on the machine held up do not count.
    low = partial(statistics.quantiles, n=10, method="inclusive")  # the other method leaves the range of few values
    ms = {k.name: {n: 1000 * low(seconds[k.name, n])[0] for n in ROWS} for k in kernels}
    ours = "in place", "panels"
    score = {name: math.prod(times.values()) * (OURS if name in ours else 1) for name, times in ms.items()}
    best = next((name for name in sorted(score, key=lambda name: score[name]) if name not in varies), None)
    times = {name: {str(n): round(value, 4) for n, value in of.items()} for name, of in ms.items()}
    pages.chunk = None
    return {"kernel": best, "ms": times, "varies": varies}


def row_invariant(kernel: Kernel, weight: Tensor, left: Tensor, outputs: int) -> bool:
    """Whether each row has the same bits alone, at every place, and among any number of others."""
    alone = torch.empty(len(left), outputs, dtype=left.dtype)
    for i in range(len(left)):
        kernel.multiply(left[i : i + 1], weight, None, alone[i : i + 1])
    for start, stop in ((0, 2), (1, 4), (3, 11), (0, 16), (5, 36), (0, len(left))):
        found = torch.empty(stop - start, outputs, dtype=left.dtype)
        kernel.multiply(left[start:stop], weight, None, found)
        if not found.equal(alone[start:stop]):
            return False
    return True
