"""Bad input of a command as one line."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from selfspec.utils.errors import did_you_mean, one_line

_SOURCES = {"data.path": "add data=jsonl or data=parquet", "data.name": "add data=hub", "data.root": "add data=text"}


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
    except (*BAD_INPUT, RuntimeError) as error:
        if not isinstance(error, BAD_INPUT) and type(error).__name__ != "OutOfMemoryError":  # torch's, of a GPU
            raise
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


# What Hydra and OmegaConf say, and what is said instead
_SAID = (
    (r"Missing mandatory value: ([\w.]+)", "{0} is missing; give {0}=..."),
    (r"Value '(.*)' of type '\w+' could not be converted to (\w+) full_key: (\S+)", "{2}={0} must be of type {1}"),
    (r"Cannot convert 'dict' to string.* full_key: target\b", "target.name= is for training; here give target=NAME"),
    (r"is not a subclass of TargetConfig", "target= is for measuring; training takes target.name=NAME"),
    (
        r"(?:not a subclass of|Cannot merge DictConfig with) \w+.* full_key: ([\w.]+) ",
        "{0} holds keys; give {0}.KEY=...",
    ),
    (r"is not a subclass of (\w+)\. value: (.*) full_key:", "{1} stands where a section of keys belongs ({0})"),
    (r"is not a ListConfig, list or tuple. full_key: (\S+)", "{0} must be a list; give {0}=[...]"),
    (r"(?:' is not Optional|Incompatible value 'None'.*) full_key: (\S+)", "{0} can not be null"),
    (r"Cannot convert '\w+' to string: '(.*)' full_key: (\S+)", "{1}={0} must be a text"),
    (r"Cannot merge DictConfig with ListConfig full_key: object_type", "its top level has to hold keys"),
    (r"Config group override must be a string or a list. Got NoneType", "data and drafter can not be null; name one"),
    (r"does not support deletion full_key: (\S+)", "~{0}: a key of the schema can not be removed; give it a value"),
    (r"Could not delete from config. '(\S+)' does not exist", "~{0}: there is no {0}"),
)


def one_line_error(error: BaseException, known: Iterable[str] = ()) -> str:
    """What to say of bad input, on one line. known: keys of the schema."""
    text = one_line(error)
    file = re.search(r"In '([^']+)': ", text)
    where = "" if file is None or file[1] in ("config", "hydra/config") else f"{file[1]}.yaml: "
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} is missing; give {error.full_key}=..."
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        return f"{error.override} is not in Hydra's grammar; if it is text, quote it twice: {key}='\"{value}\"'"
    if isinstance(error, (FileExistsError, NotADirectoryError)) and error.filename2 is None and error.filename:
        places = [Path(error.filename), *Path(error.filename).parents]
        if blocking := [place for place in places if os.path.lexists(place) and not place.is_dir()]:
            what = "a file or a link that leads nowhere"
            return f"{blocking[0]} must be a folder, but it is {what}; move it away, or name another folder"
    if (unknown := re.search(r"Key '([^']+)' (?:is )?not in \S+.*? full_key: (\S+)", text)) is not None:
        if unknown[2] in ("experiment", "debug"):
            return f"{where}its first line has to be # @package _global_"
        return f"{where}there is no {unknown[2]}{meant(unknown[2], [*_beside(error, unknown[2]), *known])}"
    if (choice := re.search(r"Could not (?:load|find) '([\w/]+)/([^'/]*)'", text)) is not None:
        there = re.search(r"Available options in '\w+': (.*?) Config", text)
        names = there[1].split() if there is not None else []
        mark = "+" if choice[1] in ("experiment", "debug") else ""
        more = f"; there are {', '.join(names)}" if names else ""
        return f"there is no {mark}{choice[1]}={choice[2]}{did_you_mean(choice[2], names)}{more}"
    for pattern, said in _SAID:
        if (match := re.search(pattern, text)) is not None:
            return where + said.format(*match.groups())
    if (other := re.fullmatch(r"(.*?) full_key: ([^=\s]+)( \w+=\S+)*", text)) is not None:
        return f"{other[2]}: {other[1]}"
    return text.partition(" Config search path:")[0]


def _beside(error: BaseException, key: str) -> list[str]:
    """The keys that there are beside one that does not exist, and everywhere in the composed config."""
    cause: BaseException | None = error
    while cause is not None and getattr(cause, "parent_node", None) is None:
        cause = cause.__cause__
    node, head = getattr(cause, "parent_node", None), key.rpartition(".")[0]
    beside = [f"{head}.{k}".lstrip(".") for k in node or ()]
    while node is not None and node._get_parent() is not None:
        node = node._get_parent()
    return [*beside, *_dotted(node)] if isinstance(node, DictConfig) else beside


def _dotted(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in map(str, node):
        yield f"{prefix}{name}"
        inner = None if node._is_missing() or name == "hydra" else node._get_node(name)
        if isinstance(inner, DictConfig) and not inner._is_none() and not inner._is_missing():
            yield from _dotted(inner, f"{prefix}{name}.")


def meant(key: str, known: Iterable[str]) -> str:
    """What to do about a key that does not exist, as the end of a sentence. known: those that do."""
    known = [name for name in dict.fromkeys(known) if name != key]
    head, _, last = key.rpartition(".")
    beside = [name for name in known if name.lstrip("+").rpartition(".")[0] == head]
    if key in _SOURCES:
        return f" here; {_SOURCES[key]}"
    if head in known and not beside:  # which takes any keys
        return f" yet; add it: +{key}="
    ends = {name.rpartition(".")[2]: name for name in beside}
    if near := difflib.get_close_matches(last, ends, 1):
        return f"; did you mean {ends[near[0]]}"
    if deeper := [name for name in known if name.rpartition(".")[2] == last]:
        return f"; did you mean {deeper[0]}"
    if near := difflib.get_close_matches(key, _SOURCES, 1, 0.75):
        return f"; did you mean {near[0]} ({_SOURCES[near[0]]})"
    if near := difflib.get_close_matches(key, known, 1):
        return f"; did you mean {near[0]}"
    return f"; there are {', '.join(beside)}" if beside else "; --help lists what there is"
