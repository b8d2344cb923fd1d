"""Bad input of a command as one line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from selfspec.cli.precheck import keys_of, meant
from selfspec.utils.errors import one_line


@contextmanager
def clear_errors() -> Iterator[None]:
    """Bad input ends in one line that names it, and exit code 2; HYDRA_FULL_ERROR=1 shows the traceback instead."""
    before = {name: os.environ.get(name) for name in ("HYDRA_FULL_ERROR", "SELFSPEC_ERRORS")}
    if before["HYDRA_FULL_ERROR"] == "1" and before["SELFSPEC_ERRORS"] is None:
        yield
        return
    os.environ |= {"HYDRA_FULL_ERROR": "1", "SELFSPEC_ERRORS": "1"}  # Hydra then leaves errors to us
    try:
        yield
    except BrokenPipeError:
        raise
    except BAD_INPUT as error:
        print(f"{os.path.basename(sys.argv[0])}: {one_line_error(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{os.path.basename(sys.argv[0])}: interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


BAD_INPUT = (
    *(ValueError, FloatingPointError, OSError, MemoryError, ImportError),
    *(HydraException, OmegaConfBaseException, YAMLError),
)


def one_line_error(error: BaseException) -> str:
    """What to say of bad input, on one line."""
    text = one_line(error)
    missing = error.full_key if isinstance(error, MissingMandatoryValue) else None
    if missing is None and (match := re.search(r"Missing mandatory value: ([\w.]+)", text)) is not None:
        missing = match[1]
    if missing is not None:
        return f"{missing} is missing; give {missing}=..."
    if (unknown := re.search(r"Key '(\w+)' (?:is )?not in \S+ .*?full_key: ([\w.]+)", text)) is not None:
        file = re.search(r"In '([^']+)': ConfigKeyError", text)
        where = "" if file is None else f"{file[1]}.yaml: "
        return f"{where}there is no {unknown[2]}{_meant(error, unknown[2])}"
    if (
        wrong := re.search(r"Value '(.*)' of type '\w+' could not be converted to (\w+) full_key: (\S+)", text)
    ) is not None:
        return f"{wrong[3]}={wrong[1]} must be of type {wrong[2].lower()}"
    if "Cannot convert 'dict' to string" in text and "full_key: target" in text:
        return "target.name= is for training; here give target=NAME"
    if "is not a subclass of TargetConfig" in text:
        return "target= is for measuring; training takes target.name=NAME"
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        hint = "" if set(value) & set("[]{}()'\"") else f"; if it is text, quote it twice: {key}='\"{value}\"'"
        return f"{error.override} is not in Hydra's grammar{hint}"
    if isinstance(error, (FileExistsError, NotADirectoryError)) and error.filename2 is None and error.filename:
        places = [Path(error.filename), *Path(error.filename).parents]
        if blocking := [place for place in places if os.path.lexists(place) and not place.is_dir()]:
            what = "a file or a link that leads nowhere"
            return f"{blocking[0]} must be a folder, but it is {what}; remove it, or choose another name="
    return text.partition(" Config search path:")[0]


def _meant(error: BaseException, key: str) -> str:
    """What to do about a key that does not exist: what there is beside it in the composed config, or anywhere."""
    cause: BaseException | None = error
    while cause is not None and getattr(cause, "parent_node", None) is None:
        cause = cause.__cause__
    head = key.rpartition(".")[0]
    beside = {f"{head}.{k}".lstrip("."): False for k in getattr(cause, "parent_node", None) or ()}
    return meant(key, {**beside, **keys_of(os.path.basename(sys.argv[0]))})
