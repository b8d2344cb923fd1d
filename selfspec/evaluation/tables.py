"""Markdown tables of benchmark points and audits, and what other tables share."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.evaluation.audit import Audit, DistributionTest, distribution_verdict
from selfspec.log import Figures

_COLUMNS = (
    "point",
    "tau",
    "full acceptance by depth",
    "tok/s plain",
    "tok/s spec",
    "vs autoregressive",
    "vs hf_generate",
    "predicted / measured",
    "pass cost",
    "draft/target/other",
    "bookkeeping",
    "identical",
    "entropy",
    "top-1",
    "distinct 4-grams",
    "right plain / spec",
    "drift",
)


def markdown(columns: Sequence[str], rows: list[list[str]]) -> str:
    """The one Markdown table, columns aligned so that it reads in a terminal too."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    head = "| " + " | ".join(c.ljust(w) for c, w in zip(columns, widths, strict=True)) + " |"
    return "\n".join([head, "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines])


def interval(found: dict[str, float]) -> str:
    return f"{found['ratio']:.2f}x [{found['low']:.2f}, {found['high']:.2f}]"


# -- benchmark points


def table(points: list[Figures]) -> str:
    """One row a point. Pass cost: plain steps that one pass takes, its draft included; drift: seconds per token of
    plain decoding in the second half over the first."""
    return markdown(_COLUMNS, [_row(point) for point in points])


def group_table(points: list[Figures]) -> str:
    """The same points by group of text."""
    lines = []
    for point in points:
        for group, found in point.get("groups", {}).items():
            plain = found["arms"].get("autoregressive", {})
            cells = [f"{plain[name]:.2f}" if name in plain else "-" for name in ("entropy", "top1", "distinct_4grams")]
            own = found["arms"].get("speculative", plain)
            right = f"{own['right']}/{own['of']}" if own.get("of") else "-"
            tau = f"{found['acceptance_length']:.2f}" if "acceptance_length" in found else "-"
            ratio = interval(found["speedup"]) if "speedup" in found else "-"
            lines.append([point["label"], group, tau, ratio, *cells, right])
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


def _row(point: Figures) -> list[str]:
    spec, arms = point.get("speculative"), point["arms"]
    drift = f"{point['drift']:.2f}" if "drift" in point else "-"

    def ratio(name: str) -> str:
        found = point["speedup"].get(name)
        return interval(found) if found else "-"

    def rate(name: str) -> str:
        return f"{arms[name]['tokens_per_second']:.0f}" if name in arms else "-"

    if spec is None:
        cells = _text_cells(arms) if "autoregressive" in arms else ["-"] * 4
        return [point["label"], "-", "-", rate("autoregressive"), *["-"] * (len(_COLUMNS) - 9), *cells, drift]
    same = point["identical"].get("autoregressive")
    return [
        _label(point),
        f"{spec['acceptance_length']:.2f}",
        " ".join(f"{a:.2f}" for a in spec["full_acceptance"]),
        rate("autoregressive"),
        rate("speculative"),
        ratio("autoregressive"),
        ratio("hf_generate"),
        f"{spec['forecast']['speedup']:.2f} / {spec['decode']:.2f}" if {"forecast", "decode"} <= spec.keys() else "-",
        f"{spec['cost']:.2f}" if "cost" in spec else "-",
        "/".join(f"{100 * spec['share_of_step'][p]:.0f}" for p in ("draft", "target", "other")) + " %",
        f"{100 * spec['bookkeeping']:.1f} %" if "bookkeeping" in spec else "-",
        f"{same['rows']}/{same['of']}" if same else "-",
        *_text_cells(arms),
        drift,
    ]


def _text_cells(arms: Figures) -> list[str]:
    """What kind of text it is, and how many answers are right."""
    plain = arms.get("autoregressive") or arms["speculative"]
    own = arms.get("speculative") or plain
    cells = [f"{plain[name]:.2f}" if name in plain else "-" for name in ("entropy", "top1", "distinct_4grams")]
    right = f"{plain['right']}/{plain['of']} / {own['right']}/{own['of']}" if own.get("of") else "-"
    return [*cells, right]


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


def rules_table(rows: list[Figures]) -> str:
    """Verification rules: one row a rule and one column a temperature, τ with its 95% interval over prompts."""
    temperatures = sorted({row["T"] for row in rows})
    lines = []
    for rule in dict.fromkeys(row["rule"] for row in rows):
        own = {row["T"]: row for row in rows if row["rule"] == rule}
        cells = [f"{own[t]['tau']:.2f} [{own[t]['low']:.2f}, {own[t]['high']:.2f}]" for t in temperatures]
        lines.append([rule, str(next(iter(own.values()))["nodes"]), *cells])
    return markdown(["rule", "nodes", *(f"τ at T={t:g}" for t in temperatures)], lines)
