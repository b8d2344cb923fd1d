"""The texts of `--help`, made when asked: read from the source of the options' dataclasses, which is not imported."""

from __future__ import annotations

import ast
import re
import textwrap
from functools import cache
from pathlib import Path

from selfspec.cli.commands import COMMANDS, Command

PACKAGE = Path(__file__).parents[1]
SCHEMAS = {  # of configs/NAME.yaml
    "train": "TrainRun",
    "target": "PretrainRun",
    "eval": "EvalRun",
    "compare": "CompareRun",
    "show": "ShowRun",
    "audit": "AuditRun",
    "calibrate": "CalibrateRun",
    "limits": "LimitsRun",
    "page": "PageRun",
    "report": "ReportRun",
}
_AT, _WIDTH = 38, 118  # columns where descriptions begin and end
_YAML = {"None": "null", "True": "true", "False": "false", "MISSING": "???"}
_HYDRA = """Options are given as key=value. Behind -m, values with commas make a sweep over every combination.
  --config-dir DIR   a folder with experiment/NAME.yaml of your own, for +experiment=NAME
  --cfg job          print the composed options and stop
  --version, --help"""
Row = tuple[str, str]  # `key=default`, and what it is


def config_folder() -> Path:
    """Where the configs lie: inside the package where it was installed from a wheel, beside it in a clone."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


@cache
def _classes() -> dict[str, ast.ClassDef]:
    """All dataclasses of the package by name."""
    texts = [text for path in PACKAGE.rglob("*.py") if "@dataclass" in (text := path.read_text())]
    return {node.name: node for text in texts for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}


def schema_of(annotation: str) -> str | None:
    """The dataclass that an annotation names, if it does."""
    return annotation if annotation in _classes() else None


@cache
def _constant(name: str) -> ast.expr:
    """The value of a constant of the package, which stands on one line."""
    texts = (path.read_text() for path in PACKAGE.rglob("*.py"))
    lines = (re.search(rf"^{name}(?:: [^=]+)? = (.+)$", text, re.MULTILINE) for text in texts)
    return ast.parse(next(line[1] for line in lines if line), mode="eval").body


def _line(name: str) -> list[ast.ClassDef]:
    """A dataclass and those it derives from, the first of them first."""
    classes = _classes()
    bases = [base for base in map(ast.unparse, classes[name].bases) if base in classes]
    return [*(node for base in bases for node in _line(base)), classes[name]]


def fields(name: str) -> dict[str, tuple[str, str]]:
    """The fields of a dataclass: annotation and default, as they are written."""
    rows: dict[str, tuple[str, str]] = {}
    for node in _line(name):
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.value is not None:
                rows[part.target.id] = ast.unparse(part.annotation), _default(part.value)
    return rows


def field_names(name: str) -> list[str]:
    """The names of a dataclass's fields, those without a default too."""
    parts = [part for node in _line(name) for part in node.body if isinstance(part, ast.AnnAssign)]
    return [ast.unparse(part.target) for part in parts if not ast.unparse(part.annotation).startswith("ClassVar")]


def _default(value: ast.expr) -> str:
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        factory = value.keywords[0].value
        if isinstance(factory, ast.Lambda):
            return _default(factory.body)
        return {"list": "[]", "dict": "{}"}.get(ast.unparse(factory), "")
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "list":  # of a constant
        value = _constant(ast.unparse(value.args[0]))
        names = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", [])
        return f"[{','.join(ast.unparse(name) for name in names if name is not None)}]".replace("'", "")
    text = ast.unparse(value)
    if isinstance(value, ast.Name) and text not in _YAML:
        text = ast.unparse(_constant(text))
    return _YAML.get(text, text.strip("'\"")).replace("'", "").replace(", ", ",")


def described(name: str) -> dict[str, str]:
    """What the docstrings of a dataclass and of those it derives from say of its fields: `name: text` or
    `name, name: text`, one after the other."""
    names, texts = fields(name).keys(), dict[str, str]()
    for node in _line(name):
        text = " ".join((ast.get_docstring(node) or "").split())
        marks = list(re.finditer(r"(?<![\w.])(\w+(?:, \w+)*(?: and \w+)?): ", text))
        marks = [mark for mark in marks if set(re.split(", | and ", mark[1])) <= names]
        for i, mark in enumerate(marks):
            last = i + 1 == len(marks)
            description = text[mark.end() : None if last else marks[i + 1].start()].strip(" ;.")
            texts |= dict.fromkeys(re.split(", | and ", mark[1]), description.split(". ")[0] if last else description)
    return texts


def options(name: str, prefix: str = "") -> list[Row]:
    """All fields of a dataclass, those of inner ones included."""
    rows: list[Row] = []
    for field, (kind, default) in fields(name).items():
        if kind in _classes():
            rows += options(kind, f"{prefix}{field}.")
        else:
            rows.append((f"{prefix}{field}={default}", described(name).get(field, "")))
    return rows


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


def _data() -> list[Row]:
    """The choices of the data group, each with its options."""
    rows = []
    for path in sorted((config_folder() / "data").glob("*.yaml")):
        pairs = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
        options_given = [f"data.{p.replace(': ', '=')}" for p in pairs if ": " in p and not p.startswith("_")]
        rows.append((f"data={path.stem}", ", ".join(options_given)))
    return rows


def _defaults(config: str) -> dict[str, str]:
    """What the script's own config sets, at its top level."""
    text = (config_folder() / f"{config}.yaml").read_text()
    pairs = re.findall(r"^(?:  - )?(\w+): ([^\n#{]+?)\s*(?:#.*)?$", text, re.MULTILINE)
    return {key: _YAML.get(value, value) for key, value in pairs}


def page(name: str, command: Command) -> str:
    """The text of one command."""
    lines = [f"selfspec {name}: {command.what}", "", f"  selfspec {name} {command.example}"]
    lines += [f"  python {command.script} {command.example}   (the same, in a clone)", "", _HYDRA]
    set_here = _defaults(command.config)
    rows = [row for row in options(SCHEMAS[command.config]) if not (command.trains and row[0].startswith("drafter="))]
    pairs = [(*row[0].split("=", 1), row[1]) for row in rows]
    rows = [(f"{key}={set_here.get(key, value)}", description) for key, value, description in pairs]
    lines += ["", "Options and their defaults (???: has to be given)", *_lines(rows)]
    if any(row[0].startswith("data=") for row in rows):
        lines += ["", "data=NAME, and the options of each", *_lines(_data())]
    if command.trains:
        lines += ["", "drafter=KIND, and the options of each; or drafter._target_=package.module.Class"]
        for kind, config in drafter_configs().items():
            lines += ["", f" drafter={kind}", *_lines(options(config, "drafter."))]
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


def text(name: str) -> str:
    """The help of a command by its name."""
    return page(name, COMMANDS[name])
