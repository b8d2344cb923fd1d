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
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.drafters.base import Drafter, Sample, number, one_of, training_dtype, whole
from selfspec.drafting import Growth, last_hidden, measure_along, perturbed
from selfspec.features import FeatureLayer, Reader
from selfspec.generate import Accepted, Context
from selfspec.target import Target
from selfspec.training.losses import KINDS, ahead
from selfspec.tree import DraftTree, chain
from selfspec.views import SharedHeads

_SHORTLIST = 128  # tokens per depth that conditional scores are computed for
_FORGET = 0.15  # share of positions that train without drafted tokens, so that the shortlist's scores are trained too


class Sequential(Drafter):
    """K heads on a frozen target, each reading its path.

    Parameters: hydra K*blocks*(H*H + H) + K*(K+1)/2*H*H + K*rank*(H + V);
    markov K*blocks*(H*H + H) + K*H*correction + correction*V + K*rank*(H + V);
    prefix adds 3*H*H and a decoder layer.
    """

    kind = "sequential"

    def __init__(
        self,
        target: Target,
        heads: int = 4,
        form: str = "hydra",
        prefix: bool = True,
        blocks: int = 2,
        rank: int = 32,
        correction: int = 128,
        width: int = 6,
        least: float = 0.2,
        loss: str = "kl",
        depth_decay: float = 0.9,
    ) -> None:
        """heads: K; prefix: whether a decoder layer, trained in full, reads the verified text for them; blocks:
        residual blocks x + SiLU(Wx + b) per head; rank: of each head's LoRA on lm_head; correction: rank of the
        parent's correction (markov); width: nodes expanded per depth at most; least: a node with less chance than
        this to be on the accepted path is not expanded; loss: kl or ce; depth_decay: weight of each head's loss
        relative to the head before it.

        Raises ValueError for a number below 1, an unknown form or loss, or a share outside its range.
        """
        super().__init__()
        sizes = {"heads": heads, "blocks": blocks, "rank": rank, "correction": correction, "width": width}
        for name, value in sizes.items():
            whole(name, value)
        one_of("form", form, ("hydra", "markov"))
        one_of("prefix", prefix, (True, False))
        one_of("loss", loss, KINDS)
        number("depth_decay", depth_decay, 0, math.inf)
        number("least", least, 0, 1)
        self.shape: dict[str, Any] = {"heads": heads, "form": form, "prefix": prefix, "blocks": blocks}
        self.shape |= {"rank": rank, "correction": correction, "width": width, "least": least}
        self.shape |= {"loss": loss, "depth_decay": depth_decay}
        self.heads, self.form, self.width, self.least = heads, form, width, least
        self.loss_kind, self.depth_decay, self.shortest, self.whole_layers = loss, depth_decay, heads + 2, prefix
        hidden = target.hidden_size
        made: dict[str, Any] = {"device": target.device, "dtype": training_dtype(target.dtype)}
        # Zero blocks: every head starts as the target's own next-token prediction.
        self.weight = nn.Parameter(torch.zeros(blocks, heads, hidden, hidden, **made))
        self.bias = nn.Parameter(torch.zeros(blocks, heads, 1, hidden, **made))
        if form == "hydra":
            self.path = nn.ParameterList([torch.zeros((k + 1) * hidden, hidden, **made) for k in range(heads)])
        else:
            start = torch.randn(heads, hidden, correction, **made) / math.sqrt(hidden)
            self.path = nn.ParameterList([start, torch.zeros(correction, target.vocab_size, **made)])
        self.prefix: FeatureLayer | None = None
        if prefix:
            self.features = (target.n_layers - 1,)
            self.prefix = FeatureLayer(target, self.features, 1, True, training_dtype(target.dtype))
        self.shared = SharedHeads(target, heads, rank, training_dtype(target.dtype))
        self.embedding = nn.Parameter(target.model.get_input_embeddings().weight, requires_grad=False)
        self.compute_dtype = target.dtype
        # measured[kind][d]: the factor on scores at depth d + 1 that makes their softmax the best forecast
        self.measured = {kind: [[1.0] for _ in range(heads)] for kind in ("greedy", "sampled")}
        self._fast: dict[str, Any] = {}
        self._hidden: Tensor | None = None
        self._reader: Reader | None = None

    @staticmethod
    def parameter_count(
        target: Target,
        heads: int = 4,
        form: str = "hydra",
        prefix: bool = True,
        blocks: int = 2,
        rank: int = 32,
        correction: int = 128,
        **_: Any,
    ) -> int:
        """Trained parameters of this shape."""
        hidden, vocab = target.hidden_size, target.vocab_size
        path = heads * (heads + 1) // 2 * hidden**2 if form == "hydra" else (heads * hidden + vocab) * correction
        own = heads * blocks * (hidden**2 + hidden) + path + heads * rank * (hidden + vocab)
        return own + (FeatureLayer.parameter_count(target, 1, 1, True) if prefix else 0)

    # -- the heads

    def train(self, mode: bool = True) -> Sequential:
        """Leaving training mode lays out the weights once for decoding, in the target's dtype."""
        super().train(mode)
        self._fast = {}
        if not mode:
            with torch.no_grad():
                self._fast = self._laid_out()
        return self

    def _laid_out(self) -> dict[str, Any]:
        """Weights as products of few rows want them: [out, in], contiguous; what all heads share side by side."""

        def ready(weight: Tensor) -> Tensor:
            return weight.detach().to(self.compute_dtype).contiguous()

        width = self.weight.shape[-1]
        a, b = self.shared.weights()
        fast: dict[str, Any] = {"a": ready(a), "b": ready(b)}
        fast |= {"narrow": ready(a.transpose(1, 2)), "columns": ready(b.transpose(1, 2))}
        fast |= {"deep": ready(self.weight[1:]), "across": ready(self.weight[1:].transpose(-1, -2))}
        fast |= {"bias": ready(self.bias), "start": ready(self.weight[0].flatten(0, 1))}
        if self.form == "hydra":  # the root's part is known to all heads at once, the drafted tokens' is not
            roots = torch.cat([w[:width].t() for w in self.path])
            fast["start"] = torch.cat([fast["start"], ready(roots)], 1)
            fast["path"] = [ready(w[width:].t()) for w in self.path]
        else:
            fast |= {"path": ready(self.path[0].transpose(1, 2)), "correction": ready(self.path[1].t())}
        return fast

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., H] of tokens, brought to unit root mean square in the target's dtype."""
        found = F.embedding(tokens, self.embedding)
        exact = torch.promote_types(found.dtype, torch.float32)
        scale = found.shape[-1] ** 0.5 / found.norm(dim=-1, keepdim=True, dtype=exact).clamp(min=1e-30)
        return (found * scale).to(found.dtype)

    def products(self) -> list[nn.Module]:
        return [self] if self.prefix is None else [self, *self.prefix.tail.products()]

    def forward(
        self,
        hidden: Tensor,
        roots: Tensor,
        first: Tensor | None = None,
        path: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """For decoding: (first, logits).

        From hidden states [B, H] and embedded roots [B, H] alone: the first layer's sums [B, K, H], and all heads'
        logits [K, B, V] with no path but the root. With those sums, embedded paths [B, m, k, H] beyond the root and a
        shortlist int64 [B, C]: head k's logits [B, m, C].
        """
        fast, rows = self._fast, len(hidden)
        if first is None:
            known = torch.cat([hidden, roots], 1) if self.form == "hydra" else hidden
            first = F.linear(known, fast["start"], fast["bias"][0].flatten()).view(rows, self.heads, -1)
            x = hidden + F.silu(first.transpose(0, 1))  # [K, B, H]
            for weight, bias in zip(fast["across"], fast["bias"][1:], strict=True):
                x = x + F.silu(torch.baddbmm(bias, x, weight))
            logits = self.shared(x, fast["a"], fast["b"])
            if self.form == "markov":  # only the first head's parent is the root
                logits[0] += F.linear(F.linear(roots, fast["path"][0]), fast["correction"])
            return first, logits
        assert path is not None
        assert ids is not None
        k = path.shape[2]
        sums = first[:, k, None]
        if self.form == "hydra":
            sums = sums + F.linear(path.flatten(2), fast["path"][k])
        x = hidden[:, None] + F.silu(sums.expand(-1, path.shape[1], -1))
        for weight, bias in zip(fast["deep"], fast["bias"][1:], strict=True):
            x = x + F.silu(F.linear(x, weight[k], bias[k, 0]))
        logits = _choose(x, self.shared.base.weight, ids)
        logits += _choose(F.linear(x, fast["narrow"][k]), fast["columns"][k], ids)
        if self.form == "markov":
            logits += _choose(F.linear(path[:, :, -1], fast["path"][k]), fast["correction"], ids)
        bias = self.shared.base.bias
        return first, logits if bias is None else logits + bias[ids][:, None]

    def along(self, hidden: Tensor, embedded: Tensor, forget: Tensor | None = None) -> Tensor:
        """Logits [K, n, V] of all heads for hidden states [n, H] with the text itself as path: embedded [n, K, H] holds
        the root and the tokens after it. Where forget, bool [n], is True, the path is the root alone."""
        x = hidden.expand(self.heads, -1, -1)
        sums = torch.baddbmm(self.bias[0].to(x.dtype), x, self.weight[0].transpose(-1, -2).to(x.dtype))
        drafted = embedded if forget is None else embedded.masked_fill(forget[:, None, None], 0)
        if self.form == "hydra":
            paths = [torch.cat([embedded[:, :1], drafted[:, 1 : k + 1]], 1).flatten(1) for k in range(self.heads)]
            sums = sums + torch.stack([p @ w.to(p.dtype) for p, w in zip(paths, self.path, strict=True)])
        x = x + F.silu(sums)
        for weight, bias in zip(self.weight[1:], self.bias[1:], strict=True):
            x = x + F.silu(torch.baddbmm(bias.to(x.dtype), x, weight.transpose(-1, -2).to(x.dtype)))
        logits = self.shared(x, *self.shared.weights())
        if self.form == "markov":
            parents = torch.cat([embedded[:, :1], drafted[:, 1:]], 1).transpose(0, 1)  # [K, n, H]
            logits = logits + parents @ self.path[0].to(x.dtype) @ self.path[1].to(x.dtype)
        return logits

    # -- decoding

    def propose(self, context: Context) -> DraftTree:
        if self._reader is not None and self._reader.ready and context.nodes > 1:
            self._hidden = self._reader.read(context, False)[1][:, 0]
        if self._hidden is None or context.nodes == 1:  # one-token prompts: nothing was seen yet
            return chain(context.roots[:, None])
        sharpness = self.measured["greedy" if context.noise is None else "sampled"]
        roots = self.embed(context.roots)
        first, scores = self(self._hidden, roots)
        if context.noise is not None:
            # one position more than the heads reach: the bonus token's, so that the walk finds it in the same block
            noise = context.noise.ahead([n + 1 for n in context.lengths], self.heads + 1)[:, :-1].transpose(0, 1)
            scores = perturbed(scores, noise, context.temperature)
        short = scores.topk(min(_SHORTLIST, scores.shape[-1]), -1)
        ids = short.indices  # [K, B, C]
        growth = Growth(context.roots, context.nodes, self.width, self.least)
        growth.extend(short.values[0][:, None] * sharpness[0][0], ids[0])
        path = self.embed(growth.tokens[:, growth.frontier[0]])[:, :, None]  # [B, m, 1, H]
        for k in range(1, min(self.heads, context.nodes - 1)):
            if not growth.frontier.shape[1]:
                break
            _, scores = self(self._hidden, roots, first, path, ids[k])
            if context.noise is not None:
                scores = perturbed(scores, noise[k].gather(1, ids[k])[:, None], context.temperature)
            before = growth.frontier[0, 0]
            growth.extend(scores * sharpness[k][0], ids[k])
            if k + 1 < self.heads:
                at = growth.frontier[0]
                above = growth.parents[:, at] - before  # [B, m]: which of the expanded nodes
                path = path.gather(1, above[:, :, None, None].expand(-1, -1, *path.shape[2:]))
                path = torch.cat([path, self.embed(growth.tokens[:, at])[:, :, None]], 2)
        return growth.tree()

    def observe(self, accepted: Accepted) -> None:
        if self.prefix is None:
            self._hidden = last_hidden(self._hidden, accepted)
            return
        if self._reader is None:
            self._reader = Reader(self.prefix)
        self._reader.observe(accepted)
        self._hidden = None

    # -- training

    def loss(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, logits = batch["tokens"], batch["logits"]
        n = tokens.shape[1] - 1 - self.heads  # positions from which every head has a target
        hidden = self._read(tokens, batch["hidden"], batch["features"])
        paths = self.embed(tokens[:, 1:].unfold(1, self.heads, 1)[:, :n].flatten(0, 1))
        generator = torch.Generator().manual_seed(int(tokens.sum()))  # the same after an interruption
        forget = torch.rand(len(paths), generator=generator).to(tokens.device) < _FORGET
        draft = self.along(hidden[:, :n].flatten(0, 1), paths, forget).unflatten(1, (tokens.shape[0], n))
        means = ahead(self.loss_kind, draft, logits, tokens, batch["mask"])
        weights = self.depth_decay ** torch.arange(self.heads, device=means.device)
        return (means * weights).sum() / weights.sum(), {self.loss_kind: means.detach()}

    def _read(self, tokens: Tensor, hidden: Tensor, features: dict[int, Tensor]) -> Tensor:
        """What the heads read at each position but the last of whole texts, [B, S - 1, H]."""
        if self.prefix is None:
            return hidden[:, :-1]
        states = self.prefix.fused({layer: part[:, :-1] for layer, part in features.items()})
        return self.prefix.text(states, tokens[:, 1:], logits=False).hidden

    @torch.no_grad()
    def measure(self, kind: str, samples: Sequence[Sample]) -> dict[str, Any]:
        def scores(sample: Sample, at: Tensor) -> Tensor:
            device, dtype = sample.hidden.device, self.compute_dtype
            path = sample.tokens[at[:, None] + 1 + torch.arange(self.heads)].to(device)
            features = {layer: part[None].to(dtype) for layer, part in sample.features.items()}
            hidden = self._read(sample.tokens[None].to(device), sample.hidden[None].to(dtype), features)
            return self.along(hidden[0, at], self.embed(path))

        _, sharpness, figures = measure_along(samples, self.heads, scores)
        self.measured[kind] = [[factor] for factor in sharpness]
        return figures

    # -- on disk

    def adapters(self) -> dict[str, nn.Module]:
        return self.shared.adapters()

    def own_state(self) -> dict[str, Tensor]:
        state = {"weight": self.weight, "bias": self.bias, **{f"path.{i}": p for i, p in enumerate(self.path)}}
        if self.prefix is None:
            return state
        return state | {f"prefix.{name}": tensor for name, tensor in self.prefix.state().items()}


def _choose(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Products [B, m, C] of x [B, m, D] with the rows `ids`, int64 [B, C], of weight [V, D]."""
    columns = F.embedding(ids, weight)
    if len(x) == 1:
        return F.linear(x[0], columns[0])[None]
    return x @ columns.transpose(1, 2)
