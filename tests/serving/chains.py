"""Chain decoding as vLLM does it: one path of K drafted tokens in every pass, each the drafter's first choice."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfspec.core.contract import Accepted, Context
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain
from selfspec.drafters.eagle3 import Eagle3
from selfspec.drafters.medusa import Medusa
from selfspec.drafters.parts.feature_layer import Reader


@dataclass
class Chain:
    """Drafts chains of `length` tokens for one row and counts how far each was accepted. drafts: passes that verified a
    draft; accepted: of these, how many accepted at least 1, 2, ... drafted tokens."""

    drafter: Eagle3 | Medusa
    length: int
    drafts: int = 0
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accepted = [0] * self.length
        self.reads = self.drafter.reads

    def session(self, target: Target, rows: int) -> ChainSession:
        assert rows == 1, "one row at a time"
        return ChainSession(self)


class ChainSession:
    def __init__(self, owner: Chain) -> None:
        self.owner, self.reader = owner, None
        self.hidden: Tensor | None = None
        self.drafted = False
        if isinstance(owner.drafter, Eagle3):
            self.reader = Reader(owner.drafter.layer)

    @torch.no_grad()
    def propose(self, context: Context) -> DraftTree:
        drafter, tokens = self.owner.drafter, context.roots[:, None]
        self.drafted = True
        if isinstance(drafter, Medusa):
            assert self.hidden is not None
            best = drafter(self.hidden, self.owner.length).argmax(-1)  # [K, 1]
            return chain(torch.cat([tokens, best.T], 1))
        assert self.reader is not None
        read = self.reader.read(context, True, self.owner.length, self.owner.length)
        logits, _, states, entries = drafter.layer.behind(read, True)
        for step in range(self.owner.length):
            if step > 0:
                logits, _, states = drafter.layer.step(entries, states, chain(tokens[:, 1:]), 1)
            assert logits is not None
            best = logits[:, -1].argmax(-1)
            if drafter.vocabulary is not None:
                best = drafter.vocabulary[drafter.of_vocabulary(logits[:, -1]).argmax(-1)]
            tokens = torch.cat([tokens, best[:, None]], 1)
        return chain(tokens)

    def observe(self, accepted: Accepted) -> None:
        if self.reader is not None:
            self.reader.observe(accepted)
        if accepted.paths and accepted.paths[0]:
            self.hidden = accepted.last_hidden(self.hidden)
        if self.drafted and accepted.paths:
            self.owner.drafts += 1
            for depth in range(len(accepted.paths[0]) - 1):
                self.owner.accepted[depth] += 1
        self.drafted = False
