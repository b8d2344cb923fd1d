"""From a composed Hydra config to a measurement: benchmark, answers, audit, calibration, limits."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from selfspec.api import Spec, load
from selfspec.checkpoints.drafter_folder import save_drafter, shaped_as
from selfspec.checkpoints.find import drafter_folder
from selfspec.checkpoints.footprint import training_note
from selfspec.checkpoints.load_target import load_target
from selfspec.checkpoints.loading import find_drafter, members_of
from selfspec.cli.config import AuditRun, CalibrateRun, Decoded, EvalRun, LimitsRun, Measurement, ShowRun
from selfspec.cli.help import config_folder
from selfspec.cli.origin import check_origin, origin
from selfspec.cli.run_folders import as_plain, run_folder, typed, warn_of_share
from selfspec.cli.show import show
from selfspec.cli.training_runs import build_data, tokenizer_of
from selfspec.core.target import Target
from selfspec.data.chat_template import on_one_day
from selfspec.data.questions import Asking, Question, read_questions
from selfspec.drafters.base import Drafter, Trained
from selfspec.engine.choose import chosen
from selfspec.evaluation import points
from selfspec.evaluation.arms import Prompt, prompts_of
from selfspec.evaluation.audit import audit, distribution_tests, distribution_verdict
from selfspec.evaluation.decode import defined, host_overhead, run_benchmark, summarize, write_traces
from selfspec.evaluation.figures import total
from selfspec.evaluation.limits import measure_limits, random_model
from selfspec.evaluation.plots import plot_limits, plot_margins, plot_points
from selfspec.evaluation.records import RECORDS, Record, read_records
from selfspec.evaluation.tables import audit_report, limits_tables
from selfspec.training.calibrate import TEMPERATURES, calibrate, decoded, spread, write_samples
from selfspec.utils.exactness import ROUNDED
from selfspec.utils.files import Figures, mean, section, shown, write_section, write_text
from selfspec.utils.machine import check_device, default_device, device_type, dtype_name
from selfspec.utils.tracking import RunLog

Column = Callable[[Figures, list[Record]], object]  # of another package, see `_own_columns`
# Keys that may change when a benchmark that was killed goes on
_BESIDE = (*("name", "trust_code"), *(f"decode.{key}" for key in ("columns", "metrics", "traces", "answers")))


def asked(
    spec: Spec,
    drafters: Iterable[str],
    data: DictConfig,
    asking: Asking,
    sampling: Figures,
    seed: int,
    each: bool = False,
) -> tuple[list[Question], list[Prompt]]:
    """Questions of a measurement, and their turns as prompts; those that fill the context are named and left out.
    drafters: that are measured; sampling: how earlier turns are answered; each: so many questions of each group."""
    tokenizer = tokenizer_of(spec.target, spec.tokenizer)
    source = build_data(data, on_one_day(tokenizer), spec.target)
    if asking.questions is None:
        asking = replace(asking, questions=source.questions if tokenizer.chat_template else "source")
    template = {**getattr(source, "chat_template_kwargs", {}), **asking.chat_template_kwargs}
    asking = replace(asking, chat_template_kwargs=template)
    if asking.questions == "source":
        warn_of_share(drafters, data)
    questions = read_questions(asking, tokenizer, source.evaluation, each)
    counts = Counter(q.group if each else "all" for q in questions for _ in q.ids or [q])
    if few := ", ".join(f"{name} {n}" for name, n in counts.items() if n < asking.prompts):
        print(f"warning: prompts={asking.prompts}, but there are {few.removeprefix('all ')}, which are used")
    prompts, skipped = prompts_of(spec, questions, {"max_new_tokens": asking.max_new_tokens, **sampling}, seed)
    if skipped:
        turns = len(skipped) + len(prompts)
        print(f"{len(skipped)} of {turns} turns left out, since they fill the context: {'; '.join(skipped)}")
    return questions, prompts


def _loaded(run: Measurement, config: DictConfig) -> Spec:
    """The drafter on its target. What is kept of a run names the engine that it had."""
    engine = chosen(run.engine, device_type(run.device))  # auto would change over while it is measured
    width = run.width if isinstance(run, Decoded) else None
    spec = load(run.drafter, run.target, run.dtype, run.device, engine, trust_code=run.trust_code, width=width)
    config.engine = spec.target.engine.name
    return spec


def run_decode(config: DictConfig, folder: Path, title: str = "") -> Figures:
    """One benchmark point: its records, figures and plots in `folder`. Of one that was killed what is missing is
    measured; of one that is finished nothing, but its answers are checked again. title: of the point in the run's
    logger."""
    run = typed(EvalRun, config)
    columns = _own_columns(run.decode.columns)
    spec = _loaded(run, config)
    path, begun = folder / RECORDS, folder / "summary.json"
    summary = points.finished_point(begun)
    if summary is not None and not path.is_file():
        raise ValueError(f"{begun} is there, but no {RECORDS}; delete the folder, or choose another name=")
    done = summary is not None and _outputs(summary["config"]) == _outputs(as_plain(config))
    again = False
    with suppress(Exception):  # of a config that is not there, or damaged, of which `check_same` tells
        again = OmegaConf.select(OmegaConf.load(folder / "config.yaml"), "decode.answers") == run.decode.answers
    answers, arms = run.decode.answers, run.decode.arms
    files = {} if answers is None else points.answer_files(folder, answers, arms, again)
    questions, prompts = asked(spec, [run.drafter], config.data, run.decode, run.decode.arguments(), run.decode.seed)
    if files:
        points.check_ids(questions)
    with run_folder(config, folder, path, _BESIDE) as plain, RunLog(folder, run, plain, "figures.jsonl", title) as log:
        check_origin(folder, begun if done else path, spec.target, {run.drafter: spec.drafter})
        before = len(read_records(path))
        records = run_benchmark(spec, prompts, run.decode, run.tree.nodes, path)
        if summary is not None and done and len(records) == before:
            point = summary | summarize(records)
            if "speculative" in summary:
                point["speculative"] = summary["speculative"] | point["speculative"]
            point |= _written(folder, point, records, columns)
            print(f"{folder} is finished; delete it to measure it again")
            return point
        point = {"config": plain, "dtype": f"torch.{spec.target.dtype_name}", **summarize(records)}
        speculative = [record for record in records if record.arm == "speculative"]
        same = point["identical"].get("autoregressive")
        promised = run.decode.lossy is None and total([r.stats for r in speculative]).exact != ROUNDED
        if same is not None and promised and same["rows"] < same["of"]:
            print(
                f"warning: {same['of'] - same['rows']} of {same['of']} texts are not those of plain decoding; selfspec "
                "audit tells whether rounding explains it"
            )
        if "forecast" in point.get("speculative", {}):
            forecast = point["speculative"]["forecast"]
            nodes = shown(mean(forecast["nodes"], forecast["passes"]), 1)
            print(f"tree.nodes=auto: {nodes} nodes a pass, expected speedup {forecast['speedup']:.2f}")
        if speculative and run.decode.batch_size == 1 and run.decode.lossy is None:
            point["speculative"]["host_overhead"] = host_overhead(spec, prompts[:8], run.decode, run.tree.nodes)
        if speculative and run.decode.metrics:
            calibration = spec.drafter.calibration.get("sampled" if run.decode.temperature > 0 else "greedy")
            accuracy = [depth[0] for depth in calibration.acceptance] if calibration is not None else []
            accuracy = accuracy if isinstance(spec.drafter, Trained) else []
            point["metrics"] = {name: defined(name, speculative, accuracy) for name in run.decode.metrics}
            print(json.dumps(point["metrics"], indent=1))
        if run.decode.traces:
            write_traces(folder / "traces.jsonl", spec, prompts, run.decode, run.tree.nodes, run.drafter)
        if files:
            points.write_answers(files, questions, records, spec, run.name)
        point |= _written(folder, point, records, columns)
        log.write({key: point[key] for key in ("arms", "speedup", "speculative", "groups", "metrics") if key in point})
        points.labelled([point])
        log.images(plot_points(points.rows_of([point]), folder))
    return point


def _own_columns(paths: list[str]) -> dict[str, Column]:
    """Functions of other packages, `package.module.function`, by their names. Raises ValueError for what is none."""
    columns = {}
    for path in paths:
        if path == "all":
            continue
        module, _, name = path.rpartition(".")
        try:
            column = getattr(importlib.import_module(module), name, None) if module else None
        except Exception as error:  # whatever a module of another package does
            raise ValueError(f"decode.columns: {path}: {module} can not be imported ({error!r})") from error
        if not callable(column):
            raise ValueError(f"decode.columns: {path!r} is no function; give package.module.function")
        columns[name] = column
    return columns


def _written(folder: Path, point: Figures, records: list[Record], columns: dict[str, Column]) -> Figures:
    """A point and its records, written before functions of others see them; then with their columns, if there are."""
    points.write_point(folder, point, records)
    if columns:
        cells = {name: _cell(name, column, point, records) for name, column in columns.items()}
        points.write_point(folder, point | {"columns": cells}, records)
        return {"columns": cells}
    return {}


def _outputs(config: Figures) -> Figures:
    """The outputs that a point is asked for, beyond what was measured."""
    decode = config["decode"]
    columns = [name for name in decode.get("columns", ()) if name != "all"]  # which is of the terminal
    return {"columns": columns} | {key: decode.get(key) for key in ("metrics", "traces", "answers")}


def _cell(name: str, column: Column, point: Figures, records: list[Record]) -> str:
    """What a function of another package says of a point. Raises ValueError where it fails; the point is kept."""
    try:
        return str(column(json.loads(json.dumps(point)), list(records)))
    except Exception as error:  # whatever it does
        raise ValueError(f"decode.columns: {name} failed ({error!r}); what was measured is kept") from error


def run_show(config: DictConfig) -> None:
    """Answers side by side in the terminal; see `selfspec.cli.show`."""
    run = typed(ShowRun, config)
    spec = _loaded(run, config)
    _, prompts = asked(spec, [run.drafter], config.data, run.show, run.show.arguments(), run.show.seed)
    show(spec, prompts, run.show, run.tree.nodes)


def run_audit(config: DictConfig, folder: Path) -> Figures:
    """Audit a drafter on its target: audit.json, report.md and a plot in `folder`; returns the figures."""
    run = typed(AuditRun, config)
    spec = _loaded(run, config)
    prompts = [prompt.ids for prompt in asked(spec, [run.drafter], config.data, run.audit, {}, 0)[1]]
    done = folder / "audit.json"
    with run_folder(config, folder, done) as plain, RunLog(folder, run, plain, "figures.jsonl") as log:
        result = audit(spec, prompts, run.audit)
        tests = []
        if run.audit.distribution_samples:
            short = [prompt[:32] for prompt in prompts[:8]]  # thousands of texts begin with it
            tests = distribution_tests(
                spec, short, run.audit.distribution_samples, run.audit.distribution_top_k, nodes=8
            )
        report = audit_report(result, tests)
        figures = {**result.as_dict(), "distribution": [asdict(t) for t in tests], "config": plain}
        figures["distribution_verdict"] = distribution_verdict(tests) if tests else None
        write_text(folder / "audit.json", json.dumps(figures, indent=1) + "\n")
        write_text(folder / "report.md", report + "\n")
        keys = ("verdict", "rows", "tokens", "noise", "deviation", "distribution_verdict")
        log.write({key: figures[key] for key in keys})
        margins = [(float(d.position), abs(d.margin)) for d in result.divergences]
        log.images({"margins": plot_margins(margins, result.bound, folder / "margins.png")})
    print(f"\n{report}\n{folder}")
    return figures


def run_calibrate(config: DictConfig, folder: Path) -> Figures:
    """Calibrate a drafter on answers of its target's own, and save it in `folder`. Its weights stay as they are."""
    run, place = typed(CalibrateRun, config), folder / "drafter"
    if place.exists():
        raise ValueError(f"{place} exists; choose another name=")
    spec = _loaded(run, config)
    target, drafter = spec.target, spec.drafter
    if len(members_of(run.drafter, drafter)) > 1:
        raise ValueError(f"drafter={run.drafter}: members of a tree are calibrated one by one; give one of them")
    _, turns = asked(spec, [run.drafter], config.data, run.calibrate, {}, run.calibrate.seed)
    prompts, figures = [turn.ids for turn in turns], Figures()
    with run_folder(config, folder, place):
        for mode, temperature in TEMPERATURES.items():
            seeds = range(run.calibrate.seed, run.calibrate.seed + len(prompts))
            samples = write_samples(target, prompts, run.calibrate.max_new_tokens, temperature, seeds, drafter.reads)
            figures[mode] = dict(calibrate(target, drafter, mode, samples))
            if not figures[mode]["positions"]:
                raise ValueError(
                    f"no position could be measured: the answers to {len(prompts)} questions are shorter than what is "
                    "drafted; raise calibrate.max_new_tokens, or give other questions"
                )
            chosen = spread(len(samples))
            again = [samples[i] for i in chosen], run.calibrate.max_new_tokens, [seeds[i] for i in chosen]
            figures[mode]["decoded"] = decoded(target, drafter, mode, *again)
        note = f"{run.drafter}, calibrated on {len(prompts)} answers of the target at each temperature."
        save_drafter(drafter, place, target, target.name, spec.tokenizer, note, training_note(spec.source))
        write_text(folder / "calibration.json", json.dumps(figures, indent=1) + "\n")
    return figures


def run_limits(config: DictConfig, folder: Path) -> Figures:
    """What limits a pass, and what drafters can bring: limits.json, table.md and plots in `folder`; see
    `selfspec.evaluation.limits`."""
    run = typed(LimitsRun, config)
    if run.results is not None:
        section(Path(run.results), f"limits {run.name}")  # refused before anything is measured
    makers: dict[str, Callable[[Target], Drafter]] = {}
    if run.limits.config is None:
        target, tokenizer = load_target(run.target, run.dtype, run.device, engine="compiled")
        model, name = target.model, run.target
        for drafter in run.limits.drafters:
            find_drafter(drafter, target, tokenizer, trust=run.trust_code)  # refused before anything is measured
            makers[drafter] = partial(find_drafter, drafter, tokenizer=tokenizer, trust=run.trust_code)
    else:
        if run.dtype == "int8":
            raise ValueError("dtype=int8 is not for random weights; give limits.config another dtype, or a target")
        dtype = torch.bfloat16 if run.dtype == "auto" else getattr(torch, dtype_name(run.dtype))
        device = default_device() if run.device in (None, "auto") else str(run.device)
        check_device(device)
        ours = config_folder().parent / run.limits.config  # from whatever folder
        known = str(ours) if ours.is_file() and not Path(run.limits.config).exists() else run.limits.config
        model = random_model(known, dtype, device)
        name = f"random weights of {run.limits.config}"
        makers = {d: partial(shaped_as, drafter_folder(d), trust=run.trust_code) for d in run.limits.drafters}
    done = folder / "limits.json"
    with run_folder(config, folder, done) as plain, RunLog(folder, run, plain, "figures.jsonl") as log:
        figures: Figures = {"target": name, "forecast": run.limits.config is not None}
        figures |= measure_limits(model, makers, run.limits) | origin(model.device) | {"config": plain}
        text = limits_tables(figures)
        write_text(folder / "limits.json", json.dumps(figures, indent=1) + "\n")
        write_text(folder / "table.md", text + "\n")
        for row in figures["passes"]:
            log.write(row)
        log.images(plot_limits(figures, folder))
    if run.results is not None:
        write_section(Path(run.results), f"limits {run.name}", text)
    print(f"\n{text}\n{folder}")
    return figures
