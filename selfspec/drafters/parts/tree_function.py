"""Trees that a drafter grows from tensors alone: step by step in the eager engine, in one graph in a compiled one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from selfspec.core.contract import Context
from selfspec.drafters.base import Trained
from selfspec.drafters.parts.expansion import Growth, Ranking, ahead
from selfspec.drafters.parts.static_tree import Acceptance, static_tree
from selfspec.engine.engine import filled

# Grows a tree from its root on: (the drafter, the growth, how scores are ranked, what else it is given)
Grower = Callable[..., tuple[Tensor, ...]]


def drafted_by(
    grower: Grower,
    drafter: Trained,
    context: Context,
    given: tuple[Any, ...],
    width: int,
    min_prob: float,
    reserve: bool = False,
) -> tuple[Tensor, ...]:
    """The nodes of a tree, as `Growth.best` gives them, and what else the grower of a drafter gives, all with rows
    first. given: what the grower needs beside, tensors with rows first; the rest is of `Growth`.

    The eager engine expands nodes as long as they are worth it, `width` at each depth at most. A graph can not end
    early: how many nodes it expands at each depth is set in advance, by the static tree for the drafter's calibration.
    """
    engine, noise = context.target.engine, ahead(context, drafter.depth)
    calibration, device = drafter.calibration[context.mode], context.roots.device
    if engine is None:
        growth = Growth(context.roots, context.nodes, width, min_prob, reserve)
        return grower(drafter, growth, Ranking(calibration.inverse_temperature, noise, context.temperature), *given)
    widths = expanded(tuple(map(tuple, calibration.acceptance)), context.nodes, width)
    factors = torch.tensor(calibration.inverse_temperature, device=device)
    temperature = torch.tensor(context.temperature, device=device)
    ranking = (factors, None if noise is None else filled(noise), temperature)
    rows, padded = len(context.roots), [filled(part) if isinstance(part, Tensor) else part for part in given]
    made = (filled(context.roots), context.nodes, widths, reserve)
    return tuple(part[:rows] for part in engine.run(_graph, grower, drafter, *made, ranking, *padded))


def _graph(
    grower: Grower,
    drafter: Trained,
    roots: Tensor,
    nodes: int,
    widths: tuple[int, ...],
    reserve: bool,
    ranking: tuple[Tensor, Tensor | None, Tensor],
    *given: Any,
) -> tuple[Tensor, ...]:
    return grower(drafter, Growth(roots, nodes, widths, reserve=reserve), Ranking(*ranking), *given)


@lru_cache(maxsize=256)
def expanded(acceptance: Acceptance, nodes: int, width: int) -> tuple[int, ...]:
    """Nodes to expand at depth 1, 2, ...: one more than the static tree does, so that a tree grown for its context can
    choose; `width` at most, and none where the static tree expands none."""
    parents, _, _ = static_tree(acceptance, nodes)
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    counts = [sum(depths[node] == depth for node in set(parents[1:])) for depth in range(1, max(depths))]
    return tuple(min(width, count + 1) for count in counts)
