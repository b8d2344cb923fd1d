"""Mamba1's selective scan (arXiv:2312.00752): Mamba, Falcon-Mamba, Jamba, Zamba. Each entry of a channel's state has a
decay of its own, so what pairs of nodes share is no matrix: nodes are computed one after another, each from its
parent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec.core.recurrent.recurrence import Recurrence, Written, advanced, chain_below

# Transformers' modules give their scan no state. What the layer's convolution, which comes first, left here is read
# instead, one recurrence for each scan.
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
    x, keys, queries, rate = (part.to(dtype) for part in (hidden_states, B, C, A))
    # As heads of one value each, whose keys are shared: the decay of an entry is its rate, times dt.
    keys, values, earlier = keys.mT[:, None], (x * dt)[..., None], recurrence.written
    below = chain_below(values, earlier) if recurrence.below is None else recurrence.below
    kept = below.shape[2] - below.shape[1]
    times = dt if earlier is None else torch.cat([earlier.decays, dt], 2)
    sums = (below[:, None].to(dtype) @ times[..., None])[..., 0]
    start = recurrence.state  # [B, C, K, 1]
    before = x.new_zeros(*x.shape[:2], rate.shape[1]) if start is None else start[..., 0]
    above, states, outs = _parents(below), list[Tensor](), list[Tensor]()
    for node in range(dt.shape[2]):
        if earlier is not None:  # behind the earlier nodes among its ancestors
            order = below[:, node, :kept].to(torch.int8).argsort(dim=1, descending=True, stable=True)
            before = advanced(start, earlier, order, below[:, node, :kept].sum(1))[..., 0]
        at = (above[:, node] - kept + 1).clamp(min=0)  # 0: not behind a node of this pass
        choices = torch.stack([before, *states], 2)
        state = choices.gather(2, at[:, None, None, None].expand(-1, *before.shape[1:2], 1, before.shape[2]))[:, :, 0]
        states.append(state * (dt[:, :, node, None] * rate).exp() + values[:, :, node] * keys[:, :, node])
        outs.append((states[-1] * queries[:, None, :, node]).sum(-1))
    recurrence.written = Written(keys, values, dt, sums, rate).behind(earlier)
    out = torch.stack(outs, 2)
    out = out if D is None else out + x * D[None, :, None]
    out = out if z is None else out * F.silu(z)
    return (out, states[-1]) if return_last_state else out


def _parents(below: Tensor) -> Tensor:
    """int64 [B, n]: the parent among all m nodes of each of the n, -1 of roots; below: bool [B, n, m]."""
    nodes = torch.arange(below.shape[2], device=below.device)
    itself = nodes[below.shape[2] - below.shape[1] :, None]
    return torch.where(below & (nodes < itself), nodes, -1).amax(-1)
