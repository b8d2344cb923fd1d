"""The training loop, written once: accelerate, progress bar, validation, atomic checkpoints, exact resume."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

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
    state = _resumed(accelerator, checkpoint, config, log)
    peaks = [[group.setdefault("initial_lr", group["lr"]) for group in o.param_groups] for o in optimizers]
    if config.compile:
        module.compile(dynamic=False)  # validation has its own static shape
    # FSDP of accelerate's own would wrap modules; a target is FSDP-sharded when it is loaded (see `shard`).
    module = shard.replicated(module) if shard.wanted() else accelerator.prepare(module)
    loop = _Loop(accelerator, module, optimizers, peaks, batches, validate, config, log, headline, checkpoint, state)
    with loop.signals, loop.bar:
        while (state.step < config.steps and not loop.flat) or state.pending:
            if not state.pending:
                loop.step()
            stop = loop.any(bool(loop.signals.caught))
            if state.pending and not stop:
                stop = loop.validated(best)
            if stop or loop.due(config.checkpoint_every) or loop.flat:
                stop = loop.saved() or stop
            if stop:
                loop.stop()
    return loop.finished()


def _resumed(accelerator: Accelerator, checkpoint: Checkpoint, config: LoopConfig, log: RunLog) -> State:
    """Where the run goes on. Raises ValueError where it has more steps than the config asks for."""
    state, notes = checkpoint.read()
    if state.step > config.steps:
        raise ValueError(f"loop.steps={config.steps}, but this run is at step {state.step}; give as many or more")
    if state.step:
        notes.append(f"goes on from step {state.step}")
    if accelerator.is_main_process:
        log.rewind(state.step)
        for line in notes:
            print(line)
    return state


@dataclass
class _Loop:
    """What a training holds while it runs. peaks: learning rates of each optimizer's groups; figures: of the last
    validation."""

    accelerator: Accelerator
    module: nn.Module
    optimizers: list[torch.optim.Optimizer]
    peaks: list[list[float]]
    batches: Batches
    validate: Callable[[], Figures]
    config: LoopConfig
    log: RunLog
    headline: str
    checkpoint: Checkpoint
    state: State
    figures: Figures = field(default_factory=dict)
    signals: Signals = field(default_factory=Signals)

    def __post_init__(self) -> None:
        self.pace = Pace(self.config.steps, self.state.step)
        main = self.accelerator.is_main_process
        self.bar = progress(total=self.config.steps, initial=self.state.step, desc="train", disable=not main)

    @property
    def flat(self) -> bool:
        """Whether `patience` validations brought nothing better."""
        return 0 < self.config.patience <= self.state.since

    def due(self, every: int) -> bool:
        return self.state.step % every == 0 or self.state.step == self.config.steps

    def any(self, value: bool) -> bool:
        """Whether it is so in any process."""
        if self.accelerator.num_processes == 1:
            return value
        return bool(self.accelerator.reduce(torch.tensor(float(value), device=self.accelerator.device)) > 0)

    def step(self) -> None:
        """One optimizer step and what is told of it."""
        state, config, start = self.state, self.config, time.perf_counter()
        arguments = self.accelerator, self.module, self.optimizers, self.peaks, self.batches, config, state.step
        loss, parts, norm, tokens = _step(*arguments)
        state.step += 1
        took = time.perf_counter() - start
        state.seconds += took
        state.pending = self.due(config.validate_every)
        self.bar.update()
        lines = [self.pace.step(took, tokens)]
        if self.due(config.log_every):
            means = self.accelerator.reduce({"loss": loss, **parts}, "mean")
            record: Figures = {name: value.tolist() for name, value in means.items()}
            record |= {"lr_factor": config.lr_factor(state.step - 1), "grad_norm": norm}
            record["seconds_per_step"] = state.seconds / state.step
            if self.accelerator.is_main_process:
                self.log.write({"train": record}, state.step)
            shown = {self.headline: f"{self.figures[self.headline]:.3f}"} if self.figures else {}
            self.bar.set_postfix(loss=f"{record['loss']:.3f}", **shown, tokens=f"{tokens / took:.0f}/s")
            lines.append(self.pace.loss(state.step, record["loss"]))
        for line in filter(None, lines):
            if self.accelerator.is_main_process:
                self.bar.write(line)

    def checked(self) -> Figures:
        """A validation, with the module as it is."""
        self.module.eval()
        # Several processes wait for each other inside a validation, so that it has to be finished.
        self.signals.at_once = self.accelerator.num_processes == 1
        try:
            with torch.no_grad(), autocast(self.accelerator.device, self.config):
                return self.validate()
        finally:
            self.signals.at_once = False
            self.module.train()

    def validated(self, best: bool) -> bool:
        """The validation that is due; returns whether it was interrupted."""
        if self.accelerator.num_processes > 1 and self.accelerator.is_main_process:
            self.checkpoint.write(self.state)  # launchers do not wait long for processes they have stopped
        try:
            self.figures, self.state.pending = self.checked(), False
        except Interrupted:
            return True
        if best:
            self.state.judge(_mean(self.accelerator, self.figures[self.headline]), self.checkpoint)
        if self.accelerator.is_main_process:
            self.log.write({"validation": self.figures}, self.state.step)
        return False

    def saved(self) -> bool:
        """Write a checkpoint; returns whether a signal came during the validation."""
        if self.accelerator.is_main_process:
            self.checkpoint.write(self.state)
        self.accelerator.wait_for_everyone()
        return self.any(bool(self.signals.caught))

    def stop(self) -> None:
        number = signal.Signals(self.signals.caught[0] if self.signals.caught else signal.SIGTERM)
        if self.accelerator.is_main_process:
            where = f"stopped by {number.name} at step {self.state.step}: saved; it goes on from there with"
            print(f"{where}\n  {command_line(self.accelerator.num_processes)}", file=sys.stderr, flush=True)
        raise SystemExit(128 + number)

    def finished(self) -> Figures:
        """The figures of the weights that are kept, which are put in place."""
        best = self.state.best
        last = best is None or best[1] == self.state.step
        if best is not None and not last:
            self.checkpoint.put(best[2])
        if not self.figures or not last:  # a finished run that was resumed, or weights of an earlier step
            self.figures = self.checked()
        self.module.eval()
        kept_step = self.state.step if best is None else best[1]
        return {**self.figures, "seconds": self.state.seconds, "steps": self.state.step, "kept_step": kept_step}


def _mean(accelerator: Accelerator, value: float) -> float:
    """One number for all processes, so that they judge alike."""
    if accelerator.num_processes == 1:
        return value
    return float(accelerator.reduce(torch.tensor(value, device=accelerator.device), "mean"))


def _counted(piece: dict[str, Tensor]) -> Tensor:
    """bool [B, S] or [B, S - 1]: about which tokens a loss counts."""
    mask, documents = piece["mask"], piece.get("documents")
    return mask if documents is None else mask[:, 1:] & (documents[:, 1:] == documents[:, :-1])


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
