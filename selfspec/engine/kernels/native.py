"""Kernels in C++ for processors with AVX-512 or AVX2, compiled when they are first used."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import torch

from selfspec.utils.files import atomic, cache_folder, only_mine, private_folder
from selfspec.utils.machine import processor

SIGNATURES = {  # what each takes: tensors, the last of which it writes to, and sizes; see its source
    "packed.cpp": [*["const uint16_t*"] * 3, "uint16_t*", *["int64_t"] * 4],
    "products.cpp": [*["const uint16_t*"] * 5, "uint16_t*", *["int64_t"] * 7],
    "tiles.cpp": [*["const uint16_t*"] * 5, "uint16_t*", *["int64_t"] * 7],
    "attention.cpp": [*["const uint16_t*"] * 4, "uint16_t*", *["int64_t"] * 8, "float"],
    "int8.cpp": ["const uint16_t*", *["const uint8_t*"] * 3, *["const uint16_t*"] * 4, "uint16_t*", *["int64_t"] * 6],
}
TILE = 16  # outputs of a tile
HEADERS = "vectors.h", "skinny_gemm.h"
SOURCES = [Path(__file__).with_name(name) for name in (*HEADERS, *SIGNATURES)]


def has_avx512() -> bool:
    """Whether the kernels use AVX-512. `ATEN_CPU_CAPABILITY=avx2` in the environment makes them use AVX2, as torch."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def served() -> bool:
    """Whether this processor takes the kernels."""
    return has_avx512() or torch.backends.cpu.get_cpu_capability() == "AVX2"


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


def has_pairs() -> bool:
    """Whether this processor adds two bfloat16 products by one instruction (AVX-512 BF16) faster than it widens and
    adds them: AMD's from Zen 4 on. Intel's begin one every other cycle (notebooks/LOG.md)."""
    return has_avx512() and "avx512_bf16" in processor()["flags"].split() and processor()["vendor_id"] == "AuthenticAMD"


@cache
def has_tiles() -> bool:
    """Whether this processor has AMX, the compiler knows it and this process may use it."""
    if not (has_avx512() and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()):
        return False
    if _kernel_path(_source("tiles.cpp", True)).is_file():
        return True
    from torch._inductor.cpu_vec_isa import VecAMX, supported_vec_isa_list  # slow to import

    # torch's own object: it keeps what it finds out, which decides by which flags torch compiles.
    return has_compiler() and any(map(bool, (isa for isa in supported_vec_isa_list if isinstance(isa, VecAMX))))


@cache
def trust_known_vectors() -> None:
    """Tell torch that the compiler makes all vectors of this processor, where an earlier process checked that. torch
    checks it anew in every process, which takes more than a second. Sets torch's global `config.cpp.vec_isa_ok`."""
    from torch._inductor import config, cpu_vec_isa  # slow to import

    marker = _kernel_path("vectors").with_suffix(".vectors")
    if config.cpp.vec_isa_ok is not None or not served() or not has_compiler():
        return
    if not marker.is_file():
        flags = cpu_vec_isa.x86_isa_checker()
        known = [isa for isa in cpu_vec_isa.supported_vec_isa_list if all(flag in flags for flag in str(isa).split())]
        if cpu_vec_isa.valid_vec_isa_list() != known:
            return
        with suppress(OSError):  # of a folder that can not be written to: checked again by the next process
            private_folder(marker.parent)
            marker.touch()
    config.cpp.vec_isa_ok = True


def in_place(outputs: Sequence[int]) -> Callable[..., None]:
    """The kernel that reads weights in place. outputs: of each weight."""
    return binding("tiles.cpp" if has_tiles() and min(outputs) >= TILE else "products.cpp")


@cache
def binding(name: str) -> Callable[..., None]:
    """One of SIGNATURES: what an earlier process compiled, or compiled now and kept for the next one. torch keeps it
    too, but checks what the compiler can do before it looks, which takes more than a second."""
    source = _source(name, has_tiles())
    path = _kernel_path(source)
    with suppress(ImportError, OSError):
        return _loaded(path)
    trust_known_vectors()
    from torch._inductor.codecache import CppPythonBindingsCodeCache  # slow to import

    kernel: Callable[..., None] = CppPythonBindingsCodeCache.load_pybinding(SIGNATURES[name], source)
    with suppress(OSError):  # of a folder that can not be written to
        private_folder(path.parent)
        code = Path(kernel.__self__.__file__).read_bytes()  # type: ignore[attr-defined]  # its module
        with atomic(path) as scratch:
            scratch.write_bytes(code + hashlib.sha256(code).digest())  # which the loader does not look at
    return kernel


@cache
def _compiler() -> str:
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler  # slow to import

    return get_compiler_version_info(get_cpp_compiler()) if has_compiler() else ""


def _source(name: str, tiles: bool) -> str:
    parts = [path.read_text() for path in SOURCES if path.name in (*HEADERS, name)]
    defined = ["#define SELFSPEC_AVX512"] * has_avx512() + ["#define SELFSPEC_TILES"] * tiles
    defined += ["#define SELFSPEC_PAIRS"] * (has_pairs() and not tiles)
    return "\n".join(defined + parts)


def _kernel_path(source: str) -> Path:
    """Where this source lies compiled for this processor, compiler, Python and torch."""
    made_for = [source, torch.__version__, sys.version, processor(), _compiler()]
    return cache_folder() / "kernels" / f"{hashlib.sha256(repr(made_for).encode()).hexdigest()[:16]}.so"


def _loaded(path: Path) -> Callable[..., None]:
    """The function of a module that torch built. Raises ImportError or OSError where there is none that can be read."""
    code = path.read_bytes()
    if not only_mine(path):
        raise ImportError(f"{path} may be of another user")
    if hashlib.sha256(code[:-32]).digest() != code[-32:]:  # what is cut short would end the process
        raise ImportError(f"{path} is damaged")
    # The module reads where torch's function for the data of a tensor lies, as it does when torch itself loads it.
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(
        torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    )
    loader = ExtensionFileLoader(f"{path.stem}.kernel", str(path))
    module = module_from_spec(spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    kernel: Callable[..., None] = module.kernel
    return kernel
