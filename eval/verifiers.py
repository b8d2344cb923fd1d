"""Shared noise against the published lossless verifiers: python eval/verifiers.py verifiers.nodes=16"""

from __future__ import annotations

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from selfspec.config import clear_errors, register
from selfspec.measures import run_verifiers

register()


@hydra.main(config_path="../configs", config_name="verifiers", version_base="1.3")
def main(config: DictConfig) -> None:
    with clear_errors():
        run_verifiers(config, Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    with clear_errors():
        main()
