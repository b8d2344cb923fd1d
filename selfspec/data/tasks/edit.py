"""Instructions that edit code: real functions of the split's files."""

from __future__ import annotations

import ast
import re
from random import Random

from selfspec.data.tasks.base import RESERVED, Pool, Turn, fenced, same_code

_PLAIN = re.compile(r"def \w+\([\w, ]*\):\n")  # a header without defaults, stars and annotations


def rename(pool: Pool, rng: Random) -> list[Turn]:
    _, source = pool.function(rng, lambda _, source: bool(local_names(source)))
    old, (new, newer) = rng.choice(local_names(source)), pool.some(rng, 2, without=source)
    first = re.sub(rf"\b{old}\b", new, source)
    ask = rng.choice(
        [
            f"Rename `{old}` to `{new}` in this function:",
            f"Please rename the variable `{old}` to `{new}`:",
            f"In the code below, `{old}` should be called `{new}`.",
        ]
    )
    turns = [Turn(f"{ask}\n{fenced('python', source)}", fenced("python", first), same_code(first))]
    if rng.random() < 0.25:
        second = re.sub(rf"\b{new}\b", newer, first)
        turns.append(Turn(f"Now rename `{new}` to `{newer}`.", fenced("python", second), same_code(second)))
    return turns


def local_names(source: str) -> list[str]:
    """Names that are parameters or variables wherever they stand."""
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Name | ast.arg)]
    counts: dict[str, int] = {}
    for node in nodes:
        name = node.id if isinstance(node, ast.Name) else node.arg
        counts[name] = counts.get(name, 0) + 1
    return [
        name
        for name, count in counts.items()
        if count > 1 and name not in RESERVED and len(re.findall(rf"\b{name}\b", source)) == count
    ]


def add_parameter(pool: Pool, rng: Random) -> list[Turn]:
    name, source = pool.function(rng, lambda _, source: bool(_PLAIN.match(source)))
    header, _, body = source.partition("\n")
    (new,), default = pool.some(rng, 1, without=source), rng.choice(["None", "False", "True", "0", "1", "''", "()"])
    inside = header[:-2].rstrip(", ")
    done = f"{inside}{'' if inside.endswith('(') else ', '}{new}={default}):\n{body}"
    ask = rng.choice(
        [
            f"Add a parameter `{new}` with the default `{default}` to `{name}`:",
            f"Give this function a last parameter `{new}={default}`:",
        ]
    )
    return [Turn(f"{ask}\n{fenced('python', source)}", fenced("python", done), same_code(done))]


def add_docstring(pool: Pool, rng: Random) -> list[Turn]:
    _, source = pool.function(rng, lambda _, source: not ast.get_docstring(ast.parse(source).body[0]))  # type: ignore[arg-type]
    header, _, body = source.partition("\n")
    verb, first, second = rng.choice(["Return", "Check", "Set", "Read", "Write", "Build"]), *pool.some(rng, 2)
    text = f"{verb} the {first} of the {second}."
    indent = body[: len(body) - len(body.lstrip())]
    done = f'{header}\n{indent}"""{text}"""\n{body}'
    ask = rng.choice([f'Add the docstring "{text}" to this function:', f'Document this function with "{text}":'])
    return [Turn(f"{ask}\n{fenced('python', source)}", fenced("python", done), same_code(done))]
