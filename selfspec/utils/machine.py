"""What computes: names by which measurements and compiled code are kept."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch


@cache
def processor() -> dict[str, str]:
    """The "model name", the "vendor_id" and the "flags" of the processor, where the system tells them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    pairs = (line.split(":", 1) for line in reversed(lines) if ":" in line)
    fields = {name.strip(): value.strip() for name, value in pairs}
    known = {name: fields.get(name, "") for name in ("model name", "vendor_id", "flags")}
    return {**known, "model name": known["model name"] or platform.processor()}


def device_name(device: torch.device) -> str:
    """What a cost depends on beside target and dtype: the device, and on a CPU how many threads compute."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{processor()['model name']}, {capability}, {torch.get_num_threads()} threads"
