"""Trees that a drafter grows from tensors alone, by one function that the engine runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from selfspec.core.contract import Context
from selfspec.core.memory import constant
from selfspec.core.tree import depths_of
from selfspec.drafters.base import Trained
from selfspec.drafters.parts.expansion import Growth, Ranking, ahead
from selfspec.drafters.parts.static_tree import Acceptance, static_tree

# Grows a tree from its root on: (the drafter, the growth, how scores are ranked, what else it is given)
Grower = Callable[..., tuple[Tensor, ...]]


def drafted_by(
    grower: Grower, drafter: Trained, context: Context, given: tuple[Any, ...], depth_cost: float = 0.0
) -> tuple[Tensor, ...]:
    """Run `grower` and return its tensors, batch dimension first: the tree as `Growth.best` gives it, then any others.
    given: the grower's further inputs; tensors among them have the batch dimension first; depth_cost: what one more
    depth costs, in target passes.

    Eager passes on a CPU expand nodes as long as their probability is high enough, at most `width` at each depth.
    Compiled code can not stop early, and stopping on a GPU would wait for it. There `expanded` fixes in advance how
    many nodes each depth expands, from the drafter's calibration, and `min_prob` does not count.
    """
    engine, calibration, config = context.target.engine, drafter.calibration[context.mode], cast(Any, drafter.config)
    widths, min_prob = config.width, config.min_prob
    noise = ahead(context, drafter.depth)
    if not engine.eager or context.roots.device.type != "cpu":
        acceptance = tuple(map(tuple, calibration.acceptance))
        widths, min_prob = expanded(acceptance, context.nodes, config.width, depth_cost), 0.0
    factors = constant(calibration.inverse_temperature, torch.get_default_dtype(), context.roots.device)
    ranking = Ranking(factors, None if noise is None else engine.padded(noise), context.temperature_tensor)
    padded = [engine.padded(part) if isinstance(part, Tensor) else part for part in given]
    shape = context.nodes, widths, min_prob, not drafter.prunable
    # A captured graph would not repeat what passes leave in layers with a state.
    whole = not (context.target.recurrent and context.roots.device.type == "cuda")
    inputs = grower, drafter, engine.padded(context.roots), shape, ranking, *padded
    result = engine.run(_grown, *inputs, compiled=whole)
    return tuple(part[: len(context.roots)] for part in result)


def _grown(
    grower: Grower, drafter: Trained, roots: Tensor, shape: tuple[Any, ...], ranking: Ranking, *given: Any
) -> tuple[Tensor, ...]:
    return grower(drafter, Growth(roots, *shape), ranking, *given)


@lru_cache(maxsize=256)
def expanded(acceptance: Acceptance, nodes: int, width: int, depth_cost: float = 0.0) -> tuple[int, ...]:
    """Nodes to expand at depth 1, 2, ...: one more than the static tree does, so that a tree grown for its context can
    choose; `width` at most, and none where the static tree expands none. The static tree has the depth with the most
    tokens per second, if all but drafting takes two plain passes."""

    def rate(depth: int) -> float:
        return sum(static_tree(acceptance[:depth], nodes)[2]) / (2 + depth * depth_cost)

    deepest = max(range(1, len(acceptance) + 1), key=rate, default=0)
    parents, _, _ = static_tree(acceptance[:deepest], nodes)
    depths = depths_of(parents)
    counts = [sum(depths[node] == depth for node in set(parents[1:])) for depth in range(1, max(depths))]
    return tuple(min(width, count + 1) for count in counts)
