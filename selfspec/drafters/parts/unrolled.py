"""Drafters of one decoder layer that continues the target's features, trained on its own outputs.

Sources: EAGLE (arXiv 2401.15077: autoregression on features), EAGLE-2 (arXiv 2406.16858: trees grown by confidence),
EAGLE-3 (arXiv 2503.01840: low, middle and high features fused, training on the layer's own outputs, a reduced draft
vocabulary).

Entry t of the layer's own cache reads the target's features at position t and token t + 1. Behind the last verified
token the layer's own output takes the features' place; such entries are dropped after every pass and written anew from
verified features.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.core.contract import Session
from selfspec.core.masks import additive, restarting
from selfspec.core.pass_cache import TextCache
from selfspec.core.target import Target
from selfspec.core.tree import trusted
from selfspec.drafters.base import Batch, DrafterConfig, Sample, whole
from selfspec.drafters.parts.draft_layers import LayersCache, carried_by, read
from selfspec.drafters.parts.expansion import Growth, Ranking, grow
from selfspec.drafters.parts.feature_cache import DraftSession, PendingRows
from selfspec.drafters.parts.feature_layer import DraftView, FeatureLayer, check_layers
from selfspec.drafters.parts.losses import counted_ahead, draft_loss
from selfspec.drafters.parts.vocabulary import Reduced, check_draft_vocab
from selfspec.utils.checks import above_zero, shares


@dataclass
class UnrolledConfig(DrafterConfig):
    """layers: whose outputs are the features (None: chosen for the target); unroll: steps of training, each on the
    outputs of the one before; depth: of the tree at most; width: nodes expanded per depth at most; min_prob: a node
    with less path probability is not expanded, and drafting ends where there is no other; draft_vocab: how many tokens
    can be drafted, the most frequent of the training text (None: all); loss: kl, ce, ce_tv, tv, lk, accept, or
    package.module.function; depth_decay: weight of each step's loss relative to the one before.

    Raises ValueError for values outside their range.
    """

    layers: list[int] | None = None
    unroll: int = 3
    depth: int = 5
    width: int = 4
    min_prob: float = 0.2
    draft_vocab: int | None = None
    loss: str = "kl"
    depth_decay: float = 0.8

    def __post_init__(self) -> None:
        check_layers(self.layers)
        for name in ("depth", "width"):
            whole(name, getattr(self, name))
        if not getattr(self, "parallel", False):
            whole("unroll", self.unroll, 1, self.depth, f": drafter.depth is {self.depth}")
        shares(self, "drafter", "min_prob", ends="[)")
        check_draft_vocab(self.draft_vocab, self.loss)
        above_zero(self, "drafter", "depth_decay")


class Unrolled(Reduced):
    """A drafter of one such layer, or of several in a row (`draft_layers`). layer: reads and continues features."""

    config: UnrolledConfig
    layer: FeatureLayer

    def __init__(self, target: Target, config: UnrolledConfig) -> None:
        super().__init__(target, config, config.depth, config.draft_vocab)

    @property
    def draft_layers(self) -> tuple[FeatureLayer, ...]:
        """Step 0 is the first's, step 1 the second's, and so on; the last is iterated."""
        return (self.layer,)

    @property
    def head(self) -> nn.Linear:
        return self.layer.head

    def unrolled(
        self, tokens: Tensor, features: dict[int, Tensor], steps: int, documents: Tensor | None = None
    ) -> list[Tensor]:
        """Logits [B, S - 1, V] of every step over whole texts, or [B, S - 1, V'] of a draft vocabulary; tokens int64
        [B, S], features [B, S, H] by layer.

        Index t of step s forecasts token t + 2 with the layer's own outputs in place of the last s features; it holds
        for t >= s. An entry sees what it would see in decoding: verified entries up to t - s, then s - 1 drafted ones
        and itself (EAGLE-3's training-time test), which is attention over a tree. With layers in a row that is so for
        the steps of the last; the others' entries see all of their own layer, which begin at entry s.
        """
        n, after = tokens.shape[1] - 1, tokens[:, 1:]
        states = self.layer.fused(self.layer.stacked({layer: part[:, :n] for layer, part in features.items()}))
        at = torch.arange(n, device=tokens.device)
        result: list[Tensor] = []
        few, own = self.rows_of(self.head), at[:, None] == at
        documents = None if documents is None else documents[:, :n]
        places = at[None] if documents is None else restarting(documents)
        for step in range(steps):
            which = min(step, len(self.draft_layers) - 1)
            layer, repeated = self.draft_layers[which], step - which
            if not repeated:
                cache = TextCache(layer.tail.layer + 1, kept=True)
            behind = at[:, None] - at  # how far before a position another is
            exists = (places[:, None] >= which) | own
            # verified entries, then one block for each step of the layer, this one the last
            blocks = [(behind >= repeated) & exists]
            blocks += [(behind == repeated - j).expand_as(exists) for j in range(1, repeated + 1)]
            seen = torch.cat(blocks, 2)
            far = torch.cat([behind] * (repeated + 1), 1)
            if documents is not None:
                seen = seen & (documents[:, :, None] == documents[:, None]).repeat(1, 1, repeated + 1)
            masks = layer.tail.target.per_type(partial(self._mask, seen, far))
            entering = layer.entry(states, after)
            out = layer.tail.text(entering, after, True, few is None, cache=cache, masks=masks, positions=places)
            logits = out.logits if few is None else F.linear(out.hidden.to(few.dtype), few)
            assert logits is not None
            result.append(logits)
            carried = layer.carried(out.features[layer.tail.layer], out.hidden)
            states = F.pad(carried[:, :-1], (0, 0, 1, 0))
        return result

    def _mask(self, seen: Tensor, far: Tensor, window: int | None) -> Tensor:
        seen = seen if window is None else seen & (far < window)
        return additive(seen, self.layer.tail.dtype)[:, None]

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        config, n = self.config, batch.tokens.shape[1] - 2
        steps = self.unrolled(batch.tokens, batch.features, config.unroll, batch.documents)
        guesses = (draft[:, step:n] for step, draft in enumerate(steps))
        return draft_loss(config.loss, guesses, batch, config.depth_decay, self.vocabulary)

    def counts(self, batch: Batch) -> Tensor:
        return torch.stack([mask.sum() for mask in counted_ahead(batch, self.config.unroll, self.vocabulary)])

    def scores(self, sample: Sample, at: Tensor) -> Tensor:
        features = {layer: part[None].to(self.layer.tail.dtype) for layer, part in sample.features.items()}
        logits = self.unrolled(sample.tokens[None].to(self.layer.device), features, self.depth)
        return self.of_all(torch.stack([step[0, at + d] for d, step in enumerate(logits)]))

    def depth_cost(self, target: Target) -> float:
        """What one more depth of a tree costs, in target passes: the numbers of weights that both read, as a ratio."""
        block = self.draft_layers[-1].tail
        drafting = block.target.layers[block.first : block.layer + 1]
        drafted = target.vocab_size if self.vocabulary is None else len(self.vocabulary)
        read = _weights(drafting) + drafted * target.hidden_size
        return read / (_weights(target.layers) + target.vocab_size * target.hidden_size)

    def session(self, target: Target, rows: int) -> Session:
        config, logits = self.config, self.draft_head is None
        entries, cost = config.depth * config.width, self.depth_cost(target)
        return DraftSession(self, LayersCache(self.draft_layers), layers_tree, (), entries, logits, cost)


def _weights(layers: Iterable[nn.Module]) -> int:
    return sum(p.numel() for layer in layers for p in layer.parameters())


def layers_tree(
    drafter: Unrolled, growth: Growth, ranking: Ranking, pending: PendingRows[tuple[DraftView, ...]]
) -> tuple[Tensor, ...]:
    """A tree behind roots, from what the layers read up to there, and what several carry on, [B, K - 1, H]; see
    `drafted_by`."""
    vocabulary, draft_head, layers = drafter.vocabulary, drafter.draft_head, drafter.draft_layers
    roots = read(layers, pending, draft_head is None)
    ids = None if vocabulary is None else vocabulary.expand(len(pending.last), -1)
    logits, hidden = roots[0].logits, roots[0].hidden
    states = roots[0].states  # [B, n, H]: of the root and the nodes, by the layer that ran last

    def step(growth: Growth, d: int) -> tuple[Tensor, Tensor | None]:
        nonlocal logits, hidden, states
        m = growth.frontier.shape[1]
        if d > 0:
            stem, k = growth.stem(), min(d, len(layers) - 1)
            tree = trusted(stem.tokens[:, 1:], stem.parents[:, 1:] - 1)  # the layers have read the root
            count = tree.tokens.shape[1] if d == k else m
            above = stem.parents[:, -count:, None].expand(-1, -1, states.shape[-1])
            logits, hidden, new = layers[k].step(roots[k], states.gather(1, above), tree, count)
            states = torch.cat([roots[k].states if d == k else states, new], 1)
        scores = logits if draft_head is None else F.linear(hidden, draft_head)
        assert scores is not None
        return scores[:, -m:], ids

    best = grow(growth, step, drafter.depth, ranking).best()
    return *best, carried_by(roots)
