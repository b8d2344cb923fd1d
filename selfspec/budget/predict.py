"""What speculative decoding brings, from acceptance lengths, the cost of passes and the cost of a draft. The page
(`selfspec/page/model.js`) computes the same."""

from __future__ import annotations

from collections.abc import Sequence


def speedup(tau: float, step: float, cost: float, draft: float) -> float:
    """Over plain decoding: tau tokens for a pass of `cost` seconds and a draft of `draft` seconds, instead of one for a
    plain step of `step` seconds."""
    return tau * step / (cost + draft)


def fastest(nodes: float, size: float, products: float, bandwidth: float, peak: float) -> float:
    """Seconds that a pass over so many nodes takes at least: to read `size` bytes of weights, or for `products`
    products and additions a node."""
    return max(size / bandwidth, nodes * products / peak)


def monotone(seconds: Sequence[float]) -> list[float]:
    """Costs of growing sizes. A larger tree is not cheaper; where it seems so, that is noise, and both are given their
    mean."""
    blocks: list[tuple[float, int]] = []  # (mean, sizes it stands for)
    for value in seconds:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            (a, m), (b, n) = blocks[-2:]
            blocks[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return [mean for mean, count in blocks for _ in range(count)]


def along(sizes: Sequence[int], seconds: Sequence[float], nodes: float) -> float:
    """Costs of growing sizes, read at `nodes`: linear between sizes; beyond the largest as between the last two."""
    if len(sizes) == 1:
        return seconds[0]
    above = next((i for i, n in enumerate(sizes) if n >= nodes and i), len(sizes) - 1)
    (n, m), (low, high) = sizes[above - 1 : above + 1], seconds[above - 1 : above + 1]
    return low + (high - low) * (nodes - n) / (m - n)
