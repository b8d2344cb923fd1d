"""Sequential heads: head k also reads the tokens drafted before it along its path.

`form="hydra"` (Hydra, arXiv 2402.05109): the embeddings of the root and of all drafted ancestors enter the head's first
layer beside the target's last hidden state. `form="markov"`: Medusa's heads (arXiv 2401.10774) plus a low-rank
correction of their logits from the parent token alone.

With `prefix`, one more decoder layer reads the target's last features and the token after each of them, root included,
with keys and values of its own, and the heads read its output in place of the target's hidden state (after the prefix
attention of Hydra++, same paper).

The root is known when drafting begins, so one product gives all heads' logits with the root as their only path. It
picks a shortlist of tokens per depth; the tree is then grown from real conditional scores on the shortlists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.core.contract import Accepted, Context, Session
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain, trusted
from selfspec.drafters.base import Batch, DrafterConfig, Sample, one_of, pack, training_dtype, whole
from selfspec.drafters.parts.draft_layers import LayersCache, read
from selfspec.drafters.parts.expansion import Growth, Nodes, Ranking, grow, perturbed, shortlisted
from selfspec.drafters.parts.feature_cache import DraftSession, PendingRows
from selfspec.drafters.parts.feature_layer import DraftView, LastLayer
from selfspec.drafters.parts.losses import draft_loss, random_rows
from selfspec.drafters.parts.tree_function import drafted_by
from selfspec.drafters.parts.views import SharedHeads
from selfspec.drafters.parts.vocabulary import Reduced, check_draft_vocab
from selfspec.utils.checks import above_zero, shares

_SHORTLIST = 128  # tokens per depth that conditional scores are computed for
_FORGET = 0.15  # share of positions that train without drafted tokens, so that the shortlist's scores are trained too


@dataclass
class SequentialConfig(DrafterConfig):
    """heads: K; form: hydra or markov; prefix: whether a decoder layer, trained in full, reads the verified text for
    the heads; blocks: residual blocks x + SiLU(Wx + b) per head; rank: of each head's LoRA on lm_head; correction: rank
    of the parent's correction (markov); width: nodes expanded per depth at most; min_prob: a node with less path
    probability is not expanded; loss: kl, ce, ce_tv, tv, lk, accept, or package.module.function; depth_decay: weight of
    each head's loss relative to the head before it; draft_vocab: how many tokens can be drafted, the most frequent of
    the training text (None: all).

    Raises ValueError for a number below 1, an unknown form or loss, or a share outside its range.
    """

    heads: int = 4
    form: str = "hydra"
    prefix: bool = True
    blocks: int = 2
    rank: int = 32
    correction: int = 128
    width: int = 6
    min_prob: float = 0.2
    loss: str = "kl"
    depth_decay: float = 0.9
    draft_vocab: int | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "blocks", "rank", "correction", "width"):
            whole(name, getattr(self, name))
        one_of("form", self.form, ("hydra", "markov"))
        one_of("prefix", self.prefix, (True, False))
        check_draft_vocab(self.draft_vocab, self.loss)
        above_zero(self, "drafter", "depth_decay")
        shares(self, "drafter", "min_prob", ends="[)")


class SequentialHeads(Reduced):
    """K heads on a frozen target, each reading its path.

    Parameters: hydra K*blocks*(H*H + H) + K*(K+1)/2*H*H + K*rank*(H + V);
    markov K*blocks*(H*H + H) + K*H*correction + correction*V + K*rank*(H + V);
    prefix adds 3*H*H and a decoder layer; of a draft vocabulary, its size in place of V.

    Packed for decoding, all [out, in], what all heads share side by side: narrow [K, r, H] and columns [K, V, r], LoRA
    of all heads; start [K*H, H], for hydra [K*H, 2H], the first block and the root's part of the path; biases [L, K, 1,
    H]; deep [L - 1, K, H, H]; path_0, ...: per head, of the drafted tokens' embeddings; corrected [V, correction]
    (markov).
    """

    config: SequentialConfig
    narrow: Tensor
    columns: Tensor
    start: Tensor
    biases: Tensor
    deep: Tensor
    corrected: Tensor | None

    def __init__(self, target: Target, config: SequentialConfig) -> None:
        super().__init__(target, config, config.heads, config.draft_vocab)
        heads, hidden, dtype = config.heads, target.hidden_size, training_dtype(target.dtype)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, device=target.device, dtype=dtype)

        # Zero blocks: every head starts as the target's own next-token prediction.
        self.weight = nn.Parameter(zeros(config.blocks, heads, hidden, hidden))
        self.bias = nn.Parameter(zeros(config.blocks, heads, 1, hidden))
        if config.form == "hydra":
            self.path = nn.ParameterList([zeros((k + 1) * hidden, hidden) for k in range(heads)])
        else:
            start = torch.randn(heads, hidden, config.correction, device=target.device, dtype=dtype) / math.sqrt(hidden)
            self.path = nn.ParameterList([start, zeros(config.correction, config.draft_vocab or target.vocab_size)])
        self.prefix: LastLayer | None = None
        if config.prefix:
            self.reads = (target.n_layers - 1,)
            self.prefix = LastLayer(target, self.reads, 1, True, dtype)
        self.shared = SharedHeads(target, heads, config.rank, dtype, config.draft_vocab)
        self.embedding = nn.Parameter(target.model.get_input_embeddings().weight, requires_grad=False)
        self.compute_dtype = target.dtype
        self._pack(None)

    def drafts_only(self, ids: Tensor) -> None:
        super().drafts_only(ids)
        self.shared.select(ids)

    def prepare(self, mode: bool) -> None:
        super().prepare(mode)
        if self.vocabulary is not None:
            self.shared.select(self.vocabulary)
        self._pack(None if mode else self.compute_dtype)

    def _pack(self, dtype: torch.dtype | None) -> None:
        """Packed weights in a dtype, or none."""
        names = ["narrow", "columns", "start", "biases", "deep", "corrected"]
        names += [f"path_{head}" for head in range(self.depth)]
        if dtype is None:
            pack(self, **dict.fromkeys(names))
            return

        def ready(weight: Tensor) -> Tensor:
            return weight.detach().to(dtype).contiguous()

        width = self.weight.shape[-1]
        a, b = self.shared.weights()
        start, corrected = ready(self.weight[0].flatten(0, 1)), None
        if self.config.form == "hydra":  # the root's part is known to all heads at once, the drafted tokens' is not
            roots = torch.cat([w[:width].t() for w in self.path])
            start, paths = torch.cat([start, ready(roots)], 1), [ready(w[width:].t()) for w in self.path]
        else:
            paths, corrected = list(ready(self.path[0].transpose(1, 2))), ready(self.path[1].t())
        shared = ready(a.mT), ready(b.mT), start, ready(self.bias), ready(self.weight[1:]), corrected
        pack(self, **dict(zip(names, [*shared, *paths], strict=True)))

    def _path(self, head: int) -> Tensor:
        packed: Tensor = getattr(self, f"path_{head}")
        return packed

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., H] of tokens, brought to unit root mean square in the target's dtype."""
        rows = F.embedding(tokens.to(self.embedding.device), self.embedding).to(tokens.device)
        exact = torch.promote_types(rows.dtype, torch.float32)
        scale = rows.shape[-1] ** 0.5 / rows.norm(dim=-1, keepdim=True, dtype=exact).clamp(min=1e-30)
        unit: Tensor = rows * scale
        return unit.to(rows.dtype)

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """The products of decoding, called as a module so that benchmarks can time them: `from_root` of two tensors,
        `on_shortlist` of four."""
        return self.from_root(*given) if len(given) == 2 else (self.on_shortlist(*given),)

    def from_root(self, hidden: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
        """From hidden states [B, H] and embedded roots [B, H] alone: the first layer's sums [B, K, H], and all heads'
        logits [K, B, V] with no path but the root."""
        known = torch.cat([hidden, roots], 1) if self.config.form == "hydra" else hidden
        first = F.linear(known, self.start, self.biases[0].flatten()).view(len(hidden), self.depth, -1)
        x = hidden + F.silu(first.transpose(0, 1))  # [K, B, H]
        for weight, bias in zip(self.deep, self.biases[1:], strict=True):
            x = x + F.silu(torch.baddbmm(bias, x, weight.mT))
        logits: Tensor = self.shared(x, self.narrow.mT, self.columns.mT)
        if self.corrected is not None:  # only the first head's parent is the root
            logits[0] += F.linear(F.linear(roots, self._path(0)), self.corrected)
        return first, logits

    def on_shortlist(self, hidden: Tensor, first: Tensor, path: Tensor, ids: Tensor) -> Tensor:
        """Head k's logits [B, m, C] of a shortlist int64 [B, C] from hidden states [B, H], the sums [B, K, H] of
        `from_root` and embedded paths [B, m, k, H] beyond the root."""
        k = path.shape[2]
        sums = first[:, k, None]
        if self.config.form == "hydra":
            sums = sums + F.linear(path.flatten(2), self._path(k))
        x = hidden[:, None] + F.silu(sums.expand(-1, path.shape[1], -1))
        for weight, bias in zip(self.deep, self.biases[1:], strict=True):
            x = x + F.silu(F.linear(x, weight[k], bias[k, 0]))
        logits = shortlisted(x, self.shared.base.weight, ids)
        logits += shortlisted(F.linear(x, self.narrow[k]), self.columns[k], ids)
        if self.corrected is not None:
            logits += shortlisted(F.linear(path[:, :, -1], self._path(k)), self.corrected, ids)
        bias = self.shared.base.bias
        return logits if bias is None else logits + bias[ids][:, None]

    def along(self, hidden: Tensor, embedded: Tensor, forget: Tensor | None = None) -> Tensor:
        """Logits [K, n, V] of all heads for hidden states [n, H] with the text itself as path: embedded [n, K, H] holds
        the root and the tokens after it. Where forget, bool [n], is True, the path is the root alone."""
        x = hidden.expand(self.depth, -1, -1)
        sums = torch.baddbmm(self.bias[0].to(x.dtype), x, self.weight[0].transpose(-1, -2).to(x.dtype))
        drafted = embedded if forget is None else embedded.masked_fill(forget[:, None, None], 0)
        if self.config.form == "hydra":
            paths = [torch.cat([embedded[:, :1], drafted[:, 1 : k + 1]], 1).flatten(1) for k in range(self.depth)]
            sums = sums + torch.stack([p @ w.to(p.dtype) for p, w in zip(paths, self.path, strict=True)])
        x = x + F.silu(sums)
        for weight, bias in zip(self.weight[1:], self.bias[1:], strict=True):
            x = x + F.silu(torch.baddbmm(bias.to(x.dtype), x, weight.transpose(-1, -2).to(x.dtype)))
        logits: Tensor = self.shared(x, *self.shared.weights())
        if self.config.form == "markov":
            parents = torch.cat([embedded[:, :1], drafted[:, 1:]], 1).transpose(0, 1)  # [K, n, H]
            logits = logits + parents @ self.path[0].to(x.dtype) @ self.path[1].to(x.dtype)
        return logits

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, n = batch.tokens, batch.tokens.shape[1] - 1 - self.depth  # n: positions from which all heads have one
        hidden = self.read(tokens, batch.hidden, batch.features, batch.documents)
        paths = self.embed(tokens[:, 1:].unfold(1, self.depth, 1)[:, :n].flatten(0, 1))
        forget = random_rows(batch, n).flatten() < _FORGET
        draft = self.along(hidden[:, :n].flatten(0, 1), paths, forget).unflatten(1, (tokens.shape[0], n))
        return draft_loss(self.config.loss, draft.unbind(0), batch, self.config.depth_decay, self.vocabulary)

    def read(
        self, tokens: Tensor, hidden: Tensor, features: dict[int, Tensor], documents: Tensor | None = None
    ) -> Tensor:
        """What the heads read at each position but the last of whole texts, [B, S - 1, H]."""
        if self.prefix is None:
            return hidden[:, :-1]
        states = self.prefix.fused(self.prefix.stacked({layer: part[:, :-1] for layer, part in features.items()}))
        # An entry reads a position and the token after it: it belongs where the position does.
        before_last = None if documents is None else documents[:, :-1]
        entering, after = self.prefix.entry(states, tokens[:, 1:]), tokens[:, 1:]
        return self.prefix.tail.text(entering, after, logits=False, documents=before_last).hidden

    def scores(self, sample: Sample, at: Tensor) -> Tensor:
        device, dtype = sample.hidden.device, self.compute_dtype
        path = sample.tokens[at[:, None] + 1 + torch.arange(self.depth)].to(device)
        features = {layer: part[None].to(dtype) for layer, part in sample.features.items()}
        hidden = self.read(sample.tokens[None].to(device), sample.hidden[None].to(dtype), features)
        return self.of_all(self.along(hidden[0, at], self.embed(path)))

    def session(self, target: Target, rows: int) -> Session:
        if self.prefix is None:
            return SequentialSession(self)
        return DraftSession(self, LayersCache([self.prefix]), sequential_tree)


def sequential_tree(
    drafter: SequentialHeads, growth: Growth, ranking: Ranking, seen: Tensor | PendingRows[tuple[DraftView, ...]]
) -> Nodes:
    """A tree behind roots from the states [B, H] before them, or from what the prefix layer reads up to there; see
    `drafted_by`."""
    if isinstance(seen, Tensor):
        hidden = seen
    else:
        assert drafter.prefix is not None
        hidden = read([drafter.prefix], seen, False)[0].hidden[:, 0]
    first, logits = drafter(hidden, drafter.embed(growth.tokens[:, 0]))
    ranked, vocabulary = logits, drafter.vocabulary
    if ranking.noise is not None:
        noise = ranking.noise if vocabulary is None else ranking.noise[..., vocabulary]
        ranked = perturbed(logits, noise.transpose(0, 1), ranking.temperature)
    ids = ranked.topk(min(_SHORTLIST, logits.shape[-1]), -1).indices  # [K, B, C]
    tokens = ids if vocabulary is None else vocabulary[ids]
    path = logits.new_zeros(len(hidden), 1, 0, hidden.shape[-1])  # [B, m, k, H]: of the nodes expanded last
    before: Tensor | int = 0  # the first of those nodes

    def step(growth: Growth, k: int) -> tuple[Tensor, Tensor]:
        nonlocal path, before
        if k == 0:
            return logits[0].gather(1, ids[0])[:, None], tokens[0]
        at = growth.frontier[0]
        above = growth.parents[:, at] - before  # [B, m]: which of the nodes expanded before
        path = path.gather(1, above[:, :, None, None].expand(-1, -1, *path.shape[2:]))
        path = torch.cat([path, drafter.embed(growth.tokens[:, at])[:, :, None]], 2)
        before = growth.frontier[0, 0]
        return drafter(hidden, first, path, ids[k])[0], tokens[k]

    return grow(growth, step, drafter.depth, ranking).best()


class SequentialSession:
    """What one call keeps without a prefix layer: the state [B, H] before each row's root."""

    def __init__(self, drafter: SequentialHeads) -> None:
        self.drafter = drafter
        self.hidden: Tensor | None = None

    def propose(self, context: Context) -> DraftTree:
        drafter = self.drafter
        if self.hidden is None or context.nodes == 1:  # one-token prompts: nothing was seen yet
            return chain(context.roots[:, None])
        nodes = drafted_by(sequential_tree, drafter, context, (self.hidden,))
        return trusted(*nodes, deepest=drafter.depth)

    def observe(self, accepted: Accepted) -> None:
        self.hidden = accepted.last_hidden(self.hidden)
