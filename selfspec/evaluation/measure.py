"""Run arms side by side: in one process, after a warm-up, each between two runs of plain decoding of the same prompts.

An arm is compared with the mean of these two, so that a machine that drifts does not decide. What is measured is
written record by record; a measurement that was killed goes on with what is missing.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Any

import torch

from selfspec.api import Spec
from selfspec.budget.cost import pass_costs
from selfspec.core.sampling import Sampling, warp
from selfspec.evaluation.arms import Arm, Call, Prompt
from selfspec.evaluation.figures import grouped, over_plain
from selfspec.evaluation.records import Beside, Record, Regime, lines_of, ours, point_of, read_records
from selfspec.output import Generated
from selfspec.utils.files import append_text, interval, write_text
from selfspec.utils.progress import progress

BETWEEN = 5  # arms between two runs of plain decoding
_AT_ONCE = 64  # logits, of a whole vocabulary each, that are looked at in float64
_TRIES = 20  # calls, after which one is measured though it compiles: on a GPU its buffers may lie elsewhere every time

Run = tuple[Generated, float]  # a call of an arm, and its seconds


@dataclass(frozen=True)
class Point:
    """What all arms are run on: prompts, `number` that of the first, and how they are answered."""

    number: int
    batch: list[Prompt]
    sampling: Sampling

    @property
    def key(self) -> tuple[Any, ...]:
        questions = [(prompt.question, prompt.turn) for prompt in self.batch]
        return point_of(self.sampling.temperature, self.group, self.number, questions)

    @property
    def group(self) -> str:
        """Of its prompts; "all" where they are of several."""
        return self.batch[0].group if len({prompt.group for prompt in self.batch}) == 1 else "all"

    @property
    def texts(self) -> list[int]:
        return [prompt.text for prompt in self.batch]


def points_of(prompts: Sequence[Prompt], samplings: Sequence[Sampling], size: int = 1) -> list[Point]:
    """Batches of so many prompts, one of each group in turn, each at every sampling; what fills no batch is left out
    where there is a whole one."""
    groups = grouped(prompts, lambda prompt: prompt.group)
    turns = [prompt for each in zip_longest(*groups.values()) for prompt in each if prompt is not None]
    firsts = range(0, max(1, len(turns) - size + 1), size)
    return [Point(first, turns[first : first + size], s) for first in firsts for s in samplings]


def measure(
    spec: Spec,
    calls: Mapping[Arm, Call],
    baseline: Arm | None,
    points: Sequence[Point],
    path: Path | None = None,
    seed: int = 0,
    repeats: int = 1,
    others: bool = True,
) -> list[Record]:
    """The records of all arms on all points. spec: any on the target; baseline: the arm that is plain decoding, None
    where arms are not compared with it; path: JSON lines that each record is appended to, and those that are there
    already are kept; seed: of the order of the arms; repeats: runs of each, of which the median counts; others:
    whether `path` may hold records of other points.

    Raises ValueError where `path` holds records of other texts.
    """
    records = [] if path is None else _kept(spec, path, points, others)
    done = {(*record.point, record.arm, record.nodes) for record in records}
    left = [(i, point, [arm for arm in calls if (*point.key, *arm) not in done]) for i, point in enumerate(points)]
    left = [(i, point, arms) for i, point, arms in left if arms]
    if not left:
        return records
    _warm_up(spec, calls, [(point, arms) for _, point, arms in left])
    bar = progress(total=sum(len(arms) for *_, arms in left), desc="measured")
    for i, point, arms in left:
        order = Random(f"{seed} {i}")
        for record in _on_point(spec, calls, baseline, point, arms, order, repeats):
            records.append(record)
            if path is not None:
                append_text(path, lines_of([record]))
            bar.update()
            if baseline is None or record.arm != baseline.name:
                bar.set_postfix(_shown(records))
    bar.close()
    return records


def _shown(records: list[Record]) -> dict[str, str]:
    """The last record's arm, and what it brings in all that was measured at its temperature."""
    last = records[-1]
    alike = [r for r in records if (r.arm, r.nodes, r.temperature) == (last.arm, last.nodes, last.temperature)]
    shown = {"T": f"{last.temperature:g}", "arm": f"{last.arm} {last.nodes}".removesuffix(" -")}
    if last.plain is None:
        return shown
    return shown | {"speedup": interval(over_plain(alike))}


def _kept(spec: Spec, path: Path, points: Sequence[Point], others: bool) -> list[Record]:
    """The records of an earlier run, whose answers are checked again: what is right may have been mended since. Raises
    ValueError where they are of other texts, or, without `others`, of other points."""
    records, texts = read_records(path), {point.key: point.texts for point in points}
    counts = Counter((record.point, record.arm, record.nodes) for record in records)
    if twice := next((record for record in records if counts[record.point, record.arm, record.nodes] > 1), None):
        raise ValueError(
            f"{path} holds {twice.arm} of {twice.questions[0][0] or twice.prompt} twice; delete one of the lines, or "
            "choose another name="
        )
    for record in records:
        if not others and record.point not in texts:
            raise ValueError(
                f"{path} holds records of other prompts or batches ({record.questions[0][0] or record.prompt}), as "
                "another version drew them; choose another name="
            )
        if texts.get(record.point, record.texts) != record.texts:
            raise ValueError(
                f"{path} holds records of another text for {record.questions[0][0] or record.prompt}: the questions or "
                "the code that makes them changed; choose another name="
            )
    batches = {point.key: point.batch for point in points}
    known = dict[tuple[int, tuple[int, ...]], bool | None]()  # arms mostly write the same
    for i, record in enumerate(records):
        pairs = [*zip(batches.get(record.point, ()), record.token_ids, strict=False)]
        for prompt, ids in pairs:
            if (id(prompt), tuple(ids)) not in known:
                known[id(prompt), tuple(ids)] = prompt.right(spec.tokenizer, ids)
        if pairs:
            records[i] = replace(record, right=[known[id(prompt), tuple(ids)] for prompt, ids in pairs])
    if path.exists():  # what was torn is dropped for good
        write_text(path, lines_of(records))
    return records


def _warm_up(spec: Spec, calls: Mapping[Arm, Call], left: Sequence[tuple[Point, list[Arm]]]) -> None:
    """Measure the costs of passes and run each arm once, so that nothing timed later includes set-up; on the longest
    prompt, since transformers keeps a static cache that is large enough."""
    longest: dict[tuple[Sampling, Arm], Point] = {}
    for point, arms in left:
        for arm in arms:
            _price(spec, arm, point)
            other = longest.setdefault((point.sampling, arm), point)
            if max(len(p.ids) for p in point.batch) > max(len(p.ids) for p in other.batch):
                longest[point.sampling, arm] = point
    bar = progress(longest.items(), desc="set-up")
    for (sampling, arm), point in bar:
        bar.set_postfix(T=f"{sampling.temperature:g}", arm=f"{arm.name} {arm.nodes}".removesuffix(" -"))
        calls[arm](point.batch, sampling)


def _price(spec: Spec, arm: Arm, point: Point) -> None:
    """Measure what `auto` goes by, which short calls would put off; nothing where it is known."""
    if arm.nodes == "auto":
        pass_costs(spec.target, len(point.batch), point.sampling.temperature > 0, insist=True)


def _on_point(
    spec: Spec,
    calls: Mapping[Arm, Call],
    baseline: Arm | None,
    point: Point,
    arms: list[Arm],
    order: Random,
    repeats: int,
) -> Iterator[Record]:
    """The records of some arms on one point, run BETWEEN at a time between two runs of plain decoding, whose own
    record comes last."""

    def run(arm: Arm) -> Run:
        _price(spec, arm, point)  # an earlier call may have dropped it
        return timed(spec, partial(calls[arm], point.batch, point.sampling))

    plain = [] if baseline is None else [run(baseline)]
    others = [arm for arm in arms if arm != baseline]
    taken: dict[Arm, list[tuple[Run, Beside | None]]] = {arm: [] for arm in others}
    for turn in range(repeats):
        shuffled = order.sample(others, len(others))
        for first in range(0, max(1, len(others)), BETWEEN):
            part = [(arm, run(arm)) for arm in shuffled[first : first + BETWEEN]]
            plain += [] if baseline is None else [run(baseline)]
            for arm, result in part:
                taken[arm].append((result, _beside(plain[-2:])))
                if turn + 1 == repeats:
                    yield _record(spec, point, arm, taken[arm], plain[-1][0].token_ids if plain else None)
    if baseline is not None and baseline in arms:
        ids, earliest = plain[0][0].token_ids, _beside(plain[:1])
        record = _record(spec, point, baseline, [(later, earliest) for later in plain[1:]], ids)
        yield replace(record, regime=regime(spec, point.batch, ids, point.sampling))


def _beside(runs: Sequence[Run]) -> Beside | None:
    """The mean of some runs of plain decoding, all of which wrote the same."""
    if not runs:
        return None
    stats = [result.stats for result, _ in runs]
    seconds = statistics.mean(took for _, took in runs), statistics.mean(s.seconds - s.seconds_prefill for s in stats)
    return Beside(*seconds, stats[0].tokens)


def _record(
    spec: Spec, point: Point, arm: Arm, runs: list[tuple[Run, Beside | None]], plain_ids: list[list[int]] | None
) -> Record:
    """Of an arm's runs, each with what is beside it. Counts are those of the run of median time; times of parts too, of
    an even number of runs the mean of the middle two."""
    ordered, batch = [result for result, _ in sorted((run for run, _ in runs), key=itemgetter(1))], point.batch
    result, other = ordered[(len(runs) - 1) // 2], ordered[len(runs) // 2].stats
    times = {name: value for name, value in vars(result.stats).items() if name.startswith("seconds_")}
    stats = replace(result.stats, **{name: (value + getattr(other, name)) / 2 for name, value in times.items()})
    ids, besides = result.token_ids, [beside for _, beside in runs if beside is not None]
    plain = None
    if besides:
        seconds, decode = (statistics.median(getattr(each, name) for each in besides) for name in ("seconds", "decode"))
        plain = Beside(seconds, decode, besides[0].tokens)
    same = None
    if plain_ids is not None and ours(arm.name):
        same = [a == b for a, b in zip(ids, plain_ids, strict=True)]
    return Record(
        prompt=point.number,
        arm=arm.name,
        nodes=arm.nodes,
        temperature=point.sampling.temperature,
        seconds=statistics.median(seconds for (_, seconds), _ in runs),
        tokens=sum(map(len, ids)),
        token_ids=ids,
        stats=stats,
        group=point.group,
        questions=[(prompt.question, prompt.turn) for prompt in batch],
        plain=plain,
        right=[prompt.right(spec.tokenizer, row) for prompt, row in zip(batch, ids, strict=True)],
        same=same,
        regime=None if result.lossy is None else regime(spec, batch, ids, point.sampling),
        altered=None if result.lossy is None else result.lossy.altered,
        forecast=None if result.forecast is None else result.forecast.as_dict(),
        texts=point.texts,
    )


def timed(spec: Spec, call: Callable[[], Generated]) -> Run:
    """What a call gives and the seconds it takes; where something is compiled or captured on the way, it is called
    again."""
    for tries in range(_TRIES):
        start = time.perf_counter()
        result = call()
        if spec.target.device.type == "cuda":
            torch.cuda.synchronize(spec.target.device)
        took = time.perf_counter() - start
        if not result.stats.compiled or tries + 1 == _TRIES:
            break
    return result, took


@torch.inference_mode()
def regime(spec: Spec, batch: Sequence[Prompt], token_ids: list[list[int]], sampling: Sampling) -> Regime:
    """What kind of text the new tokens behind these prompts are; see `Regime`."""
    totals = torch.zeros(3, dtype=torch.float64)
    grams = [[tuple(row[i : i + 4]) for i in range(len(row) - 3)] for row in token_ids]
    for prompt, new in zip(batch, token_ids, strict=True):
        text = torch.tensor([prompt.ids + new], device=spec.target.device)
        logits = spec.target.model(input_ids=text, use_cache=False).logits[0, len(prompt.ids) - 1 : -1]
        for part, picked in zip(logits.split(_AT_ONCE), text[0, len(prompt.ids) :].split(_AT_ONCE), strict=True):
            log_p = torch.log_softmax(warp(part, sampling.warpers()).double(), -1)
            exact = torch.log_softmax(part.double() / (sampling.temperature or 1.0), -1)
            likely = exact.gather(1, picked[:, None]).sum(), torch.special.entr(log_p.exp()).sum()
            totals += torch.stack([*likely, log_p.amax(-1).exp().sum()]).cpu()
    log_prob, entropy, top1 = totals.tolist()
    return Regime(log_prob, entropy, top1, sum(map(len, grams)), sum(len(set(row)) for row in grams))
