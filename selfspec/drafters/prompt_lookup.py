"""Prompt lookup: what followed the last few tokens where they stood before, as a tree. Nothing is trained.

Source: n-gram matching in the prompt as in transformers' `prompt_lookup_num_tokens` (prompt lookup decoding, Saxena
2023), there one match and one chain. Here every node of the tree is looked up anew with its own path, so that all good
matches share one tree, and equal paths are one path.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from selfspec.drafters.base import Sample, Untrained, number, whole
from selfspec.drafting import Sprout, Tally, measure_by_decoding, plant
from selfspec.generate import Accepted, Context
from selfspec.target import Target
from selfspec.tree import DraftTree

# Chances by length of the match (1, 2, ... tokens) and rank of the choice before anything was measured: what `measure`
# finds on the embedded target's own text (notebooks/LOG.md).
_START = {
    "greedy": [[0.46, 0.02, 0.01], [0.72, 0.03, 0.02], [0.84, 0.06, 0.03], [0.86, 0.07, 0.02], [0.94, 0.05, 0.02]],
    "sampled": [[0.21, 0.08, 0.04], [0.47, 0.17, 0.06], [0.61, 0.15, 0.07], [0.68, 0.18, 0.1], [0.74, 0.24, 0.05]],
}


class NGrams:
    """What followed every n-gram of one row's text: its different next tokens, the most recent last."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest
        self.after: dict[tuple[int, ...], dict[int, None]] = {}
        self.read = 1

    def extend(self, tokens: list[int]) -> None:
        """Take in what is new of the row's text."""
        for end in range(self.read, len(tokens)):
            for n in range(self.shortest, min(self.longest, end) + 1):
                after = self.after.setdefault(tuple(tokens[end - n : end]), {})
                after.pop(tokens[end], None)
                after[tokens[end]] = None
        self.read = max(self.read, len(tokens))

    def next(self, suffix: tuple[int, ...], choices: int) -> dict[int, int]:
        """Tokens that followed the end of `suffix`, each with the length of its match: longest and most recent
        first."""
        found: dict[int, int] = {}
        for n in range(len(suffix), self.shortest - 1, -1):
            for token in reversed(self.after.get(suffix[-n:], {})):
                if token not in found:
                    found[token] = n
                    if len(found) == choices:
                        return found
        return found


class _Row:
    """One row of a call: its text's n-grams, and what the last tree offered below each of its nodes."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.grams = NGrams(shortest, longest)
        self.offers: list[list[tuple[int, int, int, int]]] = []  # per node (token, class, rank, node or -1)
        self.seen = 0


class PromptLookup(Untrained):
    """N-grams of the row's own text, prompt and answer. No parameters, no checkpoint, no product at all."""

    kind = "prompt_lookup"
    free = True
    thrifty = True
    shortest = 2

    def __init__(
        self, target: Target, longest: int = 8, shortest: int = 1, choices: int = 4, least: float = 0.05
    ) -> None:
        """longest, shortest: tokens of a match; choices: children of a node at most; least: nodes with less chance than
        this to be on the accepted path are left out, so that a tree may be smaller than its budget.

        Raises ValueError for a number below 1, an n-gram longer than the target's context, and shortest > longest.
        """
        super().__init__(target)
        context = target.max_positions
        why = "" if context is None else f": the target's context has {context} positions"
        whole("longest", longest, 1, None if context is None else context - 1, why)
        whole("shortest", shortest, 1, longest, f": drafter.longest is {longest}")
        whole("choices", choices)
        number("least", least, 0, 1)
        self.shape: dict[str, Any] = {"longest": longest, "shortest": shortest, "choices": choices, "least": least}
        self.longest, self.least_match, self.choices, self.least = longest, shortest, choices, least
        # measured[kind][n - 1][r]: the chance that the r-th choice is right where the match has n tokens
        self.measured = {
            kind: [[table[min(n, 4)][min(r, 2)] for r in range(choices)] for n in range(longest)]
            for kind, table in _START.items()
        }
        self._rows: list[_Row] | None = None
        self._tally: Tally | None = None

    def propose(self, context: Context) -> DraftTree:
        if self._rows is None:
            self._rows = [_Row(self.least_match, self.longest) for _ in context.tokens]
        if self._tally is None:
            self._tally = Tally(self.measured["greedy" if context.noise is None else "sampled"])
        for row, tokens in zip(self._rows, context.tokens, strict=True):
            self._learn(row, tokens)
            row.grams.extend(tokens)
        grown = [self._grow(row, tokens, context.nodes) for row, tokens in zip(self._rows, context.tokens, strict=True)]
        return plant(context.roots, grown)

    def _learn(self, row: _Row, tokens: list[int]) -> None:
        """Count which of the last tree's choices were right, as far down as the text followed it."""
        assert self._tally is not None
        node = 0
        for token in tokens[row.seen :] if row.offers else ():
            below = -1
            for choice, n, rank, child in row.offers[node]:
                self._tally.count(n - 1, rank, choice == token)
                below = child if choice == token else below
            if below < 0:
                break
            node = below
        row.seen = len(tokens)

    def _grow(self, row: _Row, tokens: list[int], nodes: int) -> Sprout:
        """Best-first: every node's choices come from the longest matches of its own path."""
        assert self._tally is not None
        ids, parents, chances = [tokens[-1]], [-1], [1.0]
        waiting: list[tuple[float, int, int, int, tuple[int, ...]]] = []  # (-chance, order, parent, offer, path)
        row.offers = []
        order = 0

        def offer(node: int, path: tuple[int, ...]) -> None:
            nonlocal order
            row.offers.append([])
            for rank, (token, n) in enumerate(row.grams.next(path, self.choices).items()):
                assert self._tally is not None
                chance = chances[node] * self._tally.chance(n - 1, rank)
                row.offers[node].append((token, n, rank, -1))
                if chance >= self.least:
                    order += 1
                    heapq.heappush(waiting, (-chance, order, node, rank, (*path, token)[-self.longest :]))

        offer(0, tuple(tokens[-self.longest :]))
        while waiting and len(ids) < nodes:
            chance, _, parent, rank, path = heapq.heappop(waiting)
            token, n, _, _ = row.offers[parent][rank]
            row.offers[parent][rank] = (token, n, rank, len(ids))
            ids.append(token)
            parents.append(parent)
            chances.append(-chance)
            offer(len(ids) - 1, path)
        return ids, parents, chances

    def observe(self, accepted: Accepted) -> None:
        if self._rows is not None:
            self._rows = [self._rows[row] for row in accepted.rows]

    def measure(self, kind: str, samples: Sequence[Sample]) -> dict[str, Any]:
        self._tally = tally = Tally(self.measured[kind])  # decoding works on copies, which share it
        figures = measure_by_decoding(self.target, self, samples, kind)
        self._tally, self.measured[kind] = None, tally.table()
        return figures
