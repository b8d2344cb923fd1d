"""What a benchmark writes down of one call."""

from __future__ import annotations

from dataclasses import dataclass, field

from selfspec.core.stats import Stats


@dataclass
class Record:
    """One arm on one batch of prompts of a group. seconds: median wall-clock of a whole call, prompt included; right:
    of each row, where it is known. Under the target, summed over all tokens: log_prob; entropy (nats); top1, the
    largest probability. altered: tokens that a lossy rule put in place of the target's pick. forecast: with
    nodes="auto", what was expected."""

    prompt: int
    arm: str
    seconds: float
    tokens: int
    token_ids: list[list[int]]
    stats: Stats | None
    group: str = "all"
    questions: list[tuple[str, int]] = field(default_factory=list)
    right: list[bool | None] = field(default_factory=list)
    altered: int | None = None
    log_prob: float | None = None
    entropy: float | None = None
    top1: float | None = None
    forecast: dict[str, float] | None = None
