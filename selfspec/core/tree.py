"""Draft trees: tokens and parents; mask, depth and children follow from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Drafted tokens of B rows as trees of N nodes.

    tokens: int64 [B, N]; parents: int64 [B, N], each smaller than its node's index. Node 0 is the root (parent -1): the
    last emitted token, whose KV is not yet cached. Another node with parent -1 is spare: no walk reaches it.
    scores: float [B, N], the probability that each node lies on the accepted path, by which trees are sized and mixed.
    prunable: False where the pass must run exactly this tree (early exit: its nodes are in the target's cache already;
    lookahead: some nodes work for later passes). start, hidden: where the drafter has run the target's layers below
    `start` on the nodes, their output [B, N, H]; verification then begins at that layer. plain: how many of the first
    nodes are drafted tokens; those behind are mask slots, which no walk reaches. through: the view of the target that
    runs such a tree; on the first `plain` nodes it computes what the target computes. sources: where several drafters
    share the tree, who proposed each node: bit i for the i-th of `Drafter.sources`. deepest: levels below the root at
    most, where the drafter knows them: on a GPU it would have to be read.

    Raises ValueError for shapes or dtypes that do not fit, a first node that is no root, a parent that does not precede
    its child, negative tokens, nodes below `deepest`, or `plain` without `through`.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor | None = None
    prunable: bool = True
    start: int = 0
    hidden: Tensor | None = None
    through: Any = None
    plain: int | None = None
    sources: list[list[int]] | None = None
    deepest: int | None = None

    largest = 0  # token of a tree whose tokens are not the library's own

    def __post_init__(self) -> None:
        tokens, parents = self.tokens, self.parents
        if other := [f"{v.dtype}" for v in (tokens, parents) if v.dtype != torch.int64]:
            raise ValueError(f"a tree has tokens or parents of {other[0]}; they have to be int64")
        if tokens.shape != parents.shape or tokens.ndim != 2 or tokens.shape[1] < 1:
            raise ValueError(
                f"a tree needs tokens and parents of one shape [B, N], got {list(tokens.shape)}, {list(parents.shape)}"
            )
        wrong = ((parents >= torch.arange(parents.shape[1], device=parents.device)) | (parents < -1)).nonzero()
        if len(wrong):
            row, node = wrong[0].tolist()
            raise ValueError(
                f"parents must precede their children (and be -1 for the root): row {row} gives node {node} "
                f"the parent {int(parents[row, node])}"
            )
        if (least := int(tokens.min())) < 0:
            raise ValueError(f"a tree has a token {least}; tokens are 0 or larger, at spare nodes too")
        if self.plain is not None and self.through is None:
            raise ValueError(f"plain={self.plain}: only a tree with a view that runs it (through) has mask slots")
        below = int(self.depth.max())
        if self.deepest is not None and self.deepest < below:
            raise ValueError(f"deepest={self.deepest}, but the tree has a node {below} levels below its root")
        object.__setattr__(self, "largest", int(tokens.max()))

    def with_tokens(self, tokens: Tensor) -> DraftTree:
        """The same structure over other tokens int64 [B, N]; its levels are counted once for all."""
        _ = self.levels
        return self._with(tokens=tokens)

    def on(self, roots: Tensor) -> DraftTree:
        """The same tree on these roots, int64 [B], whatever stood there: what is decoded follows from them."""
        return self._with(tokens=torch.cat([roots[:, None], self.tokens[:, 1:]], 1))

    def with_sources(self, sources: list[list[int]]) -> DraftTree:
        """The same tree, with who proposed each node."""
        return self._with(sources=sources)

    def only(self, kept: list[list[int]]) -> DraftTree:
        """The tree of some nodes of each row, ascending and as many in every row, none without its parent."""
        chosen = torch.tensor(kept, device=self.tokens.device)
        place = torch.full_like(self.tokens, -1)
        place.scatter_(1, chosen, torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen))
        above = self.parents.gather(1, chosen)
        parents = place.gather(1, above.clamp(min=0)).where(above >= 0, above)
        scores = None if self.scores is None else self.scores.expand_as(self.tokens).gather(1, chosen)
        sources = self.sources
        if sources is not None:
            sources = [[row[node] for node in at] for row, at in zip(sources, kept, strict=True)]
        tokens = self.tokens.gather(1, chosen)
        return trusted(tokens, parents, scores, sources=sources, deepest=self.deepest)

    def _with(self, **changed: Any) -> DraftTree:
        tree = object.__new__(DraftTree)
        tree.__dict__.update(self.__dict__, **changed)
        return tree

    @cached_property
    def mask(self) -> Tensor:
        """bool [B, N, N], True where node i is node j or descends from it."""
        return ancestors(self.parents)

    @cached_property
    def depth(self) -> Tensor:
        """int64 [B, N], 0 at the root (and at spare nodes)."""
        return self.mask.sum(-1) - 1

    @cached_property
    def levels(self) -> int:
        """The depth of the deepest node that a walk may reach, or more."""
        if self.deepest is not None:
            return self.deepest
        return max(max(depths_of(parents)) for parents in self.parents[:, : self.plain].tolist())

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node's parent is the node before it."""
        if self.deepest is not None and self.deepest < self.parents.shape[1] - 1:
            return False  # known without asking the device
        before = torch.arange(-1, self.parents.shape[1] - 1, device=self.parents.device)
        return bool((self.parents == before).all())

    @cached_property
    def children(self) -> list[list[list[int]]]:
        """`children[row][node]`: that node's children, in order."""
        result = []
        for parents in self.parents.tolist():
            below: list[list[int]] = [[] for _ in parents]
            for node, parent in enumerate(parents):
                if parent >= 0:
                    below[parent].append(node)
            result.append(below)
        return result

    def render(self, row: int = 0, decode: Callable[[int], str] = str) -> str:
        """The row's tree as indented text, one node a line: its index, token and score."""
        tokens = self.tokens[row].tolist()

        def draw(node: int, indent: str) -> list[str]:
            score = f"  {float(self.scores[row, node]):.3f}" if self.scores is not None and node else ""
            below = [draw(child, indent + "  ") for child in self.children[row][node]]
            return [f"{indent}[{node}] {decode(tokens[node])}{score}", *(line for lines in below for line in lines)]

        return "\n".join(draw(0, ""))

    def __str__(self) -> str:
        return "\n".join(self.render(row) for row in range(self.tokens.shape[0]))


def trusted(tokens: Tensor, parents: Tensor, scores: Tensor | None = None, **more: Any) -> DraftTree:
    """A tree of a drafter's own making, whose parents need no check. more: other fields and properties."""
    tree = object.__new__(DraftTree)
    for name, value in {**_DEFAULTS, "tokens": tokens, "parents": parents, "scores": scores, **more}.items():
        object.__setattr__(tree, name, value)  # torch 2.11 traces no update of a __dict__
    return tree


_DEFAULTS = {field.name: field.default for field in fields(DraftTree)}


def depths_of(parents: Sequence[int]) -> list[int]:
    """The depth of each node of one tree, 0 where the parent is -1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def ancestors(parents: Tensor) -> Tensor:
    """bool [B, N, N], True where node i is node j or descends from it, of parents int64 [B, N]: each of log2(N) steps
    doubles the levels that are seen."""
    nodes = parents.shape[1]
    each = torch.arange(nodes, device=parents.device)
    above = torch.where(parents < 0, each, parents)  # the node that is 1, 2, 4, ... levels up, or the topmost
    seen = (each == each[:, None]).expand(len(parents), -1, -1)
    for _ in range((nodes - 1).bit_length()):
        seen = seen | seen.gather(1, above[:, :, None].expand(-1, -1, nodes))
        above = above.gather(1, above)
    return seen


def chain(tokens: Tensor) -> DraftTree:
    """A tree without branches over tokens int64 [B, N]; with N = 1 just the root."""
    parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device)
    return trusted(tokens, parents.expand_as(tokens), deepest=tokens.shape[1] - 1, is_chain=True)
