"""From records to figures: tokens per second, acceptance, time split, speedups with intervals, how repetitive it is."""

from __future__ import annotations

from typing import Any

import torch

from selfspec.evaluation.runs import Record


def by_arm(records: list[Record]) -> dict[str, list[Record]]:
    arms: dict[str, list[Record]] = {}
    for record in records:
        arms.setdefault(record.arm, []).append(record)
    return arms


def speedup(slow: list[Record], fast: list[Record], resamples: int = 2000) -> dict[str, float]:
    """Ratio of seconds per token, and its 95% bootstrap interval over prompts."""
    figures = torch.tensor(
        [[a.seconds, a.tokens, b.seconds, b.tokens] for a, b in zip(slow, fast, strict=True)], dtype=torch.float64
    )
    at = torch.randint(len(figures), (resamples, len(figures)), generator=torch.Generator().manual_seed(0))
    drawn = torch.cat([figures.sum(0, keepdim=True), figures[at].sum(1)])
    ratios = (drawn[:, 0] / drawn[:, 1]) / (drawn[:, 2] / drawn[:, 3])
    low, high = ratios[1:].quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {"ratio": float(ratios[0]), "low": low, "high": high}


def distinct_4grams(token_ids: list[list[int]]) -> float:
    """Share of different 4-grams within each row's text, over all rows; low where a model loops."""
    seen = total = 0
    for row in token_ids:
        grams = [tuple(row[i : i + 4]) for i in range(len(row) - 3)]
        seen, total = seen + len(set(grams)), total + len(grams)
    return seen / max(1, total)


def summarize(records: list[Record]) -> dict[str, Any]:
    """All figures of one benchmark point, as plain data."""
    arms = by_arm(records)
    summary: dict[str, Any] = {"arms": {}, "speedup": {}, "identical": {}}
    for arm, rows in arms.items():
        tokens, seconds = sum(r.tokens for r in rows), sum(r.seconds for r in rows)
        texts = [row for r in rows for row in r.token_ids]
        summary["arms"][arm] = {
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "distinct_4grams": distinct_4grams(texts),
        }
    if "speculative" in arms:
        summary["speculative"] = _speculative(arms["speculative"])
        for slow in ("autoregressive", "hf_generate"):
            if slow in arms:
                summary["speedup"][slow] = speedup(arms[slow], arms["speculative"])
                pairs = zip(arms[slow], arms["speculative"], strict=True)
                same = [a == b for x, y in pairs for a, b in zip(x.token_ids, y.token_ids, strict=True)]
                summary["identical"][slow] = {"rows": sum(same), "of": len(same)}
    return summary


def _speculative(rows: list[Record]) -> dict[str, Any]:
    stats = [r.stats for r in rows if r.stats is not None]
    passes, tokens = sum(s.passes for s in stats), sum(s.tokens for s in stats)
    deepest = max(len(s.accepted) for s in stats)
    counts = [sum(s.accepted[d] for s in stats if d < len(s.accepted)) for d in range(deepest)]
    parts = {
        "prefill": sum(s.seconds_prefill for s in stats),
        "draft": sum(s.seconds_draft for s in stats),
        "target": sum(s.seconds_target for s in stats),
        "other": sum(s.seconds_other for s in stats),
    }
    step = parts["draft"] + parts["target"] + parts["other"]
    return {
        "passes": passes,
        "acceptance_length": tokens / passes,
        "full_acceptance": [n / passes for n in counts],
        "conditional_acceptance": [n / max(1, m) for n, m in zip(counts, [passes, *counts], strict=False)],
        "seconds": parts,
        "share_of_step": {name: parts[name] / step for name in ("draft", "target", "other")},
        "milliseconds_per_pass": 1000 * step / sum(s.forwards for s in stats),
    }
