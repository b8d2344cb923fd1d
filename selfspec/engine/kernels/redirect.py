"""The kernels of `skinny_gemm` in passes that are not compiled.

While such a pass runs, torch hands its linear maps and attention over to the kernels (a `TorchFunctionMode`). Models
and torch's functions stay as they are. Without AVX2 or a C++ compiler nothing is handed over.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from selfspec.engine.capture import modules_in
from selfspec.engine.kernels.int8 import has_kernel
from selfspec.engine.kernels.invariant import of_torch, row_invariant
from selfspec.engine.kernels.native import binding, has_compiler, served
from selfspec.engine.kernels.skinny_gemm import MOST, SLOTS, STEP, few_queries, multiply_in_place

_linear, _attention = torch._C._nn.linear, torch._C._nn.scaled_dot_product_attention
_PRODUCTS = {"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "int8_rows"}
_invariant: set[Any] = set()  # functions met that are so for all numbers, and that no kernel replaces


def redirected(modules: Iterable[nn.Module]) -> Redirected | None:
    """What a pass through these modules runs under; None where the kernels serve none of them."""
    weights = (next(module.parameters(), None) for module in modules)
    dtypes = {(weight.dtype, weight.device.type) for weight in weights if weight is not None}
    return Redirected() if dtypes == {(torch.bfloat16, "cpu")} and served() and _ready() else None


@cache
def _ready() -> bool:
    """Whether the kernels could be compiled here."""
    if not has_compiler():
        return False
    try:
        for name in ("attention.cpp", "products.cpp"):
            binding(name)
    except Exception as error:  # such as of a compiler without Python's headers
        print(f"bfloat16 passes run on torch's own kernels, since ours can not be compiled: {error}", file=sys.stderr)
        return False
    return True


class Redirected(TorchFunctionMode):
    """varying: names of the operations left to the library whose rows may depend on how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.varying = set[str]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, result = kwargs or {}, None
        if function in _invariant and "alpha" not in kwargs:  # called hundreds of times a pass
            return function(*args, **kwargs)
        if function is _linear:
            result = self.linear(*args, **kwargs)
        elif function is _attention:
            result = self.attention(*args, **kwargs)
        if result is not None:
            return result
        name = getattr(function, "__name__", "").partition(".")[0]  # of an overload
        if name in _PRODUCTS:
            one_term = bool(args) and isinstance(args[0], Tensor) and args[0].shape[-1:] == (1,)
            same = has_kernel() if name == "int8_rows" else one_term
        elif not of_torch(function) or kwargs.get("alpha", 1) != 1:  # alpha: a product and a sum, rounded once or twice
            same = False
        elif row_invariant(name):
            _invariant.add(function)
            same = True
        else:
            first = next(
                (arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor) and arg.is_floating_point()), None
            )
            same = row_invariant(name, 0 if first is None else 8 * first.dtype.itemsize, *args[1:2])
        if not same:
            self.varying.add(name)
        return function(*args, **kwargs)

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """As torch's; None where the kernels do not serve it."""
        parts = [input, weight] if bias is None else [input, weight, bias]
        if not _served(*parts) or weight.dim() != 2 or not weight.is_contiguous() or not input.numel():
            return None
        width = input.shape[-1]
        if width % STEP or (bias is not None and not bias.is_contiguous()):
            return None
        rows = input.reshape(-1, width).contiguous()
        return multiply_in_place(rows, weight, bias).view(*input.shape[:-1], len(weight))

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        """As torch's; None where the kernels do not serve it."""
        mask = attn_mask
        if mask is None or dropout_p or query.dim() != 4 or mask.dim() != 4 or not _served(query, key, value, mask):
            return None
        (rows, heads, nodes, width), slots = query.shape, key.shape[2]
        if mask.shape[2] == 1:  # of one node, whose heads that share keys are queries
            mask = mask.expand(-1, -1, nodes, -1)
        if nodes > MOST or width % STEP or slots % SLOTS or heads % key.shape[1]:
            return None
        if len(key) != rows or key.shape != value.shape or mask.shape[1:] != (1, nodes, slots):
            return None
        if len(mask) not in (1, rows):
            return None
        if not _side_by_side(key) or key.stride() != value.stride():
            key, value = (part.clone(memory_format=torch.contiguous_format) for part in (key, value))
        scale = width**-0.5 if scale is None else scale
        return few_queries(query.contiguous(), key, value, mask.contiguous(), scale).transpose(1, 2)


def _served(*parts: Tensor) -> bool:
    """Whether all are plain tensors of the dtype and device that the kernels serve, and none needs a gradient."""
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        return False
    plain = all(type(part) in (Tensor, nn.Parameter) for part in parts)
    return plain and all(part.dtype == torch.bfloat16 and part.device.type == "cpu" for part in parts)


def _side_by_side(heads: Tensor) -> bool:
    """Whether the heads of all rows [B, G, S, D] lie one behind another, at equal distances that hold them."""
    row, head, slot, one = heads.stride()
    count, slots, width = heads.shape[1:]
    return one == 1 and slot == width and head % width == 0 and head >= slots * width and row == count * head


def run_uncompiled(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, str]:
    """function(*args), not compiled, and the operations by which its rows may depend on how many there are."""
    modules = list(modules_in(args))
    kernels = redirected(modules)
    if kernels is None:
        return function(*args), "of the library" if modules else ""
    with kernels:
        return function(*args), ", ".join(sorted(kernels.varying))
