"""Figures of a comparison: by temperature, arm and size, over all prompts and by group of text."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.evaluation.compare import Run
from selfspec.evaluation.metrics import bootstrap
from selfspec.log import Figures


def ratio_to_plain(runs: list[Run]) -> dict[str, float]:
    """Speedup over plain decoding, and its 95% interval over prompts."""
    figures = torch.tensor([[r.plain, r.plain_tokens, r.seconds, r.tokens] for r in runs], dtype=torch.float64)
    ratio, low, high = bootstrap(figures, lambda s: (s[:, 0] / s[:, 1]) / (s[:, 2] / s[:, 3]))
    return {"ratio": ratio, "low": low, "high": high}


def against(ours: list[Run], theirs: list[Run]) -> dict[str, float] | None:
    """How much faster one arm is than another on the prompts both have, each measured by the plain decoding beside
    it; None where there are none."""
    pairs = [
        (a, b) for a in ours for b in theirs if (a.temperature, a.group, a.prompt) == (b.temperature, b.group, b.prompt)
    ]
    columns = [
        (a.plain, a.plain_tokens, a.seconds, a.tokens, b.plain, b.plain_tokens, b.seconds, b.tokens) for a, b in pairs
    ]

    if not columns:
        return None

    def ratio(s: Tensor) -> Tensor:
        one, other = ((s[:, i] / s[:, i + 1]) / (s[:, i + 2] / s[:, i + 3]) for i in (0, 4))
        return one / other

    value, low, high = bootstrap(torch.tensor(columns, dtype=torch.float64), ratio)
    return {"ratio": value, "low": low, "high": high}


def summarize_comparison(runs: list[Run], costs: dict[float, list[float]]) -> list[Figures]:
    """One row per temperature, arm and size: over all prompts and by group. costs: of passes, by temperature."""
    rows = []
    by_arm: dict[tuple[float, str, str], list[Run]] = {}
    for run in runs:
        by_arm.setdefault((run.temperature, run.arm, run.nodes), []).append(run)
    names = sorted(dict.fromkeys(run.arm for run in runs), key=lambda name: (not name.startswith("hf_"), "+" in name))
    order = {name: i for i, name in enumerate(names)}
    for (temperature, arm, nodes), own in sorted(
        by_arm.items(), key=lambda item: (item[0][0], order[item[0][1]], len(item[0][2]), item[0][2])
    ):
        passes, tokens = sum(r.passes for r in own), sum(r.tokens for r in own)
        row: Figures = {"T": temperature, "arm": arm, "nodes": nodes, "prompts": len(own)}
        row |= {"tau": tokens / max(1, passes), "tokens_per_second": tokens / sum(r.seconds for r in own)}
        row |= {"speedup": ratio_to_plain(own), "groups": {}}
        for group in dict.fromkeys(r.group for r in own):
            part = [r for r in own if r.group == group]
            tau = sum(r.tokens for r in part) / max(1, sum(r.passes for r in part))
            row["groups"][group] = {"tau": tau, "speedup": ratio_to_plain(part)}
        if own[0].decode is not None:
            row |= _ours_alone(own, nodes, costs.get(temperature), row["tau"])
        rows.append(row)
    return rows


def _ours_alone(own: list[Run], nodes: str, costs: list[float] | None, tau: float) -> Figures:
    def total(name: str) -> float:
        return float(sum(getattr(r, name) or 0.0 for r in own))

    passes, step = total("passes"), total("plain_decode") / total("plain_tokens")
    parts = {name: 1000 * total(name) / passes for name in ("draft", "target", "other")}
    decode = (total("plain_decode") / total("plain_tokens")) / (total("decode") / total("tokens"))
    row: Figures = {"milliseconds_per_pass": parts, "draft_steps": parts["draft"] / 1000 / step, "decode": decode}
    row["same"] = sum(bool(r.same) for r in own)
    if costs is not None and all(r.nodes_run is not None for r in own):
        mean = total("nodes_run") / passes
        row["mean_nodes"], below = mean, min(int(mean), len(costs) - 2)
        cost = costs[below] + (mean - below) * (costs[below + 1] - costs[below])
        row["limit"] = tau / (cost / costs[0] + row["draft_steps"])
    forecasts = [r.forecast for r in own if r.forecast is not None]
    if forecasts:
        tokens, steps, count, n = (sum(f[key] for f in forecasts) for key in ("tokens", "steps", "passes", "nodes"))
        row |= {"predicted": tokens / steps, "mean_nodes": n / count}
    return row


def best_sizes(rows: list[Figures]) -> list[Figures]:
    """Of every temperature and arm the row of the size with the highest speedup."""
    best: dict[tuple[float, str], Figures] = {}
    for row in rows:
        found = best.setdefault((row["T"], row["arm"]), row)
        if row["speedup"]["ratio"] > found["speedup"]["ratio"]:
            best[row["T"], row["arm"]] = row
    return list(best.values())
