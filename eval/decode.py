"""Measure speculative against plain decoding: python eval/decode.py -m tree.nodes=8,16 decode.temperature=0,1"""

from __future__ import annotations

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from selfspec.config import clear_errors, register
from selfspec.evaluation.tables import table
from selfspec.measures import run_decode

register()


@hydra.main(config_path="../configs", config_name="eval", version_base="1.3")
def main(config: DictConfig) -> None:
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    if hydra_config.mode == RunMode.MULTIRUN and config.wandb.group is None:
        config.wandb.group = f"{config.name}-{Path(hydra_config.sweep.dir).name}"  # all points of a sweep
    with clear_errors():
        print(table([run_decode(config, folder, label(list(hydra_config.overrides.task)))]), f"\n{folder}")


def label(overrides: list[str]) -> str:
    """What tells this point from others, short enough for a plot: `drafter=runs/a tree.nodes=8` -> `a nodes=8`."""
    given = dict(override.lstrip("+").split("=", 1) for override in overrides)
    drafter = given.pop("drafter", "")
    parts = ["+".join(name.rstrip("/").rsplit("/", 1)[-1] for name in drafter.split("+"))] if drafter else []
    hidden = ("name", "wandb.mode", "data.root")
    return " ".join(parts + [f"{k.rsplit('.', 1)[-1]}={v}" for k, v in given.items() if k not in hidden]) or "default"


if __name__ == "__main__":
    with clear_errors():
        main()
