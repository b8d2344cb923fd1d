"""From a composed Hydra config to a run. Hydra's instantiate is called here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from transformers import AutoModelForCausalLM
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.checkpoints.embedded import resolve
from selfspec.checkpoints.load_target import load_target, load_tokenizer
from selfspec.checkpoints.loading import find_drafter
from selfspec.checkpoints.target_parts import load_parts
from selfspec.cli.config import TargetRun, TrainRun, drafter_of
from selfspec.cli.run_folders import FREE, as_plain, check_same, finished, run_folder, typed
from selfspec.core.target import Target
from selfspec.data.documents import Records
from selfspec.data.records import files_of
from selfspec.data.server import Server
from selfspec.data.store import Corpus, stored, tokenize
from selfspec.drafters.base import Drafter, Trained
from selfspec.drafters.registry import build, try_out
from selfspec.training import shard
from selfspec.training.check import check, check_training, check_unwritten
from selfspec.training.checkpoint import warm_start
from selfspec.training.distill import distill
from selfspec.training.draft_loss import needs_layers, try_training
from selfspec.training.drafter_data import states_of, texts_folder
from selfspec.training.loop import checkpoint_path
from selfspec.training.pretrain import check_second_stage, instruct, pretrain
from selfspec.training.resources import bfloat16_is_faster
from selfspec.training.states_server import SERVER
from selfspec.training.synthetic import Synthetic, synthetic
from selfspec.training.train_drafter import DrafterRun, train_drafter
from selfspec.utils.files import Figures, cache_folder, is_main_process, read_json
from selfspec.utils.machine import check_device, default_device
from selfspec.utils.openai_client import Servers, server_urls
from selfspec.utils.tracking import RunLog, whole_lines

R = TypeVar("R")


def settled(kind: type[R], config: DictConfig, folder: Path) -> tuple[R, DictConfig]:
    """A training's config, checked, in which `auto` of loop.precision and target.dtype is what a run begun in `folder`
    had, or what is faster here."""
    typed(kind, config)
    config, begun = config.copy(), folder / "config.yaml"
    before: Any = OmegaConf.create()
    with suppress(Exception):  # of YAML, of Unicode: `check_same` tells of it
        before = OmegaConf.merge(before, OmegaConf.load(begun))
    for key in ("loop.precision", "target.dtype"):
        if OmegaConf.select(config, key) == "auto" and (value := OmegaConf.select(before, key)) is not None:
            OmegaConf.update(config, key, value)
    if config.loop.precision == "auto":
        device = _device(config.target.device if "target" in config else None)
        check_device(device)
        state = shard.group(device)
        config.loop.precision = "bf16" if shard.gathered([bfloat16_is_faster(device)])[0] else "no"
        if state.is_main_process:
            print(f"loop.precision={config.loop.precision}: the faster of bf16 and no, as measured on {device}")
        if "target" in config and config.target.dtype == "auto" and config.loop.precision == "no" and device == "cpu":
            config.target.dtype = "float32"
    return typed(kind, config), config


def _device(asked: str | None) -> str:
    if asked == "cuda" and torch.cuda.is_available():  # each process has its own
        asked = None
    return default_device() if asked in (None, "auto") else asked


def build_data(config: DictConfig, tokenizer: Tokenizer, target: Target) -> Any:
    """The data group's documents; those that need a chat template get the tokenizer and the target's end tokens, and
    those that read others' questions get their source."""
    wanted = {f.name for f in fields(get_class(config._target_))}
    beside: Figures = {"tokenizer": tokenizer, "ends": target.end_tokens}
    if (source := config.get("source")) is not None:
        beside["source"] = build_data(source, tokenizer, target)
        config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "source"])
    made = instantiate(config, _convert_="all", _partial_=True)  # which would take a source for a config
    return made(**{name: value for name, value in beside.items() if name in wanted})


def run_check(config: DictConfig, folder: Path) -> Iterator[str]:
    """What a training would read and take, as lines; see `selfspec.training.check`."""
    run, config = settled(TrainRun, config, folder)
    target, tokenizer, data = _opened(run, config)
    drafter = _made(run, target, tokenizer)
    if isinstance(data, (Synthetic, Server)):
        yield from check_unwritten(target, drafter, data, run.train, run.loop)
        return
    train, validation = _tokenized(data, target, tokenizer)
    yield from check(target, tokenizer, drafter, train, validation, run.train, run.loop)


def _made(run: TrainRun, target: Target, tokenizer: Tokenizer, begun: bool = False) -> Drafter:
    """The drafter that a training begins with. begun: whether a checkpoint has its weights."""
    kind, config = drafter_of(run.drafter)
    torch.manual_seed(run.loop.seed)
    try:
        drafter = build(kind, target, config)
    except RuntimeError as error:  # of weights that are not here
        if target.partial and not isinstance(error, torch.OutOfMemoryError):
            raise needs_layers(kind.__module__.rsplit(".", 1)[-1]) from error
        raise
    if not kind.__module__.startswith("selfspec."):  # those of this package are tested
        try_out(drafter, target)
        if isinstance(drafter, Trained) and drafter.trained() and not target.partial:
            try_training(drafter, target, run.loop)
    if (name := run.train.init_from) is not None and not begun:
        warm_start(drafter, find_drafter(name, target, tokenizer, trust=run.trust_code), name)
    return drafter


def run_training(config: DictConfig, folder: Path, title: str = "") -> Figures:
    """Train a drafter; see `selfspec.training.train_drafter`. A finished run is left as it is, and its
    figures are returned. title: of the run in its logger."""
    run, config = settled(TrainRun, config, folder)
    if (done := finished(folder, run.loop)) is not None:
        check_same(folder / "config.yaml", as_plain(config))
        if is_main_process():
            count = done.get("steps", run.loop.steps)
            more = "minutes" if run.loop.minutes is not None and count < run.loop.steps else "steps"
            more = "patience" if "patience" in done else more
            further = f"; a higher loop.{more}= trains it further" if "kept_step" in done else ""
            print(f"{folder} is finished, with {count} steps{further}")
        return done
    with run_folder(config, folder, checkpoint_path(folder)) as plain:
        target, tokenizer, data = _opened(run, config)
        drafter = _made(run, target, tokenizer, checkpoint_path(folder).is_file())
        check_training(target, drafter, run.train, run.loop)  # before texts are made, which may take long
        texts = _tokenized(data, target, tokenizer)
        with RunLog(folder, run, plain, "train.jsonl", title) as log:
            made = (target, run.target.name, tokenizer, drafter, *states_of(run.train, target, drafter.reads, *texts))
            figures = train_drafter(DrafterRun(*made, run.train, run.loop, folder, log))
            if is_main_process():
                from selfspec.evaluation.plots import plot_training  # slow to import

                log.images(plot_training([record for _, record in whole_lines(folder / "train.jsonl")], folder))
            return figures


def run_distill(config: DictConfig, folder: Path) -> Figures:
    """Only write the self-distillation data of a training; see `selfspec.training.distill`. Figures of what was written
    in this call; of data=server, the file of answers."""
    run, config = settled(TrainRun, config, folder)
    settings, loop = run.train.distill, run.loop
    if run.check:
        raise ValueError("check=true is for train/heads.py; without it, train/distill.py writes texts")
    if get_class(config.data._target_) is Server:
        target, tokenizer = load_parts(run.target.name, "auto", "cpu", run.target.revision)
        answers = build_data(config.data, tokenizer, target)
        if is_main_process():
            answers.write()
        return {"answers": str(answers.path)}
    if not settings.rows:
        raise ValueError("train.distill.rows=0: there is nothing to write; give a number of rows")
    with run_folder(config, folder, checkpoint_path(folder)):
        target, tokenizer, data = _opened(run, config)
        texts, (corpus, _) = texts_folder(run.train, folder), _tokenized(data, target, tokenizer)
        shard.group(str(target.device))
        texts_written, figures = distill(target, corpus, settings, loop.seed, texts)
        return {**figures, "rows": settings.rows, "counted": texts_written.counted}


def _tokenized(data: Any, target: Target, tokenizer: Tokenizer) -> tuple[Corpus, Corpus]:
    """A data source's training and validation texts as tokens. Raises ValueError for tokens that the target has not."""
    texts = _texts(data, target, tokenizer)
    parts = (part for text in texts for part in text.tokens.split(1 << 24))
    largest = max((int(part.max()) for part in parts if len(part)), default=0)
    if largest >= target.vocab_size:
        raise ValueError(
            f"the data hold token id {largest}; target {target.name!r} has ids 0 to {target.vocab_size - 1}, fewer "
            "than its tokenizer: take the tokenizer that it was trained with, or resize_token_embeddings"
        )
    return texts


def _texts(data: Any, target: Target, tokenizer: Tokenizer) -> tuple[Corpus, Corpus]:
    """A data source's texts. Records are tokenized by one process of each machine, synthetic conversations written by
    all."""
    if isinstance(data, Synthetic):
        shard.group(str(target.device))
        return synthetic(data, target, tokenizer)
    if not isinstance(data, Records):
        end = data.template.prompt_end if hasattr(data, "template") else ()
        return tokenize(data.train(), tokenizer, end), tokenize(data.validation(), tokenizer, end)
    state, problem = shard.group(str(target.device)), None
    texts: tuple[Corpus, Corpus] | None = None
    if isinstance(data, Server) and state.is_main_process:
        try:
            data.write()
        except (ValueError, OSError) as error:
            problem = str(error)
    state.wait_for_everyone()
    if problem is None and state.is_local_main_process:
        try:
            texts = stored(data, tokenizer, cache_folder() / "texts")
        except ValueError as error:
            problem = str(error)
    if problems := [text for text in shard.gathered([problem]) if text is not None]:
        raise ValueError(problems[0])  # in all processes, none of which then waits for another
    return texts or stored(data, tokenizer, cache_folder() / "texts")


def _opened(run: TrainRun, config: DictConfig) -> tuple[Target, Tokenizer, Any]:
    """A training's target, tokenizer and data."""
    device = _device(run.target.device)
    for key, data in {"data.path": config.data, "data.source.path": config.data.get("source")}.items():
        if data is not None and "path" in data:
            files_of(as_plain(data)["path"], key)  # before a target is fetched
    if run.train.states == SERVER:  # are they there? before a target is loaded
        Servers(server_urls("train.states_url", run.train.states_url))
    if get_class(config.data._target_) is Server:
        Servers(server_urls("data.url", as_plain(config.data)["url"]), config.data.model)
    divide = None
    if shard.wanted():
        shard.group(device)
        divide = partial(shard.divide, device=device)
    asked, found = (run.target.name, run.target.dtype, device, run.target.revision), None
    if run.train.states is None:
        target, found = load_target(*asked, divide=divide)
    else:
        target, found = load_parts(*asked)
    tokenizer = tokenizer_of(target, found)
    return target, tokenizer, build_data(config.data, tokenizer, target)


def run_pretrain(config: DictConfig, folder: Path) -> Figures:
    """Train a target; see `selfspec.training.pretrain`. Its second stage lies in the run folder; the first, where there
    are two, in its folder `source`."""
    run, config = settled(TargetRun, config, folder)
    first = folder / "source" if run.pretrain.instruct.steps else folder
    begun = checkpoint_path(first if run.pretrain.init is None else folder)
    # A first stage of other length would not be what a finished second one began from.
    last = "pretrain.instruct.steps" if run.pretrain.instruct.steps else "loop.steps"
    free = [*(key for key in FREE if key not in ("loop.steps", "loop.minutes")), last]
    with run_folder(config, folder, begun, free) as plain:
        data = instantiate(config.data)
        tokenizer = None if run.pretrain.tokenizer is None else load_tokenizer(run.pretrain.tokenizer)
        texts = data.train(), data.validation()
        figures: Figures = {}
        if run.pretrain.instruct.steps:
            check_second_stage(*texts, tokenizer, run.pretrain.instruct, run.loop)
        if run.pretrain.init is None:
            with RunLog(first, run, plain, "train.jsonl") as log:
                figures = pretrain(*texts, run.pretrain, tokenizer, run.loop, first, log)
        elif is_main_process():
            unread = "pretrain.model, tokenizer, length, muon_lr and adam_lr, loop.steps and batch_size are not read"
            print(f"pretrain.init={run.pretrain.init}: the first stage is skipped; {unread}")
        if run.pretrain.instruct.steps:
            start = resolve(run.pretrain.init or str(first / "target"))
            model = AutoModelForCausalLM.from_pretrained(start, dtype="float32")
            with RunLog(folder, run, plain, "train.jsonl", f"{run.name}-instruct") as log:
                stage, note = run.pretrain.instruct, Path(start) / "training.json"
                before = read_json(note) if note.is_file() else {}
                figures = instruct(*texts, model, load_tokenizer(start), stage, run.loop, folder, log, before)
        return figures


def tokenizer_of(target: Target, tokenizer: Tokenizer | None) -> Tokenizer:
    """Raises ValueError where there is none."""
    if tokenizer is None:
        raise ValueError(f"target {target.name!r} has no tokenizer, which text needs; add one to its folder")
    return tokenizer
