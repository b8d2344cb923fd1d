"""EAGLE-3 (arXiv 2503.01840): draft layers that serving engines load, beside the frozen target.

Embeddings and, by default, lm_head are the target's own as views; the rest are plain modules, so that
`selfspec export` can write them as vLLM, SGLang and TensorRT-LLM read them. See `parts.eagle3_layer` for what a layer
computes, `parts.unrolled` for how it is trained and drafts, and `parts.parallel` for P-EAGLE (arXiv 2602.01469), which
drafts all depths in one pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec.core.contract import Session
from selfspec.core.target import Target
from selfspec.drafters.base import Batch, Sample, training_dtype
from selfspec.drafters.parts.draft_layers import LayersCache
from selfspec.drafters.parts.eagle3_layer import Eagle3Layer, LayersConfig
from selfspec.drafters.parts.feature_cache import DraftSession
from selfspec.drafters.parts.feature_layer import layers_of, usual_layers
from selfspec.drafters.parts.losses import draft_loss, random_hosts
from selfspec.drafters.parts.parallel import hidden_along, parallel_tree
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
        """Logits [B, A, depth, V'] of `hidden_along`."""
        hidden, few = hidden_along(self.layer, self.depth, tokens, features, hosts, documents), self.rows_of(self.head)
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
