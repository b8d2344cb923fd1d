"""Figures of a comparison: by temperature, arm and size, over all prompts and by group of text."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from selfspec.budget.predict import speedup
from selfspec.data.questions import SETS
from selfspec.evaluation.figures import PARTS, decode_speedup, forecast, over_plain, right, tau, texts, total
from selfspec.evaluation.records import Record, ours
from selfspec.utils.files import Figures


def summarize_comparison(records: list[Record], costs: dict[float, list[float]]) -> list[Figures]:
    """One row per temperature, arm and size: over all prompts and by group. costs: of passes, by temperature."""
    by_size: dict[tuple[float, str, str], list[Record]] = {}
    for record in records:
        by_size.setdefault((record.temperature, record.arm, record.nodes), []).append(record)
    order = _order(records)
    sizes = sorted(by_size, key=lambda key: (key[0], order[key[1]], len(key[2]), key[2]))
    return [_row(*key, by_size[key], costs.get(key[0])) for key in sizes]


def best_sizes(records: list[Record]) -> list[Figures]:
    """One row per temperature and arm at its best size. The questions are cut into two halves; each half uses the size
    that was fastest on the other, so no size is chosen on the questions it is reported on."""
    arms: dict[tuple[float, str], list[Record]] = {}
    for record in records:
        arms.setdefault((record.temperature, record.arm), []).append(record)
    order, rows = _order(records), []
    for (temperature, arm), of_arm in sorted(arms.items(), key=lambda item: (item[0][0], order[item[0][1]])):
        sizes, chosen_records = [], []
        halves = _halves(of_arm)
        for half in (0, 1):
            others = [r for r in of_arm if halves[_question(r)] != half] or of_arm
            by_size = {
                nodes: [r for r in others if r.nodes == nodes] for nodes in dict.fromkeys(r.nodes for r in others)
            }
            chosen = max(by_size, key=lambda nodes: over_plain(by_size[nodes])["ratio"])
            in_half = [r for r in of_arm if halves[_question(r)] == half and r.nodes == chosen]
            chosen_records += in_half
            sizes += [chosen] if in_half else []
        if chosen_records:
            nodes = ", ".join(dict.fromkeys(sizes))
            rows.append(_row(temperature, arm, nodes, chosen_records, None) | {"records": chosen_records})
    return rows


def by_questions(records: list[Record]) -> dict[str, list[Figures]]:
    """The rows of `best_sizes` by the name of the questions: an evaluation set, or a file's only group. "" where all
    are of one set, or of a file with several groups."""
    sets = {group: name for name, groups in SETS.items() for group in groups}
    names = {group: sets.get(group, "") for group in dict.fromkeys(r.group for r in records)}
    files = [group for group, name in names.items() if not name]
    names |= {group: group for group in files if len(files) == 1}
    if len(set(names.values())) == 1:
        return {"": best_sizes(records)}
    return {name: best_sizes([r for r in records if names[r.group] == name]) for name in dict.fromkeys(names.values())}


def regimes(records: Iterable[Record]) -> list[Figures]:
    """What the text of plain decoding is like, by temperature and group; see `texts`."""
    groups: dict[tuple[float, str], list[Record]] = {}
    for record in records:
        if record.regime is not None:
            groups.setdefault((record.temperature, record.group), []).append(record)
    return [{"T": t, "group": group, "prompts": len(rows), **texts(rows)} for (t, group), rows in groups.items()]


def _question(record: Record) -> str:
    return record.questions[0][0]


def _halves(records: list[Record]) -> dict[str, int]:
    """By question, in which half it is; of one question alone, the only half."""
    questions = sorted({_question(r) for r in records}, key=lambda question: zlib.crc32(question.encode()))
    return {question: i % 2 for i, question in enumerate(questions)}


def _order(records: Iterable[Record]) -> dict[str, int]:
    """Plain decoding, others' methods, single drafters, hybrids."""
    names = dict.fromkeys(record.arm for record in records)
    ordered = sorted(names, key=lambda name: (name != "plain", ours(name), "+" in name))
    return {name: i for i, name in enumerate(ordered)}


def _row(temperature: float, arm: str, nodes: str, records: list[Record], costs: list[float] | None) -> Figures:
    row: Figures = {"T": temperature, "arm": arm, "nodes": nodes, **_part(records)}
    row["tokens_per_second"] = texts(records)["tokens_per_second"]
    groups = dict.fromkeys(r.group for r in records)
    row["groups"] = {group: _part([r for r in records if r.group == group]) for group in groups}
    if arm == "plain" or not records[0].ours:
        return row
    pooled = total([r.stats for r in records])
    step = sum(r.plain.decode for r in records if r.plain) / sum(r.plain.tokens for r in records if r.plain)
    parts = {name: 1000 * getattr(pooled, f"seconds_{name}") / pooled.calls for name in PARTS}
    row |= {"milliseconds_per_pass": parts, "draft_steps": parts["draft"] / 1000 / step}
    row |= {"decode": decode_speedup(records), "same": sum(sum(r.same or ()) for r in records)}
    if costs is not None and all(r.stats.nodes for r in records):
        row["mean_nodes"] = pooled.nodes / pooled.calls
        below = min(int(row["mean_nodes"]), len(costs) - 2)
        cost = costs[below] + (row["mean_nodes"] - below) * (costs[below + 1] - costs[below])
        row["limit"] = speedup(row["tau"], 1.0, cost / costs[0], row["draft_steps"])
    if expected := forecast(records).get("forecast"):
        row |= {"predicted": expected["speedup"], "mean_nodes": expected["nodes"] / expected["passes"]}
    return row


def _part(records: list[Record]) -> Figures:
    """Of an arm's records, in all or of one group."""
    length, interval = tau(records)
    figures = {"prompts": len(records), "tau": length, "tau_interval": interval}
    return {**figures, "speedup": over_plain(records), **right(records)}
