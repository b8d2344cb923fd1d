"""Mamba2's recurrence (arXiv:2405.21060): Mamba2, Bamba, Falcon-H1, Granite 4, Nemotron-H, Zamba2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec.core.recurrent.recurrence import Recurrence, read


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 64,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Recurrence | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **kwargs: Any,
) -> tuple[Tensor, Recurrence]:
    """Takes the place of transformers' function of this name: hidden_states [B, n, heads, P], dt [B, n, heads], A
    [heads], B and C [B, n, groups, N]."""
    assert initial_states is not None
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    heads = hidden_states.shape[2]
    x, dt, keys, queries = (part.transpose(1, 2).to(dtype) for part in (hidden_states, dt, B, C))
    keys, queries = (part.repeat_interleave(heads // part.shape[1], 1) for part in (keys, queries))
    out = read(initial_states, queries, keys, x * dt[..., None], dt * A.to(dtype)[:, None])
    out = out if D is None else out + x * D[:, None, None]
    return out.transpose(1, 2).contiguous(), initial_states
