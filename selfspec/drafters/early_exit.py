"""Early exit: the target's first layers, left early through a light block, draft for the whole.

Sources: Kangaroo (arXiv 2404.18911: an adapter behind the first layers), LayerSkip (arXiv 2404.16710: verification goes
on from the layer that drafted), Draft & Verify (arXiv 2309.08168).

The first E layers run on draft nodes as they are. The exit block is a view of the target's last decoder layer, final
norm and lm_head with LoRA, and keeps keys and values of its own. Every node that is expanded stays in the tree, so what
the first E layers left in the target's cache is all used: verification begins at layer E from the hidden states the
draft already has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.cache import TreeCache
from selfspec.drafters.base import Drafter, Sample, number, one_of, training_dtype, whole
from selfspec.drafting import Growth, measure_along, perturbed
from selfspec.generate import Accepted, Context
from selfspec.target import Target
from selfspec.training.losses import KINDS, distance, masked_mean
from selfspec.tree import DraftTree, chain
from selfspec.views import Tail


class EarlyExit(Drafter):
    """Drafts from the output of layer E - 1.

    Parameters: rank * (inputs + outputs) of every linear map of the target's last decoder layer and of lm_head.
    """

    kind = "early_exit"
    own_tree = True

    def __init__(
        self,
        target: Target,
        exit: int = 1,
        rank: int = 64,
        depth: int = 4,
        width: int = 3,
        least: float = 0.3,
        loss: str = "kl",
    ) -> None:
        """exit: E, the layers that draft; rank: of the block's LoRA, 0 for no block at all (the final norm and lm_head
        read the exit's hidden state: the training-free form, for targets trained for it); depth: of the tree at most;
        width: nodes expanded per depth at most; least: a node with less chance than this to be on the accepted path is
        not expanded, and drafting ends where there is none; loss: kl or ce.

        Raises ValueError for an exit outside 1..L-1, a negative rank, and other numbers outside their range.
        """
        super().__init__()
        if target.n_layers < 2:
            raise ValueError("a target of one layer has none to exit after; early exit needs at least two")
        whole("exit", exit, 1, target.n_layers - 1, f": the target has {target.n_layers} layers")
        whole("rank", rank, 0, why=" (no block, nothing trained)")
        for name, value in (("depth", depth), ("width", width)):
            whole(name, value)
        number("least", least, 0, 1)
        one_of("loss", loss, KINDS)
        self.shape: dict[str, Any] = {"exit": exit, "rank": rank, "depth": depth, "width": width, "least": least}
        self.shape["loss"] = loss
        self.exit, self.rank, self.depth, self.width, self.least = exit, rank, depth, width, least
        self.loss_kind, self.features, self.shortest = loss, (exit - 1,), 2
        self.tail = Tail(target, rank, training_dtype(target.dtype), "exit", head=True)
        # measured[kind][d]: the factor on scores at depth d + 1 that makes their softmax the best forecast
        self.measured = {kind: [[1.0] for _ in range(depth)] for kind in ("greedy", "sampled")}
        self._cache: TreeCache | None = None
        self._late: list[Tensor] = []  # per row [0 or 1, H]: a kept node that the block has not read yet
        self._read = 0  # nodes of the last tree that the block has read; none while the prompt is read

    @staticmethod
    def parameter_count(target: Target, rank: int = 64, **_: Any) -> int:
        """Trained parameters of this shape."""
        return rank * Tail.widths(target, head=True)

    def products(self) -> list[nn.Module]:
        return self.tail.products()

    def forward(self, hidden: Tensor, tree: DraftTree, ran: int, logits: bool = True) -> Tensor | None:
        """For decoding: logits [B, n, V] of the nodes behind `ran` from the exit's hidden states [B, n, H] on them."""
        if not self.rank:
            return self.tail.text(hidden, tree.tokens[:, ran:], block=False).logits
        assert self._cache is not None
        return self.tail.step(hidden, tree, self._cache, ran, logits).logits

    # -- decoding

    def propose(self, context: Context) -> DraftTree:
        target, cache = context.target, context.cache
        root = chain(context.roots[:, None])
        if not max(context.lengths) or context.nodes == 1:  # one-token prompts: the cache is not made yet
            self._read = 0
            return root
        below = (0, self.exit)
        hidden = target.forward(root, cache, False, below).hidden
        scores = self._first(hidden, context.roots)
        growth = Growth(context.roots, context.nodes, self.width, self.least, reserve=True)
        sharpness = self.measured["greedy" if context.noise is None else "sampled"]
        if context.noise is not None:
            noise = context.noise.ahead([n + 1 for n in context.lengths], self.depth + 1)
        expanded = 1
        for d in range(self.depth):
            if context.noise is not None:
                scores = perturbed(scores, noise[:, d, None], context.temperature)
            growth.extend(scores * sharpness[d][0])
            if d + 1 == self.depth or not growth.frontier.shape[1]:
                break
            tree = growth.stem()
            new = target.forward(tree, cache, False, below, ran=expanded).hidden
            hidden = torch.cat([hidden, new], 1)
            above = DraftTree(tree.tokens[:, 1:], tree.parents[:, 1:] - 1)  # the block has kept the root
            block = self(new, above, expanded - 1)
            assert block is not None
            scores, expanded = block, tree.tokens.shape[1]
        tree = growth.tree()
        if tree.tokens.shape[1] > expanded:
            hidden = torch.cat([hidden, target.forward(tree, cache, False, below, ran=expanded).hidden], 1)
        tree.start, tree.hidden, self._read = self.exit, hidden, expanded
        return tree

    def _first(self, hidden: Tensor, roots: Tensor) -> Tensor:
        """Logits [B, 1, V] at the roots; the block reads what was kept late, and the roots, for good."""
        late = [len(part) for part in self._late]
        if self._cache is None or not any(late):
            scores = self(hidden, chain(roots[:, None]), 0)
            if self._cache is not None:
                self._cache.keep([[0]] * len(roots))
        else:
            states = hidden.new_zeros(len(roots), 2, hidden.shape[-1])
            for row, part in enumerate(self._late):
                states[row, : len(part)] = part
                states[row, len(part)] = hidden[row, 0]
            scores = self(states, chain(roots[:, None].expand(-1, 2)), 0)
            assert scores is not None
            self._cache.keep([list(range(n + 1)) for n in late])
            scores = scores[torch.arange(len(late)), torch.tensor(late)][:, None]
        self._late = [hidden.new_zeros(0, hidden.shape[-1]) for _ in late]
        assert scores is not None
        return scores

    def observe(self, accepted: Accepted) -> None:
        if not self.rank:
            return
        states = accepted.features[self.exit - 1]
        if self._cache is None:
            self._cache = self.tail.fast.cache(len(states), 256)
        if len(accepted.rows) < len(states):
            self._cache.select(torch.tensor(accepted.rows, device=states.device))
            states = states[accepted.rows]
        if not self._read:  # a part of the prompt, or a pass that nothing was drafted for
            self(states, chain(states.new_zeros(states.shape[:2], dtype=torch.long)), 0, False)
            self._cache.keep(accepted.paths)
            self._late = [states[0, :0] for _ in states]
            return
        self._cache.keep([[node - 1 for node in path[1:] if node < self._read] for path in accepted.paths])
        last = [path[-1] for path in accepted.paths]
        self._late = [states[i, n : n + 1] if n >= self._read else states[i, :0] for i, n in enumerate(last)]

    # -- training

    def loss(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, logits = batch["tokens"], batch["logits"]
        draft = self.tail.text(batch["features"][self.exit - 1], tokens, block=self.rank > 0).logits
        assert draft is not None
        losses = distance(self.loss_kind, draft[:, :-1], logits[:, :-1], tokens[:, 1:])
        mean = masked_mean(losses[None], batch["mask"][None, :, 1:])
        return mean[0], {self.loss_kind: mean.detach()}

    @torch.no_grad()
    def measure(self, kind: str, samples: Sequence[Sample]) -> dict[str, Any]:
        def scores(sample: Sample, at: Tensor) -> Tensor:
            hidden = sample.features[self.exit - 1][None].to(self.tail.dtype)
            draft = self.tail.text(hidden, sample.tokens[None].to(hidden.device), block=self.rank > 0).logits
            assert draft is not None
            return torch.stack([draft[0, at + 1 + d] for d in range(self.depth)])

        _, sharpness, figures = measure_along(samples, self.depth, scores)
        self.measured[kind] = [[factor] for factor in sharpness]
        return figures

    # -- on disk

    def adapters(self) -> dict[str, nn.Module]:
        return self.tail.adapters()

    def own_state(self) -> dict[str, Tensor]:
        return {}
