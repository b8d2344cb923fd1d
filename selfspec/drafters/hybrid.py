"""Hybrid trees: several drafters propose into one tree under one node budget.

Equal paths are one path. Every node carries the chance its sources give it: what was measured for trained drafters,
what has been counted while decoding for n-grams; the best nodes of all make the tree. Trained drafters are only asked
where the free ones promise fewer tokens than the trained ones usually do, so that copied text costs no drafting; where
the rate of decoding is known (`nodes="auto"`), only where what they usually add is worth the time they take.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from selfspec.drafters.base import Drafter, Sample, Untrained, number
from selfspec.drafting import Sprout, measure_by_decoding, plant
from selfspec.generate import Accepted, Context
from selfspec.spec import find_drafter
from selfspec.target import Target
from selfspec.tree import DraftTree

_WEIGHT = 8.0  # of what is believed of a class of nodes before any was checked, in tokens
_RESTED = 16  # passes after which trained members are asked again
_DOUBT = 0.25  # the part of its chance a child keeps at first where another source proposes something else


class _Row:
    """One row of a call: how often each class of nodes was right against what was believed, and the last tree."""

    def __init__(self) -> None:
        self.seen = 0
        self.below: list[dict[int, int]] = []  # children of each node of the last trie, by token
        self.classes: list[tuple[int, int]] = []  # of each node: who proposed it, who proposed anything beside it
        self.believed: list[float] = []
        self.right: dict[tuple[int, int], list[float]] = {}  # per class: tokens that were right, tokens believed in

    def learn(self, tokens: list[int]) -> None:
        """Compare the last tree with the text, as far down as the text followed it."""
        node: int | None = 0
        for token in tokens[self.seen :] if self.below else ():
            assert node is not None
            for drafted, child in self.below[node].items():
                counts = self.right.setdefault(self.classes[child], [_WEIGHT, _WEIGHT])
                counts[0] += drafted == token
                counts[1] += self.believed[child]
            node = self.below[node].get(token)
            if node is None:
                break
        self.seen = len(tokens)

    def merge(self, trees: Sequence[Sprout], nodes: int, least: float) -> Sprout:
        """Several sources' trees in one of at most `nodes` nodes, the best by the chances of their paths.

        Where sources agree on a child, at least one of them has to be right; where only some propose it, there is
        doubt. Both beliefs are then scaled by how often such children were right so far.
        """
        ids, parents, given = [trees[0][0][0]], [-1], [1.0]
        whose, beside, self.below = [0], [0], [{}]
        for source, (tokens, above, chances) in enumerate(trees):
            place = [0]
            for node in range(1, len(tokens)):
                if above[node] < 0:  # spare
                    place.append(-1)
                    continue
                parent, token = place[above[node]], tokens[node]
                chance = min(1.0, chances[node] / max(chances[above[node]], 1e-30))
                beside[parent] |= 1 << source
                if (found := self.below[parent].get(token)) is None:
                    found = self.below[parent][token] = len(ids)
                    ids.append(token)
                    parents.append(parent)
                    given.append(chance)
                    whose.append(0)
                    beside.append(0)
                    self.below.append({})
                else:
                    given[found] = 1 - (1 - given[found]) * (1 - chance)
                whose[found] |= 1 << source
                place.append(found)
        total = [1.0] * len(ids)
        self.classes, self.believed = [(0, 0)] * len(ids), given
        for node, children in enumerate(self.below):
            for child in children.values():
                self.classes[child] = (whose[child], beside[node])
                if whose[child] != beside[node]:
                    given[child] *= _DOUBT
            believed = {}
            for child in children.values():
                right, expected = self.right.get(self.classes[child], (1.0, 1.0))
                believed[child] = given[child] * right / expected
            left = 1.0  # children share certainty, the likeliest first
            for child in sorted(believed, key=believed.__getitem__, reverse=True):
                share = min(left, believed[child])
                total[child], left = total[node] * share, left - share
        # Parents come before their children and have no smaller chance: with a stable sort none is missing.
        likely = [node for node in range(len(ids)) if total[node] >= least or not node]
        best = sorted(sorted(likely, key=lambda node: -total[node])[:nodes])
        at = {node: i for i, node in enumerate(best)}
        return [ids[n] for n in best], [at.get(parents[n], -1) for n in best], [total[n] for n in best]


class Hybrid(Untrained):
    """Several drafters in one. What is trained of them stays as it was loaded."""

    kind = "hybrid"
    shortest = 2

    def __init__(self, target: Target, drafters: Sequence[str], least: float = 0.0) -> None:
        """drafters: at least one name, as `selfspec.load` takes them: embedded, a run folder, or a kind that needs no
        training; least: nodes with less chance than this to be on the accepted path are left out. Raises ValueError for
        an empty list, a name given twice, drafters of another target, and those whose tree must stay as they proposed
        it.
        """
        super().__init__(target)
        if isinstance(drafters, str) or not drafters:
            raise ValueError(f"drafter.drafters={drafters!r} must be a list of at least one drafter")
        names = [str(name) for name in drafters]
        if len(set(names)) < len(names):
            raise ValueError(f"drafter.drafters={names} names a drafter twice")
        number("least", least, 0, 1)
        self.shape: dict[str, Any] = {"drafters": names, "least": least}
        self.least = least
        members = [find_drafter(name, target) for name in names]
        for name, member in zip(names, members, strict=True):
            if member.own_tree or isinstance(member, Hybrid):
                raise ValueError(f"drafter {name!r} ({member.kind}) can not share a tree with others; leave it out")
        self.__dict__["members"] = members  # beside the module tree: nothing of them is trained or saved here
        self.thrifty = any(member.thrifty for member in members)
        self.features = tuple(sorted({layer for member in members for layer in member.features}))
        self.measured = {"greedy": [], "sampled": []}
        self._running: list[Drafter] | None = None
        self._rows: list[_Row] = []
        # Of the trained members: passes, tokens they promised and seconds they took of late; times asked, passes
        # rested.
        self._usual, self._asked, self._rested = [0.0, 0.0, 0.0], 0, 0

    def products(self) -> list[nn.Module]:
        return [module for member in self.__dict__["members"] for module in member.products()]

    def _members(self) -> list[Drafter]:
        if self._running is None:
            self._running = [copy.copy(member) for member in self.__dict__["members"]]  # state belongs to one call
        return self._running

    def propose(self, context: Context) -> DraftTree:
        members = self._members()
        self._rows = self._rows or [_Row() for _ in context.tokens]
        for row, tokens in zip(self._rows, context.tokens, strict=True):
            row.learn(tokens)
        trees = [_sprouts(member.propose(context)) for member in members if not member.products()]
        promised = max((_promise(found) for found in trees), default=0.0)
        if not trees or not self._rests(promised, context.rate / len(context.tokens)):
            start = time.perf_counter()
            asked = [_sprouts(member.propose(context)) for member in members if member.products()]
            if any(len(found[0][0]) > 1 for found in asked):  # roots alone: nothing was read of the prompt yet
                self._asked += 1
                if self._asked > 1:  # the first time they read the prompt, which is not what drafting usually costs
                    now = (1, max(map(_promise, asked)), time.perf_counter() - start)
                    self._usual = [0.9 * before + new for before, new in zip(self._usual, now, strict=True)]
            trees += asked
        parts = zip(self._rows, zip(*trees, strict=True), strict=True)
        return plant(context.roots, [row.merge(part, context.nodes, self.least) for row, part in parts])

    def _rests(self, promised: float, rate: float) -> bool:
        """Whether the trained members are left alone in this pass, in which the others promise so many tokens per row.
        rate: tokens per second and row of plain decoding."""
        count, tokens, seconds = self._usual
        if self._asked < 2 or tokens - count * promised > promised * rate * seconds or self._rested >= _RESTED:
            self._rested = 0
            return False
        self._rested += 1
        return True

    def observe(self, accepted: Accepted) -> None:
        if self._rows:
            self._rows = [self._rows[row] for row in accepted.rows]
        for member in self._members():
            member.observe(accepted)

    def measure(self, kind: str, samples: Sequence[Sample]) -> dict[str, Any]:
        return measure_by_decoding(self.target, self, samples, kind)


def _promise(found: list[Sprout]) -> float:
    """Tokens that trees promise, per row."""
    return sum(sum(chances) for _, _, chances in found) / len(found)


def _sprouts(tree: DraftTree) -> list[Sprout]:
    """A tree's rows as lists, once the device is through; a tree without scores is its roots alone."""
    scores = torch.ones_like(tree.tokens, dtype=torch.float64) if tree.scores is None else tree.scores.double()
    assert tree.scores is not None or tree.tokens.shape[1] == 1
    scores = scores.expand_as(tree.tokens)
    return list(zip(tree.tokens.tolist(), tree.parents.tolist(), scores.tolist(), strict=True))
