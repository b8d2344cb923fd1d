"""Medusa heads (arXiv 2401.10774): head k guesses the token k + 2 places on from the target's last hidden state alone.

The vocabulary projection is by default a view of the target's own lm_head with one LoRA per head, so that one matrix
product with the shared weights serves all heads; `projection="full"` gives each head V x H weights, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.core.contract import Session
from selfspec.core.support import view
from selfspec.core.target import Target
from selfspec.drafters.base import Batch, DrafterConfig, Sample, one_of, pack, training_dtype, whole
from selfspec.drafters.parts.losses import draft_loss
from selfspec.drafters.parts.static_tree import StaticTreeSession
from selfspec.drafters.parts.views import SharedHeads, check_width
from selfspec.drafters.parts.vocabulary import Reduced, check_draft_vocab
from selfspec.utils.checks import above_zero


@dataclass
class MedusaConfig(DrafterConfig):
    """heads: K; blocks: residual blocks x + SiLU(Wx + b) per head; projection: lora (the target's lm_head and one LoRA
    of `rank` per head) or full (V x H weights per head); rank: of the LoRA; loss: kl, ce, ce_tv, tv, lk, accept, or
    package.module.function; depth_decay: weight of each head's loss relative to the head before it (the paper's 0.8);
    draft_vocab: how many tokens can be drafted, the most frequent of the training text (None: all).

    Raises ValueError for a number below 1, or an unknown projection or loss.
    """

    heads: int = 4
    blocks: int = 1
    projection: str = "lora"
    rank: int = 32
    loss: str = "kl"
    depth_decay: float = 0.8
    draft_vocab: int | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "blocks", "rank"):
            whole(name, getattr(self, name))
        one_of("projection", self.projection, ("lora", "full"))
        check_draft_vocab(self.draft_vocab, self.loss)
        above_zero(self, "drafter", "depth_decay")


class Medusa(Reduced):
    """K heads on a frozen target. Parameters: blocks K*L*(H*H + H); projection "lora" K*rank*(H + V), "full" K*H*V; of
    a draft vocabulary, its size in place of V."""

    config: MedusaConfig
    blocks: Tensor
    biases: Tensor
    narrow: Tensor  # of LoRA; of `full`, the whole projection
    wide: Tensor

    def __init__(self, target: Target, config: MedusaConfig) -> None:
        super().__init__(target, config, config.heads, config.draft_vocab)
        heads, hidden, device = config.heads, target.hidden_size, target.device
        dtype = training_dtype(target.dtype)
        # Zero blocks: every head starts as the target's own next-token prediction.
        self.weight = nn.Parameter(torch.zeros(config.blocks, heads, hidden, hidden, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(config.blocks, heads, 1, hidden, device=device, dtype=dtype))
        self.shared: SharedHeads | None = None
        if config.projection == "lora":
            self.shared = SharedHeads(target, heads, config.rank, dtype, config.draft_vocab)
        else:
            check_width(target)
            self.view = view(target.lm_head)  # keeps a bias, should the target have one
            self.full = nn.Parameter(self.of_rows(self.view.weight.detach()).to(dtype).repeat(heads, 1, 1))
        self.compute_dtype = target.dtype
        pack(self, blocks=None, biases=None, narrow=None, wide=None)

    def of_rows(self, weight: Tensor) -> Tensor:
        """The draft vocabulary's rows of a weight [V, ...]."""
        return weight if self.vocabulary is None else weight[self.vocabulary]

    def drafts_only(self, ids: Tensor) -> None:
        super().drafts_only(ids)
        if self.shared is None:
            self.full.data.copy_(self.of_rows(self.view.weight.detach()))
        else:
            self.shared.select(ids)

    def _weights(self) -> tuple[Tensor, ...]:
        """Block weights [L, K, H, H], biases [L, K, 1, H]; then LoRA A [K, H, r] and B [K, r, V], or full [K, H, V]."""
        blocks = (self.weight.transpose(-1, -2), self.bias)
        if self.shared is None:
            return (*blocks, self.full.transpose(1, 2))
        return (*blocks, *self.shared.weights())

    def prepare(self, mode: bool) -> None:
        """The weights of all heads are stacked once for decoding: [out, in] in memory, as the target's are."""
        super().prepare(mode)
        if self.shared is not None and self.vocabulary is not None:
            self.shared.select(self.vocabulary)
        weights = () if mode else [w.detach().to(self.compute_dtype) for w in self._weights()]
        pack(self, **dict(zip_longest(("blocks", "biases", "narrow", "wide"), weights)))

    def forward(self, hidden: Tensor, heads: int | None = None) -> Tensor:
        """Logits [K, n, V] of the first `heads` heads for hidden states [n, H] (post-norm, as lm_head reads them)."""
        heads = heads or self.depth
        weights = self._weights() if self.training else (self.blocks, self.biases, self.narrow, self.wide)
        x = hidden.expand(heads, -1, -1)  # [K, n, H]
        for weight, bias in zip(weights[0], weights[1], strict=True):
            x = x + F.silu(torch.baddbmm(bias[:heads].to(x.dtype), x, weight[:heads].to(x.dtype)))
        if self.shared is None:
            logits = x @ weights[2][:heads].to(x.dtype)
            bias_row: Tensor | None = self.view.bias
            return logits if bias_row is None else logits + self.of_rows(bias_row)
        projected: Tensor = self.shared(x, *weights[2:4])
        return projected

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        rows, n = len(batch.tokens), batch.tokens.shape[1] - 1 - self.depth  # positions where every head has a target
        draft = self(batch.hidden[:, :n].flatten(0, 1)).unflatten(1, (rows, n))  # [K, B, n, V]
        return draft_loss(self.config.loss, draft.unbind(0), batch, self.config.depth_decay, self.vocabulary)

    def scores(self, sample: Sample, at: Tensor) -> Tensor:
        return self.of_all(self(sample.hidden[at].to(self.compute_dtype)))

    def session(self, target: Target, rows: int) -> Session:
        return StaticTreeSession(self)
