"""Losses against the frozen target, per position; weighting and masking are the caller's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

KINDS = ("kl", "ce")


def distance(kind: str, draft: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
    """How far draft logits [..., V] are from what they should predict, in nats [...].

    kl: KL(target || draft) to the target's own next-token distribution, from its logits [..., V];
    ce: cross-entropy to the text's next token, int64 [...].
    """
    if kind == "kl":
        wanted = torch.log_softmax(target.float(), -1)
        return F.kl_div(torch.log_softmax(draft.float(), -1), wanted, reduction="none", log_target=True).sum(-1)
    losses = F.cross_entropy(draft.float().flatten(0, -2), tokens.flatten(), reduction="none")
    return losses.view(tokens.shape)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of values [K, ...] over mask [K, ...] for each k; 0 where a mask is empty."""
    weights = mask.to(values.dtype)
    return (values * weights).flatten(1).sum(1) / weights.flatten(1).sum(1).clamp(min=1)
