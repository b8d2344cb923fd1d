"""How inductor lowers the products and the attention of `skinny_gemm`, and products in 8 bits: as calls of the
kernels. Compiled code finds them by the names given here, so that code read from disk needs this module too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.select_algorithm import ExternKernelChoice

from selfspec.engine.kernels import int8
from selfspec.engine.kernels.native import binding, in_place
from selfspec.engine.kernels.skinny_gemm import attend, attention_sizes, multiply, product_sizes

_few_rows, _few_queries = torch.ops.selfspec.few_rows.default, torch.ops.selfspec.few_queries.default
_int8_rows = torch.ops.selfspec.int8_rows.default


def _multiply_int8(*tensors: Tensor, count: int, biased: bool, out: Tensor) -> Tensor:
    """tensors: left, `count` weights as panels and their scales, and where biased the bias."""
    panels, scales = tensors[1 : 1 + count], tensors[1 + count : 1 + 2 * count]
    return int8.multiply(tensors[0], panels, scales, tensors[-1] if biased else None, out)


_int8_products = ExternKernelChoice(_multiply_int8, name="selfspec_int8_rows")
_products = ExternKernelChoice(multiply, name="selfspec_few_rows")
_attention = ExternKernelChoice(attend, name="selfspec_few_queries")


@register_lowering(_few_rows, type_promotion_kind=None)
def _lowered(left: Any, weights: list[Any], bias: Any = None) -> Any:
    sizes = product_sizes(left.get_size(), [weight.get_size() for weight in weights])
    in_place(sizes[3:])  # an error belongs to compiling
    layout = ir.FixedLayout(left.get_device(), left.get_dtype(), [*left.get_size()[:-1], sum(sizes[3:])])
    parts = [left, *weights, *([] if bias is None else [bias])]
    tensors = [ir.ExternKernel.require_contiguous(part) for part in parts]
    return _products.bind(tensors, layout, sizes=sizes, biased=bias is not None).output_node()


@register_lowering(_int8_rows, type_promotion_kind=None)
def _lowered_int8(left: Any, panels: list[Any], scales: list[Any], bias: Any = None) -> Any:
    if int8.has_kernel():
        binding("int8.cpp")
    outputs = int8.LANES * sum(int(part.get_size()[0]) for part in panels)
    layout = ir.FixedLayout(left.get_device(), left.get_dtype(), [left.get_size()[0], outputs])
    parts = [left, *panels, *scales, *([] if bias is None else [bias])]
    tensors = [ir.ExternKernel.require_contiguous(part) for part in parts]
    bound = _int8_products.bind(tensors, layout, count=len(panels), biased=bias is not None)
    return bound.output_node()


@register_lowering(_few_queries, type_promotion_kind=None)
def _lowered_attention(query: Any, keys: Any, values: Any, mask: Any, scale: float) -> Any:
    binding("attention.cpp")
    rows, heads, nodes, width = (int(size) for size in query.get_size())
    sizes = attention_sizes(query.get_size(), keys.get_size(), mask.get_size())
    layout = ir.FixedLayout(query.get_device(), query.get_dtype(), [rows, nodes, heads, width])
    tensors = [ir.ExternKernel.require_contiguous(part) for part in (query, keys, values, mask)]
    return _attention.bind(tensors, layout, sizes=sizes, scale=scale).output_node()
