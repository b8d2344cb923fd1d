"""Figures of a comparison: by temperature, arm and size, over all prompts and by group of text."""

from __future__ import annotations

import zlib

from torch import Tensor

from selfspec.budget.predict import speedup
from selfspec.data.questions import SETS
from selfspec.evaluation.arm_record import Regime
from selfspec.evaluation.compare import Run
from selfspec.evaluation.metrics import bootstrap, clustered, regime_figures
from selfspec.utils.files import Figures, mean


def ratio_to_plain(runs: list[Run]) -> dict[str, float]:
    """Speedup over plain decoding, and its 95% interval over questions."""
    figures = clustered((f"{r.group} {r.question}", (r.plain, r.plain_tokens, r.seconds, r.tokens)) for r in runs)
    ratio, low, high = bootstrap(figures, lambda s: (s[:, 0] / s[:, 1]) / (s[:, 2] / s[:, 3]))
    return {"ratio": ratio, "low": low, "high": high}


def against(ours: list[Run], theirs: list[Run]) -> dict[str, float] | None:
    """How much faster one arm is than another on the prompts both have, each measured by the plain decoding beside
    it; None where there are none."""
    others = {run.point: run for run in theirs}
    rows = [
        (
            f"{a.group} {a.question}",
            (a.plain, a.plain_tokens, a.seconds, a.tokens, b.plain, b.plain_tokens, b.seconds, b.tokens),
        )
        for a in ours
        if (b := others.get(a.point)) is not None
    ]
    if not rows:
        return None

    def ratio(s: Tensor) -> Tensor:
        one, other = ((s[:, i] / s[:, i + 1]) / (s[:, i + 2] / s[:, i + 3]) for i in (0, 4))
        return one / other

    value, low, high = bootstrap(clustered(rows), ratio)
    return {"ratio": value, "low": low, "high": high}


def summarize_comparison(runs: list[Run], costs: dict[float, list[float]]) -> list[Figures]:
    """One row per temperature, arm and size: over all prompts and by group. costs: of passes, by temperature."""
    by_size: dict[tuple[float, str, str], list[Run]] = {}
    for run in runs:
        by_size.setdefault((run.temperature, run.arm, run.nodes), []).append(run)
    order = _order(runs)
    sizes = sorted(by_size, key=lambda key: (key[0], order[key[1]], len(key[2]), key[2]))
    return [_row(*key, by_size[key], costs.get(key[0])) for key in sizes]


def best_sizes(runs: list[Run]) -> list[Figures]:
    """One row per temperature and arm at its best size. The questions are cut into two halves; each half uses the size
    that was fastest on the other, so no size is chosen on the questions it is reported on."""
    arms: dict[tuple[float, str], list[Run]] = {}
    for run in runs:
        arms.setdefault((run.temperature, run.arm), []).append(run)
    order, rows = _order(runs), []
    for (temperature, arm), arm_runs in sorted(arms.items(), key=lambda item: (item[0][0], order[item[0][1]])):
        sizes, chosen_runs = [], []
        halves = _halves(arm_runs)
        for half in (0, 1):
            others = [run for run in arm_runs if halves[run.question] != half] or arm_runs
            chosen = max(
                dict.fromkeys(r.nodes for r in others), key=lambda n: _speed([r for r in others if r.nodes == n])
            )
            half_runs = [run for run in arm_runs if halves[run.question] == half and run.nodes == chosen]
            chosen_runs += half_runs
            sizes += [chosen] if half_runs else []
        if chosen_runs:
            rows.append(
                _row(temperature, arm, ", ".join(dict.fromkeys(sizes)), chosen_runs, None) | {"runs": chosen_runs}
            )
    return rows


def by_questions(runs: list[Run]) -> dict[str, list[Figures]]:
    """The rows of `best_sizes` by the name of the questions: an evaluation set, or a file's only group. "" where all
    are of one set, or of a file with several groups."""
    sets = {group: name for name, groups in SETS.items() for group in groups}
    names = {group: sets.get(group, "") for group in dict.fromkeys(run.group for run in runs)}
    files = [group for group, name in names.items() if not name]
    names |= {group: group for group in files if len(files) == 1}
    if len(set(names.values())) == 1:
        return {"": best_sizes(runs)}
    return {name: best_sizes([r for r in runs if names[r.group] == name]) for name in dict.fromkeys(names.values())}


def _halves(runs: list[Run]) -> dict[str, int]:
    """By question, in which half it is; of one question alone, the only half."""
    questions = sorted({run.question for run in runs}, key=lambda question: zlib.crc32(question.encode()))
    return {question: i % 2 for i, question in enumerate(questions)}


def _speed(runs: list[Run]) -> float:
    return ratio_to_plain(runs)["ratio"]


def _order(runs: list[Run]) -> dict[str, int]:
    """Plain decoding, transformers' methods, single drafters, hybrids."""
    names = dict.fromkeys(run.arm for run in runs)
    ordered = sorted(names, key=lambda name: (name != "plain", not name.startswith("hf_"), "+" in name))
    return {name: i for i, name in enumerate(ordered)}


def _row(temperature: float, arm: str, nodes: str, arm_runs: list[Run], costs: list[float] | None) -> Figures:
    passes, tokens = sum(r.passes for r in arm_runs), sum(r.tokens for r in arm_runs)
    row: Figures = {"T": temperature, "arm": arm, "nodes": nodes, "prompts": len(arm_runs)}
    row |= {
        "tau": mean(tokens, passes),
        "tau_interval": _tau(arm_runs),
        "tokens_per_second": tokens / sum(r.seconds for r in arm_runs),
    }
    row |= {"speedup": ratio_to_plain(arm_runs), **_right(arm_runs), "groups": {}}
    for group in dict.fromkeys(r.group for r in arm_runs):
        part = [r for r in arm_runs if r.group == group]
        tau = mean(sum(r.tokens for r in part), sum(r.passes for r in part))
        row["groups"][group] = {
            "prompts": len(part),
            "tau": tau,
            "tau_interval": _tau(part),
            "speedup": ratio_to_plain(part),
            **_right(part),
        }
    if arm_runs[0].decode is not None:
        row |= _ours_alone(arm_runs, nodes, costs, row["tau"])
    return row


def _tau(runs: list[Run]) -> list[float]:
    """The 95% interval over questions of the acceptance length."""
    figures = clustered((f"{r.group} {r.question}", (r.tokens, r.passes)) for r in runs)
    return list(bootstrap(figures, lambda s: s[:, 0] / s[:, 1])[1:])


def _right(runs: list[Run]) -> dict[str, int]:
    known = [run.right for run in runs if run.right is not None]
    return {"right": sum(known), "of": len(known)}


def regimes(runs: list[Run]) -> list[Figures]:
    """What the text of plain decoding is like, by temperature and group: entropy in nats and largest probability of a
    token's distribution, distinct 4-grams, right answers."""
    rows = []
    plain = [run for run in runs if run.regime is not None]
    for temperature, group in dict.fromkeys((run.temperature, run.group) for run in plain):
        group_runs = [run for run in plain if (run.temperature, run.group) == (temperature, group)]
        tokens = sum(run.tokens for run in group_runs)
        figures = regime_figures([Regime(**run.regime) for run in group_runs if run.regime is not None], tokens)
        rows.append(
            {
                "T": temperature,
                "group": group,
                "prompts": len(group_runs),
                "tokens": tokens,
                **_right(group_runs),
                **figures,
            }
        )
    return rows


def _ours_alone(arm_runs: list[Run], nodes: str, costs: list[float] | None, tau: float) -> Figures:
    def total(name: str) -> float:
        return float(sum(getattr(r, name) or 0.0 for r in arm_runs))

    passes, step = total("passes"), total("plain_decode") / total("plain_tokens")
    parts = {name: 1000 * total(name) / passes for name in ("draft", "target", "other")}
    decode = (total("plain_decode") / total("plain_tokens")) / (total("decode") / total("tokens"))
    row: Figures = {"milliseconds_per_pass": parts, "draft_steps": parts["draft"] / 1000 / step, "decode": decode}
    row["same"] = sum(bool(r.same) for r in arm_runs)
    if costs is not None and all(r.nodes_run is not None for r in arm_runs):
        mean = total("nodes_run") / passes
        row["mean_nodes"], below = mean, min(int(mean), len(costs) - 2)
        cost = costs[below] + (mean - below) * (costs[below + 1] - costs[below])
        row["limit"] = speedup(tau, 1.0, cost / costs[0], row["draft_steps"])
    forecasts = [r.forecast for r in arm_runs if r.forecast is not None]
    if forecasts:
        tokens, steps, count, n = (sum(f[key] for f in forecasts) for key in ("tokens", "steps", "passes", "nodes"))
        row |= {"predicted": tokens / steps, "mean_nodes": n / count}
    return row
