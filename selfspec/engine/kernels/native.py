"""Kernels in C++ for processors with AVX-512, compiled when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

SIGNATURES = {  # what each takes: tensors, the last of which it writes to, and sizes; see its source
    "packed.cpp": [*["const uint16_t*"] * 3, "uint16_t*", *["int64_t"] * 4],
    "products.cpp": [*["const uint16_t*"] * 5, "uint16_t*", *["int64_t"] * 7],
    "tiles.cpp": [*["const uint16_t*"] * 5, "uint16_t*", *["int64_t"] * 7],
    "attention.cpp": [*["const uint16_t*"] * 4, "uint16_t*", *["int64_t"] * 8, "float"],
    "int8.cpp": ["const uint16_t*", *["const uint8_t*"] * 3, *["const uint16_t*"] * 4, "uint16_t*", *["int64_t"] * 6],
}
TILE = 16  # outputs of a tile
SOURCES = [Path(__file__).with_name(name) for name in ("skinny_gemm.h", *SIGNATURES)]


def served() -> bool:
    """Whether this processor takes the kernels."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


@cache
def has_compiler() -> bool:
    """Whether there is a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # slow to import
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


@cache
def has_tiles() -> bool:
    """Whether this processor has AMX, the compiler knows it and this process may use it."""
    if not (served() and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()):
        return False
    from torch._inductor.cpu_vec_isa import VecAMX  # slow to import

    return bool(VecAMX())


def in_place(outputs: Sequence[int]) -> Callable[..., None]:
    """The kernel that reads weights in place. outputs: of each weight."""
    return binding("tiles.cpp" if has_tiles() and min(outputs) >= TILE else "products.cpp")


@cache
def binding(name: str) -> Callable[..., None]:
    """One of SIGNATURES, compiled."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache  # slow to import

    parts = [path.read_text() for path in SOURCES if path.name in ("skinny_gemm.h", name)]
    source = "\n".join(["#define SELFSPEC_TILES"] * has_tiles() + parts)
    kernel: Callable[..., None] = CppPythonBindingsCodeCache.load_pybinding(SIGNATURES[name], source)
    return kernel
