"""Settings and data that a training accepts, but that its user hardly means."""

from __future__ import annotations

from collections.abc import Iterator

from selfspec.data.store import Corpus
from selfspec.training.loop_config import LoopConfig
from selfspec.training.rows import DrafterTraining

_FEW = 0.02  # share of tokens that count, below which something is said


def config_warnings(
    config: DrafterTraining, loop: LoopConfig, train: Corpus, per_epoch: int, prompts: int
) -> Iterator[str]:
    """Warnings, each with the setting to change. per_epoch: rows of the data; prompts: that were found for calibration.

    Raises ValueError where no token of the text counts in the loss.
    """
    if not train.counted:
        raise ValueError(
            "none of the training tokens counts in the loss; conversations need turns of the assistant, and a chat "
            "template that shows them"
        )
    if (share := train.counted / max(1, len(train.tokens))) < _FEW and not config.distill.rows:
        yield f"only {share:.1%} of the training tokens count in the loss (what the assistant says); see --check"
    if prompts < config.prompts:
        yield f"train.prompts={config.prompts}, but the validation text has {prompts}, which are used"
    highest = max(loop.lr_factor(step) for step in range(loop.steps))
    if loop.warmup >= loop.steps:
        yield (
            f"loop.warmup={loop.warmup} reaches beyond loop.steps={loop.steps}: the learning rate gets to "
            f"{highest:.0%} of train.lr={config.lr:g}; set loop.warmup={max(1, loop.steps // 20)}"
        )
    elif highest < 1:
        yield (
            f"the learning rate gets to {highest:.0%} of train.lr={config.lr:g}: it falls before it has risen; lower "
            f"loop.warmup={loop.warmup} or loop.decay={loop.decay:g}"
        )
    epochs = loop.steps * loop.batch_size / per_epoch
    if epochs > 20 and not config.distill.rows:
        yield f"loop.steps={loop.steps} reads each text {epochs:.0f} times; give more data, or lower loop.steps"
