"""One table and the plots of all runs of a sweep folder: python eval/report.py sweep=runs/decode/<date>"""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from selfspec.config import clear_errors, register
from selfspec.measures import run_report

register()


@hydra.main(config_path="../configs", config_name="report", version_base="1.3")
def main(config: DictConfig) -> None:
    with clear_errors():
        run_report(config)


if __name__ == "__main__":
    with clear_errors():
        main()
