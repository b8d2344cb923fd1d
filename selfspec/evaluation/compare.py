"""Everything against everything: drafters, tree sizes and transformers' own methods on the same prompts, in one
process.

Every arm runs between two runs of plain decoding, whose mean is what it is compared with, so that a machine that drifts
does not decide. What is measured is written prompt by prompt; a comparison that was killed goes on with what is
missing.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from tqdm.auto import tqdm

from selfspec.api import Spec
from selfspec.budget.cost import pass_costs
from selfspec.core.generate import MAX_NODES
from selfspec.core.options import Options, check
from selfspec.core.sampling import Sampling
from selfspec.data.prompts import GROUPS
from selfspec.evaluation.benchmark import DecodeConfig, hf_generate
from selfspec.log import Figures, section, write_text

# What transformers itself offers: the name of the arm, and what generate is given.
METHODS = ("hf_generate", "hf_prompt_lookup", "hf_early_exit", "hf_assisted")


@dataclass
class CompareConfig:
    """drafters: what `selfspec.load` takes, several joined by + share one tree; nodes: tree sizes, "auto" included;
    groups of prompts, and how many of each; seed: of the first prompt, each further one has the next; methods: of
    transformers, a subset of METHODS; draft_model: of assisted generation, an embedded name, a folder or a hub id;
    exit_layer: of transformers' early exit; lookup_tokens: drafted by its prompt lookup; between: arms between two runs
    of plain decoding; results: a Markdown file whose lines between <!-- compare --> and <!-- end --> the tables
    replace."""

    drafters: list[str] = field(default_factory=list)
    nodes: list[Any] = field(default_factory=lambda: [8, 16, 32, "auto"])
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    groups: list[str] = field(default_factory=lambda: list(GROUPS))
    prompts: int = 4
    prompt_tokens: int = 128
    max_new_tokens: int = 128
    seed: int = 0
    methods: list[str] = field(default_factory=lambda: list(METHODS))
    draft_model: str = "tiny-draft"
    exit_layer: int = 3
    lookup_tokens: int = 10
    between: int = 5
    results: str | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "temperatures", "groups"):
            if not getattr(self, name):
                raise ValueError(f"compare.{name} is empty; give at least one")
        for name in ("prompts", "prompt_tokens", "max_new_tokens", "exit_layer", "lookup_tokens", "between"):
            if getattr(self, name) < 1:
                raise ValueError(f"compare.{name}={getattr(self, name)} must be at least 1")
        for name, known in (("groups", GROUPS), ("methods", METHODS)):
            if unknown := set(getattr(self, name)) - set(known):
                raise ValueError(f"compare.{name} holds {sorted(unknown)}; known are {', '.join(known)}")
        if bad := [n for n in self.nodes if n != "auto" and (not isinstance(n, int) or not 1 <= n <= MAX_NODES)]:
            raise ValueError(f"compare.nodes holds {bad[0]!r}; give numbers from 1 to {MAX_NODES}, or auto")
        for temperature in self.temperatures:
            Sampling(temperature)
        if self.results is not None:
            section(Path(self.results), "compare")


@dataclass
class Run:
    """One arm on one prompt. seconds: the whole call, prompt included; plain: the same of plain decoding beside it,
    with as many tokens; decode, plain_decode: without the reading of the prompt (selfspec's arms); passes of the
    target."""

    temperature: float
    group: str
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


Call = Callable[[list[int], float, int], Figures]  # of a prompt, a temperature and a seed


def arms(specs: dict[str, Spec], draft_model: nn.Module | None, config: CompareConfig) -> dict[tuple[str, str], Call]:
    """By (name, nodes): what gives an arm's tokens, passes and times."""
    any_spec = next(iter(specs.values()))
    found: dict[tuple[str, str], Call] = {}
    given: dict[str, Figures] = {
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


def _ours(
    spec: Spec, config: CompareConfig, nodes: int | str, prompt: list[int], temperature: float, seed: int
) -> Figures:
    result = spec.generate([prompt], config.max_new_tokens, temperature, seed=[seed], nodes=nodes)
    s = result.stats
    return {
        "ids": result.token_ids[0],
        "passes": s.calls,
        "nodes_run": s.nodes,
        "decode": s.seconds - s.seconds_prefill,
        "draft": s.seconds_draft,
        "target": s.seconds_target,
        "other": s.seconds_other,
        "forecast": None if result.forecast is None else result.forecast.as_dict(),
    }


def _theirs(
    spec: Spec, config: CompareConfig, method: Figures, prompt: list[int], temperature: float, seed: int
) -> Figures:
    """One of transformers' methods; passes are the calls of the target's last layer."""
    passes = [0]

    def count(*_: object) -> None:
        passes[0] += 1

    options = DecodeConfig(max_new_tokens=config.max_new_tokens, temperature=temperature)
    handle = spec.target.layers[-1].register_forward_hook(count)
    try:
        result = hf_generate(spec, [prompt], options, seed, **method)
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
        write_text(path, "".join(json.dumps(asdict(run)) + "\n" for run in runs))
    done = {(run.temperature, run.group, run.prompt, run.arm, run.nodes) for run in runs}
    points = [
        _Point(temperature, group, i, prompts[group][i], config.seed + i * len(config.groups) + g)
        for i in range(config.prompts)
        for temperature in config.temperatures
        for g, group in enumerate(config.groups)
    ]
    missing = [
        (turn, point, [arm for arm in calls if (point.temperature, point.group, point.number, *arm) not in done])
        for turn, point in enumerate(points)
    ]
    missing = [entry for entry in missing if entry[2]]
    bar = tqdm(total=sum(len(left) for _, _, left in missing), desc="compare", mininterval=1.0)
    if missing:
        _warm_up(spec, calls, points[0].prompt, config)
    for turn, point, left in missing:
        at = (turn * config.between) % len(left)  # every prompt begins with other arms
        for run in _between_plain(spec, calls, left[at:] + left[:at], point, config):
            runs.append(run)
            with path.open("a") as f:
                f.write(json.dumps(asdict(run)) + "\n")
            bar.update()
            ratio = (run.plain / run.plain_tokens) / (run.seconds / run.tokens)
            bar.set_postfix(T=point.temperature, arm=f"{run.arm} {run.nodes}", speedup=f"{ratio:.2f}")
    bar.close()
    return runs


@dataclass(frozen=True)
class _Point:
    """What all arms are run on: the prompt of this number in its group, at one temperature and seed."""

    temperature: float
    group: str
    number: int
    prompt: list[int]
    seed: int


def _warm_up(spec: Spec, calls: dict[tuple[str, str], Call], prompt: list[int], config: CompareConfig) -> None:
    """Costs of passes are measured, and what is laid out on first use is, before anything is timed."""
    for temperature in config.temperatures:
        if "auto" in config.nodes:
            pass_costs(spec.target, 1, temperature > 0)
        for call in calls.values():
            call(prompt[:16], temperature, config.seed)


def _between_plain(
    spec: Spec, calls: dict[tuple[str, str], Call], order: list[tuple[str, str]], point: _Point, config: CompareConfig
) -> Iterator[Run]:
    """Some arms on one prompt, `between` of them at a time between two runs of plain decoding."""

    def plain() -> Figures:
        start = time.perf_counter()
        result = spec.autoregressive([point.prompt], config.max_new_tokens, point.temperature, seed=[point.seed])
        took = time.perf_counter() - start
        s = result.stats
        return {"seconds": took, "ids": result.token_ids[0], "decode": s.seconds - s.seconds_prefill}

    before = plain()
    for first in range(0, len(order), config.between):
        part = []
        for name in order[first : first + config.between]:
            start = time.perf_counter()
            found = calls[name](point.prompt, point.temperature, point.seed)
            part.append((name, time.perf_counter() - start, found))
        after = plain()
        for (arm, nodes), seconds, found in part:
            ids, expected = found.pop("ids"), before["ids"]
            beside = {key: statistics.mean((before[key], after[key])) for key in ("seconds", "decode")}
            own = {"plain_decode": beside["decode"], "same": ids == expected} if "decode" in found else {}
            where = (point.temperature, point.group, point.number, arm, nodes)
            counts = (seconds, len(ids), beside["seconds"], len(expected), found.pop("passes"))
            yield Run(*where, *counts, **found, **own)  # type: ignore[misc]
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
