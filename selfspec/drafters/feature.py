"""Feature head: one decoder layer over the target's features and the embedding of the token that followed.

The layer is a view of the target's last decoder layer, with LoRA or trained in full; final norm and lm_head are views
as they are. See `parts.unrolled` for the sources and for how it is trained and drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.core.target import Target
from selfspec.drafters.base import one_of, training_dtype, whole
from selfspec.drafters.parts.feature_layer import LastLayer, layers_of
from selfspec.drafters.parts.unrolled import Unrolled, UnrolledConfig
from selfspec.drafters.parts.vocabulary import check_head


@dataclass
class FeatureConfig(UnrolledConfig):
    """As `UnrolledConfig` (layers None: one low, one in the middle, the last). train: the decoder layer in full, or
    lora with `rank`; rank: of that LoRA."""

    train: str = "full"
    rank: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("train", self.train, ("full", "lora"))
        whole("rank", self.rank)


class Feature(Unrolled):
    """One decoder layer that continues the target's features.

    Parameters: F*H*H + 2*H*H for F features, and those of the layer, or of its LoRA.
    """

    config: FeatureConfig

    def __init__(self, target: Target, config: FeatureConfig) -> None:
        super().__init__(target, config)
        last = target.n_layers - 1
        self.reads = layers_of(config.layers, target, {min(1, last), target.n_layers // 2, last})
        full = config.train == "full"
        self.layer: LastLayer = LastLayer(target, self.reads, config.rank, full, training_dtype(target.dtype))
        check_head(self.layer.tail, self.head, config.draft_vocab)
