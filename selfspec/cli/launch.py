"""The commands whose options are Hydra's: what each runs and tells. `selfspec.cli.main` starts them."""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import hydra
import transformers
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from selfspec.checkpoints.drafter_folder import read_meta
from selfspec.cli import compare_runs, reports
from selfspec.cli import evaluation_runs as measures
from selfspec.cli import training_runs as runs
from selfspec.cli.arguments import constant
from selfspec.cli.config import register, with_classes
from selfspec.cli.errors import BAD_INPUT, clear_errors, one_line_error
from selfspec.cli.help import config_folder
from selfspec.cli.run_folders import check_name
from selfspec.evaluation.points import labelled, rows_of
from selfspec.evaluation.tables import table
from selfspec.utils.errors import UNKNOWN, command_line
from selfspec.utils.files import Figures, is_main_process, shown, write_text

_empty: set[Path] = set()  # folders that were there before, which are not ours to remove
Task = Callable[[DictConfig, Path], object]


def launch(name: str, config_name: str, trains: bool, arguments: list[str]) -> None:
    """Run a command with arguments as `selfspec.cli.arguments.taken` gives them: once, or as a sweep."""
    transformers.utils.logging.disable_progress_bar()  # of loading weights
    register(drafters=trains)
    with clear_errors():
        arguments = with_classes(arguments) if trains else arguments
        if {"-m", "--multirun"} & set(arguments):
            constant_keys = ",".join(f'"{key}"' for key in constant(arguments))
            arguments.append(f"hydra.job.config.override_dirname.exclude_keys=[{constant_keys}]")
        for argument in arguments:
            if argument.startswith("name="):
                check_name(argument.removeprefix("name=").strip("'\""))
        typed = (Path(a.partition("=")[2].strip("'\"")) for a in arguments if a.startswith("hydra.run.dir="))
        given = [part for place in typed for part in (place, *place.parents)]
        places = [place.resolve() for place in (*Path("runs").glob("**/"), *given) if place.is_dir()]
        for place in places:
            with suppress(PermissionError):  # what can not be listed is not ours to remove
                _empty.update(() if any(place.iterdir()) else (place,))
        sys.argv = [sys.argv[0], *arguments]
        hydra.main(config_path=str(config_folder()), config_name=config_name, version_base="1.3")(TASKS[name])()


def _task(run: Task) -> Callable[[DictConfig], None]:
    """A point of a sweep that fails is reported, and the others go on; a run that fails leaves no empty folder."""

    @functools.wraps(run)
    def task(config: DictConfig) -> None:
        settings = HydraConfig.get()
        folder, sweep = Path(settings.runtime.output_dir), settings.mode == RunMode.MULTIRUN
        folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
        if sweep and "wandb" in config and config.wandb.group is None:
            config.wandb.group = "-".join(Path(settings.sweep.dir).parts[1:])  # below runs/
        failed = folder / reports.ERROR
        if folder != Path() and failed.exists():  # a finished run may lie where nothing can be written
            failed.unlink()
        try:
            with nullcontext() if sweep else clear_errors():
                try:
                    run(config, folder)
                except KeyboardInterrupt:
                    again = _again(run.__name__, settings.sweep.dir if sweep else folder, sweep)
                    if again and is_main_process() and not config.get("check"):
                        print(f"\nto go on: {again}", file=sys.stderr)
                    raise
        except Exception as error:
            if not sweep:
                raise
            if not isinstance(error, BAD_INPUT):
                traceback.print_exc()
            print(f"{folder.name}: {one_line_error(error)}", file=sys.stderr)
            folder.mkdir(parents=True, exist_ok=True)
            write_text(failed, one_line_error(error) + "\n")
        finally:
            for place in (folder, *folder.parents):
                known = place.resolve() in _empty or place.resolve() == Path.cwd()
                if known or (place.is_dir() and any(place.iterdir())):
                    break
                if place.is_dir():
                    place.rmdir()

    return task


def _again(name: str, folder: str | Path, sweep: bool) -> str:
    """The command that goes on with what was interrupted; none where everything would begin anew."""
    typed = command_line(int(os.environ.get("WORLD_SIZE", "1")))
    if name not in ("train", "distill", "decode") or typed == UNKNOWN:
        return ""
    place = f"hydra.{'sweep' if sweep else 'run'}.dir="
    return typed if name != "decode" or place in typed else f"{typed} {shlex.quote(f'{place}{folder}')}"


def _title(config: DictConfig) -> str:
    """What a run is called in its logger: its name, and in a sweep what is its own."""
    settings = HydraConfig.get()
    override = settings.job.override_dirname if settings.mode == RunMode.MULTIRUN else ""
    return f"{config.name} {override}".strip()


def train(config: DictConfig, folder: Path) -> None:
    if config.check:
        for line in runs.run_check(config, folder):
            if is_main_process():
                print(line)
        return
    figures = runs.run_training(config, folder, _title(config))
    if is_main_process():
        _report(figures, folder)


def _acceptance(figures: Figures) -> None:
    for mode in ("greedy", "sampled"):
        top1 = " ".join(shown(share, 3) for share in figures[mode]["top1"]) or "(nothing was accepted)"
        tau = ", ".join(f"{shown(value)} at {nodes} nodes" for nodes, value in figures[mode]["tau"].items())
        print(f"{mode:8} top-1 by depth {top1}; expected acceptance length {tau}")
        if (decoded := figures[mode].get("decoded")) is not None:
            expected = figures[mode]["tau"]["16"]
            share = "" if expected is None else f", {shown(decoded / expected)} of what was expected"
            print(f"{mode:8} decoded with 16 nodes {shown(decoded)}{share}")


def _report(figures: Figures, folder: Path) -> None:
    _acceptance(figures)
    if "step_over_forward" in figures:
        ratio = figures["step_over_forward"]
        print(f"training step: {ratio:.1f}x the time of a target forward over the same batch")
    print(f"peak memory {figures['peak_memory_mb']:.0f} MB; target unchanged (SHA-256 {figures['target_hash'][:12]})")
    if "kept_step" in figures:
        print(f"kept: the weights of step {figures['kept_step']} of {figures['steps']}, the best validation")
    if figures.get("partial"):
        print(
            f"saved to {folder / 'drafter'}; serve it: selfspec export {shlex.quote(str(folder))} "
            "--to vllm --out served"
        )
        return
    trust = " --trust-code" if "." in read_meta(folder / "drafter")["kind"] else ""
    at = shlex.quote(str(folder))
    prompt = "'Which is larger, 9 or 7?' --chat" if figures.get("chat") else "'def main():'"
    print(f"saved to {folder / 'drafter'}; try it: selfspec complete {prompt} --drafter {at} --color{trust}")


def distill(config: DictConfig, folder: Path) -> None:
    figures = runs.run_distill(config, folder)
    settings = config.train.distill
    if "answers" in figures:
        if not is_main_process():
            return
        print(f"train on them: data=jsonl {shlex.quote('data.path=' + figures['answers'])}")
    elif is_main_process():
        print(
            f"wrote {figures['tokens']} tokens at {figures['rate']}, {figures['tau']} per pass; {figures['rows']} "
            f"rows are there, {figures['counted']} tokens of them count in the loss\n"
            f"train on them with the same settings: train.distill.rows={settings.rows} "
            f"train.distill.prompt_tokens={settings.prompt_tokens} train.distill.new_tokens={settings.new_tokens} "
            f"train.distill.sampled={settings.sampled} loop.seed={config.loop.seed} "
            + shlex.quote(f"train.distill.folder={settings.folder or folder / 'distill'}")
        )


def target(config: DictConfig, folder: Path) -> None:
    print(json.dumps(runs.run_pretrain(config, folder)), f"\n{folder / 'target'}")


def decode(config: DictConfig, folder: Path) -> None:
    point = measures.run_decode(config, folder, _title(config))
    labelled([point])
    rows = rows_of([point])
    write_text(folder / "table.md", table(rows) + "\n")
    print(f"{table(rows, brief='all' not in config.decode.columns)}\nall columns: {folder / 'table.md'}")


def audit(config: DictConfig, folder: Path) -> None:
    figures = measures.run_audit(config, folder)
    if figures["verdict"] == "BUG" or (figures["distribution_verdict"] or "").startswith("BUG"):
        if HydraConfig.get().mode == RunMode.MULTIRUN:  # whose other points go on
            raise ValueError(f"the verdict is BUG, see {folder / 'report.md'}")
        sys.exit(1)


def calibrate(config: DictConfig, folder: Path) -> None:
    _acceptance(measures.run_calibrate(config, folder))
    print(f"saved to {folder / 'drafter'}; it loads by the name {shlex.quote(str(folder))}")


TASKS = {run.__name__: _task(run) for run in (train, distill, target, decode, audit, calibrate)}
TASKS |= {"compare": _task(compare_runs.run_compare), "limits": _task(measures.run_limits)}
TASKS |= {"show": _task(lambda config, _: measures.run_show(config))}
TASKS |= {"page": _task(lambda config, _: reports.run_page(config))}
TASKS |= {"report": _task(lambda config, _: reports.run_report(config))}
