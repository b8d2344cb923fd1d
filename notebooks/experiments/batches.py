"""SmolLM2 in batches: plain decoding beside trees of fixed sizes and `nodes="auto"`, compiled, on Spec-Bench.

    python notebooks/experiments/batches.py question.jsonl     # ten minutes, most of them compiling

Every text has the same number of tokens (no end token), so that all rows of a batch stay. Arms take turns over rounds
with other questions; medians of tokens/s over the whole batch, prompts included, and of the ratio to plain decoding.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import selfspec
from selfspec.api import Spec
from selfspec.budget.cost import LARGEST, pass_costs
from selfspec.budget.policy import Auto, Experience, Forecast
from selfspec.core.generate import Result, autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.utils.progress import progress

ROUNDS, TOKENS = 6, 64
Arm = Callable[[list[list[int]]], Result]


def arms_of(spec: Spec, rows: int, temperature: float, sizes: list[int]) -> dict[str, Arm]:
    """Plain decoding, trees of these sizes, and `auto`."""
    target, options = spec.target, Options(TOKENS, Sampling(temperature), 0, frozenset())
    costs, past = pass_costs(target, rows, temperature > 0), Experience()

    def plain(prompts: list[list[int]]) -> Result:
        return autoregressive(target, prompts, options)

    def fixed(nodes: int, prompts: list[list[int]]) -> Result:
        return speculative(target, prompts, options, spec.drafter, nodes)

    def auto(prompts: list[list[int]]) -> Result:
        drafts = Auto(spec.drafter, costs, past, Forecast(), TOKENS)
        return speculative(target, prompts, options, drafts, LARGEST)

    return {"plain": plain, **{str(nodes): partial(fixed, nodes) for nodes in sizes}, "auto": auto}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("questions", help="Spec-Bench's question.jsonl")
    parser.add_argument("--drafter", default="smollm2-medusa+prompt_lookup")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    args = parser.parse_args()

    spec = selfspec.load(args.drafter, target="smollm2", engine="compiled")
    spec.target.engine.quiet = True
    turns = [json.loads(line)["turns"][0][:1200] for line in Path(args.questions).read_text().splitlines()]
    print("| batch | T | arm | tokens/s | over plain | texts as plain |\n|---|---|---|---|---|---|")
    for rows in args.batches:
        picked = iter(turns[:: len(turns) // (rows * (ROUNDS + 2))])
        batches = [[[{"role": "user", "content": next(picked)}] for _ in range(rows)] for _ in range(ROUNDS + 2)]
        for temperature in args.temperatures:
            arms = arms_of(spec, rows, temperature, args.nodes)
            rates: dict[str, list[float]] = {name: [] for name in arms}
            same = dict.fromkeys(arms, 0)
            for turn, batch in enumerate(progress(batches, desc=f"batch {rows}, T={temperature:g}")):
                prompts, plain = spec.encode(batch), list[list[int]]()
                for name, arm in arms.items():
                    result = arm(prompts)
                    plain = plain or result.token_ids
                    same[name] += sum(x == y for x, y in zip(plain, result.token_ids, strict=True))
                    if turn > 1:  # the first two compile
                        rates[name].append(rows * TOKENS / result.stats.seconds)
            for name, values in rates.items():
                ratios = [value / base for value, base in zip(values, rates["plain"], strict=True)]
                over = f"{statistics.median(ratios):.2f}x [{min(ratios):.2f}, {max(ratios):.2f}]"
                cells = [str(rows), f"{temperature:g}", name, f"{statistics.median(values):.0f}", over]
                print("|", " | ".join([*cells, f"{same[name]} of {rows * (ROUNDS + 2)}"]), "|", flush=True)


if __name__ == "__main__":
    main()
