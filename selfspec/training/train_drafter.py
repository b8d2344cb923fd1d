"""Train a drafter on a frozen target that runs online, without gradients."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.checkpoints.drafter_folder import load_drafter, save_drafter
from selfspec.checkpoints.weights_hash import settings_of, target_hash, weights_hash
from selfspec.core.target import Target
from selfspec.data.cut_prompts import sample_prompts
from selfspec.data.packing import Packed
from selfspec.data.store import Corpus
from selfspec.drafters.base import Drafter, Sample, Trained
from selfspec.training import drafter_data, shard
from selfspec.training.calibrate import TEMPERATURES, calibrate, decoded, spread, write_samples
from selfspec.training.check import config_warnings, examples
from selfspec.training.distill import distill
from selfspec.training.draft_loss import DraftLoss
from selfspec.training.hidden import HiddenStates, states_folder, write_rows
from selfspec.training.loop import Loop, average
from selfspec.training.loop_config import LoopConfig
from selfspec.training.recorded import recorded_samples
from selfspec.training.resources import memory_line, peak_memory_mb, relative_cost, reuse_memory
from selfspec.training.states import States, plausible
from selfspec.training.states_server import Ahead, FromServer
from selfspec.training.step import autocast
from selfspec.utils.files import NOTHING, Figures, is_main_process, mean
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
    config: drafter_data.DrafterTraining
    loop: LoopConfig
    folder: Path
    log: RunLog

    @property
    def trained(self) -> bool:
        return isinstance(self.drafter, Trained) and bool(self.drafter.trained())


def train_drafter(run: DrafterRun) -> Figures:
    """Train the drafter, calibrate it on the target's own text, and save it as `folder/drafter`. A drafter that trains
    nothing is calibrated and saved.

    Under `accelerate launch` every process has the whole target and its share of each batch, of the validation rows and
    of the prompts; what is counted is added up, so that the figures are those of one process.
    Call `check_training` first. Raises ValueError for data too short to train on, before anything long
    starts.
    """
    reuse_memory()
    device = run.target.device
    if device.type == "cuda" and device.index is not None and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        torch.cuda.set_device(device)  # accelerate takes the first GPU where there is one process
    known, run.target.saved_hash = run.target.saved_hash, target_hash(run.target)  # asked for again and again
    try:
        return _train(run, Accelerator(cpu=device.type == "cpu", mixed_precision="no"))  # loop.precision says it
    finally:
        run.target.saved_hash = known
        if isinstance(run.states, FromServer):
            run.states.close()


def _train(run: DrafterRun, accelerator: Accelerator) -> Figures:
    target, drafter, config, loop = run.target, run.drafter, run.config, run.loop
    settings = {"target.name": run.target_name, "drafter": drafter.config, "train": config, "loop": loop}
    shard.agree({**settings, "data": (run.train.key, run.validation.key)})
    if accelerator.num_processes > 1 and target.device.type == "cpu":
        shard.say([f"{accelerator.num_processes} processes train on the CPU, over gloo"])

    # data: rows that train, rows that validate, and texts of the target's own
    held_out = drafter_data.validation_rows(run.validation, config)
    texts, batches, prompts = _rows(run, accelerator)
    if config.init_from is None:
        drafter_data.fill_vocabulary(drafter, texts, target.vocab_size)
    samples = _samples(run, prompts)

    def calibration() -> Figures:
        return {mode: calibrate(target, drafter, mode, samples[mode], shard.total) for mode in TEMPERATURES}

    before = weights_hash(target.model)
    if not run.trained:
        print("this drafter has nothing to train: it is calibrated and saved; loop and train.distill are not used")
        drafter.eval()
        figures, note, took = calibration(), "Training-free; calibrated on the target's own text.", None
    else:
        # loss
        assert isinstance(drafter, Trained)
        hidden = _hidden_states(run, texts, batches)
        module = DraftLoss(drafter, target, average(accelerator), hidden, run.states)
        if accelerator.num_processes > 1 and not len(module.counts(_on(target.device, held_out, 0))):
            raise ValueError(
                f"{accelerator.num_processes} processes: the drafter's loss divides by counts of its own; divide by "
                "batch.average(counts), as masked_mean does, or train in one process"
            )

        # loop
        def validate() -> Figures:
            return _validated(module, held_out, calibration())

        figures = _fitted(run, module, batches, texts, validate, accelerator)

        # what a step costs, and what decoding brings beside what calibration promises
        if run.states is None:
            figures |= _step_cost(run, module, batches, accelerator.num_processes)
            _add_decoded(figures, run, samples, len(prompts))
        note = f"Trained for {figures['steps']} steps of {batches.size} x {batches.length} tokens"
        note += f"; the weights of step {figures['kept_step']} are kept."
        took = {"seconds": figures["seconds"], "tokens": figures["steps"] * batches.size * batches.length}

    # folder
    if weights_hash(target.model) != before:
        raise RuntimeError(f"the weights of target {run.target_name!r} changed during training; this is a bug")
    return _saved(run, figures, note, took, before)


def _rows(run: DrafterRun, accelerator: Accelerator) -> tuple[Corpus, Packed, list[list[int]]]:
    """The texts to train on, the data's or the target's own, as rows; and prompts of the validation text."""
    target, config, loop, distill_config = run.target, run.config, run.loop, run.config.distill
    prompts = list[list[int]]()
    if run.states is None:
        lengths = config.prompts, config.prompt_tokens, config.new_tokens
        prompts = sample_prompts(run.validation, run.tokenizer, *lengths, target.max_positions)
    else:
        try:
            plausible(run.states, run.validation.document(0).tokens[: config.length])
        except ValueError as error:
            shard.say([f"warning: {error}"])
    among = loop.seed, accelerator.process_index, accelerator.num_processes
    texts, batches = run.train, Packed(run.train, config.length, loop.batch_size, *among)
    folder = drafter_data.texts_folder(config, run.folder)
    if run.trained:
        found = len(prompts) if run.states is None else config.prompts
        warnings = config_warnings(config, loop, texts, batches.per_epoch, found)
        shard.say(f"warning: {line}" for line in warnings)
        shard.say(examples(texts, run.tokenizer, 1))
    run.log.begin()
    if distill_config.rows and run.trained:
        texts, _ = distill(target, texts, distill_config, loop.seed, folder)
        pad = min(target.end_tokens, default=0)
        batches = Packed(texts, distill_config.length, drafter_data.distilled_size(config, loop), *among, pad)
    return texts, batches, prompts


def _samples(run: DrafterRun, prompts: list[list[int]]) -> dict[str, list[Sample]]:
    """This process's texts to calibrate on, by decoding mode: recorded ones, or the prompts as the target continues
    them."""
    config, (part, parts) = run.config, shard.share()
    if run.states is not None:
        lengths = -(-config.prompts // parts), config.new_tokens, config.length
        return recorded_samples(run.target, run.validation, run.states, *lengths, part, parts)
    seeds = range(part, len(prompts), parts)  # the same texts for all seeds of training
    openings, quiet = (prompts[part::parts], config.new_tokens), not is_main_process()
    return {
        mode: write_samples(run.target, *openings, temperature, seeds, run.drafter.reads, quiet)
        for mode, temperature in TEMPERATURES.items()
    }


def _hidden_states(run: DrafterRun, texts: Corpus, batches: Packed) -> HiddenStates | None:
    """Where the target's hidden states on training rows are kept, if they are."""
    target = run.target
    if run.config.cache == "none":
        return None
    dtype, last = target.dtype, target.n_layers - 1
    if not target.partial:
        with torch.no_grad(), autocast(target.device, run.loop):
            two = torch.zeros(1, 2, dtype=torch.long, device=target.device)
            dtype = target.text(two, False, reads=(last,)).features[last].dtype
    how = f"{dtype} {run.loop.precision}{' int8' * target.int8}"
    if run.states is not None:  # whose layers may be of another target with the same embeddings
        served = run.states.servers.model if isinstance(run.states, FromServer) else None  # at whatever address
        how += f" {run.target_name} {run.config.states} {served} {run.states.layers}"
    place = states_folder(target, texts, batches, how)
    hidden = HiddenStates(target, run.drafter.reads, batches.per_epoch, batches.length, dtype, place, run.states)
    shard.say([hidden.summary])
    if is_main_process():
        write_rows(place, batches, run.target_name, dtype)
    return hidden


def _fitted(
    run: DrafterRun,
    module: DraftLoss,
    batches: Packed,
    texts: Corpus,
    validate: Callable[[], Figures],
    accelerator: Accelerator,
) -> Figures:
    """The training itself."""
    target, drafter, loop = run.target, module.drafter, run.loop
    server = run.states if isinstance(run.states, FromServer) else None
    world = accelerator.num_processes
    at_once = -(-batches.size // world // loop.accumulate) * batches.length
    shard.say([memory_line(target, drafter, at_once, world if shard.wanted() else 1)])
    optimizer = torch.optim.AdamW(drafter.trained().values(), run.config.lr, (0.9, 0.95), weight_decay=0.0)
    figures = Loop(
        accelerator,
        module,
        [optimizer],
        batches.batch if server is None else Ahead(batches, server, loop.steps, module.hidden),
        validate,
        loop,
        run.folder,
        run.log,
        "tau16",
        (texts.key, run.validation.key + ("" if loop.seed == 0 else " rows 0")),  # older versions drew rows by the seed
        drafter.saved_buffers(),
        best=True,
        target={"weights": target_hash(target), **settings_of(target)},
    ).fit()
    shard.say([] if server is None else [server.summary])
    return figures


def _step_cost(run: DrafterRun, module: DraftLoss, batches: Packed, world: int) -> Figures:
    piece = {key: value.chunk(run.loop.accumulate)[0] for key, value in batches.batch(0).items()}
    most = 20.0 if world == 1 else math.inf  # several processes make the same number of rounds
    try:
        return relative_cost(module, run.target, piece, autocast(run.target.device, run.loop), most=most)
    except torch.OutOfMemoryError:  # all logits at once, which a training on kept states never holds
        if world > 1:
            raise
        return {}


def _add_decoded(figures: Figures, run: DrafterRun, samples: dict[str, list[Sample]], prompts: int) -> None:
    """The acceptance length of decoding some of the prompts, beside what is promised for them."""
    part, parts = shard.share()
    own = [i for i in spread(prompts) if i % parts == part]  # the same ones in any number of parts
    for mode, texts in samples.items():
        again = [texts[i // parts] for i in own], run.config.new_tokens, own
        figures[mode]["decoded"] = decoded(run.target, run.drafter, mode, *again, shard.total)


def _validated(module: DraftLoss, rows: dict[str, Tensor], figures: Figures) -> Figures:
    """A validation: its loss on `rows` over all processes, beside a calibration's figures and what they promise."""
    device, (part, parts) = module.target.device, shard.share()
    own = range(part, len(rows["tokens"]), parts)
    pieces = [_on(device, rows, i) for i in own]
    none = 0 * module.counts(_on(device, rows, 0))
    counts = shard.total(sum((module.counts(piece) for piece in pieces), none)).to(device)
    bar = progress(pieces, desc="validation", leave=False, disable=not is_main_process())
    loss = shard.total(sum((module(piece, counts)[0] for piece in bar), none.sum()))
    if not len(counts):  # a loss that divides by counts of its own: the mean over rows
        loss = loss / len(rows["tokens"])
    elif not counts.any():
        loss = loss * NOTHING
    taus = [tau for mode in TEMPERATURES if math.isfinite(tau := figures[mode]["tau"]["16"])]
    return {"loss": float(loss), "tau16": mean(sum(taus), len(taus)), **figures}


def _on(device: torch.device, rows: dict[str, Tensor], i: int) -> dict[str, Tensor]:
    """One row."""
    return {key: values[i : i + 1].to(device) for key, values in rows.items()}


def _saved(run: DrafterRun, figures: Figures, note: str, took: dict[str, float] | None, weights: str) -> Figures:
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
    if is_main_process():
        save_drafter(run.drafter, place, run.target, run.target_name, run.tokenizer, note, took)
        run.log.write({"summary": summary})
    shard.wait()
    load_drafter(place, run.target, run.tokenizer, trust=True)  # what was written can be read
    return summary
