"""What a training is refused and warned of, and what it would read, take and hold, without training anything."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.core.memory import free_memory
from selfspec.core.target import Target
from selfspec.data.cut_prompts import sample_prompts
from selfspec.data.packing import Packed
from selfspec.data.server import Server
from selfspec.data.store import Corpus
from selfspec.drafters.base import Drafter, Trained
from selfspec.drafters.parts.losses import try_rule
from selfspec.drafters.parts.views import Block
from selfspec.training import shard
from selfspec.training.draft_loss import DraftLoss, try_states
from selfspec.training.drafter_data import DrafterTraining, distilled_size
from selfspec.training.loop_config import LoopConfig
from selfspec.training.resources import memory_line, peak_memory_mb, relative_cost
from selfspec.training.step import autocast
from selfspec.training.synthetic import Synthetic, check_writes
from selfspec.utils.errors import visible

_FEW = 0.02  # share of tokens that count, below which something is said
_EXAMPLES = 3
_SHOWN = 600  # characters of an example, about, and tokens of its longest part
_BEFORE = 60  # tokens shown before what counts
_SECONDS = 8.0  # of timing a step
_QUANTILES = (0.05, 0.5, 0.95, 1.0)


def check_training(target: Target, drafter: Drafter, config: DrafterTraining, loop: LoopConfig) -> None:
    """Raises ValueError for settings that would fail only once training has begun."""
    if isinstance(loss := getattr(drafter.config, "loss", None), str):
        try_rule(loss)
    if target.partial and not isinstance(drafter, Trained):
        raise ValueError(f"drafter={drafter.kind} has nothing to train; train.states is for drafters that are trained")
    if isinstance(drafter, Trained) and drafter.trained() and (target.partial or config.cache != "none"):
        try_states(target, drafter, loop)
    if config.cache != "none" and shard.wanted():
        raise ValueError("train.cache is for a target that is whole in every process; take train.cache=none")
    world = shard.group(str(target.device)).num_processes
    if world > 1 and not drafter.trained():
        raise ValueError(f"this {drafter.kind} drafter has nothing to train: start it in one process")
    if loop.batch_size % world:
        raise ValueError(f"loop.batch_size={loop.batch_size} does not divide over {world} processes; choose another")
    if config.distill.rows and (size := distilled_size(config, loop)) % world:
        raise ValueError(
            f"a step of loop.batch_size={loop.batch_size} x train.length={config.length} tokens is {size} distilled "
            f"rows, which do not divide over {world} processes; choose another loop.batch_size"
        )
    logits = loop.batch_size * config.length // (world * loop.accumulate) * target.vocab_size * target.dtype.itemsize
    if logits > (free := free_memory(target.device)):
        raise ValueError(
            f"loop.batch_size={loop.batch_size}: the target's logits alone take {logits / 2**30:.1f} GiB, of which "
            f"{free / 2**30:.1f} are free; lower it, or raise loop.accumulate={loop.accumulate}"
        )
    lengths = {"train.length": config.length}
    if config.distill.rows:
        lengths["train.distill.prompt_tokens + new_tokens"] = config.distill.length
    for name, length in lengths.items():
        if target.max_positions is not None and length > target.max_positions:
            raise ValueError(f"{name}={length} exceeds the target's {target.max_positions} positions")
    least = drafter.depth + 2 if isinstance(drafter, Trained) else 2
    for name, length in lengths.items():
        if length < least:
            raise ValueError(f"{name}={length} is too short: this {drafter.kind} drafter needs {least} tokens")
    full = any(isinstance(module, Block) and module.full for module in drafter.modules())
    if full and target.dtype == torch.float16:
        raise ValueError("a layer can not be trained in full in float16; load the target with target.dtype=float32")
    if target.dtype == torch.float16 and loop.precision == "no" and drafter.trained():
        raise ValueError(
            "target.dtype=float16: gradients of a loss over many tokens are too small for it and become zero; load the "
            "target with target.dtype=float32, or take loop.precision=bf16"
        )
    if full and target.dtype == torch.bfloat16 and loop.precision == "no":
        raise ValueError(
            "loop.precision=no: a layer trained in full on a bfloat16 target needs loop.precision=bf16; or load the "
            "target with target.dtype=float32"
        )


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
    up, down = max(1, loop.warmup), max(1.0, loop.decay * loop.steps)
    meet = int((loop.steps * up - down) / (up + down))  # the last step before what falls is below what rises
    highest = max(loop.lr_factor(min(max(step, 0), loop.steps - 1)) for step in (meet, meet + 1))
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
    lines = [*_described("training", train), *_described("validation", validation)]
    rows = Packed(train, config.length, loop.batch_size, loop.seed)
    counts = config.prompts, config.prompt_tokens, config.new_tokens
    prompts = sample_prompts(validation, tokenizer, *counts, target.max_positions)
    lines += [f"warning: {line}" for line in config_warnings(config, loop, train, rows.per_epoch, len(prompts))]
    cut = int((train.lengths() > config.length).sum())
    filled = f"{rows.per_epoch} rows of {config.length} tokens, {rows.filled:.1%} filled"
    lines.append(f"{filled}; {cut} documents are longer and are cut")
    lines += examples(train, tokenizer, _EXAMPLES)
    if config.distill.rows:
        lines.append(
            f"training reads {config.distill.rows} texts that the target writes first (train.distill), which may take "
            "longer than the training; time and memory below are of the training alone"
        )
    lines += costs(target, drafter, rows.batch(0), rows.per_epoch, config, loop)
    yield from lines


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
    if target.partial:
        yield "the time of a step is not measured: hidden states come from elsewhere"
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


def check_unwritten(
    target: Target, drafter: Drafter, data: Synthetic | Server, config: DrafterTraining, loop: LoopConfig
) -> Iterator[str]:
    """The lines for data that the target or a server would write first; nothing is written. Raises ValueError as
    training does, and ConnectionError where the server does not answer."""
    check_training(target, drafter, config, loop)
    if isinstance(data, Server):
        asked = sum(1 for _ in data.asked())
        yield f"{asked} conversations are asked of {data.model_name}, {len(data.answered())} are answered: {data.path}"
        conversations, tokens = asked, data.question_tokens + data.new_tokens
    else:
        check_writes(target)
        conversations, tokens = data.conversations, data.turns * (data.question_tokens + data.new_tokens)
        yield f"{conversations} conversations of at most {tokens} tokens are written first, or read if they are kept"
    drawn = torch.randint(target.vocab_size, (1, config.length), generator=torch.Generator().manual_seed(loop.seed))
    batch = {"tokens": drawn, "mask": torch.ones_like(drawn, dtype=torch.bool)}
    batch |= {"documents": torch.zeros_like(drawn), "rows": torch.zeros(1, dtype=torch.int64)}
    yield from costs(target, drafter, batch, max(1, conversations * tokens // config.length), config, loop)


def _described(name: str, corpus: Corpus) -> list[str]:
    lengths, chats = corpus.lengths(), int(corpus.is_chat.sum())
    quantiles = torch.quantile(
        lengths[:: max(1, len(lengths) // 1_000_000)].double(), torch.tensor(_QUANTILES).double()
    )
    spread = ", ".join(f"{n:.0f}" for n in quantiles.tolist())
    return [
        f"{name}: {len(lengths)} documents, {chats} of them conversations; {len(corpus.tokens)} tokens, "
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
            stop = min(stop, start + _SHOWN)
            part = visible(str(tokenizer.decode(tokens[start:stop])))
            text += f"{begin}{part}{end}" if mask[start] else part
            if len(text) > _SHOWN or stop == start + _SHOWN:
                break
        # Cut through neither a colour nor a line: what is cut off is told.
        more = len(tokens) - stop
        wrapped = [line for whole in text.splitlines() for line in (textwrap.wrap(whole, width - 2) or [""])]
        lines += [f"example {i + 1}:", *(f"  {line}" for line in wrapped)]
        if more:
            lines.append(f"  ... {more} more tokens")
    return lines
