"""The processes of a drafter's training, and how they divide what is not a batch."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import Tensor

from selfspec.training import shard


class Processes:
    """accelerator: of all processes; rank, world: this one's number, and how many there are; part, parts: the same
    among those that divide validation rows and prompts between them (see `shard.share`)."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index is not None and int(os.environ.get("WORLD_SIZE", "1")) == 1:
            torch.cuda.set_device(device)  # accelerate takes the first GPU where there is one process
        self.accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="no")  # loop.precision says it
        self.rank: int = self.accelerator.process_index
        self.world: int = self.accelerator.num_processes
        self.part, self.parts = shard.share()

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return bool(self.accelerator.is_main_process)

    def total(self, counts: Tensor) -> Tensor:
        """The sum of a tensor over the processes that divide the work."""
        if self.parts == 1:
            return counts
        summed: Tensor = self.accelerator.reduce(counts.to(self.accelerator.device), "sum")
        return summed.cpu()

    def say(self, lines: Iterable[str]) -> None:
        for line in lines if self.first else ():
            print(line)
