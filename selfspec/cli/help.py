"""The texts of `--help`, made when asked: read from the source of the options' dataclasses, which is not imported."""

from __future__ import annotations

import re
import textwrap
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from selfspec.cli.commands import COMMANDS
from selfspec.cli.source import PACKAGE, names_of

SCHEMAS = {c.config: f"{c.config.title()}Run" for c in COMMANDS.values() if c.config}  # of configs/NAME.yaml
_AT, _WIDTH = 38, 118  # columns where descriptions begin and end
_YAML = {"None": "null", "True": "true", "False": "false"}
_HYDRA = """Options are given as key=value. Behind -m, values with commas make a sweep over every combination.
  --config-dir DIR   a folder with experiment/NAME.yaml of your own, for +experiment=NAME
  --cfg job          print the composed options and stop
  --version, --help"""
_WRITERS = ("selfspec.data.server.Server", "selfspec.training.synthetic.Synthetic")  # of text, for trainings
Row = tuple[str, str]  # `key=default`, and what it is


def config_folder() -> Path:
    """Where the configs lie: inside the package where it was installed from a wheel, beside it in a clone."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def _default(part: Field[Any]) -> str:
    """A field's default as YAML has it."""
    return _yaml(part.default if part.default_factory is MISSING else part.default_factory())


def _yaml(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(str, value))}]"
    return _YAML.get(str(value), str(value))


def described(schema: type) -> dict[str, str]:
    """What the docstrings of a dataclass and of those it derives from say of its fields: `name: text` or
    `name, name: text`, one after the other."""
    names, texts = {part.name for part in fields(schema)}, dict[str, str]()
    for kind in filter(is_dataclass, reversed(schema.__mro__)):
        text = " ".join((kind.__doc__ or "").split())
        text = "" if text.startswith(f"{kind.__name__}(") else text  # dataclass's own
        marks = list(re.finditer(r"(?<![\w.])(\w+(?:, \w+)*(?: and \w+)?): ", text))
        marks = [mark for mark in marks if set(re.split(", | and ", mark[1])) <= names]
        for i, mark in enumerate(marks):
            last = i + 1 == len(marks)
            description = text[mark.end() : None if last else marks[i + 1].start()]
            description = re.sub(r" \(see `[^`]*`\)", "", re.sub(r"\bNone\b", "null", description)).strip(" ;.")
            texts |= dict.fromkeys(re.split(", | and ", mark[1]), description.split(". ")[0] if last else description)
    return texts


def options(schema: type, prefix: str = "") -> list[Row]:
    """All fields of a dataclass, those of inner ones included."""
    rows: list[Row] = []
    texts = described(schema)
    for part in fields(schema):
        if isinstance(part.type, type) and is_dataclass(part.type):
            rows += options(part.type, f"{prefix}{part.name}.")
        else:
            rows.append((f"{prefix}{part.name}={_default(part)}", texts.get(part.name, "")))
    return rows


def schema_of(config: str) -> type:
    """The schema of configs/NAME.yaml."""
    schema: type = names_of("selfspec.cli.config")[SCHEMAS[config]]
    return schema


def drafter_schemas() -> dict[str, type]:
    """The configs of this package's kinds of drafters."""
    return {kind: names_of(f"selfspec.drafters.{kind}")[name] for kind, name in drafter_configs().items()}


def drafter_configs() -> dict[str, str]:
    """The kinds of drafters and their configs' names."""
    configs = {}
    for path in sorted((PACKAGE / "drafters").glob("*.py")):
        names = re.findall(r"^class (\w+Config)\(", path.read_text(), re.MULTILINE)
        if names and path.stem not in ("base", "hybrid"):
            configs[path.stem] = names[0]
    return configs


def experiments(config: str) -> list[Row]:
    """The committed experiments that are for the script of this config, each with its first comment."""
    rows = []
    for path in sorted((config_folder() / "experiment").glob("*.yaml")):
        text = path.read_text()
        if ("\npretrain:" in text) == (config == "target"):
            comments = [line[2:] for line in text.splitlines()[1:] if line.startswith("# ")]
            rows.append((f"+experiment={path.stem}", " ".join(comments).split(". ")[0]))
    return rows


def _data(trains: bool) -> list[Row]:
    """The choices of the data group, each with its options; without those that write text to train on, unless it is
    for a training."""
    rows = []
    for path in sorted((config_folder() / "data").glob("*.yaml")):
        settings = yaml.safe_load(path.read_text())
        base, *_ = settings.pop("defaults", [None])
        if isinstance(base, str):  # another of the group
            settings = yaml.safe_load((path.parent / f"{base}.yaml").read_text()) | settings
        if not trains and settings["_target_"] in _WRITERS:
            continue
        given = []
        if isinstance(base, dict):
            given.append(f"data.source.KEY of data={base['/data@source']} (data@data.source=NAME: of another)")
        for key, value in settings.items():
            if key != "_target_":
                given.append(f"data.{key}={'[...]' if isinstance(value, list) else _yaml(value)}")
        rows.append((f"data={path.stem}", ", ".join(given)))
    return rows


def _defaults(config: str) -> dict[str, str]:
    """What the script's own config sets, in its groups too."""
    text = (config_folder() / f"{config}.yaml").read_text()
    pairs = re.findall(r"^(?:  - )?(\w+): ([^\n#{]+?)\s*(?:#.*)?$", text, re.MULTILINE)
    inner = {
        f"{group}.{key}": _yaml(value)
        for group, settings in yaml.safe_load(text).items()
        if isinstance(settings, dict) and group != "hydra"
        for key, value in settings.items()
    }
    return {key: _YAML.get(value, value) for key, value in pairs} | inner


def text(name: str) -> str:
    """The help of a command by its name."""
    command = COMMANDS[name]
    lines = [f"selfspec {name}: {command.what}", "", f"  selfspec {name} {command.example}"]
    lines += [f"  python {command.script} {command.example}   (the same, in a clone)", "", _HYDRA]
    set_here = _defaults(command.config)
    rows = [row for row in options(schema_of(command.config)) if not (command.trains and row[0].startswith("drafter="))]
    pairs = [(*row[0].split("=", 1), row[1]) for row in rows]
    rows = [(f"{key}={set_here.get(key, value)}", description) for key, value, description in pairs]
    lines += ["", "Options and their defaults (???: has to be given)", *_lines(rows)]
    if any(row[0].startswith("data=") for row in rows):
        training = command.trains or command.config == "target"
        lines += ["", "data=NAME, and the options of each", *_lines(_data(training))]
    if command.trains:
        lines += ["", "drafter=KIND, and the options of each; or drafter._target_=package.module.Class"]
        for kind, schema in drafter_schemas().items():
            lines += ["", f" drafter={kind}", *_lines(options(schema, "drafter."))]
    if command.config in ("train", "target"):
        lines += ["", "Experiments", *_lines(experiments(command.config))]
    return "\n".join(lines) + "\n"


def _lines(rows: list[Row]) -> list[str]:
    lines = []
    for head, description in rows:
        first, *more = textwrap.wrap(description, _WIDTH - _AT) or [""]
        if len(head) + 4 > _AT:
            lines.append(f"  {head}")
            head = ""
        lines += [f"  {head:<{_AT - 2}}{first}".rstrip(), *(" " * _AT + line for line in more)]
    return lines
