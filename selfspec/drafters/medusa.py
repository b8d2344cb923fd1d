"""Medusa heads (arXiv 2401.10774): head k guesses the token k + 2 places on from the target's last hidden state alone.

The vocabulary projection is by default a view of the target's own lm_head with one LoRA per head, so that one matrix
product with the shared weights serves all heads; `projection="full"` gives each head V x H weights, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.drafters.base import Drafter, Sample, number, one_of, training_dtype, whole
from selfspec.drafting import grow, last_hidden, measure_along, perturbed, unmeasured
from selfspec.generate import Accepted, Context
from selfspec.target import Target
from selfspec.training.losses import KINDS, ahead
from selfspec.tree import DraftTree, chain
from selfspec.views import SharedHeads, view


@dataclass(frozen=True)
class _Plan:
    """A static tree for some number of rows: `index` finds each node's token among root and choices."""

    tree: DraftTree
    index: Tensor
    depth: int
    choices: int


class Medusa(Drafter):
    """K heads on a frozen target.

    Parameters: blocks K*L*(H*H + H); projection "lora" K*rank*(H + V), "full" K*H*V.
    """

    kind = "medusa"

    def __init__(
        self,
        target: Target,
        heads: int = 4,
        blocks: int = 1,
        projection: str = "lora",
        rank: int = 32,
        loss: str = "kl",
        depth_decay: float = 0.8,
    ) -> None:
        """heads: K; blocks: residual blocks x + SiLU(Wx + b) per head; loss: kl or ce; depth_decay: weight of each
        head's loss relative to the head before it (the paper's 0.8).

        Raises ValueError for a number below 1, or an unknown projection or loss.
        """
        super().__init__()
        for name, value in (("heads", heads), ("blocks", blocks), ("rank", rank)):
            whole(name, value)
        one_of("projection", projection, ("lora", "full"))
        one_of("loss", loss, KINDS)
        number("depth_decay", depth_decay, 0, math.inf)
        self.shape: dict[str, Any] = {"heads": heads, "blocks": blocks, "projection": projection, "rank": rank}
        self.shape |= {"loss": loss, "depth_decay": depth_decay}
        self.heads, self.loss_kind, self.depth_decay, self.shortest = heads, loss, depth_decay, heads + 2
        hidden, device = target.hidden_size, target.device
        dtype = training_dtype(target.dtype)
        # Zero blocks: every head starts as the target's own next-token prediction.
        self.weight = nn.Parameter(torch.zeros(blocks, heads, hidden, hidden, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(blocks, heads, 1, hidden, device=device, dtype=dtype))
        self.shared: SharedHeads | None = None
        if projection == "lora":
            self.shared = SharedHeads(target, heads, rank, dtype)
        else:
            self.view = view(target.lm_head)  # keeps a bias, should the target have one
            self.full = nn.Parameter(self.view.weight.detach().to(dtype).repeat(heads, 1, 1))
        self.vocab, self.compute_dtype = target.vocab_size, target.dtype
        # measured[kind][d][r]: the chance that the r-th choice of head d is right, given that its parent was
        self.measured = unmeasured(heads)
        self._stacked: tuple[Tensor, ...] | None = None
        self._plans: dict[tuple[str, int, int], _Plan] = {}
        self._hidden: Tensor | None = None

    @staticmethod
    def parameter_count(
        hidden: int, vocab: int, heads: int = 4, blocks: int = 1, projection: str = "lora", rank: int = 32, **_: Any
    ) -> int:
        """Trained parameters of this shape."""
        per_head = rank * (hidden + vocab) if projection == "lora" else hidden * vocab
        return heads * (blocks * (hidden * hidden + hidden) + per_head)

    # -- the heads' product

    def _weights(self) -> tuple[Tensor, ...]:
        """Block weights [L, K, H, H], biases [L, K, 1, H]; then LoRA A [K, H, r] and B [K, r, V], or full [K, H, V]."""
        blocks = (self.weight.transpose(-1, -2), self.bias)
        if self.shared is None:
            return (*blocks, self.full.transpose(1, 2))
        return (*blocks, *self.shared.weights())

    def train(self, mode: bool = True) -> Medusa:
        """Leaving training mode stacks the weights of all heads once, in the target's dtype, for decoding."""
        super().train(mode)
        self._stacked, self._plans = None, {}
        if not mode:
            with torch.no_grad():
                self._stacked = tuple(w.detach().to(self.compute_dtype).contiguous() for w in self._weights())
        return self

    def products(self) -> list[nn.Module]:
        return [self]

    def forward(self, hidden: Tensor, heads: int | None = None) -> Tensor:
        """Logits [K, n, V] of the first `heads` heads for hidden states [n, H] (post-norm, as lm_head reads them)."""
        heads = heads or self.heads
        weights = self._stacked or self._weights()
        x = hidden.expand(heads, -1, -1)  # [K, n, H]
        for weight, bias in zip(weights[0], weights[1], strict=True):
            x = x + F.silu(torch.baddbmm(bias[:heads].to(x.dtype), x, weight[:heads].to(x.dtype)))
        if self.shared is None:
            logits = x @ weights[2][:heads].to(x.dtype)
            bias = self.view.bias
            return logits if bias is None else logits + bias
        return self.shared(x, *weights[2:])

    # -- decoding

    def _plan(self, kind: str, rows: int, nodes: int, device: torch.device) -> _Plan:
        key = (kind, rows, nodes)
        if key not in self._plans:
            parents, ranks, chance = grow(self.measured[kind], nodes)
            depths = [0]
            for parent in parents[1:]:
                depths.append(depths[parent] + 1)
            choices = max(ranks) + 1
            index = [0] + [1 + (d - 1) * choices + r for d, r in zip(depths[1:], ranks[1:], strict=True)]
            shape = torch.tensor(parents, device=device).expand(rows, -1)
            tree = DraftTree(torch.zeros_like(shape), shape, torch.tensor(chance, device=device).expand(rows, -1))
            self._plans[key] = _Plan(tree, torch.tensor(index, device=device), max(depths), choices)
        return self._plans[key]

    def propose(self, context: Context) -> DraftTree:
        kind = "greedy" if context.noise is None else "sampled"
        plan = self._plan(kind, len(context.lengths), context.nodes, context.roots.device)
        if self._hidden is None or plan.depth == 0:  # one-token prompts: nothing was seen yet
            return chain(context.roots[:, None])
        scores = self(self._hidden, plan.depth).transpose(0, 1)  # [B, depth, V]
        if context.noise is not None:
            # one position more than the heads reach: the bonus token's, so that the walk finds it in the same block
            ahead = context.noise.ahead([n + 1 for n in context.lengths], plan.depth + 1)
            scores = perturbed(scores, ahead[:, :-1], context.temperature)
        choices = scores.topk(plan.choices, -1).indices  # [B, depth, choices]
        tokens = torch.cat([context.roots[:, None], choices.flatten(1)], 1)
        return plan.tree.with_tokens(tokens[:, plan.index])

    def observe(self, accepted: Accepted) -> None:
        self._hidden = last_hidden(self._hidden, accepted)

    # -- training

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, hidden, logits = batch["tokens"], batch["hidden"], batch["logits"]
        n = tokens.shape[1] - 1 - self.heads  # positions from which every head has a target
        draft = self(hidden[:, :n].flatten(0, 1)).unflatten(1, (tokens.shape[0], n))  # [K, B, n, V]
        means = ahead(self.loss_kind, draft, logits, tokens, batch["mask"])
        weights = self.depth_decay ** torch.arange(self.heads, device=means.device)
        return (means * weights).sum() / weights.sum(), {self.loss_kind: means.detach()}

    @torch.no_grad()
    def measure(self, kind: str, samples: Sequence[Sample]) -> dict[str, Any]:
        chances, _, figures = measure_along(
            samples, self.heads, lambda sample, at: self(sample.hidden[at].to(self.compute_dtype))
        )
        self.measured[kind], self._plans = chances, {}
        return figures

    # -- on disk

    def adapters(self) -> dict[str, nn.Module]:
        return {} if self.shared is None else self.shared.adapters()

    def own_state(self) -> dict[str, Tensor]:
        names = ("weight", "bias") if self.shared is not None else ("weight", "bias", "full")
        return {name: getattr(self, name) for name in names}
