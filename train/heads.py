"""Train a drafter on a frozen target: python train/heads.py +experiment=tiny_medusa

With --check it only tells what would be read, how long it would take and what memory."""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from selfspec.config import clear_errors, register
from selfspec.log import Figures, is_main_process
from selfspec.runs import run_check, run_training

register(drafters=True)


@hydra.main(config_path="../configs", config_name="train", version_base="1.3")
def main(config: DictConfig) -> None:
    with clear_errors():
        if config.check:
            for line in run_check(config):
                if is_main_process():
                    print(line)
            return
        sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        if sweep and config.wandb.group is None:
            config.wandb.group = config.name
        figures = run_training(config, Path(HydraConfig.get().runtime.output_dir), again=not sweep)
        if is_main_process():
            report(figures)


def report(figures: Figures) -> None:
    for mode in ("greedy", "sampled"):
        top1 = " ".join(f"{share:.3f}" for share in figures[mode]["top1"])
        tau = ", ".join(f"{value:.2f} at {nodes} nodes" for nodes, value in figures[mode]["tau"].items())
        print(f"{mode:8} top-1 by depth {top1}; promised acceptance length {tau}")
        if (found := figures[mode].get("decoded")) is not None:
            share = found / figures[mode]["tau"]["16"]
            print(f"{mode:8} decoded with 16 nodes {found:.2f}, {share:.2f} of what is promised")
    if "step_over_forward" in figures:
        print(f"one step costs {figures['step_over_forward']:.2f} bare target forwards")
    print(f"peak memory {figures['peak_memory_mb']:.0f} MB; target unchanged (SHA-256 {figures['target_hash'][:12]})")
    folder = Path(HydraConfig.get().runtime.output_dir)
    print(f"saved to {folder / 'drafter'}: python -m selfspec --drafter {folder} 'def main():'")


if __name__ == "__main__":
    sys.argv = ["check=true" if given == "--check" else given for given in sys.argv]
    with clear_errors():
        main()
