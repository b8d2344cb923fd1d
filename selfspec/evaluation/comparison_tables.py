"""Markdown tables of a comparison, of two runs set beside each other, and the first table and figure of README, made by
one command so that neither can be older than the other."""

from __future__ import annotations

import hashlib
from pathlib import Path

from selfspec.evaluation.comparison import best_sizes, by_questions, regimes
from selfspec.evaluation.figures import against
from selfspec.evaluation.plots import plot_summary
from selfspec.evaluation.records import Record, ours
from selfspec.evaluation.tables import interval, markdown
from selfspec.utils.files import Figures, mean, shown, write_section


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


# -- two runs


def agreement_table(pairs: list[Figures]) -> str:
    """Speedups of two runs side by side, and whether their intervals overlap."""
    lines = [[p["name"], interval(p["one"]), interval(p["other"]), "same" if p["same"] else "DIFFERS"] for p in pairs]
    same = sum(p["same"] for p in pairs)
    total = f"{same} of {len(pairs)} speedups have overlapping intervals ({shown(100 * mean(same, len(pairs)), 0)}%)."
    return f"{markdown(['speedup', 'one run', 'the other', 'verdict'], lines)}\n\n{total}"


FIGURE = "notebooks/figures/summary.png"  # beside the Markdown file


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
