"""A decoder layer over what the target made of verified text: its features and the token that followed each of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.core.cache import KVCache
from selfspec.core.contract import Accepted, Context
from selfspec.core.options import integer
from selfspec.core.pass_cache import KV
from selfspec.core.passes import Part, tree_pass
from selfspec.core.quantized import in_8_bits
from selfspec.core.rows import PREFILL
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain
from selfspec.drafters.base import pack
from selfspec.drafters.parts.views import Block, Tail


def check_layers(layers: object) -> None:
    """Raises ValueError for what is neither a list of different layers nor None."""
    if layers is None:
        return
    if not (isinstance(layers, list) and all(isinstance(layer, (int, float)) for layer in layers)):
        raise ValueError(f"drafter.layers={layers!r} must be a list of layers, or null")
    if not layers or len(set(layers)) < len(layers):
        raise ValueError(f"drafter.layers={layers} must name at least one layer, each once")


def layers_of(layers: list[int] | None, target: Target, default: set[int]) -> tuple[int, ...]:
    """The layers whose outputs are the features, ascending. Raises ValueError for one that the target does not have."""
    last = target.n_layers - 1
    for layer in default if layers is None else layers:
        if not 0 <= integer("drafter.layers: layer", layer) <= last:
            raise ValueError(f"drafter.layers={layers}: the target has no layer {layer}, only 0 to {last}")
    return tuple(sorted(default if layers is None else layers))


def usual_layers(target: Target) -> set[int]:
    """The three that serving engines read by default, 1, n/2 - 1 and n - 4; where the target is too short for these, 1,
    n/2 and n - 2."""
    n = target.n_layers
    return {1, n // 2 - 1, n - 4} if n >= 7 else {min(1, n - 1), n // 2, max(n - 2, 0)}


class FeatureReader(nn.Module, ABC):
    """What reads the target's features. layers: of the target, whose outputs they are."""

    layers: tuple[int, ...]

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it reads them."""

    def stacked(self, features: dict[int, Tensor]) -> Tensor:
        """The outputs of the layers asked for, side by side [..., F*H]."""
        return torch.cat([features[layer].to(self.device) for layer in self.layers], -1)


class FeatureLayer(FeatureReader):
    """A decoder layer whose entry t reads what stands for position t and the token after it: of verified positions
    their features, behind those the layer's own output."""

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

    def read(self, pending: PendingRows[DraftView], logits: bool) -> RootState:
        """Read pending rows, up to each row's root. Runs inside a function of the engine."""
        entering = self.entry(self.fused(pending.stacked), pending.tokens)
        return self.read_entries(pending.layers, entering, pending.tokens, pending.last, logits)[0]

    def read_entries(
        self, view: DraftView, entering: Tensor, tokens: Tensor, last: Tensor, logits: bool
    ) -> tuple[RootState, Tensor]:
        """Read what enters the decoder layer, [B, t, H], up to entry `last`, int64 [B], of each row, with the tokens
        after it, int64 [B, t]. The other result is the layer's output, [B, t, H]."""
        _, outputs, _ = tree_pass(view.part, view.kv, entering, tokens, None)
        at, output = last[:, None, None].expand(-1, 1, self.width), outputs[self.block.layer]
        hidden, own = outputs[-1].gather(1, at), output.gather(1, at)
        logits_at_root = self.block.text(own, tokens[:, :1], block=False).logits if logits else None
        states, kv = self.carried(own, hidden), view.kv.committed(last + 1)
        return RootState(logits_at_root, hidden, states, view.drafting, kv), self.carried(output, outputs[-1])

    def step(
        self, root: RootState, states: Tensor, tree: DraftTree, count: int
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """The layer on the last `count` nodes of a tree behind a root: logits (None where they are not wanted), hidden
        states behind the final norm, and what stands for the nodes, all [B, count, ...]. states: [B, count, H]."""
        tokens = tree.tokens[:, -count:]
        entering, ran = self.entry(states, tokens), tree.tokens.shape[1] - count
        logits, outputs, _ = tree_pass(root.part, root.kv, entering, tokens, tree.parents, ran)
        return logits, outputs[-1], self.carried(outputs[self.block.layer], outputs[-1])

    @property
    def width(self) -> int:
        """Numbers of a state."""
        return int(self.block.target.hidden_size)


def normed(norm: nn.Module, states: Tensor) -> Tensor:
    """States behind a norm that may be kept in a wider dtype, in their own dtype."""
    return norm(states).to(states.dtype)  # type: ignore[no-any-return]


class LastLayer(FeatureLayer):
    """A view of the target's last decoder layer, with LoRA or trained in full, behind two products: one fuses the
    features of a position, the other mixes in the embedding of the token after it. Final norm and lm_head are views as
    they are. Parameters: F*H*H + 2*H*H for F features, and those of the layer, or of its LoRA."""

    packed_fuse: Tensor | None
    packed_mix: Tensor | None

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
        pack(self, packed_fuse=None, packed_mix=None)

    def train(self, mode: bool = True) -> LastLayer:
        """Leaving training mode lays out the weights for decoding, in the target's dtype."""
        super().train(mode)
        fuse, mix = (w.detach().t().to(self.tail.dtype).contiguous() for w in (self.fuse, self.mix))
        pack(self, packed_fuse=None if mode else fuse, packed_mix=None if mode else mix)
        in_8_bits([] if mode else [fuse, mix])
        return self

    @property
    def block(self) -> Tail:
        return self.tail

    def fused(self, stacked: Tensor) -> Tensor:
        return F.linear(stacked, self.fuse.t().to(stacked.dtype) if self.packed_fuse is None else self.packed_fuse)

    def entry(self, states: Tensor, tokens: Tensor) -> Tensor:
        after = F.rms_norm(F.embedding(tokens.to(self.embedding.device), self.embedding), states.shape[-1:]).to(states)
        both = torch.cat([F.rms_norm(states, states.shape[-1:]), after], -1)
        weight = self.mix.t().to(states.dtype) if self.packed_mix is None else self.packed_mix
        return states + F.linear(both, weight)

    def carried(self, outputs: Tensor, hidden: Tensor) -> Tensor:
        return outputs


class DraftView(NamedTuple):
    """One draft layer in a pass. part, kv: the layer without lm_head, and its KV cache; drafting: the part that later
    steps run."""

    part: Part
    kv: KV
    drafting: Part


V = TypeVar("V")  # what a function that drafts is given of the layers: a `DraftView`, several, or a cache alone


class PendingRows(NamedTuple, Generic[V]):
    """Features of verified positions that draft layers have not read yet, up to each row's root. features: [B, n, H] of
    each layer read; paths: int64 [B, t], which of the n are read; tokens: int64 [B, t] after them; last: int64 [B],
    which of the t is the root's."""

    layers: V
    features: tuple[Tensor, ...]
    paths: Tensor
    tokens: Tensor
    last: Tensor

    @property
    def stacked(self) -> Tensor:
        """The features of the rows, side by side [B, t, F*H]."""
        stacked = torch.cat(self.features, -1)
        return stacked.gather(1, self.paths[:, :, None].expand(-1, -1, stacked.shape[-1]))


class RootState(NamedTuple):
    """What a draft layer gave at each row's root: logits [B, 1, V] (None where they are not wanted), hidden states
    behind the final norm and what stands for the root, both [B, 1, H]; part, kv: what later steps run on. Their entries
    are temporary: the next pass writes over them."""

    logits: Tensor | None
    hidden: Tensor
    states: Tensor
    part: Part
    kv: KV


L = TypeVar("L", bound=FeatureReader)


class FeatureCache(Generic[L, V], ABC):
    """The KV cache of draft layers in one call, and their pending rows: features of verified positions that they have
    not read. pending: per row [n, F*H]; late: what the last pass accepted, which comes after them; reading: how many
    positions of each row the last function read, on the device too, to be committed once it has run."""

    def __init__(self, layer: L) -> None:
        self.layer = layer
        self.cache: KVCache | None = None
        self.pending: list[Tensor] = []
        self.late: Accepted | None = None
        self.reading: tuple[list[int], Tensor | None] | None = None

    def observe(self, accepted: Accepted) -> None:
        """Take in the features of what a pass accepted."""
        self._finish()
        if self.cache is not None and len(accepted.rows) < len(accepted.hidden):
            self._select(torch.tensor(accepted.rows, device=accepted.hidden.device))
        self._settle()
        self.late = accepted

    def _finish(self) -> None:
        """What the last function read is committed."""
        if self.reading is not None:
            self._commit(*self.reading)
            self.reading = None

    def _settle(self) -> None:
        """What the last pass accepted is pending."""
        if self.late is None:
            return
        new = self.layer.stacked(self.late.features)
        before = self.pending or [new[0, :0]] * len(new)
        accepted = zip(self.late.rows, self.late.paths, strict=True)
        self.pending, self.late = [torch.cat([before[row], new[row, path]]) for row, path in accepted], None

    @property
    def ready(self) -> bool:
        """Whether there is something to read of every row; not so behind prompts of one token."""
        if self.late is not None and all(self.late.paths):
            return True
        self._settle()
        return bool(self.pending) and min(map(len, self.pending)) > 0

    def rows(self, context: Context, logits: bool, depth: int, more: int = 0) -> PendingRows[V]:
        """The pending rows of a pass, for the function that drafts. A long backlog, such as a prompt, is read at once
        but for the last rows, of which a walk through `depth` levels accepts no more. logits: whether later steps want
        them; more: entries that drafting writes. In compiled passes shapes depend on the budget and the depth alone."""
        engine, late = context.target.engine, self.late
        self._finish()
        if self.cache is None:
            self.cache = self._open(len(context.lengths), context.cache)
        most = min(engine.size(depth + 1), engine.size(context.nodes))
        width = engine.size(0 if late is None else late.width, context.nodes)
        if late is None or any(map(len, self.pending)) or max(map(len, late.paths)) > most or late.width > width:
            self._settle()
            self._read_but(context, most)
            paths = [list(range(len(part))) for part in self.pending]
            stacked = self._stacked([len(path) for path in paths], engine.size(most, context.nodes))
            features = list(stacked.split(stacked.shape[-1] // len(self.layer.layers), -1))
        else:
            paths, features = late.paths, [late.features[layer] for layer in self.layer.layers]
            if len(paths) < len(features[0]):
                features = [part[late.rows] for part in features]
            if late.width < width:
                features = [F.pad(part, (0, 0, 0, width - late.width)) for part in features]
        count, device = [len(path) for path in paths], self.layer.device
        read, kept = engine.size(max(count), most), None if self.late is None else self.late.kept
        if kept is None:
            places = torch.tensor([path + [0] * (read - len(path)) for path in paths], device=device)
            tokens, last = self._tokens(context, count, read), torch.tensor([n - 1 for n in count], device=device)
        else:  # what follows the kept nodes is what they emitted
            last, short = (kept.lengths - 1).to(device), max(0, read - kept.path.shape[1])
            both = (kept.path, kept.tokens) if not short else (F.pad(x, (0, short)) for x in (kept.path, kept.tokens))
            places, tokens = (part[:, :read].to(device) for part in both)
        layers = self._view(self.cache, read + more, logits)
        self.reading, self.pending, self.late = (count, None if kept is None else kept.lengths), [], None
        padded = [engine.padded(one) for one in (*(part.to(device) for part in features), places, tokens, last)]
        return PendingRows(layers, tuple(padded[:-3]), *padded[-3:])

    @abstractmethod
    def _open(self, rows: int, verified: KVCache) -> KVCache:
        """A cache for so many rows, of the target's capacity."""

    @abstractmethod
    def _view(self, cache: KVCache, entries: int, logits: bool) -> V:
        """What reads rows and drafts, with room for `entries` more in its cache."""

    @abstractmethod
    def _enter(self, context: Context, cache: KVCache, count: list[int]) -> None:
        """Read the next `count` positions of each row."""

    def _commit(self, count: list[int], lengths: Tensor | None = None) -> None:
        """So many positions of each row were read; lengths: the same on the device, int64 [B]."""
        assert self.cache is not None
        self.cache.commit([list(range(n)) for n in count], lengths=lengths)

    def _select(self, rows: Tensor) -> None:
        """Keep these rows, int64."""
        assert self.cache is not None
        self.cache.select(rows)

    def _read_but(self, context: Context, few: int) -> None:
        """Read what is pending until no row has more than `few` left."""
        assert self.cache is not None
        while max(map(len, self.pending)) > few:
            count = [min(PREFILL, len(part) - 1) for part in self.pending]
            self._enter(context, self.cache, count)
            self._commit(count)
            self.pending = [part[n:] for part, n in zip(self.pending, count, strict=True)]

    def _stacked(self, count: list[int], width: int) -> Tensor:
        """The features of the next `count` positions of each row, [B, width, F*H]."""
        stacked = self.pending[0].new_zeros(len(count), width, self.pending[0].shape[-1])
        for row, (part, n) in enumerate(zip(self.pending, count, strict=True)):
            stacked[row, :n] = part[:n]
        return stacked

    def _tokens(self, context: Context, count: list[int], width: int) -> Tensor:
        """The tokens after the next `count` positions of each row, int64 [B, width]."""
        assert self.cache is not None
        ends = zip(context.tokens, self.cache.lengths, count, strict=True)
        ids = [tokens[start + 1 : start + 1 + n] + [0] * (width - n) for tokens, start, n in ends]
        return torch.tensor(ids, device=self.layer.device)


class DraftLayerCache(FeatureCache[FeatureLayer, DraftView]):
    """The cache of one draft layer."""

    def _open(self, rows: int, verified: KVCache) -> KVCache:
        return self.layer.block.target.cache(rows, verified.capacity, verified.limit)

    def _view(self, cache: KVCache, entries: int, logits: bool) -> DraftView:
        return draft_view(self.layer.block, cache, entries, logits)

    def _enter(self, context: Context, cache: KVCache, count: list[int]) -> None:
        block, tokens = self.layer.block, self._tokens(context, count, max(count))
        entering = self.layer.entry(self.layer.fused(self._stacked(count, max(count))), tokens)
        layers = block.first, block.layer + 1
        block.target.forward(chain(tokens), cache, False, layers, entering, (block.layer,), prompt=True)


def draft_view(block: Block, cache: KVCache, entries: int, logits: bool) -> DraftView:
    """A draft layer with room for `entries` more in its cache; drafting parts have lm_head where logits are wanted."""
    layers, target = (block.first, block.layer + 1), block.target
    part = target.part(*layers, (block.layer,), logits=False)
    drafting = target.part(*layers, (block.layer,)) if logits else part
    target.part(block.layer + 1, block.layer + 1)  # norm and lm_head alone; no view is built inside a graph
    return DraftView(part, cache.view(*layers, entries), drafting)
