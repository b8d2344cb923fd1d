"""What the calibrations of embedded drafters promise: tokens a pass of chains and of trees, without decoding.

    python notebooks/experiments/acceptance.py tiny-eagle3 tiny-medusa runs/tiny_mask

Acceptance was counted along the target's own text of validation prompts when training ended. Chains are each depth's
first choice; trees are the best of their size.
"""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from operator import mul
from pathlib import Path

from selfspec.checkpoints.embedded import resolve
from selfspec.drafters.parts.static_tree import static_tree

SIZES = 8, 16, 32


def main(names: list[str]) -> None:
    print(
        f"| drafter | T | chain of 1, 2, ... drafted | tree of {', '.join(map(str, SIZES))} nodes |\n|---|---|---|---|"
    )
    for name in names:
        saved = json.loads((Path(resolve(name)) / "drafter.json").read_text())["calibration"]
        for mode, temperature in (("greedy", 0), ("sampled", 1)):
            acceptance = saved[mode]["acceptance"]
            chains = list(accumulate(accumulate((depth[0] for depth in acceptance), mul), initial=1.0))[1:]
            trees = [sum(static_tree(acceptance, nodes)[2]) for nodes in SIZES]
            columns = (" ".join(f"{tokens:.2f}" for tokens in row) for row in (chains, trees))
            print(f"| `{name}` | {temperature} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
