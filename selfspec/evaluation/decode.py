"""A benchmark point: a drafter at one size and one sampling, beside plain decoding and transformers' generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from operator import attrgetter, mul
from pathlib import Path

from selfspec.api import Spec
from selfspec.core.lossy import Lossy
from selfspec.core.options import Options, as_seed, check
from selfspec.core.sampling import Sampling
from selfspec.core.stats import Stats
from selfspec.data.questions import Answering
from selfspec.evaluation.arms import Arm, Prompt, decoded, of_transformers
from selfspec.evaluation.figures import (
    PARTS,
    against,
    decode_speedup,
    drift,
    forecast,
    grouped,
    over_plain,
    tau,
    texts,
    total,
)
from selfspec.evaluation.measure import measure, points_of, timed
from selfspec.evaluation.records import Record
from selfspec.utils.checks import all_known, at_least, not_empty
from selfspec.utils.files import Figures, mean, write_text
from selfspec.utils.progress import progress

DEFINITIONS = ("vllm", "spec_bench", "specforge", "modelopt")  # of acceptance, others'; see `defined`
ARMS = ("hf_generate", "autoregressive", "speculative")
_TRACED = 3  # calls, of which one is kept


@dataclass
class DecodeConfig(Answering):
    """temperature: 0 is greedy; top_k, top_p and min_p: warp as in transformers; seed: of all noise, from which every
    prompt gets its own; repeats: timed runs per prompt and arm, of which the median counts; batch_size: prompts per
    call; arms: what is timed; metrics: acceptance by other projects' definitions too: vllm, spec_bench, specforge,
    modelopt; answers: a file, in the run's folder unless it is absolute, that gets the answers in Spec-Bench's form;
    columns: all, for every column in the terminal, and functions of yours, package.module.function, each a column of
    the table from (point, records); traces: so many prompts of each group are decoded once more, plainly and
    speculatively, for traces.jsonl (see `selfspec.trace`); lossy: a rule that changes the output (see
    `selfspec.core.lossy.Lossy`), whose distance from the exact output is then measured."""

    prompts: int = 25
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    batch_size: int = 1
    repeats: int = 2
    arms: list[str] = field(default_factory=lambda: list(ARMS))
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


def run_benchmark(
    spec: Spec, prompts: Sequence[Prompt], config: DecodeConfig, nodes: int | str, path: Path | None = None
) -> list[Record]:
    """All arms on all prompts; see `selfspec.evaluation.measure`."""
    check(spec.target, [prompt.ids for prompt in prompts], Options(config.max_new_tokens))  # before the first is timed
    most, points = config.max_new_tokens, points_of(prompts, [config.sampling()], config.batch_size)
    if len(points[0].batch) < config.batch_size:
        print(
            f"warning: decode.batch_size={config.batch_size}, but there are {len(prompts)} prompts: one batch of them"
        )
    elif left := len(prompts) - len(points) * config.batch_size:
        print(f"{left} of {len(prompts)} prompts are left out, which fill no batch of {config.batch_size}")
    calls = {
        Arm("autoregressive"): decoded(spec, most),
        Arm("hf_generate"): of_transformers(spec, most)["hf_generate"],
        Arm("speculative", str(nodes)): decoded(spec, most, nodes, config.lossy),
    }
    return measure(
        spec,
        {arm: call for arm, call in calls.items() if arm.name in config.arms},
        Arm("autoregressive") if "autoregressive" in config.arms else None,
        points,
        path,
        seed=config.seed,
        repeats=config.repeats,
        others=False,
    )


def write_traces(
    path: Path, spec: Spec, prompts: Sequence[Prompt], config: DecodeConfig, nodes: int | str, name: str
) -> None:
    """Traces of the first prompts of each group: of each prompt plain decoding, then speculative decoding, each the
    median of _TRACED calls by its time. name: of the drafter."""
    groups, lines = grouped(prompts, lambda prompt: prompt.group).values(), []
    for prompt in progress([p for group in groups for p in group[: config.traces]], desc="traces"):
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


# -- figures of a point


def summarize(records: list[Record]) -> Figures:
    """All figures of one benchmark point, as plain data: over all prompts, and by group."""
    arms = grouped(records, attrgetter("arm"))
    summary: Figures = {"arms": {arm: texts(rows) for arm, rows in arms.items()}, "speedup": {}, "identical": {}}
    if "autoregressive" in arms:
        summary["drift"] = drift(arms["autoregressive"])
    if fast := arms.get("speculative"):
        summary["speculative"] = _speculative(fast)
        if fast[0].plain is not None:
            summary["speculative"]["decode"] = decode_speedup(fast)
            if all(len(r.token_ids) == 1 for r in fast):  # a batch takes as many passes as its slowest row
                # plain steps that one pass, its draft included, takes: speedup is tau over this
                steps = sum(r.stats.calls for r in arms["autoregressive"])
                step = mean(1000 * sum(r.plain.decode for r in fast if r.plain), steps)
                summary["speculative"]["cost"] = summary["speculative"]["milliseconds_per_pass"] / step
            summary["speedup"]["autoregressive"] = over_plain(fast)
        if fast[0].altered is not None:
            summary["lossy"] = _lossy(arms)
        for slow in ("autoregressive", "hf_generate"):
            if slow in arms:
                others = {record.point: record for record in arms[slow]}
                pairs = [(a, b) for r in fast for a, b in zip(r.token_ids, others[r.point].token_ids, strict=True)]
                summary["identical"][slow] = {"rows": sum(a == b for a, b in pairs), "of": len(pairs)}
        if "hf_generate" in arms:
            summary["speedup"]["hf_generate"] = against(fast, arms["hf_generate"])
    groups = grouped(records, attrgetter("group"))
    summary["groups"] = {group: _group(grouped(rows, attrgetter("arm"))) for group, rows in groups.items()}
    return summary


def _group(arms: dict[str, list[Record]]) -> Figures:
    figures: Figures = {"arms": {arm: texts(rows) for arm, rows in arms.items()}}
    if fast := arms.get("speculative"):
        figures["acceptance_length"] = tau(fast)[0]
        figures |= {} if fast[0].plain is None else {"speedup": over_plain(fast)}
    return figures


def _lossy(arms: dict[str, list[Record]]) -> dict[str, float]:
    """altered: share of tokens that are not the target's own pick, a bound of the next token's total variation
    distance; log_prob: per token under the target, beside that of the exact output."""
    figures = {
        f"log_prob_{arm}": mean(sum(r.regime.log_prob for r in rows if r.regime), sum(r.tokens for r in rows))
        for arm, rows in arms.items()
        if all(r.regime for r in rows)
    }
    rows = arms["speculative"]
    return {"altered": mean(sum(r.altered or 0 for r in rows), sum(r.tokens for r in rows)), **figures}


def _speculative(rows: list[Record]) -> Figures:
    pooled = total([r.stats for r in rows])
    parts = {part: getattr(pooled, f"seconds_{part}") for part in ("prefill", *PARTS)}
    step = pooled.seconds - pooled.seconds_prefill
    return {
        **forecast(rows),
        "prompts": sum(len(r.token_ids) for r in rows),
        "passes": pooled.passes,
        "acceptance_length": pooled.acceptance_length,
        "full_acceptance": pooled.accepted_per_depth,
        "conditional_acceptance": pooled.conditional_per_depth,
        "seconds": parts,
        "share_of_step": {name: mean(parts[name], step) for name in PARTS},
        "milliseconds_per_pass": mean(1000 * step, pooled.calls),
    }


def defined(name: str, records: Sequence[Record], accuracy: list[float]) -> Figures:
    """Figures of a speculative arm by one of DEFINITIONS. accuracy: how often the drafter's first choice at each depth
    is right behind drafts that were right, by its calibration (empty where that was not measured).

    vllm: its counters, one token and those accepted per draft (passes in which nothing was drafted do not count), and
    the share of drafts accepted up to each position.
    spec_bench: evaluation/speed.py, the mean over the tokens of all steps. specforge: its simulated length, one token
    and the running products of the accuracy. modelopt: specdec_bench, the mean over requests of tokens per pass.
    """
    stats = [record.stats for record in records]
    pooled = total(stats)
    if name == "vllm":
        # Records of an older version do not say how many there were: all passes
        drafts = sum(s.drafts or (s.passes if sum(s.accepted) else 0) for s in stats)
        rates = [mean(count, drafts) for count in pooled.accepted]
        return {"mean_acceptance_length": 1 + sum(rates), "per_position": rates}
    if name == "spec_bench":
        return {"mean_accepted_tokens": mean(sum(pooled.lengths), len(pooled.lengths))}
    if name == "specforge":
        return {"simulated_length": 1 + sum(accumulate(accuracy, mul)) if accuracy else None}
    return {"mean_over_requests": mean(sum(s.acceptance_length for s in stats), len(stats))}
