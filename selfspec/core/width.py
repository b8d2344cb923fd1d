"""Passes of one width: how library kernels give a token the same bits in every pass of a call.

Products and attention of a library may round a row otherwise where more rows stand beside it, or where a key stands in
another slot. With a width every pass of a call, plain ones included, runs the same number of nodes over the same number
of cache entries; spare nodes fill it. And attention adds a node's keys in the order of their positions: those of its
last positions are gathered along its path, whatever slots they stand in. Whether a token then has the same bits is
tried with random trees (`same_bits`).
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from selfspec.utils.checks import integer

_NAME = "selfspec_by_paths"


class Paths(NamedTuple):
    """Where each node's last W positions stand, its own the last, in a pass of W nodes. slots: int64 [B, N, W], entries
    of the cache; hidden: bool [B, 1, N, W], those before position 0; front: bool [B, 1, N, S], entries that are not
    before these positions."""

    slots: Tensor
    hidden: Tensor
    front: Tensor

    @classmethod
    def of(cls, below: Tensor, depth: Tensor, lengths: Tensor, size: int) -> Paths:
        """below: bool [B, N, N], see `tree.ancestors`; depth: int64 [B, N]; lengths: int64 [B], kept entries, which
        stand at their positions; size: entries of the cache."""
        rows, nodes = depth.shape
        each, start = torch.arange(nodes, device=depth.device), lengths[:, None, None]
        place = torch.where(below, depth[:, None], nodes)  # of each node's ancestors, by depth
        spare = torch.zeros(rows, nodes, nodes + 1, dtype=torch.long, device=depth.device)
        above = spare.scatter(2, place, each.expand(rows, nodes, -1))
        at = start + depth[:, :, None] - (nodes - 1) + each  # [B, N, W], positions
        drafted = start + above.gather(2, (at - start).clamp(0, nodes - 1))
        slots = torch.where(at < start, at.clamp(min=0), drafted)
        front = torch.arange(size, device=depth.device) >= at[:, :, :1]
        return cls(slots, (at < 0)[:, None], front[:, None])


def by_paths(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree_paths: Paths | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' modules call it: query [B, heads, N, D], key and value [B, groups, S, D], an additive
    mask [B, 1, N, S]. Without `tree_paths` it is sdpa."""
    if tree_paths is None or attention_mask is None or more.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)
    (rows, heads, nodes, width), (groups, size) = query.shape, key.shape[1:3]
    slots, hidden, front = (part.to(query.device) for part in tree_paths)
    lowest = torch.finfo(attention_mask.dtype).min
    near = attention_mask.expand(rows, -1, -1, -1).gather(3, slots[:, None]).masked_fill(hidden, lowest)
    mask = torch.cat([attention_mask.masked_fill(front, lowest), near], 3)
    query = query * (width**-0.5 if scaling is None else scaling)  # before the product, which float16 might not hold
    grouped = query.reshape(rows, groups, heads // groups, nodes, width)
    far_scores = grouped.flatten(2, 3) @ key.transpose(2, 3)  # [B, G, heads of a group * N, S]
    along = slots.flatten(1)[:, None, :, None]
    keys, values = (
        part.gather(2, along.expand(-1, groups, -1, part.shape[3])).unflatten(2, (nodes, -1)) for part in (key, value)
    )
    near_scores = grouped.transpose(2, 3) @ keys.transpose(3, 4)  # [B, G, N, heads of a group, W]
    scores = torch.cat([far_scores.unflatten(2, (-1, nodes)), near_scores.transpose(2, 3)], 4)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores + mask[:, :, None]
    weights = scores.softmax(-1).to(value.dtype)
    out = (weights[..., :size].flatten(2, 3) @ value).unflatten(2, (-1, nodes))
    out = out + (weights[..., size:].transpose(2, 3) @ values).transpose(2, 3)
    return out.flatten(1, 2).transpose(1, 2).contiguous(), None


def refusal(model: PreTrainedModel, decoder: nn.Module, recurrent: bool) -> str:
    """Why passes of one width do not give a model's tokens the same bits; empty where they may. recurrent: whether some
    of its layers keep a state."""
    if recurrent:
        return "has layers that keep a state, which is replayed over other numbers of tokens"
    if any(name.endswith("experts") for name, _ in model.named_modules()):
        return "picks experts, each of which has another number of rows in every pass"
    if (attention := model.config.get_text_config()._attn_implementation) != "sdpa":
        return f"attends by {attention!r}, not by sdpa"
    takes = [inspect.signature(part.forward).parameters.values() for part in (model, decoder)]
    if not all(any(one.kind is one.VAR_KEYWORD for one in parameters) for parameters in takes):
        return "takes no keywords for its attention"
    return ""


def check_width(width: int, model: PreTrainedModel, decoder: nn.Module, recurrent: bool) -> None:
    """Raises ValueError for a width that is not from 2 to 256, and for a model that it does not serve; see
    `refusal`."""
    if not 2 <= integer("width", width) <= 256:
        raise ValueError(f"width={width} must lie between 2 and 256: nodes of every pass")
    if why := refusal(model, decoder, recurrent):
        raise ValueError(f"width={width}: {type(model).__name__} {why}; leave width out")


def attend_by_paths(model: PreTrainedModel) -> None:
    """A view of a model attends by paths from now on, where a pass hands them over."""
    AttentionInterface.register(_NAME, by_paths)
    for part in model.modules():
        if isinstance(config := getattr(part, "config", None), PreTrainedConfig):
            config._attn_implementation = _NAME
