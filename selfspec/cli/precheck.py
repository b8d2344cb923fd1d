"""What can be refused of a command's options before anything slow is imported."""

from __future__ import annotations

import difflib
from functools import cache

from selfspec.cli.commands import COMMANDS
from selfspec.cli.help import SCHEMAS, fields, schema_of

_ALONE = ("-m", "--multirun", "-r", "--run", "--hydra-help", "--resolve", "--check", "-i", "--info", "-sc")
_WITH_VALUE = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--package", "-p", "--cfg", "-c")
_ALSO = ("--shell-completion", "--experimental-rerun")
FLAGS = (*_ALONE, *_WITH_VALUE, *_ALSO)
_SOURCES = {"data.path": "add data=jsonl or data=parquet", "data.name": "add data=hub", "data.root": "add data=text"}


@cache
def keys(schema: str, prefix: str = "") -> tuple[dict[str, bool], ...]:
    """The keys below a dataclass, dotted: whether anything may lie below them."""
    known: dict[str, bool] = {}
    for name, (kind, _) in fields(schema).items():
        if (inner := schema_of(kind)) is not None:
            known |= {f"{prefix}{name}": False, **keys(inner, f"{prefix}{name}.")[0]}
        else:
            known[f"{prefix}{name}"] = kind == "Any" or kind.startswith("dict")
    return (known,)


def every_key() -> dict[str, bool]:
    """Those of all commands."""
    return {key: open_ for schema in SCHEMAS.values() for key, open_ in keys(schema)[0].items()}


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
    """Why a command can not take these options; None where it may."""
    command = COMMANDS[name]
    known, value = keys(SCHEMAS[command.config])[0], False
    for argument in arguments:
        if value or "=" not in argument:
            takes = argument in _WITH_VALUE or (value is False and argument in _ALSO)
            if not value and argument.startswith("-") and argument.partition("=")[0] not in FLAGS:
                word = argument.lstrip("-").replace("-", "_")
                targeted = "target.name" if word == "target" and "target.name" in known else word
                found = targeted if targeted in known else meant(word, known).rpartition("mean ")[2]
                return f"there is no {argument}; options are given as {found if found in known else 'key'}=VALUE"
            if not value and not argument.startswith(("-", "~")):
                return f"{argument!r} is no option; options are given as key=VALUE: selfspec {name} {command.example}"
            value = takes
            continue
        key = argument.partition("=")[0]
        if key[:1] in "+~" or key.startswith(("-", "hydra.", "hydra/", "'", '"')) or "@" in key or "/" in key:
            continue
        parts = key.split(".")
        heads = [".".join(parts[: i + 1]) for i in range(len(parts))]
        if key not in known and not any(known.get(head) for head in heads):
            return f"there is no {key}{meant(key, known)}"
    return None
