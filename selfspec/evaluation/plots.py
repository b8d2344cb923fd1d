"""Plots of benchmark points: acceptance by depth, where the time goes, speedup."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

from selfspec.evaluation.points import labelled, varying
from selfspec.utils.files import Figures, disk_room

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


def _saved(path: Path, draw: Callable[..., None], *data: object, height: float = 3.6, width: float = 6.4) -> Path:
    """height and width in inches, the legend included."""
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    draw(axes, *data)
    axes.spines[["top", "right"]].set_visible(False)
    with disk_room(path):
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
