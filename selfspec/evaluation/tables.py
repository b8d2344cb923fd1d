"""Markdown tables of benchmark points and audits, and what other tables share."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence

from selfspec.evaluation.audit import Audit
from selfspec.evaluation.distribution import DistributionTest, distribution_verdict
from selfspec.evaluation.records import Record
from selfspec.utils.files import Figures, mean, shown


def markdown(columns: Sequence[str], rows: list[list[str]]) -> str:
    """The one Markdown table, columns aligned so that it reads in a terminal too; means over nothing are n/a."""
    rows = [[" ".join(str(cell).replace("|", "\\|").split()) for cell in row] for row in rows]
    rows = [[re.sub(r"\bnan(x\b| %|\b)", "n/a", cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    head = "| " + " | ".join(c.ljust(w) for c, w in zip(columns, widths, strict=True)) + " |"
    return "\n".join([head, "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines])


def interval(ratio: dict[str, float]) -> str:
    return f"{ratio['ratio']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]"


# -- benchmark points


def table(points: list[Figures], brief: bool = False) -> str:
    """One row a point, one column an entry of COLUMNS (brief: of BRIEF, and right answers where they are known); behind
    them what the points hold of `decode.columns`."""
    added = list(dict.fromkeys(name for point in points for name in point.get("columns", {})))
    shown = {*BRIEF, *([RIGHT] if any(_right(point) != "-" for point in points) else [])}
    columns = [column for column in COLUMNS if not brief or column[0] in shown]
    rows = [
        [cell(point) for _, cell in columns] + [point.get("columns", {}).get(name, "-") for name in added]
        for point in points
    ]
    return markdown([*(name for name, _ in columns), *added], rows)


_DEPTHS = 8  # that a table shows

Column = Callable[[Figures, list[Record]], object]


def own_columns(paths: list[str]) -> dict[str, Column]:
    """Functions of other packages, `package.module.function`, by their names. Raises ValueError for what is none."""
    columns = {}
    for path in paths:
        if path == "all":
            continue
        module, _, name = path.rpartition(".")
        try:
            column = getattr(importlib.import_module(module), name, None) if module else None
        except Exception as error:  # whatever a module of another package does
            raise ValueError(f"decode.columns: {path}: {module} can not be imported ({error!r})") from error
        if not callable(column):
            raise ValueError(f"decode.columns: {path!r} is no function; give package.module.function")
        columns[name] = column
    return columns


def group_table(points: list[Figures]) -> str:
    """The same points by group of text."""
    lines = []
    for point in points:
        for group, figures in point.get("groups", {}).items():
            plain = figures["arms"].get("autoregressive", {})
            cells = [f"{plain[name]:.2f}" if name in plain else "-" for name in ("entropy", "top1", "distinct_4grams")]
            speculative = figures["arms"].get("speculative", plain)
            right = f"{speculative['right']}/{speculative['of']}" if speculative.get("of") else "-"
            tau = f"{figures['acceptance_length']:.2f}" if "acceptance_length" in figures else "-"
            ratio = interval(figures["speedup"]) if "speedup" in figures else "-"
            lines.append([_label(point), group, tau, ratio, *cells, right])
    return markdown(
        ["point", "group", "tau", "vs autoregressive", "entropy", "top-1", "distinct 4-grams", "right"], lines
    )


def _label(point: Figures) -> str:
    if (lossy := point.get("lossy")) is None:
        return str(point["label"])
    rule, exact = point["config"]["decode"]["lossy"], lossy.get("log_prob_autoregressive")
    beside = "" if exact is None else f" (exact {exact:.2f})"
    altered = f"{100 * lossy['altered']:.1f}% of tokens altered"
    return f"{point['label']}, LOSSY {rule}: {altered}, log p per token {lossy['log_prob_speculative']:.2f}{beside}"


def _speculative(point: Figures, cell: Callable[[Figures], str]) -> str:
    """A cell of the speculative arm; a dash where there is none, or the figure was not measured."""
    try:
        return cell(point["speculative"])
    except KeyError:
        return "-"


def _rate(point: Figures, arm: str) -> str:
    figures = point["arms"].get(arm)
    return f"{figures['tokens_per_second']:.0f}" if figures else "-"


def _ratio(point: Figures, arm: str) -> str:
    ratio = point["speedup"].get(arm)
    return interval(ratio) if ratio else "-"


def _same(point: Figures) -> str:
    counts = point["identical"].get("autoregressive")
    return f"{counts['rows']}/{counts['of']}" if counts else "-"


def _text(point: Figures, name: str) -> str:
    plain = point["arms"].get("autoregressive") or point["arms"].get("speculative") or {}
    return f"{plain[name]:.2f}" if name in plain else "-"


def _right(point: Figures) -> str:
    plain, speculative = (point["arms"].get(arm) for arm in ("autoregressive", "speculative"))
    plain, speculative = plain or speculative or {}, speculative or plain or {}
    return (
        f"{plain['right']}/{plain['of']} / {speculative['right']}/{speculative['of']}" if speculative.get("of") else "-"
    )


RIGHT = "right plain / spec"
# A column is one entry, (name, function of a point). Pass cost: plain steps that one pass takes, its draft included;
# drift: seconds per token of plain decoding in the second half over the first.
COLUMNS: list[tuple[str, Callable[[Figures], str]]] = [
    ("point", _label),
    ("tau", lambda p: _speculative(p, lambda s: f"{s['acceptance_length']:.2f}")),
    (
        "full acceptance by depth",
        lambda p: _speculative(p, lambda s: " ".join(f"{a:.2f}" for a in s["full_acceptance"][:_DEPTHS])),
    ),
    ("tok/s plain", lambda p: _rate(p, "autoregressive")),
    ("tok/s spec", lambda p: _rate(p, "speculative")),
    ("vs autoregressive", lambda p: _ratio(p, "autoregressive")),
    ("vs hf_generate", lambda p: _ratio(p, "hf_generate")),
    (
        "predicted / measured",
        lambda p: _speculative(p, lambda s: f"{s['forecast']['speedup']:.2f} / {s['decode']:.2f}"),
    ),
    ("pass cost", lambda p: _speculative(p, lambda s: f"{s['cost']:.2f}")),
    (
        "draft/target/other",
        lambda p: _speculative(
            p,
            lambda s: "/".join(f"{100 * s['share_of_step'][part]:.0f}" for part in ("draft", "target", "other")) + " %",
        ),
    ),
    ("host overhead", lambda p: _speculative(p, lambda s: f"{100 * s['host_overhead']:.1f} %")),
    ("identical", _same),
    ("entropy", lambda p: _text(p, "entropy")),
    ("top-1", lambda p: _text(p, "top1")),
    ("distinct 4-grams", lambda p: _text(p, "distinct_4grams")),
    (RIGHT, _right),
    ("drift", lambda p: f"{p['drift']:.2f}" if "drift" in p else "-"),
]


BRIEF = ("point", "tau", "tok/s plain", "tok/s spec", "vs autoregressive", "identical")  # what a terminal shows


# -- two runs


def agreement_table(pairs: list[Figures]) -> str:
    """Speedups of two runs side by side, and whether their intervals overlap."""
    lines = [[p["name"], interval(p["one"]), interval(p["other"]), "same" if p["same"] else "DIFFERS"] for p in pairs]
    same = sum(p["same"] for p in pairs)
    total = f"{same} of {len(pairs)} speedups have overlapping intervals ({shown(100 * mean(same, len(pairs)), 0)}%)."
    return f"{markdown(['speedup', 'one run', 'the other', 'verdict'], lines)}\n\n{total}"


# -- trainings


def training_table(runs: dict[str, Figures]) -> str:
    """Runs of a sweep by name, with what their last validations promise: τ at 16 nodes, top-1 of the first depth."""
    rows = []
    for name, figures in runs.items():
        cells = [f"{figures[mode]['tau']['16']:.2f}" for mode in ("greedy", "sampled")]
        cells += [f"{figures[mode]['top1'][0]:.3f}" if figures[mode]["top1"] else "-" for mode in ("greedy", "sampled")]
        loss, seconds = figures.get("loss"), figures.get("seconds")
        cells += ["-" if loss is None else f"{loss:.3f}", str(figures.get("kept_step", "-"))]
        rows.append([name, *cells, "-" if seconds is None else f"{seconds:.0f}"])
    return markdown(["run", "τ T=0", "τ T=1", "top-1 T=0", "top-1 T=1", "loss", "kept step", "seconds"], rows)


# -- audits


def audit_report(audit: Audit, tests: list[DistributionTest]) -> str:
    """The audit as Markdown: verdict, figures, every divergence, and the distribution test."""
    parts = [
        f"**{audit.verdict}** ({audit.dtype}): {audit.rows} texts, {audit.tokens} tokens up to each one's end or first "
        f"divergence, {len(audit.divergences)} divergences.\n"
        f"Noise between one-token and many-token passes of stock transformers: median {audit.noise_median:.2g}, "
        f"largest {audit.noise:.2g} logits; between them and plain decoding at most {audit.deviation_plain:.2g}, "
        f"between plain and speculative decoding at most {audit.deviation:.2g}. Any of these, or a margin below, would "
        f"be a bug beyond {audit.bound:.2g}."
    ]
    if audit.divergences:
        columns = ["prompt", "T", "seed", "nodes", "batch", "position", "plain", "speculative", "margin", "explained"]
        rows = []
        for d in sorted(audit.divergences, key=lambda d: -d.margin):
            where = [d.prompt, f"{d.temperature:g}", d.seed, d.nodes, d.batch_size, d.position]
            explained = "yes" if d.margin <= audit.bound else "**BUG**"
            rows.append([*map(str, where), str(d.plain_token), str(d.speculative_token), f"{d.margin:.3g}", explained])
        parts.append(markdown(columns, rows))
    if tests:
        parts.append(f"Distribution of the first three tokens: **{distribution_verdict(tests)}**")
        rows = [[t.name, str(t.samples), str(t.bins), f"{t.statistic:.1f}", f"{t.p:.2g}"] for t in tests]
        parts.append(markdown(["test", "texts", "bins", "chi-square", "p"], rows))
    return "\n\n".join(parts)
