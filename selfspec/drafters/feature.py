"""Feature head: one decoder layer over the target's features and the embedding of the token that followed.

Sources: EAGLE (arXiv 2401.15077: autoregression on features), EAGLE-2 (arXiv 2406.16858: trees grown by confidence),
EAGLE-3 (arXiv 2503.01840: low, middle and high features fused, training on the head's own outputs, a reduced draft
vocabulary).

The layer is a view of the target's last decoder layer, with LoRA or trained in full; final norm and lm_head are views as
they are. Entry t of the layer's own cache reads the target's features at position t and token t + 1. Behind the last
verified token the layer's own output takes the features' place; such entries are dropped after every pass and written
anew from verified features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from selfspec.cache import TreeCache, additive
from selfspec.drafters.base import Drafter, Sample, training_dtype
from selfspec.drafting import Growth, measure_along, perturbed
from selfspec.generate import PREFILL, Accepted, Context
from selfspec.target import Target
from selfspec.training.losses import KINDS, distance, masked_mean
from selfspec.tree import DraftTree, chain
from selfspec.views import Tail

_FEW = 16  # entries that are read together with the root's; more, as behind a prompt, are read without logits


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
        tree at most; width: nodes expanded per depth; least: drafting ends where the nodes to expand have less chance
        than this to be on the accepted path; vocabulary: how many tokens can be drafted, the most frequent of the
        training text (None: all); loss: kl or ce; depth_decay: weight of each step's loss relative to the one before.

        Raises ValueError for a layer that does not exist and other values outside their range.
        """
        super().__init__()
        last = target.n_layers - 1
        layers = sorted({min(1, last), target.n_layers // 2, last}) if layers is None else list(layers)
        if not layers or len(set(layers)) < len(layers):
            raise ValueError(f"drafter.layers={layers} must name at least one layer, each once")
        for layer in layers:
            if not 0 <= layer <= last:
                raise ValueError(f"drafter.layers={layers}: the target has no layer {layer}, only 0 to {last}")
        if train not in ("full", "lora"):
            raise ValueError(f"drafter.train={train!r} must be 'full' or 'lora'")
        for name, value in (("rank", rank), ("unroll", unroll), ("depth", depth), ("width", width)):
            if value < 1:
                raise ValueError(f"drafter.{name}={value} must be at least 1")
        if not 0 <= least < 1:
            raise ValueError(f"drafter.least={least} must lie in [0, 1)")
        if vocabulary is not None and not 1 <= vocabulary <= target.vocab_size:
            raise ValueError(f"drafter.vocabulary={vocabulary} must lie between 1 and the target's {target.vocab_size}")
        if loss not in KINDS:
            raise ValueError(f"drafter.loss={loss!r} must be one of {', '.join(KINDS)}")
        if loss == "ce" and vocabulary is not None:
            raise ValueError("drafter.loss='ce' needs the whole vocabulary; take 'kl' or drafter.vocabulary=null")
        if not depth_decay > 0:
            raise ValueError(f"drafter.depth_decay={depth_decay} must be above 0")
        self.shape: dict[str, Any] = {"layers": layers, "train": train, "rank": rank, "unroll": unroll, "depth": depth}
        self.shape |= {"width": width, "least": least, "vocabulary": vocabulary}
        self.shape |= {"loss": loss, "depth_decay": depth_decay}
        self.features, self.unroll, self.depth, self.width, self.least = tuple(layers), unroll, depth, width, least
        self.loss_kind, self.depth_decay, self.target_vocabulary = loss, depth_decay, target.vocab_size
        hidden, dtype = target.hidden_size, training_dtype(target.dtype)
        # At first the highest feature goes into the layer as it is.
        fuse = torch.zeros(len(layers), hidden, hidden, device=target.device, dtype=dtype)
        fuse[-1] = torch.eye(hidden)
        self.fuse = nn.Parameter(fuse.flatten(0, 1))
        self.mix = nn.Parameter(torch.zeros(2 * hidden, hidden, device=target.device, dtype=dtype))
        self.tail = Tail(target, 0 if train == "full" else rank, dtype, "feature", full=train == "full")
        self.embedding = nn.Parameter(target.model.get_input_embeddings().weight, requires_grad=False)
        self.head: nn.Linear = target.lm_head
        if vocabulary is not None:
            self.vocabulary = torch.arange(vocabulary, device=target.device)
        # measured[kind][d]: the factor on scores at depth d + 1 that makes their softmax the best forecast
        self.measured = {kind: [[1.0] for _ in range(depth)] for kind in ("greedy", "sampled")}
        self._fast: tuple[Tensor, Tensor] | None = None
        self._few: Tensor | None = None  # lm_head's rows of a reduced vocabulary
        self._cache: TreeCache | None = None
        self._pending: list[Tensor] = []  # per row [n, H]: fused features that the layer has not read yet

    @staticmethod
    def parameter_count(
        target: Target, layers: Sequence[int], train: str = "full", rank: int = 64, **_: Any
    ) -> int:
        """Trained parameters of this shape."""
        own = (len(layers) + 2) * target.hidden_size**2
        if train == "full":
            return own + sum(p.numel() for p in target.layers[-1].parameters())
        return own + rank * Tail.widths(target, head=False)

    def train(self, mode: bool = True) -> Feature:
        """Leaving training mode makes the weights ready for decoding, in the target's dtype.

        Raises ValueError for a map of the draft vocabulary that names a token twice or one that does not exist.
        """
        super().train(mode)
        self._fast = self._few = None
        if not mode:
            self._fast = (self.fuse.detach().to(self.tail.dtype), self.mix.detach().to(self.tail.dtype))
            if self.vocabulary is not None:
                ids = self.vocabulary
                if len(ids.unique()) < len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < self.target_vocabulary:
                    raise ValueError(
                        f"the map of the draft vocabulary must name {len(ids)} different tokens between 0 and "
                        f"{self.target_vocabulary - 1}; it names {len(ids.unique())}, from {int(ids.min())} to "
                        f"{int(ids.max())}"
                    )
                self._few = self.head.weight[ids]
        return self

    # -- the layer

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., H] of tokens, brought to unit root mean square."""
        return F.rms_norm(F.embedding(tokens, self.embedding), self.embedding.shape[-1:])

    def fused(self, features: dict[int, Tensor]) -> Tensor:
        """What stands for a position [..., H], from the outputs of the layers asked for."""
        parts = torch.cat([features[layer] for layer in self.features], -1)
        return parts @ (self.fuse if self._fast is None else self._fast[0]).to(parts.dtype)

    def entry(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The layer's input [..., H] from states [..., H] (fused features or its own output) and the tokens after."""
        mix = (self.mix if self._fast is None else self._fast[1]).to(states.dtype)
        both = torch.cat([F.rms_norm(states, states.shape[-1:]), self.embed(tokens).to(states.dtype)], -1)
        return states + both @ mix

    def forward(self, states: Tensor, tokens: Tensor, tree: DraftTree, ran: int, logits: bool = True) -> Any:
        """For decoding: logits [B, n, V or fewer] (or None) and outputs [B, n, H] of the nodes behind `ran`."""
        assert self._cache is not None
        whole = logits and self._few is None
        out = self.tail.step(self.entry(states, tokens), tree, self._cache, ran, whole)
        scores = F.linear(out.hidden, self._few) if logits and self._few is not None else out.logits
        return scores, out.features[self.tail.layer]

    def unrolled(self, tokens: Tensor, features: dict[int, Tensor], steps: int) -> list[Tensor]:
        """Logits [B, S - 1, V] of every step over whole texts, tokens int64 [B, S], features [B, S, H] by layer.

        Index t of step s forecasts token t + 2 with the layer's own outputs in place of the last s features; it holds
        for t >= s. An entry sees what it would see in decoding: verified entries up to t - s, then its own s - 1 drafted
        predecessors (EAGLE-3's training-time test), which is attention over a tree.
        """
        if self.tail.training and self.shape["train"] == "full" and self.fuse.dtype != self.tail.dtype:
            if not torch.is_autocast_enabled(tokens.device.type):
                raise ValueError(
                    f"a layer trained in full on a {self.tail.dtype} target needs loop.precision=bf16; or load the "
                    "target with target.dtype=float32"
                )
        n = tokens.shape[1] - 1
        states = self.fused({layer: part[:, :n] for layer, part in features.items()})
        at = torch.arange(n, device=tokens.device)
        cache, result = DynamicCache(), []
        for step in range(steps):
            behind = at[:, None] - at  # how far before a position another is
            # verified entries, then one block for each step, this one the last
            seen = torch.cat([behind >= step, *(behind == step - j for j in range(1, step + 1))], 1)
            far = torch.cat([behind] * (step + 1), 1)
            mask = self.tail.inner.per_kind(lambda window, s=seen, f=far: self._mask(s, f, window))
            logits, out = self.tail.text(
                self.entry(states, tokens[:, 1:]),
                tokens[:, 1:],
                attention_mask=mask,
                position_ids=at[None],
                past_key_values=cache,
                use_cache=True,
            )
            result.append(logits)
            states = F.pad(out[:, :-1], (0, 0, 1, 0))
        return result

    def _mask(self, seen: Tensor, far: Tensor, window: int | None) -> Tensor:
        seen = seen if window is None else seen & (far < window)
        return additive(seen, self.tail.dtype)[None, None]

    # -- decoding

    def propose(self, context: Context) -> DraftTree:
        count = [len(part) for part in self._pending]
        if not count or not min(count) or context.nodes == 1:  # one-token prompts: nothing was seen of a row yet
            return chain(context.roots[:, None])
        if self._cache is None:
            self._cache = self.tail.fast.cache(len(count), context.cache.capacity, context.cache.limit)
        while max(map(len, self._pending)) > _FEW:
            self._read(context, [min(PREFILL, len(part) - 1) for part in self._pending], False)
        scores, states = self._read(context, [len(part) for part in self._pending], True)
        sharpness = self.measured["greedy" if context.noise is None else "sampled"]
        growth = Growth(context.roots, context.nodes, self.width)
        for d in range(self.depth):
            if context.noise is not None:
                noise = context.noise.ahead([n + 1 for n in context.lengths], self.depth + 1)[:, d]
                if self.vocabulary is not None:
                    noise = noise[:, self.vocabulary]
                scores = perturbed(scores, noise[:, None], context.temperature)
            ids = None if self.vocabulary is None else self.vocabulary.expand(len(count), -1)
            before = growth.frontier[0, 0]
            growth.extend(scores * sharpness[d][0], ids)
            if d + 1 == self.depth or growth.hope() < self.least:
                break
            stem = growth.stem()
            above = (growth.parents.gather(1, growth.frontier) - before)[:, :, None]
            states = states.gather(1, above.expand(-1, -1, states.shape[-1]))
            tree = DraftTree(stem.tokens[:, 1:], stem.parents[:, 1:] - 1)  # the root's entry is kept already
            wide = growth.frontier.shape[1]
            scores, states = self(states, tree.tokens[:, -wide:], tree, tree.tokens.shape[1] - wide)
        return growth.tree()

    def _read(self, context: Context, count: list[int], logits: bool) -> tuple[Tensor, Tensor]:
        """Let the layer read the first `count` pending entries of every row for good; logits and outputs [B, 1, ...]
        at each row's last."""
        assert self._cache is not None
        states = self._pending[0].new_zeros(len(count), max(count), self._pending[0].shape[-1])
        tokens = torch.zeros(states.shape[:2], dtype=torch.long)
        for row, (part, n, first) in enumerate(zip(self._pending, count, self._cache.lengths, strict=True)):
            states[row, :n] = part[:n]
            tokens[row, :n] = torch.tensor(context.tokens[row][first + 1 : first + 1 + n])
        tokens = tokens.to(states.device)
        scores, out = self(states, tokens, chain(tokens), 0, logits)
        self._cache.keep([list(range(n)) for n in count])
        self._pending = [part[n:] for part, n in zip(self._pending, count, strict=True)]
        rows, last = torch.arange(len(count)), torch.tensor(count) - 1
        return (scores[rows, last][:, None] if logits else out), out[rows, last][:, None]

    def observe(self, accepted: Accepted) -> None:
        fused = self.fused(accepted.features)
        if self._cache is not None and len(accepted.rows) < len(fused):
            self._cache.select(torch.tensor(accepted.rows, device=fused.device))
        before = self._pending or [fused[0, :0]] * len(fused)
        self._pending = [
            torch.cat([before[row], fused[row, path]]) for row, path in zip(accepted.rows, accepted.paths, strict=True)
        ]

    # -- training

    def loss(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, logits, n = batch["tokens"], batch["logits"], batch["tokens"].shape[1] - 2
        if n < self.unroll:
            raise ValueError(f"rows of {n + 2} tokens are too short for {self.unroll} steps; raise length")
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
            features = {layer: part[None].to(self.tail.dtype) for layer, part in sample.features.items()}
            logits = self.unrolled(sample.tokens[None].to(self.fuse.device), features, self.depth)
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
        return self.tail.adapters()

    def own_state(self) -> dict[str, Tensor]:
        state = {"fuse": self.fuse.data, "mix": self.mix.data}
        if self.shape["train"] == "full":
            state |= {f"layer.{name}": p.data for name, p in self.tail.parts[0].named_parameters()}
        return state if self.vocabulary is None else state | {"vocabulary": self.vocabulary}
