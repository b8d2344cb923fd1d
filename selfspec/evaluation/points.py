"""The files a benchmark leaves behind, and reading them again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from selfspec.evaluation.records import Record
from selfspec.log import Figures, write_text

OWN = ("records.jsonl", "summary.json", "figures.jsonl", "decode.log")  # files of a benchmark's run folder


def write_point(folder: Path, point: Figures, records: list[Record]) -> None:
    """records.jsonl and summary.json in `folder`, the summary last and whole."""
    with (folder / "records.jsonl").open("w") as f:
        f.writelines(json.dumps(asdict(record)) + "\n" for record in records)
    write_text(folder / "summary.json", json.dumps(point, indent=1) + "\n")


def read_points(folder: Path) -> tuple[list[Figures], list[tuple[Path, str]]]:
    """The points of all runs below `folder`, in the order of their folders, and the runs that are broken: their
    folders, and why."""
    marks = ("summary.json", "records.jsonl", "figures.jsonl", ".hydra")
    homes = {p for p in folder.rglob("*") if p.is_dir() and any((p / mark).exists() for mark in marks)}
    homes |= {p for p in folder.iterdir() if p.is_dir() and p.name.isdigit()}
    homes |= {folder} if (folder / "summary.json").exists() else set()
    points, broken = [], []
    for home in sorted(homes, key=lambda p: [(len(part), part) for part in p.parts]):
        try:
            point = json.loads((home / "summary.json").read_text())
            wrong = not _whole(point)
        except FileNotFoundError:
            broken.append((home, "summary.json is missing: the run did not end"))
        except ValueError as error:
            broken.append((home, f"summary.json is not whole ({error})"))
        else:
            if wrong:
                broken.append((home, "summary.json holds no point of eval/decode.py"))
            else:
                points.append(point)
    return points, broken


def _whole(point: Any) -> bool:
    """Whether this is what `write_point` wrote, as far as tables and plots read it."""
    try:
        ratios = [part[key] for part in point["speedup"].values() for key in ("ratio", "low", "high")]
        known = point["label"], point["identical"], point["config"]["tree"]["nodes"]
        return (
            None not in known and isinstance(point["arms"], dict) and all(isinstance(r, (int, float)) for r in ratios)
        )
    except (TypeError, KeyError, AttributeError):
        return False


def agreement(one: Path, other: Path) -> list[Figures]:
    """Speedups over plain decoding that two runs both measured, sweeps of eval/decode.py or comparisons: `same` where
    their intervals overlap. Raises ValueError where they have none in common."""
    if one.resolve() == other.resolve():
        raise ValueError(f"sweep and against are the same folder, {one}; give two runs")
    first, second = _ratios(one), _ratios(other)
    for folder, found in ((one, first), (other, second)):
        if not found:
            raise ValueError(f"{folder} holds no finished run with a speedup over plain decoding")
    pairs = []
    for name in (name for name in first if name in second):
        a, b = first[name], second[name]
        pairs.append({"name": name, "one": a, "other": b, "same": a["low"] <= b["high"] and b["low"] <= a["high"]})
    if not pairs:
        raise ValueError(f"{one} and {other} have no measurement in common")
    return pairs


def _ratios(folder: Path) -> dict[str, Figures]:
    """Speedups with intervals by what they are of."""
    comparison = folder / "compare.json"
    if comparison.is_file():
        try:
            return dict(_compared(json.loads(comparison.read_text())["rows"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{comparison} is no whole comparison ({error!r}); run its eval/compare.py again"
            ) from error
    points, broken = read_points(folder)
    for path, why in broken:
        print(f"skipped {path}: {why}")
    found: dict[str, Figures] = {}
    for point in (p for p in points if "autoregressive" in p["speedup"]):
        if point["label"] in found:
            raise ValueError(
                f"{folder} holds two points of the label {point['label']!r}; compare one sweep with another"
            )
        found[point["label"]] = point["speedup"]["autoregressive"]
    return found


def _compared(rows: list[Figures]) -> Iterator[tuple[str, Figures]]:
    for row in rows:
        name = f"{row['arm']} {row['nodes']} T={row['T']:g}"
        yield name, row["speedup"]
        for group, part in row["groups"].items():
            yield f"{name}, {group}", part["speedup"]
