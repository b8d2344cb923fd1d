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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from torch import nn
from tqdm.auto import tqdm

from selfspec.api import Spec
from selfspec.budget.cost import pass_costs
from selfspec.core.generate import MAX_NODES
from selfspec.core.options import Options, check
from selfspec.core.sampling import Sampling
from selfspec.data.questions import SETS
from selfspec.data.tasks import TASKS
from selfspec.evaluation.arms import METHODS, Call, ours, theirs
from selfspec.evaluation.asking import Prompt
from selfspec.log import Figures, section, write_text

_GROUPS = (*TASKS, "continuation")


@dataclass
class CompareConfig:
    """drafters: what `selfspec.load` takes, several joined by + share one tree; nodes: tree sizes, "auto" included;
    questions: evaluation sets (see `selfspec.data.questions`); groups: of them (files: all they have); prompts:
    questions of each group; seed: of the first prompt, each further one has the next; methods: of transformers, a
    subset of METHODS; draft_model: of assisted generation, an embedded name, a folder or a hub id; exit_layer: of
    transformers' early exit; lookup_tokens: drafted by its prompt lookup; between: arms between two runs of plain
    decoding; results: a Markdown file whose lines between <!-- compare --> and <!-- end --> the tables replace."""

    drafters: list[str] = field(default_factory=list)
    nodes: list[Any] = field(default_factory=lambda: [8, 16, 32, "auto"])
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.7, 1.0])
    questions: list[str] = field(default_factory=lambda: list(SETS))
    groups: list[str] = field(default_factory=lambda: list(_GROUPS))
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
        for name in ("nodes", "temperatures", "questions"):
            if not getattr(self, name):
                raise ValueError(f"compare.{name} is empty; give at least one")
        for name in ("prompts", "prompt_tokens", "max_new_tokens", "exit_layer", "lookup_tokens", "between"):
            if getattr(self, name) < 1:
                raise ValueError(f"compare.{name}={getattr(self, name)} must be at least 1")
        known = [group for name in self.questions for group in SETS.get(name, ())]
        if set(self.questions) <= set(SETS) and (unknown := set(self.groups) - set(known)):
            raise ValueError(
                f"compare.groups holds {sorted(unknown)}; {', '.join(self.questions)} have {', '.join(known)}"
            )
        if unknown := set(self.methods) - set(METHODS):
            raise ValueError(f"compare.methods holds {sorted(unknown)}; known are {', '.join(METHODS)}")
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
    target; right: whether the answer is (None: nobody knows); text: of the arm `plain`, entropy and largest probability
    summed over the tokens, and the share of distinct 4-grams."""

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
    right: bool | None = None
    text: dict[str, float] | None = None


def run_comparison(
    specs: dict[str, Spec],
    draft_model: nn.Module | None,
    prompts: dict[str, list[Prompt]],
    config: CompareConfig,
    path: Path,
) -> list[Run]:
    """All arms on all prompts at all temperatures, appended to the JSON lines of `path`; those already there are
    kept."""
    spec = next(iter(specs.values()))
    check(spec.target, [prompt.ids for own in prompts.values() for prompt in own], Options(config.max_new_tokens))
    most = config.max_new_tokens
    calls = ours(specs, config.nodes, most)
    calls |= theirs(spec, config.methods, most, draft_model, config.exit_layer, config.lookup_tokens)
    runs = read_runs(path)
    if path.exists():  # a torn last line is dropped for good
        write_text(path, "".join(json.dumps(asdict(run)) + "\n" for run in runs))
    done = {(run.temperature, run.group, run.prompt, run.arm, run.nodes) for run in runs}
    points = [
        _Point(temperature, group, i, own[i])
        for i in range(max(map(len, prompts.values())))
        for temperature in config.temperatures
        for group, own in prompts.items()
        if i < len(own)
    ]
    missing = [
        (turn, point, [arm for arm in calls if (point.temperature, point.group, point.number, *arm) not in done])
        for turn, point in enumerate(points)
    ]
    missing = [entry for entry in missing if entry[2]]
    bar = tqdm(total=sum(len(left) for _, _, left in missing), desc="compare", mininterval=1.0)
    if missing:
        longest = max((prompt.ids for own in prompts.values() for prompt in own), key=len)
        _warm_up(spec, calls, longest, config)
    for turn, point, left in missing:
        order = Random(config.seed + turn).sample(left, len(left))
        for run in _between_plain(spec, calls, order, point, config):
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
    """What all arms are run on: the prompt of this number in its group, at one temperature."""

    temperature: float
    group: str
    number: int
    prompt: Prompt


def _warm_up(spec: Spec, calls: dict[tuple[str, str], Call], prompt: list[int], config: CompareConfig) -> None:
    """Costs of passes are measured, and what is laid out on first use is, before anything is timed; `prompt` is the
    longest, since a static cache that is large enough is kept."""
    for temperature in config.temperatures:
        if "auto" in config.nodes:
            pass_costs(spec.target, 1, temperature > 0)
        for call in calls.values():
            call(prompt, temperature, config.seed)


def _between_plain(
    spec: Spec, calls: dict[tuple[str, str], Call], order: list[tuple[str, str]], point: _Point, config: CompareConfig
) -> Iterator[Run]:
    """Some arms on one prompt, `between` of them at a time between two runs of plain decoding."""

    def plain() -> Figures:
        start = time.perf_counter()
        result = spec.autoregressive([ids], config.max_new_tokens, point.temperature, seed=[point.prompt.seed])
        took = time.perf_counter() - start
        s = result.stats
        return {"seconds": took, "ids": result.token_ids[0], "decode": s.seconds - s.seconds_prefill}

    def right(answer: list[int]) -> bool | None:
        text = "" if spec.tokenizer is None else str(spec.tokenizer.decode(answer, skip_special_tokens=True))
        return None if point.prompt.check is None else point.prompt.check(text)

    ids = point.prompt.ids
    before = plain()
    for first in range(0, len(order), config.between):
        part = []
        for name in order[first : first + config.between]:
            start = time.perf_counter()
            found = calls[name](ids, point.temperature, point.prompt.seed)
            part.append((name, found.pop("seconds", time.perf_counter() - start), found))
        after = plain()
        for (arm, nodes), seconds, found in part:
            new, expected = found.pop("ids"), before["ids"]
            beside = {key: statistics.mean((before[key], after[key])) for key in ("seconds", "decode")}
            own = {"plain_decode": beside["decode"], "same": new == expected} if "decode" in found else {}
            where = (point.temperature, point.group, point.number, arm, nodes)
            counts = (seconds, len(new), beside["seconds"], len(expected), found.pop("passes"))
            yield Run(*where, *counts, **found, **own, right=right(new))  # type: ignore[misc]
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
