"""From a composed Hydra config to objects. Hydra's instantiate is called here and nowhere else."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from hydra.experimental.callback import Callback
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from selfspec.evaluation.audit import AuditConfig, audit, law_tests, law_verdict
from selfspec.evaluation.metrics import summarize
from selfspec.evaluation.plots import plot_margins, plot_points, plot_rules
from selfspec.evaluation.prompts import cut_prompts, read_prompts
from selfspec.evaluation.report import audit_report, read_points, table, write_point
from selfspec.evaluation.runs import DecodeConfig, bookkeeping, run_arms
from selfspec.evaluation.verifiers import VerifiersConfig, compare, comparison_table
from selfspec.log import RunLog, is_main_process
from selfspec.spec import Spec, load, load_target, load_tokenizer
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
    tokenizer = None if run.pretrain.tokenizer is None else load_tokenizer(run.pretrain.tokenizer)
    with RunLog(folder, run.name, run.wandb, plain, "train.jsonl") as log:
        return pretrain(data.train(), data.validation(), run.pretrain, tokenizer, run.loop, folder, log)


def evaluation_prompts(
    spec: Spec, data: DictConfig, config: DecodeConfig | AuditConfig | VerifiersConfig
) -> list[list[int]]:
    """The prompts of a benchmark or audit: from its prompt file, or cut from the data's held-out text."""
    if config.prompt_file is not None:
        return read_prompts(config.prompt_file, spec.tokenizer)[: config.prompts]
    documents = build_data(data, spec.tokenizer).evaluation()
    return cut_prompts(documents, spec.tokenizer, config.prompts, config.prompt_tokens)


def run_decode(config: DictConfig, folder: Path, label: str) -> dict[str, Any]:
    """One benchmark point: its records, figures and plots in `folder`."""
    plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    run: Any = OmegaConf.to_object(config)
    spec = load(run.drafter.name, run.target, run.dtype, run.device)
    prompts = evaluation_prompts(spec, config.data, run.decode)
    with RunLog(folder, f"{run.name}-{label}", run.wandb, plain, "figures.jsonl") as log:
        records = run_arms(spec, prompts, run.decode, run.tree.nodes)
        point = {"label": label, "config": plain, "dtype": str(spec.target.dtype), **summarize(records)}
        if "speculative" in point and run.decode.batch_size == 1 and run.decode.lossy is None:
            point["speculative"]["bookkeeping"] = bookkeeping(spec, prompts[:8], run.decode.options(), run.tree.nodes)
        write_point(folder, point, records)
        log.write({key: point[key] for key in ("arms", "speedup", "speculative") if key in point})
        log.images(plot_points([point], folder))
    return point


def run_audit(config: DictConfig, folder: Path) -> dict[str, Any]:
    """Audit a drafter on its target: audit.json, report.md and a plot in `folder`; returns the figures."""
    plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    run: Any = OmegaConf.to_object(config)
    spec = load(run.drafter.name, run.target, run.dtype, run.device)
    prompts = evaluation_prompts(spec, config.data, run.audit)
    with RunLog(folder, run.name, run.wandb, plain, "figures.jsonl") as log:
        found = audit(spec, prompts, run.audit)
        tests = []
        if run.audit.law_samples:
            short = [prompt[:32] for prompt in prompts[:8]]  # thousands of texts begin with it
            tests = law_tests(spec, short, run.audit.law_samples, run.audit.law_top_k, nodes=8)
        report = audit_report(found, tests)
        figures = {**found.as_dict(), "law": [asdict(t) for t in tests], "config": plain}
        figures["law_verdict"] = law_verdict(tests) if tests else None
        (folder / "audit.json").write_text(json.dumps(figures, indent=1) + "\n")
        (folder / "report.md").write_text(report + "\n")
        log.write({key: figures[key] for key in ("verdict", "rows", "tokens", "noise", "deviation", "law_verdict")})
        margins = [(float(d.position), d.margin) for d in found.divergences]
        log.images({"margins": plot_margins(margins, found.bound, folder / "margins.png")})
    print(f"\n{report}\n{folder}")
    return figures


def run_verifiers(config: DictConfig, folder: Path) -> list[dict[str, Any]]:
    """Compare shared noise with the published verifiers: verifiers.json and table.md in `folder`."""
    plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    run: Any = OmegaConf.to_object(config)
    spec = load(run.drafter.name, run.target, run.dtype, run.device)
    if spec.drafter.kind != "medusa":
        raise ValueError(
            f"drafter={run.drafter.name!r} is of kind {spec.drafter.kind}; this comparison needs heads that guess each "
            "depth without the tokens before it (medusa)"
        )
    prompts = evaluation_prompts(spec, config.data, run.verifiers)
    documents = build_data(config.data, spec.tokenizer).validation()
    measured = cut_prompts(documents, spec.tokenizer, run.verifiers.measured_prompts, run.verifiers.prompt_tokens)
    with RunLog(folder, run.name, run.wandb, plain, "figures.jsonl") as log:
        rows = compare(spec, lambda hidden: spec.drafter(hidden)[:, 0], measured, prompts, run.verifiers)
        (folder / "verifiers.json").write_text(json.dumps({"rows": rows, "config": plain}, indent=1) + "\n")
        (folder / "table.md").write_text(comparison_table(rows) + "\n")
        for row in rows:
            log.write(row)
        log.images({"verifiers": plot_rules(rows, folder / "verifiers.png")})
    print(f"\n{comparison_table(rows)}\n{folder}")
    return rows


class SweepTable(Callback):
    """Ends a multirun in one table and one set of plots of all its points."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        points = read_points(folder)
        if points:
            (folder / "table.md").write_text(table(points) + "\n")
            plot_points(points, folder)
            print(f"\n{table(points)}\n{folder}")
