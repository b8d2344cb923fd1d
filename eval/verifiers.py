"""Shared noise against the published lossless verifiers: python eval/verifiers.py verifiers.nodes=16"""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from selfspec.build import run_verifiers
from selfspec.config import register, spell_out_drafter

register()


@hydra.main(config_path="../configs", config_name="verifiers", version_base="1.3")
def main(config: DictConfig) -> None:
    run_verifiers(config, Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    sys.argv = spell_out_drafter(sys.argv)
    main()
