"""The settings of a training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from selfspec.core.options import as_seed
from selfspec.utils.checks import above_zero, at_least, shares

Batches = Callable[[int], dict[str, Tensor]]


@dataclass
class LoopConfig:
    """steps: optimizer steps; minutes: of steps, after which a run ends that has not reached them (its learning rate
    then goes by the clock, so that no two runs are alike); batch_size: rows per step over all processes; accumulate:
    parts that each process runs its rows of a step in, in turn, so that memory holds the activations of one; decay: the
    last part of the steps, over which the learning rate falls linearly to zero; warmup: steps until it is at its peak;
    clip: the norm that gradients are cut to; precision: bf16 (autocast), no, or auto for the faster one here; compile:
    torch.compile of the training step; seed: of weights and the order of rows; log_every: steps from one line of
    figures to the next; validate_every: steps from one validation to the next; checkpoint_every: the same of
    checkpoints; checkpoint_minutes: since the last checkpoint, after which there is one in any case; patience: so many
    validations in a row without a better one end the run, 0 for never."""

    steps: int = 1000
    minutes: float | None = None
    batch_size: int = 8
    accumulate: int = 1
    warmup: int = 20
    decay: float = 0.5
    clip: float = 1.0
    precision: str = "auto"
    compile: bool = False
    seed: int = 0
    log_every: int = 10
    validate_every: int = 250
    checkpoint_every: int = 250
    checkpoint_minutes: float = 10.0
    patience: int = 0

    def __post_init__(self) -> None:
        counts = "steps", "batch_size", "accumulate", "log_every", "validate_every", "checkpoint_every"
        at_least(self, "loop", 1, *counts)
        at_least(self, "loop", 0, "patience", "warmup")
        above_zero(self, "loop", "minutes", "checkpoint_minutes", "clip")
        shares(self, "loop", "decay")
        if self.accumulate > self.batch_size:
            raise ValueError(f"loop.accumulate={self.accumulate} must be at most loop.batch_size={self.batch_size}")
        as_seed(self.seed, "loop.seed")
        if self.precision not in ("auto", "no", "bf16"):
            raise ValueError(f"loop.precision={self.precision!r} must be 'auto', 'no' or 'bf16'")

    def over(self, step: int, seconds: float) -> bool:
        """Whether a run ends that has made so many steps in so many seconds."""
        return step >= self.steps or (self.minutes is not None and seconds >= 60 * self.minutes)

    def lr_factor(self, step: int, seconds: float = 0.0) -> float:
        """Linear warm-up, a plateau, then linear decay to zero at `steps`, or at `minutes` where they are over first.
        seconds: that the steps before took."""
        up = min(1.0, (step + 1) / max(1, self.warmup))
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        if self.minutes is not None:
            left = min(left, (1 - seconds / (60 * self.minutes)) / max(self.decay, 1 / self.steps))
        return max(0.0, min(up, 1.0, left))
