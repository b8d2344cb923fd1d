"""Views of the target's modules: structural copies whose tensors are the target's own, and LoRA inside them by PEFT."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.target import Target


def view(module: nn.Module) -> Any:
    """A copy of a module's structure over the same parameters and buffers. What is then put into it leaves the
    original as it was."""
    shared: dict[int, Any] = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, shared)


def inject(holder: nn.Module, rank: int, modules: list[str], name: str, dtype: torch.dtype) -> None:
    """Put a LoRA adapter of this name into the linear modules so named inside `holder`; it is trained in `dtype`."""
    with warnings.catch_warnings():  # PEFT warns of a second adapter, and of tied weights it might merge into
        warnings.simplefilter("ignore", UserWarning)
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=modules), holder, adapter_name=name)
    for parameter_name, parameter in holder.named_parameters():
        if "lora_" in parameter_name and f".{name}." in parameter_name:
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(True)


class SharedHeads(nn.Module):
    """K projections to the vocabulary: a view of the target's lm_head with one LoRA per head, so that one product with
    the shared weights serves all heads. Parameters: K*rank*(H + V)."""

    def __init__(self, target: Target, heads: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        path = next(n for n, m in target.model.named_modules() if m is target.lm_head)
        self.name, self.heads = path.rsplit(".", 1)[-1], heads
        self.lora = nn.ModuleDict({self.name: view(target.lm_head)})
        for adapter in self.adapters():
            inject(self.lora, rank, [self.name], adapter, dtype)

    def adapters(self) -> dict[str, nn.Module]:
        return {f"head_{k}": self.lora for k in range(self.heads)}

    @property
    def base(self) -> nn.Linear:
        return self.lora[self.name].base_layer  # type: ignore[return-value, union-attr]

    def weights(self) -> tuple[Tensor, Tensor]:
        """LoRA A [K, H, r] and B [K, r, V] of all heads, stacked."""
        layer: Any = self.lora[self.name]
        a = torch.stack([layer.lora_A[n].weight.t() for n in self.adapters()])
        b = torch.stack([layer.lora_B[n].weight.t() * layer.scaling[n] for n in self.adapters()])
        return a, b

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Logits [k, n, V] of the first k heads for x [k, n, H], given their stacked `weights`."""
        logits = F.linear(x, self.base.weight, self.base.bias)
        return torch.baddbmm(logits, x @ a[: len(x)].to(x.dtype), b[: len(x)].to(x.dtype))
