"""Answer questions plainly and speculatively, side by side: python eval/show.py drafter=tiny-medusa show.prompts=5"""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from selfspec.config import clear_errors, register
from selfspec.measures import run_show

register()


@hydra.main(config_path="../configs", config_name="show", version_base="1.3")
def main(config: DictConfig) -> None:
    with clear_errors():
        run_show(config)


if __name__ == "__main__":
    with clear_errors():
        main()
