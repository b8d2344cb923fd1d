"""From records to figures: tokens per second, acceptance, time split, speedups with intervals, how repetitive it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import accumulate, zip_longest
from operator import mul

import torch
from torch import Tensor

from selfspec.core.stats import Stats
from selfspec.evaluation.arm_record import Record, Regime
from selfspec.utils.exactness import EXACT, ROUNDED, TESTED
from selfspec.utils.files import Figures, mean


def by_arm(records: list[Record]) -> dict[str, list[Record]]:
    arms: dict[str, list[Record]] = {}
    for record in records:
        arms.setdefault(record.arm, []).append(record)
    return arms


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


def speedup(slow: list[Record], fast: list[Record]) -> dict[str, float]:
    """Ratio of seconds per token, and its 95% bootstrap interval over questions."""
    pairs = zip(slow, fast, strict=True)
    figures = clustered((f"{a.group} {a.cluster}", (a.seconds, a.tokens, b.seconds, b.tokens)) for a, b in pairs)
    ratio, low, high = bootstrap(figures, lambda total: (total[:, 0] / total[:, 1]) / (total[:, 2] / total[:, 3]))
    return {"ratio": ratio, "low": low, "high": high}


def summarize(records: list[Record]) -> Figures:
    """All figures of one benchmark point, as plain data: over all prompts, and by group."""
    arms = by_arm(records)
    summary: Figures = {"arms": {arm: texts(rows) for arm, rows in arms.items()}, "speedup": {}, "identical": {}}
    if "autoregressive" in arms:
        summary["drift"] = drift(arms["autoregressive"])
    if "speculative" in arms:
        summary["speculative"] = _speculative(arms["speculative"])
        if "autoregressive" in arms:  # plain steps that one pass, its draft included, takes: speedup is tau over this
            plain = _speculative(arms["autoregressive"])["milliseconds_per_pass"]
            cost = summary["speculative"]["milliseconds_per_pass"] / plain
            rates = [_decoding(arms[arm]) for arm in ("autoregressive", "speculative")]  # rows of a batch share a pass
            summary["speculative"] |= {"cost": cost, "decode": rates[0] / rates[1]}
        if arms["speculative"][0].altered is not None:
            summary["lossy"] = _lossy(arms)
        for slow in ("autoregressive", "hf_generate"):
            if slow in arms:
                summary["speedup"][slow] = speedup(arms[slow], arms["speculative"])
                pairs = zip(arms[slow], arms["speculative"], strict=True)
                same = [a == b for x, y in pairs for a, b in zip(x.token_ids, y.token_ids, strict=True)]
                summary["identical"][slow] = {"rows": sum(same), "of": len(same)}
    summary["groups"] = {
        group: _group(by_arm([r for r in records if r.group == group]))
        for group in dict.fromkeys(record.group for record in records)
    }
    return summary


def texts(rows: list[Record]) -> Figures:
    """Of one arm's texts: tokens, their rate, and what kind of text it is. right: answers that are, `of` those that can
    be checked; entropy (nats) and top1 per token of the distributions they were drawn from; distinct_4grams: share of
    4-grams that differ within their text, low where a model loops."""
    tokens, seconds = sum(r.tokens for r in rows), sum(r.seconds for r in rows)
    known = [right for r in rows for right in r.right if right is not None]
    figures: Figures = {"tokens": tokens, "tokens_per_second": tokens / seconds, "right": sum(known), "of": len(known)}
    regimes = [r.regime for r in rows if r.regime is not None]
    return figures | (regime_figures(regimes, tokens) if len(regimes) == len(rows) else {})


def regime_figures(regimes: list[Regime], tokens: int) -> dict[str, float]:
    """Entropy, largest probability and distinct 4-grams, pooled over texts."""
    return {
        "entropy": mean(sum(r.entropy for r in regimes), tokens),
        "top1": mean(sum(r.top1 for r in regimes), tokens),
        "distinct_4grams": mean(sum(r.distinct for r in regimes), sum(r.grams for r in regimes)),
    }


def _group(arms: dict[str, list[Record]]) -> Figures:
    figures: Figures = {"arms": {arm: texts(rows) for arm, rows in arms.items()}}
    if "speculative" in arms:
        figures["acceptance_length"] = total([r.stats for r in arms["speculative"] if r.stats]).acceptance_length
        if "autoregressive" in arms:
            figures["speedup"] = speedup(arms["autoregressive"], arms["speculative"])
    return figures


def drift(plain: list[Record]) -> float:
    """Seconds per token of plain decoding in the second half of a run over those in the first: 1 on a machine that
    keeps its speed, NaN of a single text."""
    half = len(plain) // 2
    first, second = (
        mean(sum(r.seconds for r in part), sum(r.tokens for r in part)) for part in (plain[:half], plain[half:])
    )
    return mean(second, first)


def _lossy(arms: dict[str, list[Record]]) -> dict[str, float]:
    """altered: share of tokens that are not the target's own pick, a bound of the next token's total variation
    distance; log_prob: per token under the target, beside that of the exact output."""
    figures = {
        f"log_prob_{arm}": mean(sum(r.regime.log_prob for r in rows if r.regime), sum(r.tokens for r in rows))
        for arm, rows in arms.items()
    }
    rows = arms["speculative"]
    return {"altered": mean(sum(r.altered or 0 for r in rows), sum(r.tokens for r in rows)), **figures}


def _decoding(rows: list[Record]) -> float:
    """Seconds per token behind the prompts, whose pass gives each row its first token."""
    seconds = sum(r.stats.seconds - r.stats.seconds_prefill for r in rows if r.stats is not None)
    return mean(seconds, sum(max(0, len(ids) - 1) for r in rows for ids in r.token_ids))


def _speculative(rows: list[Record]) -> Figures:
    pooled = total([r.stats for r in rows if r.stats is not None])
    parts = {part: getattr(pooled, f"seconds_{part}") for part in ("prefill", "draft", "target", "other")}
    step = pooled.seconds - pooled.seconds_prefill
    forecasts = [r.forecast for r in rows if r.forecast is not None]
    forecast = {}
    if forecasts:
        sums = {key: sum(f[key] for f in forecasts) for key in ("passes", "nodes", "tokens", "steps")}
        forecast = {"forecast": {**sums, "speedup": mean(sums["tokens"], sums["steps"])}}
    return {
        **forecast,
        "prompts": sum(len(r.token_ids) for r in rows),
        "passes": pooled.passes,
        "acceptance_length": pooled.acceptance_length,
        "full_acceptance": pooled.accepted_per_depth,
        "conditional_acceptance": pooled.conditional_per_depth,
        "seconds": parts,
        "share_of_step": {name: mean(parts[name], step) for name in ("draft", "target", "other")},
        "milliseconds_per_pass": mean(1000 * step, pooled.calls),
    }


def total(stats: list[Stats]) -> Stats:
    """The counts and times of several calls as those of one."""
    counted = ("accepted", "lengths", "exact")
    numbers = {f.name: sum(getattr(s, f.name) for s in stats) for f in fields(Stats) if f.name not in counted}
    depths = zip_longest(*(s.accepted for s in stats), fillvalue=0)
    accepted, lengths = [sum(depth) for depth in depths], [length for s in stats for length in s.lengths]
    exact = max((s.exact for s in stats), key=(EXACT, TESTED, ROUNDED).index, default=EXACT)
    return Stats(**numbers, accepted=accepted, lengths=lengths, exact=exact)


DEFINITIONS = ("vllm", "spec_bench", "specforge", "modelopt")


def defined(name: str, records: list[Record], accuracy: list[float]) -> Figures:
    """Figures of a speculative arm by one of DEFINITIONS. accuracy: how often the drafter's first choice at each depth
    is right, along known text (empty where that was not measured).

    vllm: its counters, one token and those accepted per draft, and the share of drafts accepted up to each position.
    spec_bench: evaluation/speed.py, the mean over the tokens of all steps. specforge: its simulated length, one token
    and the running products of the accuracy. modelopt: specdec_bench, the mean over requests of tokens per pass.
    """
    stats = [record.stats for record in records if record.stats is not None]
    pooled = total(stats)
    if name == "vllm":
        rates = pooled.accepted_per_depth
        return {"mean_acceptance_length": 1 + sum(rates), "per_position": rates}
    if name == "spec_bench":
        return {"mean_accepted_tokens": mean(sum(pooled.lengths), len(pooled.lengths))}
    if name == "specforge":
        return {"simulated_length": 1 + sum(accumulate(accuracy, mul)) if accuracy else None}
    return {"mean_over_requests": mean(sum(s.acceptance_length for s in stats), len(stats))}
