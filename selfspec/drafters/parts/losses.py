"""Losses against the frozen target, per position; weighting and masking are the caller's."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec.drafters.base import Batch, Few, no_reduce

_CHUNK, _ON_GPU = 2**17, 2**26  # logits at a time: a CPU's cache holds them; a GPU launches kernels for each chunk


def _parts(logits: Tensor) -> Iterator[slice]:
    """Positions of logits [N, V], a few at a time."""
    step = max(1, (_CHUNK if logits.device.type == "cpu" else _ON_GPU) // logits.shape[1])
    return (slice(first, first + step) for first in range(0, len(logits), step))


class _Swept(torch.autograd.Function):
    """A loss of logits [N, V], per position: a rule of `RULES`, or (None) KL(softmax(target) || softmax(draft)).

    The gradient, for KL softmax(draft) - softmax(target), is formed in the same sweep, chunk by chunk: nothing of size
    N x V but that gradient is ever held, which on a CPU is most of the time that autograd's own chain takes.
    """

    @staticmethod
    def forward(ctx: Any, draft: Tensor, target: Tensor, rule: Rule | None) -> Tensor:
        exact = torch.promote_types(draft.dtype, torch.float32)
        losses = torch.empty(len(draft), dtype=exact, device=draft.device)
        gradient = torch.empty_like(draft) if ctx.needs_input_grad[0] else None
        for part in _parts(draft):
            log_p = torch.log_softmax(target[part].detach().to(exact), -1)
            if rule is None:
                log_q = torch.log_softmax(draft[part].to(exact), -1)
                p = log_p.exp()
                losses[part] = (log_p.sub_(log_q).mul_(p)).sum(-1)
                if gradient is not None:
                    gradient[part] = log_q.exp_().sub_(p)
                continue
            with torch.enable_grad():
                chunk = draft[part].detach().to(exact).requires_grad_(gradient is not None)
                nats = rule(torch.log_softmax(chunk, -1), log_p)
                if gradient is not None:
                    gradient[part] = torch.autograd.grad(nats.sum(), chunk)[0]
            losses[part] = nats.detach()
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0][:, None].to(gradient.dtype), None, None


def _tv(log_q: Tensor, log_p: Tensor) -> Tensor:
    return 0.5 * (log_q.exp() - log_p.exp()).abs().sum(-1)


def _lk(log_q: Tensor, log_p: Tensor) -> Tensor:
    apart = _tv(log_q, log_p)
    weight = torch.exp(-3 * (1 - apart.detach()))  # of KL; it turns into total variation as the two agree
    return weight * (log_p.exp() * (log_p - log_q)).sum(-1) + (1 - weight) * apart


def shared(log_q: Tensor, log_p: Tensor) -> Tensor:
    """How often argmax(log_q + g) is argmax(log_p + g) for Gumbel noise g: log probabilities [..., V] to [...].

    The sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x) (arXiv 2408.07978, section 3). The first of the two is
    the larger where p_y / q_y is above p_x / q_x, so that sorting by this ratio leaves two running sums.
    """
    order = (log_p - log_q).argsort(-1, descending=True)
    p, q = log_p.gather(-1, order).exp(), log_q.gather(-1, order).exp()
    above, below = p.cumsum(-1), q.sum(-1, keepdim=True) - q.cumsum(-1)
    tiny = torch.finfo(p.dtype).tiny
    return (p * q / (above * q + below.clamp(min=0) * p).clamp(min=tiny)).sum(-1)


def _accept(log_q: Tensor, log_p: Tensor) -> Tensor:
    return -shared(log_q, log_p).clamp(min=1e-30).log()


Rule = Callable[[Tensor, Tensor], Tensor]
RULES: dict[str, Rule] = {"tv": _tv, "lk": _lk, "accept": _accept}
_SWEPT = ("kl", "ce", "ce_tv")  # losses with sweeps of their own
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def losses() -> tuple[str, ...]:
    """The names of all losses, those that another package added to RULES included."""
    return (*_SWEPT, *RULES)


def check_loss(name: object) -> None:
    """Raises ValueError for what is neither one of `losses` nor looks like the path of a function."""
    if name not in losses() and not (isinstance(name, str) and _PATH.fullmatch(name)):
        raise ValueError(f"drafter.loss={name!r:.200} must be one of {', '.join(losses())}, or package.module.function")


@cache
def rule_of(name: str) -> Rule:
    """A loss of `RULES`, or the function at a path. Raises ValueError where there is none."""
    if name in RULES:
        return RULES[name]
    module, _, function = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), function, None) if module else None
    except ImportError as error:
        raise ValueError(f"drafter.loss={name!r}: {module} can not be imported ({error})") from error
    if not callable(found):
        raise ValueError(f"drafter.loss={name!r}: {module or name!r} has no function {function}")
    rule: Rule = found
    return rule


def try_rule(name: str) -> None:
    """Raises ValueError for a function at a path that is no loss: log probabilities [N, V] of the draft and the target
    to finite nats [N], with a gradient."""
    if name in losses():
        return
    generator = torch.Generator().manual_seed(0)
    log_q, log_p = torch.log_softmax(torch.randn(2, 3, 7, generator=generator), -1)
    log_q.requires_grad_()
    try:
        nats = rule_of(name)(log_q, log_p)
        fits = isinstance(nats, Tensor) and nats.shape == (3,) and bool(nats.isfinite().all())
        fits = fits and bool(torch.autograd.grad(nats.sum(), log_q)[0].isfinite().all())
    except ValueError:
        raise
    except Exception as error:  # whatever a function of another package does
        raise ValueError(f"drafter.loss={name!r} fails on log probabilities [3, 7]: {error!r}") from error
    if not fits:
        shape = f"{list(nats.shape)} of {nats.dtype}" if isinstance(nats, Tensor) else type(nats).__name__
        raise ValueError(f"drafter.loss={name!r} gave {shape} for log probabilities [3, 7]; expected finite nats [3]")


def distance(loss: str, draft: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
    """How far draft logits [..., V] are from what they should predict, in nats [...]; gradients reach `draft` alone.

    kl: KL(target || draft) to the target's own next-token distribution, from its logits [..., V];
    ce: cross-entropy to the text's next token, int64 [...];
    tv: total variation, which is how often a draw is rejected; ce_tv: 0.1 ce + 0.9 tv (DSpark, arXiv 2607.05147);
    lk: KL turning into total variation (arXiv 2602.23881);
    accept: minus the logarithm of how often the two pick alike under shared noise, by which drafts are verified here;
    package.module.function: yours, of log probabilities [N, V] of the draft and the target, in nats [N].
    """
    if loss == "ce_tv":
        return 0.1 * distance("ce", draft, target, tokens) + 0.9 * distance("tv", draft, target, tokens)
    if loss == "ce":
        losses = F.cross_entropy(draft.float().flatten(0, -2), tokens.flatten(), reduction="none")
    else:
        rule = None if loss == "kl" else rule_of(loss)
        losses = _Swept.apply(draft.flatten(0, -2), target.flatten(0, -2), rule)  # type: ignore[no-untyped-call]
    return losses.view(tokens.shape)


class Means(NamedTuple):
    """values: [K], 0 where nothing counts; counts: [K], what each of them is over."""

    values: Tensor
    counts: Tensor


def masked_mean(
    values: Sequence[Tensor] | Tensor, masks: Sequence[Tensor] | Tensor, average: Callable[[Tensor], Tensor] = no_reduce
) -> Means:
    """Means of K values [...] over masks [...]. average: see `Batch`: counts are those of the whole step, so that the
    mean of this over all processes, summed over the parts of a step, is the mean over the whole step."""
    counts = average(torch.stack([mask.sum() for mask in masks]).to(values[0].dtype))
    sums = torch.stack([(value * mask).sum() for value, mask in zip(values, masks, strict=True)])
    return Means(sums / counts.where(counts > 0, torch.ones_like(counts)), counts)


def random_rows(batch: Batch, count: int) -> Tensor:
    """Random numbers [B, count] in [0, 1), a function of each row's tokens and its epoch alone: others in every epoch,
    the same after an interruption, and however a batch is divided."""
    tokens, seeds = batch.tokens, batch.tokens.sum(1)
    if batch.epochs is not None:
        seeds = seeds + 1_000_003 * batch.epochs  # of a seed the generator takes 32 bits
    rows = [torch.rand(count, generator=torch.Generator().manual_seed(seed)) for seed in seeds.tolist()]
    return torch.stack(rows).to(tokens.device)


def decayed(loss: str, means: Means, decay: float) -> tuple[Tensor, dict[str, Tensor]]:
    """One loss of the means per depth, each depth weighing `decay` times the one before, those without any position
    nothing; and the means to log, NaN where there is none."""
    values, present = means.values, means.counts > 0
    weights = decay ** torch.arange(len(values), device=values.device) * present
    shown = values.detach().masked_fill(~present, torch.nan)
    return (values * weights).sum() / weights.sum().clamp(min=1e-30), {loss.rpartition(".")[2]: shown}


def drafted_logits(logits: Tensor | Few, vocabulary: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits [B, S, V'] of a draft vocabulary, int64 [V'], out of logits [B, S, V]; and bool [B, S], whether the
    likeliest token is in it. None stands for all tokens."""
    if isinstance(logits, tuple):
        return logits[0], logits[1]
    if vocabulary is None:
        return logits, torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
    few = logits[..., vocabulary]
    return few, few.amax(-1) >= logits.amax(-1)


def share_of(logits: Tensor | Few, few: Tensor) -> Tensor:
    """[B, S]: the probability of a draft vocabulary's tokens, of logits `few` [B, S, V'], among all."""
    if isinstance(logits, tuple):
        return logits[2]
    pieces = zip(few.split(4, 1), logits.split(4, 1), strict=True)  # float32 of few stays in a cache
    return torch.cat([(a.float().logsumexp(-1) - b.float().logsumexp(-1)).exp() for a, b in pieces], 1)


def accepted_share(draft: Tensor, wanted: Tensor, share: Tensor) -> Tensor:
    """[...]: how often the target takes a draw from draft logits [..., V'], to whose tokens it gives the probability
    `share` [...], divided as its logits `wanted` [..., V'] say."""
    log_p = torch.log_softmax(wanted.float(), -1) + share.log()[..., None]
    return torch.minimum(torch.log_softmax(draft.float(), -1), log_p).exp().sum(-1)


def counted_ahead(
    batch: Batch, depths: int, vocabulary: Tensor | None, hosts: Tensor | None = None, first: int = 2
) -> list[Tensor]:
    """bool [B, n] of each depth: for positions, whether the token `first`, `first` + 1, ... places later counts, and
    the likeliest one there can be drafted. The positions are `hosts`, int64 [B, n], or all behind which such a token
    stands."""
    masks = [batch.counted(first + d) for d in range(depths)]
    if vocabulary is not None:
        drafted = drafted_logits(batch.logits, vocabulary)[1]
        masks = [mask & drafted[:, first - 1 + d : -1] for d, mask in enumerate(masks)]
    return masks if hosts is None else [mask.gather(1, hosts) for mask in masks]


def random_hosts(batch: Batch, depth: int, count: int) -> Tensor:
    """int64 [B, A]: random positions behind which `depth` tokens more than the next one stand, `count` at most,
    ascending; those first whose next token but one counts."""
    room = batch.tokens.shape[1] - 1 - depth
    keys = random_rows(batch, room) + batch.counted(2)[:, :room]
    return keys.topk(min(room, count)).indices.sort(1).values


def draft_loss(
    loss: str,
    guesses: Iterable[Tensor],
    batch: Batch,
    decay: float,
    vocabulary: Tensor | None,
    hosts: Tensor | None = None,
    odds: Sequence[Tensor] = (),
    first: int = 2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of guesses at the tokens `first`, `first` + 1, ... places behind positions, which are `hosts`, or the
    first n of each row. guesses: of each depth logits [B, n, V], or [B, n, V'] of a draft vocabulary, int64 [V']. odds:
    log odds [B, n] of each depth that a draw from these logits is accepted; their cross-entropy is added."""
    few, losses, entropies = drafted_logits(batch.logits, vocabulary)[0], [], []
    share = share_of(batch.logits, few) if odds and vocabulary is not None else None
    rows = torch.arange(len(few), device=few.device)[:, None]
    for d, guess in enumerate(guesses):
        at = (slice(None), slice(d, d + guess.shape[1])) if hosts is None else (rows, hosts + d)
        wanted, truth = few[:, first - 1 :][at], batch.tokens[:, first:][at]
        losses.append(distance(loss, guess, wanted, truth))
        if odds:
            accepted = 1 - distance("tv", guess.detach(), wanted, truth)
            if share is not None:
                accepted = accepted_share(guess.detach(), wanted, share[:, first - 1 :][at])
            entropies.append(F.binary_cross_entropy_with_logits(odds[d].float(), accepted.float(), reduction="none"))
    masks = counted_ahead(batch, len(losses), vocabulary, hosts, first)
    masks = [mask[:, : each.shape[1]] for mask, each in zip(masks, losses, strict=True)]
    total, figures = decayed(loss, masked_mean(losses, masks, batch.average), decay)
    if odds:
        entropy, more = decayed("confidence", masked_mean(entropies, masks, batch.average), decay)
        total, figures = total + entropy, figures | more
    return total, figures
