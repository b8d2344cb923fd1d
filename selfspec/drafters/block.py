"""A block of tokens from one pass of a small stack over the target's features.

DFlash (arXiv 2602.06036): the last token and masks read the text's features in every layer, and each other; each row
predicts the token at its own place. DSpark (arXiv 2607.05147): each row predicts the next one, the parent token
corrects it at low rank, and a head, which engines read, says how sure that is. Both are configurations of this drafter.
Apart from the correction its rows do not know which tokens were drafted before them. Trees over them are grown best
first, ranked by the target's noise; published code drafts one chain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.core.contract import Session
from selfspec.core.masks import additive, restarting
from selfspec.core.pass_cache import KV, TextCache, pass_cache
from selfspec.core.support import view
from selfspec.core.target import Target
from selfspec.drafters.base import Batch, DrafterConfig, Sample, one_of, pack, training_dtype, whole
from selfspec.drafters.parts.block_masks import training_masks
from selfspec.drafters.parts.block_stack import BlockCache, BlockStack, FeatureStack, read_text
from selfspec.drafters.parts.expansion import Growth, Nodes, Ranking, grow
from selfspec.drafters.parts.feature_cache import DraftSession, PendingRows
from selfspec.drafters.parts.feature_layer import check_layers, layers_of, usual_layers
from selfspec.drafters.parts.llama_config import layer_config
from selfspec.drafters.parts.losses import draft_loss, random_hosts
from selfspec.drafters.parts.markov import FORMS, Rows, confidence, corrected, shapes
from selfspec.drafters.parts.vocabulary import Reduced, check_draft_vocab
from selfspec.utils.checks import above_zero, shares


@dataclass
class BlockConfig(DrafterConfig):
    """layers: whose outputs are the features (None: three, low, in the middle and high); stack: decoder layers; size:
    rows of a block, the last token's included; predicts: own, a row's token is at its own place (DFlash), or next
    (DSpark); causal: whether a row reads only those before it; sliding: layers of the stack with a window (null: none);
    window: positions that these read, their own included; sliding_causal: whether their rows read only those before;
    correction: rank of the parent token's correction, 0 for none; correction_form: vanilla, gated by the row's hidden
    state, or rnn, with a state carried from parent to child; confidence: a head that says how sure a row's children
    are, rows, from its hidden state, or parents, from the parent token beside (null: none), for engines that read it:
    trees here are not ranked by it; width: nodes expanded per depth at most; min_prob: a node with less path
    probability is not expanded; anchors: blocks per row of a batch in training; loss: kl, ce, ce_tv, tv, lk, accept, or
    package.module.function; depth_decay: weight of each depth's loss relative to the one before; draft_vocab: how many
    tokens can be drafted, the most frequent of the training text (None: all); llama: what the layers have of their own
    (see `Eagle3Config`).

    Raises ValueError for values outside their range.
    """

    layers: list[int] | None = None
    stack: int = 2
    size: int = 8
    predicts: str = "next"
    causal: bool = False
    sliding: list[int] | None = None
    window: int | None = None
    sliding_causal: bool = True
    correction: int = 64
    correction_form: str = "vanilla"
    confidence: str | None = None
    width: int = 4
    min_prob: float = 0.05
    anchors: int = 32
    loss: str = "kl"
    depth_decay: float = 0.8
    draft_vocab: int | None = None
    llama: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_layers(self.layers)
        one_of("predicts", self.predicts, ("own", "next"))
        for name in ("causal", "sliding_causal"):
            one_of(name, getattr(self, name), (True, False))
        one_of("correction_form", self.correction_form, FORMS)
        one_of("confidence", self.confidence, (None, "rows", "parents"))
        for name in ("stack", "width", "anchors"):
            whole(name, getattr(self, name))
        least = 2 if self.predicts == "own" else 1
        whole("size", self.size, least, 64, " (the root's row predicts nothing)" if least == 2 else "")
        whole("correction", self.correction, 0, 4096, " (0: none)")  # published ranks: 256
        shares(self, "drafter", "min_prob", ends="[)")
        check_draft_vocab(self.draft_vocab, self.loss)
        above_zero(self, "drafter", "depth_decay")
        check_layers(self.sliding, "sliding")
        for layer in self.sliding or []:
            whole("sliding", layer, 0, self.stack - 1, f": drafter.stack is {self.stack}")
        if (self.sliding is None) != (self.window is None):
            raise ValueError("drafter.sliding names layers and drafter.window what they read; give both or neither")
        if self.window is not None:
            whole("window", self.window, self.size, 2**31 - 1, f": a block has drafter.size={self.size} rows")
        if self.causal and not self.sliding_causal:
            raise ValueError("drafter.sliding_causal=false with drafter.causal=true: no published form has that")
        if not self.correction and (self.correction_form != "vanilla" or self.confidence == "parents"):
            raise ValueError(
                f"drafter.correction=0 leaves nothing for drafter.correction_form={self.correction_form} and "
                f"drafter.confidence={self.confidence}; give it a rank"
            )
        if self.correction_form == "rnn" and self.predicts == "own":
            raise ValueError("drafter.correction_form=rnn needs drafter.predicts=next, as DSpark's rows do")

    @property
    def depth(self) -> int:
        """Tokens that a block drafts."""
        return self.size - 1 if self.predicts == "own" else self.size


class BlockDrafter(Reduced):
    """A stack that drafts a block.

    Parameters: those of `BlockStack`, and 2 * V * correction; of a draft vocabulary, V * correction and its size's;
    and those of a gate, a carried state or a confidence head, see `parts.markov`.
    """

    config: BlockConfig

    def __init__(self, target: Target, config: BlockConfig) -> None:
        super().__init__(target, config, config.depth, config.draft_vocab)
        dtype = training_dtype(target.dtype)
        self.reads = layers_of(config.layers, target, usual_layers(target))
        if config.draft_vocab is not None and target.lm_head.bias is not None:
            raise ValueError("drafter.draft_vocab: the target's lm_head has a bias; take drafter.draft_vocab=null")
        shape = layer_config(target, config.llama, target.vocab_size)
        self.stack = FeatureStack(target, self.reads, shape, config.stack, config.sliding or ())
        self.corrections, hidden, rank = nn.ParameterList(), target.hidden_size, config.correction
        if rank:
            drafted = config.draft_vocab or target.vocab_size
            for at, size in enumerate(shapes(config.correction_form, rank, hidden, target.vocab_size, drafted)):
                begin = (
                    torch.zeros(size) if at in (1, 3) else torch.randn(size) * (rank if at == 0 else size[1]) ** -0.5
                )
                self.corrections.append(begin.to(target.device, dtype))
        self.confidence = nn.ParameterList()  # weights and bias of the head
        if config.confidence is not None:
            width = hidden + rank * (config.confidence == "parents")
            self.confidence.extend([torch.zeros(n, device=target.device, dtype=dtype) for n in ((1, width), (1,))])
        self.prepare(True)
        self.embedding = nn.Parameter(target.model.get_input_embeddings().weight, requires_grad=False)
        self.head = view(target.lm_head)

    def prepare(self, mode: bool) -> None:
        """Weights of the correction and of the confidence head for decoding, in the target's dtype."""
        super().prepare(mode)
        parts = {f"correction_{i}": part for i, part in enumerate(self.corrections)}
        parts |= {f"confidence_{i}": part for i, part in enumerate(self.confidence)}
        pack(self, **{name: None if mode else part.detach().to(self.stack.dtype) for name, part in parts.items()})

    def _parts(self, name: str, trained: nn.ParameterList) -> list[Tensor]:
        """The weights that a pass reads, packed or in training."""
        packed = [getattr(self, f"{name}_{i}") for i in range(len(trained))]
        return list(trained) if any(part is None for part in packed) else packed

    def entering(self, roots: Tensor, mask: Tensor) -> Tensor:
        """What enters the stack, [..., size, H], behind roots int64 [...]."""
        first = F.embedding(roots.to(self.embedding.device), self.embedding)[..., None, :].to(mask)
        return torch.cat([first, mask.expand(*first.shape[:-2], self.config.size - 1, -1)], -2)

    def seen(self, near: Tensor, text: Tensor, block: Tensor, after: Tensor) -> list[Tensor]:
        """Which entries rows read, bool like all that is given: in layers that read all and, where there are some, in
        sliding ones. text: whether an entry is one of the text that a row may read; block: one of its own block; after:
        behind it there; near: how many positions before it, int64."""
        config = self.config
        seen = [text | (block & ~after if config.causal else block)]
        if config.window is not None:
            seen.append((text & (near < config.window)) | (block & ~after if config.sliding_causal else block))
        return seen

    def forecasts(self, hidden: Tensor) -> Rows:
        """What all depths forecast, from outputs [..., size, H] of the stack, before any correction."""
        rows = hidden[..., self.config.size - self.depth :, :]
        few = self.rows_of(self.head) if self.draft_head is None else self.draft_head
        if few is not None:
            return Rows(F.linear(rows.to(few.dtype), few), rows)
        return Rows(self.head(rows.to(self.head.weight.dtype)), rows)

    def start(self, like: Tensor) -> Tensor:
        """What roots carry on to their children, for rows [..., H]; see `markov.corrected`."""
        factors = self._parts("correction", self.corrections)
        return like.new_zeros(*like.shape[:-1], self.config.correction, dtype=factors[0].dtype if factors else None)

    def corrected(self, logits: Tensor, hidden: Tensor, parents: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [..., V'] with what the parent tokens, int64 [...], say; see `markov.corrected`."""
        if not self.corrections:
            return logits, state
        parts = self._parts("correction", self.corrections)
        return corrected(self.config.correction_form, parts, logits, hidden, parents, state)

    def sure(self, hidden: Tensor, parents: Tensor) -> Tensor | None:
        """Log odds [...] that what is drafted behind rows is accepted; None without a confidence head."""
        if not self.confidence:
            return None
        factors = self._parts("correction", self.corrections)[0] if self.config.confidence == "parents" else None
        return confidence(self._parts("confidence", self.confidence), hidden, parents, factors)

    def along(self, tokens: Tensor, anchors: Tensor, stacked: Tensor, documents: Tensor | None = None) -> Rows:
        """What blocks forecast whose roots are at positions `anchors`, int64 [B, A], of whole texts, tokens int64
        [B, S], features [B, S, F*H]; not corrected: [B, A, depth, ...]. documents: int64 [B, S], see `Batch`."""
        size, stack, device = self.config.size, self.stack.trained_stack, stacked.device
        rows, count, length = *anchors.shape, tokens.shape[1]
        order = torch.arange(length, device=device)
        read = order.expand(rows, -1) if documents is None else restarting(documents)
        cache = TextCache(self.stack.count, kept=True)
        stack.read(stacked, read, cache)
        places = (read.gather(1, anchors)[:, :, None] + torch.arange(size, device=device)).flatten(1)

        def seen(of: Tensor, row: Tensor, entry: Tensor) -> list[Tensor]:
            root, behind, text = anchors[of, row // size], entry - length, entry.clamp(max=length - 1)
            readable = entry < root
            if documents is not None:
                readable = readable & (documents[of, root] == documents[of, text])
            at = torch.where(behind < 0, read[of, text], places[of, behind.clamp(min=0)])
            block = (behind >= 0) & (behind // size == row // size)
            return self.seen(places[of, row] - at, readable, block, row < behind)

        entering = self.entering(tokens.gather(1, anchors), stack.mask).flatten(1, 2)
        masks = training_masks(seen, (rows, count * size, length + count * size), device, entering.dtype)
        hidden = stack(entering, places.clamp(max=self.stack.last), masks, cache)
        return self.forecasts(hidden.unflatten(1, (count, size)))

    def behind(self, rows: Rows, parents: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Along known paths: corrected logits [..., depth, V'] of rows whose parent tokens, int64 [..., depth], are
        known, and log odds [...] of each depth's confidence, where there is a head."""
        state, logits, odds = self.start(rows.hidden[..., 0, :]), [], []
        for d in range(self.depth):
            hidden, above = rows.hidden[..., d, :], parents[..., d]
            scores, state = self.corrected(rows.logits[..., d, :], hidden, above, state)
            logits.append(scores)
            if (sure := self.sure(hidden, above)) is not None:
                odds.append(sure)
        return torch.stack(logits, -2), odds

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        hosts = random_hosts(batch, self.depth, config.anchors)
        rows = self.along(batch.tokens, hosts + 1, self.stack.stacked(batch.features), batch.documents)
        at = hosts[:, :, None] + 1 + torch.arange(self.depth, device=hosts.device)
        logits, odds = self.behind(rows, batch.tokens.gather(1, at.flatten(1)).view_as(at))
        return draft_loss(config.loss, logits.unbind(2), batch, config.depth_decay, self.vocabulary, hosts, odds)

    def counts(self, batch: Batch) -> Tensor:
        return super().counts(batch).repeat(1 + bool(self.confidence))  # whose head has one for each depth

    def scores(self, sample: Sample, at: Tensor) -> Tensor:
        tokens, device = sample.tokens[None].to(self.stack.device), self.stack.device
        stacked = self.stack.stacked(sample.features)[None].to(self.stack.trained_stack.fc.weight.dtype)
        at = at.to(device)
        rows = self.along(tokens, at[None] + 1, stacked)
        parents = tokens[0, at[:, None] + 1 + torch.arange(self.depth, device=device)]
        return self.of_all(self.behind(rows, parents[None])[0][0].transpose(0, 1))

    def session(self, target: Target, rows: int) -> Session:
        return DraftSession(self, BlockCache(self.stack), block_tree, (self.stack.ready,), self.config.size)


def forecast(drafter: BlockDrafter, roots: Tensor, stack: BlockStack, pending: PendingRows[KV]) -> Rows:
    """What a block forecasts behind roots, int64 [B], from the features up to there: [B, depth, ...]; not corrected."""
    size, last, stacked = drafter.config.size, drafter.stack.last, pending.stacked
    kv = read_text(stack, pending.layers, stacked, last).committed(pending.last + 1)
    entries = kv.lengths[:, None] + torch.arange(size, device=stacked.device)
    order = torch.arange(kv.size, device=stacked.device)
    near = entries[:, :, None] - order  # [B, size, S]
    inside = (order - kv.lengths[:, None])[:, None].expand_as(near)  # row of the block
    entering = drafter.entering(roots, stack.mask)
    seen = drafter.seen(near, inside < 0, (inside >= 0) & (inside < size), near < 0)
    masks = [additive(one, entering.dtype)[:, None] for one in seen]
    cache = pass_cache(kv, entries, None, None)
    return drafter.forecasts(stack(entering, entries.clamp(max=last), masks, cache))


def block_tree(
    drafter: BlockDrafter, growth: Growth, ranking: Ranking, stack: BlockStack, pending: PendingRows[KV]
) -> Nodes:
    """A tree behind roots, from the features up to there; see `drafted_by`."""
    rows, vocabulary = forecast(drafter, growth.tokens[:, 0], stack, pending), drafter.vocabulary
    ids = None if vocabulary is None else vocabulary.expand(len(rows.logits), -1)
    state, before = drafter.start(rows.hidden[:, :1]), growth.frontier[:, :1]

    def step(growth: Growth, d: int) -> tuple[Tensor, Tensor | None]:
        nonlocal state, before
        parents = growth.tokens.gather(1, growth.frontier)  # [B, m]
        logits, hidden = (part[:, d, None].expand(-1, parents.shape[1], -1) for part in rows)
        if drafter.config.correction_form == "rnn":
            above = (growth.parents.gather(1, growth.frontier) - before[:, :1]).clamp(min=0)  # -1: of the root
            carried = state.gather(1, above[:, :, None].expand(-1, -1, state.shape[-1]))
        else:
            carried = state
        scores, state = drafter.corrected(logits, hidden, parents, carried)
        before = growth.frontier
        return scores, ids

    return grow(growth, step, drafter.depth, ranking).best()
