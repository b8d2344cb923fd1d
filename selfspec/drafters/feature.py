"""Feature head: one decoder layer over the target's features and the embedding of the token that followed.

Sources: EAGLE (arXiv 2401.15077: autoregression on features), EAGLE-2 (arXiv 2406.16858: trees grown by confidence),
EAGLE-3 (arXiv 2503.01840: low, middle and high features fused, training on the head's own outputs, a reduced draft
vocabulary).

The layer is a view of the target's last decoder layer, with LoRA or trained in full; final norm and lm_head are views
as they are. Entry t of the layer's own cache reads the target's features at position t and token t + 1. Behind the last
verified token the layer's own output takes the features' place; such entries are dropped after every pass and written
anew from verified features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from selfspec.cache import additive
from selfspec.drafters.base import Drafter, Sample, number, one_of, training_dtype, whole
from selfspec.drafting import Growth, measure_along, perturbed
from selfspec.features import FeatureLayer, Reader
from selfspec.generate import Accepted, Context
from selfspec.options import integer
from selfspec.target import Target
from selfspec.training.losses import KINDS, distance, masked_mean
from selfspec.tree import DraftTree, chain


class Feature(Drafter):
    """One decoder layer that continues the target's features.

    Parameters: F*H*H + 2*H*H for F features, and those of the layer, or of its LoRA.
    """

    kind = "feature"

    def __init__(
        self,
        target: Target,
        layers: Sequence[int] | None = None,
        train: str = "full",
        rank: int = 64,
        unroll: int = 3,
        depth: int = 5,
        width: int = 4,
        least: float = 0.2,
        vocabulary: int | None = None,
        loss: str = "kl",
        depth_decay: float = 0.8,
    ) -> None:
        """layers: whose outputs are the features (by default one low, one in the middle, the last); train: the layer in
        full, or lora with `rank`; unroll: steps of training, each on the outputs of the one before; depth: of the
        tree at most; width: nodes expanded per depth at most; least: a node with less chance than this to be on the
        accepted path is not expanded, and drafting ends where there is none; vocabulary: how many tokens can be
        drafted, the most frequent of the training text (None: all); loss: kl or ce; depth_decay: weight of each
        step's loss relative to the one before.

        Raises ValueError for a layer that does not exist and other values outside their range.
        """
        super().__init__()
        last = target.n_layers - 1
        if not isinstance(layers, (list, tuple, type(None))):
            raise ValueError(f"drafter.layers={layers!r} must be a list of layers, or null")
        layers = sorted({min(1, last), target.n_layers // 2, last}) if layers is None else list(layers)
        if not layers or len(set(layers)) < len(layers):
            raise ValueError(f"drafter.layers={layers} must name at least one layer, each once")
        for layer in layers:
            if not 0 <= integer("drafter.layers: layer", layer) <= last:
                raise ValueError(f"drafter.layers={layers}: the target has no layer {layer}, only 0 to {last}")
        layers.sort()
        one_of("train", train, ("full", "lora"))
        for name, value in (("rank", rank), ("unroll", unroll), ("depth", depth), ("width", width)):
            whole(name, value)
        number("least", least, 0, 1)
        if vocabulary is not None:
            whole("vocabulary", vocabulary, 1, target.vocab_size, ": the target has no more tokens")
        one_of("loss", loss, KINDS)
        if loss == "ce" and vocabulary is not None:
            raise ValueError("drafter.loss='ce' needs the whole vocabulary; take 'kl' or drafter.vocabulary=null")
        number("depth_decay", depth_decay, 0, math.inf)
        self.shape: dict[str, Any] = {"layers": layers, "train": train, "rank": rank, "unroll": unroll, "depth": depth}
        self.shape |= {"width": width, "least": least, "vocabulary": vocabulary}
        self.shape |= {"loss": loss, "depth_decay": depth_decay}
        self.features, self.unroll, self.depth, self.width, self.least = tuple(layers), unroll, depth, width, least
        self.loss_kind, self.depth_decay = loss, depth_decay
        self.shortest, self.whole_layers = unroll + 2, train == "full"
        self.layer = FeatureLayer(target, layers, rank, train == "full", training_dtype(target.dtype))
        self.head: nn.Linear = self.layer.tail.parts[1]  # type: ignore[assignment]
        if vocabulary is not None:
            self.vocabulary = torch.arange(vocabulary, device=target.device)
            self._check_head()
        # measured[kind][d]: the factor on scores at depth d + 1 that makes their softmax the best forecast
        self.measured = {kind: [[1.0] for _ in range(depth)] for kind in ("greedy", "sampled")}
        self._few: Tensor | None = None  # lm_head's rows of a reduced vocabulary
        self._reader: Reader | None = None

    @torch.no_grad()
    def _check_head(self) -> None:
        """Raises ValueError for a model that does more than one product with what a reduced vocabulary reads."""
        hidden = torch.randn(1, 2, self.head.in_features).to(self.head.weight)
        plain = torch.zeros(1, 2, dtype=torch.long, device=hidden.device)
        out = self.layer.tail.text(hidden, plain, block=False)
        assert out.logits is not None
        if not torch.allclose(out.logits.float(), F.linear(out.hidden, self.head.weight).float(), rtol=0.02, atol=0.02):
            raise ValueError(
                f"drafter.vocabulary={self.shape['vocabulary']}: the target scales, caps or shifts its logits, which a "
                "reduced draft vocabulary does not; take drafter.vocabulary=null"
            )

    @staticmethod
    def parameter_count(target: Target, layers: Sequence[int], train: str = "full", rank: int = 64, **_: Any) -> int:
        """Trained parameters of this shape."""
        return FeatureLayer.parameter_count(target, len(layers), rank, train == "full")

    def products(self) -> list[nn.Module]:
        return self.layer.tail.products()

    def train(self, mode: bool = True) -> Feature:
        """Leaving training mode makes the weights ready for decoding, in the target's dtype.

        Raises ValueError for a map of the draft vocabulary that names a token twice or one that does not exist.
        """
        super().train(mode)
        self._few = None
        if not mode and (ids := self.vocabulary) is not None:
            if len(ids.unique()) < len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < self.head.out_features:
                raise ValueError(
                    f"the map of the draft vocabulary must name {len(ids)} different tokens between 0 and "
                    f"{self.head.out_features - 1}; it names {len(ids.unique())}, from {int(ids.min())} to "
                    f"{int(ids.max())}"
                )
            self._few = self.head.weight[ids]
        return self

    def unrolled(self, tokens: Tensor, features: dict[int, Tensor], steps: int) -> list[Tensor]:
        """Logits [B, S - 1, V] of every step over whole texts, tokens int64 [B, S], features [B, S, H] by layer.

        Index t of step s forecasts token t + 2 with the layer's own outputs in place of the last s features; it holds
        for t >= s. An entry sees what it would see in decoding: verified entries up to t - s, then s - 1 drafted ones
        and itself (EAGLE-3's training-time test), which is attention over a tree.
        """
        n = tokens.shape[1] - 1
        states = self.layer.fused({layer: part[:, :n] for layer, part in features.items()})
        at = torch.arange(n, device=tokens.device)
        cache, result = DynamicCache(), []
        for step in range(steps):
            behind = at[:, None] - at  # how far before a position another is
            # verified entries, then one block for each step, this one the last
            seen = torch.cat([behind >= step, *(behind == step - j for j in range(1, step + 1))], 1)
            far = torch.cat([behind] * (step + 1), 1)
            mask = self.layer.tail.inner.per_kind(partial(self._mask, seen, far))
            out = self.layer.text(
                states,
                tokens[:, 1:],
                attention_mask=mask,
                position_ids=at[None],
                past_key_values=cache,
                use_cache=True,
            )
            assert out.logits is not None
            result.append(out.logits)
            states = F.pad(out.features[self.layer.tail.layer][:, :-1], (0, 0, 1, 0))
        return result

    def _mask(self, seen: Tensor, far: Tensor, window: int | None) -> Tensor:
        seen = seen if window is None else seen & (far < window)
        return additive(seen, self.layer.tail.dtype)[None, None]

    # -- decoding

    def propose(self, context: Context) -> DraftTree:
        reader = self._reader
        if reader is None or not reader.ready or context.nodes == 1:  # one-token prompts: nothing was seen of a row yet
            return chain(context.roots[:, None])
        scores, hidden, states = reader.read(context, self._few is None)
        sharpness = self.measured["greedy" if context.noise is None else "sampled"]
        growth = Growth(context.roots, context.nodes, self.width, self.least)
        ids = None if self.vocabulary is None else self.vocabulary.expand(len(states), -1)
        if context.noise is not None:
            noise = context.noise.ahead([n + 1 for n in context.lengths], self.depth + 1)
            noise = noise if self.vocabulary is None else noise[:, :, self.vocabulary]
        for d in range(self.depth):
            if self._few is not None:
                scores = F.linear(hidden, self._few)
            assert scores is not None
            if context.noise is not None:
                scores = perturbed(scores, noise[:, d, None], context.temperature)
            before = growth.frontier[0, 0]
            growth.extend(scores * sharpness[d][0], ids)
            if d + 1 == self.depth or not growth.frontier.shape[1]:
                break
            stem = growth.stem()
            above = (growth.parents.gather(1, growth.frontier) - before)[:, :, None]
            states = states.gather(1, above.expand(-1, -1, states.shape[-1]))
            tree = DraftTree(stem.tokens[:, 1:], stem.parents[:, 1:] - 1)  # the root's entry is kept already
            wide = growth.frontier.shape[1]
            ran = tree.tokens.shape[1] - wide
            out = reader.step(states, tree.tokens[:, -wide:], tree, ran, self._few is None)
            scores, hidden, states = out.logits, out.hidden, out.features[self.layer.tail.layer]
        return growth.tree()

    def observe(self, accepted: Accepted) -> None:
        if self._reader is None:
            self._reader = Reader(self.layer)
        self._reader.observe(accepted)

    # -- training

    def loss(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, logits, n = batch["tokens"], batch["logits"], batch["tokens"].shape[1] - 2
        means = []
        for step, draft in enumerate(self.unrolled(tokens, batch["features"], self.unroll)):
            guess, wanted, mask = draft[:, step:n], logits[:, step + 1 : n + 1], batch["mask"][:, step + 2 :]
            if self.vocabulary is not None:
                mask = mask & torch.isin(wanted.argmax(-1), self.vocabulary)
                guess, wanted = guess[..., self.vocabulary], wanted[..., self.vocabulary]
            losses = distance(self.loss_kind, guess, wanted, tokens[:, step + 2 :])
            means.append(masked_mean(losses[None], mask[None])[0])
        means_ = torch.stack(means)
        weights = self.depth_decay ** torch.arange(self.unroll, device=means_.device)
        return (means_ * weights).sum() / weights.sum(), {self.loss_kind: means_.detach()}

    @torch.no_grad()
    def measure(self, kind: str, samples: Sequence[Sample]) -> dict[str, Any]:
        def scores(sample: Sample, at: Tensor) -> Tensor:
            features = {layer: part[None].to(self.layer.tail.dtype) for layer, part in sample.features.items()}
            logits = self.unrolled(sample.tokens[None].to(self.head.weight.device), features, self.depth)
            found = torch.stack([step[0, at + d] for d, step in enumerate(logits)])
            if self.vocabulary is None:
                return found
            none = torch.full_like(found, -torch.inf)
            return none.index_copy(2, self.vocabulary, found[..., self.vocabulary])

        _, sharpness, figures = measure_along(samples, self.depth, scores)
        self.measured[kind] = [[factor] for factor in sharpness]
        return figures

    # -- on disk

    def adapters(self) -> dict[str, nn.Module]:
        return self.layer.tail.adapters()

    def own_state(self) -> dict[str, Tensor]:
        return self.layer.state() | ({} if self.vocabulary is None else {"vocabulary": self.vocabulary})
