"""Whether passes of one width give a token the same bits, tried with random trees; see `selfspec.core.width`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain, trusted
from selfspec.core.verify import WalkNoise
from selfspec.engine.keys import float32_products

_TEXTS, _DEPTH = 3, 5  # random texts that are tried, and the length of each one's path


@torch.no_grad()
def same_bits(
    target: Target,
    rows: int,
    capacity: int,
    reads: tuple[int, ...] = (),
    walks: str = "",
    limits: tuple[int | None, float | None, float | None] = (None, None, None),
) -> bool:
    """Whether random tokens have the same logits, bit for bit, on a path through a random tree and in passes over one
    token after the other, in calls of so many rows and cache entries. Tried once for each, with the compiled functions
    of the call. reads: layers that the drafter reads; walks: how passes walk their trees, "greedy", "sampled" or not at
    all; limits: of sampling, see `Sampling.limits`."""

    def known() -> tuple[object, ...]:  # what was tried holds until a pass is compiled, which has other bits
        compiled = sum(what.startswith("tree_pass_alone") for what, _, _ in target.engine.made)
        return rows, capacity, reads, walks, limits, torch.get_num_threads(), float32_products(), compiled

    while (now := known()) not in target.tried:  # again where something was compiled meanwhile
        noise = None if not walks else WalkNoise()
        if walks == "sampled":
            nothing = torch.zeros(rows, target.width or 1, target.vocab_size, dtype=torch.float64, device=target.device)
            noise = WalkNoise(nothing, torch.tensor(1.0, dtype=torch.float64, device=target.device), limits)
        trial = _Trial(target, rows, capacity, noise)
        alike = all(trial.alike(text, reads) for text in range(_TEXTS))
        if known() == now:
            target.tried[now] = alike
            return alike
    return target.tried[now]


@dataclass(frozen=True)
class _Trial:
    target: Target
    rows: int
    capacity: int
    noise: WalkNoise | None

    def alike(self, number: int, reads: tuple[int, ...]) -> bool:
        """Of one random text."""
        target, width, g = self.target, self.target.width or 1, torch.Generator().manual_seed(number)
        before = 1 + (37 * number) % max(1, self.capacity - width - _DEPTH)  # the path begins elsewhere in a group
        tokens = torch.randint(target.vocab_size, (self.rows, before + width), generator=g).to(target.device)
        path = [0, *sorted(torch.randperm(width - 1, generator=g)[:_DEPTH].add(1).tolist())]
        parents = torch.zeros(width, dtype=torch.long)
        parents[0] = -1
        for above, node in itertools.pairwise(path):
            parents[node] = above
        tree = trusted(tokens[:, before:], parents.to(target.device).expand(self.rows, -1).contiguous())
        plain = [chain(tokens[:, before + node, None]) for node in path]
        wanted = self._logits(tokens[:, :before], [tree], reads)[:, path]
        return torch.equal(self._logits(tokens[:, :before], plain, ()), wanted)

    def _logits(self, prompt: Tensor, trees: list[DraftTree], reads: tuple[int, ...]) -> Tensor:
        """Of passes over these trees behind a prompt, side by side; the root of each is kept."""
        cache, found = self.target.cache(self.rows, self.capacity, self.capacity), list[Tensor]()
        self.target.forward(chain(prompt), cache, False, prompt=True)
        cache.commit([[*range(prompt.shape[1])]] * self.rows)
        for tree in trees:
            logits = self.target.forward(tree, cache, reads=reads, noise=self.noise).logits
            assert logits is not None
            found.append(logits.clone())  # of one node of the whole pass
            cache.commit([[0]] * self.rows)
        return torch.cat(found, 1)
