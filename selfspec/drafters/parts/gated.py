"""Views of the target whose last rows of a pass run through an adapter: mask tokens under a gated LoRA, or under
vectors.

Which rows are gated follows from their place: the first `plain` rows compute exactly what the target computes, all rows
behind them are mask rows. So the gate is a slice, fixed when the view is built, and no state is set from outside.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from selfspec.core.support import layer_stack, view
from selfspec.core.target import Target
from selfspec.drafters.parts.views import Adapted, adaptable, inject, lora_of

_OF_PEFT = re.compile(r"\.(lora_\w+|base_layer)(\.|$)")  # parts of a map that holds an adapter already


class _GatedLinear(nn.Module):
    """A linear map, and what LoRA adds to it on the rows behind the first `plain`."""

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor, scale: float, plain: int) -> None:
        super().__init__()
        self.base, self.a, self.b = base, a, b
        self.scale, self.plain = scale, plain

    def forward(self, x: Tensor) -> Tensor:  # [B, N, in] -> [B, N, out]
        out: Tensor = self.base(x)
        rows = x[:, self.plain :]
        added = F.linear(F.linear(rows, self.a.to(rows.dtype)), self.b.to(rows.dtype)) * self.scale
        return torch.cat([out[:, : self.plain], out[:, self.plain :] + added], 1)


class _GatedVectors(nn.Module):
    """A linear map, and on the rows behind the first `plain` a scale and a bias of its outputs: which of scale [K, out]
    and bias [K, out], `which`, int64 [R], says. A pass may have fewer rows, and spare rows behind them."""

    which: Tensor

    def __init__(self, base: nn.Module, scale: Tensor, bias: Tensor, which: Tensor, plain: int) -> None:
        super().__init__()
        self.base, self.scale, self.bias, self.plain = base, scale, bias, plain
        self.register_buffer("which", which, persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, N, in] -> [B, N, out]
        out: Tensor = self.base(x)
        end = min(self.plain + len(self.which), out.shape[1])
        which = self.which[: end - self.plain]
        rows = out[:, self.plain : end]
        changed = rows * self.scale[which].to(rows.dtype) + self.bias[which].to(rows.dtype)
        return torch.cat([out[:, : self.plain], changed, out[:, end:]], 1)


class _WithMasks(nn.Module):
    """Token embeddings, continued by those of mask tokens: id V + j is the j-th mask."""

    def __init__(self, base: nn.Module, masks: Tensor, vocab: int) -> None:
        super().__init__()
        self.base, self.masks, self.vocab = base, masks, vocab

    def forward(self, ids: Tensor) -> Tensor:
        known: Tensor = self.base(ids.clamp(max=self.vocab - 1))
        masked = F.embedding((ids - self.vocab).clamp(min=0), self.masks).to(known.dtype)
        return torch.where((ids < self.vocab)[..., None], known, masked)


class GatedTarget(Adapted):
    """Mask embeddings and an adapter on linear maps of the target's layers, and the views in which they run.

    Parameters: masks * H, and of every map so named rank * (inputs + outputs), or 2 * masks * outputs with vectors.
    """

    def __init__(
        self, target: Target, masks: int, rank: int | None, maps: list[str] | None, dtype: torch.dtype, adapter: str
    ) -> None:
        """rank: of the LoRA, None for vectors; maps: names of linear maps, such as o_proj; the adapter is in each
        layer's (None: see `adapted_maps`). Raises ValueError for a name that no layer has."""
        super().__init__()
        config = target.model.config.get_text_config()
        if config.model_type.startswith("gemma4") and getattr(config, "hidden_size_per_layer_input", 0):
            raise ValueError("mask tokens have no embeddings for each layer, as Gemma 4 reads; take another drafter")
        self.target, self.dtype, self.adapter = target, target.dtype, adapter  # of target: no submodule
        model = view(target.model)
        wanted = [] if rank == 0 else adapted_maps(model, maps)
        if rank:
            inject(model, rank, wanted, adapter, dtype)
        self.adapters = {adapter: model} if rank else {}
        self.maps = nn.ModuleList([model.get_submodule(name) for name in wanted] if rank else [])
        self.scales, self.biases = nn.ParameterList(), nn.ParameterList()
        if rank is None:
            for name in wanted:
                linear, device = cast(nn.Linear, model.get_submodule(name)), target.device
                shape = masks, linear.weight.shape[1 if isinstance(linear, Conv1D) else 0]
                self.scales.append(nn.Parameter(torch.ones(shape, dtype=dtype, device=device)))
                self.biases.append(nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)))
        embeddings = target.model.get_input_embeddings()
        table, larger = embeddings.weight, float(getattr(embeddings, "embed_scale", 1))  # as layers see them
        mean = table.detach().to(dtype).mean(0) * larger
        scale = table.detach().to(dtype).std() * larger
        # Every mask begins near the mean of all tokens; a little noise tells them apart.
        scatter = torch.randn(masks, table.shape[1], generator=torch.Generator().manual_seed(0)).to(mean)
        if rank != 0:
            self.masks = nn.Parameter(mean + 0.1 * scale * scatter)
        else:
            self.register_buffer("masks", mean + 0.1 * scale * scatter, persistent=False)
        self.paths = wanted
        self._views: dict[tuple[int, tuple[int, ...]], Target] = {}
        self._rebuilt = target.rebuilt
        self._copies: dict[int, nn.Parameter] = {}

    def train(self, mode: bool = True) -> GatedTarget:
        """Views are built anew from what was trained."""
        super().train(mode)
        self._copies = {}
        self._forget()
        return self

    def _forget(self) -> None:
        for old in self._views.values():
            old.forget()
        self._views, self._rebuilt = {}, self.target.rebuilt

    def behind(self, plain: int, depths: Sequence[int]) -> Target:
        """The target with its rows behind the first `plain` gated. depths: of each of them which mask it is, from 0.
        Shares all weights; built once."""
        key = plain, tuple(depths) if len(self.scales) else ()
        if key not in self._views:
            self.target.follow()
        if self._rebuilt != self.target.rebuilt:  # passes on these verify: they follow every change of the model
            self._forget()
        views = self._views
        if key not in views:
            model = view(self.target.model)
            which = torch.tensor(key[1], dtype=torch.long, device=self.target.device)
            for name, scale, bias in zip(self.paths, self.scales, self.biases, strict=False):
                gated = _GatedVectors(model.get_submodule(name), self._ready(scale), self._ready(bias), which, plain)
                model.set_submodule(name, gated)
            for name, module in zip(self.paths, self.maps, strict=False):
                a, b, scale = lora_of(module, self.adapter)
                linear = _GatedLinear(model.get_submodule(name), self._ready(a), self._ready(b), scale, plain)
                model.set_submodule(name, linear)
            vocab = self.target.vocab_size
            model.set_input_embeddings(_WithMasks(model.get_input_embeddings(), self._ready(self.masks), vocab))
            views[key] = Target(model, frozen=False, returns=self.target.returns, engine=self.target.engine)
        return views[key]

    def _ready(self, weight: Tensor) -> Tensor:
        """The tensor itself while training; in decoding a copy in the target's dtype, one for all views."""
        if self.training:
            return weight
        if id(weight) not in self._copies:
            self._copies[id(weight)] = nn.Parameter(weight.detach().to(self.dtype), requires_grad=False)
        return self._copies[id(weight)]


def adapted_maps(model: PreTrainedModel, names: list[str] | None) -> list[str]:
    """Paths of the linear maps of the layers with these last names; with None of the last of each block of a layer, of
    those whose rows can be told apart.

    Blocks with a mixture of experts are left out in all layers: PEFT would match the experts too.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    blocks = [(name, block) for layer in layer_stack(model) for name, block in layer.named_children()]
    mixed = {name for name, block in blocks if any(path.endswith("experts") for path, _ in block.named_modules())}
    inside = [
        [path for m in block.modules() if adaptable(model, path := paths[id(m)], m) and not _OF_PEFT.search(path)]
        for name, block in blocks
        if name not in mixed
    ]
    flat = _flat_rows(model, [path for block in inside for path in block])
    if names is None:
        return [block[-1] for block in inside if block and block[-1] not in flat]
    every = {path: path.rsplit(".", 1)[-1] for block in inside for path in block if path not in flat}
    if missing := set(names) - set(every.values()):
        raise ValueError(
            f"drafter.maps: no layer of {type(model).__name__} has a linear map {', '.join(sorted(missing))} whose "
            f"rows can be gated; there are {', '.join(sorted(set(every.values())))}"
        )
    return [path for path, last in every.items() if last in names]


def _flat_rows(model: PreTrainedModel, paths: list[str]) -> set[str]:
    """Which of these maps are given rows without a batch, [B * N, H], by a pass over two tokens."""
    flat: set[str] = set()

    def look(path: str, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        if given[0].ndim != 3:
            flat.add(path)

    looked = view(model)
    for path in paths:
        looked.get_submodule(path).register_forward_pre_hook(partial(look, path))
    with torch.no_grad():
        tokens = torch.zeros(1, 2, dtype=torch.long, device=model.get_output_embeddings().weight.device)
        looked.get_decoder()(input_ids=tokens, use_cache=False)
    return flat
