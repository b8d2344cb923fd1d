"""Plots of benchmark points: acceptance by depth, where the time goes, speedup."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

from selfspec.log import Figures

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes


def plot_points(points: list[Figures], folder: Path) -> dict[str, Path]:
    """One PNG per plot over all points that have a speculative arm; returns their paths."""
    points = [p for p in points if "speculative" in p]
    if not points:
        return {}
    drawings = {"acceptance_by_depth": _acceptance, "time_split": _time, "speedup": _speedup}
    if len({p["config"]["tree"]["nodes"] for p in points} - {"auto"}) > 1:
        drawings["tau_by_nodes"] = _tau
    return {name: _saved(folder / f"{name}.png", draw, points) for name, draw in drawings.items()}


def plot_margins(margins: list[tuple[float, float]], bound: float, path: Path) -> Path:
    """First divergences by (position, margin in logits), under the bound beyond which one is a bug."""
    return _saved(path, _margins, margins, bound)


def plot_rules(rows: list[Figures], path: Path) -> Path:
    """Acceptance length of verification rules against the temperature, with intervals."""
    return _saved(path, _rules, rows)


def plot_comparison(rows: list[Figures], folder: Path) -> dict[str, Path]:
    """Of a comparison, by temperature: acceptance length and speedup against nodes (with the limit beside it), the time
    of a pass, and the speedup by group of text."""
    drawn = {}
    for temperature in dict.fromkeys(row["T"] for row in rows):
        own = [row for row in rows if row["T"] == temperature]
        drawings = {"tau": _compare_tau, "limit": _compare_limit, "time": _compare_time, "groups": _compare_groups}
        for name, draw in drawings.items():
            key = f"compare_{name}_T{temperature:g}"
            drawn[key] = _saved(folder / f"{key}.png", draw, own)
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
    axes.set(xlabel="step", ylabel="promised acceptance length (tokens per pass)")
    axes.legend(fontsize="small")


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
    for found in figures["forecasts"]:
        if found["engine"] == "compiled":
            lines.setdefault(f"{found['drafter']}, T={found['T']:g}", []).append(found)
    for name, line in lines.items():
        style = "o-" if name.endswith("T=0") else "o--"
        axes.plot([f["nodes"] for f in line], [f["speedup"] for f in line], style, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="nodes of the tree", ylabel="expected over compiled plain decoding", xscale="log", ylim=(0, None))
    axes.set_xticks(sorted({f["nodes"] for f in figures["forecasts"]}))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))


def _lines(rows: list[Figures]) -> dict[str, list[Figures]]:
    """Rows of a fixed size by arm."""
    lines: dict[str, list[Figures]] = {}
    for row in rows:
        if row["nodes"].isdigit():
            lines.setdefault(row["arm"], []).append(row)
    return {arm: sorted(line, key=lambda row: int(row["nodes"])) for arm, line in lines.items()}


def _nodes_axis(axes: Axes, rows: list[Figures]) -> None:
    axes.set(xlabel="nodes of the tree", xscale="log", title=f"T={rows[0]['T']:g}")
    axes.set_xticks(sorted({int(row["nodes"]) for row in rows if row["nodes"].isdigit()}))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))


def _compare_tau(axes: Axes, rows: list[Figures]) -> None:
    for arm, line in _lines(rows).items():
        axes.plot([int(row["nodes"]) for row in line], [row["tau"] for row in line], "o-", label=arm)
    axes.set(ylabel="tokens per pass", ylim=(1, None))
    _nodes_axis(axes, rows)


def _compare_limit(axes: Axes, rows: list[Figures]) -> None:
    for i, (arm, line) in enumerate(_lines(rows).items()):
        at = [int(row["nodes"]) for row in line]
        axes.plot(at, [row["speedup"]["ratio"] for row in line], "o-", color=f"C{i}", label=arm)
        axes.plot(at, [row.get("limit", float("nan")) for row in line], ":", color=f"C{i}", alpha=0.7)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(ylabel="speedup (dotted: τ / (c(n) + draft))", ylim=(0, None))
    _nodes_axis(axes, rows)


def _compare_time(axes: Axes, rows: list[Figures]) -> None:
    rows = [row for row in rows if "milliseconds_per_pass" in row]
    labels = [f"{row['arm']} {row['nodes']}" for row in rows]
    left = [0.0] * len(rows)
    for part, title in (("target", "target pass"), ("draft", "draft"), ("other", "everything else")):
        widths = [row["milliseconds_per_pass"][part] for row in rows]
        axes.barh(labels, widths, left=left, label=title)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=4)
    axes.set(xlabel="milliseconds per pass")
    axes.legend(fontsize=7)


def _compare_groups(axes: Axes, rows: list[Figures]) -> None:
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    best = {arm: max((r for r in rows if r["arm"] == arm), key=lambda r: r["speedup"]["ratio"]) for arm in arms}
    groups = list(rows[0]["groups"])
    for i, group in enumerate(groups):
        found = [best[arm]["groups"].get(group, {}).get("speedup", {}) for arm in arms]
        at = [x + (i - (len(groups) - 1) / 2) * 0.8 / len(groups) for x in range(len(arms))]
        height = [f.get("ratio", 0.0) for f in found]
        errors = [
            [max(0.0, f.get(side, 0.0) * sign - h * sign) for f, h in zip(found, height, strict=True)]
            for side, sign in (("low", -1), ("high", 1))
        ]
        axes.bar(at, height, width=0.8 / len(groups), yerr=errors, capsize=1, error_kw={"linewidth": 0.6}, label=group)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(
        range(len(arms)), [f"{arm} ({best[arm]['nodes']})" for arm in arms], fontsize=5, rotation=30, ha="right"
    )
    axes.set(ylabel="speedup over plain decoding", title=f"T={rows[0]['T']:g}, best size of each")
    axes.legend(fontsize=7)


def _rules(axes: Axes, rows: list[Figures]) -> None:
    for i, rule in enumerate(dict.fromkeys(row["rule"] for row in rows)):
        own = [row for row in rows if row["rule"] == rule]
        errors = [[r["tau"] - r["low"] for r in own], [r["high"] - r["tau"] for r in own]]
        at = [r["T"] + 0.006 * i for r in own]
        style = "o:" if "chain" in rule else "o-"
        axes.errorbar(at, [r["tau"] for r in own], yerr=errors, fmt=style, capsize=2, label=f"{rule}")
    axes.set(xlabel="temperature", ylabel="tokens per pass")
    axes.legend(fontsize=6)


def _saved(path: Path, draw: Callable[..., None], *data: object) -> Path:
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    draw(axes, *data)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _margins(axes: Axes, margins: list[tuple[float, float]], bound: float) -> None:
    axes.plot([p for p, _ in margins], [m for _, m in margins], "o", alpha=0.6, label="first divergence of a text")
    axes.axhline(bound, color="C3", label="beyond this line: a bug")
    axes.set(xlabel="new tokens before it", ylabel="margin of the target's pick (logits)", ylim=(0, None))
    axes.legend(fontsize=8)


def _acceptance(axes: Axes, points: list[Figures]) -> None:
    for i, point in enumerate(points):
        full = point["speculative"]["full_acceptance"]
        conditional = point["speculative"]["conditional_acceptance"]
        depths = range(1, len(full) + 1)
        axes.plot(depths, full, "o-", color=f"C{i}", label=point["label"])
        axes.plot(depths, conditional, "x:", color=f"C{i}", alpha=0.6)
    axes.set(
        xlabel="depth", ylabel="accepted", ylim=(0, 1), title="solid: all up to here; dotted: given the parent was"
    )
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    axes.legend(fontsize=8 if len(points) < 7 else 4)


def _tau(axes: Axes, points: list[Figures]) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    points = [p for p in points if p["config"]["tree"]["nodes"] != "auto"]
    for point in points:
        config = point["config"]
        name = f"{config['drafter']}, T={config['decode']['temperature']:g}"
        lines.setdefault(name, []).append((config["tree"]["nodes"], point["speculative"]["acceptance_length"]))
    for name, line in lines.items():
        nodes, tau = zip(*sorted(line), strict=True)
        axes.plot(nodes, tau, "o-" if name.endswith("T=0") else "o--", label=name)
    axes.set(xlabel="nodes of the tree", ylabel="tokens per pass", xscale="log", ylim=(1, None))
    axes.set_xticks(sorted({p["config"]["tree"]["nodes"] for p in points}))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))


def _time(axes: Axes, points: list[Figures]) -> None:
    labels = [p["label"] for p in points]
    left = [0.0] * len(points)
    for part, title in (("target", "target pass"), ("draft", "draft"), ("other", "everything else")):
        widths = [p["speculative"]["milliseconds_per_pass"] * p["speculative"]["share_of_step"][part] for p in points]
        axes.barh(labels, widths, left=left, label=title)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlabel="milliseconds per pass")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def _speedup(axes: Axes, points: list[Figures]) -> None:
    baselines = [b for b in ("autoregressive", "hf_generate") if all(b in p["speedup"] for p in points)]
    for i, baseline in enumerate(baselines):
        figures = [p["speedup"][baseline] for p in points]
        at = [x + (i - (len(baselines) - 1) / 2) * 0.35 for x in range(len(points))]
        errors = [[f["ratio"] - f["low"] for f in figures], [f["high"] - f["ratio"] for f in figures]]
        axes.bar(at, [f["ratio"] for f in figures], width=0.33, yerr=errors, capsize=3, label=f"over {baseline}")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(points)), [p["label"] for p in points], fontsize=8, rotation=20, ha="right")
    axes.set(ylabel="speedup (95% interval over prompts)")
    axes.legend(fontsize=8)
