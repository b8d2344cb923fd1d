"""What a training would read, how long it would take and what it would hold, without training anything."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.core.target import Target
from selfspec.data.cut_prompts import sample_prompts
from selfspec.data.store import Corpus
from selfspec.data.windows import Packed
from selfspec.drafters.base import Drafter, Trained
from selfspec.training.checks import check_training
from selfspec.training.config_warnings import config_warnings
from selfspec.training.draft_loss import DraftLoss, states_dtype
from selfspec.training.loop_config import LoopConfig
from selfspec.training.resources import memory_line, peak_memory_mb, relative_cost
from selfspec.training.rows import DrafterTraining, check_sizes, rows_of, writer_of
from selfspec.training.step import autocast
from selfspec.training.synthetic import Synthetic
from selfspec.utils.errors import visible

_EXAMPLES = 3
_SHOWN = 600  # characters of an example
_BEFORE = 60  # tokens shown before what counts
_SECONDS = 8.0  # of timing a step
_QUANTILES = (0.05, 0.5, 0.95, 1.0)


def check(
    target: Target,
    tokenizer: Tokenizer,
    drafter: Drafter,
    train: Corpus,
    validation: Corpus,
    config: DrafterTraining,
    loop: LoopConfig,
) -> Iterator[str]:
    """The lines to print. Raises ValueError for what training would refuse, behind what can be told."""
    check_training(target, drafter, config, loop)
    check_sizes(config, loop, world=1)
    lines = [*_described("training", train), *_described("validation", validation)]
    rows = rows_of(train, config, loop)
    counts = config.prompts, config.prompt_tokens, config.new_tokens
    prompts = sample_prompts(validation, tokenizer, *counts, target.max_positions)
    lines += [f"warning: {line}" for line in config_warnings(config, loop, train, rows.per_epoch, len(prompts))]
    if isinstance(rows, Packed):
        cut = int((train.lengths() > config.length).sum())
        filled = f"{rows.per_epoch} rows of {config.length} tokens, {rows.filled:.1%} filled"
        lines.append(f"{filled}; {cut} documents are longer and are cut")
    else:
        lines.append(f"{rows.per_epoch} windows of {config.length} tokens in an epoch")
    lines += examples(train, tokenizer, _EXAMPLES)
    if config.distill.rows:
        lines.append(
            f"training reads {config.distill.rows} texts that the target writes first (train.distill); time and memory "
            "below are of the data's own text"
        )
    lines += costs(target, drafter, rows.batch(0), rows.per_epoch, config, loop)
    yield from lines
    writer_of(config, target, tokenizer)
    if config.cache != "none" and isinstance(drafter, Trained):
        states_dtype(target, drafter, train, loop)


def costs(
    target: Target,
    drafter: Drafter,
    batch: dict[str, Tensor],
    per_epoch: int,
    config: DrafterTraining,
    loop: LoopConfig,
) -> Iterator[str]:
    """What a step takes: memory, and the time of one of its rows times their number. per_epoch: rows."""
    yield memory_line(target, drafter, loop.batch_size * config.length // loop.accumulate)
    if not isinstance(drafter, Trained) or not drafter.trained():
        return
    row = {key: value[:1] for key, value in batch.items()}
    cost = relative_cost(DraftLoss(drafter, target), target, row, autocast(target.device, loop), 3, most=_SECONDS)
    seconds = cost["seconds_step"] * loop.batch_size
    steps = loop.steps if loop.minutes is None else min(loop.steps, math.ceil(60 * loop.minutes / seconds))
    yield (
        f"a step of {loop.batch_size} x {config.length} tokens takes about {seconds:.2f} s here, one row timed, "
        f"{loop.batch_size * config.length / seconds:.0f} tokens/s; {steps} steps, "
        f"{steps * loop.batch_size / per_epoch:.2f} epochs, take {steps * seconds / 60:.0f} min without validation"
    )
    yield f"memory of this process so far: {peak_memory_mb(target.device):.0f} MB"


def check_synthetic(
    target: Target, drafter: Drafter, data: Synthetic, config: DrafterTraining, loop: LoopConfig
) -> Iterator[str]:
    """The lines for data that the target would write first; nothing is written. Raises ValueError as training does."""
    check_training(target, drafter, config, loop)
    check_sizes(config, loop, world=1)
    tokens = data.turns * (data.question_tokens + data.new_tokens)
    yield f"{data.conversations} conversations of at most {tokens} tokens are written first, or read if they are kept"
    drawn = torch.randint(target.vocab_size, (1, config.length), generator=torch.Generator().manual_seed(loop.seed))
    batch = {"tokens": drawn, "mask": torch.ones_like(drawn, dtype=torch.bool)}
    if config.packed:
        batch |= {"documents": torch.zeros_like(drawn), "rows": torch.zeros(1, dtype=torch.int64)}
    yield from costs(target, drafter, batch, max(1, data.conversations * tokens // config.length), config, loop)


def _described(name: str, corpus: Corpus) -> list[str]:
    lengths, talks = corpus.lengths(), int(corpus.is_chat.sum())
    quantiles = torch.quantile(
        lengths[:: max(1, len(lengths) // 1_000_000)].double(), torch.tensor(_QUANTILES).double()
    )
    spread = ", ".join(f"{n:.0f}" for n in quantiles.tolist())
    return [
        f"{name}: {len(lengths)} documents, {talks} of them conversations; {len(corpus.tokens)} tokens, "
        f"{corpus.counted / max(1, len(corpus.tokens)):.1%} of them count in the loss",
        f"  tokens of a document, smallest 5%, median, largest 5%, longest: {spread}",
    ]


def examples(corpus: Corpus, tokenizer: Tokenizer, most: int) -> list[str]:
    """Documents spread over the corpus, conversations where there are any, what counts in the loss in green, or between
    brackets without a terminal. Long ones are shown around where the first counted part begins."""
    begin, end = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("⟦", "⟧")
    width, lines = max(20, shutil.get_terminal_size().columns), list[str]()
    which = corpus.is_chat.nonzero()[:, 0] if corpus.is_chat.any() else torch.arange(len(corpus.is_chat))
    count = min(most, len(which))
    for i in range(count):
        one = corpus.document(int(which[(2 * i + 1) * len(which) // (2 * count)]))
        first = max(0, int(one.mask.int().argmax()) - _BEFORE)
        tokens, mask, text = one.tokens[first:], one.mask[first:], "... " if first else ""
        changes = (mask[1:] != mask[:-1]).nonzero()[:, 0].add(1).tolist()
        for start, stop in zip([0, *changes], [*changes, len(tokens)], strict=True):
            part = visible(str(tokenizer.decode(tokens[start:stop])))
            text += f"{begin}{part}{end}" if mask[start] else part
            if len(text) > _SHOWN:
                break
        # Cut through neither a colour nor a line: what is cut off is told.
        more = len(tokens) - stop
        wrapped = [line for whole in text.splitlines() for line in (textwrap.wrap(whole, width - 2) or [""])]
        lines += [f"example {i + 1}:", *(f"  {line}" for line in wrapped)]
        if more:
            lines.append(f"  ... {more} more tokens")
    return lines
