"""Views of the target's modules: structural copies whose tensors are the target's own, and LoRA inside them by PEFT."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from selfspec.cache import TreeCache
from selfspec.target import Pass, Target
from selfspec.tree import DraftTree


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


class Tail(nn.Module):
    """The target's last decoder layer, final norm and lm_head as a view that can be fed with any hidden states.

    rank: of the LoRA that PEFT puts into the layer's linear maps (and into lm_head with `head`) under the name
    `adapter`; 0 leaves the layer as it is, and `full` makes it a trained copy instead. In decoding the layer's LoRA is
    merged into weights of its own once, which takes the memory of one layer.
    """

    def __init__(
        self, target: Target, rank: int, dtype: torch.dtype, adapter: str, head: bool = False, full: bool = False
    ) -> None:
        super().__init__()
        self.layer, self.adapter, self.dtype = target.n_layers - 1, adapter, target.dtype
        self.injected = rank > 0 and not full
        if getattr(target.model.config.get_text_config(), "num_kv_shared_layers", 0):
            raise ValueError(f"{type(target.model).__name__} shares keys between layers: its last can not stand alone")
        model = view(target.model)
        inner = Target(model)
        inner.tuples = target.tuples
        block = inner.layers[self.layer]
        if full:
            parameters = dict(block.named_parameters())
            odd = [n for n, p in parameters.items() if type(p) is not nn.Parameter or not p.is_floating_point()]
            if odd:
                raise ValueError(
                    f"the target's last layer holds quantized weights ({odd[0]}), which can not be trained in full: "
                    "take drafter.train=lora, or drafter.prefix=false for sequential heads"
                )
            for module in block.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    setattr(module, name, nn.Parameter(parameter.detach().to(dtype, copy=True)))
        elif self.injected:
            inject(model, rank, list(self.linear(model, head)), adapter, dtype)
        # The rest of the view is the target's own modules again: only these hold anything that training moves.
        self.parts = nn.ModuleList([block, model.get_output_embeddings()])
        self.inner: Target
        self.model: Any
        self.fast: Target
        self.__dict__.update(inner=inner, model=model, fast=inner)

    @staticmethod
    def linear(model: PreTrainedModel, head: bool) -> dict[str, nn.Module]:
        """The linear maps of a model's last decoder layer (and its lm_head), by their names in the model; none beside
        a mixture's experts, whose names PEFT would take for the experts' own."""
        parts = set(Target(model).layers[-1].modules()) | ({model.get_output_embeddings()} if head else set())
        mixtures = tuple(n.removesuffix("experts") for n, _ in model.named_modules() if n.endswith(".experts"))
        return {
            name: module
            for name, module in model.named_modules()
            if module in parts and isinstance(module, (nn.Linear, Conv1D)) and not name.startswith(mixtures)
        }

    @staticmethod
    def widths(target: Target, head: bool) -> int:
        """Sum of inputs and outputs of those maps: the parameters of a LoRA of rank 1."""
        return sum(sum(m.weight.shape) for m in Tail.linear(target.model, head).values())  # type: ignore[misc, arg-type]

    def train(self, mode: bool = True) -> Tail:
        """Leaving training mode merges what was trained, for decoding; dropout stays off, as in the frozen target."""
        super().train(False)
        self.training = mode
        self.__dict__["fast"] = self.inner if mode else self._merged()
        return self

    @torch.no_grad()
    def _merged(self) -> Target:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        target = Target(view(self.model))  # which freezes all that the two have in common
        target.tuples = self.inner.tuples
        for parameter in trained:
            parameter.requires_grad_(True)
        block: Any = target.layers[self.layer]
        for module in list(block.modules()):
            for name, parameter in module.named_parameters(recurse=False):
                if type(parameter) is nn.Parameter and parameter.is_floating_point():
                    setattr(module, name, nn.Parameter(parameter.to(self.dtype), requires_grad=False))
            child: Any
            for name, child in list(module.named_children()):
                if not _holds(child, self.adapter):
                    continue
                base = child.get_base_layer()
                # What holds no plain weights, as quantized maps and fused experts, stays as PEFT runs it.
                if isinstance(base, (nn.Linear, Conv1D)) and base.weight.is_floating_point():
                    plain = view(base)
                    merged = plain.weight + child.get_delta_weight(self.adapter).to(plain.weight.dtype)
                    plain.weight = nn.Parameter(merged.to(self.dtype), requires_grad=False)
                    setattr(module, name, plain)
        head: Any = target.model.get_output_embeddings()
        if _holds(head, self.adapter):
            for lora in (*head.lora_A.values(), *head.lora_B.values()):
                lora.weight = nn.Parameter(lora.weight.to(self.dtype), requires_grad=False)
        return target

    def products(self) -> list[nn.Module]:
        """See `Drafter.products`."""
        return [self.fast.decoder, self.fast.model.get_output_embeddings()]

    def adapters(self) -> dict[str, nn.Module]:
        """The view with its PEFT adapter, by the adapter's name; nothing where there is none."""
        return {self.adapter: self.model} if self.injected else {}

    def text(self, hidden: Tensor, tokens: Tensor, block: bool = True, logits: bool = True, **how: Any) -> Pass:
        """The layer on whole texts, reading `hidden` [B, S, H]; tokens int64 [B, S]. The layer's output is among the
        pass's features. Without `block` the final norm reads `hidden` itself. `how` goes to the model (masks,
        positions, a cache of transformers')."""
        start, seen = self.layer if block else self.layer + 1, {}  # type: tuple[int, dict[int, Tensor]]
        run = self.inner if self.training else self.fast
        module = run.model if logits else run.decoder
        with run.patched(start, self.layer + 1, hidden, (self.layer,) if block else (), seen):
            out = module(input_ids=tokens, **({"use_cache": False} | how))
        return Pass(out.logits if logits else None, seen.pop(-1), seen)

    def step(self, hidden: Tensor, tree: DraftTree, cache: TreeCache, ran: int = 0, logits: bool = True) -> Pass:
        """The same on the nodes of a tree behind `ran`, for decoding; `cache` is the layer's own. The layer's output is
        among the pass's features."""
        layers = (self.layer, self.layer + 1)
        return self.fast.forward(tree, cache, logits, layers, hidden, features=(self.layer,), ran=ran)


def _holds(module: nn.Module, adapter: str) -> bool:
    return isinstance(module, LoraLayer) and adapter in module.lora_A
