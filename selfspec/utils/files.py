"""Files that are whole or absent, sections of documents, and where selfspec keeps what it measured."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePath
from typing import Any, TypeVar

from selfspec.utils.errors import one_line

T = TypeVar("T")
Figures = dict[str, Any]  # what a run tells, as it is written to JSON: numbers, texts, lists and dicts of them
ORIGIN = "origin.json"  # in a run folder: what a measurement was made with
_LARGEST = 2**26  # bytes of a JSON file
_LONGEST = 255  # characters of a file's name
_DIGITS = 40  # of an integer in one
_WIDEST = 100  # times its lower end, above which an interval is not shown
NOTHING = float("nan")  # a mean over nothing, which is shown as n/a
_FORBIDDEN = (errno.EACCES, errno.EROFS, errno.EPERM)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LITTLE = 1 << 16  # free bytes at which a failed write is taken for a full disk


def wrapped(seed: int) -> int:
    """A seed as torch takes it: beyond 64 bits it begins anew."""
    return seed if -(2**63) <= seed < 2**63 else seed % 2**63


def mean(total: float, count: float) -> float:
    """total / count, NOTHING where the count is 0."""
    return total / count if count else NOTHING


def shown(value: float | None, digits: int = 2) -> str:
    """A figure as text, n/a where it is a mean over nothing, which JSON has as null."""
    return f"{value:.{digits}f}" if value is not None and math.isfinite(value) else "n/a"


def interval(ratio: dict[str, float]) -> str:
    """A ratio for readers, with its interval where there is one that tells something."""
    narrow = ratio["high"] < _WIDEST * ratio["low"]
    behind = f" [{ratio['low']:.2f}, {ratio['high']:.2f}]" if narrow else ""
    return f"{ratio['ratio']:.2f}x{behind}"


def null_for_nan(value: Any) -> Any:
    """Figures with null where a number is none, which JSON has no word for."""
    if isinstance(value, dict):
        return {key: null_for_nan(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [null_for_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def disk_room(path: Path) -> Iterator[None]:
    """Writes of the block go to `path`. Raises OSError that names it where the disk is full, whatever the writer made
    of that."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        said = ("inline_container", "os error 28", "os error 122")  # of torch's own files, and of safetensors
        full = getattr(error, "errno", None) in _FULL or any(words in str(error) for words in said)
        if not full:
            with suppress(OSError):
                disk = shutil.disk_usage(path.parent)
                full = disk.total > 0 and disk.free <= _LITTLE
        if getattr(error, "errno", None) in _FORBIDDEN and path.name in str(getattr(error, "filename", "")):
            raise OSError(f"{path} can not be written ({one_line(error)}); name another place") from error
        if not full or str(error).startswith("no room"):
            raise
        raise OSError(f"no room to write {path} ({error}); make room and start the same command again") from error


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A scratch path to write a file or a folder at; it takes the place of `path` when the block ends well. An
    interruption leaves the old one or the new one, never half of one. Raises OSError where the disk is full, and
    ValueError where a file would take the place of a folder."""
    scratch, old = (
        path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.{end}") for end in ("tmp", "old")
    )
    try:
        with disk_room(path):
            yield scratch
            if path.is_dir():
                if not scratch.is_dir():
                    raise ValueError(f"{path} is a folder, which is left as it is; give the name of a file")
                os.replace(path, old)
            os.replace(scratch, path)
    finally:
        if old.exists() and not path.exists():
            os.replace(old, path)
        for rest in (scratch, old):
            if rest.is_dir() and not rest.is_symlink():
                shutil.rmtree(rest)
            elif os.path.lexists(rest):  # where nothing can be written, nothing can be removed
                rest.unlink()


def read_json(path: Path) -> Figures:
    """The JSON object that a file holds. Raises ValueError, of one line that names the file, for anything else."""
    try:
        if (size := path.stat().st_size) > _LARGEST:
            raise ValueError(f"it has {size} bytes, at most {_LARGEST} are read")
        found = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {one_line(error):.200}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold an object, not {type(found).__name__}")
    return found


def differences(before: Figures, now: Figures, absent: str = "the default") -> list[str]:
    """What differs of two configs, value by value. absent: what stands for a value that is not there."""
    names = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    return [f"{name} was {before.get(name, absent)}, now {now.get(name, absent)}" for name in names]


def parse_json(text: str, **settings: Any) -> Any:
    """The value of a text in JSON. settings: of json.loads. Raises ValueError for what is none, is nested too deep, or
    holds an integer that no figure or size needs."""
    try:
        return json.loads(text, parse_int=_integer, **settings)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def digest(*parts: Any) -> str:
    """A hash of bytes, or of anything else by its text, to notice what a disk has changed."""
    whole = hashlib.blake2b(digest_size=16)
    for part in parts:
        whole.update(part if isinstance(part, (bytes, memoryview)) else repr(part).encode())
    return whole.hexdigest()


def only_mine(path: Path) -> bool:
    """Whether nobody but this user can have written a file and can exchange it: code is loaded from such alone."""
    if not hasattr(os, "getuid"):
        return True
    stats = [place.stat() for place in (path, path.parent)]
    if all(stat.st_uid == os.getuid() and not stat.st_mode & 0o022 for stat in stats):
        return True
    _told_of(path.parent)
    return False


@cache
def _told_of(folder: Path) -> None:
    print(
        f"what is in {folder} is not used: others may write there; chmod 700 it, or set SELFSPEC_CACHE", file=sys.stderr
    )


def private_folder(folder: Path) -> None:
    """Make a folder of the cache, which only its user may read and write."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if hasattr(os, "getuid") and folder.stat().st_uid == os.getuid():
        folder.chmod(0o700)


def inside(folder: Path, name: str, by: Path) -> Path:
    """The file of a folder that another file, `by`, names. Raises ValueError for a name that leads out of it."""
    path = PurePath(name)  # by its name alone: the hub's cache keeps links to files that lie elsewhere
    long = any(len(part) > _LONGEST for part in path.parts)
    if not path.name or long or path.is_absolute() or ".." in path.parts or "\\" in name:
        raise ValueError(f"{by} names the file {name!r:.200}, which does not lie in {folder}; copy the folder again")
    return folder / path


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic(path) as scratch:
        scratch.write_text(text)


def read_jsonl(path: Path, make: Callable[[Figures], T], what: str) -> list[T]:
    """What `make` makes of each line of JSON, nothing where there is no file. Raises ValueError naming a line that is
    no `what`, unless it is a torn last one."""
    text = path.read_text(errors="replace") if path.exists() else ""
    made, lines = list[T](), text.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            made.append(make(parse_json(line)))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise ValueError(
                f"{path}, line {number} is no {what} ({error}); delete this line, or choose another name="
            ) from error
    return made


def append_text(path: Path, text: str) -> None:
    """Append to a text file."""
    with disk_room(path), path.open("a") as file:
        file.write(text)


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


def markdown(columns: Sequence[str], rows: list[list[str]]) -> str:
    """The one Markdown table, columns aligned so that it reads in a terminal too; means over nothing are n/a."""
    columns, *rows = [[" ".join(str(cell).replace("|", "\\|").split()) for cell in row] for row in (columns, *rows)]
    rows = [[re.sub(r"\bnan(x\b| %|\b)", "n/a", cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    head = "| " + " | ".join(c.ljust(w) for c, w in zip(columns, widths, strict=True)) + " |"
    return "\n".join([head, "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines])


def write_section(path: Path, name: str, text: str) -> None:
    """Put tables into a section of a Markdown file."""
    head, tail = section(path, name)
    write_text(path, f"{head}{text}\n{tail}")


def cache_folder() -> Path:
    """Where selfspec keeps what it measured and compiled: SELFSPEC_CACHE, or selfspec in the user's cache folder, or
    among temporary files where the user has no home. Raises ValueError for a ~user that is none."""
    named, xdg = os.environ.get("SELFSPEC_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if named:
        try:
            return Path(named).expanduser()
        except RuntimeError as error:
            raise ValueError(f"SELFSPEC_CACHE={named}: {error}; give the path of a folder") from error
    try:
        return Path(xdg or Path.home() / ".cache") / "selfspec"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"selfspec-{os.getuid()}"


@cache
def code_hash(*folders: str) -> str:
    """The SHA-256 of all code in these folders of the package, kernels included."""
    package = Path(__file__).parents[1]
    paths = sorted(path for folder in folders for path in (package / folder).rglob("*.*"))
    code = b"".join(path.read_bytes() for path in paths if path.suffix in (".py", ".h", ".cpp"))
    return hashlib.sha256(code).hexdigest()


def is_main_process() -> bool:
    """Whether this is the process that writes, under `accelerate launch` or alone."""
    return os.environ.get("RANK", "0") == "0"
