"""The kernels of `skinny_gemm` in passes that are not compiled.

While such a pass runs, torch hands its linear maps and attention over to the kernels (a `TorchFunctionMode`). Models
and torch's functions stay as they are. Without AVX-512 or a C++ compiler nothing is handed over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from selfspec.engine.kernels.native import has_compiler, served

_linear, _attention = torch._C._nn.linear, torch._C._nn.scaled_dot_product_attention
# Functions whose rows the library may compute differently from one number of rows to another, by name.
_PRODUCTS = {"linear", "scaled_dot_product_attention", "bilinear", "conv1d", "conv2d", "einsum", "_grouped_mm"}
_PRODUCTS |= {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm"}


def redirected(modules: Iterable[nn.Module]) -> Redirected | None:
    """What a pass through these modules runs under; None where the kernels serve none of them."""
    weights = (next(module.parameters(), None) for module in modules)
    dtypes = {(weight.dtype, weight.device.type) for weight in weights if weight is not None}
    return Redirected() if dtypes == {(torch.bfloat16, "cpu")} and served() and has_compiler() else None


class Redirected(TorchFunctionMode):
    """varying: names of the products and attentions that were left to the library."""

    def __init__(self) -> None:
        super().__init__()
        from selfspec.engine.kernels import skinny_gemm  # slow to import

        self.kernels, self.varying = skinny_gemm, set[str]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is _linear:
            result = self.linear(*args, **kwargs)
        elif function is _attention:
            result = self.attention(*args, **kwargs)
        else:
            result = None
        if result is not None:
            return result
        result, name = function(*args, **kwargs), getattr(function, "__name__", "")
        if name in _PRODUCTS and not (isinstance(args[0], Tensor) and args[0].shape[-1] == 1):  # of one term
            self.varying.add(name)
        return result

    def linear(self, left: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """As torch's; None where the kernels do not serve it."""
        kernels, width = self.kernels, left.shape[-1]
        rows = left.numel() // width
        if not _frozen(left, weight, *([] if bias is None else [bias])) or not weight.is_contiguous():
            return None
        if width % kernels.STEP:
            return None
        parts = left.reshape(rows, width).contiguous().split(kernels.MOST)
        outs = [kernels.few_rows(part, [weight], bias) for part in parts]
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).view(*left.shape[:-1], len(weight))

    def attention(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        """As torch's; None where the kernels do not serve it."""
        kernels, mask = self.kernels, attn_mask
        if mask is None or dropout_p or query.dim() != 4 or mask.dim() != 4 or not _frozen(query, keys, values, mask):
            return None
        (rows, heads, nodes, width), slots = query.shape, keys.shape[2]
        if mask.shape[2] == 1:  # of one node, whose heads that share keys are queries
            mask = mask.expand(-1, -1, nodes, -1)
        if nodes > kernels.MOST or width % kernels.STEP or slots % kernels.SLOTS or heads % keys.shape[1]:
            return None
        if len(keys) != rows or keys.shape != values.shape or mask.shape[1:] != (1, nodes, slots):
            return None
        if not _side_by_side(keys) or keys.stride() != values.stride():
            keys, values = keys.contiguous(), values.contiguous()
        scale = width**-0.5 if scale is None else scale
        return kernels.few_queries(query.contiguous(), keys, values, mask.contiguous(), scale).transpose(1, 2)


def _frozen(*parts: Tensor) -> bool:
    """Whether all are of the dtype and device that the kernels serve, and none needs a gradient."""
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        return False
    return all(part.dtype == torch.bfloat16 and part.device.type == "cpu" for part in parts)


def _side_by_side(heads: Tensor) -> bool:
    """Whether the heads of all rows [B, G, S, D] lie one behind another, at equal distances."""
    rows, slots, width, one = heads.stride()
    return one == 1 and width == heads.shape[3] and rows == heads.shape[1] * slots and slots % width == 0
