"""Write the self-distillation data of a training, and train nothing: python train/distill.py +experiment=tiny_medusa"""

from __future__ import annotations

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from selfspec.config import clear_errors, register
from selfspec.log import is_main_process
from selfspec.runs import run_distill

register(drafters=True)


@hydra.main(config_path="../configs", config_name="train", version_base="1.3")
def main(config: DictConfig) -> None:
    folder = Path(HydraConfig.get().runtime.output_dir)
    with clear_errors():
        figures = run_distill(config, folder)
        own = config.train.distill
        if is_main_process():
            print(
                f"wrote {figures['tokens']} tokens at {figures['rate']}, {figures['tau']} per pass; {figures['rows']} "
                f"rows are there, {figures['counted']} tokens of them count in the loss\n"
                f"train on them with the same settings: train.distill.rows={own.rows} "
                f"train.distill.prompt_tokens={own.prompt_tokens} train.distill.new_tokens={own.new_tokens} "
                f"train.distill.folder={own.folder or folder / 'distill'}"
            )


if __name__ == "__main__":
    with clear_errors():
        main()
