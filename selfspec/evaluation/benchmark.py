"""Run the arms of a benchmark side by side: one process, alternated, after a warm-up, on the same prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from tqdm.auto import tqdm

from selfspec.api import Generated, Spec
from selfspec.core.lossy import Lossy
from selfspec.core.options import Options, check, end_tokens
from selfspec.core.sampling import Sampling
from selfspec.core.stats import Stats
from selfspec.data.prompts import GROUPS
from selfspec.log import Figures

ARMS = ("hf_generate", "autoregressive", "speculative")


@dataclass
class DecodeConfig:
    """prompts: how many are cut from the held-out modules, or taken from prompt_file (JSON lines); group: of those cut,
    see `selfspec.data.prompts.GROUPS` (None: from anywhere); seed: of the first prompt, each further one has the next;
    repeats: timed runs per prompt, of which the median counts; batch_size: prompts per call; arms: a subset of ARMS;
    lossy: a rule that changes the output (see `selfspec.core.lossy.Lossy`), whose distance from the exact distribution
    is then measured."""

    prompts: int = 24
    prompt_tokens: int = 128
    group: str | None = None
    prompt_file: str | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    batch_size: int = 1
    repeats: int = 2
    arms: list[str] = field(default_factory=lambda: list(ARMS))
    lossy: str | None = None

    def __post_init__(self) -> None:
        for name in ("prompts", "prompt_tokens", "max_new_tokens", "batch_size", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"decode.{name}={getattr(self, name)} must be at least 1")
        if not self.arms:
            raise ValueError(f"decode.arms is empty; choose from {', '.join(ARMS)}")
        if unknown := set(self.arms) - set(ARMS):
            raise ValueError(f"decode.arms holds {sorted(unknown)}; known arms are {', '.join(ARMS)}")
        if self.group is not None and self.group not in GROUPS:
            raise ValueError(f"decode.group={self.group!r} must be one of {', '.join(GROUPS)}")
        Sampling(self.temperature, self.top_k, self.top_p, self.min_p)
        if self.lossy is not None:
            Lossy(self.lossy)

    def arguments(self, first: int, rows: int) -> Figures:
        """What generate is asked for, for prompts `first` to first + rows - 1, each with a seed of its own."""
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p")
        return {**{name: getattr(self, name) for name in names}, "seed": [self.seed + first + i for i in range(rows)]}


@dataclass
class Record:
    """One arm on one batch of prompts. seconds: median wall-clock of a whole call, prompt included. Where a lossy rule
    was asked for, altered: tokens it put in place of the target's pick; log_prob: of all tokens under the target.
    forecast: with nodes="auto", what was expected."""

    prompt: int
    arm: str
    seconds: float
    tokens: int
    token_ids: list[list[int]]
    stats: Stats | None
    altered: int | None = None
    log_prob: float | None = None
    forecast: dict[str, float] | None = None


def run_arms(spec: Spec, prompts: list[list[int]], config: DecodeConfig, nodes: int | str) -> list[Record]:
    """All arms on all prompts; within a prompt the arms take turns, and every repeat starts with another one."""

    def own(first: int, batch: list[list[int]]) -> Figures:
        return config.arguments(first, len(batch))

    calls: dict[str, Callable[[int, list[list[int]]], Generated]] = {
        "hf_generate": lambda first, batch: hf_generate(spec, batch, config, config.seed + first),
        "autoregressive": lambda first, batch: spec.autoregressive(batch, **own(first, batch)),
        "speculative": lambda first, batch: spec.generate(batch, **own(first, batch), nodes=nodes, lossy=config.lossy),
    }
    check(spec.target, prompts, Options(config.max_new_tokens))  # all of them, before the first is timed
    arms = [arm for arm in ARMS if arm in config.arms]
    for arm in arms:
        calls[arm](0, prompts[: config.batch_size])
    records = []
    bar = tqdm(range(0, len(prompts), config.batch_size), desc="decode", mininterval=1.0)
    totals = dict.fromkeys(arms, 0.0)
    for first in bar:
        batch = prompts[first : first + config.batch_size]
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        results: dict[str, Generated] = {}
        for repeat in range(config.repeats):
            turn = (first // config.batch_size + repeat) % len(arms)
            for arm in arms[turn:] + arms[:turn]:
                start = time.perf_counter()
                results[arm] = calls[arm](first, batch)
                _wait(spec)
                seconds[arm].append(time.perf_counter() - start)
        for arm in arms:
            ids = results[arm].token_ids
            stats = results[arm].stats if arm != "hf_generate" else None
            records.append(Record(first, arm, statistics.median(seconds[arm]), sum(map(len, ids)), ids, stats))
            totals[arm] += records[-1].seconds
            if (forecast := results[arm].forecast) is not None:
                records[-1].forecast = forecast.as_dict()
            if config.lossy is not None:
                records[-1].log_prob = log_prob(spec, batch, ids, config.temperature)
                if (rule := results[arm].lossy) is not None:
                    records[-1].altered = rule.altered
        if {"autoregressive", "speculative"} <= totals.keys():
            bar.set_postfix(speedup=f"{totals['autoregressive'] / totals['speculative']:.2f}")
    return records


def bookkeeping(spec: Spec, prompts: list[list[int]], config: DecodeConfig, nodes: int | str) -> float:
    """Share of a call's time that is neither a pass of the target nor a product of the drafter: trees, masks, noise,
    choices, the walk, the cache. Passes and products are calls of modules; they are told apart by hooks, in runs of
    their own that no speedup counts."""
    depth, start, inside = 0, 0.0, 0.0

    def enter(*_: object) -> None:
        nonlocal depth, start
        if depth == 0:
            _wait(spec)
            start = time.perf_counter()
        depth += 1

    def leave(*_: object) -> None:
        nonlocal depth, inside
        depth -= 1
        if depth == 0:
            _wait(spec)
            inside += time.perf_counter() - start

    def run(i: int, prompt: list[int]) -> Stats:
        return spec.generate([prompt], **config.arguments(i, 1), nodes=nodes).stats

    handles = [
        hook
        for module in _outermost(lambda: run(0, prompts[0]))
        for hook in (module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True))
    ]
    try:
        spent = [run(i, prompt) for i, prompt in enumerate(prompts)]
    finally:
        for handle in handles:
            handle.remove()
    return 1 - inside / sum(s.seconds for s in spent)


def _outermost(call: Callable[[], object]) -> list[nn.Module]:
    """The modules that a call runs, but for those inside others."""
    found: dict[int, nn.Module] = {}
    depth = [0]

    def enter(module: nn.Module, *_: object) -> None:
        if depth[0] == 0:
            found[id(module)] = module
        depth[0] += 1

    def leave(*_: object) -> None:
        depth[0] -= 1

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    return list(found.values())


def _wait(spec: Spec) -> None:
    if spec.target.device.type == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def log_prob(spec: Spec, prompts: list[list[int]], token_ids: list[list[int]], temperature: float) -> float:
    """Sum of the new tokens' log-probabilities under the target at this temperature (at 1 for greedy text)."""
    total = 0.0
    for prompt, new in zip(prompts, token_ids, strict=True):
        text = torch.tensor([prompt + new], device=spec.target.device)
        logits = spec.target.model(input_ids=text, use_cache=False).logits[0, len(prompt) - 1 : -1]
        log_p = torch.log_softmax(logits.double() / (temperature or 1.0), -1)
        total += float(log_p.gather(1, text[0, len(prompt) :, None]).sum())
    return total


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
