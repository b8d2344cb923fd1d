"""Train drafting heads on a frozen target: python train/heads.py +experiment=tiny_medusa"""

from __future__ import annotations

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from selfspec.build import run_heads
from selfspec.config import register

register()


@hydra.main(config_path="../configs", config_name="train", version_base="1.3")
def main(config: DictConfig) -> None:
    folder = Path(HydraConfig.get().runtime.output_dir)
    figures = run_heads(config, folder)
    for kind in ("greedy", "sampled"):
        top1 = " ".join(f"{share:.3f}" for share in figures[kind]["top1"])
        tau = ", ".join(f"{value:.2f} at {nodes} nodes" for nodes, value in figures[kind]["tau"].items())
        print(f"{kind:8} top-1 per head {top1}; promised acceptance length {tau}")
    if "step_over_forward" in figures:
        print(f"one step costs {figures['step_over_forward']:.2f} bare target forwards")
    print(
        f"peak memory {figures['peak_memory_mb']:.0f} MB; target unchanged (SHA-256 {figures['target_checksum'][:12]})"
    )
    print(f"saved to {folder / 'drafter'}: python -m selfspec --heads {folder} 'def main():'")


if __name__ == "__main__":
    main()
