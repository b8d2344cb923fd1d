"""Run the arms of a benchmark side by side: one process, alternated, after a warm-up, on the same prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm.auto import tqdm

from selfspec.evaluation.prompts import KINDS
from selfspec.lossy import Lossy
from selfspec.options import Options, check
from selfspec.spec import Generated, Spec, end_tokens
from selfspec.stats import Stats

ARMS = ("hf_generate", "autoregressive", "speculative")


@dataclass
class DecodeConfig:
    """prompts: how many are cut from the held-out modules, or taken from prompt_file (JSON lines); kind: of those cut,
    see `prompts.KINDS` (None: from anywhere); repeats: timed runs
    per prompt, of which the median counts; batch_size: prompts per call; arms: a subset of ARMS; lossy: a rule that
    changes the output (see `selfspec.lossy.Lossy`), whose distance from the exact distribution is then measured."""

    prompts: int = 24
    prompt_tokens: int = 128
    kind: str | None = None
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
        if self.kind is not None and self.kind not in KINDS:
            raise ValueError(f"decode.kind={self.kind!r} must be one of {', '.join(KINDS)}")
        if self.lossy is not None:
            Lossy(self.lossy)

    def options(self) -> dict[str, Any]:
        """What generate is asked for."""
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
        return {name: getattr(self, name) for name in names}


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
    options = config.options()
    calls: dict[str, Callable[[list[list[int]]], Generated]] = {
        "hf_generate": lambda batch: hf_generate(spec, batch, config),
        "autoregressive": lambda batch: spec.autoregressive(batch, **options),
        "speculative": lambda batch: spec.generate(batch, **options, nodes=nodes, lossy=config.lossy),
    }
    check(spec.target, prompts, Options(config.max_new_tokens))  # all of them, before the first is timed
    arms = [arm for arm in ARMS if arm in config.arms]
    for arm in arms:
        calls[arm](prompts[: config.batch_size])
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
                results[arm] = calls[arm](batch)
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


def bookkeeping(spec: Spec, prompts: list[list[int]], options: dict[str, Any], nodes: int | str) -> float:
    """Share of a step's time that is neither the target's forward nor the drafter's products: trees, masks, noise,
    choices, the walk, the cache. Told apart by hooks, in runs of their own that no speedup counts."""
    clock = {"start": 0.0, "inside": 0.0}

    def enter(*_: Any) -> None:
        _wait(spec)
        clock["start"] = time.perf_counter()

    def leave(*_: Any) -> None:
        _wait(spec)
        clock["inside"] += time.perf_counter() - clock["start"]

    handles = [
        hook
        for module in (spec.target.decoder, spec.target.lm_head, *spec.drafter.products())
        for hook in (module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True))
    ]
    try:
        spent = [spec.generate([prompt], **options, nodes=nodes).stats for prompt in prompts]
    finally:
        for handle in handles:
            handle.remove()
    return 1 - clock["inside"] / sum(s.seconds - s.seconds_prefill for s in spent)


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


def hf_generate(spec: Spec, batch: list[list[int]], config: DecodeConfig, **method: Any) -> Generated:
    """transformers' own generate on the same model; left-padded where lengths differ. method: further arguments of
    generate, which choose one of its own ways to decode faster."""
    model, width = spec.target.model, max(map(len, batch))
    pad = [width - len(row) for row in batch]
    ids = torch.tensor([[0] * n + row for n, row in zip(pad, batch, strict=True)], device=spec.target.device)
    mask = torch.tensor([[0] * n + [1] * (width - n) for n in pad], device=spec.target.device)
    eos = end_tokens(spec.target)
    sampled: dict[str, Any] = {"do_sample": False}
    if config.temperature > 0:
        sampled = {"do_sample": True, "temperature": config.temperature, "top_k": config.top_k or 0}
        sampled |= {"top_p": config.top_p or 1.0, "min_p": config.min_p}
        torch.manual_seed(config.seed)
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
