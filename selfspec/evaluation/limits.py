"""What limits a pass: this machine's bandwidth and peak, what passes cost in either engine, and what each drafter can
bring on top of that, from its measured acceptance and the time of its draft."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from selfspec.budget.predict import fastest, speedup
from selfspec.core.generate import Result, speculative_steps, with_room
from selfspec.core.options import Options
from selfspec.core.quantized import Int8Linear
from selfspec.core.rows import MAX_NODES
from selfspec.core.sampling import Sampling
from selfspec.core.stats import clock
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain
from selfspec.core.verify import WalkNoise, read_walk
from selfspec.drafters.base import Drafter, Trained
from selfspec.drafters.parts.static_tree import expected_length
from selfspec.utils.checks import at_least, not_empty
from selfspec.utils.errors import one_line
from selfspec.utils.files import Figures
from selfspec.utils.progress import progress

_CONTEXT = 128  # kept tokens behind which passes are timed
_STEPS = 16  # tokens of a call in which drafts are timed
_BLOCK = 8  # passes of one kind in a row, the first two of which are not timed
_PLAUSIBLE = 0.8  # of one node's time that a pass over more of them takes at least
_EXPERTS = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"  # of a config: how many there are
_TAKEN = "num_experts_per_tok", "num_experts_per_token", "moe_topk"  # and how many a token takes
_SHORTEST = 0.02  # seconds that one measurement of the machine takes at least


@dataclass
class LimitsConfig:
    """sizes: nodes of a pass; rounds: times that each pass is timed, of which the median counts; drafters: whose
    acceptance and drafts are taken; temperatures: for which speedups are expected; config: a config.json, or a folder
    or hub id with one, for a target of random weights, on which the drafters' acceptance is a forecast."""

    sizes: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64])
    rounds: int = 15
    drafters: list[str] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    config: str | None = None

    def __post_init__(self) -> None:
        if 1 not in self.sizes or not all(1 <= size <= MAX_NODES for size in self.sizes):
            raise ValueError(
                f"limits.sizes={self.sizes} must hold 1, to which costs are related, from 1 to at most {MAX_NODES}"
            )
        self.sizes = sorted(self.sizes)
        if self.drafters and self.sizes[-1] == 1:
            raise ValueError("limits.sizes=[1] leaves nothing for limits.drafters to draft; give a larger size too")
        at_least(self, "limits", 3, "rounds")
        not_empty(self, "limits", "temperatures", give="give at least one, such as [0]")
        for temperature in self.temperatures:
            Sampling(temperature)


def random_model(config: str, dtype: torch.dtype, device: str | None) -> PreTrainedModel:
    """A target of random weights. config: a config.json, or a folder or hub id with one. Raises ValueError where there
    is none, or it is of no causal LM."""
    if config.endswith(".json") and not Path(config).is_file():
        raise ValueError(f"limits.config={config!r} is not a file")
    try:
        model_config = AutoConfig.from_pretrained(config)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"limits.config={config!r} is no config.json, and no folder or hub id with one: {one_line(error)}"
        ) from error
    if type(model_config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"limits.config={config!r}: a model of type {model_config.model_type!r} is no causal LM")
    torch.manual_seed(0)
    with torch.device(device or "cpu"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(model_config, dtype=dtype)
    return model.eval()


def _rate(work: Callable[[], object], amount: float, device: torch.device) -> float:
    """`amount` per second at which `work` goes, the best of several stretches."""
    work()
    best, times = 0.0, 1
    for _ in range(6):
        start = clock(device)
        for _ in range(times):
            work()
        took = clock(device) - start
        best = max(best, times * amount / took)
        times = max(times, round(times * _SHORTEST / took))
    return best


def bandwidth(size: int, device: torch.device) -> float:
    """Bytes per second at which `size` bytes are read over and over, as weights are in decoding."""
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    return _rate(buffer.sum, size, device)


def peak(dtype: torch.dtype, device: torch.device, width: int = 1024, int8: bool = False) -> float:
    """Products and additions per second of square matrices of this dtype, or on a CPU of float32 where that is faster:
    kernels may convert. int8: whether there are products in 8 bits."""
    fastest_rate = 0.0
    for of in {dtype, torch.float32 if device.type == "cpu" else dtype, *([torch.int8] if int8 else [])}:
        a, product = torch.ones(width, width, dtype=of, device=device), torch._int_mm if of == torch.int8 else torch.mm
        fastest_rate = max(fastest_rate, _rate(partial(product, a, a), 2 * width**3, device))
    return fastest_rate


def weights_of(target: Target) -> tuple[int, int]:
    """Bytes of weights that a pass reads at least, and products and additions for one node; of experts, those that one
    token takes."""
    table, read = target.model.get_input_embeddings().weight, dict[int, tuple[torch.Tensor, float]]()
    config = target.model.config.get_text_config()
    said = {name: value for name in (*_EXPERTS, *_TAKEN) if type(value := getattr(config, name, None)) is int}
    counts, takes = ([said.get(name, 0) for name in names] for names in (_EXPERTS, _TAKEN))
    for name, p in target.model.named_parameters():
        # Experts' weights [experts, ...] and biases [experts, outputs]; a router has one row for each of them too
        named, counted = "experts." in name and "router" not in name, p.ndim > 1 and len(p) in counts
        experts = (named and counted) or (p.ndim == 3 and (named or counted))
        if p is not table or p is target.lm_head.weight:
            read[id(p)] = p, min(1.0, max(takes) / len(p)) if experts and any(takes) else 1.0
    size = sum(p.numel() * p.element_size() * share for p, share in read.values())
    for part in target.model.modules():
        if isinstance(part, Int8Linear):
            size += sum(b.numel() * b.element_size() for b in (part.panels, part.scales)) - 2 * part.weight.numel()
    return round(size), round(2 * sum(p.numel() * share for p, share in read.values() if p.ndim > 1))


def _context(target: Target, ahead: int) -> int:
    """Kept tokens that leave room for so many more. Raises ValueError where none do."""
    most = target.max_positions
    if most is not None and most <= ahead:
        raise ValueError(
            f"target {target.name!r} has {most} positions, too few for {ahead} nodes; give smaller limits.sizes"
        )
    return _CONTEXT if most is None else min(_CONTEXT, most - ahead)


def _tree(nodes: int, rows: int, target: Target) -> DraftTree:
    """Arbitrary tokens as a tree, the same in every row."""
    rng = random.Random(nodes)
    parents = [-1, *(rng.randrange(max(0, i - 6), i) for i in range(1, nodes))]
    tokens = [rng.randrange(target.vocab_size) for _ in range(nodes)]
    return DraftTree(*torch.tensor([[tokens] * rows, [parents] * rows], device=target.device))


@torch.inference_mode()
def pass_seconds(
    targets: dict[str, Target], sizes: Sequence[int], rounds: int, rows: int = 1
) -> dict[str, dict[int, float]]:
    """Median seconds of a greedy pass over trees of each size in each row, its walk included, on each target in
    turn."""
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    for name, target in targets.items():
        context = _context(target, max(sizes))
        cache = target.cache(rows, context + 2 * max(sizes))
        target.forward(chain(_tree(context, rows, target).tokens), cache, False, prompt=True)
        cache.commit([list(range(context))] * rows)
        for n in sizes:
            tree = _tree(n, rows, target)

            def run(target: Target = target, cache: Any = cache, tree: DraftTree = tree) -> object:
                walked = target.forward(tree, cache, noise=WalkNoise()).walked
                assert walked is not None
                return read_walk(walked)

            run()  # compiles
            calls[name, n] = run
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for _ in progress(range(rounds), desc="passes", leave=False):
        for key, call in calls.items():
            for i in range(_BLOCK):  # as in decoding: after passes like it, not after another engine's
                start = time.perf_counter()
                with_room(call)
                if i > 1:
                    seconds[key].append(time.perf_counter() - start)
    return {name: {n: statistics.median(seconds[name, n]) for n in sizes} for name in targets}


def step_seconds(
    target: Target, drafter: Drafter, temperature: float, nodes: int, rounds: int
) -> tuple[float, float, float, float]:
    """Median seconds of a draft, of what is behind it in a step (pass, walk, commit, and what the drafter observes), of
    a whole step, and of the host overhead in it (outside the engine's functions), over short calls. The first step of a
    call does not count: its draft reads the prompt."""
    rng = random.Random(1)
    prompt = [rng.randrange(target.vocab_size) for _ in range(_context(target, _STEPS + nodes))]
    steps, counted, seed = list[tuple[float, float, float, float]](), 0, 0
    while counted < rounds or (not steps and counted < 4 * rounds):
        result, options = Result.of(1), Options(_STEPS, Sampling(temperature), seed)
        stats = result.stats

        def marks(result: Result = result, options: Options = options) -> list[tuple[float, float, float]]:
            stats, busy = result.stats, target.engine.busy
            made = speculative_steps(target, [prompt], options, drafter, nodes, result)
            return [(stats.seconds_draft, stats.seconds_target + stats.seconds_other, sum(busy.values())) for _ in made]

        after = with_room(marks)
        if seed and (not stats.compiled or seed > 4 * rounds):  # the first call warms up
            counted += 1
            for one, two in pairwise(after):
                draft, behind, busy = (later - earlier for earlier, later in zip(one, two, strict=True))
                steps.append((draft, behind, draft + behind, draft + behind - busy))
        seed += 1
    if not steps:
        raise ValueError(
            f"every call of {_STEPS} tokens was one step of {nodes} nodes, too few to measure; leave it out"
        )
    drafts, passes, wholes, others = (statistics.median(part) for part in zip(*steps, strict=True))
    return drafts, passes, wholes, others


def measure_limits(
    model: PreTrainedModel, drafters: dict[str, Callable[[Target], Drafter]], config: LimitsConfig
) -> Figures:
    """Everything `eval/limits.py` tells. drafters: by name, how each is made for a target; those that are not trained
    have no table of acceptance by depth and are left out of the forecast, with a line."""
    eager = Target(model)
    _context(eager, _STEPS + max(config.sizes))  # refused before anything is measured
    fast = Target(model, returns=eager.returns)
    fast.use_engine("compiled")
    targets = {"eager": eager, "compiled": fast}
    size, products = weights_of(eager)
    machine = {"bandwidth": bandwidth(size, eager.device), "peak": peak(eager.dtype, eager.device, int8=eager.int8)}
    costs = pass_seconds(targets, config.sizes, config.rounds)
    rows = []
    for n in config.sizes:
        limit = fastest(n, size, products, **machine)
        measured = {engine: costs[engine][n] for engine in targets}
        rows.append({"nodes": n, "limit": limit, **measured})
    forecasts = []
    for name, make in drafters.items():
        for engine, target in targets.items():
            drafter = make(target)
            if not isinstance(drafter, Trained):
                if target is eager:
                    print(f"limits.drafters: {name} has no table of acceptance by depth, so nothing is expected of it")
                continue
            for temperature in config.temperatures:
                mode = "sampled" if temperature > 0 else "greedy"
                best, behind = 0.0, 0
                for n in sorted(n for n in config.sizes if n > 1):
                    if behind == 2:  # two sizes brought less than a smaller one: larger ones will not bring more
                        break
                    draft, one, step, other = step_seconds(target, drafter, temperature, n, config.rounds)
                    tau = expected_length(drafter.session(target, 1), drafter.calibration[mode].acceptance, mode, n)
                    if one < _PLAUSIBLE * costs[engine][1]:
                        text = f"{1000 * one:.2f} ms with {n} nodes, {1000 * costs[engine][1]:.2f} with one"
                        print(f"warning: passes took {text}: other programs ran meanwhile, so measure again")
                    ratio = speedup(tau, min(one, costs[engine][1]), one, draft)
                    best, behind = max(best, ratio), 0 if ratio > best else behind + 1
                    forecasts.append(
                        {"drafter": name, "engine": engine, "T": temperature, "nodes": n, "tau": tau, "draft": draft}
                        | {"pass": one, "step": step, "other": other, "speedup": ratio}
                        | {"calibrated": drafter.calibrated}
                    )
    figures = {"bytes": size, "products": products, **machine, "passes": rows, "forecasts": forecasts}
    figures |= {"failed": fast.engine.failed, "kernels": fast.engine.kernels}
    return figures | {"exact": fast.exact, "varying": fast.engine.varying}
