"""Compiled code on disk, for the next process."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from selfspec.utils.files import atomic, only_mine, private_folder

DISK = 2**30  # bytes of compiled code on disk; what was not used for longest goes first


def read(path: Path | None) -> Any:
    """What an earlier process compiled; None where there is nothing, or nothing that can be used here."""
    if path is None or not path.is_file() or not only_mine(path):
        return None
    try:
        with path.open("rb") as file:
            code: Any = torch.compiler.load_compiled_function(file)
        code.disable_guard_check()
    except Exception as error:
        print(f"compiled anew, since {path} can not be read: {error}", file=sys.stderr)
        return None
    with suppress(OSError):  # of a file that another user owns
        os.utime(path)
    return code


def varying(path: Path | None) -> str:
    """The operations of the code there whose rows depend on how many there are."""
    notes = None if path is None else path.with_suffix(".varying")
    return notes.read_text() if notes is not None and notes.is_file() else ""


def write(path: Path | None, code: Any, varying: str) -> bool:
    """Keep compiled code there, or say why not. False where nothing can be written to its folder."""
    if path is None:
        return True
    try:
        private_folder(path.parent)
        if varying:
            path.with_suffix(".varying").write_text(varying)
        with atomic(path) as scratch:
            code.save_compiled_function(str(scratch))
        _trim(path.parent)
    except OSError as error:
        print(f"compiled code is not kept in {path.parent}: {error}", file=sys.stderr)
        return False
    except Exception as error:  # of what can not be pickled
        print(f"compiled code is not kept: {error}", file=sys.stderr)
    return True


def mended(error: Exception) -> bool:
    """Whether a library in torch's own cache was cut short, as a process leaves it that is killed while it compiles.
    It is removed, so that it is made anew."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # slow to import

    found = re.search(r"ImportError: (\S+\.so): (file too short|invalid ELF header|cannot read file data)", str(error))
    if found is None or not (path := Path(found[1])).is_relative_to(cache_dir()):
        return False
    with suppress(OSError):
        path.unlink()
        return True
    return False


def _trim(folder: Path) -> None:
    """Delete what was not used for longest, where more than DISK bytes lie there."""
    files, total = [], 0
    for path in folder.glob("*.bin"):
        with suppress(FileNotFoundError):  # another process trims too
            files.append((path.stat().st_mtime, path.stat().st_size, path))
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > DISK:
            path.unlink(missing_ok=True)
            path.with_suffix(".varying").unlink(missing_ok=True)
