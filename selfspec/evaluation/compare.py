"""Everything against everything: drafters, tree sizes and transformers' own methods on the same prompts, in one
process.

Every arm runs between two runs of plain decoding, whose mean is what it is compared with, so that a machine that drifts
does not decide. What is measured is written prompt by prompt; a comparison that was killed goes on with what is
missing.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from selfspec.budget import pass_costs
from selfspec.evaluation.metrics import bootstrap
from selfspec.evaluation.prompts import KINDS
from selfspec.evaluation.runs import DecodeConfig, hf_generate
from selfspec.options import Options, check
from selfspec.spec import Spec

# What transformers itself offers: the name of the arm, and what generate is given.
METHODS = ("hf_generate", "hf_prompt_lookup", "hf_early_exit", "hf_assisted")


@dataclass
class CompareConfig:
    """drafters: what `selfspec.load` takes, several joined by + share one tree; nodes: tree sizes, "auto" included;
    kinds of prompts, and how many of each; methods: of transformers, a subset of METHODS; draft_model: of assisted
    generation, an embedded name, a folder or a hub id; exit_layer: of transformers' early exit; lookup_tokens: drafted
    by its prompt lookup; between: arms between two runs of plain decoding; readme: a Markdown file whose lines between
    <!-- compare --> and <!-- end --> the tables replace."""

    drafters: list[str] = field(default_factory=list)
    nodes: list[Any] = field(default_factory=lambda: [8, 16, 32, "auto"])
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    kinds: list[str] = field(default_factory=lambda: list(KINDS))
    prompts: int = 4
    prompt_tokens: int = 128
    max_new_tokens: int = 128
    seed: int = 0
    methods: list[str] = field(default_factory=lambda: list(METHODS))
    draft_model: str = "tiny-draft"
    exit_layer: int = 3
    lookup_tokens: int = 10
    between: int = 5
    readme: str | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "temperatures", "kinds"):
            if not getattr(self, name):
                raise ValueError(f"compare.{name} is empty; give at least one")
        for name in ("prompts", "prompt_tokens", "max_new_tokens", "exit_layer", "lookup_tokens", "between"):
            if getattr(self, name) < 1:
                raise ValueError(f"compare.{name}={getattr(self, name)} must be at least 1")
        for name, known in (("kinds", KINDS), ("methods", METHODS)):
            if unknown := set(getattr(self, name)) - set(known):
                raise ValueError(f"compare.{name} holds {sorted(unknown)}; known are {', '.join(known)}")
        if bad := [n for n in self.nodes if n != "auto" and (not isinstance(n, int) or n < 1)]:
            raise ValueError(f"compare.nodes holds {bad[0]!r}; give numbers of at least 1, or auto")
        if self.readme is not None:
            parts(Path(self.readme))


@dataclass
class Run:
    """One arm on one prompt. seconds: the whole call, prompt included; plain: the same of plain decoding beside it,
    with as many tokens; decode, plain_decode: without the reading of the prompt (selfspec's arms); passes of the
    target."""

    temperature: float
    kind: str
    prompt: int
    arm: str
    nodes: str
    seconds: float
    tokens: int
    plain: float
    plain_tokens: int
    passes: int
    decode: float | None = None
    plain_decode: float | None = None
    draft: float | None = None
    target: float | None = None
    other: float | None = None
    forecast: dict[str, float] | None = None
    same: bool | None = None
    nodes_run: int | None = None


Call = Callable[[list[int], float], dict[str, Any]]  # of a prompt and a temperature


def arms(specs: dict[str, Spec], draft_model: nn.Module | None, config: CompareConfig) -> dict[tuple[str, str], Call]:
    """By (name, nodes): what gives an arm's tokens, passes and times."""
    any_spec = next(iter(specs.values()))
    found: dict[tuple[str, str], Call] = {}
    given: dict[str, dict[str, Any]] = {
        "hf_generate": {},
        "hf_prompt_lookup": {"prompt_lookup_num_tokens": config.lookup_tokens},
        "hf_early_exit": {"assistant_early_exit": config.exit_layer},
        "hf_assisted": {"assistant_model": draft_model},
    }
    for name in config.methods:
        found[name, "-"] = partial(_theirs, any_spec, config, given[name])
    for name, spec in specs.items():
        for nodes in config.nodes:
            found[name, str(nodes)] = partial(_ours, spec, config, nodes)
    return found


def _ours(spec: Spec, config: CompareConfig, nodes: Any, prompt: list[int], temperature: float) -> dict[str, Any]:
    sizes: list[int] = []
    handle = spec.target.layers[-1].register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[1]))
    try:
        result = spec.generate([prompt], config.max_new_tokens, temperature, seed=config.seed, nodes=nodes)
    finally:
        handle.remove()
    s = result.stats
    return {
        "ids": result.token_ids[0],
        "passes": s.forwards,
        "nodes_run": sum(sizes[-s.forwards :]),  # what came before read the prompt
        "decode": s.seconds - s.seconds_prefill,
        "draft": s.seconds_draft,
        "target": s.seconds_target,
        "other": s.seconds_other,
        "forecast": None if result.forecast is None else result.forecast.as_dict(),
    }


def _theirs(
    spec: Spec, config: CompareConfig, method: dict[str, Any], prompt: list[int], temperature: float
) -> dict[str, Any]:
    """One of transformers' methods; passes are the calls of the target's last layer."""
    passes = [0]

    def count(*_: Any) -> None:
        passes[0] += 1

    options = DecodeConfig(max_new_tokens=config.max_new_tokens, temperature=temperature, seed=config.seed)
    handle = spec.target.layers[-1].register_forward_hook(count)
    try:
        result = hf_generate(spec, [prompt], options, **method)
    finally:
        handle.remove()
    return {"ids": result.token_ids[0], "passes": passes[0]}


def run_comparison(
    specs: dict[str, Spec],
    draft_model: nn.Module | None,
    prompts: dict[str, list[list[int]]],
    config: CompareConfig,
    path: Path,
) -> list[Run]:
    """All arms on all prompts at all temperatures, appended to the JSON lines of `path`; those already there are
    kept."""
    spec = next(iter(specs.values()))
    check(spec.target, [prompt for group in prompts.values() for prompt in group], Options(config.max_new_tokens))
    calls = arms(specs, draft_model, config)
    runs = read_runs(path)
    if path.exists():  # a torn last line is dropped for good
        scratch = path.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(asdict(run)) + "\n" for run in runs))
        os.replace(scratch, path)
    done = {(run.temperature, run.kind, run.prompt, run.arm, run.nodes) for run in runs}
    groups = [
        (temperature, kind, i, prompts[kind][i])
        for i in range(config.prompts)
        for temperature in config.temperatures
        for kind in config.kinds
    ]
    missing = [
        (turn, group, [arm for arm in calls if (*group[:3], *arm) not in done]) for turn, group in enumerate(groups)
    ]
    missing = [entry for entry in missing if entry[2]]
    bar = tqdm(total=sum(len(left) for _, _, left in missing), desc="compare", mininterval=1.0)
    if missing:
        _warm_up(spec, calls, groups, config)
    for turn, (temperature, kind, i, prompt), left in missing:
        at = (turn * config.between) % len(left)  # every prompt begins with other arms
        for run in _between_plain(spec, calls, left[at:] + left[:at], prompt, temperature, config):
            run.kind, run.prompt = kind, i
            runs.append(run)
            with path.open("a") as f:
                f.write(json.dumps(asdict(run)) + "\n")
            bar.update()
            bar.set_postfix(T=temperature, arm=f"{run.arm} {run.nodes}", speedup=f"{_speedup(run):.2f}")
    bar.close()
    return runs


def _warm_up(
    spec: Spec,
    calls: dict[tuple[str, str], Call],
    groups: list[tuple[float, str, int, list[int]]],
    config: CompareConfig,
) -> None:
    """Costs of passes are measured, and what is laid out on first use is, before anything is timed."""
    prompt = groups[0][3]
    for temperature in config.temperatures:
        if "auto" in config.nodes:
            pass_costs(spec.target, 1, temperature > 0)
        for call in calls.values():
            call(prompt[:16], temperature)


def _between_plain(
    spec: Spec,
    calls: dict[tuple[str, str], Call],
    order: list[tuple[str, str]],
    prompt: list[int],
    t: float,
    c: CompareConfig,
) -> Iterator[Run]:
    """Some arms on one prompt, `between` of them at a time between two runs of plain decoding."""

    def plain() -> dict[str, Any]:
        start = time.perf_counter()
        result = spec.autoregressive([prompt], c.max_new_tokens, t, seed=c.seed)
        took = time.perf_counter() - start
        s = result.stats
        return {"seconds": took, "ids": result.token_ids[0], "decode": s.seconds - s.seconds_prefill}

    before = plain()
    for first in range(0, len(order), c.between):
        part = []
        for name in order[first : first + c.between]:
            start = time.perf_counter()
            found = calls[name](prompt, t)
            part.append((name, time.perf_counter() - start, found))
        after = plain()
        for (arm, nodes), seconds, found in part:
            ids, expected = found.pop("ids"), before["ids"]
            beside = {key: statistics.mean((before[key], after[key])) for key in ("seconds", "decode")}
            own = {"plain_decode": beside["decode"], "same": ids == expected} if "decode" in found else {}
            yield Run(
                t,
                "",
                0,
                arm,
                nodes,
                seconds,
                len(ids),
                beside["seconds"],
                len(expected),
                **found,
                **own,  # type: ignore[arg-type]
            )
        before = after


def read_runs(path: Path) -> list[Run]:
    """What was measured before. Raises ValueError naming a line that is no run, unless it is a torn last one."""
    if not path.exists():
        return []
    runs, lines = [], path.read_text().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            runs.append(Run(**json.loads(line)))
        except (ValueError, TypeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise ValueError(
                f"{path}, line {number} is no run ({error}); delete it, or choose another name="
            ) from error
    return runs


# -- figures


def _speedup(run: Run) -> float:
    return (run.plain / run.plain_tokens) / (run.seconds / run.tokens)


def _ratio(runs: list[Run]) -> dict[str, float]:
    """Speedup over plain decoding, and its 95% interval over prompts."""
    figures = torch.tensor([[r.plain, r.plain_tokens, r.seconds, r.tokens] for r in runs], dtype=torch.float64)
    ratio, low, high = bootstrap(figures, lambda s: (s[:, 0] / s[:, 1]) / (s[:, 2] / s[:, 3]))
    return {"ratio": ratio, "low": low, "high": high}


def against(ours: list[Run], theirs: list[Run]) -> dict[str, float] | None:
    """How much faster one arm is than another on the prompts both have, each measured by the plain decoding beside
    it; None where there are none."""
    pairs = [
        (a, b) for a in ours for b in theirs if (a.temperature, a.kind, a.prompt) == (b.temperature, b.kind, b.prompt)
    ]
    columns = [
        (a.plain, a.plain_tokens, a.seconds, a.tokens, b.plain, b.plain_tokens, b.seconds, b.tokens) for a, b in pairs
    ]

    if not columns:
        return None

    def ratio(s: Tensor) -> Tensor:
        one, other = ((s[:, i] / s[:, i + 1]) / (s[:, i + 2] / s[:, i + 3]) for i in (0, 4))
        return one / other

    value, low, high = bootstrap(torch.tensor(columns, dtype=torch.float64), ratio)
    return {"ratio": value, "low": low, "high": high}


def summarize(runs: list[Run], costs: dict[float, list[float]]) -> list[dict[str, Any]]:
    """One row per temperature, arm and size: over all prompts and by kind. costs: of passes, by temperature."""
    rows = []
    groups: dict[tuple[float, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.temperature, run.arm, run.nodes), []).append(run)
    names = sorted(dict.fromkeys(run.arm for run in runs), key=lambda name: (not name.startswith("hf_"), "+" in name))
    order = {name: i for i, name in enumerate(names)}
    for (temperature, arm, nodes), own in sorted(
        groups.items(), key=lambda item: (item[0][0], order[item[0][1]], len(item[0][2]), item[0][2])
    ):
        passes, tokens = sum(r.passes for r in own), sum(r.tokens for r in own)
        row: dict[str, Any] = {"T": temperature, "arm": arm, "nodes": nodes, "prompts": len(own)}
        row |= {"tau": tokens / max(1, passes), "tokens_per_second": tokens / sum(r.seconds for r in own)}
        row |= {"speedup": _ratio(own), "kinds": {}}
        for kind in dict.fromkeys(r.kind for r in own):
            part = [r for r in own if r.kind == kind]
            tau = sum(r.tokens for r in part) / max(1, sum(r.passes for r in part))
            row["kinds"][kind] = {"tau": tau, "speedup": _ratio(part)}
        if own[0].decode is not None:
            row |= _ours_alone(own, nodes, costs.get(temperature), row["tau"])
        rows.append(row)
    return rows


def _ours_alone(own: list[Run], nodes: str, costs: list[float] | None, tau: float) -> dict[str, Any]:
    def total(name: str) -> float:
        return float(sum(getattr(r, name) or 0.0 for r in own))

    passes, step = total("passes"), total("plain_decode") / total("plain_tokens")
    parts = {name: 1000 * total(name) / passes for name in ("draft", "target", "other")}
    decode = (total("plain_decode") / total("plain_tokens")) / (total("decode") / total("tokens"))
    row: dict[str, Any] = {
        "milliseconds_per_pass": parts,
        "draft_steps": parts["draft"] / 1000 / step,
        "decode": decode,
    }
    row["same"] = sum(bool(r.same) for r in own)
    if costs is not None and all(r.nodes_run is not None for r in own):
        mean = total("nodes_run") / passes
        row["mean_nodes"], below = mean, min(int(mean), len(costs) - 2)
        cost = costs[below] + (mean - below) * (costs[below + 1] - costs[below])
        row["limit"] = tau / (cost / costs[0] + row["draft_steps"])
    forecasts = [r.forecast for r in own if r.forecast is not None]
    if forecasts:
        tokens, steps, count, n = (sum(f[key] for f in forecasts) for key in ("tokens", "steps", "passes", "nodes"))
        row |= {"predicted": tokens / steps, "mean_nodes": n / count}
    return row


def best_sizes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every temperature and arm the row of the size with the highest speedup."""
    best: dict[tuple[float, str], dict[str, Any]] = {}
    for row in rows:
        found = best.setdefault((row["T"], row["arm"]), row)
        if row["speedup"]["ratio"] > found["speedup"]["ratio"]:
            best[row["T"], row["arm"]] = row
    return list(best.values())


def held_bytes(part: nn.Module, beside: nn.Module) -> int:
    """Bytes of tensors that `part` holds beyond those of `beside`, whatever it laid out for decoding included."""
    others = {t.untyped_storage().data_ptr() for t in (*beside.parameters(), *beside.buffers())}
    found: dict[int, int] = {}
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if id(value) in seen or value is beside:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in others:
                found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            for item in list(value.values()):
                visit(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif isinstance(value, nn.Module) or type(value).__module__.startswith("selfspec."):
            for name, item in list(getattr(value, "__dict__", {}).items()):
                if name != "model":
                    visit(item)

    visit(part)
    return sum(found.values())


# -- tables


def _interval(found: dict[str, float]) -> str:
    return f"{found['ratio']:.2f}x [{found['low']:.2f}, {found['high']:.2f}]"


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    return "\n".join(
        [
            "| " + " | ".join(columns) + " |",
            "|" + "---|" * len(columns),
            *("| " + " | ".join(row) + " |" for row in rows),
        ]
    )


def main_table(rows: list[dict[str, Any]]) -> str:
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
    return _markdown(columns, lines)


def kinds_table(rows: list[dict[str, Any]]) -> str:
    """Speedup and τ by kind of text, of every arm at its best size."""
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["kinds"]))
    lines = []
    for row in best_sizes(rows):
        cells = [
            f"{_interval(found['speedup'])}, τ {found['tau']:.2f}" if (found := row["kinds"].get(kind)) else ""
            for kind in kinds
        ]
        lines.append([f"{row['T']:g}", f"`{row['arm']}`", row["nodes"], *cells])
    return _markdown(["T", "method", "nodes", *kinds], lines)


def price_table(prices: dict[str, dict[str, Any]]) -> str:
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
    return _markdown(["method", "trained parameters", "MB on disk", "MB of memory", "training"], lines)


def verdict(runs: list[Run], rows: list[dict[str, Any]]) -> str:
    """Which drafters, at their best sizes, beat each of transformers' methods, and which do not."""
    theirs = list(dict.fromkeys(row["arm"] for row in rows if row["arm"].startswith("hf_")))
    lines = []
    for row in best_sizes(rows):
        temperature, arm, nodes = row["T"], row["arm"], row["nodes"]
        if arm in theirs:
            continue
        own = [r for r in runs if (r.temperature, r.arm, r.nodes) == (temperature, arm, nodes)]
        cells = []
        for other in theirs:
            beside = [r for r in runs if (r.temperature, r.arm) == (temperature, other)]
            if (found := against(own, beside)) is None:
                cells.append("")
                continue
            word = "wins " if found["low"] > 1 else "loses " if found["high"] < 1 else "level "
            cells.append(f"{word if len(own) > 1 else ''}{_interval(found)}")  # one prompt decides nothing
        lines.append([f"{temperature:g}", f"`{arm}`", nodes, *cells])
    return _markdown(["T", "drafter", "nodes", *(f"over `{other}`" for other in theirs)], lines)


START, END = "<!-- compare -->", "<!-- end -->"


def parts(readme: Path) -> tuple[str, str]:
    """What stands before and behind the place for the tables. Raises ValueError where there is none."""
    text = readme.read_text() if readme.is_file() else ""
    head, mark, rest = text.partition(START + "\n")
    _, end, tail = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"{readme} has no lines {START} and {END} for the tables to stand between")
    return head + mark, end + tail
