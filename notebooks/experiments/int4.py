"""Products of Qwen2.5-Coder-0.5B's shapes at 1 to 16 rows: torch in bfloat16, selfspec in 8 bits, torch in 4 bits.

    OMP_NUM_THREADS=1 python notebooks/experiments/int4.py

Every product reads weights that do not lie in a cache: so many copies of them are multiplied in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec.engine.kernels.int8 import int8_rows, to_int8

SHAPES = {"gate, up": (4864, 896), "down": (896, 4864), "lm_head": (151936, 896)}  # outputs, inputs
ROWS, GROUP, ROUNDS = (1, 2, 4, 8, 16), 32, 9
COLD = 64_000_000  # numbers of all copies of a weight


def in_4_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Packed numbers, and scales and zeros [K / GROUP, N, 2] of groups, as torch's kernel reads them."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / 15).clamp(min=1e-6)
    numbers = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15).int().flatten(1)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    return packed, torch.stack([scale, low + 8 * scale], -1).bfloat16().transpose(0, 1).contiguous()


def seconds(product: Callable[[int], object], count: int) -> float:
    """Median seconds of one of `count` products, after a round that is not timed."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for i in range(count):
            product(i)
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times[1:])


def row(weights: Sequence[Tensor], rows: int) -> list[float]:
    """Milliseconds in bfloat16, 8 bits and 4 bits."""
    x = torch.randn(rows, weights[0].shape[1], dtype=torch.bfloat16)
    eight, four = [to_int8(w) for w in weights], [in_4_bits(w) for w in weights]
    products: list[Callable[[int], object]] = [
        lambda i: F.linear(x, weights[i]),
        lambda i: int8_rows(x, [eight[i][0]], [eight[i][1]], None),
        lambda i: torch.ops.aten._weight_int4pack_mm_for_cpu(x, four[i][0], GROUP, four[i][1]),
    ]
    return [1000 * seconds(product, len(weights)) for product in products]


def main() -> None:
    torch.manual_seed(0)
    print("| weights | rows | bfloat16, ms | 8 bits, ms | 4 bits, ms |\n|---|---|---|---|---|")
    for name, (outputs, inputs) in SHAPES.items():
        count = max(1, min(24, COLD // (outputs * inputs)))
        weights = [torch.randn(outputs, inputs).mul_(0.02).bfloat16() for _ in range(count)]
        for rows in ROWS:
            print(f"| {name} | {rows} | " + " | ".join(f"{ms:.2f}" for ms in row(weights, rows)) + " |", flush=True)


if __name__ == "__main__":
    main()
