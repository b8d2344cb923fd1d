"""The decoder layer of EAGLE-3 (arXiv 2503.01840) as vLLM, SGLang and TensorRT-LLM compute it.

Row t reads the state of position t (features fused, or its own output) and the embedding of token t + 1, each behind a
norm of its own, side by side: queries, keys and values are maps of 2H numbers. The residual is the state alone. Further
layers behind it (P-EAGLE has them) are stock ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer

from selfspec.core.passes import Skipped
from selfspec.core.support import view
from selfspec.core.target import Target
from selfspec.drafters.base import one_of, pack, whole
from selfspec.drafters.parts.feature_layer import FeatureLayer, normed
from selfspec.drafters.parts.llama_config import layer_config
from selfspec.drafters.parts.unrolled import UnrolledConfig
from selfspec.drafters.parts.views import Block, final_norm
from selfspec.drafters.parts.weights import cast_parameters, copy_scale, for_decoding, norm_before_mlp, start_linear

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")


@dataclass
class LayersConfig(UnrolledConfig):
    """What published layers differ in, most of it by the names of vLLM's config; see `Eagle3Config`."""

    head: str = "shared"
    embeddings: str = "shared"
    llama: dict[str, Any] = field(default_factory=dict)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    stack: int = 1
    parallel: bool = False
    mask_token: int | None = None
    anchors: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("stack", "anchors"):
            whole(name, getattr(self, name))
        one_of("parallel", self.parallel, (True, False))
        if self.parallel and self.norm_output:
            raise ValueError("drafter.norm_output=true: with drafter.parallel no output is read again; leave it out")
        if not self.parallel and self.mask_token is not None:
            raise ValueError(f"drafter.mask_token={self.mask_token}: masks draft with drafter.parallel=true alone")
        for name in ("head", "embeddings"):
            one_of(name, getattr(self, name), ("shared", "own"))
        for name in FLAGS:
            one_of(name, getattr(self, name), (True, False))


class _NoEmbedding(nn.Module):
    """Stands for the draft model's embeddings, beside the states: what enters its layers comes with the cache."""

    def __init__(self, hidden: int, like: nn.Module) -> None:
        super().__init__()
        self.hidden, self.__dict__["like"] = hidden, like

    def forward(self, ids: Tensor) -> Tensor:
        weight = next(self.__dict__["like"].parameters())
        return torch.zeros(*ids.shape, self.hidden, dtype=weight.dtype, device=weight.device)


class DraftLayer(nn.Module):
    """Layer 1: reads embeddings and states [B, n, 2H] behind their norms, and the states as residual. Parameters:
    2H * (heads + 2 key heads) * D + heads * D * H + 3 * H * I + 3 * H."""

    def __init__(self, config: LlamaConfig, form: LayersConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.head_dim
        keys = config.num_key_value_heads
        assert width is not None
        assert keys is not None
        self.norm_before_residual = form.norm_before_residual
        self.hidden_norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.self_attn = (Qwen3Attention if form.qk_norm else LlamaAttention)(config, 1)  # type: ignore[arg-type]
        for name, count in {"q_proj": config.num_attention_heads, "k_proj": keys, "v_proj": keys}.items():
            setattr(self.self_attn, name, nn.Linear(2 * hidden, count * width, bias=config.attention_bias))
        self.mlp = LlamaMLP(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        embedded, states = hidden_states.chunk(2, -1)
        normed = self.hidden_norm(states)
        residual = normed if self.norm_before_residual else states
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        attended, _ = self.self_attn(hidden_states=both, **kwargs)
        residual = residual + attended
        return residual + self.mlp(self.post_attention_layernorm(residual))  # type: ignore[no-any-return]


class _DraftBlock(Block):
    """The layers with their final norm and lm_head, as a stock model of which only these run."""

    full, first = True, 1

    def __init__(
        self, target: Target, config: LlamaConfig, layers: Sequence[nn.Module], norm: LlamaRMSNorm, head: nn.Module
    ) -> None:
        super().__init__()
        self.layer, self.dtype, self.adapters = len(layers), target.dtype, {}
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model.model.layers = nn.ModuleList([Skipped(layers[0], 0), *layers])
        model.model.norm = norm
        model.model.rotary_emb = LlamaRotaryEmbedding(config).to(target.device)
        model.set_input_embeddings(_NoEmbedding(2 * config.hidden_size, norm))
        model.set_output_embeddings(head)
        self._most = target.max_positions  # not its own, which a long text may exceed
        self._views = {True: self._target(model, target)}

    def _target(self, model: LlamaForCausalLM, like: Target) -> Target:
        target = Target(model, frozen=False, returns=0, engine=like.engine)
        target.max_positions = self._most
        return target

    def _ready(self) -> Target:
        trained = self._views[True]
        model = view(trained.model)
        for module in (*model.model.layers[1:], model.model.norm, model.lm_head):
            cast_parameters(module, self.dtype)
        return self._target(model, trained)


class Eagle3Layer(FeatureLayer):
    """`midlayer`, `fc` and the norms of an EAGLE-3 draft model, by the names that its files have.

    Parameters: F*H*H for F features, those of `DraftLayer` and of further layers, H of the final norm, F*H for norms of
    features where asked for, F*H of masks, and those of a head and of embeddings of its own.
    """

    packed_fc: Tensor | None
    packed_mask: Tensor | None
    mask_hidden: nn.Parameter | None

    def __init__(
        self, target: Target, layers: tuple[int, ...], form: LayersConfig, rows: int, dtype: torch.dtype
    ) -> None:
        """rows: of a head of its own; dtype: of what is trained. Raises ValueError as `layer_config` does, and for a
        mask token that the target does not have."""
        super().__init__()
        config, hidden, tokens = layer_config(target, form.llama, rows), target.hidden_size, target.vocab_size
        self.layers, self.config, self.after_norm = layers, config, form.norm_output
        mask = tokens - 1 if form.mask_token is None else form.mask_token
        whole("mask_token", mask, 0, tokens - 1, ": the target's tokens")
        self.mask_token = mask if form.parallel else None
        config.num_hidden_layers = 1 + form.stack  # the first stands for what is read
        place: dict[str, Any] = {"device": target.device, "dtype": dtype}
        self.fc = nn.Linear(len(layers) * hidden, hidden, bias=False)
        self.midlayer = DraftLayer(config, form)
        stock: Any = Qwen3DecoderLayer if form.qk_norm else LlamaDecoderLayer
        self.further = nn.ModuleList(stock(config, i) for i in range(2, 1 + form.stack))
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.mask_hidden = nn.Parameter(torch.randn(len(layers) * hidden)) if form.parallel else None
        self.input_norm = LlamaRMSNorm(len(layers) * hidden, config.rms_norm_eps) if form.norm_before_fc else None
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(hidden, config.rms_norm_eps) for _ in layers if form.fc_norm)
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False) if form.head == "own" else None
        theirs, own = target.model.get_input_embeddings().weight, form.embeddings == "own"
        self.embedding = nn.Parameter(theirs.detach().clone() if own else theirs, own)
        self.to(**place)
        self.start_from(target)
        if not own:
            self.embedding = nn.Parameter(theirs, requires_grad=False)
        self.target_head = view(target.lm_head)
        self.tail = _DraftBlock(target, config, [self.midlayer, *self.further], self.norm, self.head)
        pack(self, packed_fc=None, packed_mask=None)

    @torch.no_grad()
    def start_from(self, target: Target) -> None:
        """Initial weights: the target's last layers, applied to the highest feature. Weights that read the next token's
        embedding start at zero, and matrices without a counterpart of the same shape at random."""
        hidden = target.hidden_size
        self.fc.weight.zero_()
        self.fc.weight[:, -hidden:] = torch.eye(hidden)
        last = list(target.layers)[-1 - len(self.further) :]
        for layer, counterpart in zip([self.midlayer, *self.further], last, strict=False):
            theirs = dict(counterpart.named_modules())
            for name, module in layer.named_modules():
                if not isinstance(module, nn.Linear):
                    continue
                wide = layer is self.midlayer and name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
                into = module.weight[:, hidden:] if wide else module.weight
                start_linear(module, into, theirs.get(name), hidden**-0.5)
            reading = self.midlayer.hidden_norm if layer is self.midlayer else layer.input_layernorm
            copy_scale(reading, theirs.get("input_layernorm"), target.dtype)
            after = layer.post_attention_layernorm
            copy_scale(after, norm_before_mlp(theirs), target.dtype)
        copy_scale(self.norm, final_norm(target.decoder), target.dtype)

    @property
    def head(self) -> nn.Linear:
        """What maps to logits: the target's lm_head, or its own."""
        return self.target_head if self.lm_head is None else self.lm_head

    @torch.no_grad()
    def start_head(self, ids: Tensor) -> None:
        """A head of its own begins as the target's rows of these tokens, int64."""
        if self.lm_head is not None:
            self.lm_head.weight.copy_(self.target_head.weight[ids])

    def train(self, mode: bool = True) -> Eagle3Layer:
        """Leaving training mode casts what was trained to the target's dtype, for decoding."""
        super().train(mode)
        pack(self, packed_fc=None if mode else for_decoding(self.fc.weight, self.tail.dtype))
        pack(self, packed_mask=None)
        if not mode and self.mask_hidden is not None:
            with torch.no_grad():
                pack(self, packed_mask=self.fused(self.mask_hidden.to(self.tail.dtype)))
        return self

    def fused(self, stacked: Tensor) -> Tensor:
        if self.input_norm is not None:
            stacked = normed(self.input_norm, stacked)
        if self.fc_norm:
            parts = stacked.chunk(len(self.layers), -1)
            stacked = torch.cat([normed(norm, part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return F.linear(stacked, self.fc.weight.to(stacked.dtype) if self.packed_fc is None else self.packed_fc)

    def masks(self, rows: int, count: int) -> tuple[Tensor, Tensor]:
        """What so many masks of each row enter with: states [rows, count, H], and tokens, int64 [rows, count]."""
        assert self.mask_hidden is not None
        token, packed = self.mask_token or 0, self.packed_mask
        states = self.fused(self.mask_hidden.to(self.fc.weight)) if packed is None else packed
        return states.expand(rows, count, -1), torch.full((rows, count), token, device=states.device)

    def entry(self, states: Tensor, tokens: Tensor) -> Tensor:
        return torch.cat([F.embedding(tokens.to(self.embedding.device), self.embedding).to(states), states], -1)
