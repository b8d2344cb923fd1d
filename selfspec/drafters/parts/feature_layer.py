"""A decoder layer over what the target made of verified text: its features and the token that followed each of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.core.contract import Accepted, Context
from selfspec.core.generate import piece
from selfspec.core.slots import Opened, SlotCache, static_pass
from selfspec.core.target import Pass, RowCache, Target
from selfspec.core.tree import DraftTree, chain
from selfspec.drafters.base import Ready
from selfspec.drafters.parts.views import Block, Tail
from selfspec.engine.engine import bucket, filled

_FEW = 16  # entries that the eager engine reads together with the root's; those before are read without logits


class FeatureLayer(nn.Module, ABC):
    """A decoder layer whose entry t reads what stands for position t and the token after it. layers: of the target,
    whose outputs stand for verified positions; behind those, the layer's own output does."""

    layers: tuple[int, ...]

    @property
    @abstractmethod
    def block(self) -> Block:
        """The decoder layer with final norm and lm_head."""

    @abstractmethod
    def fused(self, stacked: Tensor) -> Tensor:
        """What stands for a verified position [..., H], from its features side by side [..., F*H]."""

    @abstractmethod
    def entry(self, states: Tensor, tokens: Tensor) -> Tensor:
        """What enters the decoder layer, from what stands for positions [..., H] and the tokens after them."""

    @abstractmethod
    def carried(self, outputs: Tensor, hidden: Tensor) -> Tensor:
        """What stands for a drafted position [..., H], from the layer's output there and the same behind the final
        norm."""

    @property
    def device(self) -> torch.device:
        return self.block.target.device

    def stacked(self, features: dict[int, Tensor]) -> Tensor:
        """The outputs of the layers asked for, side by side [..., F*H]."""
        return torch.cat([features[layer].to(self.device) for layer in self.layers], -1)

    def behind(self, read: Read | Unread, logits: bool) -> Read:
        """What was read, or is read now, at each row's root."""
        if isinstance(read, Read):
            return read
        stacked = torch.cat(read.features, -1)
        stacked = stacked.gather(1, read.paths[:, :, None].expand(-1, -1, stacked.shape[-1]))
        given, start = self.entry(self.fused(stacked), read.tokens), torch.tensor(0, device=read.tokens.device)
        _, seen, _ = static_pass(read.opened, given, read.tokens, chain(read.tokens).parents, start)
        at = read.last[:, None, None].expand(-1, 1, stacked.shape[-1] // len(self.layers))
        hidden, outputs = seen[-1].gather(1, at), seen[self.block.layer].gather(1, at)
        found = self.block.text(outputs, read.tokens[:, :1], block=False).logits if logits else None
        after = read.opened._replace(module=read.drafting, lengths=read.opened.lengths + read.last + 1)
        return Read(found, hidden, self.carried(outputs, hidden), after)

    def step(
        self, entries: Entries, states: Tensor, tree: DraftTree, count: int
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """The layer on the last `count` nodes of a tree: logits (None where they are not wanted), hidden states behind
        the final norm, and what stands for the nodes, all [B, count, ...]. states: [B, count, H]."""
        tokens = tree.tokens[:, -count:]
        given, ran = self.entry(states, tokens), tree.tokens.shape[1] - count
        if isinstance(entries, Opened):
            at = torch.tensor(ran, device=tokens.device)
            logits, seen, _ = static_pass(entries, given, tokens, tree.parents, at)
            return logits, seen[-1], self.carried(seen[self.block.layer], seen[-1])
        cache, wanted = entries
        out = self.block.step(given, tree, cache, ran, wanted)
        return out.logits, out.hidden, self.carried(out.features[self.block.layer], out.hidden)


class LastLayer(FeatureLayer):
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

    def train(self, mode: bool = True) -> LastLayer:
        """Leaving training mode lays out the weights for decoding, in the target's dtype."""
        super().train(mode)
        self.ready = None
        if not mode:
            self.ready = Ready(*(w.detach().t().to(self.tail.dtype).contiguous() for w in (self.fuse, self.mix)))
        return self

    @property
    def block(self) -> Tail:
        return self.tail

    def fused(self, stacked: Tensor) -> Tensor:
        return F.linear(stacked, self.fuse.t().to(stacked.dtype) if self.ready is None else self.ready.weights[0])

    def entry(self, states: Tensor, tokens: Tensor) -> Tensor:
        after = F.rms_norm(F.embedding(tokens.to(self.embedding.device), self.embedding), states.shape[-1:]).to(states)
        both = torch.cat([F.rms_norm(states, states.shape[-1:]), after], -1)
        weight = self.mix.t().to(states.dtype) if self.ready is None else self.ready.weights[1]
        return states + F.linear(both, weight)

    def carried(self, outputs: Tensor, hidden: Tensor) -> Tensor:
        return outputs


# Where a layer's entries are: its cache and whether logits are wanted, or both as tensors for passes inside a graph
Entries = tuple[RowCache, bool] | Opened


class Read(NamedTuple):
    """What a layer gave at each row's root: logits [B, 1, V] (None where they are not wanted), hidden states behind the
    final norm and what stands for the root, both [B, 1, H]; entries: what `FeatureLayer.step` needs to go on. What is
    written through them is temporary: the next pass writes over it."""

    logits: Tensor | None
    hidden: Tensor
    states: Tensor
    entries: Entries


class Unread(NamedTuple):
    """Entries that a graph is still to read, up to each row's root. opened: the layer without lm_head, and its cache;
    drafting: the module that later steps take; features: [B, n, H] of each layer; paths: int64 [B, t], which of the n
    are read; tokens: int64 [B, t] after them; last: int64 [B], which of the t is the root's."""

    opened: Opened
    drafting: nn.Module
    features: tuple[Tensor, ...]
    paths: Tensor
    tokens: Tensor
    last: Tensor


class Reader:
    """What a feature layer has read of the rows of one call: its keys and values, and entries it is still to read.
    pending: features per row [n, F*H]; late: what the last pass kept, which comes after them."""

    def __init__(self, layer: FeatureLayer) -> None:
        self.layer = layer
        self.cache: RowCache | None = None
        self.pending: list[Tensor] = []
        self.late: Accepted | None = None

    def observe(self, accepted: Accepted) -> None:
        """Take in the features of what a pass kept."""
        if self.cache is not None and len(accepted.rows) < len(accepted.hidden):
            self.cache.select(torch.tensor(accepted.rows, device=accepted.hidden.device))
        self._settle()
        self.late = accepted

    def _settle(self) -> None:
        """What the last pass kept is pending."""
        if self.late is None:
            return
        new = self.layer.stacked(self.late.features)
        before = self.pending or [new[0, :0]] * len(new)
        kept = zip(self.late.rows, self.late.paths, strict=True)
        self.pending, self.late = [torch.cat([before[row], new[row, path]]) for row, path in kept], None

    @property
    def ready(self) -> bool:
        """Whether there is something to read of every row; not so behind prompts of one token."""
        if self.late is not None and all(self.late.paths):
            return True
        self._settle()
        return bool(self.pending) and min(map(len, self.pending)) > 0

    def read(self, context: Context, logits: bool, depth: int, more: int = 0) -> Read | Unread:
        """Read all that is pending and keep it in the cache; a compiled engine leaves the last entries to the graph
        that drafts: at most as many as a walk through `depth` levels keeps. more: entries that drafting writes."""
        if self.cache is None:
            made = context.cache
            self.cache = self.layer.block.target.cache(len(context.lengths), made.capacity, made.limit)
        if isinstance(self.cache, SlotCache):
            return self._unread(context, self.cache, logits, depth, more)
        self._settle()
        self._read_but(context, _FEW)
        count = [len(part) for part in self.pending]
        out = self._read(context, count, logits)
        rows, last = torch.arange(len(count)), torch.tensor(count) - 1
        found = None if out.logits is None else out.logits[rows, last][:, None]
        outputs = out.features[self.layer.block.layer][rows, last][:, None]
        hidden = out.hidden[rows, last][:, None]
        return Read(found, hidden, self.layer.carried(outputs, hidden), (self.cache, logits))

    def _read_but(self, context: Context, few: int) -> None:
        """Read what is pending until no row has more than `few` entries left."""
        while (longest := max(map(len, self.pending))) > few:
            self._read(context, [min(piece(context.target, longest)[0], len(part) - 1) for part in self.pending], False)

    def _read(self, context: Context, count: list[int], logits: bool) -> Pass:
        """Read the next `count` entries of each row."""
        assert self.cache is not None
        stacked = self._features(count, max(count))
        tokens = self._tokens(context, count, max(count))
        given = self.layer.entry(self.layer.fused(stacked), tokens)
        out = self.layer.block.step(given, chain(tokens), self.cache, 0, logits)
        self._keep(count)
        return out

    def _features(self, count: list[int], width: int) -> Tensor:
        """The next `count` entries' features of each row, [B, width, F*H]."""
        stacked = self.pending[0].new_zeros(len(count), width, self.pending[0].shape[-1])
        for row, (part, n) in enumerate(zip(self.pending, count, strict=True)):
            stacked[row, :n] = part[:n]
        return stacked

    def _tokens(self, context: Context, count: list[int], width: int) -> Tensor:
        """The tokens after the next `count` entries of each row, int64 [B, width]."""
        assert self.cache is not None
        ends = zip(context.tokens, self.cache.lengths, count, strict=True)
        found = [tokens[start + 1 : start + 1 + n] + [0] * (width - n) for tokens, start, n in ends]
        return torch.tensor(found, device=self.layer.device)

    def _keep(self, count: list[int]) -> None:
        """The next `count` entries of each row are in the cache."""
        assert self.cache is not None
        self.cache.keep([list(range(n)) for n in count])
        self.pending = [part[n:] for part, n in zip(self.pending, count, strict=True)]

    def _unread(self, context: Context, cache: SlotCache, logits: bool, depth: int, more: int) -> Unread:
        """`read` by a compiled engine. Shapes depend on the budget and the depth alone."""
        block, width, late = self.layer.block, bucket(context.nodes), self.late
        most = min(bucket(depth + 1), width)
        if late is None or any(map(len, self.pending)) or max(map(len, late.paths)) > most or late.width > width:
            self._settle()
            self._read_but(context, most)
            paths = [list(range(len(part))) for part in self.pending]
            stacked = self._features([len(path) for path in paths], width)
            features = list(stacked.split(stacked.shape[-1] // len(self.layer.layers), -1))
        else:
            paths, features = late.paths, [late.features[layer] for layer in self.layer.layers]
            if len(paths) < len(features[0]):
                features = [part[late.rows] for part in features]
            if late.width < width:
                features = [F.pad(part, (0, 0, 0, width - late.width)) for part in features]
        count, device = [len(path) for path in paths], self.layer.device
        places = torch.tensor([path + [0] * (most - len(path)) for path in paths], device=device)
        tokens, last = self._tokens(context, count, most), torch.tensor([n - 1 for n in count], device=device)
        layers, target = (block.layer, block.layer + 1), block.target
        opened = target.opened(cache, layers, (block.layer,), False, most + more)
        drafting = target.part(*layers, (block.layer,)) if logits else opened.module
        target.part(block.layer + 1, block.layer + 1)  # norm and lm_head alone; no view is built inside a graph
        cache.keep([list(range(n)) for n in count])
        self.pending, self.late = [], None
        given = tuple(filled(part.to(device)) for part in features)
        return Unread(opened, drafting, given, filled(places), filled(tokens), filled(last))
