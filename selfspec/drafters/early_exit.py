"""Early exit: the target's first layers, left early through a light block, draft for the whole.

Sources: Kangaroo (arXiv 2404.18911: an adapter behind the first layers), LayerSkip (arXiv 2404.16710: verification goes
on from the layer that drafted), Draft & Verify (arXiv 2309.08168).

The first E layers run on draft nodes as they are. The exit block is a view of the target's last decoder layer, final
norm and lm_head with LoRA, and keeps keys and values of its own. Every node that is expanded stays in the tree, so what
the first E layers left in the target's cache is all used: verification begins at layer E from the hidden states the
draft already has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.core.cache import KVCache
from selfspec.core.contract import Accepted, Context
from selfspec.core.pass_cache import KV
from selfspec.core.passes import Part, tree_pass
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain, trusted
from selfspec.core.verify import Kept
from selfspec.drafters.base import Batch, DrafterConfig, Sample, training_dtype, whole
from selfspec.drafters.parts.expansion import Growth, Ranking, grow
from selfspec.drafters.parts.losses import counted_ahead, draft_loss
from selfspec.drafters.parts.tree_function import drafted_by
from selfspec.drafters.parts.views import Tail
from selfspec.drafters.parts.vocabulary import Reduced, check_draft_vocab, check_head
from selfspec.utils.checks import shares

Open = tuple[Part, KV]  # layers of a target over their cache, as the drafting function takes them


@dataclass
class EarlyExitConfig(DrafterConfig):
    """exit: E, the layers that draft; rank: of the block's LoRA, 0 for no block at all (the final norm and lm_head read
    the exit's hidden state: the training-free form, for targets trained for it); depth: of the tree at most; width:
    nodes expanded per depth at most; min_prob: a node with less path probability is not expanded, and drafting ends
    where there is no other; loss: kl, ce, ce_tv, tv, lk, accept, or package.module.function; draft_vocab: how many
    tokens can be drafted, the most frequent of the training text (None: all), by lm_head's rows as they are.

    Raises ValueError for a negative rank and other numbers outside their range.
    """

    exit: int = 1
    rank: int = 64
    depth: int = 4
    width: int = 3
    min_prob: float = 0.3
    loss: str = "kl"
    draft_vocab: int | None = None

    def __post_init__(self) -> None:
        whole("rank", self.rank, 0, why=" (no block, nothing trained)")
        for name in ("exit", "depth", "width"):
            whole(name, getattr(self, name))
        shares(self, "drafter", "min_prob", ends="[)")
        check_draft_vocab(self.draft_vocab, self.loss)


class EarlyExit(Reduced):
    """Drafts from the output of layer E - 1.

    Parameters: rank * (inputs + outputs) of every linear map of the target's last decoder layer, and of lm_head unless
    there is a draft vocabulary.
    """

    config: EarlyExitConfig
    prunable = False  # its nodes are in the target's cache already

    def __init__(self, target: Target, config: EarlyExitConfig) -> None:
        """Raises ValueError for an exit outside 1..L-1."""
        super().__init__(target, config, config.depth, config.draft_vocab)
        if target.n_layers < 2:
            raise ValueError("a target of one layer has none to exit after; early exit needs at least two")
        whole("exit", config.exit, 1, target.n_layers - 1, f": the target has {target.n_layers} layers")
        self.reads = (config.exit - 1,)
        dtype, with_head = training_dtype(target.dtype), config.draft_vocab is None
        self.tail = Tail(target, config.rank, dtype, "exit", head=with_head)
        check_head(self.tail, self.head, config.draft_vocab)

    @property
    def head(self) -> nn.Linear:
        """The target's lm_head."""
        return self.tail.head

    def along(self, hidden: Tensor, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits [B, S, V] along whole texts, or [B, S, V'] of a draft vocabulary, from the exit's hidden states [B, S,
        H] on them."""
        few = self.rows_of(self.head) if self.draft_head is None else self.draft_head
        out = self.tail.text(hidden, tokens, self.config.rank > 0, few is None, documents=documents)
        logits = out.logits if few is None else F.linear(out.hidden.to(few.dtype), few)
        assert logits is not None
        return logits

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        draft = self.along(batch.features[self.config.exit - 1], batch.tokens, batch.documents)
        return draft_loss(self.config.loss, [draft[:, :-1]], batch, 1.0, self.vocabulary, first=1)

    def counts(self, batch: Batch) -> Tensor:
        return counted_ahead(batch, 1, self.vocabulary, first=1)[0].sum()[None]

    def scores(self, sample: Sample, at: Tensor) -> Tensor:
        hidden = sample.features[self.config.exit - 1][None].to(self.tail.dtype)
        draft = self.along(hidden, sample.tokens[None].to(hidden.device))
        return self.of_all(torch.stack([draft[0, at + 1 + d] for d in range(self.depth)]))

    def session(self, target: Target, rows: int) -> EarlyExitSession:
        return EarlyExitSession(self, target, rows)


def exit_tree(
    drafter: EarlyExit, growth: Growth, ranking: Ranking, below: Open, block: Open | None, late: Tensor, behind: Tensor
) -> tuple[Tensor, ...]:
    """A tree behind roots, the exit's hidden states [B, N, H] on it, and the nodes that the block ran on; see
    `drafted_by`. below: the layers below the exit; block: the exit block, None for a drafter without one; late: [B, 1,
    H], an accepted leaf's hidden state; behind: int64 [B], 1 where the block has not yet run on that leaf."""
    hidden, roots = _below(drafter, below, chain(growth.tokens), 0), growth.tokens
    ids = None if drafter.vocabulary is None else drafter.vocabulary.expand(len(roots), -1)

    def step(growth: Growth, d: int) -> tuple[Tensor, Tensor | None]:
        nonlocal hidden, block
        if d == 0:
            states = torch.cat([torch.where(behind[:, None, None] > 0, late, hidden), hidden], 1)
            both = _block(drafter, block, states, chain(roots.expand(-1, 2)), 0)
            if block is not None:
                part, kv = block
                block = part, kv.committed(behind + 1)
            return both.gather(1, behind[:, None, None].expand(-1, 1, both.shape[-1])), ids
        stem, ran = growth.stem(), growth.expanded.shape[1]
        new = _below(drafter, below, stem, ran)
        hidden = torch.cat([hidden, new], 1)
        above = trusted(stem.tokens[:, 1:], stem.parents[:, 1:] - 1)  # the block has kept the root
        return _block(drafter, block, new, above, ran - 1), ids

    growth = grow(growth, step, drafter.depth, ranking)
    nodes, ran = growth.best(), growth.expanded.shape[1]
    if nodes[0].shape[1] > ran:
        hidden = torch.cat([hidden, _below(drafter, below, trusted(*nodes), ran)], 1)
    return *nodes, hidden, growth.expanded


def _below(drafter: EarlyExit, below: Open, tree: DraftTree, ran: int) -> Tensor:
    """The exit's hidden states [B, n, H] on the nodes behind `ran`."""
    return tree_pass(*below, None, tree.tokens[:, ran:], tree.parents, ran)[1][drafter.config.exit - 1]


def _block(drafter: EarlyExit, block: Open | None, hidden: Tensor, tree: DraftTree, ran: int) -> Tensor:
    """Logits [B, n, V or V'] of the nodes behind `ran` from the exit's hidden states [B, n, H] on them."""
    tokens = tree.tokens[:, ran:]
    if block is None:
        return drafter.along(hidden, tokens)
    logits, outputs, _ = tree_pass(*block, hidden, tokens, tree.parents, ran)
    if drafter.draft_head is not None:
        logits = F.linear(outputs[-1], drafter.draft_head)
    assert logits is not None
    return logits


class EarlyExitSession:
    """What one call keeps. cache: keys and values of the exit block (None without one); late: [B, 1, H], the exit's
    state at the last accepted node; behind: for each row 1 where the block has not read that node; lag: the same on the
    device; ran: nodes of the last tree that the block ran on, the root included; 0 while prompts are read."""

    def __init__(self, drafter: EarlyExit, target: Target, rows: int) -> None:
        self.drafter = drafter
        self.cache: KVCache | None = drafter.tail.target.cache(rows, 256) if drafter.config.rank else None
        self.late = torch.zeros(rows, 1, target.hidden_size, dtype=target.dtype, device=target.device)
        self.behind = [0] * rows
        self.lag = torch.zeros(rows, dtype=torch.long, device=target.device)
        self.ran = 0

    def propose(self, context: Context) -> DraftTree:
        drafter, config, engine = self.drafter, self.drafter.config, context.target.engine
        if not max(context.lengths) or context.nodes == 1:  # one-token prompts: the cache is not made yet
            self.ran = 0
            return chain(context.roots[:, None])
        tail, exit = drafter.tail, config.exit
        rows = engine.size(len(context.lengths))
        below = context.target.part(0, exit, logits=False), context.cache.view(0, exit, context.nodes, rows)
        tail.target.part(tail.layer + 1, tail.layer + 1)  # norm and lm_head alone; no view is built inside a graph
        block: Open | None = None
        if self.cache is not None:
            layers = tail.layer, tail.layer + 1
            part = tail.target.part(*layers, (tail.layer,), drafter.draft_head is None)
            block = part, self.cache.view(*layers, engine.size(context.nodes) + 2)
        inputs = below, block, self.late, self.lag
        nodes = drafted_by(exit_tree, drafter, context, inputs)
        tokens, parents, scores, hidden, expanded = nodes
        if self.cache is not None:
            self.cache.commit([list(range(n + 1)) for n in self.behind], lengths=self.lag + 1)
        self.ran, self.behind = expanded.shape[1], [0] * len(self.behind)
        own = {"start": exit, "hidden": hidden, "deepest": drafter.depth}
        return trusted(tokens, parents, scores, prunable=False, **own)

    def observe(self, accepted: Accepted) -> None:
        if self.cache is None:
            self.late, self.lag = self.late[: len(accepted.rows)], self.lag[: len(accepted.rows)]
            return
        states, kept = accepted.features[self.drafter.config.exit - 1], accepted.kept
        paths: list[list[int]] = [[] for _ in states]  # of nodes that the exit block has run
        for row, path in zip(accepted.rows, accepted.paths, strict=True):
            paths[row] = [node - 1 for node in path[1:] if node < self.ran]
        if self.ran:  # before rows move, which takes committed entries alone
            self.cache.commit(paths, self._run(kept) if kept is not None and len(kept.walked) == len(states) else None)
        if len(accepted.rows) < len(states):
            self.cache.select(accepted.rows)
            states = states[accepted.rows]
        if not self.ran:  # a part of the prompt, or a pass that nothing was drafted for
            tail, tree = self.drafter.tail, chain(states.new_zeros(states.shape[:2], dtype=torch.long))
            layers, prompt = (tail.layer, tail.layer + 1), states.shape[1] > 1
            tail.target.forward(tree, self.cache, False, layers, states, prompt=prompt)
            self.cache.commit(accepted.paths)
            self.late, self.behind = states[:, :1], [0] * len(states)
            self.lag = self.lag.new_zeros(len(states))
            return
        last = [path[-1] for path in accepted.paths]
        leaf = torch.tensor(last, device=states.device) if kept is None else kept.leaf
        self.late = states.gather(1, leaf[:, None, None].expand(-1, 1, states.shape[-1]))
        self.behind, self.lag = [int(n >= self.ran) for n in last], (leaf >= self.ran).long()

    def _run(self, kept: Kept) -> Kept:
        """Of the kept nodes those that the exit block has run, as it counts them: without the root."""
        path = kept.path[:, 1:]
        order = torch.arange(path.shape[1], device=path.device)
        count = ((path < self.ran) & (order < kept.lengths[:, None] - 1)).sum(-1, keepdim=True)
        path = torch.cat([torch.where(order < count, path - 1, order), count, torch.zeros_like(count)], 1)
        return Kept(torch.stack([path, torch.zeros_like(path)], 1))
