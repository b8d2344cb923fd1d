"""Run the arms of a benchmark side by side: one process, alternated, after a warm-up, on the same prompts."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import GenerationConfig

from selfspec.api import Spec
from selfspec.budget.cost import pass_costs
from selfspec.core.lossy import Lossy
from selfspec.core.options import Options, as_seed, check, end_tokens
from selfspec.core.sampling import Sampling, warp
from selfspec.core.stats import Stats
from selfspec.data.questions import Answering
from selfspec.evaluation.arm_record import Record, Regime
from selfspec.evaluation.evaluation_prompts import Prompt
from selfspec.evaluation.metrics import DEFINITIONS, speedup
from selfspec.output import Generated
from selfspec.utils.checks import above_zero, all_known, at_least, not_empty
from selfspec.utils.files import Figures, append_text, read_jsonl, write_text
from selfspec.utils.progress import progress

ARMS = ("hf_generate", "autoregressive", "speculative")
_TRACED = 3  # calls, of which one is kept
_FEWEST = 8  # prompts before an interval over prompts is believed


@dataclass
class DecodeConfig(Answering):
    """temperature: 0 is greedy; top_k, top_p and min_p: warp as in transformers; seed: of all noise, from which every
    prompt gets its own; repeats: timed runs per prompt, of which the median counts; batch_size: prompts per call; arms:
    a subset of ARMS; until_width: stop once the 95% interval of the speedup is narrower than this share of it (such an
    interval is a little too narrow, since its width chose when to stop); metrics: definitions of others, reported
    beside ours, a subset of DEFINITIONS; answers: a file, in the run's folder unless it is absolute, that gets the
    answers in Spec-Bench's form; columns: all, for every column in the
    terminal, and functions of yours, package.module.function, each a column of the table from (point, records);
    traces: so many prompts of each group are decoded once more, plainly and speculatively, for traces.jsonl (see
    `selfspec.trace`); lossy: a rule that changes the output (see `selfspec.core.lossy.Lossy`), whose distance from the
    exact output is then measured."""

    prompts: int = 25
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    batch_size: int = 1
    repeats: int = 2
    arms: list[str] = field(default_factory=lambda: list(ARMS))
    until_width: float | None = None
    metrics: list[str] = field(default_factory=list)
    answers: str | None = None
    columns: list[str] = field(default_factory=list)
    traces: int = 0
    lossy: str | None = None

    def __post_init__(self) -> None:
        self.check("decode")
        as_seed(self.seed, "decode.seed")
        at_least(self, "decode", 1, "batch_size", "repeats")
        at_least(self, "decode", 0, "traces")
        not_empty(self, "decode", "arms", give=f"choose from {', '.join(ARMS)}")
        all_known(self, "decode", arms=ARMS, metrics=DEFINITIONS)
        above_zero(self, "decode", "until_width")
        if self.until_width is not None and not {"autoregressive", "speculative"} <= set(self.arms):
            raise ValueError("decode.until_width needs the arms autoregressive and speculative, whose ratio it watches")
        if self.batch_size > 1 and (self.answers is not None or "modelopt" in self.metrics):
            raise ValueError(
                f"decode.batch_size={self.batch_size}: decode.answers and the metric modelopt need 1, since each "
                "answer has its own time and passes there"
            )
        self.sampling()
        if self.lossy is not None:
            Lossy(self.lossy)

    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def arguments(self) -> Figures:
        """What generate is asked for, but for the seeds."""
        return {n: getattr(self, n) for n in ("max_new_tokens", "temperature", "top_k", "top_p", "min_p")}


def run_arms(
    spec: Spec, prompts: Sequence[Prompt], config: DecodeConfig, nodes: int | str, path: Path | None = None
) -> list[Record]:
    """All arms on all prompts, batches within a group; on a batch the arms run in a random order, anew in every
    repeat. path: JSON lines that each batch's records are appended to; batches that are there already are not run."""
    calls: dict[str, Callable[[list[list[int]], list[int]], Generated]] = {
        "hf_generate": lambda ids, seeds: hf_generate(spec, ids, config, seeds[0]),
        "autoregressive": lambda ids, seeds: spec.autoregressive(ids, **config.arguments(), seed=seeds),
        "speculative": lambda ids, seeds: spec.generate(
            ids, **config.arguments(), seed=seeds, nodes=nodes, lossy=config.lossy
        ),
    }
    check(spec.target, [prompt.ids for prompt in prompts], Options(config.max_new_tokens))  # before the first is timed
    arms = [arm for arm in ARMS if arm in config.arms]
    batches = _batches(prompts, config.batch_size)
    records = [] if path is None else _kept(path, batches, arms)
    batches = [(first, batch) for first, batch in batches if all(record.prompt != first for record in records)]
    if not batches or _narrow(records, config):
        return records
    if nodes == "auto" and "speculative" in arms:  # short calls would put it off
        for rows in {len(batch) for _, batch in batches}:
            pass_costs(spec.target, rows, config.temperature > 0)
    for arm in arms:
        calls[arm](*_given(batches[0][1]))
    bar = progress(batches, desc="decode")
    for first, batch in bar:
        order = Random(f"{config.seed} {first}")
        ids, seeds = _given(batch)
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        results: dict[str, Generated] = {}
        for _ in range(config.repeats):
            for arm in order.sample(arms, len(arms)):
                results[arm], took = timed(spec, partial(calls[arm], ids, seeds))
                seconds[arm].append(took)
        new = [_record(spec, first, arm, batch, statistics.median(seconds[arm]), results[arm], config) for arm in arms]
        records += new
        if path is not None:
            append_text(path, lines_of(new))
        if {"autoregressive", "speculative"} <= set(arms):
            interval = speedup(*_pair(records))
            bar.set_postfix(
                speedup=f"{interval['ratio']:.2f}", interval=f"{interval['low']:.2f} to {interval['high']:.2f}"
            )
        if _narrow(records, config):
            bar.close()
            break
    return records


def _pair(records: list[Record]) -> tuple[list[Record], list[Record]]:
    """Those of plain and of speculative decoding."""
    return [r for r in records if r.arm == "autoregressive"], [r for r in records if r.arm == "speculative"]


def _narrow(records: list[Record], config: DecodeConfig) -> bool:
    """Whether the interval is as narrow as `until_width` asks."""
    slow, fast = _pair(records)
    if config.until_width is None or len({(r.group, r.cluster) for r in slow}) < _FEWEST:
        return False
    interval = speedup(slow, fast)
    return interval["high"] - interval["low"] <= config.until_width * interval["ratio"]


def _kept(path: Path, batches: list[tuple[int, list[Prompt]]], arms: list[str]) -> list[Record]:
    """The records of an earlier run, of batches that all arms were run on. Raises ValueError where they are of other
    prompts."""
    records, asked = read_jsonl(path, Record.read, "record"), dict(batches)
    whole = Counter(record.prompt for record in records)
    records = [record for record in records if whole[record.prompt] == len(arms)]
    for record in records:
        if record.texts != [prompt.text for prompt in asked.get(record.prompt, ())]:
            raise ValueError(
                f"{path} holds records of another text for {record.questions[0][0] or record.prompt}: the questions or "
                "the code that makes them changed; choose another name="
            )
    if path.exists():  # what was torn is dropped for good
        write_text(path, lines_of(records))
    return records


def lines_of(records: Iterable[Record]) -> str:
    """Records as JSON lines."""
    return "".join(json.dumps(asdict(record)) + "\n" for record in records)


def write_traces(
    path: Path, spec: Spec, prompts: Sequence[Prompt], config: DecodeConfig, nodes: int | str, name: str
) -> None:
    """Traces of the first prompts of each group: of each prompt plain decoding, then speculative decoding, each the
    median of _TRACED calls by its time. name: of the drafter."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.group, []).append(prompt)
    lines = []
    for prompt in progress([p for group in groups.values() for p in group[: config.traces]], desc="traces"):
        arguments = {**config.arguments(), "seed": [prompt.seed], "trace": True}
        for call in (
            partial(spec.autoregressive, [prompt.ids], **arguments),
            partial(spec.generate, [prompt.ids], **arguments, nodes=nodes, lossy=config.lossy),
        ):
            results = sorted((timed(spec, call)[0] for _ in range(_TRACED)), key=lambda result: result.stats.seconds)
            result = results[_TRACED // 2]
            assert result.trace is not None
            header = result.trace.header
            header.update(group=prompt.group, question=prompt.question)
            if header["sources"]:
                header["drafter"] = name
                header["sources"] = [name] if len(header["sources"]) == 1 else header["sources"]
            lines.append(result.trace.lines())
    write_text(path, "".join(lines))


def timed(spec: Spec, call: Callable[[], Generated]) -> tuple[Generated, float]:
    """What a call gives and the seconds it takes; where something is compiled on the way, it is called again."""
    while True:
        start = time.perf_counter()
        result = call()
        _wait(spec)
        took = time.perf_counter() - start
        if not result.stats.compiled:
            return result, took


def _batches(prompts: Sequence[Prompt], size: int) -> list[tuple[int, list[Prompt]]]:
    """(number of the first prompt, prompts of one group), a batch of each group in turn."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.group, []).append(prompt)
    cut = [[group[i : i + size] for i in range(0, len(group), size)] for group in groups.values()]
    turns = [batches[i] for i in range(max(map(len, cut))) for batches in cut if i < len(batches)]
    firsts = [sum(map(len, turns[:i])) for i in range(len(turns))]
    return list(zip(firsts, turns, strict=True))


def _given(batch: list[Prompt]) -> tuple[list[list[int]], list[int]]:
    return [prompt.ids for prompt in batch], [prompt.seed for prompt in batch]


def _record(
    spec: Spec, first: int, arm: str, batch: list[Prompt], seconds: float, result: Generated, config: DecodeConfig
) -> Record:
    ids, exact = result.token_ids, arm == "speculative" and config.lossy is None
    return Record(
        prompt=first,
        arm=arm,
        seconds=seconds,
        tokens=sum(map(len, ids)),
        token_ids=ids,
        stats=result.stats if arm != "hf_generate" else None,
        group=batch[0].group,
        questions=[(prompt.question, prompt.turn) for prompt in batch],
        right=[prompt.right(spec.tokenizer, row) for prompt, row in zip(batch, ids, strict=True)],
        regime=None if exact else regime(spec, _given(batch)[0], ids, config.sampling()),
        altered=None if result.lossy is None else result.lossy.altered,
        forecast=None if result.forecast is None else result.forecast.as_dict(),
        texts=[prompt.text for prompt in batch],
    )


def host_overhead(spec: Spec, prompts: Sequence[Prompt], config: DecodeConfig, nodes: int | str) -> float:
    """Share of a call's time outside the functions that the engine runs, which are passes, drafts and noise: lists,
    n-grams, checks, the loop. Measured in runs of its own that no speedup counts. Not on a GPU, whose launches say
    nothing of their time: NaN."""

    def run(prompt: Prompt) -> Stats:
        return spec.generate([prompt.ids], **config.arguments(), seed=[prompt.seed], nodes=nodes).stats

    if spec.target.device.type == "cuda":
        return float("nan")
    run(prompts[0])
    busy = spec.target.engine.busy
    busy.clear()
    seconds = sum(run(prompt).seconds for prompt in prompts)
    return 1 - sum(busy.values()) / seconds


def _wait(spec: Spec) -> None:
    if spec.target.device.type == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def regime(spec: Spec, prompts: list[list[int]], token_ids: list[list[int]], sampling: Sampling) -> Regime:
    """What kind of text the new tokens are; see `Regime`."""
    totals = torch.zeros(3, dtype=torch.float64)
    grams = [[tuple(row[i : i + 4]) for i in range(len(row) - 3)] for row in token_ids]
    for prompt, new in zip(prompts, token_ids, strict=True):
        text = torch.tensor([prompt + new], device=spec.target.device)
        logits = spec.target.model(input_ids=text, use_cache=False).logits[0, len(prompt) - 1 : -1]
        log_p = torch.log_softmax(warp(logits, sampling.warpers()).double(), -1)
        exact = torch.log_softmax(logits.double() / (sampling.temperature or 1.0), -1)
        log_likelihood = exact.gather(1, text[0, len(prompt) :, None]).sum()
        totals += torch.stack([log_likelihood, torch.special.entr(log_p.exp()).sum(), log_p.amax(-1).exp().sum()]).cpu()
    log_prob, entropy, top1 = totals.tolist()
    return Regime(log_prob, entropy, top1, sum(map(len, grams)), sum(len(set(row)) for row in grams))


@contextmanager
def without_defaults(model: Any) -> Iterator[None]:
    """transformers' generate without the rules that the target's generation_config brings: a repetition penalty, top-p
    and top-k of its own, which the other arms do not apply either."""
    kept = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = kept


def hf_generate(spec: Spec, batch: list[list[int]], config: DecodeConfig, seed: int, **method: Any) -> Generated:
    """transformers' own generate on the same model; left-padded where lengths differ. method: further arguments of
    generate, which choose one of its own ways to decode faster."""
    model, width = spec.target.model, max(map(len, batch))
    pad = [width - len(row) for row in batch]
    ids = torch.tensor([[0] * n + row for n, row in zip(pad, batch, strict=True)], device=spec.target.device)
    mask = torch.tensor([[0] * n + [1] * (width - n) for n in pad], device=spec.target.device)
    eos = end_tokens(spec.target)
    sampled: Figures = {"do_sample": False}
    if config.temperature > 0:
        sampled = {"do_sample": True, "temperature": config.temperature, "top_k": config.top_k or 0}
        sampled |= {"top_p": config.top_p or 1.0, "min_p": config.min_p}
        torch.manual_seed(seed)
    room = spec.target.max_positions - width if spec.target.max_positions else config.max_new_tokens
    with without_defaults(model):
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=min(config.max_new_tokens, room),
            eos_token_id=sorted(eos) or None,
            pad_token_id=min(eos, default=0),
            **sampled,
            **method,
        )
    rows = []
    for row in out[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        rows.append(row[:end])
    return Generated(rows, [], [[False] * len(row) for row in rows], Stats())
