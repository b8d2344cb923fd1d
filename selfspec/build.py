"""From a composed Hydra config to objects. Hydra's instantiate is called here and nowhere else."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from hydra.experimental.callback import Callback
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from selfspec.evaluation.metrics import summarize
from selfspec.evaluation.plots import plot_points
from selfspec.evaluation.prompts import cut_prompts, read_prompts
from selfspec.evaluation.report import read_points, table, write_point
from selfspec.evaluation.runs import run_arms
from selfspec.log import RunLog, is_main_process
from selfspec.spec import load, load_target
from selfspec.training.heads import train_heads
from selfspec.training.loop import checkpoint_path, default_device
from selfspec.training.pretrain import pretrain

# Keys that may change when a run is resumed: they alter how long it runs or what it reports, not what it is.
_FREE = ("wandb", "loop.steps", "loop.compile", "loop.log_every", "loop.validate_every", "loop.checkpoint_every")


def open_run(config: DictConfig, folder: Path) -> dict[str, Any]:
    """Write the composed config into the run folder and return it as plain data.

    Raises ValueError where the folder already holds a run of another configuration.
    """
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    path = folder / "config.yaml"
    if path.exists() and checkpoint_path(folder).exists():
        before, now = OmegaConf.load(path), OmegaConf.create(plain)
        for key in _FREE:
            OmegaConf.update(before, key, OmegaConf.select(now, key))
        if before != now:
            raise ValueError(f"{folder} holds a run with another configuration ({path}); choose another name=")
    if is_main_process():
        folder.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".tmp")
        OmegaConf.save(OmegaConf.create(plain), scratch)
        os.replace(scratch, path)
    return plain


def build_data(config: DictConfig, tokenizer: Any) -> Any:
    """The data group's documents; those that need a chat template get the target's tokenizer."""
    needs_template = any(f.name == "tokenizer" for f in fields(get_class(config._target_)))  # type: ignore[arg-type]
    return instantiate(config, tokenizer=tokenizer) if needs_template else instantiate(config)


def run_heads(config: DictConfig, folder: Path) -> dict[str, Any]:
    plain = open_run(config, folder)
    run: Any = OmegaConf.to_object(config)
    device = run.target.device or default_device()
    target, tokenizer = load_target(run.target.name, run.target.dtype, device, run.target.revision)
    if tokenizer is None:
        raise ValueError(f"target {run.target.name!r} has no tokenizer, which training text needs")
    data = build_data(config.data, tokenizer)
    torch.manual_seed(run.loop.seed)
    drafter = instantiate(config.drafter, target)
    with RunLog(folder, run.name, run.wandb, plain, "train.jsonl") as log:
        return train_heads(
            target,
            run.target.name,
            tokenizer,
            drafter,
            data.train(),
            data.validation(),
            run.heads,
            run.loop,
            folder,
            log,
        )


def run_pretrain(config: DictConfig, folder: Path) -> dict[str, Any]:
    plain = open_run(config, folder)
    run: Any = OmegaConf.to_object(config)
    data = instantiate(config.data)
    with RunLog(folder, run.name, run.wandb, plain, "train.jsonl") as log:
        return pretrain(data.train(), data.validation(), run.pretrain, run.loop, folder, log)


def run_decode(config: DictConfig, folder: Path, label: str) -> dict[str, Any]:
    """One benchmark point: its records, figures and plots in `folder`."""
    plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    run: Any = OmegaConf.to_object(config)
    spec = load(run.drafter.name, run.target, run.dtype, run.device)
    if run.decode.prompt_file is not None:
        prompts = read_prompts(run.decode.prompt_file, spec.tokenizer)[: run.decode.prompts]
    else:
        documents = build_data(config.data, spec.tokenizer).evaluation()
        prompts = cut_prompts(documents, spec.tokenizer, run.decode.prompts, run.decode.prompt_tokens)
    with RunLog(folder, f"{run.name}-{label}", run.wandb, plain, "figures.jsonl") as log:
        records = run_arms(spec, prompts, run.decode, run.tree.nodes)
        point = {"label": label, "config": plain, "dtype": str(spec.target.dtype), **summarize(records)}
        write_point(folder, point, records)
        log.write({key: point[key] for key in ("arms", "speedup", "speculative") if key in point})
        log.images(plot_points([point], folder))
    return point


class SweepTable(Callback):
    """Ends a multirun in one table and one set of plots of all its points."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        points = read_points(folder)
        if points:
            (folder / "table.md").write_text(table(points) + "\n")
            plot_points(points, folder)
            print(f"\n{table(points)}\n{folder}")
