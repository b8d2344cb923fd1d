"""A target whose linear maps multiply with weights in 8 bits (see `selfspec.engine.kernels.int8`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.engine.kernels.int8 import fits, has_kernel, in_8_bits, int8_rows, to_int8
from selfspec.engine.kernels.weights import forget_changed, sampled

__all__ = ["Int8Linear", "fits", "follow_weights", "has_int8", "has_kernel", "in_8_bits", "quantize", "unquantized"]


class Int8Linear(nn.Linear):
    """A frozen linear map that multiplies with its weight in 8 bits: panels uint8 [N / 16, K / 4, 16, 4], scales
    bfloat16 [N / 16, K / 32, 16]. `weight` [N, K] is what these were made from: drafters that share it and gradients
    read that."""

    panels: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        panels, scales = to_int8(linear.weight.detach())
        self.register_buffer("panels", panels, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self._made_of = *self._now(), sampled(self.weight).clone()

    def _now(self) -> tuple[int, int]:
        return self.weight.data_ptr(), 0 if self.weight.is_inference() else self.weight._version

    @torch.no_grad()
    def follow(self, merged: bool = False) -> None:
        """Quantize a weight anew that was changed since. merged: by PEFT, perhaps, past the version counter."""
        sample = sampled(self.weight)
        if merged or self._now() != self._made_of[:2] or not torch.equal(sample, self._made_of[2]):
            for part, new in zip((self.panels, self.scales), to_int8(self.weight.detach()), strict=True):
                part.copy_(new)  # views share it
            self._made_of = *self._now(), sample.clone()

    def forward(self, input: Tensor) -> Tensor:  # [..., K] -> [..., N]
        if not torch.compiler.is_compiling() and self._now() != self._made_of[:2]:
            self.follow()
        if torch.is_autocast_enabled(input.device.type):  # as of any linear map
            input = input.to(self.weight.dtype)
        rows = input.reshape(-1, self.in_features)
        if torch.is_grad_enabled() and input.requires_grad:
            out: Tensor = _product(rows, self.weight, self.panels, self.scales, self.bias)
        else:
            out = int8_rows(rows, [self.panels], [self.scales], self.bias)
        return out.view(*input.shape[:-1], self.out_features)


class _Differentiable(torch.autograd.Function):
    """The product. Its gradient is that of the weight in bfloat16."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, panels: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return int8_rows(rows, [panels], [scales], bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0] @ ctx.saved_tensors[0], None, None, None, None


_product: Any = _Differentiable.apply


def has_int8(model: nn.Module) -> bool:
    """Whether some of its linear maps multiply in 8 bits."""
    return any(isinstance(part, Int8Linear) for part in model.modules())


def follow_weights(model: nn.Module, merged: bool = False) -> None:
    """What was made of a model's weights for its kernels is made anew, where they were changed since. merged: PEFT may
    have changed any of them."""
    forget_changed({id(p) for p in model.parameters()} if merged else set())
    for part in model.modules():
        if isinstance(part, Int8Linear):
            part.follow(merged)


def quantize(model: PreTrainedModel) -> None:
    """Linear maps of a bfloat16 model on the CPU multiply in 8 bits from now on, lm_head included; embeddings and the
    rest stay. Raises ValueError where no map can."""
    linears = [
        (path, part) for path, part in model.named_modules() if type(part) is nn.Linear and fits(part.weight.detach())
    ]
    if not linears and not has_int8(model):
        raise ValueError(
            f"dtype='int8' serves bfloat16 linear maps [N, K] on the CPU, N a multiple of 16 and K of 32; "
            f"{type(model).__name__} has none"
        )
    for path, linear in linears:
        model.set_submodule(path, Int8Linear(linear))


def unquantized(linear: nn.Linear) -> nn.Linear:
    """The same map with its weight as it was before `quantize`."""
    plain = nn.Linear(1, 1, bias=False, device="meta")
    plain.in_features, plain.out_features = linear.in_features, linear.out_features
    plain.weight, plain.bias = linear.weight, linear.bias
    return plain
