"""Verification: walk down the tree as long as a child holds the token that the target itself picks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.core.sampling import NOTHING, limiting, nothing_to_pick, warp
from selfspec.core.tree import DraftTree

CHUNK, ON_GPU = 1 << 17, 1 << 25  # scores at a time: a CPU's cache holds them; a GPU launches kernels for each chunk

# (logits [A, V] at one node of each of A rows, those rows, what the walk emitted before that node)
# -> the picked token ids [A], and the scores [A, V] they were picked from
Picker = Callable[[Tensor, list[int], list[list[int]]], tuple[Tensor, Tensor]]
# (those scores, the picks, the drafted child tokens of each node) -> the tokens to emit instead of the picks; lossy
Relaxed = Callable[[Tensor, list[int], list[list[int]]], list[int]]


def verify(
    tree: DraftTree,
    logits: Tensor,
    picker: Picker,
    relaxed: Relaxed | None = None,
    ended: Callable[[int, list[int]], bool] = lambda row, emitted: False,
) -> tuple[list[list[int]], list[list[int]], list[list[bool]]]:
    """Walk every row's tree from its root, all rows one level at a time; only visited nodes are picked from.

    logits: [B, N, V] of the target; ended: whether a row is finished with what it emitted; its walk stops there.
    Returns per row the path (accepted nodes, root first), the emitted tokens (those of path[1:] and then the bonus
    token, which is missing where `ended` stopped the row at an accepted node), and which of them are no picks.
    Every emitted token is the target's own pick, whatever the tree holds (but for a `relaxed` rule, which may prefer a
    drafted token to the pick). Raises FloatingPointError where no token has a finite score.
    """
    drafted, children = tree.tokens.tolist(), tree.children
    if tree.plain is not None:  # mask slots are no drafted tokens
        children = [[[c for c in below if c < tree.plain] for below in row] for row in children]
    rows = list(range(len(drafted)))
    paths: list[list[int]] = [[0] for _ in rows]
    emitted: list[list[int]] = [[] for _ in rows]
    altered: list[list[bool]] = [[] for _ in rows]
    while rows:
        nodes = [paths[row][-1] for row in rows]
        level = logits[:, nodes[0]] if len(drafted) == 1 else logits[rows, nodes]
        tokens, scores = picker(level, rows, [emitted[row] for row in rows])
        picked = own = tokens.tolist()
        if NOTHING in own:
            raise nothing_to_pick()
        if relaxed is not None:
            below = [[drafted[row][c] for c in children[row][node]] for row, node in zip(rows, nodes, strict=True)]
            picked = relaxed(scores, picked, below)
        walking = []
        for row, token, pick in zip(rows, picked, own, strict=True):
            emitted[row].append(token)
            altered[row].append(token != pick)
            child = next((c for c in children[row][paths[row][-1]] if drafted[row][c] == token), None)
            if child is not None:
                paths[row].append(child)
                if not ended(row, emitted[row]):
                    walking.append(row)
        rows = walking
    return paths, emitted, altered


class Kept:
    """The result of a walk over B rows: one int64 tensor [B, 2, N + 2] on the target's device. The properties are
    slices of it, so that reading one launches no kernel."""

    def __init__(self, walked: Tensor) -> None:
        self.walked = walked

    @classmethod
    def of(cls, paths: list[list[int]], emitted: list[list[int]], device: torch.device) -> Kept:
        """Of paths and tokens on the host, by one upload."""
        most, rows = max(1, *map(len, paths)), []
        for path, new in zip(paths, emitted, strict=True):
            last = (path[-1], new[-1]) if path else (0, 0)
            nodes = path + list(range(len(path), most))
            rows.append([[*nodes, len(path), last[0]], [*new, *[0] * (most - len(new)), last[1], 0]])
        return cls(torch.tensor(rows, device=device))

    @property
    def path(self) -> Tensor:
        """int64 [B, N]: the kept nodes, root first; places behind them hold their own index."""
        return self.walked[:, 0, :-2]

    @property
    def tokens(self) -> Tensor:
        """int64 [B, N]: what each kept node emits, 0 behind them."""
        return self.walked[:, 1, :-2]

    @property
    def lengths(self) -> Tensor:
        """int64 [B]: kept nodes."""
        return self.walked[:, 0, -2]

    @property
    def leaf(self) -> Tensor:
        """int64 [B]: the last kept node."""
        return self.walked[:, 0, -1]

    @property
    def bonus(self) -> Tensor:
        """int64 [B]: the last token that a row emits, its next root."""
        return self.walked[:, 1, -2]


class WalkNoise(NamedTuple):
    """The noise that a pass picks its tokens with. values: float64 [B, D, V], of which [:, d] is for the pick at a node
    of depth d, and D is larger than any depth that a walk can reach; None when greedy. temperature: float64 []; logits
    are divided by it. limits: what then leaves tokens out, see `Sampling.limits`."""

    values: Tensor | None = None
    temperature: Tensor | None = None
    limits: tuple[int | None, float | None, float | None] = (None, None, None)


def _noisy(logits: Tensor, depth: Tensor, noise: WalkNoise) -> tuple[Tensor, Tensor]:
    """The largest noisy scores [B, n] of logits [B, n, V] at nodes of these depths, int64 [B, n], and their tokens."""
    assert noise.values is not None
    assert noise.temperature is not None
    at_node = noise.values[torch.arange(len(depth), device=depth.device)[:, None], depth]
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / noise.temperature
    at_node += warp(scores.flatten(0, 1), limiting(*noise.limits)).view_as(scores)
    return largest(at_node)


def largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of scores [..., V] and its first place, which is V where it is NaN. Compiled, two sweeps are faster
    than one that carries places along (notebooks/LOG.md)."""
    best, places = scores.amax(-1), torch.arange(scores.shape[-1], device=scores.device, dtype=torch.int32)
    return best, torch.where(scores == best[..., None], places, scores.shape[-1]).amin(-1).long()


def walk(logits: Tensor, tokens: Tensor, parents: Tensor, below: Tensor, noise: WalkNoise) -> Tensor:
    """`verify` as tensor operations alone, for greedy decoding and for sampling by temperature, top-k, top-p and min-p.

    logits: [B, N, V]; tokens, parents: int64 [B, N]; below: bool [B, N, N], see `tree.ancestors`. Returns int64
    [B, 2, N + 2], see `Kept`; a token is NOTHING where none has a finite score. A child is accepted if it holds the
    pick of its parent and no sibling before it does; a node is on the path if it and all its ancestors are accepted.
    """
    levels = below.sum(-1) - 1
    if noise.values is not None and noise.temperature is not None:
        depth = levels.clamp(max=noise.values.shape[1] - 1)  # mask slots can be deeper; no walk reaches them
        most = CHUNK if logits.device.type == "cpu" else ON_GPU // len(logits)
        step = max(1, most // logits.shape[-1])
        parts = [_noisy(logits[:, i : i + step], depth[:, i : i + step], noise) for i in range(0, depth.shape[1], step)]
        best, picks = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    else:
        best, picks = largest(logits)
    picks = torch.where(best.isfinite(), picks, NOTHING)
    rows, nodes = tokens.shape
    if nodes == 1:  # the root alone is the path
        none = torch.zeros_like(picks)
        return torch.stack([torch.cat([none, none + 1, none], 1), torch.cat([picks, picks, none], 1)], 1)
    each = torch.arange(tokens.shape[1], device=tokens.device)
    wanted = picks.gather(1, parents.clamp(min=0))
    alike = (parents[:, :, None] == parents[:, None]) & (tokens[:, :, None] == tokens[:, None])
    first = ~(alike & (each < each[:, None])).any(-1)
    accepted = ((parents >= 0) & (tokens == wanted) & first) | (each == 0)
    on_path = ~(below & ~accepted[:, None]).any(-1)
    place = torch.where(on_path, levels, nodes)  # index in the path; other nodes go to place N, which is cut off
    path = torch.arange(nodes + 1, device=tokens.device).expand(rows, -1).scatter(1, place, each.expand(rows, -1))
    emitted = torch.zeros(rows, nodes + 1, dtype=torch.long, device=tokens.device).scatter(1, place, picks)
    count = on_path.sum(-1, keepdim=True)
    ends = [row.gather(1, count - 1) for row in (path, emitted)]  # the leaf and the bonus token
    path = torch.cat([path[:, :nodes], count, ends[0]], 1)
    return torch.stack([path, torch.cat([emitted[:, :nodes], ends[1], torch.zeros_like(count)], 1)], 1)


def read_walk(walked: Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """Paths and emitted tokens of `walk`'s result, as `verify` returns them.

    Raises FloatingPointError where no token has a finite score.
    """
    paths, emitted = [], []
    for path, tokens in walked.tolist():
        count = path[-2]
        paths.append(path[:count])
        emitted.append(tokens[:count])
        if NOTHING in emitted[-1]:
            raise nothing_to_pick()
    return paths, emitted
