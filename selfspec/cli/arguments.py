"""What is typed behind a command, brought into the form that Hydra takes."""

from __future__ import annotations

import sys
from os.path import exists

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from selfspec.checkpoints.find import member_names, split_at
from selfspec.cli.source import names_of

# Hydra's own options, and ours
WITH_VALUE = (
    *("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--package", "-p", "--cfg", "-c"),
    *("--experimental-rerun", "-i", "--info"),
)
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")  # what Hydra tells, all by default
ALONE = (*("-m", "--multirun", "-r", "--run", "--hydra-help", "--resolve", "-sc", "--shell-completion"), "--check")


def taken(arguments: list[str]) -> list[str]:
    """Command-line arguments as Hydra takes them: its own options first, values quoted where its grammar asks for it,
    keys by their present names."""
    behind = [*arguments, ""][1:]
    pairs = list(zip(arguments, behind, strict=True))
    arguments = ["--info=all" if a in ("--info", "-i") and b not in _INFO else a for a, b in pairs]
    arguments = ["check=true" if argument == "--check" else argument for argument in arguments]
    return flags_first(renamed(paths_quoted(arguments)))


def renamed(arguments: list[str]) -> list[str]:
    """Command-line arguments with the present names of keys. A line tells of each that was given by its old one."""
    result, old = [], names_of("selfspec.checkpoints.drafter_folder")["RENAMED"]
    for argument in arguments:
        key, mark, value = argument.partition("=")
        name = key.lstrip("+~")
        if name.startswith("drafter.") and (new := old.get(name.removeprefix("drafter."))) is not None:
            print(f"{name} is now drafter.{new}; the old name works until version 0.5", file=sys.stderr)
            argument = f"{key.removesuffix(name)}drafter.{new}{mark}{value}"
        result.append(argument)
    return result


def paths_quoted(arguments: list[str]) -> list[str]:
    """Command-line arguments in which values are quoted that Hydra's grammar does not take: paths that exist, since
    folders of sweeps hold `=` and `,`, and plain words, such as those of other scripts."""
    result, parser = [], OverridesParser.create()
    for argument in arguments:
        key, mark, value = argument.partition("=")
        plain = mark and argument[0] != "-" and value[:1] not in ("'", '"', "[", "{")
        parts = split_at(value, ",", _whole) if plain else []
        path = any(exists(name) for part in parts for name in member_names(part))
        words = plain and not set(value) & set("\"'[]{}()$")
        if (path and any("," in part for part in parts)) or ((path or words) and not _parses(parser, argument)):
            quoted = ("'" + part.replace("\\", "\\\\").replace("'", "\\'") + "'" for part in parts)
            argument = f"{key}={','.join(quoted)}"
        result.append(argument)
    return result


def _whole(value: str) -> bool:
    """Whether the commas in a value belong to paths that exist."""
    return all(exists(name) for name in member_names(value) if "," in name)


def _parses(parser: OverridesParser, argument: str) -> bool:
    try:
        parser.parse_override(argument)
    except HydraException:
        return False
    return True


def constant(arguments: list[str]) -> list[str]:
    """The keys of overrides that are the same in all points of a sweep, which its folders then do not name."""
    parsed = OverridesParser.create().parse_overrides(apart(arguments)[1])
    swept = {str(o.key_or_group) for o in parsed if o.is_sweep_override()}
    if "name" in swept:
        raise ValueError("name can not be swept: a sweep has one name, and its folder holds all points")
    return [str(o.key_or_group) for o in parsed if not o.is_delete() and str(o.key_or_group) not in swept]


def apart(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Hydra's own options, with their values, and the overrides."""
    flags, overrides, takes = list[str](), list[str](), False
    for argument in arguments:
        is_flag = takes or (argument.startswith("-") and len(argument) > 1)
        takes = not takes and argument in WITH_VALUE
        (flags if is_flag else overrides).append(argument)
    return flags, overrides


def flags_first(arguments: list[str]) -> list[str]:
    """Hydra's own options before the overrides, wherever they were typed: its parser takes no others behind them."""
    flags, overrides = apart(arguments)
    return flags + overrides
