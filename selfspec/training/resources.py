"""What a training takes: memory by its parts, computed before it begins, and time, measured."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import sys
import time
from contextlib import suppress
from statistics import median

import torch
from torch import Tensor, nn

from selfspec.core.target import Target
from selfspec.drafters.base import Drafter, Trained
from selfspec.drafters.parts.vocabulary import Reduced
from selfspec.utils.files import is_main_process
from selfspec.utils.machine import crowded
from selfspec.utils.progress import progress

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's mallopt


def reuse_memory() -> None:
    """From now on this process keeps the memory that it frees. glibc gives large pieces back to the system, which
    clears them page by page when they are asked for again: a fifth of a training step (notebooks/LOG.md)."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, -1)  # never


def memory_line(target: Target, drafter: Drafter, tokens: int, parts: int = 1) -> str:
    """What is trained, and the memory of each process, by its parts. tokens: that run at once in a process; parts:
    among which the target is divided. Works for weights on the meta device, too.

    Counted are weights, gradients and AdamW's moments, and logits: the target's, and with their gradients those of
    every depth that is trained at once. Hidden states and what a framework needs are not.
    """
    frozen = [p for p in {id(p): p for p in target.model.parameters()}.values() if not (p.is_meta and target.partial)]
    trained = list(drafter.trained().values())
    frozen_bytes = sum(p.numel() * p.element_size() for p in frozen) / parts
    moved = 4 * sum(p.numel() * p.element_size() for p in trained)  # with gradients and AdamW's two moments
    depths = drafter.depth if isinstance(drafter, Trained) else 0
    few = drafter.vocabulary if isinstance(drafter, Reduced) else None
    drafted = target.vocab_size if few is None else len(few)
    logits = tokens * target.dtype.itemsize * (target.vocab_size + 2 * depths * drafted)
    counts = [sum(p.numel() for p in parameters) / 1e6 for parameters in (trained, frozen)]
    held = (frozen_bytes + moved + logits) / 2**30
    return (
        f"trains {counts[0]:.2f}M parameters, with gradients and moments {moved / 2**20:.1f} MB, beside a target of "
        f"{counts[1]:.2f}M, {frozen_bytes / 2**20:.1f} MB; logits of {tokens} tokens at once {logits / 2**20:.1f} MB; "
        f"each process holds {held:.2f} GiB, hidden states not counted"
    )


def relative_cost(
    module: nn.Module,
    target: Target,
    batch: dict[str, Tensor],
    precision: torch.autocast,
    times: int = 6,
    most: float = math.inf,
) -> dict[str, float]:
    """Seconds of a training step over seconds of the target's bare forward on the same batch; alternated, medians.
    most: seconds after which nothing more is timed; the first round, which is longer, then counts too."""
    batch = {key: value.to(target.device) for key, value in batch.items()}
    steps, forwards, begun = [], [], time.perf_counter()
    module.train()
    for _ in progress(range(times), desc="time of a step", leave=False, disable=not is_main_process()):
        start = time.perf_counter()
        with torch.no_grad(), precision:
            target.text(batch["tokens"])  # what any drafter trained online has to run
        _wait(target.device)
        middle = time.perf_counter()
        with precision:
            loss, _ = module(batch)
        loss.backward()
        _wait(target.device)
        forwards.append(middle - start)
        steps.append(time.perf_counter() - middle)
        module.zero_grad(set_to_none=True)
        if time.perf_counter() - begun > most:
            break
    module.eval()
    step, forward = median(steps[1:] or steps), median(forwards[1:] or forwards)
    return {"seconds_step": step, "seconds_target_forward": forward, "step_over_forward": step / forward}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bfloat16_is_faster(device: str) -> bool:
    """Whether matrix products of training's sizes take less time in bfloat16 than in float32, measured: a processor
    without instructions for it takes up to ten times longer (notebooks/LOG.md)."""
    kinds, place = (torch.bfloat16, torch.float32), torch.device(device)
    pairs = [[torch.ones(512, 1024, device=place, dtype=kind) for _ in range(2)] for kind in kinds]
    best = [float("inf"), float("inf")]
    for _ in range(4):  # the first is longer, and the others alternate
        for i, (a, b) in enumerate(pairs):
            start = time.perf_counter()
            a @ b.T
            _wait(place)
            best[i] = min(best[i], time.perf_counter() - start)
    return best[0] < best[1]


def peak_memory_mb(device: torch.device) -> float:
    """The most memory that this process has held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def crowd() -> str | None:
    """What to say where more programs run than there are processors; each uses as many threads as it finds processors,
    and threads that wait for each other spin."""
    if not crowded():
        return None
    processors, load = os.cpu_count() or 1, os.getloadavg()[0]
    threads = torch.get_num_threads()
    many = f", {threads} of them for this run; where several programs run at once, start each with OMP_NUM_THREADS=1"
    busy = f"{load:.0f} threads compete for {processors} processors"
    return busy + (many if threads > 1 else "; other programs run here")
