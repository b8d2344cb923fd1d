"""A decoder layer over what the target made of verified text: its features and the token that followed each of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.core.cache import TextCache
from selfspec.core.contract import Accepted, Context
from selfspec.core.engine import bucket, filled
from selfspec.core.generate import piece
from selfspec.core.slots import Opened, SlotCache, static_pass
from selfspec.core.target import Pass, RowCache, Target
from selfspec.core.tree import DraftTree, chain
from selfspec.drafters.base import Ready
from selfspec.drafters.parts.views import Tail

_FEW = 16  # entries that are read together with the root's; more, as behind a prompt, are read without logits


class FeatureLayer(nn.Module):
    """A view of the target's last decoder layer, with LoRA or trained in full, behind two products: one fuses the
    features of a position, the other mixes in the embedding of the token after it. Final norm and lm_head are views as
    they are. Parameters: F*H*H + 2*H*H for F features, and those of the layer, or of its LoRA."""

    def __init__(self, target: Target, layers: Sequence[int], rank: int, full: bool, dtype: torch.dtype) -> None:
        super().__init__()
        if target.n_layers < 2:
            raise ValueError("a feature layer needs a target of at least two layers: its own stands in for the last")
        self.layers = tuple(layers)
        hidden = target.hidden_size
        # At first the highest feature goes into the layer as it is.
        fuse = torch.zeros(len(layers), hidden, hidden, device=target.device, dtype=dtype)
        fuse[-1] = torch.eye(hidden)
        self.fuse = nn.Parameter(fuse.flatten(0, 1))
        self.mix = nn.Parameter(torch.zeros(2 * hidden, hidden, device=target.device, dtype=dtype))
        self.tail = Tail(target, 0 if full else rank, dtype, "feature", full=full)
        self.embedding = nn.Parameter(target.model.get_input_embeddings().weight, requires_grad=False)
        self.ready: Ready | None = None

    def train(self, mode: bool = True) -> FeatureLayer:
        """Leaving training mode lays out the weights for decoding, in the target's dtype."""
        super().train(mode)
        self.ready = None
        if not mode:
            self.ready = Ready(*(w.detach().t().to(self.tail.dtype).contiguous() for w in (self.fuse, self.mix)))
        return self

    def stacked(self, features: dict[int, Tensor]) -> Tensor:
        """The outputs of the layers asked for, side by side [..., F*H]."""
        return torch.cat([features[layer].to(self.fuse.device) for layer in self.layers], -1)

    def fused(self, stacked: Tensor) -> Tensor:
        """What stands for a position [..., H]."""
        return F.linear(stacked, self.fuse.t().to(stacked.dtype) if self.ready is None else self.ready.weights[0])

    def entry(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The layer's input [..., H] from states [..., H] (fused features or its own output) and the tokens after."""
        after = F.rms_norm(F.embedding(tokens.to(self.embedding.device), self.embedding), states.shape[-1:]).to(states)
        both = torch.cat([F.rms_norm(states, states.shape[-1:]), after], -1)
        weight = self.mix.t().to(states.dtype) if self.ready is None else self.ready.weights[1]
        return states + F.linear(both, weight)

    def text(
        self,
        states: Tensor,
        tokens: Tensor,
        logits: bool = True,
        cache: TextCache | None = None,
        masks: Tensor | dict[str, Tensor] | None = None,
        positions: Tensor | None = None,
    ) -> Pass:
        """The layer on whole texts: states [B, n, H] and the tokens after them, int64 [B, n]; see `Tail.text`."""
        return self.tail.text(self.entry(states, tokens), tokens, True, logits, cache, masks, positions)

    def step(
        self, entries: Entries, states: Tensor, tree: DraftTree, count: int
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """The layer on the last `count` nodes of a tree: logits (None where they are not wanted), hidden states behind
        the final norm, and outputs, all [B, count, ...]. states: [B, count, H]."""
        tokens = tree.tokens[:, -count:]
        given, ran = self.entry(states, tokens), tree.tokens.shape[1] - count
        if isinstance(entries, Opened):
            at = torch.tensor(ran, device=tokens.device)
            logits, seen, _ = static_pass(entries, given, tokens, tree.parents, at)
            return logits, seen[-1], seen[self.tail.layer]
        cache, wanted = entries
        out = self.tail.step(given, tree, cache, ran, wanted)
        return out.logits, out.hidden, out.features[self.tail.layer]


# Where a layer's entries are: its cache and whether logits are wanted, or both as tensors for passes inside a graph
Entries = tuple[RowCache, bool] | Opened


class Reader:
    """What a feature layer has read of the rows of one call: its keys and values, and entries it is still to read."""

    def __init__(self, layer: FeatureLayer) -> None:
        self.layer = layer
        self.cache: RowCache | None = None
        self.pending: list[Tensor] = []  # per row [n, F*H]: features not read yet

    def observe(self, accepted: Accepted) -> None:
        """Take in the features of what a pass kept."""
        new = self.layer.stacked(accepted.features)
        if self.cache is not None and len(accepted.rows) < len(new):
            self.cache.select(torch.tensor(accepted.rows, device=new.device))
        before = self.pending or [new[0, :0]] * len(new)
        self.pending = [
            torch.cat([before[row], new[row, path]]) for row, path in zip(accepted.rows, accepted.paths, strict=True)
        ]

    @property
    def ready(self) -> bool:
        """Whether there is something to read of every row; not so behind prompts of one token."""
        return bool(self.pending) and min(map(len, self.pending)) > 0

    def read(self, context: Context, logits: bool) -> tuple[Tensor | None, Tensor, Tensor]:
        """Read all that is pending and keep it in the cache; at each row's root logits [B, 1, V] (or None), hidden
        states behind the final norm and outputs, both [B, 1, H]."""
        if self.cache is None:
            made = context.cache
            self.cache = self.layer.tail.target.cache(len(self.pending), made.capacity, made.limit)
        while (longest := max(map(len, self.pending))) > _FEW:
            self._read(context, [min(piece(context.target, longest)[0], len(part) - 1) for part in self.pending], False)
        count = [len(part) for part in self.pending]
        if isinstance(self.cache, SlotCache):
            return self._read_in_graph(context, self.cache, count, logits)
        out = self._read(context, count, logits)
        rows, last = torch.arange(len(count)), torch.tensor(count) - 1
        found = None if out.logits is None else out.logits[rows, last][:, None]
        return found, out.hidden[rows, last][:, None], out.features[self.layer.tail.layer][rows, last][:, None]

    def _read(self, context: Context, count: list[int], logits: bool) -> Pass:
        assert self.cache is not None
        stacked, tokens = self._next(context, self.cache, count)
        given = self.layer.entry(self.layer.fused(stacked), tokens)
        out = self.layer.tail.step(given, chain(tokens), self.cache, 0, logits)
        self._keep(self.cache, count)
        return out

    def _read_in_graph(
        self, context: Context, cache: SlotCache, count: list[int], logits: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """`read` by a compiled engine, with logits at the last entries alone."""
        tail, rows, wide = self.layer.tail, len(count), bucket(max(count))
        stacked, tokens = self._next(context, cache, count)
        stacked, tokens = F.pad(stacked, (0, 0, 0, wide - max(count))), F.pad(tokens, (0, wide - max(count)))
        opened = tail.target.opened(cache, (tail.layer, tail.layer + 1), (tail.layer,), False, wide)
        tail.target.part(tail.layer + 1, tail.layer + 1)  # norm and lm_head alone; no view is built inside a graph
        last = torch.tensor(count, device=stacked.device) - 1
        found = cache.engine.run(_at_last, self.layer, opened, logits, filled(stacked), filled(tokens), filled(last))
        self._keep(cache, count)
        scores, hidden, outputs = found
        return None if scores is None else scores[:rows], hidden[:rows], outputs[:rows]

    def _next(self, context: Context, cache: RowCache, count: list[int]) -> tuple[Tensor, Tensor]:
        """The next `count` entries of each row: features [B, n, F*H] and the tokens after them, int64 [B, n]."""
        stacked = self.pending[0].new_zeros(len(count), max(count), self.pending[0].shape[-1])
        tokens = torch.zeros(stacked.shape[:2], dtype=torch.long)
        for row, (part, n, first) in enumerate(zip(self.pending, count, cache.lengths, strict=True)):
            stacked[row, :n] = part[:n]
            tokens[row, :n] = torch.tensor(context.tokens[row][first + 1 : first + 1 + n])
        return stacked, tokens.to(stacked.device)

    def _keep(self, cache: RowCache, count: list[int]) -> None:
        cache.keep([list(range(n)) for n in count])
        self.pending = [part[n:] for part, n in zip(self.pending, count, strict=True)]

    def entries(self, logits: bool, nodes: int) -> Entries:
        """What `FeatureLayer.step` needs of the cache for so many nodes. What is written through it is temporary: the
        next pass writes over it."""
        assert self.cache is not None
        layer = self.layer.tail.layer
        if isinstance(self.cache, SlotCache):
            return self.layer.tail.target.opened(self.cache, (layer, layer + 1), (layer,), logits, nodes)
        return self.cache, logits


def _at_last(
    layer: FeatureLayer, opened: Opened, logits: bool, stacked: Tensor, tokens: Tensor, last: Tensor
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Entries read, and what `Reader.read` gives of each row's last one, int64 [B]."""
    given, at = layer.entry(layer.fused(stacked), tokens), torch.tensor(0, device=tokens.device)
    _, seen, _ = static_pass(opened, given, tokens, chain(tokens).parents, at)
    at = last[:, None, None].expand(-1, 1, given.shape[-1])
    hidden, outputs = seen[-1].gather(1, at), seen[layer.tail.layer].gather(1, at)
    scores = layer.tail.text(outputs, tokens[:, :1], block=False).logits if logits else None
    return scores, hidden, outputs
