"""Mask tokens in the verification tree: the pass that verifies one draft writes the next.

Behind some nodes v of the draft tree stand mask slots, seen by nothing else. Slot j of a group stands j positions
behind v, reads the kept text, v's path and the rows before it, and forecasts the token at one position more. On these
rows alone an adapter is active (`parts/gated.py`). Where the walk ends, the rows behind that node are the next draft:
a forecast for each depth, corrected by the parent token, which is known by then.

Nearest work: BiTA (arXiv 2401.12522) and parallel prompt decoding (2405.18628) use trained prompt embeddings
alone; UNO (2609.04010) has an adapter on the rows, in a pass of its own; mask-token probing (2603.17942) trains
nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.core.contract import Accepted, Context, Session
from selfspec.core.masks import additive, restarting
from selfspec.core.pass_cache import TextCache
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain, trusted
from selfspec.core.verify import Kept
from selfspec.drafters.base import Batch, DrafterConfig, Sample, one_of, training_dtype, whole
from selfspec.drafters.parts.expansion import Growth, Ranking, ahead, grow
from selfspec.drafters.parts.gated import GatedTarget
from selfspec.drafters.parts.losses import draft_loss, random_hosts
from selfspec.drafters.parts.mask_layout import Layout, behind, fitting, layout, with_mask_slots
from selfspec.drafters.parts.static_tree import static_tree
from selfspec.drafters.parts.tree_function import drafted_by
from selfspec.drafters.parts.vocabulary import Reduced, check_draft_vocab
from selfspec.utils.checks import above_zero, shares

MOST = 64  # mask slots of a group; the last of them would forecast a token that far away


@dataclass
class MaskConfig(DrafterConfig):
    """masks: K, rows of a group at most; passes: 1, mask slots stand in the pass that verifies, or 2, they have a pass
    of their own behind the root; adapter: of mask slots, lora, or vectors (a scale and a bias for each mask and map);
    rank: of the LoRA, 0 for no adapter and masks that are not trained; maps: names of the linear maps of the target's
    layers that the adapter is put into (None: the last of each block, which is what attention and MLP write);
    correction: rank of the parent token's correction, 0 for none; width: nodes expanded per depth at most; min_prob: a
    node with less path probability is not expanded; anchors: groups per row of a batch in training; loss: kl, ce,
    ce_tv, tv, lk, accept, or package.module.function; depth_decay: weight of each row's loss relative to the one before
    it; draft_vocab: how many tokens can be drafted, the most frequent of the training text (None: all).

    Raises ValueError for values outside their range.
    """

    masks: int = 6
    passes: int = 1
    adapter: str = "lora"
    rank: int = 64
    maps: list[str] | None = None
    correction: int = 128
    width: int = 4
    min_prob: float = 0.05
    anchors: int = 24
    loss: str = "kl"
    depth_decay: float = 0.9
    draft_vocab: int | None = None

    def __post_init__(self) -> None:
        whole("masks", self.masks, 1, MOST)
        for name in ("width", "anchors"):
            whole(name, getattr(self, name))
        one_of("passes", self.passes, (1, 2))
        one_of("adapter", self.adapter, ("lora", "vectors"))
        for name in ("rank", "correction"):
            whole(name, getattr(self, name), 0, why=" (0: none)")
        if self.rank and self.maps is not None and not self.maps:
            raise ValueError("drafter.maps is empty; name linear maps such as o_proj, or take drafter.rank=0")
        shares(self, "drafter", "min_prob", ends="[)")
        check_draft_vocab(self.draft_vocab, self.loss)
        above_zero(self, "drafter", "depth_decay")


class Mask(Reduced):
    """K mask tokens and a gated adapter.

    Parameters: K*H, of every map named rank * (inputs + outputs) (vectors: 2*K*outputs), and
    K*H*correction + correction*V; of a draft vocabulary, its size in place of V.
    """

    config: MaskConfig

    def __init__(self, target: Target, config: MaskConfig) -> None:
        super().__init__(target, config, config.masks, config.draft_vocab)
        target.part(0, target.n_layers)  # refused here where the target has no parts
        dtype = training_dtype(target.dtype)
        rank = None if config.adapter == "vectors" else config.rank
        self.gated = GatedTarget(target, config.masks, rank, config.maps, dtype, "mask")
        hidden, device = target.model.get_input_embeddings().weight.shape[1], target.device
        self.start: nn.Parameter | None = None
        if config.correction:
            start = torch.randn(config.masks, hidden, config.correction, device=device, dtype=dtype)
            self.start = nn.Parameter(start / math.sqrt(hidden))
            drafted = config.draft_vocab or target.vocab_size
            self.out = nn.Parameter(torch.zeros(config.correction, drafted, device=device, dtype=dtype))
        self.embedding = nn.Parameter(target.model.get_input_embeddings().weight, requires_grad=False)
        self.target, self.vocab = target, target.vocab_size

    def corrected(self, logits: Tensor, parents: Tensor, mask: int | Tensor) -> Tensor:
        """Logits [..., V'] of a mask of a group (from 0; int64 [B]: of each row), of those [..., V] of all tokens, with
        what the parent token, int64 [...], says."""
        logits = self.of_vocabulary(logits)
        if self.start is None:
            return logits
        embedded = F.embedding(parents.to(self.embedding.device), self.embedding)
        unit = F.rms_norm(embedded, embedded.shape[-1:]).to(self.start)
        return logits + (unit @ self.start[mask] @ self.out).to(logits.dtype)

    def along(self, tokens: Tensor, anchors: Tensor, cache: TextCache, documents: Tensor | None = None) -> Tensor:
        """Logits [B, A, K, V] of groups behind positions `anchors`, int64 [B, A], of whole texts, tokens int64 [B, S],
        whose keys and values `cache` holds. documents: int64 [B, S], see `Batch`."""
        rows, count, masks = *anchors.shape, self.config.masks
        device, length = tokens.device, tokens.shape[1]
        step = torch.arange(1, masks + 1, device=device)
        ids = (self.vocab - 1 + step).expand(rows, count, -1).flatten(1)
        read = torch.arange(length, device=device).expand(rows, -1) if documents is None else restarting(documents)
        positions = (read.gather(1, anchors)[:, :, None] + step).flatten(1)
        group = torch.arange(count, device=device).repeat_interleave(masks)
        order = torch.arange(count * masks, device=device)
        same_group = (group[:, None] == group) & (order[:, None] >= order)  # [A*K, A*K]
        hosts = anchors.repeat_interleave(masks, 1)
        text = torch.arange(length, device=device) <= hosts[:, :, None]  # [B, A*K, S]
        if documents is not None:
            text = text & (documents.gather(1, hosts)[:, :, None] == documents[:, None])
        places = torch.cat([read, positions], 1)  # [B, S + A*K]

        def mask(window: int | None) -> Tensor:
            seen = torch.cat([text, same_group.expand(rows, -1, -1)], 2)
            if window is not None:
                seen = seen & (positions[:, :, None] - places[:, None] < window)
            return additive(seen, self.target.dtype)[:, None]

        view = self.gated.behind(0, list(range(masks)) * count)
        limit = (self.target.max_positions or 2**62) - 1
        out = view.text(ids, True, cache=cache, masks=view.per_type(mask), positions=positions.clamp(max=limit))
        assert out.logits is not None
        grouped: Tensor = out.logits.unflatten(1, (count, masks))
        return grouped

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        config, masks = self.config, self.config.masks
        if batch.cache is None:
            raise ValueError("mask tokens read the target's keys and values, which are not kept; take train.cache=none")
        anchors = random_hosts(batch, masks, config.anchors)
        logits = self.along(batch.tokens, anchors, batch.cache, batch.documents)  # [B, A, K, V]
        guesses = (self.corrected(logits[:, :, j], batch.tokens.gather(1, anchors + 1 + j), j) for j in range(masks))
        return draft_loss(config.loss, guesses, batch, config.depth_decay, self.vocabulary, anchors)

    def scores(self, sample: Sample, at: Tensor) -> Tensor:
        tokens = sample.tokens[None].to(self.target.device)
        cache = TextCache(self.target.n_layers, kept=True)
        self.target.text(tokens, False, cache=cache)
        draft = self.along(tokens, at[None].to(tokens.device), cache)[0]  # [n, K, V]
        scores = [self.corrected(draft[:, j], tokens[0, at + 1 + j], j) for j in range(self.depth)]
        return self.of_all(torch.stack(scores))

    def session(self, target: Target, rows: int) -> Session:
        return (MaskSession if self.config.passes == 1 else TwoPassSession)(self)


def mask_tree(
    drafter: Mask, growth: Growth, ranking: Ranking, logits: Tensor, rows: Tensor, of: Tensor, slots: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """A tree behind roots, and where asked for mask slots in it as `with_mask_slots` gives them; see `drafted_by`.
    logits: [B, N, V] of a pass; rows, of: see `behind`."""
    known = rows >= 0
    forecast = drafter.of_vocabulary(logits.gather(1, rows.clamp(min=0)[..., None].expand(-1, -1, logits.shape[-1])))
    ids = None if drafter.vocabulary is None else drafter.vocabulary.expand(len(rows), -1)

    def step(growth: Growth, d: int) -> tuple[Tensor, Tensor | None]:
        parents = growth.tokens.gather(1, growth.frontier)  # [B, m]
        logits = drafter.corrected(forecast[:, d, None].expand(-1, parents.shape[1], -1), parents, of[:, d])
        return logits.masked_fill(~known[:, d, None, None], max(-1e9, torch.finfo(logits.dtype).min)), ids

    nodes = grow(growth, step, drafter.depth, ranking).best()
    return with_mask_slots(drafter.vocab, nodes, slots) if slots else nodes


class MaskSession:
    """What one call keeps. logits: [B, N, V] of the last pass, None before the first; forecasts: of that pass, as
    `behind` gives them; hosts, slots, count: of the last tree, see there."""

    def __init__(self, drafter: Mask) -> None:
        self.drafter = drafter
        self.logits: Tensor | None = None
        self.forecasts: tuple[Tensor, Tensor] | None = None
        self.hosts: Tensor | None = None
        self.slots: tuple[int, ...] = ()
        self.count = 0

    def propose(self, context: Context) -> DraftTree:
        if self.logits is None or context.nodes == 1:
            return self.add_slots(chain(context.roots[:, None]), context)
        slots = self._layout(context.mode, context.nodes).slots
        if not any(slots):
            return self.add_slots(self.draft(context), context)
        return self._with_slots(slots, self._drafted(context, slots))

    def draft(self, context: Context) -> DraftTree:
        if self.logits is None or context.nodes == 1:
            return chain(context.roots[:, None])
        return trusted(*self._drafted(context, ()), deepest=self.drafter.depth)

    def _drafted(self, context: Context, slots: tuple[int, ...]) -> tuple[Tensor, ...]:
        """What `mask_tree` gives, grown from the last pass."""
        logits, drafter, config = self.logits, self.drafter, self.drafter.config
        assert logits is not None
        assert self.forecasts is not None
        rows, of = self.forecasts
        reduced = replace(context, nodes=self._layout(context.mode, context.nodes).nodes)
        width = max(context.nodes, config.masks)
        if logits.shape[1] > width:  # of a pass with more rows than this one will have
            at = rows.clamp(min=0)[:, :, None].expand(-1, -1, logits.shape[-1])
            logits, rows = logits.gather(1, at), torch.arange(config.masks, device=rows.device).where(rows >= 0, rows)
        if logits.shape[1] < width:
            logits = F.pad(logits, (0, 0, 0, width - logits.shape[1]))
        return drafted_by(mask_tree, drafter, reduced, (logits, rows, of, slots))

    def add_slots(self, tree: DraftTree, context: Context) -> DraftTree:
        if context.nodes == 1:
            self.hosts = None
            return tree
        drafter, room = self.drafter, context.nodes - tree.tokens.shape[1]
        if tree.scores is None:  # a root alone, behind which one group stands
            scores = torch.ones_like(tree.tokens, dtype=torch.float64)
            slots = tuple(int(j < room) for j in range(drafter.config.masks))
        else:
            scores, slots = tree.scores, fitting(self._layout(context.mode, context.nodes).slots, room)
        parts = with_mask_slots(drafter.vocab, (tree.tokens, tree.parents, scores), slots)
        return self._with_slots(slots, parts, tree.deepest)

    def _with_slots(self, slots: tuple[int, ...], parts: tuple[Tensor, ...], deepest: int | None = None) -> DraftTree:
        """The tree with mask slots that a pass runs, of what `with_mask_slots` gives. deepest: level of its nodes."""
        tokens, parents, scores, hosts = parts
        self.hosts, self.slots, self.count = hosts, slots, tokens.shape[1] - hosts.shape[1]
        each = [j for j, width in enumerate(slots) for _ in range(min(width, self.count))]
        deepest = min(self.drafter.depth, self.count - 1) if deepest is None else deepest
        more = {"prunable": False, "through": self.drafter.gated.behind(self.count, each), "plain": self.count}
        return trusted(tokens, parents, scores, **more, deepest=deepest)

    def expected_drafted(self, mode: str, rows: int) -> float:
        return self._layout(mode, rows).drafted

    def _layout(self, mode: str, rows: int) -> Layout:
        return layout(tuple(map(tuple, self.drafter.calibration[mode].acceptance)), rows)

    def observe(self, accepted: Accepted) -> None:
        if accepted.logits is None or self.hosts is None or not any(self.slots):
            self.logits = self.hosts = None
            return
        logits, hosts, going = accepted.logits, self.hosts, len(accepted.rows) == len(accepted.logits)
        self.logits, hosts = (part if going else part[accepted.rows] for part in (logits, hosts))
        kept = accepted.kept or Kept.of(accepted.paths, accepted.paths, hosts.device)
        self.forecasts = behind(kept, hosts, self.slots, self.count, self.drafter.config.masks)


class TwoPassSession:
    """Mask slots in a pass of their own: behind the root, before each verification. The root's own row says which token
    follows it, so that the drafted tree begins with a token that is right (UNO, arXiv 2609.04010)."""

    def __init__(self, drafter: Mask) -> None:
        self.drafter = drafter

    def propose(self, context: Context) -> DraftTree:
        roots, drafter, config = context.roots, self.drafter, self.drafter.config
        if context.nodes == 1:
            return chain(roots[:, None])
        masks = torch.arange(drafter.vocab, drafter.vocab + config.masks, device=roots.device)
        rows = chain(torch.cat([roots[:, None], masks.expand(len(roots), -1)], 1))
        out = drafter.gated.behind(1, list(range(config.masks))).forward(rows, context.cache)
        assert out.logits is not None
        first, noise = out.logits[:, 0], ahead(context, 1)
        if noise is not None:
            first = first.to(torch.promote_types(first.dtype, torch.float32)) / context.temperature + noise[:, 0]
        first = first.argmax(-1)
        behind = replace(context, roots=first, lengths=[n + 1 for n in context.lengths], nodes=context.nodes - 1)
        each = torch.arange(config.masks, device=roots.device).expand(len(roots), -1)
        inputs = out.logits, each + 1, each.contiguous(), ()
        tokens, parents, scores = drafted_by(mask_tree, drafter, behind, inputs)
        tokens = torch.cat([roots[:, None], tokens], 1)
        parents = torch.cat([torch.full_like(parents[:, :1], -1), parents + 1], 1)
        scores = torch.cat([torch.ones_like(scores[:, :1]), scores], 1)
        return trusted(tokens, parents, scores, deepest=drafter.depth + 1)

    def expected_drafted(self, mode: str, rows: int) -> float:
        return sum(static_tree(self.drafter.calibration[mode].acceptance, rows - 1)[2])  # the certain token counts 1

    def observe(self, accepted: Accepted) -> None:
        pass
