"""Which engine a name stands for, here."""

from __future__ import annotations

import os
import sys
from functools import cache

import torch

from selfspec.engine.engine import Engine
from selfspec.engine.kernels.native import has_compiler
from selfspec.utils.files import cache_folder

ENGINES = ("auto", "eager", "compiled")
LATER = 20.0  # Seconds of passes that are not compiled before a thread compiles them: about what that takes


def engine_for(name: str, device: torch.device) -> Engine:
    """The engine of this name. Raises ValueError for an unknown one, and for compiled where nothing can compile."""
    if chosen(name, device.type) == "eager":
        return Engine()
    _check_compiling(device.type)
    _say_sleeping(device.type)
    waits = name == "auto" and device.type == "cpu" and os.environ.get("SELFSPEC_ENGINE", "auto") in ("", "auto")
    return Engine("inductor", cache_folder() / "compiled", later=LATER if waits else 0.0)


@cache
def _say_sleeping(device: str) -> None:
    """Say once that OMP_WAIT_POLICY=passive makes threads sleep between the hundreds of products of a pass
    (notebooks/LOG.md)."""
    asked = os.environ.get("OMP_WAIT_POLICY", "")
    if device == "cpu" and asked.lower() == "passive" and torch.get_num_threads() > 1:
        print(
            f"OMP_WAIT_POLICY={asked}: threads sleep between products. With no other program running, a pass takes up "
            "to 1.4 times as long",
            file=sys.stderr,
        )


def chosen(name: str, device: str) -> str:
    """eager or compiled. auto is what the environment's SELFSPEC_ENGINE says, else compiled where that can be, and
    eager with a line where it can not. Raises ValueError for an unknown name."""
    if name == "auto" and (name := os.environ.get("SELFSPEC_ENGINE") or "auto") not in ENGINES:
        raise ValueError(f"SELFSPEC_ENGINE={name!r} in the environment must be one of {', '.join(ENGINES)}")
    check_engine(name)
    if name != "auto":
        return name
    try:
        _check_compiling(device)
    except ValueError as error:
        print(f"passes run eagerly: {error}", file=sys.stderr)
        return "eager"
    return "compiled"


def _check_compiling(device: str) -> None:
    """Raises ValueError where nothing can compile. device: its type."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"engine=compiled serves CPUs and CUDA devices, not {device}; take engine=eager")
    if device == "cpu" and not has_compiler():
        raise ValueError(
            "engine=compiled needs a C++ compiler, and there is none; install one (the package g++ of Debian and "
            "Ubuntu, gcc-c++ of Fedora, clang of conda-forge; CXX names another), or take engine=eager"
        )


def check_engine(name: str) -> None:
    """Raises ValueError for an unknown engine."""
    if name not in ENGINES:
        raise ValueError(f"engine={name!r} must be one of {', '.join(ENGINES)}")
