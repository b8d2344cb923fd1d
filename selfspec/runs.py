"""From a composed Hydra config to a run. Hydra's instantiate is called here and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from transformers import LlamaForCausalLM
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.checkpoint import drafter_class
from selfspec.config import PretrainRun, TrainRun
from selfspec.core.engine import cache_folder
from selfspec.core.target import Target
from selfspec.data.records import Records, files_of
from selfspec.data.store import Corpus, stored, tokenize
from selfspec.drafters.base import Drafter, DrafterConfig
from selfspec.loading import find_drafter, load_target, load_tokenizer, resolve
from selfspec.log import Figures, RunLog, is_main_process, write_text
from selfspec.training import shard
from selfspec.training.check import check
from selfspec.training.drafter import check_training, train_drafter, warm_start
from selfspec.training.loop import checkpoint_path, default_device
from selfspec.training.pretrain import instruct, pretrain
from selfspec.training.rows import distilled, texts_folder, writer_of

R = TypeVar("R")
# Keys that may change when a run is resumed: they alter how long it runs or what it reports, not what it is.
_FREE = (
    *("wandb", "loop.steps", "loop.compile", "loop.log_every", "loop.validate_every", "loop.checkpoint_every"),
    *("check", "loop.accumulate", "loop.patience", "train.distill.drafter", "train.distill.nodes"),
)


def open_run(config: DictConfig, folder: Path, begun: Path, free: Sequence[str] = _FREE) -> Figures:
    """Write the composed config into the run folder and return it as plain data. begun: a file
    whose presence shows that a run has started.

    Raises ValueError where the folder already holds a run of another configuration, the keys `free` aside.
    """
    plain = as_plain(config)
    path = folder / "config.yaml"
    if path.exists() and begun.exists():
        before, now = OmegaConf.load(path), OmegaConf.create(plain)
        for key in free:
            if "." in key and OmegaConf.select(now, key.rpartition(".")[0]) is None:
                continue  # of other runs
            OmegaConf.update(before, key, OmegaConf.select(now, key))
        if before != now:
            raise ValueError(f"{folder} holds a run with another configuration ({path}); choose another name=")
    if is_main_process():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, OmegaConf.to_yaml(OmegaConf.create(plain)))
    return plain


def typed(kind: type[R], config: DictConfig) -> R:
    """A config as the dataclass it was composed from, checked."""
    found = OmegaConf.to_object(config)
    assert isinstance(found, kind)
    name = getattr(found, "name", "run")
    if not name.strip("/") or name.startswith("/") or ".." in Path(name).parts:
        raise ValueError(f"name={name!r} must name a folder below runs/")
    return found


def as_plain(config: DictConfig) -> Figures:
    """A config as plain data. Raises omegaconf's errors for values that are missing."""
    found: Figures = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    return found


def build_data(config: DictConfig, tokenizer: Tokenizer) -> Any:
    """The data group's documents; those that need a chat template get the target's tokenizer."""
    needs_template = any(f.name == "tokenizer" for f in fields(get_class(config._target_)))
    return instantiate(config, tokenizer=tokenizer) if needs_template else instantiate(config)


def run_check(config: DictConfig) -> Iterator[str]:
    """What a training would read and take, as lines; see `selfspec.training.check`."""
    run = typed(TrainRun, config)
    target, tokenizer, data = _opened(run, config)
    drafter = _made(run.drafter, target)
    if run.train.init_from is not None:
        warm_start(drafter, find_drafter(run.train.init_from, target, tokenizer), run.train.init_from)
    train, validation = _tokenized(data, tokenizer, str(target.device))
    yield from check(target, tokenizer, drafter, train, validation, run.train, run.loop)


def _made(config: DrafterConfig, target: Target) -> Drafter:
    kind = drafter_class(type(config).__module__.rsplit(".", 1)[-1])
    return kind(target, config)  # type: ignore[arg-type]


def _finished(folder: Path, steps: int) -> Figures | None:
    """The summary of a run of so many steps, where it is finished."""
    try:
        told = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    except (OSError, ValueError):  # never begun, or cut off in the middle of a line
        return None
    found = next((record["summary"] for record in told[::-1] if "summary" in record), None)
    whole = found is not None and found.get("finished", 0) >= steps and (folder / "drafter" / "drafter.json").is_file()
    return found if whole else None


def run_training(config: DictConfig, folder: Path, again: bool = True) -> Figures:
    """Train a drafter; see `selfspec.training.drafter`. again: False leaves a finished run as it is, whose figures are
    returned."""
    run = typed(TrainRun, config)
    plain = open_run(config, folder, checkpoint_path(folder))
    if not again and (done := _finished(folder, run.loop.steps)) is not None:
        print(f"{folder} is finished")
        return done
    target, tokenizer, data = _opened(run, config)
    torch.manual_seed(run.loop.seed)
    drafter = _made(run.drafter, target)
    if run.train.init_from is not None:
        source = find_drafter(run.train.init_from, target, tokenizer)
        warm_start(drafter, source, run.train.init_from)
    check_training(target, drafter, run.train, run.loop)  # before texts are made, which may take long
    texts = _tokenized(data, tokenizer, str(target.device))
    with RunLog(folder, run.name, run.wandb, plain, "train.jsonl") as log:
        settings = run.train, run.loop
        figures = train_drafter(target, run.target.name, tokenizer, drafter, *texts, *settings, folder, log)
        if is_main_process():
            from selfspec.evaluation.plots import plot_training  # slow to import

            records = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
            log.images(plot_training(records, folder))
        return figures


def run_distill(config: DictConfig, folder: Path) -> Figures:
    """Only write the self-distillation data of a training; see `selfspec.training.distill`. Figures of what was written
    in this call."""
    run = typed(TrainRun, config)
    own, loop = run.train.distill, run.loop
    if run.check:
        raise ValueError("check=true is for train/heads.py; without it, train/distill.py writes texts")
    if not own.rows:
        raise ValueError("train.distill.rows=0: there is nothing to write; give a number of rows")
    target, tokenizer, data = _opened(run, config)
    texts, writer = texts_folder(run.train, folder), writer_of(run.train, target, tokenizer)
    corpus, _ = _tokenized(data, tokenizer, str(target.device))
    found, figures = distilled(target, corpus, own, loop.seed, texts, writer)
    return {**figures, "rows": own.rows, "counted": found.counted}


def _tokenized(data: Any, tokenizer: Tokenizer, device: str) -> tuple[Corpus, Corpus]:
    """A data source's training and validation texts as tokens. Records are tokenized by one process of each machine."""
    if not isinstance(data, Records):
        return tokenize(data.train(), tokenizer), tokenize(data.validation(), tokenizer)
    state, problem = shard.group(device), None
    if state.is_local_main_process:
        try:
            stored(data, tokenizer, cache_folder() / "texts")
        except ValueError as error:
            problem = str(error)
    if problems := [found for found in shard.gathered([problem]) if found is not None]:
        raise ValueError(problems[0])  # in all processes, none of which then waits for another
    return stored(data, tokenizer, cache_folder() / "texts")


def _opened(run: TrainRun, config: DictConfig) -> tuple[Target, Tokenizer, Any]:
    """A training's target, tokenizer and data."""
    device = default_device() if run.target.device in (None, "cuda") else run.target.device
    if "path" in config.data:
        files_of(as_plain(config.data)["path"])  # before a target is fetched
    divide = None
    if shard.wanted():
        shard.group(device)
        divide = partial(shard.divide, device=device)
    target, found = load_target(run.target.name, run.target.dtype, device, run.target.revision, divide=divide)
    tokenizer = tokenizer_of(target, found)
    return target, tokenizer, build_data(config.data, tokenizer)


def run_pretrain(config: DictConfig, folder: Path) -> Figures:
    """Train a target; see `selfspec.training.pretrain`. Its second stage lies in the run folder; the first, where there
    are two, in its folder `source`."""
    run = typed(PretrainRun, config)
    first = folder / "source" if run.pretrain.instruct.steps else folder
    begun = checkpoint_path(first if run.pretrain.init is None else folder)
    # A first stage of other length would not be what a finished second one began from.
    last = "pretrain.instruct.steps" if run.pretrain.instruct.steps else "loop.steps"
    free = [*(key for key in _FREE if key != "loop.steps"), last]
    plain = open_run(config, folder, begun, free)
    data = instantiate(config.data)
    tokenizer = None if run.pretrain.tokenizer is None else load_tokenizer(run.pretrain.tokenizer)
    texts = data.train(), data.validation()
    figures: Figures = {}
    if run.pretrain.init is None:
        with RunLog(first, run.name, run.wandb, plain, "train.jsonl") as log:
            figures = pretrain(*texts, run.pretrain, tokenizer, run.loop, first, log)
    if run.pretrain.instruct.steps:
        start = resolve(run.pretrain.init or str(first / "target"))
        model = LlamaForCausalLM.from_pretrained(start, dtype="float32")
        with RunLog(folder, f"{run.name}-instruct", run.wandb, plain, "train.jsonl") as log:
            stage, note = run.pretrain.instruct, Path(start) / "training.json"
            before = json.loads(note.read_text()) if note.is_file() else {}
            figures = instruct(*texts, model, load_tokenizer(start), stage, run.loop, folder, log, before)
    return figures


def tokenizer_of(target: Target, tokenizer: Tokenizer | None) -> Tokenizer:
    """Raises ValueError where there is none."""
    if tokenizer is None:
        raise ValueError(f"target {target.name!r} has no tokenizer, which text needs; add one to its folder")
    return tokenizer
