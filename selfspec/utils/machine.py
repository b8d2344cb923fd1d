"""What computes: names by which measurements and compiled code are kept."""

from __future__ import annotations

import os
import platform
import sys
from functools import cache
from pathlib import Path

import torch

from selfspec.utils.errors import one_line


@cache
def processor() -> dict[str, str]:
    """The "model name", the "vendor_id" and the "flags" of the processor, where the system tells them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    pairs = (line.split(":", 1) for line in reversed(lines) if ":" in line)
    fields = {name.strip(): value.strip() for name, value in pairs}
    known = {name: fields.get(name, "") for name in ("model name", "vendor_id", "flags")}
    return {**known, "model name": known["model name"] or platform.processor()}


def default_device() -> str:
    """Where to compute unless a device is named: this process's own CUDA device, else the CPU. One that is there and
    does not work is left out, with a line. MPS is never chosen: it has no float64, which noise is made of."""
    if not torch.cuda.is_available():
        return "cpu"
    name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        torch.zeros(1, device=name).add_(1).item()
    except (RuntimeError, AssertionError) as error:
        print(f"{name} is there and does not work ({one_line(error):.200}); the CPU computes", file=sys.stderr)
        return "cpu"
    return name


def device_type(asked: str | None) -> str:
    """cpu, cuda or the like, of the device that is asked for (None, auto: `default_device`)."""
    return (default_device() if asked in (None, "auto") else str(asked)).split(":")[0]


def device_name(device: torch.device) -> str:
    """What a cost depends on beside target and dtype: the device, and on a CPU how many threads compute."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{processor()['model name']}, {capability}, {torch.get_num_threads()} threads"
