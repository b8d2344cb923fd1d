"""How the rows of a pass are shared out between nodes of the draft tree and mask slots."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from selfspec.core.memory import constant
from selfspec.core.verify import Kept
from selfspec.drafters.parts.expansion import Nodes
from selfspec.drafters.parts.static_tree import Acceptance, static_tree


@dataclass(frozen=True)
class Layout:
    """How the rows of a pass are shared out: nodes, of the draft tree, root included; slots: how many nodes have a
    first, second, ... mask slot behind them; drafted: tokens expected to be drafted rightly."""

    nodes: int
    slots: tuple[int, ...]
    drafted: float = 0.0


@lru_cache(maxsize=256)
def layout(acceptance: Acceptance, rows: int) -> Layout:
    """The layout that is expected to emit most, by acceptance rates.

    A pass emits, beside the bonus token, the probability that its walk gets to depth d, times the probability that the
    walk before ended at a node with a d-th mask slot behind it; summed over d. For every number of nodes the mask slots
    are given best first to the likeliest ends of walks; the best of all is taken.
    """
    best, chosen = 0.0, Layout(rows, (0,) * len(acceptance))
    every, _, chances = static_tree(acceptance, rows)  # of fewer nodes: its first ones
    for count in range(1, rows, max(1, rows // 64)):  # large layouts: every few counts, which differ little
        parents, probs = every[:count], chances[:count]
        depths, ends = [0], list(probs)
        for node in range(1, len(parents)):
            depths.append(depths[parents[node]] + 1)
            ends[parents[node]] -= probs[node]
        deep = [sum(p for p, d in zip(probs, depths, strict=True) if d == 1 + j) for j in range(len(acceptance))]
        gains = [(-end * deep[j], j) for end in ends for j in range(len(acceptance)) if end * deep[j] > 0]
        taken = sorted(gains)[: rows - count]
        if (worth := -sum(gain for gain, _ in taken)) > best:
            slots = tuple(sum(place == j for _, place in taken) for j in range(len(acceptance)))
            best, chosen = worth, Layout(count, slots, worth)
    return chosen


def with_mask_slots(vocab: int, nodes: Nodes, slots: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A tree with mask slots behind the nodes at which the walk ends most likely: behind slots[j] of them a j-th row.

    Returns tokens, parents and scores [B, N + R], and for each mask slot the node of its group, int64 [B, R]. Rows
    stand depth by depth, so that parents come first. Spare nodes, whose parent is -1, carry none while others are
    left.
    """
    tokens, parents, scores = nodes
    count = tokens.shape[1]
    drafted = (parents[:, 1:] >= 0).double()
    ends = scores.double().scatter_add(1, parents[:, 1:].clamp(min=0), -scores[:, 1:].double() * drafted)
    ends = torch.cat([ends[:, :1], ends[:, 1:] - (1 - drafted)], 1)
    order = ends.argsort(dim=1, descending=True, stable=True)
    parts, above, hosts, last, first = [tokens], [parents], [order[:, :0]], order, count
    for j, wanted in enumerate(slots):
        if not (width := min(wanted, count)):
            break
        parts.append(torch.full_like(order[:, :width], vocab + j))
        above.append(last[:, :width])
        hosts.append(order[:, :width])
        last = torch.arange(first, first + width, device=order.device).expand_as(order[:, :width])
        first += width
    spare = scores.new_zeros(len(scores), first - count)
    return torch.cat(parts, 1), torch.cat(above, 1), torch.cat([scores, spare], 1), torch.cat(hosts, 1)


def fitting(slots: tuple[int, ...], room: int) -> tuple[int, ...]:
    """As many mask slots as fit: of a layout with more, those of the last depths go first."""
    counts = []
    for count in slots:
        counts.append(min(count, room))
        room -= counts[-1]
    return tuple(counts)


def behind(kept: Kept, hosts: Tensor, slots: tuple[int, ...], count: int, masks: int) -> tuple[Tensor, Tensor]:
    """For each depth behind the last kept node, int64 [B, K] both: the row of the pass that forecasts it (-1: none),
    and which mask of its group that row is. It is the node's own slot, else that of its nearest ancestor whose group
    reaches so far. hosts, slots: of the tree of `count` nodes in that pass, as `with_mask_slots` gives and takes
    them."""
    widths = [min(wanted, count) for wanted in slots[: next((j for j, n in enumerate(slots) if not n), len(slots))]]
    firsts = [count + sum(widths[:j]) for j in range(len(widths))]
    device, more = hosts.device, [0] * (2 * masks - len(widths))
    width, first = (constant([*values, *more], torch.int64, device) for values in (widths, firsts))
    each = torch.arange(masks, device=device)
    # Nodes have the first mask slots of every depth in one order: a node's place in it says which it has.
    most = widths[0] if widths else 0
    place = hosts.new_full((len(hosts), count), count)
    place = place.scatter(1, hosts[:, :most], torch.arange(most, device=device).expand(len(hosts), -1))
    up = kept.lengths[:, None] - 1 - each  # of the last kept node, its parent, ... in the path
    at = place.gather(1, kept.path.gather(1, up.clamp(min=0))).where(up >= 0, count)  # [B, ancestor]
    reached = each[:, None] + each  # by an ancestor so far up, for each depth
    there = at[:, :, None] < width[reached]
    above = there.int().argmax(1, keepdim=True)  # [B, 1, depth]
    rows = torch.where(there, first[reached] + at[:, :, None], -1)
    return rows.gather(1, above)[:, 0], each + above[:, 0]
