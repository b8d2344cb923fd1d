"""Weights of draft layers: what they begin with, taken from a target's layers, and what they are cast to."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from selfspec.core.quantized import in_8_bits


def start_linear(module: nn.Linear, into: Tensor, theirs: nn.Module | None, std: float) -> None:
    """Initial weights: `into`, a part of its weights or all of them, begins as those of a target's module, the rest at
    zero. Where there is no such module of that shape, all begin at random. A bias begins at zero."""
    weight = getattr(theirs, "weight", None)
    plain = isinstance(weight, Tensor) and weight.shape == into.shape and weight.is_floating_point()
    if isinstance(weight, Tensor) and plain and not weight.is_meta:
        module.weight.zero_()
        into.copy_(weight)
    else:
        nn.init.normal_(module.weight, std=std)
    if module.bias is not None:
        module.bias.zero_()


def own_weight(name: str, theirs: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy of a target's weight to train. Where its layers are not in memory, a bias begins at zero, a norm's scale
    at one, a matrix at random."""
    if not theirs.is_meta:
        return theirs.detach().to(dtype, copy=True)
    if name.endswith("bias"):
        return torch.zeros(theirs.shape, dtype=dtype, device=device)
    if theirs.ndim < 2:
        return torch.ones(theirs.shape, dtype=dtype, device=device)
    return nn.init.normal_(torch.empty(theirs.shape, dtype=dtype, device=device), std=theirs.shape[-1] ** -0.5)


def norm_before_mlp(layer: Mapping[str, nn.Module]) -> nn.Module | None:
    """The norm in front of the MLP, among the modules of a target's layer by name."""
    return layer.get("pre_feedforward_layernorm", layer.get("post_attention_layernorm"))


def copy_scale(norm: nn.Module, theirs: nn.Module | None, dtype: torch.dtype) -> None:
    """The scale of a target's norm as it acts. Some families keep it less one, some take the mean away, some add a
    bias; numbers of size one and mean zero, and their opposites, show the scale alone."""
    if theirs is None or any(p.is_meta for p in theirs.parameters()):
        return
    into = next(norm.parameters())
    signs = torch.ones(1, 1, len(into), device=next(theirs.parameters(), into).device, dtype=dtype)
    signs[..., 1::2] = -1
    into.copy_(((theirs(signs) - theirs(-signs)) / 2 * signs)[0, 0])


def for_decoding(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in the dtype of decoding; a copy, which is the drafter's alone, multiplies in 8 bits where it can."""
    cast = weight.detach().to(dtype)
    if weight.dtype != dtype:
        in_8_bits([cast])
    return cast


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Put parameters of this dtype, which are not trained, in place of plain floating-point ones, for decoding."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            plain = type(parameter) is nn.Parameter and parameter.is_floating_point()
            if plain and (parameter.dtype != dtype or parameter.requires_grad):
                setattr(part, name, nn.Parameter(parameter.detach().to(dtype), requires_grad=False))
                if parameter.dtype != dtype:
                    in_8_bits([getattr(part, name)])
