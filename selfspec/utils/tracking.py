"""Figures of a run: always JSON lines in the run folder, and W&B or TensorBoard through accelerate's trackers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selfspec.utils.errors import one_line
from selfspec.utils.files import Figures, append_text, is_main_process, null_for_nan, parse_json, write_text

LOGGERS = ("wandb", "tensorboard", "none")
MODES = ("auto", "online", "offline", "disabled")


@dataclass
class WandbConfig:
    """mode: of W&B: online, offline, disabled, or auto, which is online where an API key is at hand; project: of W&B;
    entity: user or team; group: of runs (the sweep's name where null); tags: of the run; notes: on the run."""

    mode: str = "auto"
    project: str = "selfspec"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    notes: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"wandb.mode={self.mode!r} must be one of {', '.join(MODES)}")
        if odd := [tag for tag in self.tags if not isinstance(tag, str)]:
            raise ValueError(f"wandb.tags holds {odd[0]!r}; give texts: wandb.tags=[a,b]")


@dataclass
class Logged:
    """name: of the run, whose folder is runs/NAME (of a measurement runs/NAME/<date>); logger: wandb, tensorboard or
    none, beside the JSON lines that are always written."""

    name: str = "???"  # omegaconf's mark of what has to be given
    logger: str = "wandb"
    wandb: WandbConfig = field(default_factory=WandbConfig)

    def __post_init__(self) -> None:
        if self.logger not in LOGGERS:
            raise ValueError(f"logger={self.logger!r} must be one of {', '.join(LOGGERS)}")


class RunLog:
    """Context manager that appends records to `<folder>/<file>` and mirrors their numbers to the run's logger.

    The logger starts with `begin`, or with the first record, so that a run that is refused leaves nothing there. A run
    that is resumed goes on under its W&B id, which is kept in its folder. Offline W&B begins a file of its own, which
    gets the records of before, so that the last file is the whole run. Several runs can follow each other in one
    process.
    """

    def __init__(self, folder: Path, run: Logged, config: Figures, file: str, title: str = "") -> None:
        """config: shown beside the run; title: instead of the run's name."""
        self.path, self.folder, self.run, self.config = folder / file, folder, run, config
        self.title, self.began = title or run.name, False
        self.tracker: Any = None
        self._replays = False  # what was recorded before, to an offline run
        self._left: int | None = None  # the last step of which something is left, of a run that was resumed
        self._step: int | None = None  # the last

    def __enter__(self) -> RunLog:
        if self.run.logger == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
            raise ValueError("logger=tensorboard needs pip install tensorboard, or take another logger=")
        mode = os.environ.get("WANDB_MODE") or self.run.wandb.mode
        if self.run.logger == "wandb" and mode not in (*MODES, "dryrun", "run", "shared"):
            raise ValueError(f"WANDB_MODE={mode!r} must be one of {', '.join(MODES[1:])}")
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and is_main_process():  # a torn last line is dropped for good
            whole = "".join(line for line, _ in whole_lines(self.path))
            if whole != self.path.read_text(errors="replace"):
                write_text(self.path, whole)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind is not None and self.run.logger == "wandb"
        self._send(lambda tracker: tracker.run.finish(exit_code=1) if failed else tracker.finish())
        self.tracker = None

    def begin(self) -> None:
        """Start the logger, where it has not begun. One that does not start is named in a line: W&B is then recorded
        offline, if that is possible, and a run goes on."""
        if self.began:
            return
        self.began = True
        wandb, logger = self.run.wandb, self.run.logger
        mode = os.environ.get("WANDB_MODE") or wandb.mode
        off = logger == "wandb" and "disabled" in (mode, wandb.mode)
        if logger == "none" or off or not is_main_process():
            return
        try:
            self.tracker = self._tensorboard() if logger == "tensorboard" else self._wandb(mode)
        except Exception as error:  # of W&B's server, of an account, of a disk
            print(f"{logger} did not start ({one_line(error)}); the figures are in {self.path}")
            if logger == "wandb" and mode in ("auto", "online"):
                with suppress(Exception):  # what goes wrong here has been printed
                    self.tracker = self._wandb("offline")
                    print(
                        f"recorded offline; upload it with: wandb sync {shlex.quote(str(self.folder))}/wandb/offline-*"
                    )
                print("WANDB_MODE=offline does so at once, WANDB_MODE=disabled leaves W&B out")

    def _tensorboard(self) -> Any:
        from accelerate import PartialState
        from accelerate.tracking import TensorBoardTracker

        PartialState()  # which trackers ask
        purged = {} if self._left is None else {"purge_step": self._left + 1}  # later ones are not shown
        tracker = TensorBoardTracker("tensorboard", self.folder, **purged)
        tracker.start()
        leaves = flat(self.config)
        tracker.store_init_configuration({k: v if isinstance(v, int | float | str) else str(v) for k, v in leaves})
        return tracker

    def _wandb(self, mode: str) -> Any:
        import wandb as library  # slow to import
        from accelerate import PartialState
        from accelerate.tracking import WandBTracker

        PartialState()
        if mode == "auto":
            mode = "online" if library.login(prompt=False) else "offline"
        id_file = self.folder / "wandb_id"
        if not id_file.exists() or not re.fullmatch(rb"[0-9a-z]{8}\s*", id_file.read_bytes()):
            write_text(id_file, secrets.token_hex(4))
        wandb = self.run.wandb
        tracker = WandBTracker(
            wandb.project,
            id=id_file.read_text().strip(),
            resume="allow" if mode == "online" else None,
            entity=wandb.entity,
            group=wandb.group,
            tags=wandb.tags or None,
            notes=wandb.notes,
            name=self.title,
            dir=str(self.folder),
            config=self.config,
            mode=mode,
            reinit="finish_previous",
            settings=library.Settings(silent=True),
        )
        tracker.start()
        self._replays = mode != "online"
        return tracker

    def _send(self, send: Callable[[Any], object]) -> None:
        """Hand something to the logger. One that fails is left out from then on, with a line; the run goes on."""
        if self.tracker is None:
            return
        try:
            send(self.tracker)
        except Exception as error:  # whatever a server or a disk does
            self.tracker = None
            print(
                f"warning: {self.run.logger} failed ({one_line(error)}), the run goes on; its figures: {self.path}",
                file=sys.stderr,
            )

    def write(self, record: Figures, step: int | None = None) -> None:
        """Append one record; nested keys reach the logger as `outer/inner`, without those of means over nothing."""
        record = null_for_nan(record)
        stamped = {**({} if step is None else {"step": step}), **record, "time": round(time.time(), 3)}
        append_text(self.path, json.dumps(stamped) + "\n")
        self.begin()
        *before, _ = whole_lines(self.path) if self._replays else [("", record)]
        self._replays = False
        for _, line in before:
            self._log({key: value for key, value in line.items() if key not in ("step", "time")}, line.get("step"))
        self._log(record, step)

    def _log(self, record: Figures, step: int | None) -> None:
        values, self._step = {key: value for key, value in flat(record) if value is not None}, step
        self._send(lambda tracker: tracker.log(values, step=step))

    def rewind(self, step: int, pending: bool = False) -> int:
        """Drop what a run wrote after the checkpoint it resumes from, so that no step is recorded twice. pending: the
        validation of that step too, which comes now. Returns the last step of which something is left."""
        if not self.path.exists():
            return 0

        def later(record: Figures) -> bool:
            at = record.get("step", 0)
            return at > step or (at == step and pending and "validation" in record)

        kept = [(line, record.get("step", 0)) for line, record in whole_lines(self.path) if not later(record)]
        write_text(self.path, "".join(line for line, _ in kept))
        self._left = max((at for _, at in kept), default=0)
        if self.tracker is not None and self.run.logger == "tensorboard":  # its file goes on behind that step
            self._send(lambda tracker: tracker.finish())
            self.tracker, self.began = None, False
            self.begin()
        return self._left

    def images(self, paths: dict[str, Path]) -> None:
        """Send saved plots to the logger."""
        if self.tracker is None or not paths:
            return
        import numpy
        from PIL import Image  # of matplotlib

        arrays = {key: numpy.asarray(Image.open(path).convert("RGB"))[None] for key, path in paths.items()}
        form = {"dataformats": "NHWC"} if self.run.logger == "tensorboard" else {}
        self._send(lambda tracker: tracker.log_images(arrays, step=self._step, **form))


def whole_lines(path: Path) -> Iterator[tuple[str, Figures]]:
    """The lines of a run's records, each with its JSON. A last line that an interruption tore is left out; raises
    ValueError for any other line that is no JSON."""
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line)
            if not isinstance(record, dict) or type(record.get("step", 0)) is not int:
                raise ValueError(f"it is {record!r:.40}")
        except ValueError as error:
            if number == len(lines):
                return
            raise ValueError(
                f"{path}, line {number}: no record in JSON ({error}); mend it, or choose another name="
            ) from error
        if line.endswith("\n"):
            yield line, record


def flat(record: Figures, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts and lists, by keys `outer/inner`."""
    for key, value in record.items():
        if isinstance(value, (dict, list)):
            inner = value if isinstance(value, dict) else {str(i): v for i, v in enumerate(value)}
            yield from flat(inner, f"{prefix}{key}/")
        else:
            yield prefix + key, value
