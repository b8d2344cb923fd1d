"""Writes the texts of `--help` from the options' dataclasses: python -m selfspec.cli.helptext

They are kept as files, since importing the dataclasses takes seconds."""

from __future__ import annotations

import re
import textwrap
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import yaml

from selfspec.cli import config as schemas
from selfspec.cli.config import config_folder
from selfspec.cli.main import COMMANDS, Command
from selfspec.drafters.registry import config_class, drafter_class, kinds

_FOLDER = Path(__file__).parents[1] / "help"
_SCHEMAS = {
    "train": schemas.TrainRun,
    "target": schemas.PretrainRun,
    "eval": schemas.EvalRun,
    "compare": schemas.CompareRun,
    "show": schemas.ShowRun,
    "audit": schemas.AuditRun,
    "limits": schemas.LimitsRun,
    "verifiers": schemas.VerifiersRun,
    "page": schemas.PageRun,
    "report": schemas.ReportRun,
}
_AT, _WIDTH = 38, 118  # columns where descriptions begin and end
_NAMED = {"None": "null", "True": "true", "False": "false"}
_HYDRA = """Options are given as key=value. Behind -m, values with commas make a sweep over every combination.
  --config-dir DIR   a folder with experiment/NAME.yaml of your own, for +experiment=NAME
  --cfg job          print the composed options and stop
  --version, --help"""
Row = tuple[str, str]  # `key=default`, and what it is


def described(kind: type) -> dict[str, str]:
    """What the docstrings of a dataclass and of those it derives from say of its fields: `name: text` or
    `name, name: text`, one after the other."""
    names, found = {f.name for f in fields(kind)}, dict[str, str]()
    for one in (k for k in kind.__mro__[::-1] if is_dataclass(k)):
        text = " ".join((one.__dict__.get("__doc__") or "").split())
        text = "" if text.startswith(f"{one.__name__}(") else text  # what dataclasses write where nothing is said
        marks = list(re.finditer(r"(?<![\w.])(\w+(?:, \w+)*(?: and \w+)?): ", text))
        marks = [mark for mark in marks if set(re.split(", | and ", mark[1])) <= names]
        for i, mark in enumerate(marks):
            last = i + 1 == len(marks)
            said = text[mark.end() : None if last else marks[i + 1].start()].strip(" ;.")
            found |= dict.fromkeys(re.split(", | and ", mark[1]), said.split(". ")[0] if last else said)
    return found


def options(kind: type, prefix: str = "") -> list[Row]:
    """All fields of a dataclass, those of inner ones included."""
    found: list[Row] = []
    hints, said = get_type_hints(kind), described(kind)
    for f in fields(kind):
        if is_dataclass(inner := hints[f.name]):
            assert isinstance(inner, type)
            found += options(inner, f"{prefix}{f.name}.")
            continue
        value = f.default_factory() if f.default_factory is not MISSING else f.default
        shown = _NAMED.get(str(value), str(value)).replace("'", "").replace(", ", ",")
        found.append((f"{prefix}{f.name}={shown}", said.get(f.name, "")))
    return found


def experiments(config: str) -> list[Row]:
    """The committed experiments that are for the script of this config, each with its first comment."""
    found = []
    for path in sorted((config_folder() / "experiment").glob("*.yaml")):
        text = path.read_text()
        if ("\npretrain:" in text) == (config == "target"):
            comments = [line[2:] for line in text.splitlines()[1:] if line.startswith("# ")]
            found.append((f"+experiment={path.stem}", " ".join(comments).split(". ")[0]))
    return found


def _data() -> list[Row]:
    """The choices of the data group, each with its options."""
    found = []
    for path in sorted((config_folder() / "data").glob("*.yaml")):
        pairs = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
        own = [f"data.{p.replace(': ', '=')}" for p in pairs if ": " in p and not p.startswith("_")]
        found.append((f"data={path.stem}", ", ".join(own)))
    return found


def _defaults(config: str) -> dict[str, str]:
    """What the script's own config sets, at its top level."""
    text = yaml.safe_load((config_folder() / f"{config}.yaml").read_text())
    groups = {key: value for entry in text["defaults"] if isinstance(entry, dict) for key, value in entry.items()}
    given = {key: value for key, value in text.items() if not isinstance(value, (dict, list))}
    return {key: _NAMED.get(str(value), str(value)) for key, value in {**groups, **given}.items()}


def page(name: str, command: Command) -> str:
    """The text of one command."""
    lines = [f"selfspec {name}: {command.told}", "", f"  selfspec {name} {command.example}"]
    lines += [f"  python {command.script} {command.example}   (the same, in a clone)", "", _HYDRA]
    own = _defaults(command.config)
    rows = [row for row in options(_SCHEMAS[command.config]) if not (command.trains and row[0].startswith("drafter="))]
    pairs = [(*row[0].split("=", 1), row[1]) for row in rows]
    rows = [(f"{key}={own.get(key, value)}", said) for key, value, said in pairs]
    lines += ["", "Options and their defaults (???: has to be given)", *_lines(rows)]
    if any(row[0].startswith("data=") for row in rows):
        lines += ["", "data=NAME, and the options of each", *_lines(_data())]
    if command.trains:
        lines += ["", "drafter=KIND, and the options of each; or drafter._target_=package.module.Class"]
        for kind in kinds():
            lines += ["", f" drafter={kind}", *_lines(options(config_class(drafter_class(kind)), "drafter."))]
    if command.config in ("train", "target"):
        lines += ["", "Experiments", *_lines(experiments(command.config))]
    return "\n".join(lines) + "\n"


def _lines(rows: list[Row]) -> list[str]:
    lines = []
    for head, said in rows:
        first, *more = textwrap.wrap(said, _WIDTH - _AT) or [""]
        if len(head) + 4 > _AT:
            lines.append(f"  {head}")
            head = ""
        lines += [f"  {head:<{_AT - 2}}{first}".rstrip(), *(" " * _AT + line for line in more)]
    return lines


def pages() -> dict[str, str]:
    """The texts by command."""
    return {name: page(name, command) for name, command in COMMANDS.items() if command.config}


if __name__ == "__main__":
    for name, text in pages().items():
        (_FOLDER / f"{name}.txt").write_text(text)
