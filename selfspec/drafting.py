"""What drafters share: ranking with the target's noise, trees grown from conditional scores, measuring on own text."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from selfspec.drafters.base import Drafter, Sample
from selfspec.generate import Accepted, speculative
from selfspec.options import Options
from selfspec.sampling import Sampling
from selfspec.target import Target
from selfspec.tree import DraftTree

_DECODED = 16  # samples that are decoded again, where nothing else measures a drafter
CHOICES = 16  # choices per depth that are measured, and that a static tree may hold below one node
_PRIOR = [0.5 * 0.5**r for r in range(CHOICES)]  # before anything was measured
_SHARPNESS = [2 ** (i / 4) for i in range(-6, 13)]


def perturbed(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """By what children are ranked where the target samples: what it will add to its own logits, but with less weight.

    A drafter's distribution is a mixture over what it can not see, so the target's own is sharper, and the more so
    the lower the temperature: less noise than the target's ranks best (measured, see notebooks/LOG.md).
    """
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return exact / temperature + min(1.0, 0.85 * temperature**2) * noise


def last_hidden(before: Tensor | None, accepted: Accepted) -> Tensor:
    """The target's hidden state before each row's root, [B, H]; `before` holds that of rows that kept nothing."""
    if all(accepted.paths):
        return accepted.last_hidden()
    if before is None:
        before = accepted.hidden.new_zeros(len(accepted.rows), accepted.hidden.shape[-1])
    for i, (row, path) in enumerate(zip(accepted.rows, accepted.paths, strict=True)):
        if path:
            before[i] = accepted.hidden[row, path[-1]]
    return before


class Growth:
    """Trees of B rows grown depth by depth from real conditional scores, best-first by the chance of a node's whole
    path (EAGLE-2, arXiv 2406.16858): the `width` best nodes of a depth are expanded, and of all nodes the best make the
    tree. With `reserve`, whatever was expanded stays in the tree, ahead of the leaves; fewer are then expanded."""

    def __init__(self, roots: Tensor, nodes: int, width: int, least: float = 0.0, reserve: bool = False) -> None:
        """roots: int64 [B]; nodes: the budget, root included; least: no node is expanded whose chance to be on the
        accepted path is below this in every row."""
        self.nodes, self.width, self.reserve = nodes, width, reserve
        self.least = math.log(least) if least > 0 else -math.inf
        self.tokens = roots[:, None]
        self.parents = torch.full_like(self.tokens, -1)
        self.scores = torch.zeros_like(self.tokens, dtype=torch.float64)  # log of the path's chance
        self.frontier = torch.zeros_like(self.tokens)  # [B, m]: what is expanded next
        self.expanded = self.frontier[:, :0]

    def extend(self, scores: Tensor, ids: Tensor | None = None) -> None:
        """Children of the frontier: scores [B, m, C], already sharpened; ids int64 [B, C]: whose scores they are (by
        default token ids themselves)."""
        children = torch.log_softmax(scores.float(), -1).topk(min(self.nodes - 1, scores.shape[-1]), -1)
        # A certain child would tie with its parent, and might then be taken without it.
        chances = children.values.nan_to_num(nan=-1e30, neginf=-1e30).clamp_(max=-1e-4)
        total = (chances + self.scores.gather(1, self.frontier)[:, :, None]).flatten(1)
        best = total.topk(min(self.nodes - 1, total.shape[1]), -1)
        tokens = children.indices.flatten(1).gather(1, best.indices)
        above = self.frontier.gather(1, best.indices // children.values.shape[-1])
        first = self.tokens.shape[1]
        self.tokens = torch.cat([self.tokens, tokens if ids is None else ids.gather(1, tokens)], 1)
        self.parents = torch.cat([self.parents, above], 1)
        self.scores = torch.cat([self.scores, best.values], 1)
        self.expanded = torch.cat([self.expanded, self.frontier], 1)
        wide = min(self.width, int((best.values >= self.least).any(0).sum()))
        if self.reserve:
            wide = min(wide, (self.nodes - self.expanded.shape[1]) // 2)
        self.frontier = torch.arange(first, first + wide, device=tokens.device).expand(len(tokens), -1)

    def stem(self) -> DraftTree:
        """What was expanded and what is to be expanded next, in that order."""
        return self._pick(torch.cat([self.expanded, self.frontier], 1))

    def tree(self) -> DraftTree:
        """The best nodes within the budget. Every parent is better than its children, so none is missing."""
        nodes = min(self.nodes, self.tokens.shape[1])
        if self.reserve:
            leaves = self.scores.scatter(1, self.expanded, -torch.inf).topk(nodes - self.expanded.shape[1], -1).indices
            return self._pick(torch.cat([self.expanded, leaves], 1))
        best = self.scores[:, 1:].topk(nodes - 1, -1).indices.sort(-1).values + 1
        return self._pick(torch.cat([torch.zeros_like(best[:, :1]), best], 1) if nodes > 1 else self.expanded[:, :1])

    def _pick(self, kept: Tensor) -> DraftTree:
        """The tree of these nodes, int64 [B, n], the root first and parents before their children."""
        order = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
        place = torch.zeros_like(self.parents).scatter_(1, kept, order)
        parents = place.gather(1, self.parents.gather(1, kept).clamp(min=0))
        parents[:, 0] = -1
        return DraftTree(self.tokens.gather(1, kept), parents, self.scores.gather(1, kept).exp())


def grow(chances: list[list[float]], nodes: int) -> tuple[list[int], list[int], list[float]]:
    """The tree of at most `nodes` nodes that is expected to be accepted furthest, grown best-first.

    chances[d][r]: the chance that the drafter's r-th choice at depth d + 1 is right, given that its parent was; the
    same below every parent (Medusa, arXiv 2401.10774, section 2.3.3, grows its sparse tree this way).
    Returns parents, ranks (the choice each node takes at its depth) and the chance of every node to be on the accepted
    path; node 0 is the root. The sum of the chances is the expected acceptance length.
    """
    parents, ranks, chance, depths = [-1], [0], [1.0], [0]
    # A node's candidates enter best first: its own next sibling and its first child.
    frontier = [(chances[0][0], 0, 0)] if chances and chances[0] else []  # (chance, parent, rank)
    while frontier and len(parents) < nodes:
        best = max(range(len(frontier)), key=lambda i: frontier[i][0])
        value, parent, rank = frontier.pop(best)
        if value <= 0.0:
            break
        node, depth = len(parents), depths[parent] + 1
        parents.append(parent)
        ranks.append(rank)
        chance.append(value)
        depths.append(depth)
        if rank + 1 < len(chances[depth - 1]):
            frontier.append((chance[parent] * chances[depth - 1][rank + 1], parent, rank + 1))
        if depth < len(chances) and chances[depth]:
            frontier.append((value * chances[depth][0], node, 0))
    return parents, ranks, chance


def unmeasured(depths: int) -> dict[str, list[list[float]]]:
    """What a drafter holds before `measure`: chances that halve from choice to choice, by kind and depth."""
    return {kind: [list(_PRIOR) for _ in range(depths)] for kind in ("greedy", "sampled")}


def measure_along(
    samples: Sequence[Sample], depths: int, scores: Callable[[Sample, Tensor], Tensor]
) -> tuple[list[list[float]], list[float], dict[str, Any]]:
    """Measure a drafter along the target's own text.

    scores(sample, at): logits [depths, n, V] that the drafter gives, from positions at (int64 [n]), to the tokens
    2, 3, ... places on, each with the text itself as the path before it.
    Returns chances[d][r] that the r-th choice at depth d + 1 is right given that its parent was; per depth the factor
    on the scores that makes their softmax the best forecast of the target's token; and the figures of
    `Drafter.measure`, with `tau` of a static tree.
    """
    right, tried = torch.zeros(depths, CHOICES), torch.zeros(depths)
    agree = torch.zeros(depths, 2)
    surprise = torch.zeros(depths, len(_SHARPNESS), dtype=torch.float64)
    positions = 0
    for sample in samples:
        # positions from which all depths have a truth; none where the target ended at once
        at = torch.arange(sample.start - 2, max(sample.start - 2, len(sample.tokens) - 1 - depths))
        if not len(at):
            continue
        logits = scores(sample, at)
        alive = torch.ones(len(at), dtype=torch.bool)
        positions += len(at)
        for d in range(depths):
            truth = sample.tokens[at + 2 + d].to(logits.device)
            values = logits[d].double()
            if sample.noise is not None:
                values = perturbed(values, sample.noise(at + 2 + d), sample.temperature)
            own = values.gather(1, truth[:, None])
            rank = (values > own).sum(1).masked_fill(~own.isfinite()[:, 0], values.shape[1]).cpu()  # inf: never drafted
            agree[d] += torch.tensor([(rank == 0).sum(), (rank < 5).sum()])
            tried[d] += alive.sum()
            right[d] += torch.bincount(rank[alive & (rank < CHOICES)], minlength=CHOICES)
            short = values.topk(min(4 * CHOICES, values.shape[1]), -1).values - own  # the rest weighs nothing
            for i, factor in enumerate(_SHARPNESS):
                surprise[d, i] += (short * factor).logsumexp(1)[alive & (rank < CHOICES)].sum().cpu()
            alive &= rank < CHOICES
    chances = (right / tried.clamp(min=1)[:, None]).tolist()
    share = agree / max(1, positions)
    figures = {"top1": share[:, 0].tolist(), "top5": share[:, 1].tolist(), "positions": positions}
    figures["tau"] = {str(n): sum(grow(chances, n)[2]) for n in (8, 16, 32)}
    factors = [_SHARPNESS[int(row.argmin())] if row.any() else 1.0 for row in surprise]  # 1: nothing was measured
    return chances, factors, figures


class Tally:
    """How often drafted choices of each class are right, counted while decoding on top of what was measured before.

    table[i][j]: the chance of the j-th choice of class i; it weighs as much as `weight` choices that were checked.
    """

    def __init__(self, table: list[list[float]], weight: float = 8.0) -> None:
        self.right = [[weight * chance for chance in row] for row in table]
        self.tried = [[weight] * len(row) for row in table]

    def chance(self, i: int, j: int) -> float:
        return self.right[i][j] / self.tried[i][j]

    def count(self, i: int, j: int, right: bool) -> None:
        self.tried[i][j] += 1
        self.right[i][j] += right

    def table(self) -> list[list[float]]:
        return [[self.chance(i, j) for j in range(len(row))] for i, row in enumerate(self.tried)]


# A row's tree before it is a tensor: tokens, parents (the root first, with -1) and chances to be accepted
Sprout = tuple[list[int], list[int], list[float]]


def plant(roots: Tensor, rows: Sequence[Sprout]) -> DraftTree:
    """One tree of rows of different sizes; the shorter ones end in spare nodes."""
    width = max(len(tokens) for tokens, _, _ in rows)
    padded = [
        (t + [t[0]] * (width - len(t)), p + [-1] * (width - len(t)), c + [0.0] * (width - len(t))) for t, p, c in rows
    ]
    tokens, parents, chances = (list(part) for part in zip(*padded, strict=True))
    at = roots.device
    return DraftTree(
        torch.tensor(tokens, device=at), torch.tensor(parents, device=at), torch.tensor(chances, device=at)
    )


def measure_by_decoding(target: Target, drafter: Drafter, samples: Sequence[Sample], kind: str) -> dict[str, Any]:
    """The figures of `Drafter.measure` for drafters whose choices depend on more than the text: decode the samples'
    prompts again. `top1` is then how often some child of a node holds the target's token, by depth (32 nodes), and
    `tau` the acceptance length itself, by number of nodes."""
    figures: dict[str, Any] = {"tau": {}}
    samples = samples[:_DECODED]
    if not samples:
        raise ValueError("there is no text to measure a drafter on; give at least one prompt")
    prompts = [sample.tokens[: sample.start].tolist() for sample in samples]
    longest = max(len(sample.tokens) - sample.start for sample in samples)
    options = Options(max(1, longest), Sampling(0.0 if kind == "greedy" else 1.0))
    drafter = copy.copy(drafter).eval()
    for nodes in (8, 16, 32):
        stats = speculative(target, prompts, options, drafter, nodes).stats
        figures["tau"][str(nodes)] = stats.acceptance_length
    figures |= {"top1": stats.conditional_per_depth[:8], "positions": stats.passes}
    return figures
