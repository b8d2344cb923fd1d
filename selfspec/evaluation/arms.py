"""The arms of a comparison: drafters at each size, plain decoding, and what transformers itself offers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import nn
from transformers import CompileConfig

from selfspec.api import Spec
from selfspec.core.sampling import Sampling
from selfspec.evaluation.benchmark import DecodeConfig, hf_generate, regime, timed
from selfspec.utils.files import Figures

# Of transformers: its generate, the same over a static cache with compiled passes, and its three ways to draft
METHODS = ("hf_generate", "hf_static", "hf_prompt_lookup", "hf_early_exit", "hf_assisted")

Call = Callable[[list[int], float, int], Figures]  # of a prompt, a temperature and a seed


def ours(specs: dict[str, Spec], nodes: Sequence[int | str], max_new_tokens: int) -> dict[tuple[str, str], Call]:
    """Plain decoding and the drafters, by (name, nodes): what gives an arm's tokens, passes and times."""
    any_spec = next(iter(specs.values()))
    calls: dict[tuple[str, str], Call] = {("plain", "-"): partial(_plain, any_spec, max_new_tokens)}
    for name, spec in specs.items():
        for size in nodes:
            calls[name, str(size)] = partial(_drafted, spec, max_new_tokens, size)
    return calls


def theirs(
    spec: Spec,
    methods: Sequence[str],
    max_new_tokens: int,
    draft_model: nn.Module | None,
    exit_layer: int,
    lookup_tokens: int,
) -> dict[tuple[str, str], Call]:
    """transformers' own methods, as calls by (name, "-")."""
    everywhere = CompileConfig()
    everywhere._compile_all_devices = True  # type: ignore[assignment]  # the CPU too
    given: dict[str, Figures] = {
        "hf_generate": {},
        "hf_static": {"cache_implementation": "static", "compile_config": everywhere},
        "hf_prompt_lookup": {"prompt_lookup_num_tokens": lookup_tokens},
        "hf_early_exit": {"assistant_early_exit": exit_layer},
        "hf_assisted": {"assistant_model": draft_model},
    }
    return {(name, "-"): partial(_theirs, spec, max_new_tokens, given[name]) for name in methods}


def _plain(spec: Spec, max_new_tokens: int, prompt: list[int], temperature: float, seed: int) -> Figures:
    """Plain decoding as an arm. Its true speedup is 1; any difference is the noise of the comparison."""
    result, seconds = timed(spec, lambda: spec.autoregressive([prompt], max_new_tokens, temperature, seed=[seed]))
    ids = result.token_ids[0]
    text = asdict(regime(spec, [prompt], [ids], Sampling(temperature)))
    return {"ids": ids, "passes": result.stats.calls, "text": text, "seconds": seconds}


def _drafted(
    spec: Spec, max_new_tokens: int, nodes: int | str, prompt: list[int], temperature: float, seed: int
) -> Figures:
    call = partial(spec.generate, [prompt], max_new_tokens, temperature, seed=[seed], nodes=nodes)
    result, seconds = timed(spec, call)
    s = result.stats
    return {
        "ids": result.token_ids[0],
        "seconds": seconds,
        "passes": s.calls,
        "nodes_run": s.nodes,
        "decode": s.seconds - s.seconds_prefill,
        "draft": s.seconds_draft,
        "target": s.seconds_target,
        "other": s.seconds_other,
        "forecast": None if result.forecast is None else result.forecast.as_dict(),
    }


def _theirs(
    spec: Spec, max_new_tokens: int, method: dict[str, Any], prompt: list[int], temperature: float, seed: int
) -> Figures:
    """One of transformers' methods. Where it drafts, passes are the calls of the target's last layer; elsewhere there
    is one per token, and a hook would have the layer compiled anew."""
    passes = [0]

    def count(*_: object) -> None:
        passes[0] += 1

    options = DecodeConfig(max_new_tokens=max_new_tokens, temperature=temperature)
    drafts = any("assistant" in key or "lookup" in key for key in method)
    handle = spec.target.layers[-1].register_forward_hook(count) if drafts else None
    try:
        result = hf_generate(spec, [prompt], options, seed, **method)
    finally:
        if handle is not None:
            handle.remove()
    return {"ids": result.token_ids[0], "passes": passes[0] if drafts else len(result.token_ids[0])}
