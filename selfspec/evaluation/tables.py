"""Markdown tables: of benchmark points, audits and comparisons."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.evaluation.audit import Audit, DistributionTest, distribution_verdict
from selfspec.evaluation.compare import Run
from selfspec.evaluation.comparison import against, best_sizes, regimes
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


def _interval(found: dict[str, float]) -> str:
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
            ratio = _interval(found["speedup"]) if "speedup" in found else "-"
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
        return _interval(found) if found else "-"

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


# -- comparisons


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
                _interval(row["speedup"]),
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
            found = row["groups"].get(group)
            right = f", {found['right']}/{found['of']} right" if found and found["of"] else ""
            cells.append(f"{_interval(found['speedup'])}, τ {found['tau']:.2f}{right}" if found else "")
        lines.append([f"{row['T']:g}", f"`{row['arm']}`", row["nodes"], _interval(row["speedup"]), *cells])
    return markdown(["T", "method", "nodes", "all", *groups], lines)


def regime_table(rows: list[Figures]) -> str:
    """What kind of text it is, by temperature and group; see `regimes`."""
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
    """Which drafters, at their best sizes, beat each of transformers' methods, and which do not."""
    theirs = [row for row in best if row["arm"].startswith("hf_")]
    names = list(dict.fromkeys(row["arm"] for row in theirs))
    lines = []
    for row in best:
        if row["arm"] in (*names, "plain"):
            continue
        cells = []
        for name in names:
            beside = [run for other in theirs if other["arm"] == name for run in other["runs"]]
            if (found := against(row["runs"], beside)) is None:
                cells.append("")
                continue
            word = "wins " if found["low"] > 1 else "loses " if found["high"] < 1 else "level "
            cells.append(f"{word if len(row['runs']) > 1 else ''}{_interval(found)}")  # one prompt decides nothing
        lines.append([f"{row['T']:g}", f"`{row['arm']}`", row["nodes"], *cells])
    return markdown(["T", "drafter", "nodes", *(f"over `{name}`" for name in names)], lines)


def comparison_tables(runs: list[Run], rows: list[Figures], prices: dict[str, Figures]) -> str:
    """All tables of a comparison."""
    best = best_sizes(runs)
    tables = [main_table(rows), groups_table(best), regime_table(regimes(runs)), price_table(prices)]
    if any(row["arm"].startswith("hf_") for row in rows):
        tables.append(verdict(best))
    return "\n\n".join(tables)


# -- two runs


def agreement_table(pairs: list[Figures]) -> str:
    """Speedups of two runs side by side, and whether their intervals overlap."""
    lines = [[p["name"], _interval(p["one"]), _interval(p["other"]), "same" if p["same"] else "DIFFERS"] for p in pairs]
    same = sum(p["same"] for p in pairs)
    total = f"{same} of {len(pairs)} speedups have overlapping intervals ({100 * same / max(1, len(pairs)):.0f}%)."
    return f"{markdown(['speedup', 'one run', 'the other', 'verdict'], lines)}\n\n{total}"


# -- limits


def limits_tables(figures: Figures) -> str:
    """Costs of passes against the physical limit, then what each drafter can bring, its best size of each engine."""
    head = (
        f"{figures['target']}: {figures['bytes'] / 1e6:.1f} MB of weights read at {figures['bandwidth'] / 1e9:.1f} "
        f"GB/s, {figures['products'] / 1e6:.1f} M products and additions a node at {figures['peak'] / 1e9:.0f} G/s."
    )
    rows = []
    first = figures["passes"][0]
    for row in figures["passes"]:
        cells = [str(row["nodes"]), f"{1000 * row['limit']:.2f}"]
        for engine in ("eager", "compiled"):
            seconds = row[engine]
            overhead = max(0.0, 1 - row["limit"] / seconds)
            cells += [f"{1000 * seconds:.2f}", f"{seconds / first[engine]:.2f}", f"{overhead:.0%}"]
        rows.append([*cells, f"{row['eager'] / row['compiled']:.2f}x"])
    columns = ["nodes", "limit, ms"]
    for engine in ("eager", "compiled"):
        columns += [f"{engine}, ms", "c(n) / c(1)", "overhead"]
    text = f"{head}\n\n{markdown([*columns, 'eager / compiled'], rows)}"
    if not figures["forecasts"]:
        return text
    best: dict[tuple[str, str, float], Figures] = {}
    for found in figures["forecasts"]:
        key = (found["drafter"], found["engine"], found["T"])
        if key not in best or found["speedup"] > best[key]["speedup"]:
            best[key] = found
    lines = [
        [f["drafter"], f["engine"], f"{f['T']:g}", str(f["nodes"]), f"{f['tau']:.2f}"]
        + [f"{1000 * f[part]:.2f}" for part in ("draft", "pass", "other")]
        + [f"{f['other'] / (f['draft'] + f['pass'] + f['other']):.0%}", f"{f['speedup']:.2f}x"]
        for f in best.values()
    ]
    columns = ["drafter", "engine", "T", "best size", "τ promised", "draft, ms", "pass, ms", "other, ms", "other"]
    told = "a forecast: acceptance is another target's" if figures["forecast"] else "from calibrated acceptance"
    return f"{text}\n\nExpected over plain decoding of the same engine ({told}):\n\n" + markdown(
        [*columns, "expected"], lines
    )
