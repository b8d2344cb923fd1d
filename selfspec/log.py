"""Figures of a run: always JSON lines in the run folder, and W&B as configured."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

Figures = dict[str, Any]  # what a run tells, as it is written to JSON: numbers, texts, lists and dicts of them
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LITTLE = 1 << 16  # free bytes at which a failed write is taken for a full disk
MODES = ("auto", "online", "offline", "disabled")


@dataclass
class WandbConfig:
    """`auto` is online where an API key is at hand and offline elsewhere."""

    mode: str = "auto"
    project: str = "selfspec"
    entity: str | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"wandb.mode={self.mode!r} must be one of {', '.join(MODES)}")


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A scratch path to write a file or a folder at; it takes the place of `path` when the block ends well. An
    interruption leaves the old one or the new one, never half of one. Raises OSError where the disk is full, whatever
    the writer made of that."""
    scratch, old = (
        path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.{end}") for end in ("tmp", "old")
    )
    try:
        yield scratch
        if path.is_dir():
            os.replace(path, old)
        os.replace(scratch, path)
    except Exception as error:
        cut_short = getattr(error, "errno", None) in _FULL or "inline_container" in str(error)  # of torch's own files
        if not cut_short and shutil.disk_usage(path.parent).free > _LITTLE:
            raise
        raise OSError(
            f"no room to write {path} ({error}); what was there is kept, so make room and start the same command again"
        ) from error
    finally:
        if old.exists() and not path.exists():
            os.replace(old, path)
        for rest in (scratch, old):
            shutil.rmtree(rest) if rest.is_dir() else rest.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic(path) as scratch:
        scratch.write_text(text)


def section(path: Path, name: str) -> tuple[str, str]:
    """What stands before and behind the section `<!-- name -->` ... `<!-- end -->` of a Markdown file.

    Raises ValueError where there is none, or no such file.
    """
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is no file; give one that has lines <!-- {name} --> and <!-- end -->")
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text ({error}); give a Markdown file for the tables") from error
    head, mark, rest = text.partition(f"<!-- {name} -->\n")
    _, end, tail = rest.partition("<!-- end -->")
    if not mark or not end:
        raise ValueError(f"{path} has no lines <!-- {name} --> and <!-- end --> for the tables to stand between")
    return head + mark, end + tail


def write_section(path: Path, name: str, text: str) -> None:
    """Put tables into a section of a Markdown file."""
    head, tail = section(path, name)
    write_text(path, f"{head}{text}\n{tail}")


def one_line(error: BaseException) -> str:
    """An error's message on one line; of errors that only wrap another, the other's."""
    while error.__cause__ is not None and not isinstance(error, (ValueError, OSError)):
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Bad input ends in one line and exit code 2; HYDRA_FULL_ERROR=1 shows the traceback instead."""
    try:
        yield
    except (ValueError, OSError, MemoryError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"selfspec: {one_line(error)}", file=sys.stderr)
        sys.exit(2)


def is_main_process() -> bool:
    """Whether this is the process that writes, under `accelerate launch` or alone."""
    return os.environ.get("RANK", "0") == "0"


class RunLog:
    """Context manager that appends records to `<folder>/<file>` and mirrors their numbers to W&B.

    W&B's own `finish` runs on every way out, so several runs can follow each other in one process.
    """

    def __init__(self, folder: Path, name: str, wandb_config: WandbConfig, config: Figures, file: str) -> None:
        self.path = folder / file
        self.folder, self.name, self.wandb_config, self.config = folder, name, wandb_config, config
        self.run: Any = None

    def __enter__(self) -> RunLog:
        self.folder.mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("WANDB_MODE") or self.wandb_config.mode
        if "disabled" in (mode, self.wandb_config.mode) or not is_main_process():
            return self
        import wandb  # slow to import

        if mode == "auto":
            mode = "online" if wandb.login(prompt=False) else "offline"
        self.run = wandb.init(
            project=self.wandb_config.project,
            entity=self.wandb_config.entity,
            group=self.wandb_config.group,
            name=self.name,
            dir=str(self.folder),
            config=self.config,
            mode=mode,  # type: ignore[arg-type]
            reinit="finish_previous",
            settings=wandb.Settings(silent=True),
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.run is not None:
            self.run.finish(exit_code=0 if kind is None else 1)

    def write(self, record: Figures, step: int | None = None) -> None:
        """Append one record; nested keys reach W&B as `outer/inner`."""
        stamped = {**({} if step is None else {"step": step}), **record, "time": round(time.time(), 3)}
        with self.path.open("a") as f:
            f.write(json.dumps(stamped) + "\n")
        if self.run is not None:
            self.run.log(_flat(record), step=step)

    def rewind(self, step: int) -> None:
        """Drop what a run wrote after the checkpoint it resumes from, so that no step is recorded twice."""
        if self.path.exists():
            lines = self.path.read_text().splitlines(keepends=True)
            if lines and not lines[-1].endswith("\n"):  # torn by whatever interrupted the run
                lines.pop()
            kept = [line for line in lines if json.loads(line).get("step", 0) <= step]
            write_text(self.path, "".join(kept))

    def images(self, paths: dict[str, Path]) -> None:
        """Send saved plots to W&B."""
        if self.run is not None:
            import wandb

            self.run.log({key: wandb.Image(str(path)) for key, path in paths.items()})


def _flat(record: Figures, prefix: str = "") -> Figures:
    flat: Figures = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            flat |= _flat({str(i): v for i, v in enumerate(value)}, f"{prefix}{key}/")
        else:
            flat[prefix + key] = value
    return flat
