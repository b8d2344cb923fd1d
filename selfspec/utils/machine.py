"""What computes: names by which measurements and compiled code are kept."""

from __future__ import annotations

import mmap
import os
import platform
import re
import sys
from functools import cache
from pathlib import Path

import torch

from selfspec.utils.errors import one_line

DTYPES = ("auto", "int8", "bfloat16", "float16", "float32", "float64")  # of targets
_SHORT = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}
_DEVICES = ("cpu", "cuda", "mps", "xpu", "npu", "hpu", "mlu", "musa")


def dtype_name(name: str) -> str:
    """One of DTYPES by its name, or another that people use. Raises ValueError for what is none."""
    if (known := _SHORT.get(name, name)) not in DTYPES:
        raise ValueError(f"dtype={name!r} must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    return known


def check_device_name(name: str | None) -> None:
    """Raises ValueError for what names no device, here or elsewhere."""
    if name is not None and name != "auto" and not re.fullmatch(rf"({'|'.join(_DEVICES)})(:\d+)?", name):
        why = "there is no such kind; give cpu, cuda or cuda:1, or auto"
        raise ValueError(f"device={name!r} can not be used here: {why}")


def check_device(name: str) -> None:
    """Raises ValueError for a device that is not here."""
    check_device_name(name)
    if name.startswith("mps"):
        raise ValueError(
            f"device={name!r} can not be used: it has no float64, of which noise is made; give cpu, or auto"
        )
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        why = f"torch {torch.__version__} finds none of this name; give cpu, or auto"
        raise ValueError(f"device={name!r} can not be used here: {why}") from error


@cache
def processor() -> dict[str, str]:
    """The "model name", the "vendor_id" and the "flags" of the processor, where the system tells them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    pairs = (line.split(":", 1) for line in reversed(lines) if ":" in line)
    fields = {name.strip(): value.strip() for name, value in pairs}
    known = {name: fields.get(name, "") for name in ("model name", "vendor_id", "flags")}
    return {**known, "model name": known["model name"] or platform.processor()}


def private_memory(size: int) -> mmap.mmap:
    """Bytes that are taken where they are first written to, and that a forked process has for itself."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    return mmap.mmap(-1, size, **private)


def crowded() -> bool:
    """Whether in the last minute half as many threads again wanted to run as the machine has processors: the load is
    that of all, also where this program may use a few."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] >= 1.5 * (os.cpu_count() or 1)


def default_device() -> str:
    """Where to compute unless a device is named: this process's own CUDA device, else the CPU. One that is there and
    does not work is left out, with a line. MPS is never chosen: it has no float64, which noise is made of."""
    if not torch.cuda.is_available():
        return "cpu"
    name = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % max(1, torch.cuda.device_count())}"
    try:
        torch.zeros(1, device=name).add_(1).item()
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"{name} is full ({one_line(error):.200}); free it, or give another device") from error
    except (RuntimeError, AssertionError) as error:
        print(f"{name} is there and does not work ({one_line(error):.200}); the CPU computes", file=sys.stderr)
        return "cpu"
    return name


def device_type(asked: str | None) -> str:
    """cpu, cuda or the like, of the device that is asked for (None, auto: `default_device`). Raises ValueError where it
    is not here."""
    if asked in (None, "auto"):
        return default_device().split(":")[0]
    check_device(str(asked))
    return str(asked).split(":")[0]


def device_name(device: torch.device) -> str:
    """What a cost depends on beside target and dtype: the device, and on a CPU how many threads compute."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{processor()['model name']}, {capability}, {torch.get_num_threads()} threads"
