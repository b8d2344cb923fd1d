"""What is made of finished runs: the page, a report, and what a sweep prints at its end."""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from selfspec.cli.config import PageRun, ReportRun
from selfspec.cli.errors import clear_errors
from selfspec.cli.run_folders import finished, typed
from selfspec.evaluation.plots import plot_points
from selfspec.evaluation.points import labelled, leaves_of, read_points, regimes_of, rows_of, shortened, varying
from selfspec.evaluation.tables import agreement_table, groups_table, regime_table, table, training_table
from selfspec.page.build import page_data, write_page
from selfspec.utils.files import ORIGIN, Figures, null_for_nan, read_json, write_text


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
        pairs, left_out = agreement(folder, Path(config.against))
        print(agreement_table(pairs))
        for why, names in left_out.items():
            print(f"\n{len(names)} {why}: {', '.join(names[:_NAMED])}{', ...' * (len(names) > _NAMED)}")
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


def agreement(one: Path, other: Path) -> tuple[list[Figures], dict[str, list[str]]]:
    """Speedups over plain decoding that two runs both measured, sweeps of eval/decode.py or comparisons: `same` where
    their intervals overlap; and the names of those that are left out, by why. Raises ValueError where no pair is
    left."""
    if one.resolve() == other.resolve():
        raise ValueError(f"sweep and against are the same folder, {one}; give two runs")
    first, second = _ratios(one, other), _ratios(other, one)
    for folder, ratios in ((one, first), (other, second)):
        if not ratios:
            raise ValueError(f"{folder} holds no finished run with a speedup over plain decoding")
    pairs, single = [], []
    for name in (name for name in first if name in second):
        a, b = first[name], second[name]
        if math.isnan(a["low"] + b["low"]):
            single.append(name)
        else:
            pairs.append({"name": name, "one": a, "other": b, "same": a["low"] <= b["high"] and b["low"] <= a["high"]})
    if not pairs:
        why = f"of {single[0]} both measured one question, which gives no interval" if single else "none is of both"
        raise ValueError(f"{one} and {other} have no measurements to set side by side: {why}")
    left_out = {
        "of one question, which gives no interval": single,
        f"only in {one}": [name for name in first if name not in second],
        f"only in {other}": [name for name in second if name not in first],
    }
    return pairs, {why: names for why, names in left_out.items() if names}


def differences(one: Path, other: Path) -> list[str]:
    """Settings that two runs do not share, though neither varies them, and drafters and targets of one name in other
    places: `key: value / value`."""
    configs, places = [], []
    for folder in (one, other):
        whole = folder / "compare.json"
        points = [read_json(whole)] if whole.is_file() else read_points(folder)[0]
        leaves = [{(key, str(value)) for key, value in leaves_of(point).items()} for point in points]
        configs.append(dict(set.intersection(*leaves) if leaves else set()))
        named: dict[tuple[str, str], set[str]] = {}
        for key, value in set().union(*leaves):
            for place in value.split(",") if key in _PLACES else ():
                named.setdefault((_PLACES[key], shortened("drafter", place)), set()).add(place)
        places.append(named)
    (first, second), (here, there) = configs, places
    keys = sorted(key for key in first.keys() & second.keys() if first[key] != second[key] and key not in _REPORTS)
    apart = [(key.replace("/", "."), first[key], second[key]) for key in keys]
    listed = {key for key, _, _ in apart}
    both = sorted(name for name in here.keys() & there.keys() if here[name] != there[name] and name[0] not in listed)
    apart += [(name[0], " or ".join(sorted(here[name])), " or ".join(sorted(there[name]))) for name in both]
    made, beside = _made_with(one), _made_with(other)
    with_other = sorted(key for key in made.keys() & beside.keys() if made[key] != beside[key])
    apart += [(key, " or ".join(sorted(made[key])), " or ".join(sorted(beside[key]))) for key in with_other]
    return [f"{key}: {one_value} / {other_value}" for key, one_value, other_value in apart]


def _made_with(folder: Path) -> dict[str, set[str]]:
    """Device, target, code and drafters that runs of a folder were measured with."""
    found = defaultdict[str, set[str]](set)
    for path in folder.rglob(ORIGIN):
        for key, value in read_json(path).items():
            if isinstance(value, str) and not key.startswith("files "):
                found[key].add(value)
    return found


_PLACES = {"drafter": "drafter", "compare/drafters": "drafter", "target": "target"}  # keys of names or folders
_NAMED = 6  # measurements that only one run has are named
# Keys of what is reported and extended, not of what is measured
_REPORTS = {f"compare/{key}" for key in ("results", "summary", "drafters", "nodes", "temperatures", "methods")}
_REPORTS |= {f"decode/{key}" for key in ("columns", "metrics", "traces", "answers")}


def _ratios(folder: Path, beside: Path) -> dict[str, Figures]:
    """Speedups with intervals by what they are of, in words that the run `beside` shares."""
    comparison = folder / "compare.json"
    if comparison.is_file():
        try:
            return dict(_compared(read_json(comparison)["rows"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{comparison} is no whole comparison ({error!r}); run its eval/compare.py again"
            ) from error
    points, broken = read_points(folder)
    for path, why in broken:
        print(f"skipped {path}: {why}")
    if not (beside / "compare.json").is_file():
        others = read_points(beside)[0]
        keys = [*varying(points), *varying(others)]
        labelled(points, list(dict.fromkeys(keys)) or ["drafter", "tree/nodes"])
    ratios: dict[str, Figures] = {}
    for point in (p for p in points if "autoregressive" in p["speedup"]):
        if point["label"] in ratios:
            raise ValueError(
                f"{folder} holds two points of the label {point['label']!r}; compare one sweep with another"
            )
        ratios[point["label"]] = point["speedup"]["autoregressive"]
    return ratios


def _compared(rows: list[Figures]) -> Iterator[tuple[str, Figures]]:
    for row in rows:
        name = f"{row['arm']} {row['nodes']} T={row['T']:g}"
        yield name, row["speedup"]
        for group, part in row["groups"].items():
            yield f"{name}, {group}", part["speedup"]


ERROR = "error.txt"  # of a point of a sweep that failed


class SweepEnd(Callback):
    """Ends a sweep: one table of all its points, of decoding with plots, of training of their last validations. Points
    that failed, while the others went on, are named, with exit code 2."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        with clear_errors():
            ours = "config.yaml", ERROR
            points = sorted(path for path in folder.iterdir() if any((path / name).is_file() for name in ours))
            if read_points(folder)[0]:
                run_report(OmegaConf.create({"sweep": str(folder), "against": None}))
            elif done := {home.name: figures for home in points if (figures := finished(home)) is not None}:
                text = training_table(done)
                write_text(folder / "table.md", text + "\n")
                print(f"\n{text}\n{folder}")
            if failed := [home for home in points if (home / ERROR).is_file()]:
                names, first = ", ".join(home.name for home in failed), (failed[0] / ERROR).read_text().strip()
                of = f"{len(failed)} of {len(points)} points of {folder} failed ({names})"
                print(f"{Path(sys.argv[0]).name}: {of}, the first with: {first}", file=sys.stderr)
                sys.exit(2)  # Hydra makes a warning of what a callback raises
