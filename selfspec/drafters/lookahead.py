"""Lookahead decoding (arXiv 2402.02057): the target guesses far ahead in parallel, and what it guessed becomes n-grams.

A window of `window` columns and ngram - 1 levels rides along in every pass. Level 0 is a chain behind the root; each
later level's column hangs below the same column of the level before, one position further on. What the target picks
behind the last level is the next level (Jacobi iteration), and every column's diagonal is an n-gram for the pool.
Drafts are the pool's n-grams that begin with the root's token. In the paper a mask of its own holds the window; here it
is a part of the draft tree, which has that very mask, so that a walk may even go through it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from selfspec.drafters.base import Sample, Untrained, whole
from selfspec.drafting import Sprout, Tally, measure_by_decoding, plant
from selfspec.generate import Accepted, Context
from selfspec.target import Target
from selfspec.tree import DraftTree

# Chances of a token's n-grams, the most recent first, at depth 1 and below, before anything was measured: what
# `measure` finds on the embedded target's own text (notebooks/LOG.md).
_START = {
    "greedy": [[0.47, 0.33, 0.19, 0.12], [0.86, 0.75, 0.48, 0.37]],
    "sampled": [[0.26, 0.1, 0.06, 0.04], [0.54, 0.33, 0.29, 0.25]],
}


class Pool:
    """N-grams by their first token, the most recent of each last; the oldest token's go first where `size` is
    passed."""

    def __init__(self, size: int, guesses: int) -> None:
        self.size, self.guesses, self.held = size, guesses, 0
        self.grams: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        own = self.grams.setdefault(first, OrderedDict())
        self.grams.move_to_end(first)
        self.held -= len(own)
        own.pop(rest, None)
        own[rest] = None
        if len(own) > min(self.guesses, self.size):
            own.popitem(last=False)
        self.held += len(own)
        while self.held > self.size:
            self.held -= len(self.grams.popitem(last=False)[1])

    def of(self, first: int) -> list[tuple[int, ...]]:
        """What may follow a token, the most recent first."""
        return list(reversed(self.grams.get(first, ())))


class _Row:
    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.levels: list[list[int]] = []
        self.offers: dict[tuple[int, ...], int] = {}  # the last tree's paths with their ranks
        self.seen = 0


class Lookahead(Untrained):
    """A Jacobi window and a pool of n-grams. No parameters and no checkpoint; costs the window's nodes in every
    pass."""

    kind = "lookahead"
    free = True
    own_tree = True
    shortest = 2

    def __init__(self, target: Target, window: int = 5, ngram: int = 3, guesses: int = 4, pool: int = 4096) -> None:
        """window: columns at most; ngram: tokens of an n-gram; guesses: n-grams kept for each first token; pool:
        n-grams kept in all. At most half of a tree's nodes are window.

        Raises ValueError for a number below 1 (ngram below 2) and an n-gram longer than the target's context.
        """
        super().__init__(target)
        context = target.max_positions
        why = "" if context is None else f": the target's context has {context} positions"
        whole("ngram", ngram, 2, None if context is None else context - 1, why)
        for name, value in (("window", window), ("guesses", guesses), ("pool", pool)):
            whole(name, value)
        self.shape: dict[str, Any] = {"window": window, "ngram": ngram, "guesses": guesses, "pool": pool}
        self.window, self.ngram, self.guesses, self.pool = window, ngram, guesses, pool
        # measured[kind][d][r]: the chance that the r-th n-gram's token at depth d + 1 is right, given those before it
        self.measured = {
            kind: [[table[min(d, 1)][min(r, 3)] for r in range(guesses)] for d in range(ngram - 1)]
            for kind, table in _START.items()
        }
        self._rows: list[_Row] | None = None
        self._tally: Tally | None = None
        self._tops: list[int] = []  # nodes of the last tree whose picks are the next level

    def propose(self, context: Context) -> DraftTree:
        if self._rows is None:
            self._rows = [_Row(Pool(self.pool, self.guesses)) for _ in context.tokens]
        if self._tally is None:
            self._tally = Tally(self.measured["greedy" if context.noise is None else "sampled"])
        columns = min(self.window, (context.nodes - 1) // 2 // (self.ngram - 1))
        for row, tokens in zip(self._rows, context.tokens, strict=True):
            self._learn(row, tokens)
            self._fit(row, tokens, columns)
        room = context.nodes - columns * (self.ngram - 1)
        guessed = [self._guess(row, tokens[-1], room) for row, tokens in zip(self._rows, context.tokens, strict=True)]
        # The window stands at the same nodes in every row, behind the longest row's guesses.
        first = max(len(ids) for ids, _, _ in guessed)
        self._tops = [first + (self.ngram - 2) * columns + i for i in range(columns)]
        grown = []
        for row, (ids, parents, chances) in zip(self._rows, guessed, strict=True):
            spare = first - len(ids)
            ids, parents = ids + [ids[0]] * spare, parents + [-1] * spare
            for level, tokens in enumerate(row.levels):
                ids += tokens
                start = first + level * columns
                above = [0, *range(start, start + columns - 1)] if level == 0 else range(start - columns, start)
                parents += list(above)[:columns]
            grown.append((ids, parents, chances + [0.0] * (len(ids) - len(chances))))
        return plant(context.roots, grown)

    def _fit(self, row: _Row, tokens: list[int], columns: int) -> None:
        """Drop the columns that the text has passed, and fill up with tokens of the text."""
        passed = max(0, len(tokens) - row.seen - 1) if row.seen else 0
        levels = row.levels or [[] for _ in range(self.ngram - 1)]
        row.levels = []
        for j, level in enumerate(levels):
            kept = level[passed:][:columns]
            kept += [tokens[-1 - (7 * i + 3 * j) % len(tokens)] for i in range(len(kept), columns)]
            row.levels.append(kept)
        row.seen = len(tokens)

    def _guess(self, row: _Row, root: int, room: int) -> Sprout:
        """The pool's n-grams behind the root as a tree of at most `room` nodes, root included."""
        assert self._tally is not None
        ids, parents, chances = [root], [-1], [1.0]
        nodes: dict[tuple[int, ...], int] = {(): 0}
        row.offers = {}
        for rank, rest in enumerate(row.pool.of(root)):
            for depth in range(1, len(rest) + 1):
                path = rest[:depth]
                if path in nodes:
                    continue
                if len(ids) == room:
                    return ids, parents, chances
                parent = nodes[path[:-1]]
                nodes[path], row.offers[path] = len(ids), rank
                ids.append(path[-1])
                parents.append(parent)
                chances.append(chances[parent] * self._tally.chance(depth - 1, rank))
        return ids, parents, chances

    def _learn(self, row: _Row, tokens: list[int]) -> None:
        """Count which of the last tree's n-grams were right, as far down as the text followed them."""
        assert self._tally is not None
        new = tuple(tokens[row.seen :])
        for path, rank in row.offers.items():
            if path[:-1] == new[: len(path) - 1] and len(new) >= len(path):
                self._tally.count(len(path) - 1, rank, path == new[: len(path)])

    def observe(self, accepted: Accepted) -> None:
        if self._rows is None:
            return
        self._rows = [self._rows[row] for row in accepted.rows]
        if accepted.logits is None or not self._tops:
            return
        picked = accepted.logits[accepted.rows][:, self._tops].argmax(-1).tolist()
        for row, new in zip(self._rows, picked, strict=True):
            for gram in zip(*row.levels, new, strict=True):
                row.pool.add(gram[0], gram[1:])
            row.levels = [*row.levels[1:], new]

    def measure(self, kind: str, samples: Sequence[Sample]) -> dict[str, Any]:
        self._tally = tally = Tally(self.measured[kind])  # decoding works on copies, which share it
        figures = measure_by_decoding(self.target, self, samples, kind)
        self._tally, self.measured[kind] = None, tally.table()
        return figures
