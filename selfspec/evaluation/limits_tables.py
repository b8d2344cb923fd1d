"""Markdown tables of what limits a pass."""

from __future__ import annotations

from selfspec.evaluation.tables import markdown
from selfspec.utils.files import Figures


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
    for part in (_compiled_lines(figures), _kernels_table(figures), _starts_table(figures.get("starts", {}))):
        text += f"\n\n{part}" if part else ""
    if not figures["forecasts"]:
        return text
    best: dict[tuple[str, str, float], Figures] = {}
    for forecast in figures["forecasts"]:
        key = (forecast["drafter"], forecast["engine"], forecast["T"])
        if key not in best or forecast["speedup"] > best[key]["speedup"]:
            best[key] = forecast
    lines = [
        [f["drafter"], f["engine"], f"{f['T']:g}", str(f["nodes"]), f"{f['tau']:.2f}"]
        + [f"{1000 * f[part]:.2f}" for part in ("draft", "pass", "step", "other")]
        + [f"{f['other'] / f['step']:.0%}", f"{f['speedup']:.2f}x"]
        for f in best.values()
    ]
    columns = ["drafter", "engine", "T", "best size", "τ expected", "draft, ms", "pass, ms"]
    columns += ["step, ms", "host overhead, ms", "of the step", "expected"]
    origin = "a forecast: acceptance is another target's" if figures["forecast"] else "from calibrated acceptance"
    return f"{text}\n\nExpected over plain decoding of the same engine ({origin}):\n\n" + markdown(columns, lines)


def _compiled_lines(figures: Figures) -> str:
    """What was compiled for passes and drafts, and what could not be."""
    functions = [each for each in figures["compiled"] if each["how"] == "compiled"]
    read = sum(each["how"] == "read" for each in figures["compiled"])
    text = f"{read} functions read from disk, {len(functions)} compiled"
    if functions:
        seconds = sorted(each["seconds"] for each in functions)
        text += f" in {sum(seconds):.0f} s ({seconds[0]:.1f} to {seconds[-1]:.1f} s each)"
    failed = "; ".join(f"{what}: {why}" for what, why in figures["failed"].items())
    return f"{text}." + (f" Not compiled: {failed}." if failed else "")


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


def _starts_table(starts: dict[str, Figures]) -> str:
    columns = ["a new process", "loads, s", "first 32 tokens, s", "next 32 tokens, s", "compiling, s", "functions"]
    rows = [
        [name, *(f"{s[key]:.2f}" for key in ("load", "first", "again", "compiling"))]
        + [f"{s[key]:.0f}" for key in ("functions", "megabytes")]
        for name, s in starts.items()
    ]
    return markdown([*columns, "peak memory, MB"], rows) if rows else ""
