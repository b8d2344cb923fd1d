"""What decoding asks of whatever drafts: something with a `session` for each call, and what sessions are shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from selfspec.core.cache import KVCache
from selfspec.core.memory import constant
from selfspec.core.sampling import Noise
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree
from selfspec.core.verify import Kept


@dataclass(frozen=True)
class Context:
    """What a session may look at when it proposes. roots: int64 [B]; lengths: each row's cached tokens, which is its
    root's position; tokens: each row's tokens, root included; nodes: the budget, root included; noise: shared with
    verification, None when greedy; target and cache: for sessions that run the target's first layers on their nodes;
    rate: tokens per second and row of plain decoding, 0 where it is not known."""

    roots: Tensor
    lengths: list[int]
    tokens: list[list[int]]
    nodes: int
    temperature: float
    noise: Noise | None
    target: Target
    cache: KVCache
    rate: float = 0.0

    @property
    def temperature_tensor(self) -> Tensor:
        """float64 [], for functions that the engine runs."""
        return constant(self.temperature, torch.float64, self.roots.device)

    @property
    def positions(self) -> Tensor:
        """int64 [B]: of the tokens behind the roots, on the device."""
        return self.cache.row_lengths()[: len(self.lengths)] + (1 + self.lengths[0] - self.cache.lengths[0])

    @property
    def mode(self) -> str:
        """The decoding mode, by which calibrations are kept: greedy or sampled."""
        return "greedy" if self.noise is None else "sampled"


@dataclass(frozen=True)
class Accepted:
    """What a pass kept. hidden: [B, N, H] of the pass; features: the same of the layers the drafter reads; rows: which
    of its B rows go on, in their new order, which need not ascend; paths: the kept nodes of each of those rows (empty
    while a longer prompt of the batch is still read); logits: [B, N, V] of the pass, None while the prompt is read;
    kept: `paths` on the device with the tokens that they emit, None while the prompt is read."""

    hidden: Tensor
    features: dict[int, Tensor]
    rows: list[int]
    paths: list[list[int]]
    logits: Tensor | None = None
    kept: Kept | None = None

    @property
    def width(self) -> int:
        """Nodes of the pass."""
        return self.hidden.shape[1]

    def last_hidden(self, before: Tensor | None = None) -> Tensor:
        """[len(rows), H]: the hidden state of each row's last kept node, whose next token is the new root; of rows that
        kept nothing that of `before`, which the session had until now."""
        if len(self.hidden) == 1 and self.paths[0]:
            return self.hidden[:, self.paths[0][-1]]
        if self.kept is not None:
            hidden = self.hidden if len(self.rows) == len(self.hidden) else self.hidden[self.rows]
            return hidden.gather(1, self.kept.leaf[:, None, None].expand(-1, 1, hidden.shape[-1]))[:, 0]
        states = self.hidden.new_zeros(len(self.rows), self.hidden.shape[-1]) if before is None else before.clone()
        for i, (row, path) in enumerate(zip(self.rows, self.paths, strict=True)):
            if path:
                states[i] = self.hidden[row, path[-1]]
        return states


def checked(tree: DraftTree, context: Context) -> DraftTree:
    """The tree, if it can be verified; nothing is read from the device. Raises ValueError for another object, other
    numbers of rows or nodes than the context's, other dtypes, and tokens that the target does not have."""
    if not isinstance(tree, DraftTree):
        raise ValueError(f"propose returned a {type(tree).__name__}; it has to return a DraftTree")
    shape, rows = list(tree.tokens.shape), len(context.lengths)
    if len(shape) != 2 or shape[0] != rows or not 1 <= shape[1] <= context.nodes:
        raise ValueError(f"propose returned tokens {shape}; expected [{rows}, 1 to {context.nodes}]")
    for part, values in (("tokens", tree.tokens), ("parents", tree.parents)):
        if values.dtype != torch.int64:
            raise ValueError(f"propose returned {part} of {values.dtype}; they have to be int64")
    if tree.largest >= (vocabulary := context.target.vocab_size):
        raise ValueError(f"propose returned token {tree.largest}, outside of 0 to {vocabulary - 1}")
    return tree


class Session(Protocol):
    """The state of one drafter during one call of generate; made for it and thrown away with it."""

    def propose(self, context: Context) -> DraftTree:
        """A tree of at most `context.nodes` nodes for every row, rooted at `context.roots`."""
        ...

    def observe(self, accepted: Accepted) -> None:
        """Take in what the last pass kept: called for each piece of the prompts and after every pass. Where all prompts
        have one token, nothing is observed before the first `propose`."""
        ...


@runtime_checkable
class MaskSlots(Protocol):
    """A session that puts mask slots into the tree that is verified, whoever drafted it: `propose` is `add_slots` on
    its own `draft`."""

    def expected_drafted(self, mode: str, rows: int) -> float:
        """Tokens that a pass of so many rows, in a decoding mode, is expected to draft rightly."""
        ...

    def draft(self, context: Context) -> DraftTree:
        """A tree without mask slots; `context.nodes` counts the slots too."""
        ...

    def add_slots(self, tree: DraftTree, context: Context) -> DraftTree:
        """The tree with as many mask slots as `context.nodes` leaves room for; the pass must run it as it is."""
        ...


class Drafts(Protocol):
    """Whatever makes sessions. reads: the target layers whose outputs they want to see."""

    @property
    def reads(self) -> tuple[int, ...]: ...

    def session(self, target: Target, rows: int) -> Session:
        """The state of one call over so many rows."""
        ...
