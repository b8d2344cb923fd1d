"""A stack of decoder layers that drafts a block of tokens in one pass (DFlash, arXiv 2602.06036).

Positions of the text enter every layer as keys and values of one state each, which is made of the target's features
there: no layer runs on them. The rows of a block are the last token and masks; they read the text and each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from selfspec.core.cache import KVCache
from selfspec.core.contract import Context
from selfspec.core.pass_cache import KV, PassCache, pass_cache
from selfspec.core.support import cache_name, view
from selfspec.core.target import Target
from selfspec.drafters.base import training_dtype
from selfspec.drafters.parts.block_masks import ATTENTION, Mask
from selfspec.drafters.parts.feature_cache import FeatureCache
from selfspec.drafters.parts.feature_layer import FeatureReader
from selfspec.drafters.parts.views import final_norm
from selfspec.drafters.parts.weights import cast_parameters, copy_scale, norm_before_mlp, start_linear


def keys_values(attention: Any, states: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """[B, key heads, n, D] each, of states [B, n, H], as Qwen3's attention makes them."""
    keys, values = (
        part.unflatten(-1, (-1, attention.head_dim)) for part in (attention.k_proj(states), attention.v_proj(states))
    )
    keys, values = attention.k_norm(keys).transpose(1, 2), values.transpose(1, 2)
    return apply_rotary_pos_emb(keys, keys, *rotary)[0].to(values.dtype), values


class BlockStack(nn.Module):
    """The stack by the names that DFlash's files have, of Qwen3's layers. mask: [H], what a mask row enters with;
    sliding: layers with a window.

    Parameters: F*H*H for F features, 3*H, and of each layer 2*H*D for each head and key head, 2*D, 3*H*I + 2*H.
    """

    def __init__(self, config: LlamaConfig, features: int, count: int, sliding: Sequence[int] = ()) -> None:
        super().__init__()
        hidden, self.sliding = config.hidden_size, tuple(sliding)
        self.fc = nn.Linear(features * hidden, hidden, bias=False)
        self.hidden_norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        config._attn_implementation = ATTENTION
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, i) for i in range(count))  # type: ignore[arg-type]
        self.cache_name = cache_name(self.layers[0])
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.mask = nn.Parameter(torch.zeros(hidden))
        self.rotary = LlamaRotaryEmbedding(config)

    @torch.no_grad()
    def start_from(self, target: Target) -> None:
        """Initial weights: the highest feature is read as it is; layers begin from the matrices and norms of the
        target's last ones. Matrices without a counterpart of the same shape begin at random."""
        self.fc.weight.zero_()
        self.fc.weight[:, -len(self.fc.weight) :] = torch.eye(len(self.fc.weight))
        last = list(target.layers)[-len(self.layers) :]
        for i, layer in enumerate(self.layers):
            theirs = dict(last[i].named_modules()) if i < len(last) else {}
            for name, module in layer.named_modules():
                if isinstance(module, nn.Linear):
                    start_linear(module, module.weight, theirs.get(name), module.in_features**-0.5)
            before = norm_before_mlp(theirs)
            copy_scale(layer.input_layernorm, theirs.get("input_layernorm"), target.dtype)  # type: ignore[arg-type]
            copy_scale(layer.post_attention_layernorm, before, target.dtype)  # type: ignore[arg-type]
        copy_scale(self.norm, final_norm(target.decoder), target.dtype)
        self.mask.copy_(target.model.get_input_embeddings().weight.float().mean(0))

    def read(self, stacked: Tensor, positions: Tensor, cache: PassCache) -> None:
        """Put positions of the text, features [B, n, F*H], into the cache of every layer."""
        states = self.hidden_norm(F.linear(stacked, self.fc.weight.to(stacked.dtype)))
        rotary = self.rotary(states, positions)
        for i, layer in enumerate(self.layers):
            cache.update(*keys_values(layer.self_attn, states, rotary), i)

    def forward(self, states: Tensor, positions: Tensor, masks: Sequence[Mask], cache: PassCache) -> Tensor:
        """Outputs [B, n, H], behind the final norm, of blocks of rows that enter as states [B, n, H]. masks: of layers
        that read all, and of sliding ones."""
        rotary = self.rotary(states, positions)
        for i, layer in enumerate(self.layers):
            read: dict[str, Any] = {"attention_mask": masks[i in self.sliding], self.cache_name: cache}
            states = layer(states, position_embeddings=rotary, **read)
        return self.norm(states)  # type: ignore[no-any-return]


class FeatureStack(FeatureReader):
    """A stack in training, and `ready` for decoding in `dtype`, the target's (None in training). last: the largest
    position."""

    ready: BlockStack | None

    def __init__(
        self, target: Target, layers: tuple[int, ...], config: LlamaConfig, count: int, sliding: Sequence[int]
    ) -> None:
        super().__init__()
        self.layers, self.count, self.dtype, self.config, self.target = layers, count, target.dtype, config, target
        self.last = (target.max_positions or 2**62) - 1
        stack = BlockStack(config, len(layers), count, sliding)
        self.trained_stack = stack.to(target.device, training_dtype(target.dtype))
        self.trained_stack.start_from(target)
        self.ready = None

    def train(self, mode: bool = True) -> FeatureStack:
        """Leaving training mode casts what was trained to the target's dtype, for decoding."""
        super().train(mode)
        if self.ready is not None:
            self.target.engine.forget(self.ready.modules())
        self.ready = None if mode else view(self.trained_stack)
        if self.ready is not None:
            cast_parameters(self.ready, self.dtype)
        return self

    @property
    def device(self) -> torch.device:
        return self.target.device


class BlockCache(FeatureCache[FeatureStack, KV]):
    """Keys and values of a stack in one call, and features of verified positions that it has not read."""

    def _open(self, rows: int, verified: KVCache) -> list[KVCache]:
        stack = self.layer
        heads, width = int(stack.config.num_key_value_heads or 0), int(stack.config.head_dim or 0)
        like = torch.zeros(1, heads, 1, width, dtype=stack.dtype, device=stack.device)
        shape = rows, verified.capacity, verified.limit, verified.engine, stack.device
        return [KVCache([(like, like)] * stack.count, *shape)]

    def _view(self, entries: int, logits: bool) -> KV:
        return self.caches[0].view(0, self.layer.count, entries)

    def _enter(self, context: Context, count: list[int]) -> None:
        width, engine = max(count), context.target.engine
        kv, stacked = self._view(width, False), engine.padded(self._stacked(count, width))
        engine.run(read_text, self.layer.ready, kv, stacked, self.layer.last, compiled=False)


def read_text(stack: BlockStack, kv: KV, stacked: Tensor, last: int) -> KV:
    """Put features [B, n, F*H] of the next positions into the cache; returns it."""
    entries = kv.lengths[:, None] + torch.arange(stacked.shape[1], device=stacked.device)
    stack.read(stacked, entries.clamp(max=last), pass_cache(kv, entries, None, None))
    return kv
