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
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from torch import nn

from selfspec.api import Spec
from selfspec.budget.cost import pass_costs
from selfspec.core.options import Options, as_seed, check
from selfspec.core.rows import MAX_NODES
from selfspec.core.sampling import Sampling
from selfspec.data.questions import SETS
from selfspec.evaluation.arms import METHODS, Call, ours, theirs
from selfspec.evaluation.benchmark import timed
from selfspec.evaluation.evaluation_prompts import Prompt
from selfspec.utils.checks import all_known, at_least, not_empty
from selfspec.utils.files import Figures, append_text, read_jsonl, write_text
from selfspec.utils.progress import progress


@dataclass
class CompareConfig:
    """drafters: what `selfspec.load` takes, several joined by + share one tree; nodes: tree sizes, "auto" included;
    temperatures: each arm at each; prompt_tokens: length of prompts cut from source; max_new_tokens: of each answer;
    questions: evaluation sets (see `selfspec.data.questions`); groups: of those that have them (None: all); prompts:
    questions of each group, one number for all sets or a list with one for each; seed: of all noise, from which every
    prompt gets its own; methods: of transformers, a subset of METHODS; draft_model: of assisted generation
    (hf_assisted), a folder or a hub id; exit_layer: of transformers' early exit; lookup_tokens: drafted by its prompt
    lookup; between: arms between two runs of plain decoding; results: a Markdown file whose lines between <!-- compare
    --> (of a compiled engine: <!-- compare compiled -->) and <!-- end --> the tables replace; summary: one whose lines
    between <!-- summary --> and <!-- end --> a short table and its figure replace; allow_code_execution: see
    `Answering`."""

    drafters: list[str] = field(default_factory=list)
    nodes: list[Any] = field(default_factory=lambda: [8, 16, 32, "auto"])
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.7, 1.0])
    questions: list[str] = field(default_factory=lambda: list(SETS))
    groups: list[str] | None = None
    prompts: Any = 4
    prompt_tokens: int = 128
    max_new_tokens: int = 128
    seed: int = 0
    methods: list[str] = field(default_factory=lambda: [name for name in METHODS if name != "hf_assisted"])
    draft_model: str | None = None
    exit_layer: int = 3
    lookup_tokens: int = 10
    between: int = 5
    results: str | None = None
    summary: str | None = None
    allow_code_execution: bool = False

    def __post_init__(self) -> None:
        not_empty(self, "compare", "nodes", "temperatures", "questions")
        not_empty(self, "compare", "groups", give="give at least one, or null for all")
        at_least(self, "compare", 1, "prompt_tokens", "max_new_tokens", "exit_layer", "lookup_tokens", "between")
        if len(self.counts) != len(self.questions) or not all(type(n) is int and n > 0 for n in self.counts):
            raise ValueError(
                f"compare.prompts={self.prompts} must be a number of at least 1, or a list with one for each of "
                f"compare.questions={self.questions}"
            )
        as_seed(self.seed, "compare.seed")
        known = [group for groups in SETS.values() for group in groups]
        if set(self.questions) <= set(SETS) and (unknown := set(self.groups or ()) - set(known)):
            raise ValueError(f"compare.groups holds {sorted(unknown)}; known are {', '.join(known)}")
        all_known(self, "compare", methods=METHODS)
        if "hf_assisted" in self.methods and self.draft_model is None:
            raise ValueError(
                "compare.methods holds hf_assisted, but compare.draft_model is null; give a folder or a hub id, for "
                "tiny-target what this trains: selfspec target +experiment=tiny_draft name=draft"
            )
        if "hf_assisted" not in self.methods and self.draft_model is not None:
            raise ValueError(f"compare.draft_model={self.draft_model} is not used: add hf_assisted to compare.methods")
        if bad := [n for n in self.nodes if n != "auto" and (not isinstance(n, int) or not 1 <= n <= MAX_NODES)]:
            raise ValueError(f"compare.nodes holds {bad[0]!r}; give numbers from 1 to {MAX_NODES}, or auto")
        for temperature in self.temperatures:
            Sampling(temperature)

    @property
    def counts(self) -> list[Any]:
        """Questions of each group, for each set."""
        return self.prompts if isinstance(self.prompts, list) else [self.prompts] * len(self.questions)


@dataclass
class Run:
    """One arm on one prompt. prompt: its question and turn; text: crc32 of its ids and seed. seconds: the whole call,
    prompt included; plain: the same of plain decoding beside it, with as many tokens; decode, plain_decode: without the
    reading of the prompt (selfspec's arms); passes of the target; right: whether the answer is (None where it can not
    be checked); regime: of the arm `plain`, see `Regime`."""

    temperature: float
    group: str
    question: str
    turn: int
    text: int
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
    regime: dict[str, Any] | None = None

    @property
    def point(self) -> tuple[float, str, str, int]:
        """What it was run on."""
        return self.temperature, self.group, self.question, self.turn


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
    check(spec.target, [prompt.ids for group in prompts.values() for prompt in group], Options(config.max_new_tokens))
    most = config.max_new_tokens
    calls = ours(specs, config.nodes, most)
    calls |= theirs(spec, config.methods, most, draft_model, config.exit_layer, config.lookup_tokens)
    runs = read_runs(path)
    if path.exists():  # a torn last line is dropped for good
        write_text(path, "".join(json.dumps(asdict(run)) + "\n" for run in runs))
    done = {(*run.point, run.arm, run.nodes) for run in runs}
    points = [
        _Point(temperature, group[i])
        for i in range(max(map(len, prompts.values())))
        for temperature in config.temperatures
        for group in prompts.values()
        if i < len(group)
    ]
    _same_texts(path, runs, points)
    missing = [
        (turn, point, [arm for arm in calls if (*point.key, *arm) not in done]) for turn, point in enumerate(points)
    ]
    missing = [entry for entry in missing if entry[2]]
    if missing:
        longest = max((prompt.ids for group in prompts.values() for prompt in group), key=len)
        _warm_up(spec, calls, longest, config)
    bar = progress(total=sum(len(left) for _, _, left in missing), desc="compare")
    for turn, point, left in missing:
        order = Random(config.seed + turn).sample(left, len(left))
        for run in _between_plain(spec, calls, order, point, config):
            runs.append(run)
            append_text(path, json.dumps(asdict(run)) + "\n")
            bar.update()
            ratio = (run.plain / run.plain_tokens) / (run.seconds / run.tokens)
            bar.set_postfix(T=point.temperature, arm=f"{run.arm} {run.nodes}", speedup=f"{ratio:.2f}")
    bar.close()
    return runs


@dataclass(frozen=True)
class _Point:
    """What all arms are run on: a prompt at one temperature."""

    temperature: float
    prompt: Prompt

    @property
    def key(self) -> tuple[float, str, str, int]:
        return self.temperature, self.prompt.group, self.prompt.question, self.prompt.turn

    @property
    def text(self) -> int:
        return self.prompt.text


def _same_texts(path: Path, runs: list[Run], points: list[_Point]) -> None:
    """Raises ValueError where what was measured before was measured on other prompts of the same names."""
    texts = {run.point: run.text for run in runs}
    for point in points:
        if texts.get(point.key, point.text) != point.text:
            raise ValueError(
                f"{path} holds runs of another text for {point.prompt.question}: the questions or the code that makes "
                "them changed; choose another name="
            )


def _warm_up(spec: Spec, calls: dict[tuple[str, str], Call], prompt: list[int], config: CompareConfig) -> None:
    """Measure the costs of passes and run every arm once, so that nothing timed later includes set-up. `prompt` is the
    longest, since transformers keeps a static cache that is large enough."""
    bar = progress([(temperature, *arm) for temperature in config.temperatures for arm in calls], desc="set-up")
    for temperature, arm, nodes in bar:
        bar.set_postfix(T=temperature, arm=f"{arm} {nodes}")
        if nodes == "auto":
            pass_costs(spec.target, 1, temperature > 0)
        calls[arm, nodes](prompt, temperature, config.seed)


def _between_plain(
    spec: Spec, calls: dict[tuple[str, str], Call], order: list[tuple[str, str]], point: _Point, config: CompareConfig
) -> Iterator[Run]:
    """Some arms on one prompt, `between` of them at a time between two runs of plain decoding."""

    def plain() -> Figures:
        call = partial(spec.autoregressive, [ids], config.max_new_tokens, point.temperature, seed=[point.prompt.seed])
        result, took = timed(spec, call)
        s = result.stats
        return {"seconds": took, "ids": result.token_ids[0], "decode": s.seconds - s.seconds_prefill}

    ids = point.prompt.ids
    before = plain()
    for first in range(0, len(order), config.between):
        part = []
        for name in order[first : first + config.between]:
            start = time.perf_counter()
            figures = calls[name](ids, point.temperature, point.prompt.seed)
            part.append((name, figures.pop("seconds", time.perf_counter() - start), figures))
        after = plain()
        for (arm, nodes), seconds, figures in part:
            new, expected = figures.pop("ids"), before["ids"]
            beside = {key: statistics.mean((before[key], after[key])) for key in ("seconds", "decode")}
            beside_plain = {"plain_decode": beside["decode"], "same": new == expected} if "decode" in figures else {}
            where = (*point.key, point.text, arm, nodes)
            counts = (seconds, len(new), beside["seconds"], len(expected), figures.pop("passes"))
            regime = figures.pop("text", None)
            yield Run(
                *where, *counts, **figures, **beside_plain, right=point.prompt.right(spec.tokenizer, new), regime=regime
            )  # type: ignore[misc]
        before = after


def read_runs(path: Path) -> list[Run]:
    """What was measured before. Raises ValueError as `read_jsonl` does."""
    return read_jsonl(path, lambda line: Run(**line), "run")
