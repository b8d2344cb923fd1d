"""Trees grown from conditional scores, depth by depth: the loop, and the ranking of children by the target's noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec.core.contract import Context
from selfspec.core.tree import DraftTree, trusted
from selfspec.drafters.base import Drafter

Nodes = tuple[Tensor, Tensor, Tensor]  # tokens, parents and path probabilities of a tree, each [B, N]


def perturbed(logits: Tensor, noise: Tensor, temperature: float | Tensor) -> Tensor:
    """Scores that rank children when sampling: logits / T plus the target's noise, weighted less.

    A drafter does not see the whole prefix, so its distribution is flatter than the target's, and the more so the lower
    the temperature. Less noise than the target's therefore ranks best: 0.85 T^2 of it (fitted in notebooks/LOG.md).
    """
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    weight = 0.85 * temperature**2
    return exact / temperature + (weight.clamp(max=1.0) if isinstance(weight, Tensor) else min(1.0, weight)) * noise


def ahead(context: Context, depth: int) -> Tensor | None:
    """The noise [B, depth, V] of the positions behind each row's root; None when greedy."""
    if context.noise is None:
        return None
    # One position more than is drafted: the bonus token's, so that the walk finds it in the same block of noise.
    return context.noise.ahead([n + 1 for n in context.lengths], depth + 1, context.positions)[:, :depth]


_MANY, _FEW, _PARTS = 1 << 13, 64, 32  # of so many scores at least, so few at most are picked in two stages


def top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of scores [..., V], the largest first, and their places, as `topk` gives them (but for the order of
    equal ones). Many are cut into 32 parts, one below the other; only columns with one of the k largest maxima are
    sorted."""
    size = scores.shape[-1]
    if size < _MANY or k > _FEW:
        return torch.topk(scores, k, -1)
    width = -(-size // _PARTS)
    parts = F.pad(scores, (0, width * _PARTS - size), value=-torch.inf).unflatten(-1, (_PARTS, width))
    places = parts.amax(-2).topk(k, -1).indices  # [..., k]: a part's place that holds one of the k largest
    among = parts.gather(-1, places[..., None, :].expand(*places.shape[:-1], _PARTS, k)).flatten(-2)
    found = among.topk(k, -1)
    at = found.indices // k * width + places.gather(-1, found.indices % k)
    return found.values, at.clamp(max=size - 1)  # of what was padded: where fewer than k scores are finite


class Growth:
    """Trees of B rows grown depth by depth from real conditional scores, best-first by path probability
    (EAGLE-2, arXiv 2406.16858): the best nodes of a depth are expanded, and of all nodes the best make the
    tree. With `reserve`, whatever was expanded stays in the tree, ahead of the leaves; fewer are then expanded."""

    def __init__(
        self, roots: Tensor, nodes: int, width: int | Sequence[int], min_prob: float = 0.0, reserve: bool = False
    ) -> None:
        """roots: int64 [B]; nodes: the budget, root included; width: nodes expanded at each depth at most, or at depth
        1, 2, ... and none beyond; min_prob: the m-th node of a depth is expanded only if its path probability reaches
        this in some row."""
        self.nodes, self.width, self.reserve = nodes, width, reserve
        self.depth = 0  # of the nodes that were added last
        self.floor = math.log(min_prob) if min_prob > 0 else -math.inf
        self.tokens = roots[:, None]
        self.parents = torch.full_like(self.tokens, -1)
        self.scores = torch.zeros_like(self.tokens, dtype=torch.float64)  # log of the path probability
        self.frontier = torch.zeros_like(self.tokens)  # [B, m]: what is expanded next
        self.expanded = self.frontier[:, :0]

    def extend(self, scores: Tensor, ids: Tensor | None = None) -> None:
        """Children of the frontier: scores [B, m, C], already calibrated; ids int64 [B, C]: whose scores they are (by
        default token ids themselves)."""
        values, places = top(torch.log_softmax(scores.float(), -1), min(self.nodes - 1, scores.shape[-1]))
        # A certain child would tie with its parent, and might then be taken without it.
        log_probs = values.nan_to_num(nan=-1e30, neginf=-1e30).clamp_(max=-1e-4)
        total = (log_probs + self.scores.gather(1, self.frontier)[:, :, None]).flatten(1)
        best = total.topk(min(self.nodes - 1, total.shape[1]), -1)
        tokens = places.flatten(1).gather(1, best.indices)
        above = self.frontier.gather(1, best.indices // values.shape[-1])
        first = self.tokens.shape[1]
        self.tokens = torch.cat([self.tokens, tokens if ids is None else ids.gather(1, tokens)], 1)
        self.parents = torch.cat([self.parents, above], 1)
        self.scores = torch.cat([self.scores, best.values], 1)
        self.expanded = torch.cat([self.expanded, self.frontier], 1)
        widths, self.depth = self.width, self.depth + 1
        if not isinstance(widths, int):
            widths = widths[self.depth - 1] if self.depth <= len(widths) else 0
        wide = min(widths, best.values.shape[1])
        if self.floor > -math.inf:
            wide = min(wide, int((best.values >= self.floor).any(0).sum()))
        if self.reserve:
            wide = min(wide, (self.nodes - self.expanded.shape[1]) // 2)
        self.frontier = torch.arange(first, first + wide, device=tokens.device).expand(len(tokens), -1)

    def stem(self) -> DraftTree:
        """What was expanded and what is to be expanded next, in that order."""
        return trusted(*self._pick(torch.cat([self.expanded, self.frontier], 1)))

    def tree(self) -> DraftTree:
        """The best nodes within the budget. Every parent is better than its children, so none is missing."""
        return trusted(*self.best(), deepest=self.depth)

    def best(self) -> Nodes:
        """`tree` as tensors."""
        nodes = min(self.nodes, self.tokens.shape[1])
        if self.reserve:
            leaves = self.scores.scatter(1, self.expanded, -torch.inf).topk(nodes - self.expanded.shape[1], -1).indices
            return self._pick(torch.cat([self.expanded, leaves], 1))
        best = self.scores[:, 1:].topk(nodes - 1, -1).indices.sort(-1).values + 1
        return self._pick(torch.cat([torch.zeros_like(self.tokens[:, :1]), best], 1))

    def _pick(self, kept: Tensor) -> Nodes:
        """The tree of these nodes, int64 [B, n], the root first and parents before their children."""
        order = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
        place = torch.zeros_like(self.parents).scatter_(1, kept, order)
        parents = place.gather(1, self.parents.gather(1, kept).clamp(min=0))
        parents = torch.cat([torch.full_like(parents[:, :1], -1), parents[:, 1:]], 1)
        return self.tokens.gather(1, kept), parents, self.scores.gather(1, kept).exp()


# Given the growth so far and the depth: logits [B, m, C] below the m nodes of the frontier, and whose logits they are,
# int64 [B, C] (None: of all tokens)
Step = Callable[[Growth, int], tuple[Tensor, Tensor | None]]


class Ranking(NamedTuple):
    """How raw scores become log probabilities. factors: inverse temperature of each depth; noise: float64 [B, depth, V]
    of the positions behind the root, None when greedy."""

    factors: Tensor | Sequence[float]
    noise: Tensor | None
    temperature: Tensor | float


def grown(drafter: Drafter, context: Context, step: Step, depth: int, width: int, min_prob: float = 0.0) -> Growth:
    """A tree grown by a drafter's own steps, see `grow`: for drafters of other packages (docs/own_drafter.md)."""
    factors = drafter.calibration[context.mode].inverse_temperature
    ranking = Ranking(factors, ahead(context, depth), context.temperature)
    return grow(Growth(context.roots, context.nodes, width, min_prob), step, depth, ranking)


def grow(growth: Growth, step: Step, depth: int, ranking: Ranking) -> Growth:
    """The one loop by which trees are grown: `step` gives raw scores of a depth, which are ranked with the target's
    noise, calibrated and taken in, until the depth is reached or no node is worth expanding."""
    for d in range(min(depth, growth.nodes - 1)):
        scores, ids = step(growth, d)
        if ranking.noise is not None:
            depth_noise = ranking.noise[:, d] if ids is None else ranking.noise[:, d].gather(1, ids)
            scores = perturbed(scores, depth_noise[:, None], ranking.temperature)
        growth.extend(scores * ranking.factors[d], ids)
        if not growth.frontier.shape[1]:
            break
    return growth


def shortlisted(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Products [B, m, C] of x [B, m, D] with the rows `ids`, int64 [B, C], of weight [V, D]."""
    columns = F.embedding(ids, weight)
    if len(x) == 1:
        return F.linear(x[0], columns[0])[None]
    return x @ columns.transpose(1, 2)
