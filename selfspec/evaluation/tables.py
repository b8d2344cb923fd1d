"""All Markdown tables: of benchmark points, comparisons, trainings, audits and limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

from selfspec.evaluation.audit import Audit, DistributionTest, distribution_verdict
from selfspec.evaluation.figures import PARTS, against, grouped
from selfspec.evaluation.records import ours
from selfspec.utils.files import Figures, interval, markdown, mean, shown

# -- rows of figures: of benchmark points (`selfspec.evaluation.points.rows_of`), and of the arms of a comparison
# (`selfspec.evaluation.compare.summarize_comparison`). What was not measured has no key.

Cell = Callable[[Figures], str]
_DEPTHS = 8  # that a table shows


def _table(rows: Sequence[Figures], columns: Sequence[tuple[str, Cell]]) -> str:
    """A figure that a row lacks is a dash; a column that all rows lack is left out."""

    def cell(of: Cell, row: Figures) -> str:
        try:
            return of(row)
        except KeyError:
            return "-"

    by_column = [(name, [cell(of, row) for row in rows]) for name, of in columns]  # two may have one name
    some = [(name, cells) for name, cells in by_column if set(cells) != {"-"}]
    lines = zip(*(cells for _, cells in some), strict=True)
    return markdown([name for name, _ in some], [list(line) for line in lines])


def _nodes(row: Figures) -> str:
    one = "mean_nodes" in row and "," not in row["nodes"]  # not of the sizes of two halves
    return f"{row['nodes']} ({row['mean_nodes']:.1f})" if one else str(row["nodes"])


def _right(figures: Figures, key: str = "right") -> str:
    return f"{figures[key]}/{figures['of']}" if figures["of"] else "-"


_NAMES: list[tuple[str, Cell]] = [
    ("point", lambda row: str(row["label"])),
    ("T", lambda row: f"{row['T']:g}"),
    ("method", lambda row: f"`{row['arm']}`"),
    ("nodes", _nodes),
]
_REGIME: list[tuple[str, Cell]] = [
    ("entropy, nats", lambda row: f"{row['entropy']:.2f}"),
    ("mean top-1", lambda row: f"{row['top1']:.3f}"),
    ("distinct 4-grams", lambda row: f"{row['distinct_4grams']:.2f}"),
]
# A column is one entry, (name, function of a row). limit: the speedup that the costs of passes allow; pass cost: plain
# steps that one pass takes, its draft included; drift: seconds per token of plain decoding in the second half over
# those in the first.
COLUMNS: list[tuple[str, Cell]] = [
    *_NAMES,
    ("τ", lambda row: f"{row['tau']:.2f}"),
    ("full acceptance by depth", lambda row: " ".join(f"{a:.2f}" for a in row["full_acceptance"][:_DEPTHS])),
    ("tok/s plain", lambda row: f"{row['plain_tokens_per_second']:.0f}"),
    ("tok/s", lambda row: f"{row['tokens_per_second']:.0f}"),
    ("over plain", lambda row: interval(row["speedup"])),
    ("over hf_generate", lambda row: interval(row["over_hf"])),
    ("limit", lambda row: f"{row['limit']:.2f}x"),
    ("predicted / measured", lambda row: f"{row['predicted']:.2f} / {row['decode']:.2f}"),
    ("pass cost", lambda row: f"{row['cost']:.2f}"),
    ("draft / target / other, ms", lambda row: " / ".join(f"{row['milliseconds_per_pass'][p]:.1f}" for p in PARTS)),
    ("host overhead", lambda row: f"{100 * row['host_overhead']:.1f} %"),
    ("identical", lambda row: f"{row['same']}/{row['prompts']}"),
    *_REGIME,
    ("right, plain", lambda row: _right(row, "plain_right")),
    ("right", _right),
    ("drift", lambda row: f"{row['drift']:.2f}"),
]
# In a terminal
BRIEF = ("point", "τ", "tok/s plain", "tok/s", "over plain", "over hf_generate", "identical", "right, plain", "right")


def table(rows: Sequence[Figures], brief: bool = False) -> str:
    """One line a row, one column an entry of COLUMNS (brief: of BRIEF); behind them what points hold of
    `decode.columns`."""
    added = dict.fromkeys(name for row in rows for name in row.get("columns", {}))
    columns = [column for column in COLUMNS if not brief or column[0] in BRIEF]
    return _table(rows, [*columns, *((name, lambda row, name=name: row["columns"][name]) for name in added)])


def groups_table(rows: Sequence[Figures]) -> str:
    """Speedup, τ and right answers by group of text; of a comparison, of every arm at its best size."""

    def of(group: str) -> Cell:
        def cell(row: Figures) -> str:
            part = row["groups"][group]
            figures = [interval(part["speedup"])] if "speedup" in part else []
            figures += [f"τ {part['tau']:.2f}"] if "tau" in part else []
            return ", ".join([*figures, *([f"{_right(part)} right"] if part["of"] else [])]) or "-"

        return cell

    groups = dict.fromkeys(group for row in rows for group in row["groups"])
    whole: tuple[str, Cell] = ("all", lambda row: interval(row["speedup"]))
    return _table(rows, [*_NAMES, whole, *((group, of(group)) for group in groups)])


def regime_table(rows: Sequence[Figures]) -> str:
    """What the text of plain decoding is like, by group and by temperature or point; see `figures.texts`."""
    group: list[tuple[str, Cell]] = [("group", lambda row: row["group"]), ("tokens", lambda row: str(row["tokens"]))]
    return _table(rows, [*_NAMES[:2], *group, *_REGIME, ("right", _right)])


# -- comparisons


def price_table(prices: dict[str, Figures]) -> str:
    """What each method takes beside the target."""
    lines = []
    for name, price in prices.items():
        training = price.get("training")
        took = "not known" if price["parameters"] else "none"
        took = f"{training['seconds'] / 60:.0f} min, {training['tokens'] / 1e6:.1f}M tokens" if training else took
        sizes = (f"{price[key] / 1e6:.1f}" for key in ("disk", "memory"))
        lines.append([f"`{name}`", f"{price['parameters'] / 1e6:.2f}M", *sizes, took])
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


def summary_table(columns: dict[str, dict[str, Figures]]) -> str:
    """One row an arm, the fastest first: speedup with its interval, acceptance length, and speed over transformers'
    generate where that ran too; right answers where they are known, and identical texts. columns: rows by arm, plain
    decoding among them, by what is asked and the temperature."""
    first = next(iter(columns.values()))
    arms = sorted((arm for arm in first if arm != "plain"), key=lambda arm: -first[arm]["speedup"]["ratio"])
    checked = "plain" in first and any(at["plain"]["of"] for at in columns.values())
    lines = []
    for arm in arms:
        rows = [at[arm] for at in columns.values()]
        cells = [arm]
        for row in rows:
            ratio, *behind = interval(row["speedup"]).split(" ", 1)
            ratio = f"**{ratio}**" if row["speedup"]["low"] > 1 else ratio
            cells.append(f"{' '.join([ratio, *behind])}, τ {row['tau']:.2f}")
        if "hf_generate" in first:
            over = [against(at[arm]["records"], at["hf_generate"]["records"]) for at in columns.values()]
            cells.append(" / ".join("" if ratio is None else f"{ratio['ratio']:.1f}x" for ratio in over))
        if checked:
            parts = [f"{at['plain']['right']} / {at[arm]['right']} of {at[arm]['of']}" for at in columns.values()]
            cells.append(", ".join("-" if part.endswith(" 0") else part for part in parts))
        counts = [(row["same"], row["prompts"]) for row in rows if "same" in row]
        cells.append(f"{sum(c[0] for c in counts)} of {sum(c[1] for c in counts)}" if counts else "not compared")
        lines.append(cells)
    heads = ["", *columns, *(["over hf_generate"] if "hf_generate" in first else [])]
    return markdown([*heads, *(["right, plain / drafted"] if checked else []), "identical texts"], lines)


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
        cells = [shown(figures[mode]["tau"]["16"]) for mode in ("greedy", "sampled")]
        cells += [shown(part[0], 3) if (part := figures[mode]["top1"]) else "-" for mode in ("greedy", "sampled")]
        loss, seconds = figures.get("loss"), figures.get("seconds")
        cells += ["-" if loss is None else shown(loss, 3), str(figures.get("kept_step", "-"))]
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
        f"between plain and speculative decoding at most {audit.deviation:.2g}. Tokens of plain decoding score at "
        f"most {audit.missed:.2g} below the best by the stock logits. A number above {audit.bound:.2g}, in these or in "
        "the margins below, would be a bug."
    ]
    if audit.divergences:
        columns = ["prompt", "T", "seed", "nodes", "batch", "position", "plain", "speculative", "margin", "explained"]
        rows = []
        for d in sorted(audit.divergences, key=lambda d: -abs(d.margin)):
            where = [d.prompt, f"{d.temperature:g}", d.seed, d.nodes or "plain", d.batch_size, d.position]
            explained = "yes" if audit.explained(d) else "**BUG**"
            rows.append([*map(str, where), str(d.plain_token), str(d.speculative_token), f"{d.margin:.3g}", explained])
        parts.append(markdown(columns, rows))
    if tests:
        parts.append(f"Distribution of the first three tokens: **{distribution_verdict(tests)}**")
        rows = [[t.name, str(t.samples), str(t.bins), f"{t.statistic:.1f}", f"{t.p:.2g}"] for t in tests]
        parts.append(markdown(["test", "texts", "bins", "chi-square", "p"], rows))
    return "\n\n".join(parts)


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
    for what, why in figures.get("failed", {}).items():
        text += f"\n\nNot compiled, so that compiled times are those of an eager pass: {what} ({why})"
    text += f"\n\n{_kernels_table(figures)}".rstrip()
    if not figures["forecasts"]:
        return text
    alike = grouped(figures["forecasts"], itemgetter("drafter", "engine", "T"))
    best = [max(forecasts, key=itemgetter("speedup")) for forecasts in alike.values()]
    lines = [
        [f["drafter"], f["engine"], f"{f['T']:g}", str(f["nodes"]), f"{f['tau']:.2f}"]
        + [f"{1000 * f[part]:.2f}" for part in ("draft", "pass", "step", "other")]
        + [f"{f['other'] / f['step']:.0%}", f"{f['speedup']:.2f}x"]
        for f in best
    ]
    columns = ["drafter", "engine", "T", "best size", "τ expected", "draft, ms", "pass, ms"]
    columns += ["step, ms", "host overhead, ms", "of the step", "expected"]
    origin = "a forecast: acceptance is another target's" if figures["forecast"] else "from calibrated acceptance"
    if guessed := dict.fromkeys(f["drafter"] for f in best if not f.get("calibrated", True)):
        origin += f", but that of {', '.join(guessed)} is a guess: selfspec calibrate measures it"
    return f"{text}\n\nExpected over plain decoding of the same engine ({origin}):\n\n" + markdown(columns, lines)


def _kernels_table(figures: Figures) -> str:
    """The kernel of each product with weights, and how long each that serves it takes at 1, 8, ... rows."""
    kernels = figures.get("kernels", {"products": {}})
    if not kernels["products"]:
        return ""
    names = sorted({name for product in kernels["products"].values() for name in product["ms"]})
    rows = []
    for shape, product in kernels["products"].items():
        times = [" / ".join(f"{ms:.3f}" for ms in product["ms"].get(name, {}).values()) for name in names]
        marks = ["*" if name in product["varies"] else "" for name in names]
        rows.append([shape, product["kernel"] or "none", *(a + b for a, b in zip(times, marks, strict=True))])
    counts = " / ".join(next(iter(next(iter(kernels["products"].values()))["ms"].values())))
    head = (
        f"Kernels for {kernels['bytes'] / 1e6:.1f} MB of weights laid out beside the model's own, ms at {counts} rows; "
        f"*: a row's bits depend on the rows beside it. Compiled passes are exact {figures['exact']}."
    )
    return f"{head}\n\n{markdown(['outputs x inputs', 'chosen', *names], rows)}"
