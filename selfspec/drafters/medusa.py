"""Medusa heads (arXiv 2401.10774): head k guesses the token k + 2 places on from the target's last hidden state alone.

The vocabulary projection is by default a view of the target's own lm_head with one LoRA per head, so that one matrix
product with the shared weights serves all heads; `projection="full"` gives each head V x H weights, as in the paper.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.drafters.base import Drafter, Sample, training_dtype
from selfspec.generate import Accepted, Context
from selfspec.target import Target
from selfspec.training.losses import KINDS, distance, masked_mean
from selfspec.tree import DraftTree, chain, grow

CHOICES = 16  # choices per depth that are measured, and that a tree may hold below one node
_PRIOR = [0.5 * 0.5**r for r in range(CHOICES)]  # before anything was measured


def _perturbed(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """By what children are ranked where the target samples: what it will add to its own logits, but with less weight.

    A head's distribution is a mixture over the paths it can not see, so the target's own is sharper, and the more so
    the lower the temperature: less noise than the target's ranks best (measured, see notebooks/LOG.md).
    """
    return logits / temperature + min(1.0, 0.85 * temperature**2) * noise


@dataclass(frozen=True)
class _Plan:
    """A static tree for some number of rows: `index` finds each node's token among root and choices."""

    tree: DraftTree
    index: Tensor
    depth: int
    choices: int


class Medusa(Drafter):
    """K heads on a frozen target.

    Parameters: blocks K*L*(H*H + H); projection "lora" K*rank*(H + V), "full" K*H*V.
    """

    kind = "medusa"

    def __init__(
        self,
        target: Target,
        heads: int = 4,
        blocks: int = 1,
        projection: str = "lora",
        rank: int = 32,
        loss: str = "kl",
        depth_decay: float = 0.8,
    ) -> None:
        """heads: K; blocks: residual blocks x + SiLU(Wx + b) per head; loss: kl or ce; depth_decay: weight of each
        head's loss relative to the head before it (the paper's 0.8).

        Raises ValueError for a number below 1, or an unknown projection or loss.
        """
        super().__init__()
        for name, value in (("heads", heads), ("blocks", blocks), ("rank", rank)):
            if value < 1:
                raise ValueError(f"drafter.{name}={value} must be at least 1")
        if projection not in ("lora", "full"):
            raise ValueError(f"drafter.projection={projection!r} must be 'lora' or 'full'")
        if loss not in KINDS:
            raise ValueError(f"drafter.loss={loss!r} must be one of {', '.join(KINDS)}")
        if not depth_decay > 0:
            raise ValueError(f"drafter.depth_decay={depth_decay} must be above 0")
        self.shape: dict[str, Any] = {"heads": heads, "blocks": blocks, "projection": projection, "rank": rank}
        self.shape |= {"loss": loss, "depth_decay": depth_decay}
        self.heads, self.loss_kind, self.depth_decay = heads, loss, depth_decay
        hidden, device = target.hidden_size, target.device
        dtype = training_dtype(target.dtype)
        # Zero blocks: every head starts as the target's own next-token prediction.
        self.weight = nn.Parameter(torch.zeros(blocks, heads, hidden, hidden, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(blocks, heads, 1, hidden, device=device, dtype=dtype))
        shared = {id(p): p for p in target.lm_head.parameters()}
        view = copy.deepcopy(target.lm_head, dict(shared))
        self.lora: nn.Module | None = None
        if projection == "lora":
            path = next(n for n, m in target.model.named_modules() if m is target.lm_head)
            self.lora_name = path.rsplit(".", 1)[-1]
            self.lora = nn.ModuleDict({self.lora_name: view})
            with warnings.catch_warnings():  # PEFT warns of a second adapter, and of tied weights it might merge into
                warnings.simplefilter("ignore", UserWarning)
                for k in range(heads):
                    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=[self.lora_name])
                    inject_adapter_in_model(config, self.lora, adapter_name=f"head_{k}")
            for name, parameter in self.lora.named_parameters():
                if "lora_" in name:
                    parameter.data = parameter.data.to(dtype)
                    parameter.requires_grad_(True)
        else:
            self.full = nn.Parameter(view.weight.detach().to(dtype).repeat(heads, 1, 1))
            self.view = view  # keeps a bias, should the target have one
        self.vocab, self.compute_dtype = target.vocab_size, target.dtype
        # chances[kind][d][r]: the r-th choice of head d is right, given that its parent was
        self.chances = {kind: [list(_PRIOR) for _ in range(heads)] for kind in ("greedy", "sampled")}
        self._stacked: tuple[Tensor, ...] | None = None
        self._plans: dict[tuple[str, int, int], _Plan] = {}
        self._hidden: Tensor | None = None

    @staticmethod
    def parameter_count(
        hidden: int, vocab: int, heads: int = 4, blocks: int = 1, projection: str = "lora", rank: int = 32, **_: Any
    ) -> int:
        """Trained parameters of this shape."""
        per_head = rank * (hidden + vocab) if projection == "lora" else hidden * vocab
        return heads * (blocks * (hidden * hidden + hidden) + per_head)

    # -- the heads' product

    def _weights(self) -> tuple[Tensor, ...]:
        """Block weights [L, K, H, H], biases [L, K, 1, H]; then LoRA A [K, H, r] and B [K, r, V], or full [K, H, V]."""
        blocks = (self.weight.transpose(-1, -2), self.bias)
        if self.lora is None:
            return (*blocks, self.full.transpose(1, 2))
        layer: Any = self.lora[self.lora_name]  # type: ignore[index]
        names = [f"head_{k}" for k in range(self.heads)]
        a = torch.stack([layer.lora_A[n].weight.t() for n in names])
        b = torch.stack([layer.lora_B[n].weight.t() * layer.scaling[n] for n in names])
        return (*blocks, a, b)

    def train(self, mode: bool = True) -> Medusa:
        """Leaving training mode stacks the weights of all heads once, in the target's dtype, for decoding."""
        super().train(mode)
        self._stacked, self._plans = None, {}
        if not mode:
            with torch.no_grad():
                self._stacked = tuple(w.detach().to(self.compute_dtype).contiguous() for w in self._weights())
        return self

    def forward(self, hidden: Tensor, heads: int | None = None) -> Tensor:
        """Logits [K, n, V] of the first `heads` heads for hidden states [n, H] (post-norm, as lm_head reads them)."""
        heads = heads or self.heads
        weights = self._stacked or self._weights()
        x = hidden.expand(heads, -1, -1)  # [K, n, H]
        for weight, bias in zip(weights[0], weights[1], strict=True):
            x = x + F.silu(torch.baddbmm(bias[:heads].to(x.dtype), x, weight[:heads].to(x.dtype)))
        if self.lora is None:
            logits = x @ weights[2][:heads].to(x.dtype)
            bias = self.view.bias
            return logits if bias is None else logits + bias
        base: nn.Linear = self.lora[self.lora_name].base_layer  # type: ignore[index, union-attr, assignment]
        logits = F.linear(x, base.weight, base.bias)
        a, b = weights[2][:heads], weights[3][:heads]
        return torch.baddbmm(logits, (x @ a.to(x.dtype)), b.to(x.dtype))

    # -- decoding

    def _plan(self, kind: str, rows: int, nodes: int, device: torch.device) -> _Plan:
        key = (kind, rows, nodes)
        if key not in self._plans:
            parents, ranks, chance = grow(self.chances[kind], nodes)
            depths = [0]
            for parent in parents[1:]:
                depths.append(depths[parent] + 1)
            choices = max(ranks) + 1
            index = [0] + [1 + (d - 1) * choices + r for d, r in zip(depths[1:], ranks[1:], strict=True)]
            shape = torch.tensor(parents, device=device).expand(rows, -1)
            tree = DraftTree(torch.zeros_like(shape), shape, torch.tensor(chance, device=device).expand(rows, -1))
            self._plans[key] = _Plan(tree, torch.tensor(index, device=device), max(depths), choices)
        return self._plans[key]

    def propose(self, context: Context) -> DraftTree:
        kind = "greedy" if context.noise is None else "sampled"
        plan = self._plan(kind, len(context.lengths), context.nodes, context.roots.device)
        if self._hidden is None or plan.depth == 0:  # one-token prompts: nothing was seen yet
            return chain(context.roots[:, None])
        scores = self(self._hidden, plan.depth).transpose(0, 1)  # [B, depth, V]
        if context.noise is not None:
            # one position more than the heads reach: the bonus token's, so that the walk finds it in the same block
            ahead = context.noise.ahead([n + 1 for n in context.lengths], plan.depth + 1)
            scores = _perturbed(scores, ahead[:, :-1], context.temperature)
        choices = scores.topk(plan.choices, -1).indices  # [B, depth, choices]
        tokens = torch.cat([context.roots[:, None], choices.flatten(1)], 1)
        return plan.tree.with_tokens(tokens[:, plan.index])

    def observe(self, accepted: Accepted) -> None:
        if all(accepted.paths):
            self._hidden = accepted.last_hidden()
            return
        if self._hidden is None:
            self._hidden = accepted.hidden.new_zeros(len(accepted.rows), accepted.hidden.shape[-1])
        for i, (row, path) in enumerate(zip(accepted.rows, accepted.paths, strict=True)):
            if path:
                self._hidden[i] = accepted.hidden[row, path[-1]]

    # -- training

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, hidden, logits = batch["tokens"], batch["hidden"], batch["logits"]
        n = tokens.shape[1] - 1 - self.heads  # positions from which every head has a target
        if n < 1:
            raise ValueError(f"rows of {tokens.shape[1]} tokens are too short for {self.heads} heads; raise length")
        draft = self(hidden[:, :n].flatten(0, 1)).unflatten(1, (tokens.shape[0], n))  # [K, B, n, V]
        per_head, mask = [], []
        for k, guess in enumerate(draft.unbind(0)):  # indexing would fill K x B x n x V zeros per head going backward
            wanted, ahead = logits[:, 1 + k : 1 + k + n], slice(2 + k, 2 + k + n)
            per_head.append(distance(self.loss_kind, guess, wanted, tokens[:, ahead]))
            mask.append(batch["mask"][:, ahead])
        means = masked_mean(torch.stack(per_head), torch.stack(mask))  # [K]
        weights = self.depth_decay ** torch.arange(self.heads, device=means.device)
        return (means * weights).sum() / weights.sum(), {self.loss_kind: means.detach()}

    @torch.no_grad()
    def measure(self, kind: str, samples: Sequence[Sample]) -> dict[str, Any]:
        right = torch.zeros(self.heads, CHOICES)
        tried = torch.zeros(self.heads)
        agree = torch.zeros(self.heads, 2)
        positions = 0
        for sample in samples:
            n = len(sample.tokens)
            # hidden states from which all heads have a truth; none where the target ended at once
            at = torch.arange(sample.start - 2, max(sample.start - 2, n - 1 - self.heads))
            scores = self(sample.hidden[at].to(self.compute_dtype))  # [K, m, V]
            alive = torch.ones(len(at), dtype=torch.bool)
            positions += len(at)
            for k in range(self.heads):
                truth = sample.tokens[at + 2 + k].to(scores.device)
                values = scores[k].double()
                if sample.noise is not None:
                    values = _perturbed(values, sample.noise(at + 2 + k), sample.temperature)
                own = values.gather(1, truth[:, None])
                rank = (values > own).sum(1).cpu()
                agree[k] += torch.tensor([(rank == 0).sum(), (rank < 5).sum()])
                tried[k] += alive.sum()
                right[k] += torch.bincount(rank[alive & (rank < CHOICES)], minlength=CHOICES)
                alive &= rank < CHOICES
        self.chances[kind] = (right / tried.clamp(min=1)[:, None]).tolist()
        self._plans = {}
        share = agree / max(1, positions)
        simulated = {str(n): sum(grow(self.chances[kind], n)[2]) for n in (8, 16, 32)}
        return {"top1": share[:, 0].tolist(), "top5": share[:, 1].tolist(), "tau": simulated, "positions": positions}

    # -- on disk

    def adapters(self) -> dict[str, nn.Module]:
        return {} if self.lora is None else {f"head_{k}": self.lora for k in range(self.heads)}

    def own_state(self) -> dict[str, Tensor]:
        names = ("weight", "bias") if self.lora is not None else ("weight", "bias", "full")
        return {name: getattr(self, name) for name in names}
