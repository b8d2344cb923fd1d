"""Measure speculative against plain decoding: python eval/decode.py -m tree.nodes=8,16 decode.temperature=0,1"""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from selfspec.build import run_decode
from selfspec.config import register, spell_out_drafter
from selfspec.evaluation.report import table

register()


@hydra.main(config_path="../configs", config_name="eval", version_base="1.3")
def main(config: DictConfig) -> None:
    folder = Path(HydraConfig.get().runtime.output_dir)
    overrides = ",".join(o for o in HydraConfig.get().overrides.task if o.split("=")[0] not in ("name", "wandb.mode"))
    print(table([run_decode(config, folder, overrides or "default")]), f"\n{folder}")


if __name__ == "__main__":
    sys.argv = spell_out_drafter(sys.argv)
    main()
