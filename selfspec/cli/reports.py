"""What is made of finished runs: the page, a report, and what a sweep prints at its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from selfspec.cli.config import PageRun, ReportRun
from selfspec.cli.errors import clear_errors
from selfspec.cli.run_folders import finished, typed
from selfspec.evaluation.plots import plot_points
from selfspec.evaluation.points import agreement, differences, read_points, regimes_of, rows_of
from selfspec.evaluation.tables import agreement_table, groups_table, regime_table, table, training_table
from selfspec.page.build import page_data, write_page
from selfspec.utils.files import null_for_nan, write_text


def run_page(config: DictConfig) -> None:
    """The page of `selfspec.page.build`."""
    run = typed(PageRun, config).page
    data = page_data(run)
    if run.data is not None:
        write_text(Path(run.data), json.dumps(null_for_nan(data), ensure_ascii=False, separators=(",", ":")) + "\n")
    size = write_page(data, Path(run.out))
    print(f"{run.out}: {size / 1e6:.1f} MB, {len(data['traces'])} traces, {len(data['comparisons'])} comparisons")
    for name, command in data["missing"].items():
        print(f"no {name} in {', '.join(run.runs or ())}: {command}")


def run_report(config: DictConfig) -> None:
    """One table and one set of plots of all points below the folder `sweep`; what is broken is named and left out.
    against: another run, whose speedups are set beside this one's instead."""
    ReportRun(config.sweep, config.against)  # checks that both are there
    folder = Path(config.sweep)
    if config.against is not None:
        print(agreement_table(agreement(folder, Path(config.against))))
        if apart := differences(folder, Path(config.against)):
            print(f"\nthe runs differ in {'; '.join(apart)}")
        return
    points, broken = read_points(folder)
    for path, why in broken:
        print(f"skipped {path}: {why}")
    if broken:
        print(f"{len(broken)} of {len(points) + len(broken)} runs skipped")
    if not points:
        raise ValueError(f"sweep={folder} holds no finished run of eval/decode.py")
    whole = any("all" in point["config"]["decode"].get("columns", ()) for point in points)
    rows, regimes = rows_of(points), regimes_of(points)
    groups = groups_table(rows) + (f"\n\n{regime_table(regimes)}" if regimes else "")
    write_text(folder / "table.md", f"{table(rows)}\n\n{groups}\n")
    plot_points(rows, folder)
    print(f"\n{table(rows, brief=not whole)}\n" + (f"\n{groups}\n" if whole else ""))
    print(f"by group of text: {folder / 'table.md'}; plots beside it")


ERROR = "error.txt"  # of a point of a sweep that failed


def sweep_points(folder: Path) -> list[Path]:
    """The folders of a sweep's points."""
    return sorted(path for path in folder.iterdir() if (path / "config.yaml").is_file() or (path / ERROR).is_file())


class SweepEnd(Callback):
    """Ends a sweep: points that failed, while the others went on, are named, with exit code 2."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        with clear_errors():
            self.table(folder)
            if failed := [home for home in sweep_points(folder) if (home / ERROR).is_file()]:
                names, first = ", ".join(home.name for home in failed), (failed[0] / ERROR).read_text().strip()
                of = f"{len(failed)} of {len(sweep_points(folder))} points of {folder} failed ({names})"
                raise ValueError(f"{of}, the first with: {first}")

    def table(self, folder: Path) -> None:
        """What a kind of sweep prints of all its points."""


class DecodeTable(SweepEnd):
    """One table and one set of plots of all points of eval/decode.py."""

    def table(self, folder: Path) -> None:
        if read_points(folder)[0]:
            run_report(OmegaConf.create({"sweep": str(folder), "against": None}))


class TrainingTable(SweepEnd):
    """One table of the last validations of all trainings."""

    def table(self, folder: Path) -> None:
        done = {home: figures for home in sweep_points(folder) if (figures := finished(home)) is not None}
        if done:
            text = training_table({home.name: figures for home, figures in done.items()})
            write_text(folder / "table.md", text + "\n")
            print(f"\n{text}\n{folder}")
