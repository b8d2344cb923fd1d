"""Whether a training keeps its speed, and whether its loss falls: what to say where not."""

from __future__ import annotations

import math
import os
import time
from statistics import median

import torch

_USUAL = 20  # steps that show what a step usually takes
_SLOW = 3.0  # times what is usual
_PATIENCE = 5  # slow steps in a row before something is said
_TIMED = 10  # steps after which the end of a run is told


class Pace:
    """Steps of one run, from where it began or goes on. `steps` and `first`: of the whole run and done before; most:
    seconds that it goes on at most."""

    def __init__(self, steps: int, first: int, most: float = math.inf) -> None:
        self.steps, self.first, self.count, self.tokens, self.most = steps, first, 0, 0, most
        self.seconds: list[float] = []
        self.slow, self.warned = 0, False
        self.losses: list[float] = []

    def step(self, seconds: float, tokens: int) -> str | None:
        """Take in a step; what is worth saying now, if anything."""
        self.count, self.tokens = self.count + 1, self.tokens + tokens
        if len(self.seconds) < _USUAL:
            self.seconds.append(seconds)
            return self._end() if self.count == _TIMED else None
        usual = median(self.seconds)
        self.slow = self.slow + 1 if seconds > _SLOW * usual else 0
        self.warned = self.warned and self.slow > 0
        if self.slow < _PATIENCE or self.warned:
            return None
        self.warned = True
        return f"a step takes {seconds:.2f} s instead of {usual:.2f} s: {crowd() or 'the processor has become slower'}"

    def _end(self) -> str:
        taken = sum(self.seconds)
        left = max(0.0, min((self.steps - self.first - self.count) * taken / self.count, self.most - taken))
        at = time.strftime("%H:%M", time.localtime(time.time() + left))
        busy = crowd()
        return f"{self.tokens / taken:.0f} tokens/s over {self.count} steps: without validation, it ends at {at}" + (
            f"\n{busy}" if busy else ""
        )

    def loss(self, step: int, value: float) -> str | None:
        """Take in a logged loss; a warning, once, where it has not fallen in the first tenth of the steps."""
        if self.first or step > self.steps // 10 or self.losses is None:
            return None
        self.losses.append(value)
        half = len(self.losses) // 2
        if step < self.steps // 10 or half < 3:
            return None
        before, now = sum(self.losses[:half]) / half, sum(self.losses[half:]) / (len(self.losses) - half)
        if now < before:
            return None
        return (
            f"warning: the loss has not fallen in the first tenth of the steps ({before:.3f}, then {now:.3f}); try "
            "another learning rate (train.lr=) or a shorter warm-up (loop.warmup=)"
        )


def crowd() -> str | None:
    """What to say where more programs run than there are processors; each uses as many threads as it finds processors,
    and threads that wait for each other spin."""
    processors, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    if load < 1.5 * processors:
        return None
    threads = torch.get_num_threads()
    many = f", {threads} of them of this run; where several programs run at once, start each with OMP_NUM_THREADS=1"
    return f"{load:.0f} threads want {processors} processors" + (many if threads > 1 else "; other programs run here")
