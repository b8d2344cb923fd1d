"""Parts of a drafter over the target's own tensors: its lm_head with one LoRA per head, and its last layer."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from selfspec.core.passes import Pass
from selfspec.core.quantized import Int8Linear, in_8_bits, unquantized
from selfspec.core.support import decoder_of, layer_stack, view
from selfspec.core.target import Target
from selfspec.drafters.parts.layer_form import put_form
from selfspec.drafters.parts.weights import cast_parameters, own_weight


def inject(holder: nn.Module, rank: int, modules: list[str], name: str, dtype: torch.dtype) -> None:
    """Put a LoRA adapter of this name into the linear modules so named inside `holder`; it is trained in `dtype`."""
    with warnings.catch_warnings():  # PEFT warns of a second adapter, and of tied weights it might merge into
        warnings.simplefilter("ignore", UserWarning)
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=modules)
        # In a list, which has no config: PEFT takes maps of families with experts for the experts'
        listed = nn.ModuleList([holder])
        inject_adapter_in_model(config, listed, adapter_name=name)
    holder.peft_config = getattr(holder, "peft_config", {}) | listed.peft_config  # type: ignore[operator]
    for parameter_name, parameter in holder.named_parameters():
        if "lora_" in parameter_name and f".{name}." in parameter_name:
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(True)


def lora_of(module: nn.Module, name: str) -> tuple[Tensor, Tensor, float]:
    """A [rank, in], B [out, rank] and the factor of the adapter of this name in a linear map."""
    layer = cast(LoraLayer, module)
    return _weight(layer.lora_A[name]), _weight(layer.lora_B[name]), float(layer.scaling[name])


class Adapted(nn.Module):
    """A part with PEFT adapters. adapters: by name, each with the module it was injected into."""

    adapters: dict[str, nn.Module]


class SharedHeads(Adapted):
    """K projections to the vocabulary: a view of the target's lm_head with one LoRA per head, so that one product with
    the shared weights serves all heads. Parameters: K*rank*(H + V). With `count`, of so many tokens: a copy of their
    rows of lm_head, and LoRA of them alone."""

    def __init__(self, target: Target, heads: int, rank: int, dtype: torch.dtype, count: int | None = None) -> None:
        super().__init__()
        check_width(target)
        path = next(n for n, m in target.model.named_modules() if m is target.lm_head)
        self.name = path.rsplit(".", 1)[-1]
        whole = view(target.lm_head)
        self._whole = {"": whole}  # a dict, so that it is no submodule
        self.lora = nn.ModuleDict({self.name: whole if count is None else _rows(whole, count)})
        self.adapters = {f"head_{k}": self.lora for k in range(heads)}
        for adapter in self.adapters:
            inject(self.lora, rank, [self.name], adapter, dtype)
        if count is not None:  # neither trained nor saved, so buffers; PEFT injects beside parameters alone
            base = self.base
            for name, parameter in list(base.named_parameters()):
                delattr(base, name)
                base.register_buffer(name, parameter.detach(), persistent=False)

    @property
    def layer(self) -> LoraLayer:
        return cast(LoraLayer, self.lora[self.name])

    @property
    def base(self) -> nn.Linear:
        return cast(nn.Linear, self.layer.base_layer)

    @torch.no_grad()
    def select(self, ids: Tensor) -> None:
        """The rows of lm_head are those of these tokens, int64."""
        whole = self._whole[""]
        self.base.weight.copy_(whole.weight[ids])
        if whole.bias is not None:
            self.base.bias.copy_(whole.bias[ids])

    def weights(self) -> tuple[Tensor, Tensor]:
        """LoRA A [K, H, r] and B [K, r, V] of all heads, stacked: [K, r, H] and [K, V, r] seen as columns."""
        layer = self.layer
        a = torch.stack([_weight(layer.lora_A[n]) for n in self.adapters])
        b = torch.stack([_weight(layer.lora_B[n]) * layer.scaling[n] for n in self.adapters])
        return a.mT, b.mT

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Logits [k, n, V] of the first k heads for x [k, n, H], given their stacked `weights`."""
        logits = F.linear(x, self.base.weight, self.base.bias)
        return torch.baddbmm(logits, x @ a[: len(x)].to(x.dtype), b[: len(x)].to(x.dtype))


def _rows(head: nn.Linear, count: int) -> nn.Linear:
    """A linear map to the first `count` outputs of another, with weights of its own."""
    part = view(head)
    part.out_features = count
    for name, parameter in list(part.named_parameters()):
        setattr(part, name, nn.Parameter(parameter.detach()[:count].clone(), requires_grad=False))
    return part


def check_width(target: Target) -> None:
    """Raises ValueError for a target whose lm_head reads other states than its decoder gives."""
    if (width := next(target.lm_head.parameters()).shape[-1]) != target.hidden_size:
        raise ValueError(
            f"the lm_head of {type(target.model).__name__} reads {width} numbers, its hidden states have "
            f"{target.hidden_size}: drafters that share it can not be built; take prompt_lookup"
        )


_FINAL_NORMS = "norm", "norm_f", "final_layernorm", "final_layer_norm", "ln_f", "embedding_norm"


def norm_name(decoder: nn.Module) -> str:
    """The name of a decoder's final norm, `norm` where it has none by a known name."""
    return next((name for name in _FINAL_NORMS if isinstance(getattr(decoder, name, None), nn.Module)), "norm")


def final_norm(decoder: nn.Module) -> nn.Module | None:
    return getattr(decoder, norm_name(decoder), None)


class Block(Adapted, ABC):
    """A decoder layer, or several, with final norm and lm_head, that can be fed with any hidden states. layer: index in
    `target` of the last, which is the target's last; first: of the first of them; dtype: of decoding; full: whether the
    layers' own weights are trained."""

    layer: int
    dtype: torch.dtype
    full: bool
    _views: dict[bool, Target]  # by whether it trains; a dict, so that they are no submodules

    @property
    def first(self) -> int:
        return self.layer

    @property
    def target(self) -> Target:
        """The model that runs it, as it is at present: in training or laid out for decoding."""
        return self._views[self.training]

    def train(self, mode: bool = True) -> Self:
        """Leaving training mode lays out what was trained for decoding; dropout stays off, as in the frozen target."""
        super().train(False)
        self.training = mode
        if not mode:  # built before it takes the place of the old, which a call may be using
            with torch.no_grad():
                old, self._views[False] = self._views.get(False), self._ready()
            if old is not None:
                old.forget()
        return self

    @abstractmethod
    def _ready(self) -> Target:
        """The model laid out for decoding, in `dtype`."""

    def text(self, hidden: Tensor, tokens: Tensor, block: bool = True, logits: bool = True, **more: Any) -> Pass:
        """The layers on whole texts, reading `hidden` [B, S, ...]; tokens int64 [B, S]. The last one's output is among
        the pass's features. Without `block` the final norm reads `hidden` itself. more: see `Target.text`."""
        start, reads = (self.first, (self.layer,)) if block else (self.layer + 1, ())
        return self.target.text(tokens, logits, (start, self.layer + 1), hidden, reads, **more)


class Tail(Block):
    """The target's last decoder layer, final norm and lm_head as a view that can be fed with any hidden states.

    rank: of the LoRA that PEFT puts into the layer's linear maps (and into lm_head with `head`) under the name
    `adapter`; 0 leaves the layer as it is, and `full` makes it a trained copy instead. norm: what stands in for the
    final norm, and is trained too. form: of the layer, where it is to be another (see `parts.layer_form`). For decoding
    the layer's LoRA is merged into weights of its own once, which takes the memory of one layer.
    """

    def __init__(
        self,
        target: Target,
        rank: int,
        dtype: torch.dtype,
        adapter: str,
        head: bool = False,
        full: bool = False,
        norm: nn.Module | None = None,
        form: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        target.part(target.n_layers, target.n_layers)  # refused here where the target has no parts
        self.layer, self.adapter, self.dtype, self.full = target.n_layers - 1, adapter, target.dtype, full
        if getattr(target.model.config.get_text_config(), "num_kv_shared_layers", 0):
            raise ValueError(f"{type(target.model).__name__} shares keys between layers: its last can not stand alone")
        model = view(target.model)
        if form is not None:
            put_form(model, form)
        self.replaces_norm = norm is not None
        if norm is not None:
            setattr(decoder_of(model), norm_name(decoder_of(model)), norm)
        inner = Target(model, frozen=False, returns=target.returns, engine=target.engine)
        block = inner.layers[self.layer]
        if full:
            for path, module in list(block.named_modules()):
                if isinstance(module, Int8Linear):
                    block.set_submodule(path, unquantized(module))
            owners = {
                f"{path}.{name}": (module, name)
                for path, module in block.named_modules()
                for name, _ in module.named_parameters(recurse=False)
            }
            whole = {path: getattr(*owner) for path, owner in owners.items()}  # gathered, where a target is divided
            odd = [n for n, p in whole.items() if type(p) not in (Tensor, nn.Parameter) or not p.is_floating_point()]
            if odd:
                raise ValueError(
                    f"the target's last layer holds quantized weights ({odd[0]}), which can not be trained in full: "
                    "take drafter.train=lora, or drafter.prefix=false for sequential heads"
                )
            for path, (module, name) in owners.items():
                setattr(module, name, nn.Parameter(own_weight(name, whole[path], dtype, target.device)))
        elif rank > 0:
            inject(model, rank, list(linear_maps(model, head)), adapter, dtype)
        self.adapters = {adapter: model} if rank > 0 and not full else {}
        # Only these two are submodules; the rest of the view is the target's own.
        self.parts = nn.ModuleList([block, model.get_output_embeddings()])
        self._views = {True: inner}

    @property
    def head(self) -> nn.Linear:
        """The target's lm_head."""
        return cast(nn.Linear, self.parts[1])

    def _ready(self) -> Target:
        trained = self._views[True]  # with PEFT's layers, which are merged
        target = Target(view(trained.model), frozen=False, returns=trained.returns, engine=trained.engine)
        block = target.layers[self.layer]
        norm = [target.decoder.get_submodule(norm_name(target.decoder))] if self.replaces_norm else []
        for module in block.modules():  # before anything is cast: what LoRA adds is computed as it was trained
            for name, child in list(module.named_children()):
                if not isinstance(child, LoraLayer) or self.adapter not in child.lora_A:
                    continue
                base = child.get_base_layer()
                # What holds no plain weights, as quantized maps and fused experts, stays as PEFT runs it.
                whole = isinstance(base, Int8Linear) or type(base.weight) in (Tensor, nn.Parameter)
                if isinstance(base, (nn.Linear, Conv1D)) and whole and base.weight.is_floating_point():
                    plain = unquantized(base) if isinstance(base, Int8Linear) else view(base)
                    delta: Tensor = child.get_delta_weight(self.adapter)  # type: ignore[operator]
                    merged = plain.weight + delta.to(plain.weight.dtype)
                    plain.weight = nn.Parameter(merged.to(self.dtype), requires_grad=False)
                    in_8_bits([plain.weight])
                    setattr(module, name, plain)
        for module in (block, *norm):
            cast_parameters(module, self.dtype)
        head = target.model.get_output_embeddings()
        if isinstance(head, LoraLayer) and self.adapter in head.lora_A:
            for lora in (*head.lora_A.values(), *head.lora_B.values()):
                lora.weight = nn.Parameter(_weight(lora).to(self.dtype), requires_grad=False)
        return target


def _weight(linear: object) -> Tensor:
    return cast(nn.Linear, linear).weight


# Their fused kernels read some weights themselves; PEFT refuses adapters there.
_MAMBAS = {"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"}


def adaptable(model: PreTrainedModel, name: str, module: nn.Module) -> bool:
    """Whether a part of a model is a linear map that an adapter can stand beside."""
    read = model.config.model_type in _MAMBAS and name.endswith((".out_proj", ".dt_proj"))
    return isinstance(module, (nn.Linear, Conv1D)) and not read


def linear_maps(model: PreTrainedModel, head: bool) -> dict[str, nn.Module]:
    """The linear maps of a model's last decoder layer (and its lm_head), by their names in the model; none beside a
    mixture's experts: PEFT would match the experts too."""
    parts = set(layer_stack(model)[-1].modules()) | ({model.get_output_embeddings()} if head else set())
    mixtures = tuple(n.removesuffix("experts") for n, _ in model.named_modules() if n.endswith(".experts"))
    return {
        name: module
        for name, module in model.named_modules()
        if module in parts and adaptable(model, name, module) and not name.startswith(mixtures)
    }
