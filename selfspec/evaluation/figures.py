"""From records to figures: speed over plain decoding with intervals, acceptance, where the time goes, the text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import accumulate, zip_longest
from operator import mul

import torch
from torch import Tensor

from selfspec.core.stats import Stats
from selfspec.evaluation.records import Record, Regime
from selfspec.utils.exactness import EXACT, ROUNDED, TESTED
from selfspec.utils.files import Figures, mean

PARTS = ("draft", "target", "other")  # of a pass


# -- ratios, and their intervals over questions


def bootstrap(figures: Tensor, ratio: Callable[[Tensor], Tensor], resamples: int = 2000) -> tuple[float, float, float]:
    """A ratio of column sums and its 95% interval over questions; figures float64 [questions, columns]."""
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


def by_arm(records: Iterable[Record]) -> dict[str, list[Record]]:
    arms: dict[str, list[Record]] = {}
    for record in records:
        arms.setdefault(record.arm, []).append(record)
    return arms


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
    exact = max((s.exact for s in stats), key=(EXACT, TESTED, ROUNDED).index, default=EXACT)
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


# -- a benchmark point


def summarize(records: list[Record]) -> Figures:
    """All figures of one benchmark point, as plain data: over all prompts, and by group."""
    arms = by_arm(records)
    summary: Figures = {"arms": {arm: texts(rows) for arm, rows in arms.items()}, "speedup": {}, "identical": {}}
    if "autoregressive" in arms:
        summary["drift"] = drift(arms["autoregressive"])
    if fast := arms.get("speculative"):
        summary["speculative"] = _speculative(fast)
        if fast[0].plain is not None:
            # plain steps that one pass, its draft included, takes: speedup is tau over this
            steps = sum(r.stats.calls for r in arms["autoregressive"])
            step = mean(1000 * sum(r.plain.decode for r in fast if r.plain), steps)
            cost = summary["speculative"]["milliseconds_per_pass"] / step
            summary["speculative"] |= {"cost": cost, "decode": decode_speedup(fast)}
            summary["speedup"]["autoregressive"] = over_plain(fast)
        if fast[0].altered is not None:
            summary["lossy"] = _lossy(arms)
        for slow in ("autoregressive", "hf_generate"):
            if slow in arms:
                others = {record.point: record for record in arms[slow]}
                pairs = [(a, b) for r in fast for a, b in zip(r.token_ids, others[r.point].token_ids, strict=True)]
                summary["identical"][slow] = {"rows": sum(a == b for a, b in pairs), "of": len(pairs)}
        if "hf_generate" in arms:
            summary["speedup"]["hf_generate"] = against(fast, arms["hf_generate"])
    summary["groups"] = {
        group: _group(by_arm(r for r in records if r.group == group))
        for group in dict.fromkeys(record.group for record in records)
    }
    return summary


def _group(arms: dict[str, list[Record]]) -> Figures:
    figures: Figures = {"arms": {arm: texts(rows) for arm, rows in arms.items()}}
    if fast := arms.get("speculative"):
        figures["acceptance_length"] = tau(fast)[0]
        figures |= {} if fast[0].plain is None else {"speedup": over_plain(fast)}
    return figures


def _lossy(arms: dict[str, list[Record]]) -> dict[str, float]:
    """altered: share of tokens that are not the target's own pick, a bound of the next token's total variation
    distance; log_prob: per token under the target, beside that of the exact output."""
    figures = {
        f"log_prob_{arm}": mean(sum(r.regime.log_prob for r in rows if r.regime), sum(r.tokens for r in rows))
        for arm, rows in arms.items()
        if all(r.regime for r in rows)
    }
    rows = arms["speculative"]
    return {"altered": mean(sum(r.altered or 0 for r in rows), sum(r.tokens for r in rows)), **figures}


def _speculative(rows: list[Record]) -> Figures:
    pooled = total([r.stats for r in rows])
    parts = {part: getattr(pooled, f"seconds_{part}") for part in ("prefill", *PARTS)}
    step = pooled.seconds - pooled.seconds_prefill
    return {
        **forecast(rows),
        "prompts": sum(len(r.token_ids) for r in rows),
        "passes": pooled.passes,
        "acceptance_length": pooled.acceptance_length,
        "full_acceptance": pooled.accepted_per_depth,
        "conditional_acceptance": pooled.conditional_per_depth,
        "seconds": parts,
        "share_of_step": {name: mean(parts[name], step) for name in PARTS},
        "milliseconds_per_pass": mean(1000 * step, pooled.calls),
    }


DEFINITIONS = ("vllm", "spec_bench", "specforge", "modelopt")


def defined(name: str, records: Sequence[Record], accuracy: list[float]) -> Figures:
    """Figures of a speculative arm by one of DEFINITIONS. accuracy: how often the drafter's first choice at each depth
    is right, along known text (empty where that was not measured).

    vllm: its counters, one token and those accepted per draft, and the share of drafts accepted up to each position.
    spec_bench: evaluation/speed.py, the mean over the tokens of all steps. specforge: its simulated length, one token
    and the running products of the accuracy. modelopt: specdec_bench, the mean over requests of tokens per pass.
    """
    stats = [record.stats for record in records]
    pooled = total(stats)
    if name == "vllm":
        rates = pooled.accepted_per_depth
        return {"mean_acceptance_length": 1 + sum(rates), "per_position": rates}
    if name == "spec_bench":
        return {"mean_accepted_tokens": mean(sum(pooled.lengths), len(pooled.lengths))}
    if name == "specforge":
        return {"simulated_length": 1 + sum(accumulate(accuracy, mul)) if accuracy else None}
    return {"mean_over_requests": mean(sum(s.acceptance_length for s in stats), len(stats))}
