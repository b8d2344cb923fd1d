"""Everything against everything: drafters, tree sizes, transformers' own methods and other engines on the same prompts.

The rows of a comparison are by temperature, arm and size, over all prompts and by group of text. One command makes
README's first table and figure of them, so that neither can be older than the other.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import nn

from selfspec.api import Spec
from selfspec.budget.predict import along, speedup
from selfspec.core.options import Options, as_seed, check
from selfspec.core.rows import MAX_NODES
from selfspec.core.sampling import Sampling
from selfspec.data.questions import SETS
from selfspec.evaluation.arms import Arm, Call, Prompt, decoded, of_transformers
from selfspec.evaluation.figures import PARTS, decode_speedup, forecast, grouped, over_plain, right, tau, texts, total
from selfspec.evaluation.measure import measure, points_of
from selfspec.evaluation.peers import answering, started
from selfspec.evaluation.records import METHODS, PEERS, Record, ours, read_records
from selfspec.evaluation.tables import groups_table, price_table, regime_table, summary_table, table, verdict
from selfspec.utils.checks import all_known, at_least, not_empty
from selfspec.utils.files import NOTHING, Figures, mean, write_section

FIGURE = "notebooks/figures/summary.png"  # beside the Markdown file


@dataclass
class CompareConfig:
    """drafters: what `selfspec.load` takes, several joined by + share one tree; nodes: tree sizes, "auto" included;
    temperatures: each arm at each; prompt_tokens: length of prompts cut from source; max_new_tokens: of each answer;
    questions: evaluation sets (see `selfspec.data.questions`); groups: of those that have them (None: all); prompts:
    questions of each group, one number for all sets or a list with one for each; seed: of all noise, from which every
    prompt gets its own; methods: of transformers (hf_generate, hf_static, hf_prompt_lookup, hf_early_exit,
    hf_assisted), and other engines on the target's GGUF file, greedy alone (llamacpp_file, llamacpp_lookup,
    llamacpp_bf16, llamacpp_q8_0, openvino_fp16, openvino_int8, openvino_int4); draft_model: of assisted generation
    (hf_assisted), a folder or a hub id; exit_layer: of transformers' early exit; results: a Markdown file whose
    lines between <!-- compare --> (of a compiled engine: <!-- compare compiled -->) and <!-- end --> the tables
    replace; summary: one whose lines between <!-- summary --> and <!-- end --> a short table and its figure replace;
    allow_code_execution: whether code that the target writes may be run against a problem's tests (see
    `Answering`)."""

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
    results: str | None = None
    summary: str | None = None
    allow_code_execution: bool = False

    def __post_init__(self) -> None:
        not_empty(self, "compare", "nodes", "temperatures", "questions")
        not_empty(self, "compare", "groups", give="give at least one, or null for all")
        at_least(self, "compare", 1, "prompt_tokens", "max_new_tokens", "exit_layer")
        if len(self.counts) != len(self.questions) or not all(type(n) is int and n > 0 for n in self.counts):
            raise ValueError(
                f"compare.prompts={self.prompts} must be a number of at least 1, or a list with one for each of "
                f"compare.questions={self.questions}"
            )
        as_seed(self.seed, "compare.seed")
        for name in ("temperatures", "nodes", "drafters", "methods"):  # each once: 0 and 0.0 are one
            setattr(self, name, list(dict.fromkeys(getattr(self, name))))
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
    """All arms on all prompts at all temperatures; see `selfspec.evaluation.measure`. `path` may hold other arms, or
    some on other prompts: what is returned is of the prompts that all arms of a temperature have in common. Raises
    ValueError where these are none."""
    spec, most = next(iter(specs.values())), config.max_new_tokens
    check(spec.target, [prompt.ids for prompt in prompts], Options(most))
    calls: dict[Arm, Call] = {Arm("plain"): decoded(spec, most)}
    calls |= {Arm(name, str(n)): decoded(each, most, n) for name, each in specs.items() for n in config.nodes}
    theirs = of_transformers(spec, most, draft_model, config.exit_layer)
    calls |= {Arm(name): theirs[name] for name in config.methods if name not in PEERS}
    points = points_of(prompts, [Sampling(temperature) for temperature in config.temperatures])
    before, now = _answered(read_records(path)), {*calls, *map(Arm, config.peers)}
    for temperature in config.temperatures:
        shared = {point.key for point in points if point.sampling.temperature == temperature}
        for arm, answered in before.get(temperature, {}).items():
            shared &= answered if Arm(*arm) not in now else shared  # what is measured now has them all then
        if not shared:
            raise ValueError(
                f"{path} holds arms on other questions at T={temperature:g}, beside which new ones can not stand; "
                "choose another name=, or the compare.questions, compare.groups and compare.prompts of before"
            )
    context = max(len(prompt.ids) for prompt in prompts) + most
    with started(config.peers, spec.target, context) as peers:
        calls |= {Arm(name): answering(peer, name, spec, most) for name, peer in peers.items()}
        return common(measure(spec, calls, Arm("plain"), points, path, seed=config.seed))


def _answered(records: Iterable[Record]) -> dict[float, dict[tuple[str, str], set[Any]]]:
    """Points by temperature and arm."""
    answered: dict[float, dict[tuple[str, str], set[Any]]] = {}
    for record in records:
        answered.setdefault(record.temperature, {}).setdefault((record.arm, record.nodes), set()).add(record.point)
    return answered


def common(records: list[Record]) -> list[Record]:
    """Those of the prompts that all arms of a temperature have answered; the others are named and left out."""
    answered = _answered(records)
    shared = {temperature: set.intersection(*arms.values()) for temperature, arms in answered.items()}
    for temperature, arms in answered.items():
        every = set.union(*arms.values())
        if left := len(every - shared[temperature]):
            few = [" ".join(arm).removesuffix(" -") for arm, points in arms.items() if points != every]
            print(
                f"T={temperature:g}: {left} of {len(every)} prompts are left out, which are not answered by "
                + ", ".join(few)
            )
    return [record for record in records if record.point in shared[record.temperature]]


# -- rows


def summarize_comparison(records: list[Record], costs: dict[float, list[float]]) -> list[Figures]:
    """One row per temperature, arm and size: over all prompts and by group. costs: of passes, by temperature."""
    by_size = grouped(records, attrgetter("temperature", "arm", "nodes"))
    order = _order(records)
    sizes = sorted(by_size, key=lambda key: (key[0], order[key[1]], len(key[2]), key[2]))
    return [_row(*key, by_size[key], costs.get(key[0])) for key in sizes]


def best_sizes(records: list[Record]) -> list[Figures]:
    """One row per temperature and arm at its best size. The questions are cut into two halves; each half uses the size
    that was fastest on the other, so no size is chosen on the questions it is reported on."""
    arms, order, rows = grouped(records, attrgetter("temperature", "arm")), _order(records), []
    for (temperature, arm), of_arm in sorted(arms.items(), key=lambda item: (item[0][0], order[item[0][1]])):
        sizes, chosen_records = [], []
        halves = _halves(of_arm)
        for half in (0, 1):
            others = [r for r in of_arm if halves[_question(r)] != half] or of_arm
            by_size = grouped(others, attrgetter("nodes"))
            chosen = max(by_size, key=lambda nodes: over_plain(by_size[nodes])["ratio"])
            in_half = [r for r in of_arm if halves[_question(r)] == half and r.nodes == chosen]
            chosen_records += in_half
            sizes += [chosen] if in_half else []
        if chosen_records:
            nodes = ", ".join(dict.fromkeys(sizes))
            rows.append(_row(temperature, arm, nodes, chosen_records, None) | {"records": chosen_records})
    return rows


def by_questions(records: list[Record]) -> dict[str, list[Figures]]:
    """The rows of `best_sizes` by the name of the questions: an evaluation set, or a file's only group. "" where all
    are of one set, or of a file with several groups."""
    sets = {group: name for name, groups in SETS.items() for group in groups}
    names = {group: sets.get(group, "") for group in dict.fromkeys(r.group for r in records)}
    files = [group for group, name in names.items() if not name]
    names |= {group: group for group in files if len(files) == 1}
    if len(set(names.values())) == 1:
        return {"": best_sizes(records)}
    return {name: best_sizes([r for r in records if names[r.group] == name]) for name in dict.fromkeys(names.values())}


def regimes(records: Iterable[Record]) -> list[Figures]:
    """What the text of plain decoding is like, by temperature and group; see `texts`."""
    groups = grouped((r for r in records if r.regime is not None), attrgetter("temperature", "group"))
    return [{"T": t, "group": group, "prompts": len(rows), **texts(rows)} for (t, group), rows in groups.items()]


def _question(record: Record) -> str:
    return record.questions[0][0]


def _halves(records: list[Record]) -> dict[str, int]:
    """By question, in which half it is; of one question alone, the only half."""
    questions = sorted({_question(r) for r in records}, key=lambda question: zlib.crc32(question.encode()))
    return {question: i % 2 for i, question in enumerate(questions)}


def _order(records: Iterable[Record]) -> dict[str, int]:
    """Plain decoding, others' methods, single drafters, hybrids."""
    names = dict.fromkeys(record.arm for record in records)
    ordered = sorted(names, key=lambda name: (name != "plain", ours(name), "+" in name))
    return {name: i for i, name in enumerate(ordered)}


def _row(temperature: float, arm: str, nodes: str, records: list[Record], costs: list[float] | None) -> Figures:
    row: Figures = {"T": temperature, "arm": arm, "nodes": nodes, **_part(records)}
    row["tokens_per_second"] = texts(records)["tokens_per_second"]
    row["groups"] = {group: _part(rows) for group, rows in grouped(records, attrgetter("group")).items()}
    if arm == "plain" or not ours(records[0].arm):
        return row
    pooled = total([r.stats for r in records])
    step = mean(sum(r.plain.decode for r in records if r.plain), sum(r.plain.tokens for r in records if r.plain))
    step = step or NOTHING  # of records of an older version
    parts = {name: 1000 * getattr(pooled, f"seconds_{name}") / pooled.calls for name in PARTS}
    row |= {"milliseconds_per_pass": parts, "draft_steps": parts["draft"] / 1000 / step}
    row["decode"] = decode_speedup(records)
    compared = [r.same for r in records if r.same is not None]  # not in all records of an older version
    row |= {"same": sum(map(sum, compared))} if len(compared) == len(records) else {}
    if costs is not None and all(r.stats.nodes for r in records):
        row["mean_nodes"] = pooled.nodes / pooled.calls
        if row["mean_nodes"] < len(costs):  # costs of larger trees are not measured
            cost = along(range(len(costs)), costs, row["mean_nodes"])
            row["limit"] = speedup(row["tau"], 1.0, cost / costs[0], row["draft_steps"])
    if expected := forecast(records).get("forecast"):
        row |= {"predicted": expected["speedup"], "mean_nodes": expected["nodes"] / expected["passes"]}
    return row


def _part(records: list[Record]) -> Figures:
    """Of an arm's records, in all or of one group."""
    length, interval = tau(records)
    figures = {"prompts": len(records), "tau": length, "tau_interval": interval}
    return {**figures, "speedup": over_plain(records), **right(records)}


def comparison_tables(records: list[Record], rows: list[Figures], prices: dict[str, Figures]) -> str:
    """All tables of a comparison."""
    best = best_sizes(records)
    texts_of = regimes(records)
    tables = [table(rows), groups_table(best), *([regime_table(texts_of)] if texts_of else []), price_table(prices)]
    if any(not ours(row["arm"]) for row in rows):
        tables.append(verdict(best))
    return "\n\n".join(tables)


def write_summary(records: list[Record], target: str, machine: str, path: Path) -> None:
    """Write the table into the section `summary` of a Markdown file, and the figure beside it. Both carry one stamp."""
    columns = {
        f"{name}, T={t:g}" if name else f"T={t:g}": {row["arm"]: row for row in rows if row["T"] == t}
        for name, rows in by_questions(records).items()
        for t in sorted({row["T"] for row in rows})
    }
    everywhere = set.intersection(*map(set, columns.values()))  # a resumed comparison may have asked others elsewhere
    if not everywhere - {"plain"}:
        print(f"{path} keeps its summary: no arm was run in all of {', '.join(columns)}")
        return
    columns = {name: {arm: at[arm] for arm in at if arm in everywhere} for name, at in columns.items()}
    from selfspec.evaluation.plots import plot_summary  # slow to import

    text = summary_table(columns)
    stamp = hashlib.sha256(text.encode()).hexdigest()[:12]
    plot_summary(columns, f"{target}, {machine}", stamp, path.parent / FIGURE)
    write_section(path, "summary", f"![Speedup over plain decoding, by drafter]({FIGURE})\n\n{text}\n<!-- {stamp} -->")
