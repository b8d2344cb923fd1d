"""What a drafted token says about the one behind it: DSpark's correction of a block at low rank, and its confidence
head (arXiv 2607.05147).

vanilla: a factor of the parent token times one of every token. gated: the row's hidden state and the parent's factor
open or close that factor. rnn: a state is carried from parent to child beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

FORMS = ("vanilla", "gated", "rnn")


class Rows(NamedTuple):
    """What the rows of blocks forecast, before a drafted token is known. logits: [..., depth, V']; hidden: [..., depth,
    H], behind the stack's final norm."""

    logits: Tensor
    hidden: Tensor


def shapes(form: str, rank: int, hidden: int, tokens: int, drafted: int) -> list[list[int]]:
    """Of the parameters: factors of parents and of children, and a map with its bias."""
    factors = [[tokens, rank], [drafted, rank]]
    if form == "vanilla":
        return factors
    out, into = (rank, hidden + rank) if form == "gated" else (3 * rank, 2 * rank + hidden)
    return [*factors, [out, into], [out]]


def corrected(
    form: str, parts: Sequence[Tensor], logits: Tensor, hidden: Tensor, parents: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits [..., V'] of rows with what their parent tokens, int64 [...], say; hidden: [..., H]. The other result and
    `state` are what is carried on from parent to child, [..., rank]: zeros at a root."""
    factor = F.embedding(parents.to(parts[0].device), parts[0])
    hidden = hidden.to(factor.dtype)
    if form == "gated":
        factor = factor * torch.sigmoid(F.linear(torch.cat([hidden, factor], -1), *parts[2:]))
    elif form == "rnn":
        gate, new, out = F.linear(torch.cat([state, factor, hidden], -1), *parts[2:]).chunk(3, -1)
        gate, factor = torch.sigmoid(gate), torch.tanh(out)
        state = gate * state + (1 - gate) * torch.tanh(new)
    return logits + F.linear(factor, parts[1]).to(logits.dtype), state


def confidence(head: Sequence[Tensor], hidden: Tensor, parents: Tensor, factors: Tensor | None) -> Tensor:
    """Log odds [...] that the target accepts what is drafted behind rows with these parent tokens, int64 [...]. head:
    weights [1, H] or [1, H + rank], and bias [1]; hidden: [..., H]; factors: of parent tokens, where the head reads
    them."""
    weight, bias = head
    read = hidden.to(weight.dtype)
    if factors is not None:
        read = torch.cat([read, F.embedding(parents.to(factors.device), factors).to(weight.dtype)], -1)
    return F.linear(read, weight, bias)[..., 0]
