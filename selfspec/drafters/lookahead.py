"""Lookahead decoding (arXiv 2402.02057): the target guesses far ahead in parallel, and what it guessed becomes n-grams.

A window of `window` columns and ngram - 1 levels stands in every pass. Level 0 is a chain behind the root; each
later level's column hangs below the same column of the level before, one position further on. What the target picks
behind the last level is the next level (Jacobi iteration), and every column's diagonal is an n-gram for the pool.
Drafts are the pool's n-grams that begin with the root's token. In the paper a mask of its own holds the window; here it
is a part of the draft tree, which has that very mask, so that a walk may even go through it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from selfspec.core.contract import Accepted, Context
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree
from selfspec.drafters.base import Calibration, Drafter, DrafterConfig, whole
from selfspec.drafters.parts.ngrams import ListTree, Tally, as_tree

# Acceptance of a token's n-grams, the most recent first, at depth 1 and below, before anything was measured: what
# calibration finds on the embedded target's own text (notebooks/LOG.md).
_PRIOR = {
    "greedy": [[0.47, 0.33, 0.19, 0.12], [0.86, 0.75, 0.48, 0.37]],
    "sampled": [[0.26, 0.1, 0.06, 0.04], [0.54, 0.33, 0.29, 0.25]],
}


@dataclass
class LookaheadConfig(DrafterConfig):
    """window: columns of the Jacobi window at most; ngram: tokens of an n-gram; guesses: n-grams kept for each first
    token; pool: n-grams kept in all. At most half of a tree's nodes are window.

    Raises ValueError for a number below 1 (ngram below 2).
    """

    window: int = 5
    ngram: int = 3
    guesses: int = 4
    pool: int = 4096

    def __post_init__(self) -> None:
        whole("ngram", self.ngram, 2)
        for name in ("window", "guesses", "pool"):
            whole(name, getattr(self, name))


class Pool:
    """N-grams by their first token, most recent last; beyond `size`, those of the least recent first token are
    dropped."""

    def __init__(self, size: int, guesses: int) -> None:
        self.size, self.guesses, self.held = size, guesses, 0
        self.grams: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        grams = self.grams.setdefault(first, OrderedDict())
        self.grams.move_to_end(first)
        self.held -= len(grams)
        grams.pop(rest, None)
        grams[rest] = None
        if len(grams) > min(self.guesses, self.size):
            grams.popitem(last=False)
        self.held += len(grams)
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

    def fit(self, tokens: list[int], levels: int, columns: int) -> None:
        """Drop the columns that the text has passed, and fill up with tokens of the text."""
        passed = max(0, len(tokens) - self.seen - 1) if self.seen else 0
        before = self.levels or [[] for _ in range(levels)]
        self.levels = []
        for j, level in enumerate(before):
            row = level[passed:][:columns]
            row += [tokens[-1 - (7 * i + 3 * j) % len(tokens)] for i in range(len(row), columns)]
            self.levels.append(row)
        self.seen = len(tokens)

    def guess(self, root: int, room: int, tally: Tally) -> ListTree:
        """The pool's n-grams behind the root as a tree of at most `room` nodes, root included."""
        ids, parents, probs = [root], [-1], [1.0]
        nodes: dict[tuple[int, ...], int] = {(): 0}
        self.offers = {}
        for rank, rest in enumerate(self.pool.of(root)):
            for depth in range(1, len(rest) + 1):
                path = rest[:depth]
                if path in nodes:
                    continue
                if len(ids) == room:
                    return ids, parents, probs
                parent = nodes[path[:-1]]
                nodes[path], self.offers[path] = len(ids), rank
                ids.append(path[-1])
                parents.append(parent)
                probs.append(probs[parent] * tally.rate(depth - 1, rank))
        return ids, parents, probs

    def learn(self, tokens: list[int], tally: Tally) -> None:
        """Count which of the last tree's n-grams were right, as far down as the text followed them."""
        new = tuple(tokens[self.seen :])
        for path, rank in self.offers.items():
            if path[:-1] == new[: len(path) - 1] and len(new) >= len(path):
                tally.count(len(path) - 1, rank, path == new[: len(path)])


class Lookahead(Drafter):
    """A Jacobi window and a pool of n-grams. No parameters and no checkpoint; costs the window's nodes in every
    pass."""

    config: LookaheadConfig
    prunable = False  # some nodes work for later passes

    def __init__(self, target: Target, config: LookaheadConfig) -> None:
        """Raises ValueError for an n-gram longer than the target's context."""
        if target.max_positions is not None:
            why = f": the target's context has {target.max_positions} positions"
            whole("ngram", config.ngram, 2, target.max_positions - 1, why)
        # acceptance[d][r]: of the r-th n-gram's token at depth d + 1, given those before it
        prior = {
            mode: [[table[min(d, 1)][min(r, 3)] for r in range(config.guesses)] for d in range(config.ngram - 1)]
            for mode, table in _PRIOR.items()
        }
        super().__init__(config, {mode: Calibration(table, []) for mode, table in prior.items()})

    def session(self, target: Target, rows: int) -> LookaheadSession:
        return LookaheadSession(self, rows)


class LookaheadSession:
    """What one call keeps: each row's pool and window, and how often n-grams were right so far. tops: nodes of the last
    tree whose picks are the window's next level."""

    def __init__(self, drafter: Lookahead, rows: int) -> None:
        config = self.config = drafter.config
        self.calibration = drafter.calibration
        self.rows = [_Row(Pool(config.pool, config.guesses)) for _ in range(rows)]
        self.tally: Tally | None = None
        self.tops: list[int] = []

    def propose(self, context: Context) -> DraftTree:
        tally = self.tally = self.tally or Tally(self.calibration[context.mode].acceptance)
        levels = self.config.ngram - 1
        columns = min(self.config.window, (context.nodes - 1) // 2 // levels)
        for row, tokens in zip(self.rows, context.tokens, strict=True):
            row.learn(tokens, tally)
            row.fit(tokens, levels, columns)
        room = context.nodes - columns * levels
        guessed = [row.guess(tokens[-1], room, tally) for row, tokens in zip(self.rows, context.tokens, strict=True)]
        # The window stands at the same nodes in every row, behind the longest row's guesses.
        first = max(len(ids) for ids, _, _ in guessed)
        self.tops = [first + (levels - 1) * columns + i for i in range(columns)]
        grown = []
        for row, (ids, parents, probs) in zip(self.rows, guessed, strict=True):
            spare = first - len(ids)
            ids, parents = ids + [ids[0]] * spare, parents + [-1] * spare
            for level, tokens in enumerate(row.levels):
                ids += tokens
                start = first + level * columns
                above = [0, *range(start, start + columns - 1)] if level == 0 else range(start - columns, start)
                parents += list(above)[:columns]
            grown.append((ids, parents, probs + [0.0] * (len(ids) - len(probs))))
        return as_tree(context.roots, grown, prunable=False)

    def observe(self, accepted: Accepted) -> None:
        self.rows = [self.rows[row] for row in accepted.rows]
        if accepted.logits is None or not self.tops:
            return
        picked = accepted.logits[accepted.rows][:, self.tops].argmax(-1).tolist()
        for row, new in zip(self.rows, picked, strict=True):
            for gram in zip(*row.levels, new, strict=True):
                row.pool.add(gram[0], gram[1:])
            row.levels = [*row.levels[1:], new]
