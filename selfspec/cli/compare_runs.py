"""From a composed Hydra config to a comparison."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig

from selfspec.api import Spec
from selfspec.budget.cost import pass_costs
from selfspec.checkpoints.footprint import price, price_of_model
from selfspec.checkpoints.load_target import load_target
from selfspec.checkpoints.loading import find_drafter
from selfspec.checkpoints.weights_hash import target_hash
from selfspec.cli.config import CompareRun
from selfspec.cli.evaluation_runs import asked
from selfspec.cli.origin import check_origin, origin
from selfspec.cli.run_folders import run_folder, typed
from selfspec.cli.training_runs import tokenizer_of
from selfspec.data.questions import SETS, Answering, groups_of
from selfspec.engine.choose import chosen
from selfspec.evaluation.arms import Prompt
from selfspec.evaluation.compare import (
    CompareConfig,
    comparison_tables,
    run_comparison,
    summarize_comparison,
    write_summary,
)
from selfspec.evaluation.peers import check_peers, made_with
from selfspec.evaluation.plots import plot_comparison
from selfspec.evaluation.records import RECORDS, read_records
from selfspec.utils.files import Figures, read_json, section, write_section, write_text
from selfspec.utils.machine import device_type
from selfspec.utils.tracking import RunLog


def _compared(spec: Spec, data: DictConfig, config: CompareConfig) -> list[Prompt]:
    """The prompts of a comparison; answers to earlier turns are greedy."""
    prompts: list[Prompt] = []
    for name, count in zip(config.questions, config.counts, strict=True):
        groups = config.groups
        if groups is not None:
            known = groups_of(name)
            groups = [group for group in groups if group in known] or ([] if name in SETS else None)
        if groups != []:
            asked_so = name, groups, count, config.prompt_tokens, True, config.max_new_tokens
            asking = Answering(*asked_so, allow_code_execution=config.allow_code_execution)
            prompts += asked(spec, config.drafters, data, asking, {}, config.seed, each=True)[1]
    if not prompts:
        raise ValueError(
            f"compare.groups={config.groups} holds no group of compare.questions={config.questions}; give "
            "compare.groups=null for all"
        )
    points = Counter((prompt.group, prompt.question, prompt.turn) for prompt in prompts)
    if twice := next((point for point, count in points.items() if count > 1), None):
        raise ValueError(
            f"compare.questions={config.questions}: two sets hold the question {twice[1]!r} of the group {twice[0]!r}; "
            "rename one of the files, or compare them one by one"
        )
    return prompts


def run_compare(config: DictConfig, folder: Path) -> list[Figures]:
    """The comparison of `selfspec.evaluation.compare`: records.jsonl, compare.json, table.md and plots in `folder`."""
    if config.engine == "auto":  # what is kept of a comparison names the engine that it had
        config.engine = chosen("auto", device_type(config.device))
    run = typed(CompareRun, config)
    path, earlier = folder / RECORDS, folder / "runs.jsonl"  # the name until version 0.4
    begun = path if path.exists() or not earlier.is_file() else earlier
    place = "compare" if run.engine == "eager" else f"compare {run.engine}"
    if run.compare.results is not None:
        section(Path(run.compare.results), place)  # refused before anything is measured
    if run.compare.summary is not None:
        section(Path(run.compare.summary), "summary")
    changing = ("drafters", "nodes", "temperatures", "groups", "methods", "results", "summary")
    if not run.compare.drafters:
        raise ValueError("compare.drafters is empty; give at least one")
    known = {group for groups in (*SETS.values(), *map(groups_of, run.compare.questions)) for group in groups}
    if unknown := set(run.compare.groups or ()) - known:
        raise ValueError(f"compare.groups holds {sorted(unknown)}; known are {', '.join(sorted(known))}")
    free = tuple(f"compare.{key}" for key in changing)
    with run_folder(config, folder, begun, free) as plain:
        if begun == earlier:
            earlier.rename(path)
        rows, text = _comparison(run, config, folder, path, plain)
    if run.compare.results is not None:
        write_section(Path(run.compare.results), place, text)
    print(f"\n{text}\n{folder}")
    return rows


def _earlier(folder: Path) -> Figures:
    """What an earlier call left in the folder, whose arms may be left out of this one."""
    with suppress(ValueError, OSError):
        figures: Figures = read_json(folder / "compare.json")
        return figures if isinstance(figures.get("prices"), dict) else {}
    return {}


def _comparison(
    run: CompareRun, config: DictConfig, folder: Path, path: Path, plain: Figures
) -> tuple[list[Figures], str]:
    """A comparison's rows and its tables."""
    if run.compare.peers:
        check_peers(run.compare.peers, run.target)
    target, found_tokenizer = load_target(run.target, run.dtype, run.device, engine=run.engine)
    tokenizer = tokenizer_of(target, found_tokenizer)
    if "hf_early_exit" in run.compare.methods and run.compare.exit_layer >= target.n_layers:
        raise ValueError(f"compare.exit_layer={run.compare.exit_layer}: the target has {target.n_layers} layers")
    drafters = {n: find_drafter(n, target, tokenizer, trust=run.trust_code) for n in run.compare.drafters}
    engines = made_with(run.compare.peers, run.target) if run.compare.peers else None
    others, kept = {name: made_with([name], run.target) for name in run.compare.peers}, read_records(path)
    specs = {name: Spec(target, drafter, tokenizer) for name, drafter in drafters.items()}
    draft_model = None
    if run.compare.draft_model is not None:
        draft_target = load_target(run.compare.draft_model, run.dtype, run.device)[0]
        draft_model, model = draft_target.model, f"{run.compare.draft_model} {target_hash(draft_target)[:16]}"
        others["hf_assisted"] = model
    check_origin(folder, path, target, drafters, {each.arm for each in kept}, others)
    prompts = _compared(next(iter(specs.values())), config.data, run.compare)
    (folder / "figures.jsonl").unlink(missing_ok=True)  # written anew from all runs
    with RunLog(folder, run, plain, "figures.jsonl") as log:
        measured = run_comparison(specs, draft_model, prompts, run.compare, path)
        costs = {t: pass_costs(target, 1, t > 0, insist=True) for t in sorted({r.temperature for r in measured})}
        rows = summarize_comparison(measured, costs)
        earlier = _earlier(folder) if kept else {}
        prices = {name: of for name, of in earlier.get("prices", {}).items() if name in {each.arm for each in kept}}
        prices |= {name: price(name, spec.drafter, target) for name, spec in specs.items()}
        if draft_model is not None and run.compare.draft_model is not None:
            prices["hf_assisted"] = price_of_model(run.compare.draft_model, draft_model)
        lines = f"{earlier.get('engines') or ''}\n{engines or ''}".splitlines()  # of calls with other engines, too
        made, engines = origin(target.device), "\n".join(filter(None, dict.fromkeys(lines))) or None
        commands = dict.fromkeys([*earlier.get("command", "").splitlines(), made["command"]])
        made["command"] = "\n".join(commands)
        figures = {"rows": rows, "prices": prices, **made, "engines": engines, "config": plain}
        write_text(folder / "compare.json", json.dumps(figures, indent=1) + "\n")
        text = comparison_tables(measured, rows, prices) + ("" if engines is None else f"\n\n{engines}")
        write_text(folder / "table.md", text + "\n")
        if run.compare.summary is not None:
            write_summary(measured, run.target, f"{figures['machine']}, {run.engine}", Path(run.compare.summary))
        for row in rows:
            log.write(row)
        log.images(plot_comparison(rows, folder))
    return rows, text
