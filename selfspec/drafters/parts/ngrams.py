"""What drafters without weights share: counts of right choices, and trees made of lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.core.tree import DraftTree, trusted


class Tally:
    """How often drafted choices of each class are right, counted while decoding on top of what was measured before.

    table[i][j]: the acceptance rate of the j-th choice of class i; it weighs as much as `weight` checked choices.
    """

    def __init__(self, table: list[list[float]], weight: float = 8.0) -> None:
        self.right = [[weight * rate for rate in row] for row in table]
        self.tried = [[weight] * len(row) for row in table]

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
    padded = [
        (t + [t[0]] * (width - len(t)), p + [-1] * (width - len(t)), c + [0.0] * (width - len(t))) for t, p, c in rows
    ]
    tokens, parents, probs = (torch.tensor(part, device=roots.device) for part in zip(*padded, strict=True))
    return trusted(tokens, parents, probs, prunable=prunable)
