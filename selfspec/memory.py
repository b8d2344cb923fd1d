"""How much memory is free."""

from __future__ import annotations

import psutil
import torch


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device; on kinds that do not tell, all there could be."""
    if device.type == "cpu":
        return psutil.virtual_memory().available
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2**62
