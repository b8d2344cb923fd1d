"""A comparison: its figures by temperature, arm and size, over all prompts and by group of text, its tables, and the
first table and figure of README, made by one command so that neither can be older than the other."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from pathlib import Path

from selfspec.budget.predict import speedup
from selfspec.data.questions import SETS
from selfspec.evaluation.figures import PARTS, against, decode_speedup, forecast, over_plain, right, tau, texts, total
from selfspec.evaluation.plots import plot_summary
from selfspec.evaluation.records import Record, ours
from selfspec.evaluation.tables import interval, markdown
from selfspec.utils.files import Figures, write_section

FIGURE = "notebooks/figures/summary.png"  # beside the Markdown file


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


# -- tables


def main_table(rows: list[Figures]) -> str:
    columns = [
        "T",
        "method",
        "nodes",
        "τ",
        "tok/s",
        "over plain",
        "limit",
        "predicted / measured",
        "draft / target / other, ms",
        "identical",
    ]
    lines = []
    for row in rows:
        nodes, forecast, parts, same = row["nodes"], "", "", ""
        if "mean_nodes" in row:
            nodes = f"{nodes} ({row['mean_nodes']:.1f})"
        if "same" in row:
            same = f"{row['same']}/{row['prompts']}"
        if "predicted" in row:
            forecast = f"{row['predicted']:.2f} / {row['decode']:.2f}"
        if "milliseconds_per_pass" in row:
            parts = " / ".join(f"{ms:.1f}" for ms in row["milliseconds_per_pass"].values())
        limit = f"{row['limit']:.2f}x" if "limit" in row else ""
        lines.append(
            [
                f"{row['T']:g}",
                f"`{row['arm']}`",
                nodes,
                f"{row['tau']:.2f}",
                f"{row['tokens_per_second']:.0f}",
                interval(row["speedup"]),
                limit,
                forecast,
                parts,
                same,
            ]
        )
    return markdown(columns, lines)


def groups_table(best: list[Figures]) -> str:
    """Speedup, τ and right answers by group of text, of every arm at its best size."""
    groups = list(dict.fromkeys(group for row in best for group in row["groups"]))
    lines = []
    for row in best:
        cells = []
        for group in groups:
            group_row = row["groups"].get(group)
            right = f", {group_row['right']}/{group_row['of']} right" if group_row and group_row["of"] else ""
            cells.append(f"{interval(group_row['speedup'])}, τ {group_row['tau']:.2f}{right}" if group_row else "")
        lines.append([f"{row['T']:g}", f"`{row['arm']}`", row["nodes"], interval(row["speedup"]), *cells])
    return markdown(["T", "method", "nodes", "all", *groups], lines)


def regime_table(rows: list[Figures]) -> str:
    """What the text is like, by temperature and group; see `regimes`."""
    columns = ["T", "group", "tokens", "entropy, nats", "mean top-1", "distinct 4-grams", "right"]
    lines = [
        [
            f"{row['T']:g}",
            row["group"],
            str(row["tokens"]),
            f"{row['entropy']:.2f}",
            f"{row['top1']:.3f}",
            f"{row['distinct_4grams']:.2f}",
            f"{row['right']}/{row['of']}" if row["of"] else "",
        ]
        for row in rows
    ]
    return markdown(columns, lines)


def price_table(prices: dict[str, Figures]) -> str:
    """What each method takes beside the target."""
    lines = []
    for name, price in prices.items():
        training = price.get("training")
        took = f"{training['seconds'] / 60:.0f} min, {training['tokens'] / 1e6:.1f}M tokens" if training else "none"
        lines.append(
            [
                f"`{name}`",
                f"{price['parameters'] / 1e6:.2f}M",
                f"{price['disk'] / 1e6:.1f}",
                f"{price['memory'] / 1e6:.1f}",
                took,
            ]
        )
    return markdown(["method", "trained parameters", "MB on disk", "MB of memory", "training"], lines)


def verdict(best: list[Figures]) -> str:
    """Which drafters, at their best sizes, beat each method of others, and which do not."""
    theirs = [row for row in best if not ours(row["arm"])]
    names = list(dict.fromkeys(row["arm"] for row in theirs))
    lines = []
    for row in best:
        if row["arm"] in (*names, "plain"):
            continue
        cells = []
        for name in names:
            beside = [record for other in theirs if other["arm"] == name for record in other["records"]]
            if (ratio := against(row["records"], beside)) is None:
                cells.append("")
                continue
            word = "wins " if ratio["low"] > 1 else "loses " if ratio["high"] < 1 else "level "
            cells.append(f"{word if len(row['records']) > 1 else ''}{interval(ratio)}")  # one prompt decides nothing
        lines.append([f"{row['T']:g}", f"`{row['arm']}`", row["nodes"], *cells])
    return markdown(["T", "drafter", "nodes", *(f"over `{name}`" for name in names)], lines)


def comparison_tables(records: list[Record], rows: list[Figures], prices: dict[str, Figures]) -> str:
    """All tables of a comparison."""
    best = best_sizes(records)
    tables = [main_table(rows), groups_table(best), regime_table(regimes(records)), price_table(prices)]
    if any(not ours(row["arm"]) for row in rows):
        tables.append(verdict(best))
    return "\n\n".join(tables)


def write_summary(records: list[Record], target: str, machine: str, path: Path) -> None:
    """Write the table into the section `summary` of a Markdown file, and the figure beside it. Both carry one stamp."""
    columns = {
        f"{name}, T={t:g}" if name else f"T={t:g}": {row["arm"]: row for row in rows if row["T"] == t}
        for name, rows in by_questions(records).items()
        for t in sorted({row["T"] for row in rows})
    }
    everywhere = set.intersection(*map(set, columns.values()))  # a resumed comparison may have asked others elsewhere
    if not everywhere - {"plain"}:
        print(f"{path} keeps its summary: no arm was run in all of {', '.join(columns)}")
        return
    columns = {name: {arm: at[arm] for arm in at if arm in everywhere} for name, at in columns.items()}
    table = summary_table(columns)
    stamp = hashlib.sha256(table.encode()).hexdigest()[:12]
    plot_summary(columns, f"{target}, {machine}", stamp, path.parent / FIGURE)
    write_section(path, "summary", f"![Speedup over plain decoding, by drafter]({FIGURE})\n\n{table}\n<!-- {stamp} -->")


def summary_table(columns: dict[str, dict[str, Figures]]) -> str:
    """One row an arm, the fastest first: speedup with its interval, acceptance length, and speed over transformers'
    generate where that ran too; right answers where they are known, and identical texts. columns: rows by arm, plain
    decoding among them, by what is asked and the temperature."""
    first = next(iter(columns.values()))
    arms = sorted((arm for arm in first if arm != "plain"), key=lambda arm: -first[arm]["speedup"]["ratio"])
    checked = [at for at in columns.values() if at["plain"]["of"]] if "plain" in first else []
    lines = []
    for arm in arms:
        rows = [at[arm] for at in columns.values()]
        cells = [arm]
        for row in rows:
            ratio = f"{row['speedup']['ratio']:.2f}x"
            ratio = f"**{ratio}**" if row["speedup"]["low"] > 1 else ratio
            cells.append(f"{ratio} [{row['speedup']['low']:.2f}, {row['speedup']['high']:.2f}], τ {row['tau']:.2f}")
        if "hf_generate" in first:
            over = [against(at[arm]["records"], at["hf_generate"]["records"]) for at in columns.values()]
            cells.append(" / ".join("" if ratio is None else f"{ratio['ratio']:.1f}x" for ratio in over))
        if checked:
            cells.append(", ".join(f"{at['plain']['right']} / {at[arm]['right']} of {at[arm]['of']}" for at in checked))
        counts = [(row["same"], row["prompts"]) for row in rows if "same" in row]
        cells.append(f"{sum(c[0] for c in counts)} of {sum(c[1] for c in counts)}" if counts else "not compared")
        lines.append(cells)
    heads = ["", *columns, *(["over hf_generate"] if "hf_generate" in first else [])]
    return markdown([*heads, *(["right, plain / drafted"] if checked else []), "identical texts"], lines)
