"""Acceptance as others define it, told beside ours (tokens per pass, bonus token included, pooled over passes)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from operator import mul

from selfspec.core.stats import Stats
from selfspec.evaluation.records import Record
from selfspec.log import Figures


def vllm(records: list[Record]) -> Figures:
    """vLLM's counters: one token and those accepted per draft, and the share of drafts accepted up to each position."""
    stats = _stats(records)
    drafts = max(1, sum(s.passes for s in stats))
    depths = max((len(s.accepted) for s in stats), default=0)
    counts = [sum(s.accepted[d] for s in stats if d < len(s.accepted)) for d in range(depths)]
    return {"mean_acceptance_length": 1 + sum(counts) / drafts, "per_position": [count / drafts for count in counts]}


def spec_bench(records: list[Record]) -> Figures:
    """Spec-Bench's evaluation/speed.py: the mean over the tokens of all steps."""
    steps = [length for s in _stats(records) for length in s.lengths]
    return {"mean_accepted_tokens": sum(steps) / max(1, len(steps))}


def specforge(records: list[Record]) -> Figures:
    """SpecForge's simulated length: one token and the running products of the accuracy given the parent."""
    stats = _stats(records)
    depths = max((len(s.accepted) for s in stats), default=0)
    counts = [sum(s.accepted[d] for s in stats if d < len(s.accepted)) for d in range(depths)]
    before = [sum(s.passes for s in stats), *counts]
    accuracy = [count / max(1, first) for count, first in zip(counts, before, strict=False)]
    return {"simulated_length": 1 + sum(accumulate(accuracy, mul))}


def modelopt(records: list[Record]) -> Figures:
    """ModelOpt's specdec_bench: the mean over requests of each one's tokens per pass."""
    own = [s.acceptance_length for s in _stats(records)]
    return {"mean_over_requests": sum(own) / max(1, len(own))}


DEFINITIONS: dict[str, Callable[[list[Record]], Figures]] = {
    "vllm": vllm,
    "spec_bench": spec_bench,
    "specforge": specforge,
    "modelopt": modelopt,
}


def _stats(records: list[Record]) -> list[Stats]:
    return [record.stats for record in records if record.stats is not None]
