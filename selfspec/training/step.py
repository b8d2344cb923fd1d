"""One optimizer step over all processes."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from selfspec.training.loop_config import Batches, LoopConfig
from selfspec.utils.files import wrapped


def autocast(device: torch.device, config: LoopConfig) -> torch.autocast:
    """What the forward passes run under. Not accelerate's own: that is one setting for the whole process, and a sweep
    may train in both precisions."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")


def optimizer_step(
    accelerator: Accelerator,
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batches: Batches,
    config: LoopConfig,
    step: int,
    seconds: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor], float, int]:
    """One optimizer step: this process's part of its loss and figures, the gradient norm, and tokens read by all.
    seconds: that the steps before took."""
    factor = config.lr_factor(step, seconds)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = group["initial_lr"] * factor
    # Whatever a module draws at random follows from the step, so that no generator's state has to be saved.
    torch.manual_seed(wrapped((config.seed * 1_000_003 + step) * 1_009 + accelerator.process_index))
    batch = {key: value.to(accelerator.device) for key, value in batches(step).items()}
    pieces = [
        dict(zip(batch, values, strict=True))
        for values in zip(*(value.chunk(config.accumulate) for value in batch.values()), strict=True)
    ]
    counts = None
    if len(pieces) > 1:  # every mean of the loss is over the whole step
        inner: Any = module.module if isinstance(module, DistributedDataParallel) else module
        with autocast(accelerator.device, config):
            counts = accelerator.reduce(sum(inner.counts(piece) for piece in pieces), "mean")
        if not len(counts):
            raise ValueError(
                f"loop.accumulate={config.accumulate}: the drafter's loss divides by counts of its own; divide by "
                "batch.average(counts), as masked_mean does, or take loop.accumulate=1"
            )
    total, figures = torch.zeros((), device=accelerator.device), dict[str, Tensor]()
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        alone = nullcontext() if last or not isinstance(module, DistributedDataParallel) else module.no_sync()
        with alone:
            with autocast(accelerator.device, config):
                loss, parts = module(piece) if counts is None else module(piece, counts)
            loss.backward()
        total += loss.detach()
        figures = {name: figures.get(name, 0) + value.detach() for name, value in parts.items()}
    owned = [p for p in module.parameters() if p.requires_grad]
    norm = float(nn.utils.clip_grad_norm_(owned, config.clip))
    if not math.isfinite(norm):
        raise FloatingPointError(
            f"gradient norm {norm} at step {step}: lower the learning rate, or train with loop.precision=no"
        )
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    read = sum(piece["tokens"].numel() for piece in pieces) * accelerator.num_processes
    return total, figures, norm, read
