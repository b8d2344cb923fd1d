"""Verification: walk down the tree as long as a child holds the token that the target itself picks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from selfspec.tree import DraftTree

# (logits [A, V] at one node of each of A rows, those rows, the nodes' depth) -> the picked token ids, int64 [A]
Picker = Callable[[Tensor, list[int], int], Tensor]


def verify(tree: DraftTree, logits: Tensor, picker: Picker) -> tuple[list[list[int]], list[list[int]]]:
    """Walk every row's tree from its root, all rows one level at a time; only visited nodes are picked from.

    logits: [B, N, V] of the target. Returns per row the path (accepted nodes, root first) and the emitted tokens: those
    of path[1:] and then the bonus token. Every emitted token is the target's own pick, whatever the tree holds.
    """
    drafted, children = tree.tokens.tolist(), tree.children
    rows = list(range(len(drafted)))
    paths: list[list[int]] = [[0] for _ in rows]
    emitted: list[list[int]] = [[] for _ in rows]
    depth = 0
    while rows:
        nodes = [paths[row][-1] for row in rows]
        level = logits[:, nodes[0]] if len(drafted) == 1 else logits[rows, nodes]
        walking = []
        for row, token in zip(rows, picker(level, rows, depth).tolist(), strict=True):
            emitted[row].append(token)
            child = next((c for c in children[row][paths[row][-1]] if drafted[row][c] == token), None)
            if child is not None:
                paths[row].append(child)
                walking.append(row)
        rows, depth = walking, depth + 1
    return paths, emitted
