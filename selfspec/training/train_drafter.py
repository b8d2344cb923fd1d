"""Train a drafter on a frozen target that runs online, without gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.checkpoints.drafter_folder import load_drafter, save_drafter
from selfspec.checkpoints.weights_hash import target_hash, weights_hash
from selfspec.core.target import Target
from selfspec.data.cut_prompts import sample_prompts
from selfspec.data.store import Corpus
from selfspec.data.windows import Packed
from selfspec.drafters.base import Drafter, Sample, Trained
from selfspec.training import shard
from selfspec.training.calibrate import TEMPERATURES, calibrate, decoded, spread, write_samples
from selfspec.training.check import config_warnings, examples
from selfspec.training.draft_loss import DraftLoss, states_dtype
from selfspec.training.drafter_data import (
    DrafterTraining,
    distilled,
    distilled_rows,
    fill_vocabulary,
    rows_of,
    texts_folder,
    validation_rows,
    writer_of,
)
from selfspec.training.hidden import HiddenStates, states_folder, write_rows
from selfspec.training.loop import Loop, average
from selfspec.training.loop_config import Batches, LoopConfig
from selfspec.training.processes import Processes
from selfspec.training.recorded import recorded_samples
from selfspec.training.resources import memory_line, peak_memory_mb, relative_cost, reuse_memory
from selfspec.training.states import States, plausible
from selfspec.training.states_server import Ahead, FromServer
from selfspec.training.step import autocast
from selfspec.utils.files import NOTHING, Figures, mean
from selfspec.utils.progress import progress
from selfspec.utils.tracking import RunLog


@dataclass(frozen=True)
class DrafterRun:
    """One training. states: where hidden states come from, if not from the target here."""

    target: Target
    target_name: str
    tokenizer: Tokenizer
    drafter: Drafter
    states: States | None
    train: Corpus
    validation: Corpus
    config: DrafterTraining
    loop: LoopConfig
    folder: Path
    log: RunLog

    @property
    def trained(self) -> bool:
        return isinstance(self.drafter, Trained) and bool(self.drafter.trained())


_VECTORS = {"bias", "biases", "scales", "confidence"}  # parts of names of what may have more dimensions


@dataclass(frozen=True)
class _Data:
    """What a training reads. batches: its rows, of `texts`; validation: rows for the loss; samples: texts that the
    target wrote, by decoding mode, this process's part of those that continue so many `prompts`; kept_dtype: of hidden
    states that are kept (None: none are)."""

    batches: Packed
    texts: Corpus
    validation: dict[str, Tensor]
    samples: dict[str, list[Sample]]
    prompts: int
    kept_dtype: torch.dtype | None


def train_drafter(run: DrafterRun) -> Figures:
    """Train the drafter, calibrate it on the target's own text, and save it as `folder/drafter`. A drafter that trains
    nothing is calibrated and saved.

    Under `accelerate launch` every process has the whole target and its share of each batch, of the validation rows and
    of the prompts; what is counted is added up, so that the figures are those of one process.
    Call `check_training` first. Raises ValueError for data too short to train on, before anything long
    starts.
    """
    reuse_memory()
    processes = Processes(run.target.device)
    try:
        _refuse(run, processes)
        data = _data(run, processes)
        before = weights_hash(run.target.model)
        if run.trained:
            figures, note, took = _trained(run, data, processes)
        else:
            print("this drafter has nothing to train: it is calibrated and saved; loop and train.distill are not used")
            run.drafter.eval()
            figures = _calibration(run, data, processes)
            note, took = "Training-free; calibrated on the target's own text.", None
        if weights_hash(run.target.model) != before:
            raise RuntimeError(f"the weights of target {run.target_name!r} changed during training; this is a bug")
        return _saved(run, figures, note, took, before, processes)
    finally:
        if isinstance(run.states, FromServer):
            run.states.close()


def _refuse(run: DrafterRun, processes: Processes) -> None:
    """Raises ValueError for what can be refused before long work."""
    settings = {"target.name": run.target_name, "drafter": run.drafter.config, "train": run.config, "loop": run.loop}
    shard.agree({**settings, "data": (run.train.key, run.validation.key)})
    if processes.world > 1 and run.target.device.type == "cpu":
        processes.say([f"{processes.world} processes train on the CPU, over gloo"])
    if run.states is not None:
        try:
            plausible(run.states, run.validation.document(0).tokens[: run.config.length])
        except ValueError as error:
            processes.say([f"warning: {error}"])


def _data(run: DrafterRun, processes: Processes) -> _Data:
    """What the training reads: rows of the data or of self-distillation data, rows that validate, and texts of the
    target's own. The draft vocabulary becomes that of the texts."""
    config, loop = run.config, run.loop
    texts, texts_in = run.train, texts_folder(config, run.folder)
    kept_dtype = states_dtype(run.target, run.drafter, texts, loop) if config.cache != "none" and run.trained else None
    validation = validation_rows(run.validation, config)
    prompts = list[list[int]]()
    if run.states is None:
        lengths = config.prompts, config.prompt_tokens, config.new_tokens
        prompts = sample_prompts(run.validation, run.tokenizer, *lengths, run.target.max_positions)
    batches = rows_of(texts, config, loop, processes.rank, processes.world)
    if run.trained:
        found = len(prompts) if run.states is None else config.prompts
        warnings = config_warnings(config, loop, texts, batches.per_epoch, found)
        processes.say(f"warning: {line}" for line in warnings)
        processes.say(examples(texts, run.tokenizer, 1))
    writer = writer_of(config, run.target, run.tokenizer)
    run.log.begin()
    if config.distill.rows and run.trained:
        texts, _ = distilled(run.target, texts, config.distill, loop.seed, texts_in, writer)
        del writer  # it takes memory
        batches = distilled_rows(texts, run.target, config, loop, processes.rank, processes.world)
    if config.init_from is None:
        fill_vocabulary(run.drafter, texts, run.target.vocab_size)
    return _Data(batches, texts, validation, _samples(run, prompts, processes), len(prompts), kept_dtype)


def _samples(run: DrafterRun, prompts: list[list[int]], processes: Processes) -> dict[str, list[Sample]]:
    """This process's texts to calibrate on: recorded ones, or the prompts as the target continues them."""
    config, part, parts = run.config, processes.part, processes.parts
    if run.states is not None:
        lengths = -(-config.prompts // parts), config.new_tokens, config.length
        return recorded_samples(run.target, run.validation, run.states, *lengths, part, parts)
    seeds = range(part, len(prompts), parts)  # the same texts for all seeds of training
    openings, quiet = (prompts[part::parts], config.new_tokens), not processes.first
    return {
        mode: write_samples(run.target, *openings, temperature, seeds, run.drafter.reads, quiet)
        for mode, temperature in TEMPERATURES.items()
    }


def _calibration(run: DrafterRun, data: _Data, processes: Processes) -> Figures:
    return {
        mode: calibrate(run.target, run.drafter, mode, data.samples[mode], processes.total) for mode in TEMPERATURES
    }


def _trained(run: DrafterRun, data: _Data, processes: Processes) -> tuple[Figures, str, dict[str, float]]:
    """The training itself: its figures, a note for the card, and what it took."""
    target, drafter, loop, batches = run.target, run.drafter, run.loop, data.batches
    assert isinstance(drafter, Trained)
    hidden = _hidden_states(run, data, processes)
    module = DraftLoss(drafter, target, average(processes.accelerator), hidden, run.states)
    batch: Batches = batches.batch
    server = run.states if isinstance(run.states, FromServer) and hidden is None else None
    if server is not None:
        batch = Ahead(batches, server, loop.steps)
    at_once = batches.size * batches.length // processes.world // loop.accumulate
    processes.say([memory_line(target, drafter, at_once, processes.world if shard.wanted() else 1)])
    settings: Figures = {"lr": run.config.lr, "betas": (0.9, 0.95), "weight_decay": run.config.weight_decay}
    groups: list[Figures] = [{"params": list(drafter.trained().values())}]
    if run.config.weight_decay:  # of matrices, not of norms and biases
        vectors = [p for name, p in drafter.trained().items() if p.ndim < 2 or _VECTORS & set(name.split("."))]
        matrices = [p for p in drafter.trained().values() if not any(p is vector for vector in vectors)]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, **settings)]
    rows = "" if loop.seed == 0 else " rows 0"  # older versions drew validation rows by the seed
    keys = data.texts.key, run.validation.key + rows

    def validate() -> Figures:
        return _validated(run, module, data, processes)

    beside = run.folder, run.log, "tau16", keys, drafter.saved_buffers()
    figures = Loop(
        processes.accelerator, module, optimizers, batch, validate, loop, *beside, best=True, target=target_hash(target)
    ).fit()
    if run.states is None:
        piece = {key: value.chunk(loop.accumulate)[0] for key, value in batches.batch(0).items()}
        most = 20.0 if processes.world == 1 else math.inf  # several processes make the same number of rounds
        figures |= relative_cost(module, target, piece, autocast(target.device, loop), most=most)
        part, parts = processes.part, processes.parts
        own = [i for i in spread(data.prompts) if i % parts == part]  # the same ones in any number of parts
        for mode, samples in data.samples.items():
            again = [samples[i // parts] for i in own], run.config.new_tokens, own
            figures[mode]["decoded"] = decoded(target, drafter, mode, *again, processes.total)
    elif server is not None:
        processes.say([server.summary])
    note = f"Trained for {figures['steps']} steps of {batches.size} x {batches.length} tokens"
    note += f"; the weights of step {figures['kept_step']} are kept."
    took = {"seconds": figures["seconds"], "tokens": figures["steps"] * batches.size * batches.length}
    return figures, note, took


def _hidden_states(run: DrafterRun, data: _Data, processes: Processes) -> HiddenStates | None:
    """Where the target's hidden states on training rows are kept, if they are."""
    place, dtype, batches = None, data.kept_dtype, data.batches
    if dtype is None:
        return None
    if run.config.cache == "disk":
        how = f"{dtype} {run.loop.precision}{' int8' * run.target.int8}"
        if run.states is not None:  # whose layers may be of another target with the same embeddings
            how += f" {run.target_name} {run.config.states} {run.config.states_url} {run.states.layers}"
        place = states_folder(run.target, data.texts, batches, how)
    hidden = HiddenStates(run.target, run.drafter.reads, batches.per_epoch, batches.length, dtype, place, run.states)
    processes.say([hidden.summary])
    if place is not None and processes.first:
        write_rows(place, batches, run.target_name, dtype)
    return hidden


def _validated(run: DrafterRun, module: DraftLoss, data: _Data, processes: Processes) -> Figures:
    """A validation: loss, calibration and what that promises, over all processes."""
    figures, rows, device = dict(_calibration(run, data, processes)), data.validation, run.target.device
    own = range(processes.part, len(rows["tokens"]), processes.parts)
    pieces = [{key: values[i : i + 1].to(device) for key, values in rows.items()} for i in own]
    none = 0 * module.counts({key: values[:1].to(device) for key, values in rows.items()})
    counts = processes.total(sum((module.counts(piece) for piece in pieces), none)).to(device)
    bar = progress(pieces, desc="validation", leave=False, disable=not processes.first)
    loss = processes.total(sum((module(piece, counts)[0] for piece in bar), none.sum()))
    if not len(counts):  # a loss that divides by counts of its own: the mean over rows
        loss = loss / len(rows["tokens"])
    elif not counts.any():
        loss = loss * NOTHING
    taus = [tau for mode in TEMPERATURES if math.isfinite(tau := figures[mode]["tau"]["16"])]
    return {"loss": float(loss), "tau16": mean(sum(taus), len(taus)), **figures}


def _saved(
    run: DrafterRun, figures: Figures, note: str, took: dict[str, float] | None, weights: str, processes: Processes
) -> Figures:
    """The summary of a training, whose drafter is saved. weights: hash of this process's part of the target."""
    whole_hash = target_hash(run.target) if shard.wanted() else weights
    memory = peak_memory_mb(run.target.device)
    summary = {**figures, "finished": run.loop.steps, "target_hash": whole_hash, "peak_memory_mb": memory}
    summary["partial"] = run.target.partial
    summary["chat"] = run.tokenizer.chat_template is not None
    summary |= {} if run.loop.minutes is None else {"minutes": run.loop.minutes}
    if not run.loop.over(figures.get("steps", run.loop.steps), figures.get("seconds", 0.0)):
        summary["patience"] = run.loop.patience  # by which it ended
    place = run.folder / "drafter"
    if processes.first:
        save_drafter(run.drafter, place, run.target, run.target_name, run.tokenizer, note, took)
        run.log.write({"summary": summary})
    processes.accelerator.wait_for_everyone()
    load_drafter(place, run.target, run.tokenizer, trust=True)  # what was written can be read
    return summary
