"""Products of few rows with bfloat16 weights, and attention of few queries, on processors with AVX2 or AVX-512.

There the library's product of one row with a matrix is bound by its own instructions, not by the memory that it reads.
Products with frozen weights go to the kernel that was measured to be fastest (see `selfspec.engine.kernels.fastest`).
The kernels `tiles.cpp` (with AMX), `products.cpp` and `attention.cpp` read weights, keys and values as they are. All
add up in float32 in an order that does not depend on how many rows there are or where they lie: a node's numbers are
the same in a pass over one node and over a tree. Measured: notebooks/LOG.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.engine.kernels.native import binding, in_place
from selfspec.engine.kernels.weights import laid_out

MOST = 4096  # rows of a compiled product, and queries of each head: those of 16 prompts in one pass
_BLOCK_NUMBERS, _BLOCK_ROWS = 1 << 18, 64  # of the left side, at most; a block's rows are a multiple of _BLOCK_ROWS
STEP = 32  # rows of weights, and heads, must be multiples of it
SLOTS = 16  # the number of slots must be a multiple of it


def multiply(*given: Tensor, sizes: tuple[int, ...], biased: bool, out: Tensor) -> Tensor:
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
    sizes = product_sizes(left.shape, [weight.shape for weight in weights])
    out = left.new_empty(*left.shape[:-1], sum(sizes[3:]))
    return multiply(left, *weights, *([] if bias is None else [bias]), sizes=sizes, biased=bias is not None, out=out)


def multiply_in_place(left: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """left [M, K] times weight [N, K], plus bias [N]. The weight is read where it lies, whatever was measured. Many
    rows run in blocks, each of which stays in a core's cache while the weight goes by."""
    out, last = left.new_empty(len(left), len(weight)), left if bias is None else bias
    block = max(_BLOCK_ROWS, _BLOCK_NUMBERS // left.shape[1] // _BLOCK_ROWS * _BLOCK_ROWS)
    parts = [(left, out)] if len(left) <= block else zip(left.split(block), out.split(block), strict=True)
    for rows, result in parts:
        sizes = product_sizes(rows.shape, [weight.shape])
        in_place(sizes[3:])(rows, weight, weight, weight, last, result, *sizes, 0, 0, bias is not None)
    return out


def product_sizes(left: Sequence[int], weights: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Shapes as `multiply` takes them."""
    return (1 if len(left) == 2 else int(left[0]), int(left[-2]), int(left[-1]), *(int(part[-2]) for part in weights))


def attend(*given: Tensor, sizes: tuple[int, ...], scale: float, out: Tensor) -> Tensor:
    """given: query, keys, values, mask; sizes: see `attention_sizes`."""
    binding("attention.cpp")(*given, out, *sizes, scale)
    return out


def few_queries(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention [B, n, heads, D] of query [B, heads, n, D] over keys and values [B, G, S, D] under an additive mask
    [B or 1, 1, n, S]; heads / G of them share keys. All are in bfloat16, on the CPU, and contiguous, but keys and
    values may be the first slots of longer buffers; D is a multiple of STEP, S of SLOTS."""
    rows, heads, nodes, width = query.shape
    sizes = attention_sizes(query.shape, keys.shape, mask.shape, keys.stride(1) // width)
    out = query.new_empty(rows, nodes, heads, width)
    return attend(query, keys, values, mask, sizes=sizes, scale=scale, out=out)


def attention_sizes(
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
