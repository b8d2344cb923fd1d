"""Time of one draft of SmolLM2's shapes, by every kind of drafter, with and without a draft vocabulary.

    python notebooks/experiments/draft_times.py     # six minutes, most of them compiling

Weights are random, since a draft's time does not depend on them. Trees have 16 nodes; T=0, batch 1, compiled engine.
Arms take turns; medians over rounds of milliseconds a draft, and of the pass that verifies it.
"""

from __future__ import annotations

import statistics
from typing import Any

import selfspec
from selfspec.core.generate import speculative
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.drafters.registry import build, config_class, drafter_class

ROUNDS, TOKENS, NODES, FEW = 5, 32, 16, 8192
KINDS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "sequential": {},
    "early_exit": {"exit": 8},
    "feature": {},
    "eagle3": {},
    "mask": {},
    "mtp": {},
    "block": {},
}


def main() -> None:
    target = selfspec.load("prompt_lookup", target="smollm2", engine="compiled").target
    target.engine.quiet = True
    prompt = [list(range(100, 164))]
    options = Options(TOKENS, Sampling(0.0), 0, frozenset())
    arms = {}
    for kind, config in KINDS.items():
        for few in (None, FEW):
            cls = drafter_class(kind)
            settings = config_class(cls)(**config, draft_vocab=few)  # type: ignore[call-arg]
            arms[kind, few] = build(cls, target, settings).eval()
    times: dict[tuple[str, int | None], list[tuple[float, float]]] = {arm: [] for arm in arms}
    for turn in range(ROUNDS + 1):
        for arm, drafter in arms.items():
            stats = speculative(target, prompt, options, drafter, NODES).stats
            if turn:  # the first compiles
                times[arm].append((1000 * stats.seconds_draft / stats.calls, 1000 * stats.seconds_target / stats.calls))
    print(
        f"| drafter | draft, ms | with draft_vocab={FEW} | pass, ms | with draft_vocab={FEW} |\n|---|---|---|---|---|"
    )
    for kind in KINDS:
        medians = [[statistics.median(part) for part in zip(*times[kind, few], strict=True)] for few in (None, FEW)]
        (draft, target_pass), (few_draft, few_pass) = medians
        print(f"| {kind} | {draft:.2f} | {few_draft:.2f} | {target_pass:.1f} | {few_pass:.1f} |")


if __name__ == "__main__":
    main()
