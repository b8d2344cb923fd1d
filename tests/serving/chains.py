"""Chain decoding as vLLM does it: one path of K drafted tokens in every pass, each the drafter's first choice."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfspec.core.contract import Accepted, Context
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain
from selfspec.drafters.block import BlockDrafter, forecast
from selfspec.drafters.eagle3 import Eagle3
from selfspec.drafters.eagle3 import forecast as forecast_of_masks
from selfspec.drafters.medusa import Medusa
from selfspec.drafters.parts.block_stack import BlockCache
from selfspec.drafters.parts.draft_layers import LayersCache, read
from selfspec.drafters.parts.unrolled import Unrolled


@dataclass
class Chain:
    """Drafts chains of `length` tokens for one row. drafted: the position of each chain's root, and its tokens."""

    drafter: Unrolled | Medusa | BlockDrafter
    length: int
    drafted: list[tuple[int, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reads = self.drafter.reads

    def accepted(self, text: list[int]) -> list[int]:
        """How many chains hold at least 1, 2, ... tokens of the text that the target goes on with, wherever decoding
        was cut: vLLM counts the last pass whole, too."""
        counts = [0] * self.length
        for root, tokens in self.drafted:
            for depth, token in enumerate(tokens):
                if text[root + 1 + depth] != token:
                    break
                counts[depth] += 1
        return counts

    def session(self, target: Target, rows: int) -> "ChainSession":
        assert rows == 1, "one row at a time"
        return ChainSession(self)


class ChainSession:
    def __init__(self, owner: Chain) -> None:
        self.owner = owner
        self.cache: LayersCache | BlockCache | None = None
        self.hidden: Tensor | None = None
        self.begun = False
        if isinstance(owner.drafter, Unrolled):
            self.cache = LayersCache([owner.drafter.layer])
        elif isinstance(owner.drafter, BlockDrafter):
            self.cache = BlockCache(owner.drafter.stack)

    def propose(self, context: Context) -> DraftTree:
        if not self.begun:  # vLLM verifies no draft in the pass behind the prompt
            self.begun = True
            return chain(context.roots[:, None])
        tokens = self._chain(context)
        self.owner.drafted.append((context.lengths[0], tokens[0, 1:].tolist()))
        return chain(tokens)

    @torch.no_grad()
    def _chain(self, context: Context) -> Tensor:
        drafter, tokens = self.owner.drafter, context.roots[:, None]
        if isinstance(drafter, Medusa):
            best = drafter(self.hidden, self.owner.length).argmax(-1)  # [K, 1]
            return torch.cat([tokens, best.T], 1)
        if isinstance(drafter, BlockDrafter):
            assert isinstance(self.cache, BlockCache)
            rows = self.cache.rows(context, False, self.owner.length, drafter.config.size)
            block = forecast(drafter, tokens[:, 0], drafter.stack.ready, rows)
            state = drafter.start(block.hidden[:, 0])
            for depth in range(self.owner.length):
                logits, hidden = (part[:, depth] for part in block)
                logits, state = drafter.corrected(logits, hidden, tokens[:, -1], state)
                best = logits.argmax(-1)
                tokens = torch.cat([tokens, best[:, None]], 1)
            return tokens
        assert isinstance(self.cache, LayersCache)
        if isinstance(drafter, Eagle3) and drafter.config.parallel:
            rows = self.cache.rows(context, True, self.owner.length, drafter.depth)
            best = forecast_of_masks(drafter, rows)[:, : self.owner.length].argmax(-1)
            return torch.cat([tokens, best], 1)
        rows = self.cache.rows(context, True, self.owner.length, self.owner.length)
        (root,) = read([drafter.layer], rows, True)
        logits, states = root.logits, root.states
        for step in range(self.owner.length):
            if step > 0:
                logits, _, states = drafter.layer.step(root, states, chain(tokens[:, 1:]), 1)
            best = logits[:, -1].argmax(-1)
            if drafter.vocabulary is not None:
                best = drafter.vocabulary[drafter.of_vocabulary(logits[:, -1]).argmax(-1)]
            tokens = torch.cat([tokens, best[:, None]], 1)
        return tokens

    def observe(self, accepted: Accepted) -> None:
        if self.cache is not None:
            self.cache.observe(accepted)
        if accepted.paths and accepted.paths[0]:
            self.hidden = accepted.last_hidden(self.hidden)
