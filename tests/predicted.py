"""What the page predicts (`selfspec/page/model.js`), computed here: the judge of its numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.budget.predict import along, fastest, monotone, speedup

MOST = 64  # nodes of the largest tree that is considered


@dataclass(frozen=True)
class Curve:
    """What passes cost on a machine. sizes: nodes, growing from 1; seconds: of a pass over each; size, products,
    bandwidth, peak: as `fastest` takes them."""

    sizes: Sequence[int]
    seconds: Sequence[float]
    size: float
    products: float
    bandwidth: float
    peak: float

    def cost(self, nodes: float) -> float:
        """Seconds of a pass over so many nodes, of all rows together; beyond the largest size never faster than the
        machine."""
        least = fastest(nodes, self.size, self.products, self.bandwidth, self.peak) if nodes > self.sizes[-1] else 0.0
        return max(along(self.sizes, monotone(self.seconds), nodes), least)


def predict(
    grown: Sequence[float], curve: Curve, draft: float, nodes: int, rows: int = 1, masks: float = 0.0
) -> dict[str, float]:
    """grown: the acceptance length that trees of 1, 2, ... nodes promise (the last one's also stands for larger ones);
    draft: the cost of a draft, in plain steps of the same batch; nodes: of each row's tree, root included; rows: the
    batch, whose passes cost what a pass over all their nodes costs; masks: mask rows per node of the tree, which cost
    what nodes cost. Returns tau: tokens of a pass and row; speedup: over plain decoding; free: the same if drafts cost
    nothing; limit: if, beside that, a pass took no longer than this machine needs for its weights and products; best:
    the size with the largest speedup, which is `most`; pays: the largest size that is faster than plain decoding, 1
    where none is; affordable: what a draft may cost at this size, in plain steps, before nothing is left."""
    step = curve.cost(rows)
    taus = [grown[min(n, len(grown)) - 1] for n in range(1, MOST + 1)]
    each = rows * (1 + masks)
    ratios = [speedup(tau, step, curve.cost(each * n), draft * step) for n, tau in enumerate(taus, 1)]
    ratios[0] = 1.0  # a root alone: nothing is drafted
    tau, cost = taus[nodes - 1], curve.cost(each * nodes)
    machine = curve.size, curve.products, curve.bandwidth, curve.peak
    most = max(ratios)
    return {
        "tau": tau,
        "speedup": ratios[nodes - 1],
        "free": speedup(tau, step, cost, 0.0),
        "limit": speedup(tau, step, fastest(each * nodes, *machine), 0.0),
        "best": ratios.index(most) + 1,
        "most": most,
        "pays": max(n for n, ratio in enumerate(ratios, 1) if ratio > 1 or n == 1),
        "affordable": tau - cost / step,
    }


def assumed(first: Sequence[float], rest: float, choices: int = 8) -> list[list[float]]:
    """A table of acceptance, `[depth][rank]`, from how often the first choice at each depth is right: every further
    choice takes `rest * (1 - p)` of what the one before it has."""
    return [[p * (rest * (1 - p)) ** rank for rank in range(choices)] for p in first]
