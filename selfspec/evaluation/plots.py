"""Plots: of benchmark points, comparisons, limits, audits and trainings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib

from selfspec.evaluation.figures import grouped
from selfspec.utils.files import Figures, disk_room

matplotlib.use("Agg")
from matplotlib import colormaps
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_PARTS = {"target": "target pass", "draft": "draft", "other": "everything else"}  # of a step's time
_NOTHING = dict.fromkeys(("ratio", "low", "high"), float("nan"))
Line = list[tuple[float, float, bool]]  # nodes, value, and whether `auto` chose the nodes


# -- what is drawn


@contextmanager
def _figure(
    path: Path, height: float = 3.6, width: float = 6.4, metadata: dict[str, str] | None = None
) -> Iterator[Axes]:
    """Axes to draw on, which are then saved. height and width in inches, the legend included; metadata: kept in the
    file."""
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    yield axes
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk_room(path):
        figure.savefig(path, dpi=120, metadata=metadata)
    plt.close(figure)


def _rows_height(count: int) -> float:
    """Inches for so many labelled rows, one above the other."""
    return max(3.6, 1.2 + 0.24 * count)


def _legend(axes: Axes) -> None:
    """Beside the axes, where it can not cover them."""
    if axes.get_legend_handles_labels()[0]:
        axes.figure.legend(loc="outside right upper", fontsize=7)


def _bars(axes: Axes, labels: list[str]) -> None:
    """Label horizontal bars, the first at the top."""
    axes.set_yticks(range(len(labels)), labels, fontsize=8 if len(labels) < 25 else 6)
    axes.set_ylim(len(labels) - 0.4, -0.6)


def _ticks(axes: Axes, sizes: list[int]) -> None:
    """Numbers of nodes on a logarithmic axis."""
    axes.set(xscale="log")
    axes.set_xticks(sorted(set(sizes)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def _by_nodes(axes: Axes, lines: Mapping[str, Line], limits: Mapping[str, Line] | None = None) -> None:
    """A line for each name through its fixed sizes; a star is nodes=auto, at the nodes that it ran. limits: dotted."""
    for i, (name, line) in enumerate(lines.items()):
        color, style = f"C{i % 10}", ("o-", "o--", "o:", "o-.")[i // 10 % 4]
        fixed = sorted((at, value) for at, value, auto in line if not auto)
        axes.plot([at for at, _ in fixed], [value for _, value in fixed], style, color=color, label=name)
        chosen = [(at, value) for at, value, auto in line if auto]
        axes.plot([at for at, _ in chosen], [value for _, value in chosen], "*", ms=11, color=color)
        dotted = sorted((at, value) for at, value, auto in (limits or {}).get(name, []) if not auto)
        axes.plot([at for at, _ in dotted], [value for _, value in dotted], ":", color=color, alpha=0.7)
    axes.set(xlabel="nodes of the tree (star: auto, at what it ran)")
    every = [(round(at), auto) for line in lines.values() for at, _, auto in line]
    sizes = {at for at, auto in every if not auto}
    _ticks(axes, [*sizes, *(at for at, auto in every if auto and all(abs(at - size) > 1 for size in sizes))])
    _legend(axes)


def _speedups(axes: Axes, names: list[str], series: Mapping[str, list[dict[str, float]]]) -> None:
    """Bars with intervals beside each name, one for each of the series."""
    high = 0.8 / max(1, len(series))
    for i, (label, speedups) in enumerate(series.items()):
        at = [n - 0.4 + high * (i + 0.5) for n in range(len(names))]
        errors = [[s["ratio"] - s["low"] for s in speedups], [s["high"] - s["ratio"] for s in speedups]]
        ratios = [s["ratio"] for s in speedups]
        axes.barh(at, ratios, height=high, xerr=errors, capsize=2, label=label, ecolor="0.3", error_kw={"lw": 0.8})
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="speedup, with 95% intervals over questions")
    _bars(axes, names)
    _legend(axes)


# -- rows of figures, as `selfspec.evaluation.tables` takes them


def plot_points(rows: Sequence[Figures], folder: Path) -> dict[str, Path]:
    """One PNG per plot over all points that have a speculative arm; returns their paths."""
    rows = [row for row in rows if "tau" in row]
    if not rows:
        return {}
    drawings = {"acceptance_by_depth": _acceptance, "time_split": _time, "speedup": _speedup}
    if len({row["nodes"] for row in rows}) > 1:
        drawings["tau_by_nodes"] = _tau
    high, width = _rows_height(len(rows)), 6.4 + 0.07 * max(len(row["label"]) for row in rows)
    lines = 3.6 if len(rows) < 20 else 5.4
    paths = {name: folder / f"{name}.png" for name in drawings}
    for name, draw in drawings.items():
        with _figure(paths[name], lines if draw is _tau else high, width) as axes:
            draw(axes, rows)
    return paths


def plot_comparison(rows: Sequence[Figures], folder: Path) -> dict[str, Path]:
    """Of a comparison, by temperature: acceptance length and speedup against nodes (with the limit beside it), the time
    of a pass, and the speedup by group of text."""
    drawn = {}
    for temperature in dict.fromkeys(row["T"] for row in rows):
        at_temperature = [row for row in rows if row["T"] == temperature]
        arms = len({row["arm"] for row in at_temperature})
        bars = {"time": len(at_temperature), "groups": arms * len(at_temperature[0]["groups"]) / 2}
        drawings = {"tau": _tau, "limit": _limit, "time": _time, "groups": _groups}
        for name, draw in drawings.items():
            key = f"compare_{name}_T{temperature:g}"
            height = max(_rows_height(round(bars.get(name, 0))), 0.25 * arms)
            drawn[key] = folder / f"{key}.png"
            with _figure(drawn[key], height) as axes:
                draw(axes, at_temperature)
    return drawn


def plot_summary(columns: dict[str, dict[str, Figures]], title: str, stamp: str, path: Path) -> Path:
    """Speedups of all arms, the fastest on top, with intervals; the stamp of the table that it shows is kept in it.
    columns: see `tables.summary_table`."""
    first = next(iter(columns.values()))
    names = sorted((arm for arm in first if arm != "plain"), key=lambda arm: -first[arm]["speedup"]["ratio"])
    height = 0.9 + 0.21 * len(columns) * len(names)
    with _figure(path, height, 9.0, {"stamp": stamp}) as axes:
        _speedups(axes, names, {label: [rows[name]["speedup"] for name in names] for label, rows in columns.items()})
        axes.set_title(title, fontsize=9, loc="left")
    return path


def _titled(axes: Axes, rows: Sequence[Figures], more: str = "") -> None:
    if "T" in rows[0]:
        axes.set(title=f"T={rows[0]['T']:g}{more}")


def _acceptance(axes: Axes, rows: Sequence[Figures]) -> None:
    for i, row in enumerate(rows):
        full, conditional = row["full_acceptance"], row["conditional_acceptance"]
        color = f"C{i}" if len(rows) <= 10 else colormaps["viridis"](i / (len(rows) - 1))
        depths = range(1, len(full) + 1)
        axes.plot(depths, full, "o-", color=color, label=row["label"])
        axes.plot(depths, conditional, "x:", color=color, alpha=0.6)
    axes.set(xlabel="depth", ylabel="accepted", ylim=(0, 1))
    axes.set_title("solid: all up to here; dotted: given that the parent was", fontsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    _legend(axes)


def _lines(rows: Sequence[Figures], value: Callable[[Figures], float]) -> dict[str, Line]:
    """A line over nodes for each arm that has sizes, or for all points that differ in nodes alone."""
    lines: dict[str, Line] = {}
    for row in rows:
        auto = row["nodes"] == "auto"
        if row["nodes"].isdigit() or (auto and "mean_nodes" in row):
            at = row["mean_nodes"] if auto else int(row["nodes"])
            lines.setdefault(row["arm"] if "arm" in row else row["line"], []).append((at, value(row), auto))
    return lines


def _tau(axes: Axes, rows: Sequence[Figures]) -> None:
    _by_nodes(axes, _lines(rows, lambda row: float(row["tau"])))
    axes.set(ylabel="tokens per pass", ylim=(1, None))
    _titled(axes, rows)


def _limit(axes: Axes, rows: Sequence[Figures]) -> None:
    limits = _lines(rows, lambda row: float(row.get("limit", float("nan"))))
    _by_nodes(axes, _lines(rows, lambda row: float(row["speedup"]["ratio"])), limits)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(ylabel="speedup (dotted: τ / (c(n) + draft))", ylim=(0, None))
    _titled(axes, rows)


def _time(axes: Axes, rows: Sequence[Figures]) -> None:
    """Where the milliseconds of a pass go."""
    timed = [row for row in rows if "milliseconds_per_pass" in row]
    left = [0.0] * len(timed)
    for part, title in _PARTS.items():
        widths = [row["milliseconds_per_pass"][part] for row in timed]
        axes.barh(range(len(timed)), widths, left=left, label=title)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlabel="milliseconds per pass")
    _bars(axes, [row["label"] if "label" in row else f"{row['arm']} {row['nodes']}" for row in timed])
    _legend(axes)


def _speedup(axes: Axes, rows: Sequence[Figures]) -> None:
    over = {"over plain": "speedup", "over hf_generate": "over_hf"}
    series = {title: [row[key] for row in rows] for title, key in over.items() if all(key in row for row in rows)}
    _speedups(axes, [row["label"] for row in rows], series)


def _groups(axes: Axes, rows: Sequence[Figures]) -> None:
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    best = [max((r for r in rows if r["arm"] == arm), key=lambda r: r["speedup"]["ratio"]) for arm in arms]
    names = [f"{row['arm']} ({row['nodes']})" for row in best]
    groups = {g: [row["groups"].get(g, {}).get("speedup", _NOTHING) for row in best] for g in rows[0]["groups"]}
    _speedups(axes, names, groups)
    _titled(axes, rows, ", each at the size that is fastest here")


# -- limits, audits, trainings


def plot_margins(margins: list[tuple[float, float]], bound: float, path: Path) -> Path:
    """First divergences by (position, margin in logits), under the bound beyond which one is a bug."""
    with _figure(path) as axes:
        axes.plot([p for p, _ in margins], [m for _, m in margins], "o", alpha=0.6, label="first divergence of a text")
        axes.axhline(bound, color="C3", label="beyond this line: a bug")
        axes.set(xlabel="new tokens before it", ylabel="margin of the target's pick (logits)", ylim=(0, None))
        axes.legend(fontsize=8)
    return path


def plot_limits(figures: Figures, folder: Path) -> dict[str, Path]:
    """Costs of passes against the physical limit, and expected speedups by nodes."""
    drawn, rows = {"limits": folder / "limits.png"}, figures["passes"]
    at = [row["nodes"] for row in rows]
    with _figure(drawn["limits"]) as axes:
        for name in ("eager", "compiled"):
            axes.plot(at, [1000 * row[name] for row in rows], "o-", label=name)
        axes.plot(at, [1000 * row["limit"] for row in rows], "k:", label="limit: bandwidth, then peak")
        axes.set(xlabel="nodes of the tree", ylabel="milliseconds per pass", ylim=(0, None))
        _ticks(axes, at)
        axes.legend(fontsize=8)
    compiled = [f for f in figures["forecasts"] if f["engine"] == "compiled"]
    if not compiled:
        return drawn
    drawn["expected"] = folder / "expected.png"
    with _figure(drawn["expected"]) as axes:
        for name, line in grouped(compiled, lambda f: f"{f['drafter']}, T={f['T']:g}").items():
            style = "o-" if name.endswith("T=0") else "o--"
            axes.plot([f["nodes"] for f in line], [f["speedup"] for f in line], style, label=name)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(xlabel="nodes of the tree", ylabel="expected over compiled plain decoding", ylim=(0, None))
        _ticks(axes, [f["nodes"] for f in compiled])
        _legend(axes)
    return drawn


def plot_training(records: list[Figures], folder: Path) -> dict[str, Path]:
    """Of a drafter's training log: its loss, and the acceptance length that its calibrated trees promise."""
    validated, trained = ([r for r in records if part in r] for part in ("validation", "train"))
    if not validated:
        return {}
    drawn = {name: folder / f"{name}.png" for name in ("training_loss", "training_tau")}
    steps = [r["step"] for r in validated]
    with _figure(drawn["training_loss"]) as axes:
        axes.plot([r["step"] for r in trained], [r["train"]["loss"] for r in trained], lw=0.8, label="training text")
        axes.plot(steps, [r["validation"]["loss"] for r in validated], marker="o", label="held-out text")
        axes.set(xlabel="step", ylabel="loss")
        axes.legend()
    with _figure(drawn["training_tau"]) as axes:
        for mode, style in (("greedy", "-"), ("sampled", "--")):
            for nodes, colour in (("8", "C0"), ("16", "C1"), ("32", "C2")):
                values = [r["validation"][mode]["tau"][nodes] for r in validated]
                axes.plot(steps, values, style, color=colour, marker="o", label=f"{mode}, {nodes} nodes")
        axes.set(xlabel="step", ylabel="expected acceptance length")
        _legend(axes)
    return drawn
