"""Products of few rows with bfloat16 weights, and attention of few queries, on processors with AVX2 or AVX-512.

There the library's product of one row with a matrix is bound by its own instructions, not by the memory that it reads.
Products with frozen weights go to the kernel that was measured to be fastest (see `selfspec.engine.kernels.weights`).
The kernels `tiles.cpp` (with AMX), `products.cpp` and `attention.cpp` read weights, keys and values as they are. All
add up in float32 in an order that does not depend on how many rows there are or where they lie: a node's numbers are
the same in a pass over one node and over a tree. Measured: notebooks/LOG.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.select_algorithm import ExternKernelChoice

from selfspec.engine.kernels import int8
from selfspec.engine.kernels.native import binding, in_place
from selfspec.engine.kernels.weights import laid_out

MOST = 4096  # rows, and queries of each head: those of 16 prompts in one pass
STEP = 32  # rows of weights, and heads, must be multiples of it
SLOTS = 16  # the number of slots must be a multiple of it


def _multiply(*given: Tensor, sizes: tuple[int, ...], biased: bool, out: Tensor) -> Tensor:
    """given: left, one to three weights, and where biased the bias of the only one; sizes: B, M, K, and N of each."""
    left, *weights = given
    bias = weights.pop() if biased else None
    if (ready := laid_out(weights)) is not None:
        if left.dim() > 2:
            left = left[0]
        ready.kernel.multiply(left, ready.weights, bias, out if out.dim() == 2 else out[0])
        return out
    first, second, third = (*weights, weights[0], weights[0])[:3]
    last = first if bias is None else bias
    in_place(sizes[3:])(left, first, second, third, last, out, *sizes, *[0] * (6 - len(sizes)), biased)
    return out


def few_rows(left: Tensor, weights: list[Tensor], bias: Tensor | None = None) -> Tensor:
    """left [M, K] times one to three weights [N, K], side by side; plus bias [N], with one weight. Or left [B, M, K]
    times weights [B, N, K], each its own. All are contiguous, in bfloat16, on the CPU; K is a multiple of STEP."""
    sizes = _sizes(left.shape, [weight.shape for weight in weights])
    out = left.new_empty(*left.shape[:-1], sum(sizes[3:]))
    return _multiply(left, *weights, *([] if bias is None else [bias]), sizes=sizes, biased=bias is not None, out=out)


def multiply_in_place(left: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `few_rows` with one weight, which is read where it lies, whatever was measured."""
    sizes = _sizes(left.shape, [weight.shape])
    out = left.new_empty(len(left), len(weight))
    last = left if bias is None else bias
    in_place(sizes[3:])(left, weight, weight, weight, last, out, *sizes, 0, 0, bias is not None)
    return out


def _sizes(left: Sequence[int], weights: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Shapes as `_multiply` takes them."""
    return (1 if len(left) == 2 else int(left[0]), int(left[-2]), int(left[-1]), *(int(part[-2]) for part in weights))


def _attend(*given: Tensor, sizes: tuple[int, ...], scale: float, out: Tensor) -> Tensor:
    """given: query, keys, values, mask; sizes: see `_attention_sizes`."""
    binding("attention.cpp")(*given, out, *sizes, scale)
    return out


def few_queries(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention [B, n, heads, D] of query [B, heads, n, D] over keys and values [B, G, S, D] under an additive mask
    [B or 1, 1, n, S]; heads / G of them share keys. All are in bfloat16, on the CPU, and contiguous, but keys and
    values may be the first slots of longer buffers; D is a multiple of STEP, S of SLOTS."""
    rows, heads, nodes, width = query.shape
    sizes = _attention_sizes(query.shape, keys.shape, mask.shape, keys.stride(1) // width)
    out = query.new_empty(rows, nodes, heads, width)
    return _attend(query, keys, values, mask, sizes=sizes, scale=scale, out=out)


def _attention_sizes(
    query: Sequence[int], keys: Sequence[int], mask: Sequence[int], apart: int | None = None
) -> tuple[int, ...]:
    """Rows, heads, heads that share keys, nodes, slots, width, rows of the mask, and slots from one head to the next
    (None: as many as it has)."""
    rows, heads, nodes, width = map(int, query)
    slots = int(keys[2])
    return rows, heads, heads // int(keys[1]), nodes, slots, width, int(mask[0]), slots if apart is None else apart


_library = torch.library.Library("selfspec", "DEF")
_library.define("few_rows(Tensor left, Tensor[] weights, Tensor? bias=None) -> Tensor")
_library.define("few_queries(Tensor query, Tensor keys, Tensor values, Tensor mask, float scale) -> Tensor")
_library.impl("few_rows", few_rows, "CPU")
_library.impl("few_rows", lambda left, weights, bias=None: torch.cat([left @ w.mT for w in weights], -1), "Meta")
_library.impl("few_queries", few_queries, "CPU")
_library.impl("few_queries", lambda query, *_: query.transpose(1, 2).contiguous(), "Meta")
_few_rows, _few_queries = torch.ops.selfspec.few_rows.default, torch.ops.selfspec.few_queries.default
_int8_rows = torch.ops.selfspec.int8_rows.default


def _multiply_int8(*tensors: Tensor, count: int, biased: bool, out: Tensor) -> Tensor:
    """tensors: left, `count` weights as panels and their scales, and where biased the bias."""
    panels, scales = tensors[1 : 1 + count], tensors[1 + count : 1 + 2 * count]
    return int8.multiply(tensors[0], panels, scales, tensors[-1] if biased else None, out)


_int8_products = ExternKernelChoice(_multiply_int8, name="selfspec_int8_rows")
_products = ExternKernelChoice(_multiply, name="selfspec_few_rows")
_attention = ExternKernelChoice(_attend, name="selfspec_few_queries")


@register_lowering(_few_rows, type_promotion_kind=None)
def _lowered(left: Any, weights: list[Any], bias: Any = None) -> Any:
    sizes = _sizes(left.get_size(), [weight.get_size() for weight in weights])
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
    sizes = _attention_sizes(query.get_size(), keys.get_size(), mask.get_size())
    layout = ir.FixedLayout(query.get_device(), query.get_dtype(), [rows, nodes, heads, width])
    tensors = [ir.ExternKernel.require_contiguous(part) for part in (query, keys, values, mask)]
    return _attention.bind(tensors, layout, sizes=sizes, scale=scale).output_node()
