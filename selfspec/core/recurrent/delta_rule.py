"""The gated delta rule (arXiv:2412.06464) and Kimi's form of it with one decay for each channel (arXiv:2510.26692):
Qwen3-Next, Qwen3.5, OLMo-hybrid; Kimi Linear, Bailing hybrid."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfspec.core.recurrent.recurrence import Recurrence, read


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Recurrence | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Recurrence]:
    """Takes the place of transformers' `torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`: tensors [B, n,
    heads, D], beta [B, n, heads], g like it or [B, n, heads, D]."""
    assert initial_state is not None
    dtype = torch.promote_types(value.dtype, torch.float32)
    q, k, v, g, beta = (part.transpose(1, 2).to(dtype) for part in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    shared = v.shape[1] // k.shape[1]  # value heads of each key head
    q, k = (part.repeat_interleave(shared, 1) if shared > 1 else part for part in (q, k))
    out = read(initial_state, q / q.shape[-1] ** 0.5, k, v, g, beta)
    return out.transpose(1, 2).to(query.dtype), initial_state
