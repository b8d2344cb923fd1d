"""Verifiable instructions as conversations, and a data source that mixes them with the Python source they came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.data.chat import Chat
from selfspec.data.chat_template import ChatTemplate
from selfspec.data.corpus import Document, PythonSource
from selfspec.data.tasks import EDITS, LINES, MOST, TASKS, Instruction, Pool, pool

_SYSTEM = (
    "You are a helpful assistant.",
    "You are a careful programmer.",
    "Answer briefly.",
    "You help with code and data.",
)


def instructions(pool: Pool, groups: Sequence[str], count: int, seed: int) -> list[Instruction]:
    """`count` instructions of TASKS or EDITS, groups in turn and the tasks of a group in turn. The n-th instruction of
    a group depends on the pool, the seed, the group and n alone.

    Raises ValueError for no group or an unknown one.
    """
    tasks = {**TASKS, **EDITS}
    if not groups or (unknown := set(groups) - set(tasks)):
        raise ValueError(
            f"groups of instructions are {sorted(unknown) if groups else []}; choose from {', '.join(tasks)}"
        )
    chosen = []
    for i in range(count):
        group, n = groups[i % len(groups)], i // len(groups)
        make = tasks[group][n % len(tasks[group])]
        chosen.append(Instruction(make.__name__, group, tuple(make(pool, Random(f"{seed} {group} {n}")))))
    return chosen


def edits(documents: Sequence[Document], split: str, groups: Sequence[str], count: int, seed: int) -> list[Instruction]:
    """`count` edits of longer functions of these documents; see `tasks.edits`."""
    return instructions(pool(documents, split, LINES, MOST), groups, count, seed)


def messages(asked: Sequence[Instruction], system: str | None = None) -> list[dict[str, str]]:
    """One conversation of all turns of some instructions, with the right answers."""
    turns = [] if system is None else [{"role": "system", "content": system}]
    for turn in (turn for instruction in asked for turn in instruction.turns):
        turns += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
    return turns


def conversations(asked: Sequence[Instruction], template: ChatTemplate, seed: int) -> list[Document]:
    """Instructions as documents: one in three behind a system message, one in six joined with the next."""
    rng, documents, at = Random(seed), list[Document](), 0
    systems: Sequence[str | None] = [None]
    with suppress(ValueError):  # of a template without a system role
        template.text(Chat([*messages([], _SYSTEM[0]), {"role": "user", "content": "a"}]), "", True)
        systems = _SYSTEM
    while at < len(asked):
        taken = asked[at : at + (2 if rng.random() < 1 / 6 else 1)]
        system = rng.choice(systems) if rng.random() < 1 / 3 else None
        name = f"instruction {at}"
        made, left = template.documents(Chat(messages(taken, system)), name)
        if left:
            raise ValueError(left[0])
        documents += made
        at += len(taken)
    return documents


@dataclass(frozen=True)
class Instructions:
    """Conversations of verifiable instructions, followed by the Python source they were made from. root: a folder of
    source (None: the running interpreter's standard library); count: instructions that train; held_out: that
    validate; ends: token ids at which generation stops; chat_template_kwargs: of the template."""

    questions: ClassVar[str] = "instructions"  # the evaluation set made of it
    tokenizer: Tokenizer
    count: int
    held_out: int
    root: str | None = None
    ends: frozenset[int] = frozenset()
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.ends, self.chat_template_kwargs)

    def chats(self) -> Iterator[Chat]:
        """The instructions that train, as conversations."""
        for one in instructions(pool(PythonSource(self.root).train(), "train"), list(TASKS), self.count, seed=0):
            yield Chat(messages([one]))

    def fingerprint(self) -> str:
        return f"instructions of {self.root}"

    def _with_source(self, source: list[Document], split: str, count: int) -> list[Document]:
        chosen = instructions(pool(source, split), list(TASKS), count, seed=0)
        return conversations(chosen, self.template, seed=0) + source

    def train(self) -> list[Document]:
        return self._with_source(PythonSource(self.root).train(), "train", self.count)

    def validation(self) -> list[Document]:
        return self._with_source(PythonSource(self.root).validation(), "validation", self.held_out)

    def evaluation(self) -> list[Document]:
        return PythonSource(self.root).evaluation()
