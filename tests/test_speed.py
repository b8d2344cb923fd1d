"""A guard against a slow decode loop: four ratios of arms that take turns, so that the machine's speed does not count.

    make bench                # beside those recorded on this kind of processor; RECORD=1 writes bench.json anew

Arms run in one process on the embedded target, batch 1, T=0, bfloat16, prompts included: the median over rounds and its
range, in two minutes.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import selfspec
from selfspec.engine.kernels.native import has_avx512, has_compiler, has_tiles
from selfspec.utils.files import write_text
from selfspec.utils.progress import progress

RECORDED = Path(__file__).parents[1] / "notebooks" / "results" / "bench.json"
# Least medians, below what was recorded on any processor (notebooks/results/bench.json)
LEAST = {
    "eager over transformers, plain": 0.9,
    "compiled over eager, plain": 1.5,
    "tiny-medusa of 8 nodes over plain, writing": 1.0,
    "prompt_lookup of 8 nodes over plain, copying": 1.5,
}
ROUNDS, TOKENS = 9, 64
CODE = "def save(path, lines):\n    f = open(path, 'w')\n    f.write(lines)\n    f.close()\n"
COPYING = [{"role": "user", "content": f"Rename `f` to `out` in this function:\n```python\n{CODE}```"}]
WRITING = [{"role": "user", "content": "Write a function `total` that adds up the prices of a list of items."}]


def ratios(rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Of each pair of arms: least, median and largest ratio over the rounds."""
    fast = selfspec.load("tiny-medusa", engine="compiled")
    lookup = selfspec.load("prompt_lookup", target=fast.target.model, engine="compiled")
    eager = selfspec.load("prompt_lookup", target=fast.target.model, engine="eager")
    lookup.tokenizer = eager.tokenizer = fast.tokenizer
    ids = torch.tensor([fast.encode(WRITING)[0]])

    def stock() -> None:
        fast.target.model.generate(ids, max_new_tokens=TOKENS, do_sample=False, attention_mask=torch.ones_like(ids))

    def plain(spec: selfspec.Spec, prompt: object) -> Callable[[], object]:
        return lambda: spec.autoregressive(prompt, TOKENS)

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "eager over transformers, plain": (plain(eager, WRITING), stock),
        "compiled over eager, plain": (plain(fast, WRITING), plain(eager, WRITING)),
        "tiny-medusa of 8 nodes over plain, writing": (
            lambda: fast.generate(WRITING, TOKENS, nodes=8),
            plain(fast, WRITING),
        ),
        "prompt_lookup of 8 nodes over plain, copying": (
            lambda: lookup.generate(COPYING, TOKENS, nodes=8),
            plain(lookup, COPYING),
        ),
    }
    found: dict[str, list[float]] = {name: [] for name in pairs}
    for turn in progress(range(rounds + 2), desc="bench"):
        for name, arms in pairs.items():
            seconds = []
            for arm in arms:
                start = time.perf_counter()
                arm()
                seconds.append(time.perf_counter() - start)
            if turn > 1:  # the first compiles, the second warms up
                found[name].append(seconds[1] / seconds[0])
    return {name: [min(each), statistics.median(each), max(each)] for name, each in found.items()}


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="passes are compiled by a C++ compiler")
def test_no_arm_became_slow_beside_another():
    found = {name: middle for name, (_, middle, _) in ratios(rounds=5).items()}
    assert found.keys() == LEAST.keys()
    assert not {name: (ratio, LEAST[name]) for name, ratio in found.items() if ratio < LEAST[name]}


def main() -> None:
    kind = "AMX" if has_tiles() else "AVX-512" if has_avx512() else torch.backends.cpu.get_cpu_capability()
    recorded = json.loads(RECORDED.read_text()) if RECORDED.is_file() else {}
    here, before = ratios(), recorded.get(kind, {})
    for name, (low, middle, high) in here.items():
        line = f"{name:46} {middle:.2f}x [{low:.2f}, {high:.2f}]"
        if name in before:
            least, usual, most = before[name]
            word = "slower" if high < least else "faster" if low > most else "as before"
            line += f"   recorded on {kind}: {usual:.2f}x [{least:.2f}, {most:.2f}], {word}"
        print(line)
    if "--record" in sys.argv:
        recorded[kind] = {name: [round(value, 2) for value in each] for name, each in here.items()}
        write_text(RECORDED, json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
