"""Static trees: one shape for every pass, grown from how often each choice is accepted."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from selfspec.core.contract import Accepted, Context, Session
from selfspec.core.tree import DraftTree, chain, depths_of, trusted
from selfspec.drafters.base import Trained
from selfspec.drafters.parts.expansion import ahead, perturbed, top

Acceptance = tuple[tuple[float, ...], ...]


def static_tree(acceptance: list[list[float]] | Acceptance, nodes: int) -> tuple[list[int], list[int], list[float]]:
    """The tree of at most `nodes` nodes that is expected to be accepted furthest, grown best-first.

    acceptance[d][r]: the probability that the drafter's r-th choice at depth d + 1 is right, given that its parent was;
    the same below every parent (Medusa, arXiv 2401.10774, section 2.3.3, grows its sparse tree this way).
    Returns parents, ranks (the choice each node takes at its depth) and the probability of every node to be on the
    accepted path; node 0 is the root. The sum of the probabilities is the expected acceptance length. What was measured
    of few tokens need not fall from rank to rank: the best choice of a depth stands first.
    """
    parents, ranks, probs, depths = [-1], [0], [1.0], [0]
    order = [sorted(range(len(row)), key=row.__getitem__, reverse=True) for row in acceptance]
    acceptance = [[row[rank] for rank in best] for row, best in zip(acceptance, order, strict=True)]
    # A node's candidates enter best first: its own next sibling and its first child.
    frontier = [(acceptance[0][0], 0, 0)] if acceptance and acceptance[0] else []  # (probability, parent, rank)
    while frontier and len(parents) < nodes:
        best = max(range(len(frontier)), key=lambda i: frontier[i][0])
        value, parent, rank = frontier.pop(best)
        if value <= 0.0:
            break
        node, depth = len(parents), depths[parent] + 1
        parents.append(parent)
        ranks.append(rank)
        probs.append(value)
        depths.append(depth)
        if rank + 1 < len(acceptance[depth - 1]):
            frontier.append((probs[parent] * acceptance[depth - 1][rank + 1], parent, rank + 1))
        if depth < len(acceptance) and acceptance[depth]:
            frontier.append((value * acceptance[depth][0], node, 0))
    return parents, [0, *(order[d - 1][r] for d, r in zip(depths[1:], ranks[1:], strict=True))], probs


def expected_length(session: Session, acceptance: list[list[float]], mode: str, nodes: int) -> float:
    """The expected acceptance length of the best static tree by a table of acceptance. A session of mask slots says
    itself what it expects to draft with so many rows (`expected_drafted`)."""
    own: Callable[[str, int], float] | None = getattr(session, "expected_drafted", None)
    return sum(static_tree(acceptance, nodes)[2]) if own is None else 1 + own(mode, nodes)


@lru_cache(maxsize=256)
def plan(acceptance: Acceptance, nodes: int, rows: int, device: torch.device) -> tuple[DraftTree, Tensor, int]:
    """The static tree of at most `nodes` nodes for these acceptance rates; where each of its nodes finds its token
    among the root and the choices, int64 [N]; and the children that a node has at most."""
    parents, ranks, probs = static_tree(acceptance, nodes)
    depths = depths_of(parents)
    choices = max(ranks) + 1
    index = [0] + [1 + (d - 1) * choices + r for d, r in zip(depths[1:], ranks[1:], strict=True)]
    shape = torch.tensor(parents, device=device).expand(rows, -1)
    scores = torch.tensor(probs, device=device).expand(rows, -1)
    tree = trusted(torch.zeros_like(shape), shape, scores, deepest=max(depths))
    return tree, torch.tensor(index, device=device), choices


def drafted(
    drafter: Trained,
    hidden: Tensor,
    roots: Tensor,
    index: Tensor,
    depth: int,
    choices: int,
    noise: Tensor | None,
    temperature: Tensor,
) -> Tensor:
    """Tokens int64 [B, N] of a static tree: each depth's best `choices` behind hidden states [B, H], placed by `index`.
    noise: float64 [B, depth, V], None when greedy."""
    ids: Tensor | None = getattr(drafter, "vocabulary", None)  # drafters of other packages have none
    scores = drafter(hidden, depth).transpose(0, 1)  # [B, depth, V], or of the draft vocabulary
    if noise is not None:
        scores = perturbed(scores, noise if ids is None else noise[..., ids], temperature)
    ranked = top(scores, choices)[1]  # [B, depth, choices]
    ranked = ranked if ids is None else ids[ranked]
    return torch.cat([roots[:, None], ranked.flatten(1)], 1)[:, index]


class StaticTreeSession:
    """The session of heads that guess each depth on its own from the last hidden state: a static tree in every pass.

    The drafter's forward takes hidden states [B, H] and a number of heads K, and gives logits [K, B, V].
    """

    def __init__(self, drafter: Trained) -> None:
        self.drafter = drafter
        self.hidden: Tensor | None = None  # the state before each row's root
        self.table: Acceptance = ()

    def propose(self, context: Context) -> DraftTree:
        if not self.table:
            acceptance = self.drafter.calibration[context.mode].acceptance
            ids: Tensor | None = getattr(self.drafter, "vocabulary", None)
            choices = context.target.vocab_size if ids is None else len(ids)
            self.table = tuple(tuple(row[:choices]) for row in acceptance)
        tree, index, choices = plan(self.table, context.nodes, len(context.lengths), context.roots.device)
        if self.hidden is None or tree.levels == 0:  # one-token prompts: nothing was seen yet
            return chain(context.roots[:, None])
        engine, noise = context.target.engine, ahead(context, tree.levels)
        rows = [None if part is None else engine.padded(part) for part in (self.hidden, context.roots, noise)]
        sizes, temperature = (index, tree.levels, choices), context.temperature_tensor
        tokens = engine.run(drafted, self.drafter, *rows[:2], *sizes, rows[2], temperature)
        return tree.with_tokens(tokens[: len(context.lengths)])

    def observe(self, accepted: Accepted) -> None:
        self.hidden = accepted.last_hidden(self.hidden)
