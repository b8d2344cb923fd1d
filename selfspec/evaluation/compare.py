"""Everything against everything: drafters, tree sizes and transformers' own methods on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from selfspec.api import Spec
from selfspec.core.options import Options, as_seed, check
from selfspec.core.rows import MAX_NODES
from selfspec.core.sampling import Sampling
from selfspec.data.questions import SETS
from selfspec.evaluation.arms import Arm, Call, drafted, of_transformers, plain
from selfspec.evaluation.evaluation_prompts import Prompt
from selfspec.evaluation.measure import BETWEEN, measure, points_of
from selfspec.evaluation.peers import answering, started
from selfspec.evaluation.records import METHODS, PEERS, Record
from selfspec.utils.checks import all_known, at_least, not_empty


@dataclass
class CompareConfig:
    """drafters: what `selfspec.load` takes, several joined by + share one tree; nodes: tree sizes, "auto" included;
    temperatures: each arm at each; prompt_tokens: length of prompts cut from source; max_new_tokens: of each
    answer; questions: evaluation sets (see `selfspec.data.questions`); groups: of those that have them (None: all);
    prompts: questions of each group, one number for all sets or a list with one for each; seed: of all noise, from
    which every prompt gets its own; methods: of transformers, a subset of METHODS, and other engines on the
    target's GGUF file, a subset of PEERS (greedy alone); draft_model: of assisted generation (hf_assisted), a
    folder or a hub id; exit_layer: of transformers' early exit; lookup_tokens: drafted by its prompt lookup;
    between: arms between two runs of plain decoding; results: a Markdown file whose lines between <!-- compare -->
    (of a compiled engine: <!-- compare compiled -->) and <!-- end --> the tables replace; summary: one whose lines
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
    between: int = BETWEEN
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
        all_known(self, "compare", methods=METHODS + PEERS)
        if self.peers and any(self.temperatures):
            raise ValueError(
                f"compare.methods holds {self.peers[0]}, which decodes greedily alone; give compare.temperatures=[0]"
            )
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
    def peers(self) -> list[str]:
        """Of the methods, other engines."""
        return [name for name in self.methods if name in PEERS]

    @property
    def counts(self) -> list[Any]:
        """Questions of each group, for each set."""
        return self.prompts if isinstance(self.prompts, list) else [self.prompts] * len(self.questions)


def run_comparison(
    specs: dict[str, Spec], draft_model: nn.Module | None, prompts: Sequence[Prompt], config: CompareConfig, path: Path
) -> list[Record]:
    """All arms on all prompts at all temperatures; see `selfspec.evaluation.measure`."""
    spec, most = next(iter(specs.values())), config.max_new_tokens
    check(spec.target, [prompt.ids for prompt in prompts], Options(most))
    calls: dict[Arm, Call] = {Arm("plain"): plain(spec, most)}
    calls |= {Arm(name, str(n)): drafted(each, most, n) for name, each in specs.items() for n in config.nodes}
    theirs = of_transformers(spec, most, draft_model, config.exit_layer, config.lookup_tokens)
    calls |= {Arm(name): theirs[name] for name in config.methods if name not in PEERS}
    points = points_of(prompts, [Sampling(temperature) for temperature in config.temperatures])
    context = max(len(prompt.ids) for prompt in prompts) + most
    with started(config.peers, spec.target, context) as peers:
        calls |= {Arm(name): answering(peer, name, spec, most) for name, peer in peers.items()}
        return measure(spec, calls, Arm("plain"), points, path, seed=config.seed, between=config.between)
