"""Whether passes of one width give a token the same bits, tried with random trees; see `selfspec.core.width`."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain, trusted

_TEXTS, _DEPTH = 3, 5  # random texts that are tried, and the length of each one's path


@torch.no_grad()
def same_bits(target: Target, rows: int, capacity: int) -> bool:
    """Whether random tokens have the same logits, bit for bit, on a path through a random tree and in passes over one
    token after the other, in calls of so many rows and cache entries. Tried once for each."""

    def known() -> tuple[int, ...]:  # passes that are compiled later have other bits
        compiled = sum(what.startswith("tree_pass_alone") for what, _, _ in target.engine.made)
        return rows, capacity, torch.get_num_threads(), compiled

    if known() not in target.tried:
        alike = all(_alike(target, rows, capacity, text) for text in range(_TEXTS))
        target.tried[known()] = alike
    return target.tried[known()]


def _alike(target: Target, rows: int, capacity: int, number: int) -> bool:
    width = target.width or 1
    g = torch.Generator().manual_seed(number)
    before = 1 + (37 * number) % max(1, capacity - width - _DEPTH)  # the path begins at other places of a group
    tokens = torch.randint(target.vocab_size, (rows, before + width), generator=g).to(target.device)
    path = [0, *sorted(torch.randperm(width - 1, generator=g)[:_DEPTH].add(1).tolist())] if width > 1 else [0]
    parents = torch.zeros(width, dtype=torch.long)
    parents[0] = -1
    for above, node in itertools.pairwise(path):
        parents[node] = above
    tree = trusted(tokens[:, before:], parents.to(target.device).expand(rows, -1).contiguous())
    wanted = _ran(target, capacity, tokens[:, :before], [tree])[0][:, path]
    plain = [chain(tokens[:, before + node, None]) for node in path]
    found = torch.cat(_ran(target, capacity, tokens[:, :before], plain), 1)
    return torch.equal(found, wanted)


def _ran(target: Target, capacity: int, prompt: Tensor, trees: list[DraftTree]) -> list[Tensor]:
    """Logits of passes over these trees behind a prompt; the root of each is kept."""
    rows, count = prompt.shape
    cache = target.cache(rows, capacity, capacity)
    target.forward(chain(prompt), cache, False, prompt=True)
    cache.commit([[*range(count)]] * rows)
    found = []
    for tree in trees:
        logits = target.forward(tree, cache).logits
        assert logits is not None
        found.append(logits)
        cache.commit([[0]] * rows)
    return found
