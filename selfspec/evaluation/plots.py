"""Plots of benchmark points: acceptance by depth, where the time goes, speedup."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

from selfspec.evaluation.points import labelled, varying
from selfspec.utils.files import Figures

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_LINES = 8  # points at most that are told apart as lines


def plot_points(points: list[Figures], folder: Path) -> dict[str, Path]:
    """One PNG per plot over all points that have a speculative arm; returns their paths."""
    points = [p for p in points if "speculative" in p]
    if not points:
        return {}
    drawings = {"acceptance_by_depth": _acceptance, "time_split": _time, "speedup": _speedup}
    if len({p["config"]["tree"]["nodes"] for p in points}) > 1:
        drawings["tau_by_nodes"] = _tau
    high, width = _rows_height(len(points)), 6.4 + 0.07 * max(len(p["label"]) for p in points)
    lines = 3.6 if len(points) < 20 else 5.4
    return {
        name: _saved(folder / f"{name}.png", draw, points, width=width, height=lines if draw is _tau else high)
        for name, draw in drawings.items()
    }


def plot_margins(margins: list[tuple[float, float]], bound: float, path: Path) -> Path:
    """First divergences by (position, margin in logits), under the bound beyond which one is a bug."""
    return _saved(path, _margins, margins, bound)


def plot_summary(rows: list[Figures], title: str, stamp: str, path: Path) -> Path:
    """Speedups of all arms, the fastest on top, with intervals; the stamp of the table that it shows is kept in it."""
    temperatures = sorted({row["T"] for row in rows})
    order = sorted((r for r in rows if r["T"] == temperatures[0]), key=lambda r: r["speedup"]["ratio"])
    names = [row["arm"] for row in order]
    figure, axes = plt.subplots(figsize=(9.0, 0.9 + 0.42 * len(names)), layout="constrained")
    high = 0.8 / len(temperatures)
    for i, t in enumerate(temperatures):
        at = {row["arm"]: row["speedup"] for row in rows if row["T"] == t}
        places = [n + 0.4 - high * (i + 0.5) for n in range(len(names))]
        ratios = [at[name]["ratio"] for name in names]
        errors = [[at[n]["ratio"] - at[n]["low"] for n in names], [at[n]["high"] - at[n]["ratio"] for n in names]]
        axes.barh(places, ratios, height=high, xerr=errors, label=f"T={t:g}", color=f"C{i}", ecolor="0.3")
    axes.axvline(1.0, color="0.2", linewidth=1, linestyle="--")
    axes.set(yticks=range(len(names)), yticklabels=names, xlabel="speedup over plain decoding")
    axes.set_title(title, fontsize=9, loc="left")
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
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


def plot_limits(figures: Figures, folder: Path) -> dict[str, Path]:
    """Costs of passes against the physical limit, and expected speedups by nodes."""
    drawn = {"limits": _saved(folder / "limits.png", _limits, figures)}
    if figures["forecasts"]:
        drawn["expected"] = _saved(folder / "expected.png", _expected, figures)
    return drawn


def plot_training(records: list[Figures], folder: Path) -> dict[str, Path]:
    """Of a drafter's training log: its loss, and the acceptance length that its calibrated trees promise."""
    validated = [r for r in records if "validation" in r]
    if not validated:
        return {}
    trained = [r for r in records if "train" in r]
    drawn = {"training_loss": _saved(folder / "training_loss.png", _training_loss, trained, validated)}
    return {**drawn, "training_tau": _saved(folder / "training_tau.png", _training_tau, validated)}


def _training_loss(axes: Axes, trained: list[Figures], validated: list[Figures]) -> None:
    axes.plot([r["step"] for r in trained], [r["train"]["loss"] for r in trained], lw=0.8, label="training text")
    steps = [r["step"] for r in validated]
    axes.plot(steps, [r["validation"]["loss"] for r in validated], marker="o", label="held-out text")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()


def _training_tau(axes: Axes, validated: list[Figures]) -> None:
    steps = [r["step"] for r in validated]
    for mode, style in (("greedy", "-"), ("sampled", "--")):
        for nodes, colour in (("8", "C0"), ("16", "C1"), ("32", "C2")):
            values = [r["validation"][mode]["tau"][nodes] for r in validated]
            axes.plot(steps, values, style, color=colour, marker="o", label=f"{mode}, {nodes} nodes")
    axes.set(xlabel="step", ylabel="expected acceptance length")
    _legend(axes)


def _limits(axes: Axes, figures: Figures) -> None:
    rows = figures["passes"]
    at = [row["nodes"] for row in rows]
    for name in ("eager", "compiled"):
        axes.plot(at, [1000 * row[name] for row in rows], "o-", label=name)
    axes.plot(at, [1000 * row["limit"] for row in rows], "k:", label="limit: bandwidth, then peak")
    axes.set(xlabel="nodes of the tree", ylabel="milliseconds per pass", xscale="log", ylim=(0, None))
    axes.set_xticks(at)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend(fontsize=8)


def _expected(axes: Axes, figures: Figures) -> None:
    lines: dict[str, list[Figures]] = {}
    for forecast in figures["forecasts"]:
        if forecast["engine"] == "compiled":
            lines.setdefault(f"{forecast['drafter']}, T={forecast['T']:g}", []).append(forecast)
    for name, line in lines.items():
        style = "o-" if name.endswith("T=0") else "o--"
        axes.plot([f["nodes"] for f in line], [f["speedup"] for f in line], style, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="nodes of the tree", ylabel="expected over compiled plain decoding", xscale="log", ylim=(0, None))
    axes.set_xticks(sorted({f["nodes"] for f in figures["forecasts"]}))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    _legend(axes)


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


def _saved(path: Path, draw: Callable[..., None], *data: object, height: float = 3.6, width: float = 6.4) -> Path:
    """height and width in inches, the legend included."""
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    draw(axes, *data)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _rows_height(count: int) -> float:
    """Inches for so many labelled rows, one above the other."""
    return max(3.6, 1.2 + 0.24 * count)


def _legend(axes: Axes) -> None:
    """Beside the axes, where it can not cover them."""
    axes.figure.legend(loc="outside right upper", fontsize=7)


def _bars(axes: Axes, labels: list[str]) -> None:
    """Label horizontal bars, the first at the top."""
    axes.set_yticks(range(len(labels)), labels, fontsize=8 if len(labels) < 25 else 6)
    axes.set_ylim(len(labels) - 0.4, -0.6)


def _margins(axes: Axes, margins: list[tuple[float, float]], bound: float) -> None:
    axes.plot([p for p, _ in margins], [m for _, m in margins], "o", alpha=0.6, label="first divergence of a text")
    axes.axhline(bound, color="C3", label="beyond this line: a bug")
    axes.set(xlabel="new tokens before it", ylabel="margin of the target's pick (logits)", ylim=(0, None))
    axes.legend(fontsize=8)


def _acceptance(axes: Axes, points: list[Figures]) -> None:
    """Lines for a few points, a coloured table for many."""
    if len(points) > _LINES:
        _acceptance_table(axes, points)
        return
    for i, point in enumerate(points):
        full = point["speculative"]["full_acceptance"]
        conditional = point["speculative"]["conditional_acceptance"]
        depths = range(1, len(full) + 1)
        axes.plot(depths, full, "o-", color=f"C{i}", label=point["label"])
        axes.plot(depths, conditional, "x:", color=f"C{i}", alpha=0.6)
    axes.set(xlabel="depth", ylabel="accepted", ylim=(0, 1))
    axes.set_title("solid: all up to here; dotted: given that the parent was", fontsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    _legend(axes)


def _acceptance_table(axes: Axes, points: list[Figures]) -> None:
    full = [point["speculative"]["full_acceptance"] for point in points]
    depth = max(1, *map(len, full))
    shown = axes.imshow([row + [float("nan")] * (depth - len(row)) for row in full], aspect="auto", vmin=0, vmax=1)
    axes.figure.colorbar(shown, label="accepted, all up to this depth")
    axes.set_xticks(range(depth), [str(d + 1) for d in range(depth)])
    axes.set(xlabel="depth")
    _bars(axes, [point["label"] for point in points])


def _tau(axes: Axes, points: list[Figures]) -> None:
    """τ against nodes, a line for all that differ in nodes alone; a star is nodes=auto, at the nodes that it chose."""
    keys = [key for key in varying(points) if key != "tree/nodes"]
    named = [dict(point) for point in points]
    labelled(named, keys)
    lines: dict[str, list[tuple[float, float, bool]]] = {}
    for point, name in zip(points, (p["label"] for p in named), strict=True):
        figures, nodes = point["speculative"], point["config"]["tree"]["nodes"]
        auto = nodes == "auto"
        at = figures["forecast"]["nodes"] / max(1, figures["forecast"]["passes"]) if auto else nodes
        lines.setdefault(name, []).append((at, figures["acceptance_length"], auto))
    for i, (name, line) in enumerate(lines.items()):
        color, style = f"C{i % 10}", ("o-", "o--", "o:", "o-.")[i // 10 % 4]
        fixed = sorted((at, tau) for at, tau, auto in line if not auto)
        axes.plot([at for at, _ in fixed], [tau for _, tau in fixed], style, color=color, label=name)
        chosen = [(at, tau) for at, tau, auto in line if auto]
        axes.plot([at for at, _ in chosen], [tau for _, tau in chosen], "*", ms=11, color=color)
    axes.set(xlabel="nodes of the tree (star: auto, at what it chose)", ylabel="tokens per pass", xscale="log")
    axes.set_ylim(1, None)
    sizes = sorted({p["config"]["tree"]["nodes"] for p in points if p["config"]["tree"]["nodes"] != "auto"})
    stars = {round(at) for line in lines.values() for at, _, auto in line if auto}
    axes.set_xticks(sorted({*sizes, *(at for at in stars if all(abs(at - size) > 1 for size in sizes))}))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    _legend(axes)


def _time(axes: Axes, points: list[Figures]) -> None:
    left = [0.0] * len(points)
    for part, title in (("target", "target pass"), ("draft", "draft"), ("other", "everything else")):
        widths = [p["speculative"]["milliseconds_per_pass"] * p["speculative"]["share_of_step"][part] for p in points]
        axes.barh(range(len(points)), widths, left=left, label=title)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlabel="milliseconds per pass")
    _bars(axes, [p["label"] for p in points])
    _legend(axes)


def _speedup(axes: Axes, points: list[Figures]) -> None:
    baselines = [b for b in ("autoregressive", "hf_generate") if all(b in p["speedup"] for p in points)]
    for i, baseline in enumerate(baselines):
        figures = [p["speedup"][baseline] for p in points]
        at = [x + (i - (len(baselines) - 1) / 2) * 0.4 for x in range(len(points))]
        errors = [[f["ratio"] - f["low"] for f in figures], [f["high"] - f["ratio"] for f in figures]]
        axes.barh(at, [f["ratio"] for f in figures], height=0.38, xerr=errors, capsize=2, label=f"over {baseline}")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="speedup (95% interval over prompts)")
    _bars(axes, [p["label"] for p in points])
    _legend(axes)
