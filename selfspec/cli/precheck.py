"""Checks what is typed before slow imports: the options are composed from schemas that are read from source."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from omegaconf import DictConfig, OmegaConf

from selfspec.checkpoints.find import check_drafter_name, check_target_name
from selfspec.cli.arguments import ALONE, WITH_VALUE, apart, constant
from selfspec.cli.commands import COMMANDS, Command
from selfspec.cli.errors import BAD_INPUT, meant, one_line_error
from selfspec.cli.help import SCHEMAS, config_folder, drafter_schemas, schema_of
from selfspec.cli.source import names_of
from selfspec.drafters import OWN_KINDS

_GROUPS = ("experiment", "debug")  # choices that no config makes
_ATTACHED = ("-cd", "-cp", "-cn", "-p", "-c", "-i")  # to their values
_ELSEWHERE = ("--config-path", "-cp", "--config-name", "-cn", "--package", "-p", "--experimental-rerun", "--hydra-help")
_POINTS = 16  # of a sweep that are composed


def misplaced(name: str, arguments: list[str]) -> str | None:
    """Why an argument is no option of a command; None if all are."""
    command, expecting = COMMANDS[name], ""
    known = schema_of(command.config)
    for argument in arguments:
        key, mark, value = argument.partition("=")
        if expecting:
            if expecting in ("--config-dir", "-cd") and not Path(argument).is_dir():
                return f"{expecting} {argument}: there is no such folder"
            expecting = ""
        elif key in WITH_VALUE:
            expecting = "" if mark else key
            if key in ("--config-dir", "-cd") and mark and not Path(value).is_dir():
                return f"{argument}: there is no such folder"
        elif key in ALONE or (key.startswith(_ATTACHED) and not key.startswith("--")):
            continue
        elif key.startswith("--") and any(o.startswith(key) for o in (*WITH_VALUE, *ALONE)):
            continue  # shortened, as Hydra's parser takes it
        elif key.startswith("-"):
            word = key.lstrip("-").replace("-", "_")
            word = "target.name" if word == "target" and command.trains else word
            if near := difflib.get_close_matches(key.replace("_", "-"), (*WITH_VALUE, *ALONE), 1, 0.8):
                return f"there is no {key}; did you mean {near[0]}"
            near = [word] if word in key_names(known) else difflib.get_close_matches(word, key_names(known), 1)
            return f"there is no {key}; options are given as {near[0] if near else 'key'}=VALUE"
        elif key in _GROUPS and mark:
            return f"{key} is added: +{argument}"
        elif key[:1] == "+" and key.lstrip("+") in ("data", "drafter") and mark:
            return f"{key.lstrip('+')} is chosen, not added: {argument.lstrip('+')}"
        elif not key or (not mark and not key.startswith("~")):
            return f"{argument!r} is no option; options are given as key=VALUE: selfspec {name} {command.example}"
    return f"{expecting} needs a value behind it" if expecting and expecting not in ("--info", "-i") else None


def key_names(schema: type, prefix: str = "") -> list[str]:
    """The dotted keys of a schema."""
    names = []
    for part in fields(schema):
        names.append(f"{prefix}{part.name}")
        if isinstance(part.type, type) and is_dataclass(part.type):
            names += key_names(part.type, f"{prefix}{part.name}.")
    return names


def store(schemas: Mapping[str, Any], drafters: Mapping[str, Any] | None) -> None:
    """Make schemas known to Hydra. drafters: the choices of `drafter`, where training takes it as a group; elsewhere it
    is the name of a drafter."""
    known = ConfigStore.instance()
    known.repo.pop("drafter", None)
    for kind, node in (drafters or {}).items():
        known.store(group="drafter", name=kind, node=node)
    for config, schema in SCHEMAS.items():
        known.store(name=f"{config}_schema", node=schemas[schema])


def miscomposed(name: str, arguments: list[str]) -> str | None:
    """Why options, as `selfspec.cli.arguments.taken` gives them, make no config of a command; None if they do, or if
    only imports can tell."""
    command = COMMANDS[name]
    try:
        check_composed(command, arguments)
    except UnicodeDecodeError as error:
        paths = (path for at in _folders(arguments) for path in sorted(Path(at).rglob("*.yaml")))
        files = (path for path in paths if error.object in path.read_bytes())
        return f"{next(files, 'a config')} is no text of UTF-8 ({error})"
    except BAD_INPUT as error:
        kinds = drafter_schemas() if command.trains else {}
        keys = [f"drafter.{key}" for kind in kinds.values() for key in key_names(kind)]
        said = one_line_error(error, [*key_names(schema_of(command.config)), *keys])
        if command.trains and "drafter" in said and entry_points(group=OWN_KINDS):
            return None  # of a kind that an installed package may have
        return said + _elsewhere(said, kinds)
    except Exception:  # NeedsImport, and whatever else a definition without its imports may raise: the command judges
        return None
    return None


def check_composed(command: Command, arguments: list[str]) -> None:
    """Compose the options of a command, of a sweep every value. Raises what is wrong with them, NeedsImport where only
    imports can tell."""
    flags, typed = apart(arguments)
    if any(flag.startswith(_ELSEWHERE) for flag in flags):
        return
    urls = (f"file://{Path(folder).resolve()}" for folder in _folders(arguments))
    places = ",".join("'" + url.replace("'", "\\'") + "'" for url in urls)  # whatever characters they hold
    search = [f"hydra.searchpath=[{places}]"] if places else []
    parsed = OverridesParser.create().parse_overrides(typed)
    if command.trains and _own_drafter(parsed):  # whose keys its own package knows
        parsed = [o for o in parsed if o.key_or_group.partition(".")[0] != "drafter"]
    if {"-m", "--multirun"} & set(flags):
        constant(typed)
    else:
        _one_point(parsed)
    store(names_of("selfspec.cli.config"), drafter_schemas() if command.trains else None)
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        for point in _points(parsed):
            config = compose(command.config, [*search, *point])
            if any(flag.partition("=")[0] in ("--cfg", "-c", "--info", "-i") for flag in flags):
                continue  # only to be looked at
            _check_keys(config, command.config)
            if "name" in config and not OmegaConf.is_missing(config, "name"):
                names_of("selfspec.cli.run_folders")["check_name"](config.name)
            _check_data(config.get("data"))
            _check_names(OmegaConf.to_object(config))


def _folders(arguments: list[str]) -> list[str]:
    """What is given with --config-dir."""
    flags, _ = apart(arguments)
    behind = [flags[i + 1] for i, flag in enumerate(flags) if flag in ("--config-dir", "-cd")]
    return behind + [flag.partition("=")[2] for flag in flags if flag.startswith(("--config-dir=", "-cd="))]


def _elsewhere(said: str, kinds: Mapping[str, type]) -> str:
    """Behind a key that does not exist here: which kinds of drafters or commands have it."""
    if (unknown := re.search(r"there is no (?:drafter\.)?(\w+)(?:;|$| here)", said)) is None:
        return ""
    if "there is no drafter." in said:
        have = [f"drafter={kind}" for kind, schema in kinds.items() if unknown[1] in key_names(schema)]
    else:
        schemas = ((name, schema_of(c.config)) for name, c in COMMANDS.items() if c.config)
        have = [f"selfspec {name}" for name, schema in schemas if unknown[1] in key_names(schema)]
    return f" ({' and '.join(have)} {'has' if len(have) == 1 else 'have'} it)" if have else ""


def _one_point(parsed: list[Override]) -> None:
    """Raises ValueError for several values where there is no sweep."""
    for override in parsed:
        if override.is_sweep_override():
            key, _, value = str(override.input_line).partition("=")
            raise ValueError(
                f"{key}={value}: several values make a sweep, which -m begins; a list is [{value}], and one text with "
                f"commas is quoted twice: {key}='\"{value}\"'"
            )


def _points(parsed: list[Override]) -> Iterator[list[str]]:
    """Overrides of so many points of a sweep that every value stands in one."""
    values = dict[int, list[str]]()
    for i, override in enumerate(parsed):
        if not override.is_sweep_override():
            values[i] = [str(override.input_line)]
        elif override.is_discrete_sweep() and not isinstance(override.value(), Glob):  # which asks Hydra's files
            key = override.get_key_element()
            values[i] = [f"{key}={value}" for value in override.sweep_string_iterator()]
    for i in range(min(_POINTS, max(map(len, values.values()), default=1))):
        yield [choices[i % len(choices)] for choices in values.values()]


def _own_drafter(parsed: list[Override]) -> bool:
    """Whether a drafter of another package is to be trained."""
    installed = {entry.name for entry in entry_points(group=OWN_KINDS)}
    chosen = [str(o.input_line).partition("=")[2] for o in parsed if o.key_or_group == "drafter"]
    return any(o.key_or_group == "drafter._target_" for o in parsed) or any(
        name.strip("'\"") in installed for value in chosen for name in value.split(",")
    )


def _check_keys(node: DictConfig, composed: str, place: str = "") -> None:
    """Raises ValueError for a key that was added and that nothing reads. Without a schema any may be added."""
    kind = OmegaConf.get_type(node)
    known = [part.name for part in fields(kind)] if is_dataclass(kind) else [*node]
    for name in map(str, node):
        inner, key = None if OmegaConf.is_missing(node, name) else node[name], f"{place}{name}"
        if name not in known:
            while isinstance(inner, DictConfig) and len(inner) == 1:  # as it was typed
                last = str(next(iter(inner)))
                inner, key = inner[last], f"{key}.{last}"
            every = [*(f"{place}{k}" for k in known), *key_names(schema_of(composed)), *(f"+{g}" for g in _GROUPS)]
            raise ValueError(f"there is no {key}{meant(key, every)}")
        if isinstance(inner, DictConfig):
            _check_keys(inner, composed, f"{key}.")


def _check_data(data: DictConfig | None, place: str = "data") -> None:
    """Raises ValueError for a key that the source of text, which stands at `place`, has not."""
    if data is None or not (path := str(data.get("_target_", ""))).startswith("selfspec."):
        return
    module, _, source = path.rpartition(".")
    kind = names_of(module)[source]
    known = [f"{place}.{part.name}" for part in fields(kind)]
    for name in (str(name) for name in data if name != "_target_"):
        if f"{place}.{name}" not in known:
            raise ValueError(f"there is no {place}.{name}{meant(f'{place}.{name}', known)}")
        if not OmegaConf.is_missing(data, name) and data[name] == "":
            raise ValueError(f"{place}.{name} is empty; give a value")
    _check_data(data.get("source"), f"{place}.source")
    given: dict[str, Any] = OmegaConf.to_container(data, resolve=True)  # type: ignore[assignment]
    if "???" not in given.values():
        given = {name: value for name, value in given.items() if name != "_target_"}
        kind(
            **given, **{name: None for name in ("tokenizer", "ends") if f"{place}.{name}" in known}
        )  # checks its values
    if given.get("path", "???") != "???":
        names_of("selfspec.data.records")["files_of"](given["path"])


def _check_names(run: Any) -> None:
    """Raises ValueError for names that are empty, FileNotFoundError for a drafter or a target that is neither here nor
    on the hub, and for questions that are nowhere."""
    named = [("drafter", getattr(run, "drafter", None))]  # not train.init_from: a checkpoint may have its weights
    named += [("compare.drafters", name) for name in getattr(getattr(run, "compare", None), "drafters", ())]
    for key, name in named:
        if name == "":
            raise ValueError(f"{key} is empty; give the name of a drafter")
        if isinstance(name, str):
            check_drafter_name(name)
    for section in ("decode", "show", "audit", "calibrate", "compare"):
        questions = getattr(getattr(run, section, None), "questions", None) or ()
        for name in (questions,) if isinstance(questions, str) else questions:
            names_of("selfspec.data.questions")["file_of"](name)
    if (model := getattr(getattr(run, "compare", None), "draft_model", None)) is not None:
        check_target_name(model)
    target = getattr(run, "target", None)
    if (target := getattr(target, "name", target)) is not None:
        check_target_name(str(target))
