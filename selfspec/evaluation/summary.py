"""The first table and figure of README, made by one command so that neither can be older than the other."""

from __future__ import annotations

import hashlib
from pathlib import Path

from selfspec.evaluation.compare import Run
from selfspec.evaluation.comparison import against, best_sizes
from selfspec.evaluation.comparison_plots import plot_summary
from selfspec.evaluation.tables import markdown
from selfspec.utils.files import Figures, write_section

FIGURE = "notebooks/figures/summary.png"  # beside the Markdown file


def write_summary(runs: list[Run], target: str, machine: str, path: Path) -> None:
    """Write the table into the section `summary` of a Markdown file, and the figure beside it. Both carry one stamp."""
    rows = [row for row in best_sizes(runs) if row["arm"] != "plain"]
    table = summary_table(rows)
    stamp = hashlib.sha256(table.encode()).hexdigest()[:12]
    plot_summary(rows, f"{target}, {machine}", stamp, path.parent / FIGURE)
    write_section(path, "summary", f"![Speedup over plain decoding, by drafter]({FIGURE})\n\n{table}\n<!-- {stamp} -->")


def summary_table(rows: list[Figures]) -> str:
    """One row an arm, the fastest first: acceptance length, speedup with its interval, and speed over transformers'
    generate where that ran too; identical texts."""
    temperatures = sorted({row["T"] for row in rows})
    arms = {arm: {row["T"]: row for row in rows if row["arm"] == arm} for arm in dict.fromkeys(r["arm"] for r in rows)}
    fastest = sorted(arms.items(), key=lambda item: -item[1][temperatures[0]]["speedup"]["ratio"])
    stock, lines = arms.get("hf_generate"), []
    for arm, at in fastest:
        cells = [arm]
        for t in temperatures:
            speedup = at[t]["speedup"]
            ratio = f"{speedup['ratio']:.2f}x"
            ratio = f"**{ratio}**" if speedup["low"] > 1 else ratio
            cells += [f"{at[t]['tau']:.2f}", f"{ratio} [{speedup['low']:.2f}, {speedup['high']:.2f}]"]
        counts = [(at[t]["same"], at[t]["prompts"]) for t in temperatures if "same" in at[t]]
        cells.append(f"{sum(c[0] for c in counts)} of {sum(c[1] for c in counts)}" if counts else "not compared")
        if stock is not None:
            over = [against(at[t]["runs"], stock[t]["runs"]) for t in temperatures]
            cells.insert(-1, " / ".join("" if ratio is None else f"{ratio['ratio']:.1f}x" for ratio in over))
        lines.append(cells)
    heads = [head for t in temperatures for head in (f"τ, T={t:g}", f"speedup, T={t:g}")]
    over_stock = [] if stock is None else [f"over hf_generate, T={' / '.join(f'{t:g}' for t in temperatures)}"]
    return markdown(["", *heads, *over_stock, "identical texts"], lines)
