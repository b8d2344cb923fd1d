"""The training loop, written once: accelerate, progress bar, validation, atomic checkpoints, exact resume."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from selfspec.training import shard
from selfspec.training.checkpoint import Checkpoint, State, checkpoint_path
from selfspec.training.loop_config import Batches, LoopConfig
from selfspec.training.resources import crowd
from selfspec.training.signals import Interrupted, Signals
from selfspec.training.step import autocast, optimizer_step
from selfspec.utils.errors import command_line
from selfspec.utils.files import NOTHING, Figures, shown
from selfspec.utils.openai_client import Refused
from selfspec.utils.progress import progress
from selfspec.utils.tracking import RunLog

_EARLY = 10  # steps after which other programs beside this one are named


def average(accelerator: Accelerator) -> Callable[[Tensor], Tensor]:
    """The mean of a tensor over all processes."""
    return lambda value: accelerator.reduce(value.detach(), "mean")


def resumed(checkpoint: Checkpoint, config: LoopConfig, log: RunLog, first: bool) -> State:
    """Where the run goes on. Raises ValueError where it has more steps than the config asks for."""
    state, notes = checkpoint.read()
    if state.step > config.steps:
        raise ValueError(f"loop.steps={config.steps}, but this run is at step {state.step}; give as many or more")
    if state.step:
        notes.append(f"goes on from step {state.step}")
    if 0 < config.patience <= state.since:
        notes.append(f"loop.patience={config.patience}: {state.since} validations brought nothing better; raise it")
    if first:
        recorded = log.rewind(state.step, state.pending)
        if state.step - recorded > max(config.log_every, 1):
            notes.append(f"{log.path} lacks the figures of steps {recorded + 1} to {state.step}; they are lost")
        for line in notes:
            print(line)
    return state


@dataclass
class Loop:
    """Trains `module`, whose forward takes a batch and returns (loss, figures).

    Only parameters that require gradients are trained and saved, and `buffers` beside them. A `state.pt` in `folder` is
    resumed, and gives the same weights as a run that was never interrupted. data: keys of the training data and of the
    validation data; a change is reported. `headline` names the validation figure in the progress bar. With `best`,
    higher is better, and the run ends with the weights of the validation that scored highest. target: hash of the
    weights that stay and settings of their model, which a resumed run has to have. figures: of the last validation;
    kept: when it was saved last, by the monotonic clock; postfix: what stands beside the progress bar.
    """

    accelerator: Accelerator
    module: nn.Module
    optimizers: list[torch.optim.Optimizer]
    batches: Batches
    validate: Callable[[], Figures]
    config: LoopConfig
    folder: Path
    log: RunLog
    headline: str
    data: tuple[str, str]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    best: bool = False
    target: Figures = field(default_factory=dict)
    figures: Figures = field(default_factory=dict)
    signals: Signals = field(default_factory=Signals)
    kept: float = field(default_factory=lambda: time.monotonic())
    postfix: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config, module = self.config, self.module
        if config.patience and not self.best:
            raise ValueError(f"loop.patience={config.patience} is for drafters; a target is trained to its last step")
        self.world, self.first = self.accelerator.num_processes, bool(self.accelerator.is_main_process)
        owned, place = {n: p for n, p in module.named_parameters() if p.requires_grad}, checkpoint_path(self.folder)
        self.checkpoint = Checkpoint(
            place, owned, self.buffers, self.optimizers, self.world, self.data, self.target, self.log.config
        )
        self.state = resumed(self.checkpoint, config, self.log, self.first)
        module.train()  # packs again from the buffers that were read
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group.setdefault("initial_lr", group["lr"])
        if config.compile:
            module.compile(dynamic=False)  # validation has its own static shape
        # FSDP of accelerate's own would wrap modules; a target is FSDP-sharded when it is loaded (see `shard`).
        self.module = shard.replicated(module) if shard.wanted() else self.accelerator.prepare(module)
        self.begun = self.state.step
        self.bar = progress(total=config.steps, initial=self.state.step, desc="train", disable=not self.first)

    def fit(self) -> Figures:
        """Train to the end; returns the last validation. SIGTERM and Ctrl-C save and raise SystemExit."""
        state, config = self.state, self.config
        with self.signals, self.bar:
            while (not config.over(state.step, state.seconds) and not self.flat) or state.pending:
                if not state.pending:
                    self.step()
                stop = self.any(bool(self.signals.caught))
                if state.pending and not stop:
                    stop = self.validated()
                late = self.any(time.monotonic() - self.kept > 60 * config.checkpoint_minutes)
                if stop or late or self.due(config.checkpoint_every) or self.flat:
                    stop = self.saved() or stop
                if stop:
                    self.stop()
        if self.flat and self.first and not config.over(state.step, state.seconds):
            print(f"ended at step {state.step}: loop.patience={config.patience} validations brought nothing better")
        return self.finished()

    @property
    def flat(self) -> bool:
        """Whether `patience` validations brought nothing better."""
        return 0 < self.config.patience <= self.state.since

    def due(self, every: int) -> bool:
        return self.state.step % every == 0 or self.config.over(self.state.step, self.state.seconds)

    def mean(self, value: float) -> float:
        """One number for all processes, so that they judge alike."""
        if self.world == 1:
            return value
        return float(self.accelerator.reduce(torch.tensor(value, device=self.accelerator.device), "mean"))

    def any(self, value: bool) -> bool:
        """Whether it is so in any process."""
        return self.mean(float(value)) > 0

    def save(self) -> None:
        if self.first:
            self.checkpoint.write(self.state)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Save the training before an error of a server of hidden states ends it: other processes would wait."""
        try:
            yield
        except (ConnectionError, Refused) as error:
            self.save()
            raise type(error)(self._again(str(error))) from error

    def step(self) -> None:
        """One optimizer step and the figures that are logged for it."""
        state, config, start = self.state, self.config, time.perf_counter()
        self.prepared()
        arguments = self.accelerator, self.module, self.optimizers, self.batches, config
        before = state.seconds
        try:
            with self.saving():
                loss, parts, norm, tokens = optimizer_step(*arguments, state.step, before)
        except FloatingPointError as error:
            kept = self.checkpoint.path
            where = f"; {kept} keeps what was trained before" if kept.is_file() else ""
            raise FloatingPointError(f"{error}{where}") from error
        state.step += 1
        took = time.perf_counter() - start
        state.seconds += took if config.minutes is None else self.mean(took)
        state.pending = self.due(config.validate_every)
        self.bar.update()
        if self.first and state.step == self.begun + _EARLY and (busy := crowd()):
            self.bar.write(busy)
        if self.due(config.log_every):
            means = self.accelerator.reduce({"loss": loss, **parts}, "mean")
            record: Figures = {name: value.tolist() for name, value in means.items()}
            record |= {"lr_factor": config.lr_factor(state.step - 1, before), "grad_norm": norm}
            record["seconds_per_step"] = state.seconds / state.step
            if self.first:
                self.log.write({"train": record}, state.step)
            self.postfix |= {"loss": f"{record['loss']:.3f}", "tokens": f"{tokens / took:.0f}/s"}
            self.show()

    def show(self) -> None:
        """Put the figures that matter beside the progress bar."""
        if self.figures:
            self.postfix[self.headline] = shown(self.figures[self.headline], 3)
        if self.config.minutes is not None:
            self.postfix["minutes"] = f"{self.state.seconds / 60:.1f} of {self.config.minutes:g}"
        self.bar.set_postfix(self.postfix)

    def prepared(self) -> None:
        """Have what a step reads from elsewhere, before processes wait for each other. Raises ConnectionError, in all
        of them, where one gets none, or ValueError where that can not be read; what was trained is saved."""
        prepare, problem = getattr(self.batches, "prepare", None), None
        if prepare is None:
            return
        try:
            prepare(self.state.step)
        except (ConnectionError, ValueError) as error:
            problem = error
        if self.any(problem is not None):
            self.saved()
            kind = ValueError if isinstance(problem, ValueError) else ConnectionError
            raise kind(self._again(str(problem or "another process gets no hidden states"))) from problem

    def _again(self, problem: str) -> str:
        again = command_line(self.world)
        return f"{problem}; saved at step {self.state.step}, it goes on from there with: {again}"

    def checked(self) -> Figures:
        """A validation, with the module as it is."""
        self.module.eval()
        # Several processes wait for each other inside a validation, so that it has to be finished.
        self.signals.at_once = self.world == 1
        try:
            with torch.no_grad(), autocast(self.accelerator.device, self.config):
                return self.validate()
        finally:
            self.signals.at_once = False
            self.module.train()

    def validated(self) -> bool:
        """The validation that is due; returns whether it was interrupted."""
        if self.world > 1:
            self.save()  # launchers do not wait long for processes they have stopped
        try:
            with self.saving():
                self.figures, self.state.pending = self.checked(), False
        except Interrupted:
            return True
        if self.best:
            value, loss = (self.mean(self.figures.get(name, NOTHING)) for name in (self.headline, "loss"))
            self.state.judge(value, loss, self.checkpoint)
        if self.first:
            self.log.write({"validation": self.figures}, self.state.step)
        self.show()
        return False

    def saved(self) -> bool:
        """Write a checkpoint; returns whether a signal came during the validation."""
        self.save()
        self.kept = time.monotonic()
        self.accelerator.wait_for_everyone()
        return self.any(bool(self.signals.caught))

    def stop(self) -> None:
        self.bar.close()  # the command is the last line
        number = signal.Signals(self.signals.caught[0] if self.signals.caught else signal.SIGTERM)
        if self.first:
            where = f"stopped by {number.name} at step {self.state.step}: saved; it goes on from there with"
            print(f"{where}\n  {command_line(self.world)}", file=sys.stderr, flush=True)
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
