"""EAGLE-3 (arXiv 2503.01840): draft layers that serving engines load, beside the frozen target.

Embeddings and, by default, lm_head are the target's own as views; the rest are plain modules, so that
`selfspec export` can write them as vLLM, SGLang and TensorRT-LLM read them. See `parts.eagle3_layer` for what a layer
computes, and `parts.unrolled` for how it is trained and drafts.

P-EAGLE (arXiv 2602.01469) drafts all depths in one pass, with masks in place of drafted tokens. Behind the root's entry
come masks, a token and features that are learned, each reading the text and the masks before it. Rows do not know which
tokens were drafted before them, so all nodes of a depth have the same children's scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec.core.contract import Session
from selfspec.core.masks import additive, restarting
from selfspec.core.pass_cache import TextCache
from selfspec.core.target import Target
from selfspec.core.tree import chain
from selfspec.drafters.base import Batch, Sample, training_dtype
from selfspec.drafters.parts.draft_layers import LayersCache, read
from selfspec.drafters.parts.eagle3_layer import Eagle3Layer, LayersConfig
from selfspec.drafters.parts.expansion import Growth, Nodes, Ranking, grow
from selfspec.drafters.parts.feature_cache import DraftSession, PendingRows
from selfspec.drafters.parts.feature_layer import DraftView, layers_of, usual_layers
from selfspec.drafters.parts.losses import draft_loss, random_hosts
from selfspec.drafters.parts.unrolled import Unrolled
from selfspec.drafters.parts.vocabulary import Reduced, check_head


@dataclass
class Eagle3Config(LayersConfig):
    """As `UnrolledConfig` (layers None: the three that serving engines read by default, 1, n/2 - 1 and n - 4; where the
    target is too short for these, 1, n/2 and n - 2). head: shared, the target's lm_head, or own, trained; embeddings:
    shared, the target's, or own, trained; llama: what the layer has other than the target's last, by the names of
    transformers' LlamaConfig: intermediate_size, num_attention_heads, num_key_value_heads, head_dim, attention_bias,
    rms_norm_eps, rope_parameters, max_position_embeddings.

    norm_before_residual: the residual is the normed state (vLLM alone reads this); norm_before_fc: one norm over all
    features; fc_norm: one for each; norm_output: the next step reads the output behind the final norm; qk_norm: queries
    and keys have norms, as Qwen3's; stack: layers, one behind the other.

    parallel: all depths are drafted in one pass, as P-EAGLE does; nothing is unrolled then. mask_token: what its masks
    are embedded as (None: the last token); anchors: chains of masks per row of a batch in training.
    """


class Eagle3(Unrolled):
    """EAGLE-3 layers. Parameters: see `Eagle3Layer`."""

    config: Eagle3Config
    layer: Eagle3Layer

    def __init__(self, target: Target, config: Eagle3Config) -> None:
        super().__init__(target, config)
        self.reads = layers_of(config.layers, target, usual_layers(target))
        own = config.head == "own"
        rows = config.draft_vocab if own and config.draft_vocab is not None else target.vocab_size
        self.layer = Eagle3Layer(target, self.reads, config, rows, training_dtype(target.dtype))
        self.layer.start_head(torch.arange(rows, device=target.device))
        if not own:
            check_head(self.layer.tail, self.head, config.draft_vocab)

    def drafts_only(self, ids: Tensor) -> None:
        super().drafts_only(ids)
        self.layer.start_head(ids)

    def along(
        self, tokens: Tensor, features: dict[int, Tensor], hosts: Tensor, documents: Tensor | None = None
    ) -> Tensor:
        """Logits [B, A, depth, V'] of the drafts behind entries `hosts`, int64 [B, A], of whole texts: tokens int64 [B,
        S], features [B, S, H] by layer. documents: int64 [B, S], see `Batch`."""
        n, (rows, count), more, layer = tokens.shape[1] - 1, hosts.shape, self.depth - 1, self.layer
        states = layer.fused(layer.stacked({i: part[:, :n] for i, part in features.items()}))
        after, device = tokens[:, 1:], tokens.device
        at = torch.arange(n, device=device)
        documents = torch.zeros_like(after) if documents is None else documents[:, :n]
        places, cache = restarting(documents), TextCache(layer.tail.layer + 1, kept=True)
        seen = (at[:, None] >= at) & (documents[:, :, None] == documents[:, None])
        mask = additive(seen, layer.tail.dtype)[:, None]
        out = layer.tail.text(
            layer.entry(states, after), after, True, False, cache=cache, masks=mask, positions=places
        ).hidden
        hidden = out.gather(1, hosts[:, :, None].expand(-1, -1, out.shape[-1]))[:, :, None]
        if more:
            text = seen.gather(1, hosts[:, :, None].expand(-1, -1, n)).repeat_interleave(more, 1)
            own = torch.block_diag(*[torch.ones(more, more, device=device).tril()] * count).bool()
            mask = additive(torch.cat([text, own.expand(rows, -1, -1)], 2), layer.tail.dtype)[:, None]
            behind = (places.gather(1, hosts)[:, :, None] + torch.arange(1, more + 1, device=device)).flatten(1)
            states, masks = layer.masks(rows, count * more)
            out = layer.tail.text(
                layer.entry(states, masks), masks, True, False, cache=cache, masks=mask, positions=behind
            ).hidden
            hidden = torch.cat([hidden, out.unflatten(1, (count, more))], 2)
        few = self.rows_of(self.head)
        weight = self.head.weight if few is None else few
        return F.linear(hidden.to(weight.dtype), weight, self.head.bias)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        if not config.parallel:
            return super().loss(batch)
        hosts = random_hosts(batch, self.depth, config.anchors)
        logits = self.along(batch.tokens, batch.features, hosts, batch.documents)
        return draft_loss(config.loss, logits.unbind(2), batch, config.depth_decay, self.vocabulary, hosts)

    def counts(self, batch: Batch) -> Tensor:
        return Reduced.counts(self, batch) if self.config.parallel else super().counts(batch)

    def scores(self, sample: Sample, at: Tensor) -> Tensor:
        if not self.config.parallel:
            return super().scores(sample, at)
        features = {layer: part[None].to(self.layer.tail.dtype) for layer, part in sample.features.items()}
        logits = self.along(sample.tokens[None].to(self.layer.device), features, at[None].to(self.layer.device))
        return self.of_all(logits[0].transpose(0, 1))

    def session(self, target: Target, rows: int) -> Session:
        if not self.config.parallel:
            return super().session(target, rows)
        more = (), self.config.depth, self.draft_head is None
        return DraftSession(self, LayersCache([self.layer]), parallel_tree, *more)


def forecast(drafter: Eagle3, pending: PendingRows[tuple[DraftView, ...]]) -> Tensor:
    """Logits [B, depth, V'] of all depths, from what the layers read up to each root."""
    draft_head, layer = drafter.draft_head, drafter.layer
    (root,) = read([layer], pending, draft_head is None)
    logits, hidden = root.logits, root.hidden
    if drafter.depth > 1:
        states, masks = layer.masks(len(hidden), drafter.depth - 1)
        more, behind, _ = layer.step(root, states, chain(masks), drafter.depth - 1)
        hidden = torch.cat([hidden, behind], 1)
        logits = None if logits is None or more is None else torch.cat([logits, more], 1)
    scores = logits if draft_head is None else F.linear(hidden, draft_head)
    assert scores is not None
    return scores


def parallel_tree(
    drafter: Eagle3, growth: Growth, ranking: Ranking, pending: PendingRows[tuple[DraftView, ...]]
) -> Nodes:
    """A tree behind roots, from what the layers read up to there; see `drafted_by`."""
    scores, vocabulary = forecast(drafter, pending), drafter.vocabulary
    ids = None if vocabulary is None else vocabulary.expand(len(scores), -1)

    def step(growth: Growth, d: int) -> tuple[Tensor, Tensor | None]:
        return scores[:, d, None].expand(-1, growth.frontier.shape[1], -1), ids

    return grow(growth, step, drafter.depth, ranking).best()
