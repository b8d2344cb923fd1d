"""Train a drafter on a frozen target that runs online, without gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.checkpoints.drafter_folder import load_drafter, save_drafter
from selfspec.checkpoints.weights_hash import target_hash, weights_hash
from selfspec.core.target import Target
from selfspec.data.cut_prompts import sample_prompts
from selfspec.data.store import Corpus
from selfspec.data.windows import Packed, Windows, consecutive
from selfspec.drafters.base import Drafter, Sample, Trained
from selfspec.drafters.parts.vocabulary import Reduced
from selfspec.training import shard
from selfspec.training.calibrate import TEMPERATURES, calibrate, decoded, spread, write_samples
from selfspec.training.check import config_warnings, examples
from selfspec.training.draft_loss import DraftLoss, states_dtype
from selfspec.training.drafter_data import (
    DrafterTraining,
    check_sizes,
    distilled,
    distilled_rows,
    rows_of,
    texts_folder,
)
from selfspec.training.hidden import HiddenStates, states_folder, write_rows
from selfspec.training.loop import average, fit
from selfspec.training.loop_config import Batches, LoopConfig
from selfspec.training.recorded import recorded_samples
from selfspec.training.resources import memory_line, peak_memory_mb, relative_cost, reuse_memory
from selfspec.training.states import States, plausible
from selfspec.training.states_server import Ahead, FromServer
from selfspec.training.step import autocast
from selfspec.utils.files import NOTHING, Figures, mean
from selfspec.utils.progress import progress
from selfspec.utils.tracking import RunLog


@dataclass
class DrafterRun:
    """One training: what it is given, and what its steps make on the way.

    states: where hidden states come from, if not from the target here; writer: what drafts while the target writes
    self-distillation data. accelerator: of all processes; part, parts: this process's number among those that divide
    validation and prompts between them, and how many these are. Processes among which a target is FSDP-sharded have to
    run the same passes, so each does all of it. kept_dtype: of hidden states that are kept; texts: where
    self-distillation data lie; prompts: that calibration texts begin with; samples: those texts, by decoding mode.
    """

    target: Target
    target_name: str
    tokenizer: Tokenizer
    drafter: Drafter
    states: States | None
    train: Corpus
    validation: Corpus
    writer: Drafter | None
    config: DrafterTraining
    loop: LoopConfig
    folder: Path
    log: RunLog
    accelerator: Accelerator = field(init=False)
    part: int = field(init=False)
    parts: int = field(init=False)
    kept_dtype: torch.dtype = field(init=False)
    texts: Path = field(init=False)
    prompts: list[list[int]] = field(init=False)
    samples: dict[str, list[Sample]] = field(init=False)

    def __post_init__(self) -> None:
        on_cpu = self.target.device.type == "cpu"
        self.accelerator = Accelerator(cpu=on_cpu, mixed_precision="no")  # loop.precision says it
        self.part, self.parts = (0, 1) if shard.wanted() else (self.rank, self.world)

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def world(self) -> int:
        return self.accelerator.num_processes

    @property
    def trained(self) -> bool:
        return isinstance(self.drafter, Trained) and bool(self.drafter.trained())

    def total(self, counts: Tensor) -> Tensor:
        """The sum of a tensor over the processes that divide the work."""
        if self.parts == 1:
            return counts
        summed: Tensor = self.accelerator.reduce(counts.to(self.target.device), "sum")
        return summed.cpu()

    def say(self, lines: Iterable[str]) -> None:
        for line in lines if self.accelerator.is_main_process else ():
            print(line)


def train_drafter(run: DrafterRun) -> Figures:
    """Train the drafter, calibrate it on the target's own text, and save it as `folder/drafter`. A drafter that trains
    nothing is calibrated and saved.

    Under `accelerate launch` every process has the whole target and its share of each batch, of the validation rows and
    of the prompts; what is counted is added up, so that the figures are those of one process.
    Call `check_training` first. Raises ValueError for data too short to train on, before anything long
    starts.
    """
    reuse_memory()
    try:
        return _whole(run, _prepared(run))
    finally:
        if isinstance(run.states, FromServer):
            run.states.close()


def _whole(run: DrafterRun, rows: dict[str, Tensor]) -> Figures:
    """The training behind what can be refused. rows: that validate."""
    run.log.begin()
    before = weights_hash(run.target.model)
    _write_calibration_texts(run)
    batches = _batches(run)
    if run.trained:
        figures, note, training = _trained(run, batches, rows)
    else:
        figures, note, training = _calibrated(run), "Training-free; calibrated on the target's own text.", None
    if weights_hash(run.target.model) != before:
        raise RuntimeError(f"the weights of target {run.target_name!r} changed during training; this is a bug")
    whole_hash = target_hash(run.target) if shard.wanted() else before  # `before` is of this process's part
    memory = peak_memory_mb(run.target.device)
    summary = {**figures, "finished": run.loop.steps, "target_hash": whole_hash, "peak_memory_mb": memory}
    summary["partial"] = run.target.partial
    summary["chat"] = run.tokenizer.chat_template is not None
    summary |= {} if run.loop.minutes is None else {"minutes": run.loop.minutes}
    if not run.loop.over(figures.get("steps", run.loop.steps), figures.get("seconds", 0.0)):
        summary["patience"] = run.loop.patience  # by which it ended
    place = run.folder / "drafter"
    if run.accelerator.is_main_process:
        save_drafter(run.drafter, place, run.target, run.target_name, run.tokenizer, note, training)
        run.log.write({"summary": summary})
    run.accelerator.wait_for_everyone()
    load_drafter(place, run.target, run.tokenizer, trust=True)  # what was written can be read
    return summary


def _prepared(run: DrafterRun) -> dict[str, Tensor]:
    """All that can be refused or warned of is, before long work; returns the validation rows."""
    settings = {"target.name": run.target_name, "drafter": run.drafter.config, "train": run.config, "loop": run.loop}
    shard.agree({**settings, "data": (run.train.key, run.validation.key)})
    if run.world > 1 and run.target.device.type == "cpu":
        run.say([f"{run.world} processes train on the CPU, over gloo"])
    if run.world > 1 and not run.trained:
        raise ValueError(f"this {run.drafter.kind} drafter has nothing to train: start it in one process")
    run.texts = texts_folder(run.config, run.folder)
    check_sizes(run.config, run.loop, run.world)
    if run.config.cache != "none" and run.trained:
        run.kept_dtype = states_dtype(run.target, run.drafter, run.train, run.loop)
    if run.states is not None:
        try:
            plausible(run.states, run.validation.document(0).tokens[: run.config.length])
        except ValueError as error:
            run.say([f"warning: {error}"])
    rows = _validation_rows(run.validation, run.config, run.loop)
    lengths = run.config.prompts, run.config.prompt_tokens, run.config.new_tokens
    run.prompts = []
    if run.states is None:
        run.prompts = sample_prompts(run.validation, run.tokenizer, *lengths, run.target.max_positions)
    if run.trained:
        per_epoch = rows_of(run.train, run.config, run.loop, run.rank, run.world).per_epoch
        prompts = len(run.prompts) if run.states is None else run.config.prompts
        warnings = config_warnings(run.config, run.loop, run.train, per_epoch, prompts)
        run.say(f"warning: {line}" for line in warnings)
        run.say(examples(run.train, run.tokenizer, 1))
    return rows


def _write_calibration_texts(run: DrafterRun) -> None:
    if run.states is not None:
        lengths = -(-run.config.prompts // run.parts), run.config.new_tokens, run.config.length
        run.samples = recorded_samples(run.target, run.validation, run.states, *lengths, run.part, run.parts)
        return
    seeds = range(run.loop.seed + run.part, run.loop.seed + len(run.prompts), run.parts)
    openings, quiet = (run.prompts[run.part :: run.parts], run.config.new_tokens), not run.accelerator.is_main_process
    run.samples = {
        mode: write_samples(run.target, *openings, temperature, seeds, run.drafter.reads, quiet)
        for mode, temperature in TEMPERATURES.items()
    }


def _batches(run: DrafterRun) -> Packed | Windows:
    """Rows of the data, or of the self-distillation data that the target writes first; the draft vocabulary is that of
    these texts."""
    processes = run.loop, run.rank, run.world
    batches, texts = rows_of(run.train, run.config, *processes), run.train
    if run.config.distill.rows and run.trained:
        texts, _ = distilled(run.target, run.train, run.config.distill, run.loop.seed, run.texts, run.writer)
        run.writer = None  # it takes memory
        batches = distilled_rows(texts, run.target, run.config, *processes)
    if run.config.init_from is None:
        _fill_vocabulary(run.drafter, texts, run.target.vocab_size)
    run.train = texts
    return batches


def _trained(
    run: DrafterRun, batches: Packed | Windows, rows: dict[str, Tensor]
) -> tuple[Figures, str, dict[str, float]]:
    """The training itself: its figures, a note for the card, and what it took."""
    target, drafter, loop = run.target, run.drafter, run.loop
    assert isinstance(drafter, Trained)
    module = DraftLoss(drafter, target, average(run.accelerator), _hidden_states(run, batches), run.states)
    batch: Batches = batches.batch
    if isinstance(run.states, FromServer) and run.config.cache == "none":
        assert isinstance(batches, Packed)
        batch = Ahead(batches, run.states, loop.steps)

    def validate() -> Figures:
        figures: Figures = dict(_calibration(run))
        own = range(run.part, len(rows["tokens"]), run.parts)
        pieces = [{key: values[i : i + 1].to(target.device) for key, values in rows.items()} for i in own]
        none = 0 * module.counts({key: values[:1].to(target.device) for key, values in rows.items()})
        counts = run.total(sum((module.counts(piece) for piece in pieces), none)).to(target.device)
        bar = progress(pieces, desc="validation", leave=False, disable=not run.accelerator.is_main_process)
        loss = run.total(sum((module(piece, counts)[0] for piece in bar), none.sum()))
        if not len(counts):  # a loss that divides by counts of its own: the mean over rows
            loss = loss / len(rows["tokens"])
        elif not counts.any():
            loss = loss * NOTHING
        taus = [tau for mode in TEMPERATURES if math.isfinite(tau := figures[mode]["tau"]["16"])]
        tau = mean(sum(taus), len(taus))
        return {"loss": float(loss), "tau16": tau, **figures}

    at_once = batches.size * batches.length // run.world // loop.accumulate
    run.say([memory_line(target, drafter, at_once, run.world if shard.wanted() else 1)])
    settings: Figures = {"lr": run.config.lr, "betas": (0.9, 0.95), "weight_decay": run.config.weight_decay}
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(drafter.trained().values(), **settings)]
    arguments = module, optimizers, batch, validate, loop, run.folder, run.log, "tau16"
    data = run.train.key, run.validation.key
    figures = fit(run.accelerator, *arguments, data, drafter.saved_buffers(), best=True)
    if run.states is None:
        piece = {key: value.chunk(loop.accumulate)[0] for key, value in batches.batch(0).items()}
        most = 20.0 if run.world == 1 else math.inf  # several processes make the same number of rounds
        figures |= relative_cost(module, target, piece, autocast(target.device, loop), most=most)
        own = [i for i in spread(len(run.prompts)) if i % run.parts == run.part]  # the same ones in any number of parts
        seeds = [loop.seed + i for i in own]
        for mode, samples in run.samples.items():
            again = [samples[i // run.parts] for i in own], run.config.new_tokens, seeds
            figures[mode]["decoded"] = decoded(target, drafter, mode, *again, run.total)
    elif isinstance(run.states, FromServer) and run.config.cache == "none":
        run.say([run.states.summary])
    note = f"Trained for {figures['steps']} steps of {batches.size} x {batches.length} tokens"
    note += f"; the weights of step {figures['kept_step']} are kept."
    took = {"seconds": figures["seconds"], "tokens": figures["steps"] * batches.size * batches.length}
    return figures, note, took


def _hidden_states(run: DrafterRun, batches: Packed | Windows) -> HiddenStates | None:
    """Where the target's hidden states on training rows are kept, if they are."""
    if run.config.cache == "none":
        return None
    assert isinstance(batches, Packed)
    place, dtype = None, run.kept_dtype
    if run.config.cache == "disk":
        how = f"{dtype} {run.loop.precision}{' int8' * run.target.int8}"
        if run.states is not None:  # whose layers may be of another target with the same embeddings
            how += f" {run.target_name} {run.config.states} {run.config.states_url} {run.states.layers}"
        place = states_folder(run.target, run.train, batches, how)
    hidden = HiddenStates(run.target, run.drafter.reads, batches.per_epoch, batches.length, dtype, place, run.states)
    run.say([hidden.summary])
    if place is not None and run.accelerator.is_main_process:
        write_rows(place, batches, run.target_name, dtype)
    return hidden


def _calibration(run: DrafterRun) -> Figures:
    return {mode: calibrate(run.target, run.drafter, mode, run.samples[mode], run.total) for mode in TEMPERATURES}


def _calibrated(run: DrafterRun) -> Figures:
    """A drafter that trains nothing."""
    run.drafter.eval()
    print("this drafter has nothing to train: it is calibrated and saved; loop and train.distill are not used")
    return _calibration(run)


def _validation_rows(corpus: Corpus, config: DrafterTraining, loop: LoopConfig) -> dict[str, Tensor]:
    """Rows for the loss, spread over the corpus. Raises ValueError where it is too short for one."""
    if not config.packed:
        cut = {"tokens": corpus.tokens, "mask": corpus.mask}
        windows = {name: consecutive(values, config.length) for name, values in cut.items()}
        at = _counting(windows["mask"].__getitem__, len(windows["mask"]), config.validation_rows)
        return {"tokens": windows["tokens"][at].long(), "mask": windows["mask"][at]}
    packed = Packed(corpus, config.length, 1, loop.seed)
    at = _counting(lambda row: packed.rows([row])["mask"][0], packed.per_epoch, config.validation_rows)
    found = packed.rows(at)
    del found["rows"]  # their numbers are not those of training rows
    return found


def _counting(mask: Callable[[int], Tensor], rows: int, most: int) -> list[int]:
    """At most so many of the rows, spread over them, in each of which something counts in the loss. mask: of a row.
    Raises ValueError where there is none."""
    starts = torch.linspace(0, rows - 1, min(most, rows)).long().tolist()
    chosen = [
        next((row for row in range(first, after) if mask(row)[1:].any()), None)
        for first, after in pairwise([*starts, rows])
    ]
    if not (at := [row for row in chosen if row is not None]):
        raise ValueError("no usable example: none of the validation tokens counts in the loss; give other texts")
    return at


def _fill_vocabulary(drafter: Drafter, corpus: Corpus, vocab: int) -> None:
    """A reduced draft vocabulary becomes the text's most frequent tokens."""
    if isinstance(drafter, Reduced) and (ids := drafter.vocabulary) is not None:
        counts = torch.zeros(vocab, dtype=torch.int64)
        for tokens, mask in zip(corpus.tokens.split(1 << 24), corpus.mask.split(1 << 24), strict=True):
            counts += tokens[mask].bincount(minlength=vocab)
        drafter.drafts_only(counts.argsort(descending=True, stable=True)[: len(ids)])
