"""What a pass over a tree costs on a hybrid of Qwen3.5's proportions beside a Llama of its size, and its memory.

    python notebooks/experiments/recurrent_cost.py     # two minutes

Random weights in bfloat16, eager passes, both targets in turn; medians. c(n) is the cost of a pass of n nodes over that
of one.
"""

from __future__ import annotations

import torch

from selfspec.core.target import Target
from selfspec.core.tree import chain
from selfspec.evaluation.limits import pass_seconds, random_model

SIZES = [1, 2, 4, 8, 16, 32]
CONFIGS = {"Llama, 271M": "configs/models/llama_250m.json", "hybrid, 249M": "configs/models/hybrid_250m.json"}


@torch.inference_mode()
def main() -> None:
    targets = {name: Target(random_model(path, torch.bfloat16, None)) for name, path in CONFIGS.items()}
    seconds = pass_seconds(targets, SIZES, 9)
    print("| target | one node, ms |", " | ".join(f"c({n})" for n in SIZES[1:]), "|")
    print("|---|---|" + "---|" * (len(SIZES) - 1))
    for name, of in seconds.items():
        print(f"| {name} | {1000 * of[1]:.1f} |", " | ".join(f"{of[n] / of[1]:.2f}" for n in SIZES[1:]), "|")
    target = targets["hybrid, 249M"]
    cache = target.cache(1, 256)
    target.forward(chain(torch.ones(1, 16, dtype=torch.long)), cache)
    kept = sum(sum(state.sizes().values()) for state in cache.states.values())
    left = 0
    for layers in cache._open.values():
        for state in layers[-1].values():
            parts = [*state.inputs.values(), *(part for written in state.written for part in written[:4])]
            left += sum(part.numel() * part.element_size() for part in parts)
    print(
        f"\nOne row keeps {kept / 2**20:.1f} MiB of states. A pass of 16 nodes leaves {left / 2**20:.2f} MiB until the",
        end=" ",
    )
    print(f"commit; a snapshot for each node would take {16 * kept / 2**20:.0f} MiB.")


if __name__ == "__main__":
    main()
