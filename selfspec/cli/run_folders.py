"""A run's folder: its lock, its config, and what may change when it goes on."""

from __future__ import annotations

import fcntl
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from omegaconf import DictConfig, OmegaConf

from selfspec.checkpoints.drafter_folder import RENAMED, check_files, read_meta
from selfspec.checkpoints.find import member_names
from selfspec.training.checkpoint import saved_config
from selfspec.training.loop_config import LoopConfig
from selfspec.utils.errors import one_line
from selfspec.utils.files import ORIGIN, Figures, differences, is_main_process, write_text
from selfspec.utils.tracking import flat, whole_lines

R = TypeVar("R")
_NAMED = 8  # keys that differ and are listed

# Keys that may change in every run, and some that earlier versions had
_ALWAYS = ("wandb", "logger", "data.record_mb", "limits.starts", "decode.until_width")
# Those that may when a training is resumed: they alter how long it runs or what it reports, not what it is.
FREE = (
    *("name", "check", "trust_code"),  # name: of a folder that was moved
    *("loop.steps", "loop.minutes", "loop.compile", "loop.log_every", "loop.validate_every", "loop.checkpoint_every"),
    "loop.checkpoint_minutes",
    *("loop.accumulate", "loop.patience"),
    *("train.states_url", "train.states_gb", "data.url", "data.at_once", "data.patience", "data.errors"),
)
# Keys that earlier versions had, with what is always so now
_GONE = {
    **{"train/packed": True, "train/weight_decay": 0.0, "train/distill/drafter": None, "train/distill/nodes": 8},
    **{"compare/between": 5, "compare/lookup_tokens": 10},
}


@contextmanager
def run_folder(config: DictConfig, folder: Path, begun: Path, free: Sequence[str] = FREE) -> Iterator[Figures]:
    """Hold the run folder while the block runs, write the composed config into it, and give it as plain data. begun: a
    file whose presence shows that a run has started. A folder in which a failing block wrote nothing is removed.

    Raises ValueError where another process holds the folder, and where it holds a run of another configuration, the
    keys `free` aside.
    """
    plain, path, lock = as_plain(config), folder / "config.yaml", folder / ".lock"
    if begun.name != "state.pt" and not begun.exists() and (folder / "train.jsonl").is_file():
        raise ValueError(f"{folder} holds a training, and no {begun.name}; give another folder or name=")
    if begun.exists():  # compared in all processes, none of which then waits for another
        kept = saved_config(begun) if begun.suffix == ".pt" else None  # is it whole? before a target is loaded
        if kept is None and not path.exists():
            raise ValueError(f"{begun} is there, but no {path.name}; delete the folder, or choose another name=")
        check_same(path, plain, free, None if path.exists() else kept)
    if not is_main_process():
        yield plain
        return
    folder.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is writing to {folder}; wait for it, or choose another name=") from None
        try:
            write_text(path, OmegaConf.to_yaml(OmegaConf.create(plain)))
            yield plain
        except BaseException:
            if {p.name for p in folder.iterdir()} <= {path.name, lock.name, ORIGIN}:
                shutil.rmtree(folder)
            raise


def _present_name(key: str) -> str:
    """A key of a saved config, by its name in this version."""
    outer, _, last = key.rpartition("/")
    return f"drafter/{RENAMED[last]}" if outer == "drafter" and last in RENAMED else key


def check_same(path: Path, plain: Figures, free: Sequence[str] = FREE, kept: Figures | None = None) -> None:
    """Raises ValueError naming the keys in which the saved config, or one that was kept elsewhere, and this one
    differ."""
    try:
        saved = OmegaConf.to_container(OmegaConf.load(path)) if kept is None else kept
    except Exception as error:  # of YAML, of Unicode
        raise ValueError(
            f"{path} is damaged ({one_line(error)}); delete the folder, or choose another name="
        ) from error
    if not isinstance(saved, dict) or not saved:
        raise ValueError(f"{path} is damaged or empty; delete the folder, or choose another name=")
    free = *free, *_ALWAYS
    before, now = dict(flat(saved)), dict(flat(plain))  # type: ignore[arg-type]
    before = {_present_name(key): value for key, value in before.items() if _GONE.get(key, ...) != value}
    held = [f.replace(".", "/") + "/" for f in free]
    before, now = (
        {key.replace("/", "."): value for key, value in one.items() if not any(f"{key}/".startswith(f) for f in held)}
        for one in (before, now)
    )
    if changed := differences(before, now, "not there"):
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        said = "; ".join(changed[:_NAMED]) + more
        raise ValueError(
            f"{path.parent} holds a run with another configuration: {said}; give what it had, or choose another name= "
            "(another hydra.run.dir=, where that was given)"
        )


def typed(kind: type[R], config: DictConfig) -> R:
    """A config as the dataclass it was composed from, checked."""
    run = OmegaConf.to_object(config)
    assert isinstance(run, kind)
    check_name(getattr(run, "name", "run"))
    return run


def check_name(name: str) -> None:
    """Raises ValueError for the name of a run that is no folder below runs/."""
    if name != name.strip() or not Path(name).parts or name.startswith("/") or ".." in Path(name).parts:
        raise ValueError(f"name={name!r} must name a folder below runs/")


def as_plain(config: DictConfig) -> Figures:
    """A config as plain data. Raises omegaconf's errors for values that are missing."""
    plain: Figures = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    return plain


def finished(folder: Path, loop: LoopConfig | None = None) -> Figures | None:
    """The summary of a run, where it is finished, and is as long as `loop` asks for."""
    try:
        records = [record for _, record in whole_lines(folder / "train.jsonl")]
    except (OSError, ValueError):  # never begun, or damaged
        return None
    summary = next((record["summary"] for record in records[::-1] if "summary" in record), None)
    if summary is None or not (folder / "drafter" / "drafter.json").is_file():
        return None
    if loop is not None:
        try:
            check_files(folder / "drafter", read_meta(folder / "drafter"))
        except (OSError, ValueError) as error:
            print(f"{error}; it is made anew", file=sys.stderr)
            return None
    ended = summary.get("minutes", math.inf)
    short = loop is not None and (summary.get("finished", 0) < loop.steps or ended < (loop.minutes or math.inf))
    if loop is not None and (patience := summary.get("patience")):  # by which it ended
        short = loop.patience == 0 or loop.patience > patience
    return None if short else summary


def warn_of_share(drafters: Iterable[str], data: DictConfig) -> None:
    """A warning where a drafter was trained on another share of the same conversations than is asked of now."""
    for name in dict.fromkeys(member for drafter in drafters for member in member_names(drafter)):
        with suppress(Exception):  # no run's folder, or one whose config is damaged
            place = Path(name) if (Path(name) / "config.yaml").is_file() else Path(name).parent
            theirs = OmegaConf.load(place / "config.yaml").data
            same = all(theirs.get(key) == data.get(key) for key in ("_target_", "path", "name", "split", "root"))
            if same and theirs.validation_share < data.validation_share:
                print(
                    f"warning: {name} was trained with data.validation_share={theirs.validation_share}, and is asked "
                    f"with {data.validation_share}, of texts that it may have been trained on; give the same share"
                )
