"""Train a small target and its tokenizer from scratch: python train/target.py +experiment=tiny_target"""

from __future__ import annotations

import json
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from selfspec.config import clear_errors, register
from selfspec.runs import run_pretrain

register()


@hydra.main(config_path="../configs", config_name="target", version_base="1.3")
def main(config: DictConfig) -> None:
    folder = Path(HydraConfig.get().runtime.output_dir)
    with clear_errors():
        print(json.dumps(run_pretrain(config, folder)), f"\n{folder / 'target'}")


if __name__ == "__main__":
    with clear_errors():
        main()
