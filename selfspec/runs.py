"""From a composed Hydra config to a run. Hydra's instantiate is called here and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from transformers import LlamaForCausalLM
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.checkpoint import drafter_class
from selfspec.config import PretrainRun, TrainRun
from selfspec.core.target import Target
from selfspec.drafters.base import DrafterConfig
from selfspec.loading import load_target, load_tokenizer, resolve
from selfspec.log import Figures, RunLog, is_main_process, write_text
from selfspec.training.drafter import check_training, train_drafter
from selfspec.training.loop import checkpoint_path, default_device
from selfspec.training.pretrain import instruct, pretrain

R = TypeVar("R")
# Keys that may change when a run is resumed: they alter how long it runs or what it reports, not what it is.
_FREE = ("wandb", "loop.steps", "loop.compile", "loop.log_every", "loop.validate_every", "loop.checkpoint_every")


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


def run_training(config: DictConfig, folder: Path) -> Figures:
    """Train a drafter; see `selfspec.training.drafter`."""
    run = typed(TrainRun, config)
    plain = open_run(config, folder, checkpoint_path(folder))
    made: DrafterConfig = run.drafter
    device = run.target.device or default_device()
    if "path" in config.data and not Path(config.data.path).is_file():  # before a target is fetched
        raise ValueError(f"data.path={config.data.path!r} is not a file")
    target, found = load_target(run.target.name, run.target.dtype, device, run.target.revision)
    tokenizer = tokenizer_of(target, found)
    data = build_data(config.data, tokenizer)
    torch.manual_seed(run.loop.seed)
    kind = drafter_class(type(made).__module__.rsplit(".", 1)[-1])
    drafter = kind(target, made)  # type: ignore[arg-type]
    check_training(target, drafter, run.train, run.loop)  # before texts are made, which may take long
    with RunLog(folder, run.name, run.wandb, plain, "train.jsonl") as log:
        texts = data.train(), data.validation()
        return train_drafter(target, run.target.name, tokenizer, drafter, *texts, run.train, run.loop, folder, log)


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
