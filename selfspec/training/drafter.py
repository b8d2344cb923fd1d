"""Train a drafter on a frozen target that runs online, without gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.checkpoint import load_drafter, save_drafter, target_hash, weights_hash
from selfspec.core.cache import TextCache
from selfspec.core.engine import cache_folder
from selfspec.core.options import end_tokens
from selfspec.core.target import Target
from selfspec.data.prompts import sample_prompts
from selfspec.data.store import Corpus
from selfspec.data.windows import Packed, Windows, consecutive
from selfspec.drafters.base import Batch, Drafter, Trained, itself
from selfspec.drafters.parts.views import Tail
from selfspec.loading import find_drafter
from selfspec.log import Figures, RunLog
from selfspec.training import shard
from selfspec.training.calibrate import TEMPERATURES, calibrate, decoded, write_samples
from selfspec.training.cost import memory_line, peak_memory_mb, relative_cost
from selfspec.training.distill import DistillConfig, Written, distill
from selfspec.training.hidden import PLACES, HiddenStates
from selfspec.training.loop import LoopConfig, autocast, average, fit
from selfspec.training.rounds import Rounds, RoundsConfig


@dataclass
class DrafterTraining:
    """length: tokens per row of the data; packed: whether rows hold whole documents, side by side, each of which sees
    itself alone, instead of windows that cut through them; cache: none, or whether the target's hidden states on them
    are kept in memory, or on disk for other runs too (see `HiddenStates`); lr: peak learning rate (AdamW);
    weight_decay; validation_rows: rows of validation text for the loss; prompts, prompt_tokens, new_tokens: the
    target's own text that drafters are calibrated on; distill: self-distillation data to train on instead of the data's
    own text; rounds: see `RoundsConfig`; init_from: a drafter of the same kind and shapes (an embedded name, a run
    folder or a hub id) whose weights training begins with."""

    length: int = 512
    packed: bool = True
    cache: str = "none"
    lr: float = 1e-3
    weight_decay: float = 0.0
    validation_rows: int = 32
    prompts: int = 64
    prompt_tokens: int = 64
    new_tokens: int = 128
    distill: DistillConfig = field(default_factory=DistillConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    init_from: str | None = None

    def __post_init__(self) -> None:
        for name in ("length", "validation_rows", "prompts", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name}={getattr(self, name)} must be at least 1")
        if self.cache not in PLACES:
            raise ValueError(f"train.cache={self.cache!r} must be one of {', '.join(PLACES)}")
        if self.cache != "none" and not self.packed and not self.distill.rows:
            raise ValueError(f"train.cache={self.cache}: windows change with every epoch; take train.packed=true")
        if self.prompt_tokens < 2:
            raise ValueError(f"train.prompt_tokens={self.prompt_tokens} must be at least 2")
        if self.rounds.count > 1 and not self.distill.rows:
            raise ValueError(
                f"train.rounds.count={self.rounds.count} decodes self-distillation texts; give train.distill.rows"
            )
        if not self.lr > 0:
            raise ValueError(f"train.lr={self.lr} must be above 0")


class DraftLoss(nn.Module):
    """The drafter's loss on what the frozen target says of a batch (tokens int64 [B, S], mask bool [B, S], and
    documents int64 [B, S] where rows are packed); only the drafter is a submodule."""

    def __init__(
        self,
        drafter: Trained,
        target: Target,
        average: Callable[[Tensor], Tensor] = itself,
        kept: HiddenStates | None = None,
    ) -> None:
        """average: the mean of a tensor over all processes, each of which has a part of the batch in training; kept:
        what the target said of rows that are read again."""
        super().__init__()
        self.drafter, self.average, self.kept = drafter, average, kept
        self.target = target  # not a module

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        documents, cache = batch.get("documents"), None
        with torch.no_grad():
            if self.kept is not None and "rows" in batch:
                out = self.kept.states(batch)
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
    agree({"target.name": target_name, "drafter": drafter.config, "train": config, "loop": loop})
    if world > 1 and target.device.type == "cpu" and accelerator.is_main_process:
        print(f"{world} processes train on the CPU, over gloo")
    # Processes among which a target is divided have to run the same passes: each does all of it.
    part, parts = (0, 1) if shard.wanted() else (rank, world)
    if world > 1 and not trained:
        raise ValueError(f"this {drafter.kind} drafter has nothing to train: start it in one process")
    texts, writer = texts_folder(config, folder), writer_of(config, target, tokenizer)
    if not train.counted:
        raise ValueError(
            f"none of the {len(train.tokens)} training tokens counts in the loss; conversations need turns of the "
            "assistant, whose words alone count"
        )
    batches: Packed | Windows | Rounds = rows_of(train, config, loop, rank, world)
    if config.distill.rows and (size := _distilled_rows(config, loop)) % world:
        raise ValueError(
            f"a step of loop.batch_size={loop.batch_size} x train.length={config.length} tokens is {size} distilled "
            f"rows, which do not divide over {world} processes; choose another loop.batch_size"
        )
    rows = consecutive(validation.tokens, config.length, config.validation_rows).long()
    masks = consecutive(validation.mask, config.length, config.validation_rows)
    prompts = sample_prompts(
        validation, tokenizer, config.prompts, config.prompt_tokens, config.new_tokens, target.max_positions
    )
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
        own_text = _distilled(accelerator, target, train, config, loop, texts, writer)
        train, batches = own_text, _own_rows(own_text, target, config, loop, rank, world)
    _fill_vocabulary(drafter, train, target.vocab_size)
    module = DraftLoss(drafter, target, average(accelerator)) if isinstance(drafter, Trained) else None
    if config.cache != "none" and module is not None and trained:
        assert isinstance(batches, Packed)
        module.kept = _kept(module, train, batches, config, loop)
        if accelerator.is_main_process:
            print(module.kept.told)

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
        given = own_text, target, drafter, calibrated, config.rounds, loop.steps, folder / "rounds", (part, parts)
        batches = Rounds(batches, *given)

    def validate() -> Figures:
        figures = calibrated()
        if module is None:
            return figures
        losses = torch.zeros(len(rows))
        for i in range(part, len(rows), parts):
            row = {"tokens": rows[i : i + 1].to(target.device), "mask": masks[i : i + 1].to(target.device)}
            losses[i] = module(row)[0]
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
    summary = {**figures, "target_hash": told_hash, "peak_memory_mb": peak_memory_mb(target.device)}
    if accelerator.is_main_process:
        save_drafter(drafter, folder / "drafter", target, target_name, tokenizer, note, training)
        log.write({"summary": summary})
    accelerator.wait_for_everyone()
    load_drafter(folder / "drafter", target, tokenizer)  # what was written can be read
    return summary


def _kept(module: DraftLoss, corpus: Corpus, rows: Packed, config: DrafterTraining, loop: LoopConfig) -> HiddenStates:
    """Where hidden states on rows are kept. Raises ValueError where the drafter can not be trained on them, or they do
    not fit."""
    target, device = module.target, module.target.device
    one = {key: value[:1].to(device) for key, value in rows.rows([0]).items()}
    with torch.no_grad(), autocast(device, loop):
        dtype = target.text(one["tokens"], False, reads=(target.n_layers - 1,)).features[target.n_layers - 1].dtype
        module.kept = HiddenStates(target, module.drafter.reads, 1, rows.length, dtype, None)
        module(one | {"rows": torch.zeros(1, dtype=torch.int64)})  # it may need more than is kept
    folder = None
    if config.cache == "disk":
        told = f"{target_hash(target)} {corpus.key} {rows.length} {rows.seed} {rows.pad} {dtype} {loop.precision}"
        folder = cache_folder() / "hidden" / hashlib.sha256(told.encode()).hexdigest()[:24]
    return HiddenStates(target, module.drafter.reads, rows.per_epoch, rows.length, dtype, folder)


def rows_of(
    corpus: Corpus, config: DrafterTraining, loop: LoopConfig, rank: int = 0, world: int = 1
) -> Packed | Windows:
    """Rows of the data's own text."""
    kind = Packed if config.packed else Windows
    return kind(corpus, config.length, loop.batch_size, loop.seed, rank, world)


@torch.no_grad()
def warm_start(drafter: Drafter, source: Drafter, name: str) -> None:
    """Give a drafter the trained weights of another; optimizer and data begin anew. Raises ValueError, with `name`,
    where they are not of the same kind and shapes."""
    own, given = drafter.trained(), source.trained()
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


def writer_of(config: DrafterTraining, target: Target, tokenizer: Tokenizer) -> Drafter | None:
    """What drafts while the target writes its own texts."""
    name = config.distill.drafter
    return None if name is None else find_drafter(name, target, tokenizer).eval()


def texts_folder(config: DrafterTraining, folder: Path) -> Path:
    texts = Path(config.distill.folder or folder / "distill")
    if config.distill.rows:
        try:
            texts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"train.distill.folder={texts} can not be made: {error}") from error
    return texts


def _distilled(
    accelerator: Accelerator,
    target: Target,
    train: Corpus,
    config: DrafterTraining,
    loop: LoopConfig,
    texts: Path,
    writer: Drafter | None,
) -> Written:
    """Self-distillation data, written by all processes together."""
    rank, world = accelerator.process_index, accelerator.num_processes
    given = target, train, config.distill, loop.seed, texts
    distill(*given, quiet=rank > 0, share=(0, 1) if shard.wanted() else (rank, world), drafter=writer)
    accelerator.wait_for_everyone()  # what the others wrote is then read
    return distill(*given, quiet=True)


def _own_rows(
    texts: Written, target: Target, config: DrafterTraining, loop: LoopConfig, rank: int, world: int
) -> Packed:
    """Rows of self-distillation data, with about as many tokens per step as the data's."""
    length, pad = config.distill.prompt_tokens + config.distill.new_tokens, min(end_tokens(target), default=0)
    return Packed(texts, length, _distilled_rows(config, loop), loop.seed, rank, world, pad)


def _distilled_rows(config: DrafterTraining, loop: LoopConfig) -> int:
    """Rows of self-distillation data that hold about as many tokens as a step of the data's."""
    own = config.distill.prompt_tokens + config.distill.new_tokens
    return max(1, loop.batch_size * config.length // own)


def _fill_vocabulary(drafter: Drafter, corpus: Corpus, vocab: int) -> None:
    """A reduced draft vocabulary, which a drafter holds as its buffer `vocabulary`, becomes the text's most frequent
    tokens."""
    ids = dict(drafter.named_buffers(recurse=False)).get("vocabulary")
    if ids is not None:
        counts = torch.zeros(vocab, dtype=torch.int64)
        for tokens, mask in zip(corpus.tokens.split(1 << 24), corpus.mask.split(1 << 24), strict=True):
            counts += tokens[mask].bincount(minlength=vocab)
        ids.copy_(counts.argsort(descending=True, stable=True)[: len(ids)])


def check_training(target: Target, drafter: Drafter, config: DrafterTraining, loop: LoopConfig) -> None:
    """Raises ValueError for settings that would fail only once training has begun."""
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
    full = any(isinstance(module, Tail) and module.full for module in drafter.modules())
    if full and target.dtype == torch.float16:
        raise ValueError("a layer can not be trained in full in float16; load the target with target.dtype=float32")
    if full and target.dtype == torch.bfloat16 and loop.precision == "no":
        raise ValueError(
            "loop.precision=no: a layer trained in full on a bfloat16 target needs loop.precision=bf16; or load the "
            "target with target.dtype=float32"
        )
