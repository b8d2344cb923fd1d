"""Linear maps with weights in 8 bits, in blocks of 32 inputs with one scale each, as GGUF's Q8_0 has them.

Rows are brought to 8 bits in blocks of 32 too, when they are multiplied. On processors with AVX-512 VNNI or AVX2 a
kernel adds up a block's products in integers and the blocks in their order in float32, so that a row's bits do not
depend on the rows beside it or on their number. Elsewhere torch multiplies the same numbers in float32, in an order of
its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from selfspec.engine.kernels.fastest import Kernel, pages
from selfspec.engine.kernels.native import binding, has_avx512, has_compiler, served
from selfspec.engine.kernels.weights import fix

GROUP, LANES = 32, 16  # inputs that share a scale, and outputs of a panel; see int8.cpp


def fits(weight: Tensor) -> bool:
    """Whether a weight [N, K] can be brought to 8 bits."""
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and KERNEL.serves(*weight.shape)


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Panels and scales of a weight [N, K]; N is a multiple of 16, K of 32."""
    outputs, width = weight.shape
    blocks = weight.float().view(outputs, -1, GROUP)
    scales = (blocks.abs().amax(-1) / 127).bfloat16()  # [N, K / 32]
    safe = torch.where(scales > 0, scales, 1).float()
    quantized = ((blocks / safe[..., None]).round().clamp(-127, 127) + 128).to(torch.uint8)
    panels = pages.take(weight.numel(), torch.uint8).view(outputs // LANES, width // 4, LANES, 4)
    panels.copy_(quantized.view(outputs // LANES, LANES, width // 4, 4).transpose(1, 2))
    return panels, scales.view(outputs // LANES, LANES, -1).transpose(1, 2).contiguous()


def from_int8(panels: Tensor, scales: Tensor) -> Tensor:
    """The weight [N, K] in float32 that panels [N / 16, K / 4, 16, 4] and scales [N / 16, K / 32, 16] stand for."""
    count, quads = panels.shape[:2]
    quantized = panels.transpose(1, 2).reshape(count * LANES, -1, GROUP).float() - 128
    factors = scales.float().transpose(1, 2).reshape(count * LANES, -1, 1)
    return (quantized * factors).view(count * LANES, 4 * quads)


def rounded(rows: Tensor) -> Tensor:
    """Rows [M, K] in float32, brought to 8 bits in blocks and back."""
    blocks = rows.float().view(len(rows), -1, GROUP)
    largest = blocks.abs().amax(-1, keepdim=True)
    quantized = (blocks * torch.where(largest > 0, 127 / largest, 0)).round()
    return (quantized * (largest / 127)).view(rows.shape)


@cache
def has_kernel() -> bool:
    """Whether this processor runs the kernel, and there is a compiler for it."""
    return served() and (torch.cpu._is_vnni_supported() or not has_avx512()) and has_compiler()


def multiply(
    left: Tensor, panels: Sequence[Tensor], scales: Sequence[Tensor], bias: Tensor | None, out: Tensor
) -> Tensor:
    """See `int8_rows`; out [M, N] is where the result goes."""
    if not has_kernel():
        weight = torch.cat([from_int8(*pair) for pair in zip(panels, scales, strict=True)])
        return out.copy_(F.linear(rounded(left), weight, None if bias is None else bias.float()))
    sizes = [LANES * len(part) for part in panels] + [0] * (3 - len(panels))
    weights = [*panels, panels[0], panels[0]][:3]
    factors = [*scales, scales[0], scales[0]][:3]
    added = left if bias is None else bias
    binding("int8.cpp")(left, *weights, *factors, added, out, *left.shape, *sizes, bias is not None)
    return out


def _on_cpu(left: Tensor, panels: list[Tensor], scales: list[Tensor], bias: Tensor | None = None) -> Tensor:
    if left.dtype != torch.bfloat16:
        raise RuntimeError(f"weights in 8 bits multiply rows in bfloat16, not in {left.dtype}")
    return multiply(left.contiguous(), panels, scales, bias, _result(left, panels))


def _result(left: Tensor, panels: list[Tensor], *_: object) -> Tensor:
    return left.new_empty(len(left), LANES * sum(map(len, panels)))


def _multiply(left: Tensor, laid_out: tuple[Tensor, Tensor], bias: Tensor | None, out: Tensor) -> None:
    multiply(left, [laid_out[0]], [laid_out[1]], bias, out)


KERNEL = Kernel("int8", to_int8, _multiply, lambda outputs, width: not outputs % LANES and not width % GROUP)


def in_8_bits(weights: Iterable[Tensor]) -> None:
    """Compiled functions multiply with these weights in 8 bits from now on, where the kernel serves them. For weights
    whose results need not be exact, such as a drafter's."""
    if has_kernel():
        fix((weight for weight in weights if weight.dim() == 2 and weight.is_contiguous() and fits(weight)), KERNEL)


_library = torch.library.Library("selfspec", "FRAGMENT")
_library.define("int8_rows(Tensor left, Tensor[] panels, Tensor[] scales, Tensor? bias=None) -> Tensor")
_library.impl("int8_rows", _on_cpu, "CPU")
_library.impl("int8_rows", _result, "Meta")


def int8_rows(left: Tensor, panels: list[Tensor], scales: list[Tensor], bias: Tensor | None = None) -> Tensor:
    """left [M, K], bfloat16, times one to three weights in 8 bits (see `to_int8`), side by side: [M, sum of their N],
    bfloat16; plus bias [N], with one weight. Raises RuntimeError for rows of another dtype."""
    out: Tensor = torch.ops.selfspec.int8_rows(left, panels, scales, bias)
    return out
