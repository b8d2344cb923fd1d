"""From a composed Hydra config to objects. Hydra's instantiate is called here and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from selfspec.log import RunLog
from selfspec.spec import load_target
from selfspec.training.heads import train_heads
from selfspec.training.pretrain import pretrain

# Keys that may change when a run is resumed: they alter how long it runs or what it reports, not what it is.
_FREE = ("wandb", "loop.steps", "loop.compile", "loop.log_every", "loop.validate_every", "loop.checkpoint_every")


def open_run(config: DictConfig, folder: Path) -> dict[str, Any]:
    """Write the composed config into the run folder and return it as plain data.

    Raises ValueError where the folder already holds a run of another configuration.
    """
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    path = folder / "config.yaml"
    if path.exists():
        before, now = OmegaConf.load(path), OmegaConf.create(plain)
        for key in _FREE:
            OmegaConf.update(before, key, OmegaConf.select(now, key))
        if before != now:
            raise ValueError(f"{folder} holds a run with another configuration ({path}); choose another name=")
    folder.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    OmegaConf.save(OmegaConf.create(plain), scratch)
    os.replace(scratch, path)
    return plain


def build_data(config: DictConfig, tokenizer: Any) -> Any:
    """The data group's documents; those that need a chat template get the target's tokenizer."""
    own = get_class(config._target_)
    return instantiate(config, tokenizer=tokenizer) if "tokenizer" in own.__dataclass_fields__ else instantiate(config)


def run_heads(config: DictConfig, folder: Path) -> dict[str, Any]:
    plain = open_run(config, folder)
    run: Any = OmegaConf.to_object(config)
    target, tokenizer = load_target(run.target.name, run.target.dtype, run.target.device, run.target.revision)
    if tokenizer is None:
        raise ValueError(f"target {run.target.name!r} has no tokenizer, which training text needs")
    data = build_data(config.data, tokenizer)
    torch.manual_seed(run.loop.seed)
    drafter = instantiate(config.drafter, target)
    with RunLog(folder, run.name, run.wandb, plain, "train.jsonl") as log:
        return train_heads(
            target, run.target.name, tokenizer, drafter, data.train(), data.validation(), run.heads, run.loop, folder, log
        )


def run_pretrain(config: DictConfig, folder: Path) -> dict[str, Any]:
    plain = open_run(config, folder)
    run: Any = OmegaConf.to_object(config)
    data = instantiate(config.data)
    with RunLog(folder, run.name, run.wandb, plain, "train.jsonl") as log:
        return pretrain(data.train(), data.validation(), run.pretrain, run.loop, folder, log)
