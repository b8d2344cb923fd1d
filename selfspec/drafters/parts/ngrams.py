"""What drafters without weights share: counts of right choices, and trees made of lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.core.tree import DraftTree, depths_of, trusted

WEIGHT = 8.0  # of what was believed before, in checked choices


class Tally:
    """How often drafted choices of each class are right, counted while decoding on top of what was measured before.

    table[i][j]: the acceptance rate of the j-th choice of class i; it weighs as much as WEIGHT checked choices.
    """

    def __init__(self, table: list[list[float]]) -> None:
        self.right = [[WEIGHT * rate for rate in row] for row in table]
        self.tried = [[WEIGHT] * len(row) for row in table]

    def rate(self, i: int, j: int) -> float:
        return self.right[i][j] / self.tried[i][j]

    def count(self, i: int, j: int, right: bool) -> None:
        self.tried[i][j] += 1
        self.right[i][j] += right

    def table(self) -> list[list[float]]:
        return [[self.rate(i, j) for j in range(len(row))] for i, row in enumerate(self.tried)]


# A row's tree before it is a tensor: tokens, parents (the root first, with -1) and each node's path probability
ListTree = tuple[list[int], list[int], list[float]]


def as_tree(roots: Tensor, rows: Sequence[ListTree], prunable: bool = True, least: int = 1) -> DraftTree:
    """One tree of rows of different sizes, of `least` nodes or more; the shorter ones end in spare nodes."""
    width = max(least, *(len(tokens) for tokens, _, _ in rows))
    padded, deepest = list[tuple[list[int], list[int], list[float]]](), 0
    for tokens, parents, probs in rows:
        more, deepest = width - len(tokens), max(deepest, *depths_of(parents))
        padded.append((tokens + [tokens[0]] * more, parents + [-1] * more, probs + [0.0] * more))
    whole = torch.tensor(padded, dtype=torch.float64, device=roots.device)  # one upload, exact for token ids
    nodes = whole[:, :2].long()
    scores = whole[:, 2].to(torch.get_default_dtype())
    return trusted(nodes[:, 0], nodes[:, 1], scores, prunable=prunable, deepest=deepest)
