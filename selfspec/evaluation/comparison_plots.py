"""Plots of a comparison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from selfspec.evaluation.plots import _bars, _legend, _rows_height, _saved
from selfspec.utils.files import Figures, disk_room


def plot_summary(columns: dict[str, dict[str, Figures]], title: str, stamp: str, path: Path) -> Path:
    """Speedups of all arms, the fastest on top, with intervals; the stamp of the table that it shows is kept in it."""
    first = next(iter(columns.values()))
    names = sorted((arm for arm in first if arm != "plain"), key=lambda arm: float(first[arm]["speedup"]["ratio"]))
    figure, axes = plt.subplots(figsize=(9.0, 0.9 + 0.21 * (len(columns) * len(names))), layout="constrained")
    high = 0.8 / len(columns)
    for i, (label, rows) in enumerate(columns.items()):
        at = [rows[name]["speedup"] for name in names]
        places = [n + 0.4 - high * (i + 0.5) for n in range(len(names))]
        errors = [[s["ratio"] - s["low"] for s in at], [s["high"] - s["ratio"] for s in at]]
        ratios = [s["ratio"] for s in at]
        axes.barh(places, ratios, height=high, xerr=errors, label=label, color=f"C{i}", ecolor="0.3")
    axes.axvline(1.0, color="0.2", linewidth=1, linestyle="--")
    axes.set(yticks=range(len(names)), yticklabels=names, xlabel="speedup over plain decoding")
    axes.set_title(title, fontsize=9, loc="left")
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk_room(path):
        figure.savefig(path, dpi=120, metadata={"stamp": stamp})
    plt.close(figure)
    return path


def plot_comparison(rows: list[Figures], folder: Path) -> dict[str, Path]:
    """Of a comparison, by temperature: acceptance length and speedup against nodes (with the limit beside it), the time
    of a pass, and the speedup by group of text."""
    drawn = {}
    for temperature in dict.fromkeys(row["T"] for row in rows):
        at_temperature = [row for row in rows if row["T"] == temperature]
        drawings = {"tau": _compare_tau, "limit": _compare_limit, "time": _compare_time, "groups": _compare_groups}
        for name, draw in drawings.items():
            key = f"compare_{name}_T{temperature:g}"
            wide, high = (
                (name == "groups") * len({row["arm"] for row in at_temperature}),
                (name == "time") * len(at_temperature),
            )
            size = {
                "width": max(6.4, 1.0 * wide),
                "height": max(_rows_height(high), 0.25 * len(_lines(at_temperature))),
            }
            drawn[key] = _saved(folder / f"{key}.png", draw, at_temperature, **size)
    return drawn


def _lines(rows: list[Figures]) -> dict[str, list[Figures]]:
    """Rows of a fixed size by arm."""
    lines: dict[str, list[Figures]] = {}
    for row in rows:
        if row["nodes"].isdigit():
            lines.setdefault(row["arm"], []).append(row)
    return {arm: sorted(line, key=lambda row: int(row["nodes"])) for arm, line in lines.items()}


def _nodes_axis(axes: Axes, rows: list[Figures]) -> None:
    axes.set(xlabel="nodes of the tree (star: auto)", xscale="log", title=f"T={rows[0]['T']:g}")
    axes.set_xticks(sorted({int(row["nodes"]) for row in rows if row["nodes"].isdigit()}))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    _legend(axes)


def _compare_tau(axes: Axes, rows: list[Figures]) -> None:
    for i, (arm, line) in enumerate(_lines(rows).items()):
        axes.plot([int(row["nodes"]) for row in line], [row["tau"] for row in line], "o-", color=f"C{i}", label=arm)
        _star(axes, rows, arm, f"C{i}", lambda row: float(row["tau"]))
    axes.set(ylabel="tokens per pass", ylim=(1, None))
    _nodes_axis(axes, rows)


def _compare_limit(axes: Axes, rows: list[Figures]) -> None:
    for i, (arm, line) in enumerate(_lines(rows).items()):
        at = [int(row["nodes"]) for row in line]
        axes.plot(at, [row["speedup"]["ratio"] for row in line], "o-", color=f"C{i}", label=arm)
        axes.plot(at, [row.get("limit", float("nan")) for row in line], ":", color=f"C{i}", alpha=0.7)
        _star(axes, rows, arm, f"C{i}", lambda row: float(row["speedup"]["ratio"]))
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(ylabel="speedup (dotted: τ / (c(n) + draft))", ylim=(0, None))
    _nodes_axis(axes, rows)


def _star(axes: Axes, rows: list[Figures], arm: str, color: str, value: Callable[[Figures], float]) -> None:
    """nodes=auto, at the nodes that it ran on average."""
    auto_rows = [row for row in rows if row["arm"] == arm and row["nodes"] == "auto" and "mean_nodes" in row]
    axes.plot([row["mean_nodes"] for row in auto_rows], [value(row) for row in auto_rows], "*", ms=11, color=color)


def _compare_time(axes: Axes, rows: list[Figures]) -> None:
    rows = [row for row in rows if "milliseconds_per_pass" in row]
    left = [0.0] * len(rows)
    for part, title in (("target", "target pass"), ("draft", "draft"), ("other", "everything else")):
        widths = [row["milliseconds_per_pass"][part] for row in rows]
        axes.barh(range(len(rows)), widths, left=left, label=title)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    _bars(axes, [f"{row['arm']} {row['nodes']}" for row in rows])
    axes.set(xlabel="milliseconds per pass")
    _legend(axes)


def _compare_groups(axes: Axes, rows: list[Figures]) -> None:
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    best = {arm: max((r for r in rows if r["arm"] == arm), key=lambda r: r["speedup"]["ratio"]) for arm in arms}
    groups = list(rows[0]["groups"])
    for i, group in enumerate(groups):
        speedups = [best[arm]["groups"].get(group, {}).get("speedup", {}) for arm in arms]
        at = [x + (i - (len(groups) - 1) / 2) * 0.8 / len(groups) for x in range(len(arms))]
        height = [f.get("ratio", 0.0) for f in speedups]
        errors = [
            [max(0.0, f.get(side, 0.0) * sign - h * sign) for f, h in zip(speedups, height, strict=True)]
            for side, sign in (("low", -1), ("high", 1))
        ]
        axes.bar(at, height, width=0.8 / len(groups), yerr=errors, capsize=1, error_kw={"linewidth": 0.6}, label=group)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(
        range(len(arms)), [f"{arm} ({best[arm]['nodes']})" for arm in arms], fontsize=7, rotation=30, ha="right"
    )
    axes.set(ylabel="speedup over plain decoding", title=f"T={rows[0]['T']:g}, best size of each")
    axes.legend(fontsize=7)
