"""Acceptance as others define it, reported beside ours (tokens per pass, bonus token included, pooled over passes)."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from selfspec.evaluation.arm_record import Record
from selfspec.evaluation.metrics import total
from selfspec.utils.files import Figures, mean

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
