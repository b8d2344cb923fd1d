"""EAGLE-3 (arXiv 2503.01840): a draft layer that serving engines load, beside the frozen target.

Embeddings and, by default, lm_head are the target's own as views; the rest are plain modules, so that
`selfspec export` can write them as vLLM, SGLang and TensorRT-LLM read them. See `parts.eagle3_layer` for what
the layer computes, `parts.unrolled` for how it is trained and drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.core.target import Target
from selfspec.drafters.base import one_of, training_dtype
from selfspec.drafters.parts.eagle3_layer import Eagle3Layer
from selfspec.drafters.parts.feature_layer import layers_of, usual_layers
from selfspec.drafters.parts.llama_config import layer_config
from selfspec.drafters.parts.unrolled import Unrolled, UnrolledConfig
from selfspec.drafters.parts.vocabulary import check_head


@dataclass
class Eagle3Config(UnrolledConfig):
    """As `UnrolledConfig` (layers None: the three that serving engines read by default, 1, n/2 - 1 and n - 4; where the
    target is too short for these, 1, n/2 and n - 2). head: shared, the target's lm_head, or own, trained; llama: what
    the layer has other than the target's last, by the names of transformers' LlamaConfig: intermediate_size,
    num_attention_heads, num_key_value_heads, head_dim, attention_bias, rms_norm_eps, rope_parameters,
    max_position_embeddings.

    norm_before_residual: the residual is the normed state (vLLM alone reads this); norm_before_fc: one norm over all
    features; fc_norm: one for each; norm_output: the next step reads the output behind the final norm.
    """

    head: str = "shared"
    llama: dict[str, Any] = field(default_factory=dict)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("head", self.head, ("shared", "own"))
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            one_of(name, getattr(self, name), (True, False))


class Eagle3(Unrolled):
    """One EAGLE-3 layer. Parameters: see `Eagle3Layer`."""

    config: Eagle3Config
    layer: Eagle3Layer

    def __init__(self, target: Target, config: Eagle3Config) -> None:
        super().__init__(target, config)
        self.reads = layers_of(config.layers, target, usual_layers(target))
        own = config.head == "own"
        rows = config.draft_vocab if own and config.draft_vocab is not None else target.vocab_size
        self.layer = Eagle3Layer(
            target,
            self.reads,
            layer_config(target, config.llama, rows),
            training_dtype(target.dtype),
            config.norm_before_residual,
            config.norm_before_fc,
            config.fc_norm,
            config.norm_output,
            own,
        )
        self.layer.start_head(torch.arange(rows, device=target.device))
        if not own:
            check_head(self.layer.block, self.head, config.draft_vocab)

    @property
    def head(self) -> nn.Linear:
        return self.layer.head

    def drafts_only(self, ids: Tensor) -> None:
        super().drafts_only(ids)
        self.layer.start_head(ids)
