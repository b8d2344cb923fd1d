"""From records to figures: speed over plain decoding with intervals, acceptance, where the time goes, the text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import TypeVar

import torch
from torch import Tensor

from selfspec.core.stats import Stats
from selfspec.evaluation.records import Record, Regime
from selfspec.utils.exactness import EXACT, LOSSY, ROUNDED, TESTED
from selfspec.utils.files import NOTHING, Figures, mean

T = TypeVar("T")
K = TypeVar("K")
PARTS = ("draft", "target", "other")  # of a pass
_FEW = 12  # questions; with two, 48% of the bootstrap's intervals hold the true ratio
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # 97.5% of Student's, by freedom


# -- ratios, and their intervals over questions


def bootstrap(figures: Tensor, ratio: Callable[[Tensor], Tensor], resamples: int = 2000) -> tuple[float, float, float]:
    """A ratio of column sums and its 95% interval over questions, which is NaN of a single one; of few, from the spread
    of the ratio's logarithm with each question left out (jackknife, Student's t). figures: float64 [questions,
    columns]."""
    if (count := len(figures)) == 1:
        return float(ratio(figures)), NOTHING, NOTHING
    if count < _FEW:
        sums = figures.sum(0, keepdim=True)
        logs = ratio(sums - figures).log()
        value, far = float(ratio(sums)), float(_T[count - 2] * (count - 1) / count**0.5 * logs.std())
        far = min(far, 99.0)  # of two questions that differ much
        return value, value * math.exp(-far), value * math.exp(far)
    at = torch.randint(len(figures), (resamples, len(figures)), generator=torch.Generator().manual_seed(0))
    ratios = ratio(torch.cat([figures.sum(0, keepdim=True), figures[at].sum(1)]))
    low, high = ratios[1:].quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(ratios[0]), low, high


def clustered(rows: Iterable[tuple[str, Sequence[float]]]) -> Tensor:
    """Columns summed over the rows of one name, since turns of one question are not independent; float64
    [questions, columns]."""
    sums: dict[str, list[float]] = {}
    for name, values in rows:
        before = sums.setdefault(name, [0.0] * len(values))
        sums[name] = [a + b for a, b in zip(before, values, strict=True)]
    return torch.tensor(list(sums.values()), dtype=torch.float64)


def _costs(record: Record) -> tuple[float, float, float, float]:
    """Seconds and tokens of plain decoding beside a record (1 and 1 where there is none), and its own."""
    plain = record.plain
    return *((1.0, 1) if plain is None else (plain.seconds, plain.tokens)), record.seconds, record.tokens


def _ratio(rows: Iterable[tuple[str, Sequence[float]]], ratio: Callable[[Tensor], Tensor]) -> dict[str, float]:
    value, low, high = bootstrap(clustered(rows), ratio)
    return {"ratio": value, "low": low, "high": high}


def _faster(sums: Tensor, at: int = 0) -> Tensor:
    """Ratio of seconds per token: columns `at` and the next over the two behind them."""
    return (sums[:, at] / sums[:, at + 1]) / (sums[:, at + 2] / sums[:, at + 3])


def over_plain(records: Sequence[Record]) -> dict[str, float]:
    """Speedup over the plain decoding beside each record: ratio of seconds per token, and its 95% interval over
    questions."""
    return _ratio(((r.cluster, _costs(r)) for r in records), _faster)


def against(ours: Sequence[Record], theirs: Sequence[Record]) -> dict[str, float] | None:
    """How much faster one arm is than another on the points both have, each measured by the plain decoding beside it;
    None where there are none."""
    others = {record.point: record for record in theirs}
    pairs = [(a, b) for a in ours if (b := others.get(a.point)) is not None]
    if not pairs:
        return None
    return _ratio(((a.cluster, (*_costs(a), *_costs(b))) for a, b in pairs), lambda s: _faster(s) / _faster(s, 4))


def tau(records: Sequence[Record]) -> tuple[float, list[float]]:
    """The acceptance length, and its 95% interval over questions."""
    rows = clustered((r.cluster, (r.stats.tokens, r.stats.passes)) for r in records)
    ratio, low, high = bootstrap(rows, lambda s: s[:, 0] / s[:, 1])
    return ratio, [low, high]


# -- of the records of one arm


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by a key, in the order in which its values come."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def right(records: Sequence[Record]) -> dict[str, int]:
    """right: answers that are, `of` those that can be checked."""
    known = [each for record in records for each in record.right if each is not None]
    return {"right": sum(known), "of": len(known)}


def texts(records: Sequence[Record]) -> Figures:
    """Of one arm's texts: tokens, their rate, right answers, and what kind of text it is, where that is known. entropy
    (nats) and top1 per token of the distributions they were drawn from; distinct_4grams: share of 4-grams that differ
    within their text, low where a model loops."""
    tokens, seconds = sum(r.tokens for r in records), sum(r.seconds for r in records)
    figures: Figures = {"tokens": tokens, "tokens_per_second": tokens / seconds, **right(records)}
    regimes = [r.regime for r in records if r.regime is not None]
    return figures | (regime_figures(regimes, tokens) if len(regimes) == len(records) else {})


def regime_figures(regimes: Sequence[Regime], tokens: int) -> dict[str, float]:
    """Entropy, largest probability and distinct 4-grams, pooled over texts."""
    return {
        "entropy": mean(sum(r.entropy for r in regimes), tokens),
        "top1": mean(sum(r.top1 for r in regimes), tokens),
        "distinct_4grams": mean(sum(r.distinct for r in regimes), sum(r.grams for r in regimes)),
    }


def drift(plain: Sequence[Record]) -> float:
    """Seconds per token of plain decoding in the second half of a run over those in the first: 1 on a machine that
    keeps its speed, NaN of a single text."""
    half = len(plain) // 2
    first, second = (
        mean(sum(r.seconds for r in part), sum(r.tokens for r in part)) for part in (plain[:half], plain[half:])
    )
    return mean(second, first)


def total(stats: Sequence[Stats]) -> Stats:
    """The counts and times of several calls as those of one."""
    counted = ("accepted", "lengths", "exact")
    numbers = {f.name: sum(getattr(s, f.name) for s in stats) for f in fields(Stats) if f.name not in counted}
    depths = zip_longest(*(s.accepted for s in stats), fillvalue=0)
    accepted, lengths = [sum(depth) for depth in depths], [length for s in stats for length in s.lengths]
    exact = max((s.exact for s in stats), key=(EXACT, TESTED, ROUNDED, LOSSY).index, default=EXACT)
    return Stats(**numbers, accepted=accepted, lengths=lengths, exact=exact)


def decode_speedup(records: Sequence[Record]) -> float:
    """Speedup behind the prompts."""
    plain = [r.plain for r in records if r.plain is not None]
    slow = mean(sum(p.decode for p in plain), sum(p.tokens for p in plain))
    return slow / mean(sum(r.decode for r in records), sum(r.tokens for r in records))


def forecast(records: Sequence[Record]) -> Figures:
    """With nodes="auto": passes, nodes, tokens and plain steps that were expected, and the speedup of these."""
    forecasts = [r.forecast for r in records if r.forecast is not None]
    if not forecasts:
        return {}
    sums = {key: sum(f[key] for f in forecasts) for key in ("passes", "nodes", "tokens", "steps")}
    return {"forecast": {**sums, "speedup": mean(sums["tokens"], sums["steps"])}}
