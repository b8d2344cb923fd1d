"""Early exit: the target's first layers, left early through a light block, draft for the whole.

Sources: Kangaroo (arXiv 2404.18911: an adapter behind the first layers), LayerSkip (arXiv 2404.16710: verification goes
on from the layer that drafted), Draft & Verify (arXiv 2309.08168).

The first E layers run on draft nodes as they are. The exit block is a view of the target's last decoder layer, final
norm and lm_head with LoRA, and keeps keys and values of its own. Every node that is expanded stays in the tree, so what
the first E layers left in the target's cache is all used: verification begins at layer E from the hidden states the
draft already has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.core.contract import Accepted, Context
from selfspec.core.target import RowCache, Target
from selfspec.core.tree import DraftTree, chain
from selfspec.drafters.base import Batch, DrafterConfig, Sample, Trained, one_of, share, training_dtype, whole
from selfspec.drafters.parts.growth import Growth, grown
from selfspec.drafters.parts.losses import LOSSES, decayed, distance, masked_mean
from selfspec.drafters.parts.views import Tail


@dataclass
class EarlyExitConfig(DrafterConfig):
    """exit: E, the layers that draft; rank: of the block's LoRA, 0 for no block at all (the final norm and lm_head
    read the exit's hidden state: the training-free form, for targets trained for it); depth: of the tree at most;
    width: nodes expanded per depth at most; min_prob: a node with less path probability is not expanded, and drafting
    ends where there is no other; loss: kl (to the target's own distribution) or ce (to the text).

    Raises ValueError for a negative rank and other numbers outside their range.
    """

    exit: int = 1
    rank: int = 64
    depth: int = 4
    width: int = 3
    min_prob: float = 0.3
    loss: str = "kl"

    def __post_init__(self) -> None:
        whole("rank", self.rank, 0, why=" (no block, nothing trained)")
        for name in ("exit", "depth", "width"):
            whole(name, getattr(self, name))
        share("min_prob", self.min_prob)
        one_of("loss", self.loss, LOSSES)


class EarlyExit(Trained):
    """Drafts from the output of layer E - 1.

    Parameters: rank * (inputs + outputs) of every linear map of the target's last decoder layer and of lm_head.
    """

    config: EarlyExitConfig

    def __init__(self, target: Target, config: EarlyExitConfig) -> None:
        """Raises ValueError for an exit outside 1..L-1."""
        super().__init__(config, config.depth)
        if target.n_layers < 2:
            raise ValueError("a target of one layer has none to exit after; early exit needs at least two")
        whole("exit", config.exit, 1, target.n_layers - 1, f": the target has {target.n_layers} layers")
        self.reads = (config.exit - 1,)
        self.tail = Tail(target, config.rank, training_dtype(target.dtype), "exit", head=True)

    def along(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Logits [B, S, V] along whole texts from the exit's hidden states [B, S, H] on them."""
        logits = self.tail.text(hidden, tokens, block=self.config.rank > 0).logits
        assert logits is not None
        return logits

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        draft = self.along(batch.features[self.config.exit - 1], batch.tokens)
        losses = distance(self.config.loss, draft[:, :-1], batch.logits[:, :-1], batch.tokens[:, 1:])
        return decayed(self.config.loss, masked_mean(losses[None], batch.mask[None, :, 1:]), 1.0)

    def scores(self, sample: Sample, at: Tensor) -> Tensor:
        hidden = sample.features[self.config.exit - 1][None].to(self.tail.dtype)
        draft = self.along(hidden, sample.tokens[None].to(hidden.device))
        return torch.stack([draft[0, at + 1 + d] for d in range(self.depth)])

    def session(self, target: Target, rows: int) -> EarlyExitSession:
        return EarlyExitSession(self, target, rows)


class EarlyExitSession:
    """What one call keeps. cache: keys and values of the exit block (None without one); late: per row [0 or 1, H],
    the hidden state of an accepted leaf that the block has not run on yet; ran: nodes of the last tree it ran on, 0
    while the prompt is read."""

    def __init__(self, drafter: EarlyExit, target: Target, rows: int) -> None:
        self.drafter = drafter
        self.cache: RowCache | None = drafter.tail.target.cache(rows, 256) if drafter.config.rank else None
        self.late: list[Tensor] = []
        self.ran = 0

    def propose(self, context: Context) -> DraftTree:
        target, cache, config = context.target, context.cache, self.drafter.config
        root, below = chain(context.roots[:, None]), (0, config.exit)
        if not max(context.lengths) or context.nodes == 1:  # one-token prompts: the cache is not made yet
            self.ran = 0
            return root
        hidden, expanded = target.forward(root, cache, False, below).hidden, 1

        def step(growth: Growth, d: int) -> tuple[Tensor, None]:
            nonlocal hidden, expanded
            if d == 0:
                return self._first(hidden, context.roots), None
            tree = growth.stem()
            new = target.forward(tree, cache, False, below, ran=expanded).hidden
            hidden = torch.cat([hidden, new], 1)
            above = DraftTree(tree.tokens[:, 1:], tree.parents[:, 1:] - 1)  # the block has kept the root
            scores = self._block(new, above, expanded - 1)
            expanded = tree.tokens.shape[1]
            return scores, None

        tree = grown(self.drafter, context, step, config.depth, config.width, config.min_prob, reserve=True).tree()
        if tree.tokens.shape[1] > expanded:
            hidden = torch.cat([hidden, target.forward(tree, cache, False, below, ran=expanded).hidden], 1)
        self.ran = expanded
        return DraftTree(tree.tokens, tree.parents, tree.scores, prunable=False, start=config.exit, hidden=hidden)

    def _block(self, hidden: Tensor, tree: DraftTree, ran: int) -> Tensor:
        """Logits [B, n, V] of the nodes behind `ran` from the exit's hidden states [B, n, H] on them."""
        if self.cache is None:
            return self.drafter.along(hidden, tree.tokens[:, ran:])
        logits = self.drafter.tail.step(hidden, tree, self.cache, ran).logits
        assert logits is not None
        return logits

    def _first(self, hidden: Tensor, roots: Tensor) -> Tensor:
        """Logits [B, 1, V] at the roots; the block runs on late leaves and the roots, and keeps them in its cache."""
        late = [len(part) for part in self.late]
        if self.cache is None or not any(late):
            scores = self._block(hidden, chain(roots[:, None]), 0)
            if self.cache is not None:
                self.cache.keep([[0]] * len(roots))
        else:
            states = hidden.new_zeros(len(roots), 2, hidden.shape[-1])
            for row, part in enumerate(self.late):
                states[row, : len(part)] = part
                states[row, len(part)] = hidden[row, 0]
            both = self._block(states, chain(roots[:, None].expand(-1, 2)), 0)
            self.cache.keep([list(range(n + 1)) for n in late])
            scores = both[torch.arange(len(late)), torch.tensor(late)][:, None]
        self.late = [hidden.new_zeros(0, hidden.shape[-1]) for _ in late]
        return scores

    def observe(self, accepted: Accepted) -> None:
        if self.cache is None:
            return
        states = accepted.features[self.drafter.config.exit - 1]
        if len(accepted.rows) < len(states):
            self.cache.select(torch.tensor(accepted.rows, device=states.device))
            states = states[accepted.rows]
        if not self.ran:  # a part of the prompt, or a pass that nothing was drafted for
            tree = chain(states.new_zeros(states.shape[:2], dtype=torch.long))
            self.drafter.tail.step(states, tree, self.cache, logits=False)
            self.cache.keep(accepted.paths)
            self.late = [states[0, :0] for _ in states]
            return
        self.cache.keep([[node - 1 for node in path[1:] if node < self.ran] for path in accepted.paths])
        last = [path[-1] for path in accepted.paths]
        self.late = [states[i, n : n + 1] if n >= self.ran else states[i, :0] for i, n in enumerate(last)]
