"""Check exactness on your own model: python eval/audit.py target=... drafter=... dtype=float32

Ends with exit status 1 where the verdict is BUG.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from selfspec.config import clear_errors, register
from selfspec.measures import run_audit

register()


@hydra.main(config_path="../configs", config_name="audit", version_base="1.3")
def main(config: DictConfig) -> None:
    with clear_errors():
        figures = run_audit(config, Path(HydraConfig.get().runtime.output_dir))
    if figures["verdict"] == "BUG" or (figures["distribution_verdict"] or "").startswith("BUG"):
        sys.exit(1)


if __name__ == "__main__":
    with clear_errors():
        main()
