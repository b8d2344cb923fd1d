"""A block of tokens from one pass of a small stack over the target's features.

DFlash (arXiv 2602.06036): the last token and masks read the text's features in every layer, and each other; each row
predicts the token at its own place. DSpark (arXiv 2607.05147): each row predicts the next one, and the parent token
corrects it at low rank. Both are configurations of this drafter. Apart from that correction its rows do not know which
tokens were drafted before them. Trees over them are grown best first, ranked by the target's noise; published code
drafts one chain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.core.contract import Accepted, Context
from selfspec.core.masks import additive, restarting
from selfspec.core.pass_cache import KV, TextCache, pass_cache
from selfspec.core.support import view
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain, trusted
from selfspec.drafters.base import Batch, DrafterConfig, Sample, one_of, pack, positive, share, training_dtype, whole
from selfspec.drafters.parts.block_stack import BlockCache, BlockStack, FeatureStack, read_text
from selfspec.drafters.parts.expansion import Growth, Nodes, Ranking, grow
from selfspec.drafters.parts.feature_layer import PendingRows, check_layers, layers_of, usual_layers
from selfspec.drafters.parts.llama_config import layer_config
from selfspec.drafters.parts.losses import hosts_loss, random_hosts
from selfspec.drafters.parts.tree_function import drafted_by
from selfspec.drafters.parts.vocabulary import Reduced, check_draft_vocab


@dataclass
class BlockConfig(DrafterConfig):
    """layers: whose outputs are the features (None: three, low, in the middle and high); stack: decoder layers; size:
    rows of a block, the last token's included; predicts: own, a row's token is at its own place (DFlash), or next
    (DSpark); causal: whether a row reads only those before it; correction: rank of the parent token's correction, 0 for
    none; width: nodes expanded per depth at most; min_prob: a node with less path probability is not expanded; anchors:
    blocks per row of a batch in training; loss: see `losses.distance`; depth_decay: weight of each depth's loss
    relative to the one before; draft_vocab: how many tokens can be drafted, the most frequent of the training text
    (None: all); llama: what the layers have of their own, see `Eagle3Config`.

    Raises ValueError for values outside their range.
    """

    layers: list[int] | None = None
    stack: int = 2
    size: int = 8
    predicts: str = "next"
    causal: bool = False
    correction: int = 64
    width: int = 4
    min_prob: float = 0.05
    anchors: int = 32
    loss: str = "kl"
    depth_decay: float = 0.8
    draft_vocab: int | None = None
    llama: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_layers(self.layers)
        one_of("predicts", self.predicts, ("own", "next"))
        one_of("causal", self.causal, (True, False))
        for name in ("stack", "width", "anchors"):
            whole(name, getattr(self, name))
        least = 2 if self.predicts == "own" else 1
        whole("size", self.size, least, 64, " (the root's row predicts nothing)" if least == 2 else "")
        whole("correction", self.correction, 0, 4096, " (0: none)")  # published ranks: 256
        share("min_prob", self.min_prob)
        check_draft_vocab(self.draft_vocab, self.loss)
        positive("depth_decay", self.depth_decay)

    @property
    def depth(self) -> int:
        """Tokens that a block drafts."""
        return self.size - 1 if self.predicts == "own" else self.size


class BlockDrafter(Reduced):
    """A stack that drafts a block.

    Parameters: those of `BlockStack`, and 2 * V * correction; of a draft vocabulary, V * correction and its size's.
    """

    config: BlockConfig
    parent_factors: Tensor | None
    child_factors: Tensor | None

    def __init__(self, target: Target, config: BlockConfig) -> None:
        super().__init__(target, config, config.depth, config.draft_vocab)
        dtype = training_dtype(target.dtype)
        self.reads = layers_of(config.layers, target, usual_layers(target))
        if config.draft_vocab is not None and target.lm_head.bias is not None:
            raise ValueError("drafter.draft_vocab: the target's lm_head has a bias; take drafter.draft_vocab=null")
        shape = layer_config(target, config.llama, target.vocab_size)
        self.stack = FeatureStack(target, self.reads, shape, config.stack, dtype)
        self.corrections = nn.ParameterList()  # of parents, and of the tokens behind them
        if config.correction:
            of_parents = torch.randn(target.vocab_size, config.correction) * config.correction**-0.5
            parts = of_parents, torch.zeros(config.draft_vocab or target.vocab_size, config.correction)
            self.corrections.extend([part.to(target.device, dtype) for part in parts])
        pack(self, parent_factors=None, child_factors=None)
        self.embedding = nn.Parameter(target.model.get_input_embeddings().weight, requires_grad=False)
        self.target_head = view(target.lm_head)

    @property
    def head(self) -> nn.Linear:
        """The target's lm_head."""
        return self.target_head

    def train(self, mode: bool = True) -> BlockDrafter:
        """Leaving training mode makes the weights ready for decoding, in the target's dtype. Raises ValueError as
        `check_vocabulary`."""
        super().train(mode)
        self.pack_head(self.head, mode)
        ready = [None if mode else part.detach().to(self.stack.dtype) for part in self.corrections] or [None, None]
        pack(self, parent_factors=ready[0], child_factors=ready[1])
        return self

    def entering(self, roots: Tensor, mask: Tensor) -> Tensor:
        """What enters the stack, [..., size, H], behind roots int64 [...]."""
        first = F.embedding(roots.to(self.embedding.device), self.embedding)[..., None, :].to(mask.dtype)
        return torch.cat([first, mask.expand(*first.shape[:-2], self.config.size - 1, -1)], -2)

    def below(self, device: torch.device) -> Tensor:
        """bool [size, size]: which rows of its block a row reads."""
        whole = torch.ones(self.config.size, self.config.size, dtype=torch.bool, device=device)
        return whole.tril() if self.config.causal else whole

    def forecasts(self, hidden: Tensor) -> Tensor:
        """Logits [..., depth, V'] of all depths, from outputs [..., size, H] of the stack, before any correction."""
        rows = hidden[..., self.config.size - self.depth :, :]
        few = self.rows_of(self.head) if self.draft_head is None else self.draft_head
        if few is not None:
            return F.linear(rows.to(few.dtype), few)
        return self.head(rows.to(self.head.weight.dtype))  # type: ignore[no-any-return]

    def corrected(self, logits: Tensor, parents: Tensor) -> Tensor:
        """Logits [..., V'] with what the parent tokens, int64 [...], say."""
        if not self.corrections:
            return logits
        of_parents, of_children = self.parent_factors, self.child_factors
        if of_parents is None or of_children is None:
            of_parents, of_children = self.corrections
        return logits + F.linear(F.embedding(parents.to(of_parents.device), of_parents), of_children).to(logits.dtype)

    def along(self, tokens: Tensor, anchors: Tensor, stacked: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits [B, A, depth, V'] of blocks whose roots are at positions `anchors`, int64 [B, A], of whole texts,
        tokens int64 [B, S], features [B, S, F*H]; not corrected. documents: int64 [B, S], see `Batch`."""
        size, stack = self.config.size, self.stack.trained_stack
        rows, count, length = *anchors.shape, tokens.shape[1]
        device = stacked.device
        order = torch.arange(length, device=device)
        read = order.expand(rows, -1) if documents is None else restarting(documents)
        cache = TextCache(self.stack.count, kept=True)
        stack.read(stacked, read, cache)
        text = order < anchors[:, :, None]  # [B, A, S]
        if documents is not None:
            text = text & (documents.gather(1, anchors)[:, :, None] == documents[:, None])
        same = torch.eye(count, dtype=torch.bool, device=device)[:, None, :, None] & self.below(device)[None, :, None]
        seen = torch.cat([text.repeat_interleave(size, 1), same.flatten(2).flatten(0, 1).expand(rows, -1, -1)], 2)
        places = (read.gather(1, anchors)[:, :, None] + torch.arange(size, device=device)).flatten(1)
        entering = self.entering(tokens.gather(1, anchors), stack.mask).flatten(1, 2)
        hidden = stack(entering, places.clamp(max=self.stack.last), additive(seen, entering.dtype)[:, None], cache)
        return self.forecasts(hidden.unflatten(1, (count, size)))

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        hosts = random_hosts(batch, self.depth, config.anchors)
        logits = self.along(batch.tokens, hosts + 1, self.stack.stacked(batch.features), batch.documents)

        def draft(d: int, parents: Tensor) -> Tensor:
            return self.corrected(logits[:, :, d], parents)

        return hosts_loss(config.loss, draft, batch, hosts, self.depth, config.depth_decay, self.vocabulary)

    def scores(self, sample: Sample, at: Tensor) -> Tensor:
        tokens, device = sample.tokens[None].to(self.stack.device), self.stack.device
        stacked = self.stack.stacked(sample.features)[None].to(self.stack.trained_stack.fc.weight.dtype)
        at = at.to(device)
        logits = self.along(tokens, at[None] + 1, stacked)[0]  # [n, depth, V']
        return self.of_all(
            torch.stack([self.corrected(logits[:, d], tokens[0, at + 1 + d]) for d in range(self.depth)])
        )

    def session(self, target: Target, rows: int) -> BlockSession:
        return BlockSession(self)


def forecast(drafter: BlockDrafter, roots: Tensor, stack: BlockStack, pending: PendingRows[KV]) -> Tensor:
    """Logits [B, depth, V'] of a block behind roots, int64 [B], from the features up to there; not corrected."""
    size, last, stacked = drafter.config.size, drafter.stack.last, pending.stacked
    kv = read_text(stack, pending.layers, stacked, last).committed(pending.last + 1)
    entries = kv.lengths[:, None] + torch.arange(size, device=stacked.device)
    inside = torch.arange(kv.size, device=stacked.device) - kv.lengths[:, None]  # [B, S]: row of the block
    block = drafter.below(stacked.device)[:, inside.clamp(0, size - 1)].transpose(0, 1)  # [B, size, S]
    seen = (inside < 0)[:, None] | (block & ((inside >= 0) & (inside < size))[:, None])
    entering = drafter.entering(roots, stack.mask)
    cache = pass_cache(kv, entries, None, None)
    return drafter.forecasts(stack(entering, entries.clamp(max=last), additive(seen, entering.dtype)[:, None], cache))


def tree_of(
    drafter: BlockDrafter, growth: Growth, ranking: Ranking, stack: BlockStack, pending: PendingRows[KV]
) -> Nodes:
    """A tree behind roots, from the features up to there; see `drafted_by`."""
    logits, vocabulary = forecast(drafter, growth.tokens[:, 0], stack, pending), drafter.vocabulary
    ids = None if vocabulary is None else vocabulary.expand(len(logits), -1)

    def step(growth: Growth, d: int) -> tuple[Tensor, Tensor | None]:
        parents = growth.tokens.gather(1, growth.frontier)  # [B, m]
        return drafter.corrected(logits[:, d, None].expand(-1, parents.shape[1], -1), parents), ids

    return grow(growth, step, drafter.depth, ranking).best()


class BlockSession:
    """What one call keeps: the stack's cache."""

    def __init__(self, drafter: BlockDrafter) -> None:
        self.drafter, self.cache = drafter, BlockCache(drafter.stack)

    def propose(self, context: Context) -> DraftTree:
        drafter, config = self.drafter, self.drafter.config
        if not self.cache.ready or context.nodes == 1:  # one-token prompts: nothing was seen of a row yet
            return chain(context.roots[:, None])
        pending = self.cache.rows(context, False, drafter.depth, config.size)
        inputs = drafter.stack.ready, pending
        return trusted(*drafted_by(tree_of, drafter, context, inputs, config.width, config.min_prob))

    def observe(self, accepted: Accepted) -> None:
        self.cache.observe(accepted)
