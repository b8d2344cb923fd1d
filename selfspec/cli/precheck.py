"""Checks a command's options before slow imports."""

from __future__ import annotations

import difflib
from functools import cache

from selfspec.cli.commands import COMMANDS
from selfspec.cli.help import SCHEMAS, fields, schema_of

# Hydra's own options, and ours
WITH_VALUE = (
    *("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--package", "-p", "--cfg", "-c"),
    *("--experimental-rerun", "-i", "--info"),
)
_ALONE = (*("-m", "--multirun", "-r", "--run", "--hydra-help", "--resolve", "-sc", "--shell-completion"), "--check")
_GROUPS = ("experiment", "debug")  # choices that no config makes
_SOURCES = {"data.path": "add data=jsonl or data=parquet", "data.name": "add data=hub", "data.root": "add data=text"}


@cache
def keys(schema: str, prefix: str = "") -> dict[str, bool]:
    """Dotted keys of a dataclass; True where any key may follow."""
    known: dict[str, bool] = {}
    for name, (kind, _) in fields(schema).items():
        if (inner := schema_of(kind)) is not None:
            known |= {f"{prefix}{name}": False, **keys(inner, f"{prefix}{name}.")}
        else:
            known[f"{prefix}{name}"] = kind == "Any" or kind.startswith("dict")
    return known


def keys_of(program: str) -> dict[str, bool]:
    """Those of the command that a program's name ends in, as `selfspec train` or `decode.py`; none of another."""
    for name, command in COMMANDS.items():
        if command.config and program in (f"selfspec {name}", command.script.rpartition("/")[2]):
            return keys(SCHEMAS[command.config])
    return {}


def meant(key: str, known: dict[str, bool]) -> str:
    """What to do about a key that does not exist, as the end of a sentence."""
    head, _, last = key.rpartition(".")
    beside = [name for name in known if name.rpartition(".")[0] == head]
    if near := difflib.get_close_matches(key, beside, 1):
        return f"; did you mean {near[0]}"
    if deeper := [name for name in known if name.rpartition(".")[2] == last]:
        return f"; did you mean {deeper[0]}"
    if key in _SOURCES:
        return f" here; {_SOURCES[key]}"
    if near := difflib.get_close_matches(key, known, 1):
        return f"; did you mean {near[0]}"
    return f"; there are {', '.join(beside)}" if beside else "; --help lists what there is"


def refused(name: str, arguments: list[str]) -> str | None:
    """Why a command can not take these options; None if nothing is wrong."""
    command = COMMANDS[name]
    known, expected = keys(SCHEMAS[command.config]), False
    for argument in arguments:
        key, mark, _ = argument.partition("=")
        if expected or key in (*WITH_VALUE, *_ALONE):
            expected = not expected and not mark and key in WITH_VALUE
        elif key.startswith("--"):
            if any(option.startswith(key) for option in (*WITH_VALUE, *_ALONE)):
                continue  # shortened, as Hydra's parser takes it
            word = key.lstrip("-").replace("-", "_")
            word = "target.name" if word == "target" and "target.name" in known else word
            near = word if word in known else meant(word, known).rpartition("mean ")[2]
            return f"there is no {key}; options are given as {near if near in known else 'key'}=VALUE"
        elif key.startswith("-"):
            continue  # for Hydra to judge
        elif key in _GROUPS and mark:
            return f"{key} is added: +{argument}"
        elif not key or (not mark and not key.startswith("~")):
            return f"{argument!r} is no option; options are given as key=VALUE: selfspec {name} {command.example}"
        elif key[0] in "+~'\"" or key.startswith("hydra.") or "@" in key or "/" in key:
            continue  # for Hydra to judge
        elif key not in known and not any(known.get(key[:i]) for i, c in enumerate(key) if c == "."):
            return f"there is no {key}{meant(key, known)}"
    return None
