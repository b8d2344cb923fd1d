"""Verification: walk down the tree as long as a child holds the token that the target itself picks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from selfspec.core.tree import DraftTree

# (logits [A, V] at one node of each of A rows, those rows, what the walk emitted before that node)
# -> the picked token ids [A], and the scores [A, V] they were picked from
Picker = Callable[[Tensor, list[int], list[list[int]]], tuple[Tensor, Tensor]]
# (those scores, the picks, the drafted children of those nodes) -> what is emitted instead; such a rule is lossy
Relaxed = Callable[[Tensor, list[int], list[list[int]]], list[int]]


def verify(
    tree: DraftTree, logits: Tensor, picker: Picker, relaxed: Relaxed | None = None
) -> tuple[list[list[int]], list[list[int]]]:
    """Walk every row's tree from its root, all rows one level at a time; only visited nodes are picked from.

    logits: [B, N, V] of the target. Returns per row the path (accepted nodes, root first) and the emitted tokens: those
    of path[1:] and then the bonus token. Every emitted token is the target's own pick, whatever the tree holds (but for
    a `relaxed` rule, which may prefer a drafted token to the pick).
    """
    drafted, children = tree.tokens.tolist(), tree.children
    rows = list(range(len(drafted)))
    paths: list[list[int]] = [[0] for _ in rows]
    emitted: list[list[int]] = [[] for _ in rows]
    while rows:
        nodes = [paths[row][-1] for row in rows]
        level = logits[:, nodes[0]] if len(drafted) == 1 else logits[rows, nodes]
        tokens, scores = picker(level, rows, [emitted[row] for row in rows])
        picked = tokens.tolist()
        if relaxed is not None:
            below = [[drafted[row][c] for c in children[row][node]] for row, node in zip(rows, nodes, strict=True)]
            picked = relaxed(scores, picked, below)
        walking = []
        for row, token in zip(rows, picked, strict=True):
            emitted[row].append(token)
            child = next((c for c in children[row][paths[row][-1]] if drafted[row][c] == token), None)
            if child is not None:
                paths[row].append(child)
                walking.append(row)
        rows = walking
    return paths, emitted
