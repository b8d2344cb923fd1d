"""Conversations that a target has with itself, many at once: where one ends, the next begins in its row.

A conversation's keys and values stay in the cache from its first question to its last answer, so each token is read
once. What a row writes does not depend on the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.core.cache import COMPILED
from selfspec.core.sampling import noise_bits, nothing_to_pick
from selfspec.core.target import Target
from selfspec.core.tree import chain
from selfspec.data.own_questions import Template

_AT_ONCE = 32  # rows of logits that a CPU picks tokens from at once: their probabilities stay in a cache


@dataclass(frozen=True)
class Rules:
    """turns: questions in a conversation, at most; question_tokens, new_tokens: of a question and of an answer, at
    most; question_ends, answer_ends: tokens that end them; question_temperature: that questions are sampled at;
    usable: whether a question is answered; completed: a question that no end token has ended, its last token without
    line breaks, where it is complete, else None."""

    template: Template
    turns: int
    question_tokens: int
    new_tokens: int
    question_ends: frozenset[int]
    answer_ends: frozenset[int]
    question_temperature: float
    usable: Callable[[list[int]], bool]
    completed: Callable[[list[int]], list[int] | None] = lambda question: None


@dataclass
class Conversation:
    """tokens; mask: which of them the target answered with; temperature: of its answers; start: of the first
    question."""

    number: int
    tokens: list[int]
    mask: list[bool]
    temperature: float
    start: int
    read: int = 0  # tokens that the cache holds
    turn: int = 0
    asks: bool = True  # whether a question is being written, not an answer
    written: int = 0  # tokens of it

    @classmethod
    def begun(cls, number: int, template: Template, words: list[int], temperature: float) -> Conversation:
        """words: that its first question begins with."""
        tokens = [*template.opening, *words]
        return cls(number, tokens, [False] * len(tokens), temperature, len(template.opening))

    @classmethod
    def asked(cls, number: int, template: Template, question: list[int], temperature: float) -> Conversation:
        """One whose first question is known."""
        tokens = [*template.opening, *question, *template.answer]
        return cls(number, tokens, [False] * len(tokens), temperature, len(template.opening), asks=False)

    @property
    def writes(self) -> bool:
        """Whether the token that is read next is the last one that is known."""
        return self.read + 1 == len(self.tokens)

    def add(self, token: int, rules: Rules) -> bool:
        """Add a token that the target wrote. Returns whether the conversation goes on."""
        self.tokens.append(token)
        self.mask.append(not self.asks)
        self.written += 1
        ended = token in (rules.question_ends if self.asks else rules.answer_ends)
        if self.asks and not ended and (whole := rules.completed(self.tokens[self.start :])) is not None:
            self.tokens[self.start :] = [*whole, token]  # as if an end token stood behind it
            self.mask[self.start :] = [False] * (len(whole) + 1)
            ended = True
        if not ended and self.written < (rules.question_tokens if self.asks else rules.new_tokens):
            return True
        goes_on = self._asked(ended, rules) if self.asks else self._answered(ended, rules)
        self.asks, self.written = not self.asks, 0
        return goes_on

    def _asked(self, ended: bool, rules: Rules) -> bool:
        """The template's tokens take the place of what ended the question. One that is not usable is dropped, with the
        conversation where it is the first."""
        if ended and rules.usable(self.tokens[self.start : -1]):
            del self.tokens[-1], self.mask[-1]
            self._given(rules.template.answer)
            return True
        size = len(self.mask) - self.mask[::-1].index(True) if self.turn else 0
        self.tokens, self.mask = self.tokens[:size], self.mask[:size]
        return False

    def _answered(self, ended: bool, rules: Rules) -> bool:
        self.turn += 1
        if not ended or self.turn == rules.turns:
            return False
        again = rules.template.again
        self._given(again[int(again[0] == self.tokens[-1]) :])
        self.start = len(self.tokens)
        return True

    def _given(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.mask += [False] * len(tokens)


@torch.inference_mode()
def write_conversations(
    target: Target, conversations: Iterable[Conversation], rules: Rules, rows: int, longest: int, seed: int
) -> Iterator[Conversation]:
    """The conversations, as they end; those without a usable question are empty. rows: at once; longest: tokens of one,
    at most; seed: of sampling."""
    target.check()
    cache, left = target.cache(rows, min(longest, COMPILED - 1), longest), iter(conversations)
    going = [next(left, None) for _ in range(rows)]
    while any(going):
        known = [[0 if row is None else row.tokens[row.read]] for row in going]
        logits = target.forward(chain(torch.tensor(known, device=target.device)), cache).logits
        assert logits is not None
        cache.commit([[] if row is None else [0] for row in going])
        at = [i for i, row in enumerate(going) if row is not None and row.writes]
        for row in going:
            if row is not None:
                row.read += 1
        writing = [row for i in at if (row := going[i]) is not None]
        for i, row, token in zip(at, writing, _picked(logits[:, 0], at, writing, rules, seed), strict=True):
            if not row.add(token, rules):
                yield row
                going[i] = next(left, None)
                cache.restart(i)


def _picked(logits: Tensor, at: list[int], rows: list[Conversation], rules: Rules, seed: int) -> list[int]:
    """The next token of each row, from logits [B, V] at rows `at`: the most likely one at temperature 0, sampled
    otherwise, by a number in [0, 1) that depends on (seed, conversation, position) alone. Raises FloatingPointError
    where logits are no numbers."""
    temperatures = [rules.question_temperature if row.asks else row.temperature for row in rows]
    places = [[row.number, row.read] for row in rows]
    numbers, positions = torch.tensor(places, dtype=torch.long).view(-1, 2).T
    bits = noise_bits(torch.tensor(seed), numbers, positions, torch.tensor(0))
    uniform = ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53
    picked: list[int] = []
    size = _AT_ONCE if logits.device.type == "cpu" else max(len(at), 1)  # a GPU waits once
    for start in range(0, len(at), size):
        part = slice(start, start + size)
        of = logits[torch.tensor(at[part], device=logits.device)].float()
        warmth = torch.tensor(temperatures[part], device=of.device)[:, None]
        below = (of / warmth.clamp_min(1e-4)).softmax(-1).cumsum(-1)
        if not math.isfinite(float(below[:, -1].sum())):
            raise nothing_to_pick()
        sought = uniform[part, None].to(below) * below[:, -1:]
        sampled = torch.searchsorted(below, sought, right=True).clamp_max(of.shape[1] - 1)[:, 0]
        picked += torch.where(warmth[:, 0] > 0, sampled, of.argmax(-1)).tolist()
    return picked
