"""Train a drafter on a frozen target that runs online, without gradients."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.checkpoints.drafter_folder import load_drafter, save_drafter, target_hash, weights_hash
from selfspec.core.cache import TextCache
from selfspec.core.target import Target
from selfspec.data.cut_prompts import sample_prompts
from selfspec.data.store import Corpus
from selfspec.data.windows import Packed, Windows, consecutive
from selfspec.drafters.base import Batch, Drafter, Trained, itself
from selfspec.drafters.parts.losses import try_rule
from selfspec.drafters.parts.unrolled import Unrolled
from selfspec.drafters.parts.views import Block
from selfspec.training import shard
from selfspec.training.calibrate import TEMPERATURES, calibrate, decoded, write_samples
from selfspec.training.config_warnings import doubts
from selfspec.training.hidden import HiddenStates, states_folder
from selfspec.training.loop import LoopConfig, autocast, average, checkpoint_path, fit
from selfspec.training.resources import memory_line, peak_memory_mb, relative_cost
from selfspec.training.rounds import Rounds
from selfspec.training.rows import (
    DrafterTraining,
    check_sizes,
    distilled,
    distilled_rows,
    rows_of,
    texts_folder,
    writer_of,
)
from selfspec.utils.files import Figures
from selfspec.utils.tracking import RunLog


class DraftLoss(nn.Module):
    """The drafter's loss on what the frozen target says of a batch: tokens int64 [B, S], mask bool [B, S], where rows
    are packed documents int64 [B, S] and rows int64 [B], in rounds roots bool [B, S] (see `Batch`). Only the drafter is
    a submodule."""

    def __init__(
        self,
        drafter: Trained,
        target: Target,
        average: Callable[[Tensor], Tensor] = itself,
        hidden: HiddenStates | None = None,
    ) -> None:
        """average: the mean of a tensor over all processes, each of which has a part of the batch in training; hidden:
        what the target said of rows that are read again."""
        super().__init__()
        self.drafter, self.average, self.hidden = drafter, average, hidden
        self.target = target  # not a module

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        documents, cache = batch.get("documents"), None
        with torch.no_grad():
            if self.hidden is not None and "rows" in batch:
                out = self.hidden.states(batch)
            else:
                cache = TextCache(self.target.n_layers, kept=True)
                out = self.target.text(batch["tokens"], reads=self.drafter.reads, cache=cache, documents=documents)
        assert out.logits is not None
        given = batch["tokens"], batch["mask"], out.hidden, out.logits, out.features, cache
        average = self.average if self.training else itself
        return self.drafter.loss(Batch(*given, documents, batch.get("roots"), average))


def train_drafter(
    target: Target,
    target_name: str,
    tokenizer: Tokenizer,
    drafter: Drafter,
    train: Corpus,
    validation: Corpus,
    config: DrafterTraining,
    loop: LoopConfig,
    folder: Path,
    log: RunLog,
) -> Figures:
    """Train the drafter, calibrate it on the target's own text, and save it as `folder/drafter`. A drafter that trains
    nothing is calibrated and saved.

    Under `accelerate launch` every process has the whole target and its share of each batch, of the validation rows and
    of the prompts; what is counted is added up, so that the figures are those of one process. Where the target is
    divided, every process validates on all rows and prompts.
    Raises ValueError for data too short to train on, before anything long starts.
    """
    check_training(target, drafter, config, loop)
    accelerator = Accelerator(cpu=target.device.type == "cpu", mixed_precision="no")  # loop.precision says it
    rank, world = accelerator.process_index, accelerator.num_processes
    trained = isinstance(drafter, Trained) and bool(drafter.trained())
    settings = {"target.name": target_name, "drafter": drafter.config, "train": config, "loop": loop}
    agree({**settings, "data": (train.key, validation.key)})
    if world > 1 and target.device.type == "cpu" and accelerator.is_main_process:
        print(f"{world} processes train on the CPU, over gloo")
    # Processes among which a target is divided have to run the same passes: each does all of it.
    part, parts = (0, 1) if shard.wanted() else (rank, world)
    if world > 1 and not trained:
        raise ValueError(f"this {drafter.kind} drafter has nothing to train: start it in one process")
    texts, writer = texts_folder(config, folder), writer_of(config, target, tokenizer)
    check_sizes(config, loop, world)
    data_rows = rows_of(train, config, loop, rank, world)
    batches: Packed | Windows | Rounds = data_rows
    dtype = states_dtype(target, drafter, train, loop) if config.cache != "none" and trained else None
    rows = _validation_rows(validation, config, loop)
    prompts = sample_prompts(
        validation, tokenizer, config.prompts, config.prompt_tokens, config.new_tokens, target.max_positions
    )
    told = list(doubts(config, loop, train, data_rows.per_epoch, len(prompts))) if trained else []
    if accelerator.is_main_process:
        for line in told:
            print(f"warning: {line}")
    before = weights_hash(target.model)
    samples = {
        mode: write_samples(
            target,
            prompts[part::parts],
            config.new_tokens,
            temperature,
            range(loop.seed + part, loop.seed + len(prompts), parts),
            drafter.reads,
        )
        for mode, temperature in TEMPERATURES.items()
    }
    if config.distill.rows and trained:
        written, _ = distilled(target, train, config.distill, loop.seed, texts, writer)
        train, batches = written, distilled_rows(written, target, config, loop, rank, world)
    if config.init_from is None:
        _fill_vocabulary(drafter, train, target.vocab_size)
    hidden = None
    if dtype is not None:
        assert isinstance(batches, Packed)
        place = states_folder(target, train, batches, f"{dtype} {loop.precision}") if config.cache == "disk" else None
        hidden = HiddenStates(target, drafter.reads, batches.per_epoch, batches.length, dtype, place)
        if accelerator.is_main_process:
            print(hidden.told)
    module = DraftLoss(drafter, target, average(accelerator), hidden) if isinstance(drafter, Trained) else None

    def total(counts: Tensor) -> Tensor:
        if parts == 1:
            return counts
        summed: Tensor = accelerator.reduce(counts.to(target.device), "sum")
        return summed.cpu()

    def calibrated() -> Figures:
        return {mode: calibrate(target, drafter, mode, samples[mode], total) for mode in TEMPERATURES}

    if config.rounds.count > 1 and trained:
        assert isinstance(drafter, Trained)
        assert isinstance(batches, Packed)
        if accelerator.is_main_process and not checkpoint_path(folder).exists():
            shutil.rmtree(folder / "rounds", ignore_errors=True)  # of a run that never came to a checkpoint
        given = written, target, drafter, calibrated, config.rounds, loop.steps, folder / "rounds", (part, parts)
        batches = Rounds(batches, *given)

    def validate() -> Figures:
        figures = calibrated()
        if module is None:
            return figures
        losses = torch.zeros(len(rows["tokens"]))
        for i in range(part, len(losses), parts):
            losses[i] = module({key: values[i : i + 1].to(target.device) for key, values in rows.items()})[0]
        tau = sum(figures[mode]["tau"]["16"] for mode in TEMPERATURES) / len(TEMPERATURES)
        return {"loss": float(total(losses).mean()), "tau16": tau, **figures}

    training = None
    if trained:
        assert module is not None
        if accelerator.is_main_process:
            at_once = batches.size * batches.length // world // loop.accumulate
            print(memory_line(target, drafter, at_once, world if shard.wanted() else 1))
        optimizer = torch.optim.AdamW(
            drafter.trained().values(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        figures = fit(accelerator, module, [optimizer], batches.batch, validate, loop, folder, log, "tau16", best=True)
        piece = {key: value.chunk(loop.accumulate)[0] for key, value in batches.batch(0).items()}
        figures |= relative_cost(module, target, piece, autocast(target.device, loop))
        for mode in TEMPERATURES:
            figures[mode]["decoded"] = decoded(target, drafter, mode, samples[mode], config.new_tokens, total)
        training = {"seconds": figures["seconds"], "tokens": figures["steps"] * batches.size * batches.length}
        note = f"Trained for {figures['steps']} steps of {batches.size} x {batches.length} tokens"
        note += f"; the weights of step {figures['kept_step']} are kept."
    else:
        drafter.eval()
        print("this drafter has nothing to train: it is calibrated and saved; loop and train.distill are not used")
        with torch.no_grad(), autocast(target.device, loop):
            figures, note = validate(), "Training-free; calibrated on the target's own text."
    if weights_hash(target.model) != before:
        raise RuntimeError(f"the weights of target {target_name!r} changed during training; this is a bug")
    told_hash = target_hash(target) if shard.wanted() else before  # `before` is of this process's part
    summary = {
        **figures,
        "finished": loop.steps,
        "target_hash": told_hash,
        "peak_memory_mb": peak_memory_mb(target.device),
    }
    if accelerator.is_main_process:
        save_drafter(drafter, folder / "drafter", target, target_name, tokenizer, note, training)
        log.write({"summary": summary})
    accelerator.wait_for_everyone()
    load_drafter(folder / "drafter", target, tokenizer, trust=True)  # what was written can be read
    return summary


def _validation_rows(corpus: Corpus, config: DrafterTraining, loop: LoopConfig) -> dict[str, Tensor]:
    """Rows for the loss, spread over the corpus. Raises ValueError where it is too short for one."""
    if not config.packed:
        cut = {"tokens": corpus.tokens, "mask": corpus.mask}
        rows = {name: consecutive(values, config.length, config.validation_rows) for name, values in cut.items()}
        return {**rows, "tokens": rows["tokens"].long()}
    packed = Packed(corpus, config.length, 1, loop.seed)
    count = min(config.validation_rows, packed.per_epoch)
    found = packed.rows(torch.linspace(0, packed.per_epoch - 1, count).long().tolist())
    del found["rows"]  # their numbers are not those of training rows
    return found


def states_dtype(target: Target, drafter: Drafter, corpus: Corpus, loop: LoopConfig) -> torch.dtype:
    """The dtype of hidden states that are kept. Raises ValueError where the drafter's loss needs more than those."""
    assert isinstance(drafter, Trained)
    tokens = corpus.tokens[: 4 * (drafter.depth + 4)].long()[None].to(target.device)
    batch = {"tokens": tokens, "mask": torch.ones_like(tokens, dtype=torch.bool), "documents": torch.zeros_like(tokens)}
    with torch.no_grad(), autocast(target.device, loop):
        last = target.n_layers - 1
        dtype = target.text(tokens, False, reads=(last,)).features[last].dtype
        states = HiddenStates(target, drafter.reads, 1, tokens.shape[1], dtype, None)
        DraftLoss(drafter, target, hidden=states)({**batch, "rows": torch.zeros(1, dtype=torch.int64)})
    return dtype


@torch.no_grad()
def warm_start(drafter: Drafter, source: Drafter, name: str) -> None:
    """Give a drafter the trained weights and the draft vocabulary of another; optimizer and data begin anew. Raises
    ValueError, with `name`, where they are not of the same kind and shapes."""
    own, given = ({**d.trained(), **d.saved_buffers()} for d in (drafter, source))
    shapes = [{key: list(p.shape) for key, p in found.items()} for found in (own, given)]
    if drafter.kind != source.kind or shapes[0] != shapes[1]:
        odd = sorted(key for key in shapes[0].keys() | shapes[1].keys() if shapes[0].get(key) != shapes[1].get(key))
        raise ValueError(
            f"train.init_from={name!r} is a {source.kind} drafter that does not fit this {drafter.kind} drafter"
            + (f" ({odd[0]}: {shapes[1].get(odd[0])} instead of {shapes[0].get(odd[0])})" if odd else "")
            + "; give one of the same configuration"
        )
    for key, p in own.items():
        p.copy_(given[key])


def agree(settings: dict[str, object]) -> None:
    """Raises ValueError, in every process, where they were started with different settings."""
    for name in settings:
        found = shard.gathered([repr(settings[name])])
        if odd := [i for i, value in enumerate(found) if value != found[0]]:
            raise ValueError(
                f"process {odd[0]} was started with another {name} than process 0: {found[odd[0]]} instead of "
                f"{found[0]}; start all with the same command"
            )


def _fill_vocabulary(drafter: Drafter, corpus: Corpus, vocab: int) -> None:
    """A reduced draft vocabulary becomes the text's most frequent tokens."""
    if isinstance(drafter, Unrolled) and (ids := drafter.vocabulary) is not None:
        counts = torch.zeros(vocab, dtype=torch.int64)
        for tokens, mask in zip(corpus.tokens.split(1 << 24), corpus.mask.split(1 << 24), strict=True):
            counts += tokens[mask].bincount(minlength=vocab)
        drafter.drafts_only(counts.argsort(descending=True, stable=True)[: len(ids)])


def check_training(target: Target, drafter: Drafter, config: DrafterTraining, loop: LoopConfig) -> None:
    """Raises ValueError for settings that would fail only once training has begun."""
    if isinstance(loss := getattr(drafter.config, "loss", None), str):
        try_rule(loss)
    if config.cache != "none" and shard.wanted():
        raise ValueError("train.cache is for a target that is whole in every process; take train.cache=none")
    if target.max_positions is not None and config.length > target.max_positions:
        raise ValueError(f"train.length={config.length} exceeds the target's {target.max_positions} positions")
    lengths = {"train.length": config.length}
    if config.distill.rows:
        lengths["train.distill.prompt_tokens + new_tokens"] = config.distill.prompt_tokens + config.distill.new_tokens
    least = drafter.depth + 2 if isinstance(drafter, Trained) else 2
    for name, length in lengths.items():
        if length < least:
            raise ValueError(f"{name}={length} is too short: this {drafter.kind} drafter needs {least} tokens")
    full = any(isinstance(module, Block) and module.full for module in drafter.modules())
    if full and target.dtype == torch.float16:
        raise ValueError("a layer can not be trained in full in float16; load the target with target.dtype=float32")
    if full and target.dtype == torch.bfloat16 and loop.precision == "no":
        raise ValueError(
            "loop.precision=no: a layer trained in full on a bfloat16 target needs loop.precision=bf16; or load the "
            "target with target.dtype=float32"
        )
