"""Verifiable instructions as conversations, and a data source that mixes them with the Python source they came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.data.chat import spans
from selfspec.data.corpus import Document, PythonSource
from selfspec.data.tasks import TASKS, Instruction, Pool, pool

_SYSTEM = (
    "You are a helpful assistant.",
    "You are a careful programmer.",
    "Answer briefly.",
    "You help with code and data.",
)


def instructions(pool: Pool, groups: Sequence[str], count: int, seed: int) -> list[Instruction]:
    """`count` instructions, group and kind in turn, each from a seed of its own: the first n of more are the same.

    Raises ValueError for an unknown group.
    """
    if unknown := set(groups) - set(TASKS):
        raise ValueError(f"unknown group of instructions {sorted(unknown)}; known are {', '.join(TASKS)}")
    found = []
    for i in range(count):
        group = groups[i % len(groups)]
        makes = TASKS[group]
        make = makes[i // len(groups) % len(makes)]
        turns = make(pool, Random(f"{seed} {i}"))
        found.append(Instruction(make.__name__, group, tuple(turns)))
    return found


def messages(asked: Sequence[Instruction], system: str | None = None) -> list[dict[str, str]]:
    """One conversation of all turns of some instructions, with the right answers."""
    found = [] if system is None else [{"role": "system", "content": system}]
    for turn in (turn for instruction in asked for turn in instruction.turns):
        found += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
    return found


def conversations(asked: Sequence[Instruction], tokenizer: Tokenizer, seed: int) -> list[Document]:
    """Instructions as documents: one in three behind a system message, one in six joined with the next."""
    rng, found, at = Random(seed), [], 0
    while at < len(asked):
        taken = asked[at : at + (2 if rng.random() < 1 / 6 else 1)]
        system = rng.choice(_SYSTEM) if rng.random() < 1 / 3 else None
        name = f"instruction {at}"
        found.append(Document(name, spans(messages(taken, system), tokenizer, name)))
        at += len(taken)
    return found


@dataclass(frozen=True)
class Instructions:
    """Conversations of verifiable instructions with the source they are made from behind them, for drafters of the
    embedded target. root: a folder of Python source (None: the running interpreter's standard library); count:
    instructions that train; held_out: that validate."""

    tokenizer: Tokenizer
    root: str | None = None
    count: int = 20000
    held_out: int = 200
    groups: list[str] = field(default_factory=lambda: list(TASKS))

    def _conversations(self, source: list[Document], split: str, count: int) -> list[Document]:
        made = instructions(pool(source, split), self.groups, count, seed=0)
        return conversations(made, self.tokenizer, seed=0)

    def train(self) -> list[Document]:
        source = PythonSource(self.root).train()
        return self._conversations(source, "train", self.count) + source

    def validation(self) -> list[Document]:
        source = PythonSource(self.root).validation()
        return self._conversations(source, "validation", self.held_out) + source

    def evaluation(self) -> list[Document]:
        return PythonSource(self.root).evaluation()
