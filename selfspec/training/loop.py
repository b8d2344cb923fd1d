"""The training loop, written once: accelerate, progress bar, validation, atomic checkpoints, exact resume."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from selfspec.training import shard
from selfspec.training.pace import Pace
from selfspec.training.signals import Interrupted, Signals
from selfspec.training.state import Checkpoint, State, checkpoint_path
from selfspec.utils.errors import command_line
from selfspec.utils.files import Figures
from selfspec.utils.progress import progress
from selfspec.utils.tracking import RunLog

Batches = Callable[[int], dict[str, Tensor]]


@dataclass
class LoopConfig:
    """steps: optimizer steps; batch_size: rows per step over all processes; accumulate: parts that each process runs
    its rows of a step in, in turn, so that memory holds the activations of one; decay: the last part of the steps, over
    which the learning rate falls linearly to zero; warmup: steps in which it rises to its peak; clip: largest gradient
    norm; precision: no, or bf16 (autocast); compile: torch.compile of the training step; seed: of weights and the order
    of rows; log_every: steps; validate_every: steps; checkpoint_every: steps; patience: so many validations in a row
    without a better one end the run, 0 for never."""

    steps: int = 1000
    batch_size: int = 8
    accumulate: int = 1
    warmup: int = 20
    decay: float = 0.5
    clip: float = 1.0
    precision: str = "bf16"
    compile: bool = False
    seed: int = 0
    log_every: int = 10
    validate_every: int = 250
    checkpoint_every: int = 250
    patience: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "log_every", "validate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"loop.{name}={getattr(self, name)} must be at least 1")
        if self.patience < 0:
            raise ValueError(f"loop.patience={self.patience} must be at least 0")
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


def average(accelerator: Accelerator) -> Callable[[Tensor], Tensor]:
    """The mean of a tensor over all processes."""
    return lambda value: accelerator.reduce(value.detach(), "mean")


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
    best: bool = False,
) -> Figures:
    """Train `module`, whose forward takes a batch and returns (loss, figures); returns the last validation.

    Only parameters that require gradients are trained and saved. A `state.pt` in `folder` is resumed, and gives the
    same weights as a run that was never interrupted. `headline` names the validation figure in the progress bar. With
    `best`, higher is better, and the run ends with the weights of the validation that scored highest. SIGTERM and
    Ctrl-C save and raise SystemExit.
    """
    if config.patience and not best:
        raise ValueError(f"loop.patience={config.patience} is for drafters; a target is trained to its last step")
    owned = dict(p for p in module.named_parameters() if p[1].requires_grad)
    checkpoint = Checkpoint(checkpoint_path(folder), owned, optimizers, accelerator.num_processes)
    state, notes = checkpoint.read()
    if state.step > config.steps:
        raise ValueError(f"loop.steps={config.steps}, but this run is at step {state.step}; give as many or more")
    if state.step:
        notes.append(f"goes on from step {state.step}")
    if accelerator.is_main_process:
        log.rewind(state.step)
        for line in notes:
            print(line)
    peaks = [[group.setdefault("initial_lr", group["lr"]) for group in o.param_groups] for o in optimizers]
    if config.compile:
        module.compile(dynamic=False)  # validation has its own static shape
    # FSDP of accelerate's own would wrap modules; a target is divided when it is loaded (see `shard`).
    module = shard.replicated(module) if shard.wanted() else accelerator.prepare(module)
    precision = autocast(accelerator.device, config)

    def checked() -> Figures:
        module.eval()
        # Several processes wait for each other inside a validation, so that it has to be finished.
        signals.at_once = accelerator.num_processes == 1
        try:
            with torch.no_grad(), precision:
                return validate()
        finally:
            signals.at_once = False
            module.train()

    def due(every: int) -> bool:
        return state.step % every == 0 or state.step == config.steps

    figures, signals = dict[str, Any](), Signals()
    pace = Pace(config.steps, state.step)
    show = progress(total=config.steps, initial=state.step, desc="train", disable=not accelerator.is_main_process)
    with signals, show as bar:
        while (state.step < config.steps and not _flat(state, config)) or state.pending:
            if not state.pending:
                start = time.perf_counter()
                loss, parts, norm, tokens = _step(accelerator, module, optimizers, peaks, batches, config, state.step)
                state.step += 1
                took = time.perf_counter() - start
                state.seconds += took
                state.pending = due(config.validate_every)
                bar.update()
                said = [pace.step(took, tokens)]
                if due(config.log_every):
                    told = accelerator.reduce({"loss": loss, **parts}, "mean")
                    record: Figures = {name: value.tolist() for name, value in told.items()}
                    record |= {"lr_factor": config.lr_factor(state.step - 1), "grad_norm": norm}
                    record["seconds_per_step"] = state.seconds / state.step
                    if accelerator.is_main_process:
                        log.write({"train": record}, state.step)
                    shown = {headline: f"{figures[headline]:.3f}"} if figures else {}
                    bar.set_postfix(loss=f"{record['loss']:.3f}", **shown, tokens=f"{tokens / took:.0f}/s")
                    said.append(pace.loss(state.step, record["loss"]))
                if accelerator.is_main_process:
                    for line in filter(None, said):
                        bar.write(line)
            stop = _any(accelerator, bool(signals.caught))
            if state.pending and not stop:
                if accelerator.num_processes > 1 and accelerator.is_main_process:
                    checkpoint.write(state)  # launchers do not wait long for processes they have stopped
                try:
                    figures, state.pending = checked(), False
                except Interrupted:
                    stop = True
                else:
                    if best:
                        state.judge(_mean(accelerator, figures[headline]), checkpoint)
                    if accelerator.is_main_process:
                        log.write({"validation": figures}, state.step)
            if stop or due(config.checkpoint_every) or _flat(state, config):
                if accelerator.is_main_process:
                    checkpoint.write(state)
                accelerator.wait_for_everyone()
                stop = stop or _any(accelerator, bool(signals.caught))  # it came during the validation
            if stop:
                number = signal.Signals(signals.caught[0] if signals.caught else signal.SIGTERM)
                if accelerator.is_main_process:
                    where = f"stopped by {number.name} at step {state.step}: saved; it goes on from there with"
                    print(f"{where}\n  {command_line(accelerator.num_processes)}", file=sys.stderr, flush=True)
                raise SystemExit(128 + number)
    last = state.best is None or state.best[1] == state.step
    if state.best is not None and not last:
        checkpoint.put(state.best[2])
    if not figures or not last:  # a finished run that was resumed, or weights of an earlier step
        figures = checked()
    module.eval()
    kept = state.step if state.best is None else state.best[1]
    return {**figures, "seconds": state.seconds, "steps": state.step, "kept_step": kept}


def _flat(state: State, config: LoopConfig) -> bool:
    return 0 < config.patience <= state.since


def _mean(accelerator: Accelerator, value: float) -> float:
    """One number for all processes, so that they judge alike."""
    if accelerator.num_processes == 1:
        return value
    return float(accelerator.reduce(torch.tensor(value, device=accelerator.device), "mean"))


def _any(accelerator: Accelerator, value: bool) -> bool:
    """Whether it is so in any process."""
    if accelerator.num_processes == 1:
        return value
    return bool(accelerator.reduce(torch.tensor(float(value), device=accelerator.device)) > 0)


def _counted(piece: dict[str, Tensor]) -> Tensor:
    """bool [B, S] or [B, S - 1]: about which tokens a loss counts."""
    mask, documents, roots = piece["mask"], piece.get("documents"), piece.get("roots")
    if documents is None:
        return mask
    counts = mask[:, 1:] & (documents[:, 1:] == documents[:, :-1])
    return counts if roots is None else counts & roots[:, 1:]


def _step(
    accelerator: Accelerator,
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    peaks: list[list[float]],
    batches: Batches,
    config: LoopConfig,
    step: int,
) -> tuple[Tensor, dict[str, Tensor], float, int]:
    """One optimizer step: this process's part of its loss and figures, the gradient norm, and tokens read by all."""
    factor = config.lr_factor(step)
    for optimizer, group_peaks in zip(optimizers, peaks, strict=True):
        for group, peak in zip(optimizer.param_groups, group_peaks, strict=True):
            group["lr"] = peak * factor
    # Whatever a module draws at random follows from the step, so that no generator's state has to be saved.
    torch.manual_seed((config.seed * 1_000_003 + step) * 1_009 + accelerator.process_index)
    batch = {key: value.to(accelerator.device) for key, value in batches(step).items()}
    pieces = [
        dict(zip(batch, values, strict=True))
        for values in zip(*(value.chunk(config.accumulate) for value in batch.values()), strict=True)
    ]
    # A part of a step weighs what its share of the tokens that count is.
    counts = torch.stack([_counted(piece).sum() for piece in pieces]).float()
    counts = accelerator.reduce(counts, "sum")
    weights = counts / counts.sum().clamp(min=1)
    total, figures = torch.zeros((), device=accelerator.device), dict[str, Tensor]()
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        alone = nullcontext() if last or not isinstance(module, DistributedDataParallel) else module.no_sync()
        with alone:
            with autocast(accelerator.device, config):
                loss, parts = module(piece)
            (loss * weights[i]).backward()
        total += loss.detach() * weights[i]
        figures = {name: figures.get(name, 0) + value.detach() * weights[i] for name, value in parts.items()}
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
