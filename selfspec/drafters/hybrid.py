"""Hybrid trees: several drafters propose into one tree under one node budget.

Equal paths are one path. Every node carries the probability its sources give it: what was measured in advance for
trained drafters, what has been counted while decoding for n-grams; the best nodes of all make the tree. Trained members
are only asked where the others expect fewer accepted tokens than the trained ones usually do, so that copied text
costs no drafting; where the rate of plain decoding is known (`nodes="auto"`), only where what they usually add is
worth the time they take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from selfspec.core.contract import Accepted, Context, MaskSlots, Session
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree
from selfspec.drafters.base import Drafter, DrafterConfig, Trained
from selfspec.drafters.parts.ngrams import WEIGHT, ListTree, as_tree

_REST_PASSES = 16  # passes after which trained members are asked again
_UNSHARED = 0.25  # the part of its probability a child keeps at first where another source proposes something else


class Hybrid(Drafter):
    """Several drafters in one, without a checkpoint of its own. What is trained of them stays as it was loaded."""

    def __init__(self, target: Target, members: dict[str, Drafter]) -> None:
        """members: at least one drafter of this target, by name. Raises ValueError for one whose trees must stay as it
        proposed them."""
        super().__init__(DrafterConfig(), {})
        for name, member in members.items():
            if isinstance(member, Hybrid) or not member.prunable:
                raise ValueError(
                    f"drafter {name!r} ({member.kind}) can not share a tree with others: a pass runs exactly "
                    "the tree that it proposes; use it alone"
                )
        if len(masked := [n for n, m in members.items() if isinstance(m.session(target, 1), MaskSlots)]) > 1:
            raise ValueError(
                f"drafters {' and '.join(masked)} both put mask slots into the tree that is verified; take one of them"
            )
        self.members = dict(members)  # a dict, not a ModuleDict: nothing of them is trained or saved here
        self.reads = tuple(sorted({layer for member in members.values() for layer in member.reads}))
        free = [name for name, member in members.items() if not isinstance(member, Trained)]
        self._order = (*free, *masked, *(name for name in members if name not in (*free, *masked)))

    @property
    def sources(self) -> tuple[str, ...]:
        return self._order

    def session(self, target: Target, rows: int) -> HybridSession:
        sessions = {name: self.members[name].session(target, rows) for name in self.sources}
        free = [session for name, session in sessions.items() if not isinstance(self.members[name], Trained)]
        masked = next((session for session in sessions.values() if isinstance(session, MaskSlots)), None)
        trained = [session for session in sessions.values() if session is not masked and session not in free]
        return HybridSession(free, trained, rows, masked)

    def train(self, mode: bool = True) -> Hybrid:
        super().train(mode)
        for member in self.members.values():
            member.train(mode)
        return self


class _Row:
    """One row of a call: how often each class of nodes was right against what was believed, and the last tree."""

    def __init__(self) -> None:
        self.seen = 0
        self.sources: list[int] = []  # of each node of the last tree, who proposed it
        self.below: list[dict[int, int]] = []  # children of each node of the last tree, by token
        self.classes: list[tuple[int, int]] = []  # of each node: who proposed it, who proposed anything beside it
        self.believed: list[float] = []
        self.right: dict[tuple[int, int], list[float]] = {}  # per class: tokens that were right, tokens believed in

    def learn(self, tokens: list[int]) -> None:
        """Compare the last tree with the text, as far down as the text followed it."""
        node: int | None = 0
        for token in tokens[self.seen :] if self.below else ():
            assert node is not None
            for drafted, child in self.below[node].items():
                counts = self.right.setdefault(self.classes[child], [WEIGHT, WEIGHT])
                counts[0] += drafted == token
                counts[1] += self.believed[child]
            node = self.below[node].get(token)
            if node is None:
                break
        self.seen = len(tokens)

    def merge(self, trees: Sequence[ListTree], nodes: int) -> ListTree:
        """Several sources' trees in one of at most `nodes` nodes, the best by path probability.

        A child that several sources propose gets 1 - prod(1 - p); one that others did not propose is scaled by
        _UNSHARED. Both are then scaled by how often such children were right so far.
        """
        ids, parents, chances = [trees[0][0][0]], [-1], [1.0]
        whose, beside, self.below = [0], [0], [{}]
        for source, (tokens, above, probs) in enumerate(trees):
            place = [0]
            for node in range(1, len(tokens)):
                if above[node] < 0:  # spare
                    place.append(-1)
                    continue
                parent, token = place[above[node]], tokens[node]
                prob = min(1.0, probs[node] / max(probs[above[node]], 1e-30))
                beside[parent] |= 1 << source
                if (child_node := self.below[parent].get(token)) is None:
                    child_node = self.below[parent][token] = len(ids)
                    ids.append(token)
                    parents.append(parent)
                    chances.append(prob)
                    whose.append(0)
                    beside.append(0)
                    self.below.append({})
                else:
                    chances[child_node] = 1 - (1 - chances[child_node]) * (1 - prob)
                whose[child_node] |= 1 << source
                place.append(child_node)
        total = [1.0] * len(ids)
        self.classes, self.believed = [(0, 0)] * len(ids), chances
        for node, children in enumerate(self.below):
            for child in children.values():
                self.classes[child] = (whose[child], beside[node])
                if whose[child] != beside[node]:
                    chances[child] *= _UNSHARED
            believed = {}
            for child in children.values():
                right, expected = self.right.get(self.classes[child], (1.0, 1.0))
                believed[child] = chances[child] * right / expected
            left = 1.0  # probabilities of children sum to at most 1, the likeliest first
            for child in sorted(believed, key=believed.__getitem__, reverse=True):
                share = min(left, believed[child])
                total[child], left = total[node] * share, left - share
        # Parents come before their children and have no smaller probability: with a stable sort none is missing.
        best = sorted(sorted(range(len(ids)), key=lambda node: -total[node])[:nodes])
        at = {node: i for i, node in enumerate(best)}
        self.sources = [whose[n] for n in best]
        return [ids[n] for n in best], [at.get(parents[n], -1) for n in best], [total[n] for n in best]


class HybridSession:
    """What one call keeps: the members' sessions, what sources were worth in each row, and what the trained members
    expected and took of late. masked: one whose drafts come from mask slots of the pass before, and cost no time of
    their own."""

    def __init__(self, free: list[Session], trained: list[Session], rows: int, masked: Session | None = None) -> None:
        self.free, self.trained, self.masked = free, trained, masked
        self.rows = [_Row() for _ in range(rows)]
        self.usual = [0.0, 0.0, 0.0]  # of the trained members: passes, tokens expected and seconds taken, fading
        self.asked = self.rested = 0  # times they were asked; passes since

    def propose(self, context: Context) -> DraftTree:
        for row, tokens in zip(self.rows, context.tokens, strict=True):
            row.learn(tokens)
        trees = [_listed(session, context) for session in self.free]
        nodes, least = context.nodes, 1
        if isinstance(self.masked, MaskSlots):
            drafted = self.masked.draft(context)
            trees.append(_lists(drafted))
            nodes = least = max(drafted.tokens.shape[1], nodes // 2)  # of one size; the rest of the rows are mask slots
        expected = max((_expected(rows) for rows in trees), default=0.0)
        if self.trained and (not trees or not self._rests(expected, context.rate)):
            start, compiled = time.perf_counter(), context.target.compiled
            drafted_trees = [_lists(session.propose(context)) for session in self.trained]
            if any(len(rows[0][0]) > 1 for rows in drafted_trees):  # roots alone: nothing was read of the prompt yet
                self.asked += 1
                # The first time they read the prompt, and some calls compile: drafting usually costs neither
                if self.asked > 1 and context.target.compiled == compiled:
                    now = (1, max(map(_expected, drafted_trees)), time.perf_counter() - start)
                    self.usual = [0.9 * before + new for before, new in zip(self.usual, now, strict=True)]
            trees += drafted_trees
        parts = zip(self.rows, zip(*trees, strict=True), strict=True)
        merged = as_tree(context.roots, [row.merge(part, nodes) for row, part in parts], least=least)
        tree = self.masked.add_slots(merged, context) if isinstance(self.masked, MaskSlots) else merged
        width = merged.tokens.shape[1]
        return tree.with_sources([row.sources + [0] * (width - len(row.sources)) for row in self.rows])

    def _rests(self, expected: float, rate: float) -> bool:
        """Whether the trained members are left alone in this pass, in which the others expect so many accepted tokens
        per row. rate: tokens per second and row of plain decoding."""
        count, tokens, seconds = self.usual
        pays = tokens - count * expected > expected * rate * seconds
        if self.asked < 2 or not count or pays or self.rested >= _REST_PASSES:
            self.rested = 0
            return False
        self.rested += 1
        return True

    def observe(self, accepted: Accepted) -> None:
        self.rows = [self.rows[row] for row in accepted.rows]
        for session in (*self.free, *self.trained, *([] if self.masked is None else [self.masked])):
            session.observe(accepted)


def _expected(rows: list[ListTree]) -> float:
    """Accepted tokens that trees expect, per row."""
    return sum(sum(probs) for _, _, probs in rows) / len(rows)


def _listed(session: Session, context: Context) -> list[ListTree]:
    """A tree as lists. Sessions that draft on the host have `lists`, which needs no tensors."""
    lists: Callable[[Context], list[ListTree]] | None = getattr(session, "lists", None)
    return _lists(session.propose(context)) if lists is None else lists(context)


def _lists(tree: DraftTree) -> list[ListTree]:
    """A tree's rows as lists, once the device is through; a tree without scores is its roots alone.

    Raises ValueError for a larger tree without scores."""
    if tree.scores is None and tree.tokens.shape[1] > 1:
        raise ValueError("a member of a hybrid drafted a tree without scores, by which trees are mixed; give it scores")
    scores = torch.ones_like(tree.tokens, dtype=torch.float64) if tree.scores is None else tree.scores.double()
    whole = torch.stack([tree.tokens.double(), tree.parents.double(), scores.expand_as(tree.tokens)], 1)  # read at once
    return [([*map(int, tokens)], [*map(int, parents)], probs) for tokens, parents, probs in whole.tolist()]
