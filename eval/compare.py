"""All drafters and transformers' own methods on equal terms: python eval/compare.py name=compare compare.prompts=6"""

from __future__ import annotations

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from selfspec.config import clear_errors, register
from selfspec.measures import run_compare

register()


@hydra.main(config_path="../configs", config_name="compare", version_base="1.3")
def main(config: DictConfig) -> None:
    with clear_errors():
        run_compare(config, Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    with clear_errors():
        main()
