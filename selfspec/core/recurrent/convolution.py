"""Short causal convolutions over trees: the taps of a node are its last ancestors, and before the root the last inputs
that are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from selfspec.core.recurrent.recurrence import Recurrence


def tap_indices(below: Tensor, width: int) -> Tensor:
    """int64 [B, n * width]: which of the W - 1 kept inputs and, behind them, the m nodes each of n nodes convolves, the
    oldest first. below: bool [B, n, m], see `recurrence.Recurrence`."""
    nodes = torch.arange(below.shape[2], device=below.device)
    up = torch.where(below, nodes, -1)  # ancestors come before their descendants: the largest are the nearest
    up = torch.nn.functional.pad(up, (0, max(0, width - below.shape[2])), value=-1).topk(width, 2).values
    missing = torch.arange(width, device=below.device) - below.sum(-1)[..., None]  # how far before the root
    return torch.where(up >= 0, up + width - 1, width - 2 - missing).flip(2).flatten(1)


def taps(convolution: Recurrence, new: Tensor, width: int, indices: Tensor | None) -> Tensor:
    """The taps [B, C, n * W] of nodes with inputs [B, C, n]; indices: see `tap_indices`, None: a chain. convolution:
    `state` holds its last inputs [B, C, W - 1] at the checkpoint (None: zeros), `written` those [B, C, m] since."""
    state = convolution.state
    if state is None:
        state = convolution.state = new.new_zeros(*new.shape[:2], width - 1)
    earlier = convolution.written
    convolution.written = new if earlier is None else torch.cat([earlier, new], 2)
    line = torch.cat([state.to(new.dtype), convolution.written], 2)
    if indices is None:
        return line[:, :, line.shape[2] - new.shape[2] - width + 1 :].unfold(2, width, 1).flatten(2)
    return line.gather(2, indices[:, None].expand(-1, line.shape[1], -1))


def causal_conv1d_fn(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
) -> Tensor:
    """Takes the place of transformers' function of this name, over `taps`: [B, C, n * W] to [B, C, n]."""
    each = hidden_states.unflatten(2, (-1, weight.shape[-1])).to(weight.dtype)
    out = (each * weight[:, None]).sum(-1)
    out = out if bias is None else out + bias[:, None]
    active: Tensor = out if activation is None else ACT2FN[activation](out)
    return active.to(hidden_states.dtype)


def advanced(state: Tensor, inputs: Tensor, paths: Tensor, counts: Tensor) -> Tensor:
    """The last W - 1 inputs [B, C, W - 1] behind the first `counts`, int64 [B], nodes of each row's path, int64
    [B, D], of nodes with inputs [B, C, N]."""
    width = state.shape[2] + 1
    line = torch.cat([state, inputs.gather(2, paths[:, None].expand(-1, inputs.shape[1], -1))], 2)
    at = counts[:, None] + torch.arange(width - 1, device=paths.device)
    return line.gather(2, at[:, None].expand(-1, line.shape[1], -1))
