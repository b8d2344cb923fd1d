"""Acceptance rules that change the output. Off unless asked for by name, and named lossy wherever they show."""

from __future__ import annotations

import torch
from torch import Tensor


class Lossy:
    """Emits a drafted token in place of the target's pick where `accepts` allows it; the likeliest if several are.

    `altered` counts those tokens. Over a run, altered / tokens bounds the total variation distance between this rule's
    next-token distribution and the exact one from above, since the two rules share their noise and differ only there.
    """

    def __init__(self, name: str) -> None:
        """name: "typical" or "typical:epsilon,delta" (Medusa's typical acceptance, arXiv 2401.10774, section 2.3.2;
        0.09 and 0.3 as in its code), or "top_k:k" (any drafted token among the target's k likeliest).

        Raises ValueError for any other name and for numbers out of range.
        """
        rule, colon, numbers = name.partition(":") if isinstance(name, str) else ("", "", "")
        try:
            values = [float(v) for v in numbers.split(",")] if numbers else []
            if rule == "typical" and len(values) == (2 if colon else 0):
                self.epsilon, self.delta = values or [0.09, 0.3]
                good = 0 < self.epsilon <= 1 and 0 < self.delta <= 1
            else:
                (value,) = values
                self.k = int(value)
                good = rule == "top_k" and value == self.k >= 1
        except (ValueError, OverflowError):
            good = False
        if not good:
            raise ValueError(
                f'lossy={name!r} must be "typical", "typical:epsilon,delta" with both in (0, 1], or "top_k:k" with an '
                "integer k of at least 1"
            )
        self.rule, self.name, self.altered = rule, name, 0

    def __repr__(self) -> str:
        return f"Lossy({self.name!r})"

    def __call__(self, scores: Tensor, picks: list[int], candidates: list[list[int]]) -> list[int]:
        """What to emit for warped and processed scores [A, V], the target's picks and the A nodes' drafted children."""
        emitted = []
        for row, pick, drafted in zip(scores, picks, candidates, strict=True):
            if drafted and pick not in drafted:
                best = drafted[int(row[drafted].argmax())]
                if self.accepts(row, best):
                    self.altered += 1
                    pick = best
            emitted.append(pick)
        return emitted

    def accepts(self, scores: Tensor, token: int) -> bool:
        """Whether a token may stand in for the pick; scores [V]. What warpers or processors forbid stays forbidden."""
        if scores[token] == -torch.inf:
            return False
        if self.rule == "top_k":
            return int((scores > scores[token]).sum()) < self.k
        log_p = torch.log_softmax(scores.double(), -1)
        entropy = -(log_p.exp() * log_p.clamp(min=-1e300)).sum()
        return float(log_p[token].exp()) > min(self.epsilon, self.delta * float(torch.exp(-entropy)))
