"""The training loop, written once: accelerate, progress bar, validation, atomic checkpoints, exact resume."""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm.auto import tqdm

from selfspec.log import Figures, RunLog, atomic

Batches = Callable[[int], dict[str, Tensor]]


@dataclass
class LoopConfig:
    """steps: optimizer steps; batch_size: rows per step over all processes; decay: the last part of the steps, over
    which the learning rate falls linearly to zero; warmup: steps; clip: largest gradient norm; precision: no or bf16
    (autocast); the three `_every` count steps."""

    steps: int = 1000
    batch_size: int = 8
    warmup: int = 20
    decay: float = 0.5
    clip: float = 1.0
    precision: str = "bf16"
    compile: bool = False
    seed: int = 0
    log_every: int = 10
    validate_every: int = 250
    checkpoint_every: int = 250

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "log_every", "validate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"loop.{name}={getattr(self, name)} must be at least 1")
        if not self.clip > 0:
            raise ValueError(f"loop.clip={self.clip} must be above 0")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"loop.decay={self.decay} must lie in [0, 1]")
        if self.precision not in ("no", "bf16"):
            raise ValueError(f"loop.precision={self.precision!r} must be 'no' or 'bf16'")

    def lr_factor(self, step: int) -> float:
        """Linear warm-up, a plateau, then linear decay to zero at `steps`."""
        up = min(1.0, (step + 1) / max(1, self.warmup))
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return min(up, 1.0, left)


def default_device() -> str:
    """This process's own GPU, or the CPU."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


def autocast(device: torch.device, config: LoopConfig) -> torch.autocast:
    """What the forward passes run under. Not accelerate's own: that is one setting for the whole process, and a sweep
    may train in both precisions."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")


def checkpoint_path(folder: Path) -> Path:
    return folder / "state.pt"


def _save(path: Path, state: Figures) -> None:
    with atomic(path) as scratch:
        torch.save(state, scratch)


def fit(
    accelerator: Accelerator,
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batches: Batches,
    validate: Callable[[], Figures],
    config: LoopConfig,
    folder: Path,
    log: RunLog,
    headline: str,
) -> Figures:
    """Train `module`, whose forward takes a batch and returns (loss, figures); returns the last validation.

    Only parameters that require gradients are trained and saved. A `state.pt` in `folder` is resumed, and gives the
    same weights as a run that was never interrupted. `headline` names the validation figure in the progress bar.
    """
    owned = dict(p for p in module.named_parameters() if p[1].requires_grad)
    step, seconds = 0, 0.0
    if (path := checkpoint_path(folder)).exists():
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{path} is damaged ({error}); delete it to start over, or choose another name="
            ) from error
        if {n: p.shape for n, p in state["parameters"].items()} != {n: p.shape for n, p in owned.items()}:
            raise ValueError(f"{path} holds other parameters than this configuration trains; choose another name=")
        with torch.no_grad():
            for name, saved in state["parameters"].items():
                owned[name].copy_(saved)
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, seconds = state["step"], state["seconds"]
    if accelerator.is_main_process:
        log.rewind(step)
    peaks = [[group.setdefault("initial_lr", group["lr"]) for group in o.param_groups] for o in optimizers]
    if config.compile:
        module.compile(dynamic=False)  # validation has its own static shape
    module, *optimizers = accelerator.prepare(module, *optimizers)
    precision = autocast(accelerator.device, config)

    figures: Figures = {}
    bar = tqdm(total=config.steps, initial=step, desc="train", disable=not accelerator.is_main_process, mininterval=1.0)
    while step < config.steps:
        start = time.perf_counter()
        factor = config.lr_factor(step)
        for optimizer, group_peaks in zip(optimizers, peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, group_peaks, strict=True):
                group["lr"] = peak * factor
        batch = {key: value.to(accelerator.device) for key, value in batches(step).items()}
        with precision:
            loss, parts = module(batch)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(owned.values(), config.clip)
        if not math.isfinite(float(norm)):
            raise FloatingPointError(
                f"gradient norm {float(norm)} at step {step}: lower the learning rate, or train with loop.precision=no"
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        seconds += time.perf_counter() - start
        bar.update()
        if step % config.log_every == 0 or step == config.steps:
            record = {"loss": float(loss.detach()), **{k: v.tolist() for k, v in parts.items()}, "lr_factor": factor}
            record |= {"grad_norm": float(norm), "seconds_per_step": seconds / step}
            if accelerator.is_main_process:
                log.write({"train": record}, step)
            bar.set_postfix(loss=f"{record['loss']:.3f}", **({headline: figures[headline]} if figures else {}))
        if step % config.validate_every == 0 or step == config.steps:
            module.eval()
            with torch.no_grad(), precision:
                figures = validate()
            module.train()
            if accelerator.is_main_process:
                log.write({"validation": figures}, step)
        if (step % config.checkpoint_every == 0 or step == config.steps) and accelerator.is_main_process:
            state = {"step": step, "seconds": seconds, "optimizers": [o.state_dict() for o in optimizers]}
            state["parameters"] = {name: p.detach() for name, p in owned.items()}
            _save(path, state)
    bar.close()
    if not figures:  # resumed a finished run
        module.eval()
        with torch.no_grad(), precision:
            figures = validate()
    return {**figures, "seconds": seconds}
