"""Mamba1's selective scan (arXiv:2312.00752): Mamba, Falcon-Mamba, Jamba, Zamba. Each entry of a channel's state has a
decay of its own, which no product of matrices can express: nodes are computed one after another, each from its
parent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec.core.recurrent.recurrence import Recurrence, Written, advanced, chain_below

# Transformers' modules give their scan no state. The wrapper around a module sets the layer's recurrences here before
# the module runs; each scan takes the next.
pending = threading.local()


def mamba_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Any:
    """Takes the place of transformers' function of this name: hidden_states and dt [B, C, n], A [C, K], B and C [B, K,
    n]."""
    scans: Iterator[Recurrence] = pending.scans
    recurrence = next(scans)
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    dt = (F.softplus(dt) if delta_softplus else dt).to(dtype)
    with torch.autocast(dt.device.type, enabled=False):  # sums of decays do not bear bfloat16
        x, keys, queries, rates = (part.to(dtype) for part in (hidden_states, B, C, A))
        out, last = _scan(recurrence, x, dt, keys.mT, queries.mT, rates)
    out = out if D is None else out + x * D[None, :, None]
    out = out if z is None else out * F.silu(z)
    return (out, last) if return_last_state else out


def _scan(
    recurrence: Recurrence, x: Tensor, dt: Tensor, keys: Tensor, queries: Tensor, rates: Tensor
) -> tuple[Tensor, Tensor]:
    """What nodes read, [B, C, n], and the state [B, C, K] of the last of them; x, dt: [B, C, n]; keys, queries: [B, n,
    K]; rates: [C, K]. As heads of one value each, whose keys are shared: an entry decays by its rate, times dt."""
    values, earlier, start = (x * dt)[..., None], recurrence.written, recurrence.state  # state: [B, C, K, 1]
    before = x.new_zeros(*x.shape[:2], rates.shape[1]) if start is None else start[..., 0]
    is_chain = recurrence.below is None and earlier is None
    below = None if is_chain else _seen(recurrence, values)
    if below is None:
        sums = dt.cumsum(2)
    else:
        times = dt if earlier is None else torch.cat([earlier.decays, dt], 2)
        sums = times @ below.mT.to(times.dtype)
    kept = 0 if below is None else below.shape[2] - below.shape[1]
    above = None if below is None else _parents(below)
    restarts = above is not None and earlier is None and start is None  # whole texts, one behind another in a row
    states: list[Tensor] = []  # not list[Tensor](), which can not be compiled
    outs: list[Tensor] = []
    for node in range(dt.shape[2]):
        state = states[-1] if states else before
        if restarts and above is not None:
            state = torch.where((above[:, node] < 0)[:, None, None], before, state)
        elif below is not None and above is not None:
            first = before
            if earlier is not None:  # the state behind the earlier nodes among its ancestors
                order = below[:, node, :kept].to(torch.int8).argsort(dim=1, descending=True, stable=True)
                first = advanced(start, earlier, order, below[:, node, :kept].sum(1))[..., 0]
            at = (above[:, node] - kept + 1).clamp(min=0)  # 0: its parent is not a node of this pass
            choices = torch.stack([first, *states], 2)
            state = choices.gather(2, at[:, None, None, None].expand(-1, x.shape[1], 1, choices.shape[3]))[:, :, 0]
        state = state * (dt[:, :, node, None] * rates).exp() + values[:, :, node] * keys[:, None, node]
        states = [state] if below is None or restarts else [*states, state]
        outs.append((state * queries[:, None, node]).sum(-1))
    recurrence.written = Written(keys[:, None], values, dt, sums, rates).behind(earlier)
    return torch.stack(outs, 2), states[-1]


def _seen(recurrence: Recurrence, values: Tensor) -> Tensor:
    """bool [B, n, m], the ancestors of each node."""
    if recurrence.below is None:
        return chain_below(values, recurrence.written)
    return recurrence.below.to(values.device)


def _parents(below: Tensor) -> Tensor:
    """int64 [B, n]: the parent among all m nodes of each of the n, -1 of roots; below: bool [B, n, m]."""
    nodes = torch.arange(below.shape[2], device=below.device)
    itself = nodes[below.shape[2] - below.shape[1] :, None]
    return torch.where(below & (nodes < itself), nodes, -1).amax(-1)
