"""Expected acceptance length by the tokens that were trained on: drafters for SmolLM2, from scratch.

    python notebooks/experiments/curves.py     # an hour; the conversations take 15 minutes more at first

All read the same conversations in the same order, 3,072 tokens a step. Runs that have ended are not trained again. The
table is printed (8 nodes, T=0 and T=1) and drawn into notebooks/figures/curves.png.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from selfspec.utils.files import Figures

ROOT = Path(__file__).parents[2]
TOKENS, EVERY = 6 * 512, 50  # of a step; steps between two validations
DATA = "data.seed=1 data.conversations=3072 data.batch=256 data.int8=true"
LOOP = f"loop.batch_size=6 loop.steps=300 loop.validate_every={EVERY} loop.checkpoint_every=100 wandb.mode=disabled"
RUNS = {
    "medusa": "+experiment=smollm2_medusa",
    "medusa_full": "+experiment=smollm2_medusa drafter.draft_vocab=null",
    "eagle3": "+experiment=smollm2_eagle3",
    "feature": "+experiment=smollm2_eagle3 drafter=feature",
    "sequential": "+experiment=smollm2_eagle3 drafter=sequential drafter.blocks=1 train.lr=1.5e-3",
    "early_exit": "+experiment=smollm2_eagle3 drafter=early_exit drafter.exit=3 train.lr=2e-3",
}


def curve(name: str) -> list[Figures]:
    """What a run found at each validation; trains it where it has not ended."""
    figures = ROOT / "runs" / f"curve_{name}" / "train.jsonl"
    if not figures.is_file() or '"summary"' not in figures.read_text():
        own = dict(part.split("=", 1) for part in f"{DATA} {LOOP} {RUNS[name]}".split())
        arguments = [f"{key}={value}" for key, value in own.items()]
        subprocess.run([sys.executable, "train/heads.py", *arguments, f"name=curve_{name}"], cwd=ROOT, check=True)
    records = [json.loads(line) for line in figures.read_text().splitlines()]
    return [r["validation"] for r in records if "validation" in r]


def main() -> None:
    _, both = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    steps = range(EVERY, 301, EVERY)
    print("| drafter | T | " + " | ".join(f"{TOKENS * step / 1e6:.2f}M" for step in steps) + " |")
    print("|---|---|" + "---|" * len(steps))
    for name in RUNS:
        found = curve(name)
        for axes, mode, temperature in zip(both, ("greedy", "sampled"), (0, 1), strict=True):
            taus = [validation[mode]["tau"]["8"] for validation in found]
            print(f"| {name} | {temperature} | " + " | ".join([f"{tau:.2f}" for tau in taus]) + " |")
            x = [TOKENS * step / 1e6 for step in list(steps)[: len(taus)]]
            axes.plot(x, taus, "--" if name.endswith("_full") else "-", marker="o", label=name)
            axes.set(xlabel="tokens trained on, millions", title=f"T={temperature}, 8 nodes")
    both[0].set_ylabel("expected acceptance length")
    both[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    plt.savefig(ROOT / "notebooks" / "figures" / "curves.png", dpi=120)


if __name__ == "__main__":
    main()
