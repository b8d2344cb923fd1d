"""What a benchmark writes down of one call."""

from __future__ import annotations

from dataclasses import dataclass, field

from selfspec.core.stats import Stats
from selfspec.utils.files import Figures


@dataclass(frozen=True)
class Regime:
    """What kind of text some tokens are, under the distributions they were drawn from (greedy text: under those at
    temperature 1), summed over the tokens: log-probability of the token (before top-k, top-p and min-p), entropy in
    nats, largest probability. Beside them the number of 4-grams of the texts, and how many differ within their text."""

    log_prob: float
    entropy: float
    top1: float
    grams: int
    distinct: int


@dataclass(frozen=True)
class Record:
    """One arm on one batch of prompts of a group. seconds: median wall-clock of a whole call, prompt included;
    questions: (id, turn) of each row; right: whether each row's answer is (None where it can not be checked); regime:
    of the texts (None: that of plain decoding, which wrote the same); altered: tokens that a lossy rule put in place of
    the target's pick; forecast: with nodes="auto", what was expected; texts: of each row, see `Prompt.text`."""

    prompt: int
    arm: str
    seconds: float
    tokens: int
    token_ids: list[list[int]]
    stats: Stats | None
    group: str = "all"
    questions: list[tuple[str, int]] = field(default_factory=list)
    right: list[bool | None] = field(default_factory=list)
    regime: Regime | None = None
    altered: int | None = None
    forecast: dict[str, float] | None = None
    texts: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, line: Figures) -> Record:
        """A record from its JSON."""
        stats, regime = line["stats"], line["regime"]
        line = {**line, "questions": [tuple(each) for each in line["questions"]]}
        line |= {"stats": stats and Stats(**stats), "regime": regime and Regime(**regime)}
        return cls(**line)

    @property
    def cluster(self) -> str:
        """Records that are one draw of the bootstrap: the turns of a question, or a batch."""
        return self.questions[0][0] if len(self.questions) == 1 and self.questions[0][0] else str(self.prompt)
