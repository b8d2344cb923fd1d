"""Counts and times of a decoding call, and the rates that follow from them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from selfspec.utils.exactness import ROUNDED
from selfspec.utils.files import mean, shown

# A point in time; on a GPU a mark in its stream, for which nothing waits
Moment = float | torch.cuda.Event
Span = tuple[str, Moment, Moment]  # a part of `Stats`, its begin and its end


def moment(device: torch.device) -> Moment:
    """Now; on a GPU when it has done what it was given so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def clock(device: torch.device) -> float:
    """Seconds, when a GPU has done what it was given so far."""
    torch.cuda.synchronize(device) if device.type == "cuda" else None
    return time.perf_counter()


def elapsed(first: Moment, last: Moment) -> float:
    """Seconds between two moments; waits until a GPU has come to the last one."""
    if isinstance(first, (int, float)):
        assert isinstance(last, (int, float))
        return last - first
    assert not isinstance(last, (int, float))
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000


@dataclass
class Stats:
    """Counts of one call.

    passes: of the target over a tree, counted once for every row in them; calls: the same, counted once for all rows;
    nodes: of the trees, root included, summed over calls; tokens: those returned, after cutting at EOS and at
    max_new_tokens; compiled: functions that a compiled engine had to compile, or read from disk, on the way, and
    passes that ran before theirs were; accepted: passes in which depth d + 1 was accepted; rejected: tokens drafted
    before the first accepted one; drafts: passes, counted as `passes` are, whose trees were more than a root; lengths:
    tokens of each pass, row by row; seconds_...: of the parts of a call; on a GPU those of a pass are added when the
    next one was read; exact: whether the tokens are those of plain decoding "by construction", "in every test" or "up
    to rounding" (see `Target.exact`), or not, "by a lossy rule".
    """

    passes: int = 0
    calls: int = 0
    nodes: int = 0
    tokens: int = 0
    compiled: int = 0
    rejected: int = 0
    drafts: int = 0
    accepted: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    exact: str = ROUNDED
    seconds_prefill: float = 0.0
    seconds_draft: float = 0.0
    seconds_target: float = 0.0
    seconds_other: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per pass, the bonus token included; NaN without a pass."""
        return mean(self.tokens, self.passes)

    @property
    def tau(self) -> float:
        """The acceptance length."""
        return self.acceptance_length

    @property
    def tokens_per_second(self) -> float:
        """Of the whole call, reading the prompts included; NaN where nothing was timed."""
        return mean(self.tokens, self.seconds)

    @property
    def accepted_per_depth(self) -> list[float]:
        """Share of passes that accept everything up to depth 1, 2, ... (full acceptance)."""
        return [mean(count, self.passes) for count in self.accepted]

    @property
    def conditional_per_depth(self) -> list[float]:
        """Share in which depth 1, 2, ... is accepted given that its parent was (conditional acceptance)."""
        return [mean(n, before) for n, before in zip(self.accepted, [self.passes, *self.accepted], strict=False)]

    @property
    def seconds(self) -> float:
        return self.seconds_prefill + self.seconds_draft + self.seconds_target + self.seconds_other

    def __repr__(self) -> str:
        """One line; all counts and times are fields."""
        drafted = shown(min(100 * mean(sum(self.accepted), self.tokens), 100.0), 0)
        rate = f"{self.tokens / self.seconds:.0f} per second" if self.seconds else "not timed"
        return (
            f"{self.tokens} tokens in {self.passes} passes: {shown(self.acceptance_length)} per pass, {rate}, "
            f"{drafted}% drafted"
        ) + (f"; 0 of {self.rejected} drafted tokens accepted" if self.rejected and not self.accepted else "")

    def book(self, spans: list[Span]) -> None:
        """Take spans out of a list and add them to the parts that they are named after: prefill, draft, target,
        other."""
        while spans:
            part, first, last = spans.pop()
            setattr(self, f"seconds_{part}", getattr(self, f"seconds_{part}") + elapsed(first, last))

    def ran(self, nodes: int) -> None:
        """A pass over trees of so many nodes."""
        self.calls, self.nodes = self.calls + 1, self.nodes + nodes

    def count(self, drafted: int, tokens: int) -> None:
        """One row's pass that emitted `tokens` tokens, `drafted` of them from the tree."""
        self.passes += 1
        self.tokens += tokens
        self.lengths.append(tokens)
        self.accepted += [0] * (drafted - len(self.accepted))
        for depth in range(drafted):
            self.accepted[depth] += 1
