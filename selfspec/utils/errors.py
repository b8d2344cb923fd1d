"""Errors as one line, and the command that was typed."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST = 2000  # characters of an error that are shown


def one_line(error: BaseException) -> str:
    """An error's message on one line; of errors that only wrap another, the other's."""
    while error.__cause__ is not None and not isinstance(error, (ValueError, OSError)):
        error = error.__cause__
    text = visible(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Behind a name that does not exist: the nearest that does, if one is near."""
    near = difflib.get_close_matches(name, list(known), 1, 0.75)
    return f" (did you mean {near[0]!r}?)" if near else ""


def visible(text: str) -> str:
    """Text for a terminal: control characters but tabs and line breaks as \\xNN, which a terminal would obey."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


# C0 and C1, and what turns the direction of writing
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Bad input ends in one line and exit code 2; HYDRA_FULL_ERROR=1 shows the traceback instead."""
    try:
        yield
    except BrokenPipeError:  # `start` of the command line ends quietly
        raise
    except (ValueError, OSError, MemoryError, ImportError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"selfspec: {one_line(error)}", file=sys.stderr)
        sys.exit(2)


UNKNOWN = "the same command"


def command_line(processes: int = 1) -> str:
    """What was typed to start this program, to be typed again."""
    words = sys.orig_argv[1:] if processes == 1 else []  # a launcher's own words are not known here
    for i, word in enumerate(words):
        name = Path(word).name
        if name == "selfspec":
            return shlex.join(["selfspec", *words[i + 1 :]])
        if name.endswith(".py"):
            return shlex.join(["python", *words[i:]])
    return UNKNOWN
