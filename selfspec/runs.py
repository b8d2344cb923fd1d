"""From a composed Hydra config to objects. Hydra's instantiate is called here and nowhere else."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from hydra.experimental.callback import Callback
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from selfspec.budget import pass_costs
from selfspec.checkpoint import drafter_class, read_meta
from selfspec.evaluation.audit import AuditConfig, audit, law_tests, law_verdict
from selfspec.evaluation.compare import (
    held_bytes,
    kinds_table,
    main_table,
    price_table,
    run_comparison,
    verdict,
)
from selfspec.evaluation.compare import parts as readme_parts
from selfspec.evaluation.compare import summarize as summarize_runs
from selfspec.evaluation.metrics import summarize
from selfspec.evaluation.plots import plot_comparison, plot_margins, plot_points, plot_rules
from selfspec.evaluation.prompts import cut_prompts, prompts_of_kind, read_prompts
from selfspec.evaluation.report import audit_report, read_points, table, write_point
from selfspec.evaluation.runs import DecodeConfig, bookkeeping, run_arms
from selfspec.evaluation.verifiers import VerifiersConfig, compare, comparison_table
from selfspec.log import RunLog, is_main_process
from selfspec.spec import (
    Spec,
    drafter_folder,
    find_drafter,
    joined,
    load,
    load_target,
    load_tokenizer,
    resolve,
    untrained,
)
from selfspec.training.heads import train_heads
from selfspec.training.loop import checkpoint_path, default_device
from selfspec.training.pretrain import pretrain

# Keys that may change when a run is resumed: they alter how long it runs or what it reports, not what it is.
_FREE = ("wandb", "loop.steps", "loop.compile", "loop.log_every", "loop.validate_every", "loop.checkpoint_every")


def open_run(config: DictConfig, folder: Path, begun: Path, free: Sequence[str] = _FREE) -> dict[str, Any]:
    """Write the composed config into the run folder and return it as plain data. begun: the file that a run leaves
    there.

    Raises ValueError where the folder already holds a run of another configuration, the keys `free` aside.
    """
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    path = folder / "config.yaml"
    if path.exists() and begun.exists():
        before, now = OmegaConf.load(path), OmegaConf.create(plain)
        for key in free:
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
    plain = open_run(config, folder, checkpoint_path(folder))
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
    plain = open_run(config, folder, checkpoint_path(folder))
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
    if isinstance(config, DecodeConfig) and config.kind is not None:
        return prompts_of_kind(config.kind, documents, spec.tokenizer, config.prompts, config.prompt_tokens)
    return cut_prompts(documents, spec.tokenizer, config.prompts, config.prompt_tokens)


def run_decode(config: DictConfig, folder: Path, label: str) -> dict[str, Any]:
    """One benchmark point: its records, figures and plots in `folder`."""
    plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    run: Any = OmegaConf.to_object(config)
    spec = load(run.drafter.names(), run.target, run.dtype, run.device)
    prompts = evaluation_prompts(spec, config.data, run.decode)
    with RunLog(folder, f"{run.name}-{label}", run.wandb, plain, "figures.jsonl") as log:
        records = run_arms(spec, prompts, run.decode, run.tree.nodes)
        point = {"label": label, "config": plain, "dtype": str(spec.target.dtype), **summarize(records)}
        if "forecast" in point.get("speculative", {}):
            print(f"tree.nodes=auto: {point['speculative']['forecast']}")
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
    spec = load(run.drafter.names(), run.target, run.dtype, run.device)
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
    spec = load(run.drafter.names(), run.target, run.dtype, run.device)
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


def run_compare(config: DictConfig, folder: Path) -> list[dict[str, Any]]:
    """The comparison of `selfspec.evaluation.compare`: runs.jsonl, compare.json, table.md and plots in `folder`."""
    run: Any = OmegaConf.to_object(config)
    path = folder / "runs.jsonl"
    free = ("wandb", *(f"compare.{key}" for key in ("drafters", "nodes", "temperatures", "kinds", "methods", "readme")))
    plain = open_run(config, folder, path, free)
    target, tokenizer = load_target(run.target, run.dtype, run.device)
    specs = {}
    for name in run.compare.drafters:
        names = joined(name)
        if isinstance(names, list):
            drafter = drafter_class("hybrid")(target, names)  # type: ignore[call-arg]
        else:
            drafter = find_drafter(names, target, tokenizer)
        specs[name] = Spec(target, drafter, tokenizer)
    if not specs:
        raise ValueError("compare.drafters is empty; give at least one")
    draft_model = None
    if "hf_assisted" in run.compare.methods:
        draft_model = load_target(run.compare.draft_model, run.dtype, run.device)[0].model
    documents = build_data(config.data, tokenizer).evaluation()
    prompts = {
        kind: prompts_of_kind(kind, documents, tokenizer, run.compare.prompts, run.compare.prompt_tokens)
        for kind in run.compare.kinds
    }
    (folder / "figures.jsonl").unlink(missing_ok=True)  # written anew from all runs
    with RunLog(folder, run.name, run.wandb, plain, "figures.jsonl") as log:
        runs = run_comparison(specs, draft_model, prompts, run.compare, path)
        costs = {t: pass_costs(target, 1, t > 0) for t in run.compare.temperatures}
        rows = summarize_runs(runs, costs)
        prices = {name: _price(name, spec) for name, spec in specs.items()}
        if draft_model is not None:
            prices["hf_assisted"] = _price_of_model(run.compare.draft_model, draft_model)
        (folder / "compare.json").write_text(
            json.dumps({"rows": rows, "prices": prices, "config": plain}, indent=1) + "\n"
        )
        text = "\n\n".join(
            (
                main_table(rows),
                kinds_table(rows),
                price_table(prices),
                verdict(runs, rows) if run.compare.methods else "",
            )
        )
        (folder / "table.md").write_text(text + "\n")
        for row in rows:
            log.write(row)
        log.images(plot_comparison(rows, folder))
    if run.compare.readme is not None:
        readme = Path(run.compare.readme)
        head, tail = readme_parts(readme)
        scratch = readme.with_suffix(".tmp")
        scratch.write_text(f"{head}{text}\n{tail}")
        os.replace(scratch, readme)
    print(f"\n{text}\n{folder}")
    return rows


def _price(name: str, spec: Spec) -> dict[str, Any]:
    """Parameters, bytes on disk and in memory, and training of what drafts beside the target."""
    names = joined(name)
    price: dict[str, Any] = {"parameters": 0, "disk": 0, "memory": held_bytes(spec.drafter, spec.target.model)}
    for part in [names] if isinstance(names, str) else names:
        if untrained(part) is None:
            home = drafter_folder(part)
            price["parameters"] += read_meta(home)["parameters"]
            price["disk"] += _disk(home)
            price["training"] = _training(home)
    return price


def _price_of_model(name: str, model: Any) -> dict[str, Any]:
    home = Path(resolve(name))
    parameters = list(model.parameters())
    return {
        "parameters": sum(p.numel() for p in parameters),
        "disk": _disk(home) if home.is_dir() else 0,
        "memory": sum(p.numel() * p.element_size() for p in parameters),
        "training": _training(home),
    }


def _training(home: Path) -> dict[str, float] | None:
    note = home / "training.json"
    return json.loads(note.read_text()) if note.is_file() else None


def _disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def run_report(config: DictConfig) -> None:
    """One table and one set of plots of all points below the folder `sweep`; what is broken is named and left out."""
    folder = Path(config.sweep)
    if not folder.is_dir():
        raise FileNotFoundError(f"sweep={folder}: there is no such folder")
    points, broken = read_points(folder)
    for path, why in broken:
        print(f"skipped {path}: {why}")
    if broken:
        print(f"{len(broken)} of {len(points) + len(broken)} runs skipped")
    if not points:
        raise ValueError(f"sweep={folder} holds no finished run of eval/decode.py")
    (folder / "table.md").write_text(table(points) + "\n")
    plot_points(points, folder)
    print(f"\n{table(points)}\n{folder}")


class SweepTable(Callback):
    """Ends a multirun in one table and one set of plots of all its points."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        run_report(OmegaConf.create({"sweep": config.hydra.sweep.dir}))
