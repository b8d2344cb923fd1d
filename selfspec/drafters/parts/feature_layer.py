"""A decoder layer over what the target made of verified text: its features and the token that followed each of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.core.pass_cache import KV
from selfspec.core.passes import Part, tree_pass
from selfspec.core.quantized import in_8_bits
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree
from selfspec.drafters.base import pack
from selfspec.drafters.parts.views import Block, Tail, check_width
from selfspec.utils.checks import integer


def check_layers(layers: object, name: str = "layers") -> None:
    """Raises ValueError for what is neither a list of different layers nor None."""
    if layers is None:
        return
    if not (isinstance(layers, list) and all(isinstance(layer, (int, float)) for layer in layers)):
        raise ValueError(f"drafter.{name}={layers!r} must be a list of layers, or null")
    if not layers or len(set(layers)) < len(layers):
        raise ValueError(f"drafter.{name}={layers} must name at least one layer, each once")


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
    their features, behind those the layer's own output. after_norm: whether that is the one behind the final norm;
    tail: the layer with final norm and lm_head."""

    tail: Block

    after_norm: bool = False

    @property
    def head(self) -> nn.Linear:
        """What maps its output to logits: of all tokens, or of those it can draft."""
        return cast(Tail, self.tail).head

    @abstractmethod
    def fused(self, stacked: Tensor) -> Tensor:
        """What stands for a verified position [..., H], from its features side by side [..., F*H]."""

    @abstractmethod
    def entry(self, states: Tensor, tokens: Tensor) -> Tensor:
        """What enters the decoder layer, from what stands for positions [..., H] and the tokens after them."""

    def carried(self, outputs: Tensor, hidden: Tensor) -> Tensor:
        """What stands for a drafted position [..., H], from the layer's output there and the same behind the final
        norm."""
        return hidden if self.after_norm else outputs

    @property
    def device(self) -> torch.device:
        return self.tail.target.device

    def read_entries(
        self, view: DraftView, entering: Tensor, tokens: Tensor, last: Tensor, logits: bool
    ) -> tuple[RootState, Tensor]:
        """Read what enters the decoder layer, [B, t, H], up to entry `last`, int64 [B], of each row, with the tokens
        after it, int64 [B, t]. The other result is the layer's output, [B, t, H]."""
        _, outputs, _ = tree_pass(view.part, view.kv, entering, tokens, None)
        at, output = last[:, None, None].expand(-1, 1, self.width), outputs[self.tail.layer]
        hidden, own = outputs[-1].gather(1, at), output.gather(1, at)
        logits_at_root = self.tail.text(own, tokens[:, :1], block=False).logits if logits else None
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
        return logits, outputs[-1], self.carried(outputs[self.tail.layer], outputs[-1])

    @property
    def width(self) -> int:
        """Numbers of a state."""
        return int(self.tail.target.hidden_size)


def normed(norm: nn.Module, states: Tensor) -> Tensor:
    """States behind a norm that may be kept in a wider dtype or on another device, in their own."""
    return norm(states).to(states)  # type: ignore[no-any-return]


class LastLayer(FeatureLayer):
    """A view of the target's last decoder layer, with LoRA or trained in full, behind two products: one fuses the
    features of a position, the other mixes in the embedding of the token after it. Final norm and lm_head are views as
    they are. Parameters: F*H*H + 2*H*H for F features, and those of the layer, or of its LoRA."""

    tail: Tail
    packed_fuse: Tensor | None
    packed_mix: Tensor | None

    def __init__(self, target: Target, layers: Sequence[int], rank: int, full: bool, dtype: torch.dtype) -> None:
        super().__init__()
        if target.n_layers < 2:
            raise ValueError("a feature layer needs a target of at least two layers: its own stands in for the last")
        check_width(target)
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

    def fused(self, stacked: Tensor) -> Tensor:
        return F.linear(stacked, self.fuse.t().to(stacked.dtype) if self.packed_fuse is None else self.packed_fuse)

    def entry(self, states: Tensor, tokens: Tensor) -> Tensor:
        after = F.rms_norm(F.embedding(tokens.to(self.embedding.device), self.embedding), states.shape[-1:]).to(states)
        both = torch.cat([F.rms_norm(states, states.shape[-1:]), after], -1)
        weight = self.mix.t().to(states.dtype) if self.packed_mix is None else self.packed_mix
        return states + F.linear(both, weight)


class DraftView(NamedTuple):
    """One draft layer in a pass. part, kv: the layer without lm_head, and its KV cache; drafting: the part that later
    steps run."""

    part: Part
    kv: KV
    drafting: Part


class RootState(NamedTuple):
    """What a draft layer gave at each row's root: logits [B, 1, V] (None where they are not wanted), hidden states
    behind the final norm and what stands for the root, both [B, 1, H]; part, kv: what later steps run on. Their entries
    are temporary: the next pass writes over them."""

    logits: Tensor | None
    hidden: Tensor
    states: Tensor
    part: Part
    kv: KV
