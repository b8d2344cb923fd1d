"""Edits of longer code, as people ask them of a model: the answer repeats most of what it was given.

Every answer is checked by a parser: what was to stay has stayed, what was asked for is there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from random import Random

from selfspec.data.tasks.base import Make, Pool, Turn, fenced, parsed, same_code
from selfspec.data.tasks.short import csv_to_json, local_names

_OPERATORS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+"}


def rename(pool: Pool, rng: Random) -> list[Turn]:
    _, source = pool.function(rng, lambda _, source: bool(local_names(source)))
    old, (new,) = rng.choice(local_names(source)), pool.some(rng, 1, without=source)
    done = re.sub(rf"\b{old}\b", new, source)
    ask = f"Rename `{old}` to `{new}` everywhere in this code. Change nothing else, and give the whole code."
    return [Turn(f"{ask}\n\n{fenced('python', source)}", fenced("python", done), same_code(done))]


def types(pool: Pool, rng: Random) -> list[Turn]:
    name, source = pool.function(rng, lambda _, source: _is_untyped(_function(source)))
    node = _function(source)
    for arg in _named(node):
        arg.annotation = ast.Name("object")
    node.returns = ast.Name("object")
    ask = f"Add type hints to the parameters and the result of `{name}`. Change nothing else, and give the whole code."
    answer = fenced("python", ast.unparse(node))
    return [Turn(f"{ask}\n\n{fenced('python', source)}", answer, parsed(_typed(source), True))]


def document(pool: Pool, rng: Random) -> list[Turn]:
    name, source = pool.function(rng, lambda _, source: ast.get_docstring(_function(source)) is None)
    node = _function(source)
    node.body.insert(0, ast.Expr(ast.Constant("What it does.")))
    ask = f"Add a docstring to `{name}`. Change nothing else, and give the whole code."
    answer = fenced("python", ast.unparse(node))
    return [Turn(f"{ask}\n\n{fenced('python', source)}", answer, parsed(_described(source), True))]


def fix(pool: Pool, rng: Random) -> list[Turn]:
    _, source = pool.function(rng, lambda _, source: bool(_mistakes(source)) and "BUG" not in source)
    line, right, wrong = rng.choice(_mistakes(source))
    lines = source.splitlines()
    lines[line] = lines[line].replace(f" {right} ", f" {wrong} ", 1) + "  # BUG"
    ask = (
        f"The line marked BUG has `{wrong}` where `{right}` is meant. Fix it, remove the mark, and give the whole code."
    )
    broken = "\n".join(lines)
    return [Turn(f"{ask}\n\n{fenced('python', broken)}", fenced("python", source), same_code(source))]


def reformat(pool: Pool, rng: Random) -> list[Turn]:
    (turn,) = csv_to_json(pool, rng, rng.randint(6, 10))
    rows = turn.question.partition("\n")[2]
    return [replace(turn, question=f"Convert this CSV to a JSON list of objects, all values strings:\n\n{rows}")]


LINES, MOST = (8, 30), 900  # of a function that is edited; characters
EDITS: dict[str, tuple[Make, ...]] = {make.__name__: (make,) for make in (rename, types, document, fix, reformat)}


def _function(source: str) -> ast.FunctionDef:
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


def _named(node: ast.FunctionDef) -> list[ast.arg]:
    """The parameters that are given types."""
    of = node.args
    return [arg for arg in (*of.posonlyargs, *of.args, *of.kwonlyargs) if arg.arg not in ("self", "cls")]


def _is_untyped(node: ast.FunctionDef) -> bool:
    """Whether it has parameters to be typed, and no type yet."""
    args = [part for part in ast.walk(node) if isinstance(part, ast.arg)]
    return bool(_named(node)) and node.returns is None and all(arg.annotation is None for arg in args)


def _mistakes(source: str) -> list[tuple[int, str, str]]:
    """(line, what stands there, what would be wrong): one operator of a line that holds neither text nor a comment."""
    texts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant | ast.JoinedStr)]
    inside = {
        n for node in texts for n in range(node.lineno - 1, node.end_lineno or 0) if node.lineno != node.end_lineno
    }
    return [
        (i, right, wrong)
        for i, line in enumerate(source.splitlines())
        if i and i not in inside and not set("'\"#\\") & set(line)
        for right, wrong in _OPERATORS.items()
        if re.findall(r"[-+<>=!*/]+", line).count(right) == 1 and f" {right} " in line
    ]


def _typed(source: str) -> Callable[[str], bool]:
    """Whether an answer is this function, every parameter and the result with a type."""

    def parse(answer: str) -> bool:
        node = _found(answer, source)
        typed = all(arg.annotation is not None for arg in _named(node)) and node.returns is not None
        for arg in ast.walk(node):
            if isinstance(arg, ast.arg):
                arg.annotation = None
        node.returns = None
        return typed and ast.dump(node) == ast.dump(_function(source))

    return parse


def _described(source: str) -> Callable[[str], bool]:
    """Whether an answer is this function with a docstring."""

    def parse(answer: str) -> bool:
        node = _found(answer, source)
        described = bool(ast.get_docstring(node))
        del node.body[0]
        return described and ast.dump(node) == ast.dump(_function(source))

    return parse


def _found(answer: str, source: str) -> ast.FunctionDef:
    """The function of the same name in an answer, which may import types before it. Raises ValueError without one, and
    for more than that."""
    *before, node = ast.parse(answer).body or [ast.Pass()]
    name = _function(source).name
    if not isinstance(node, ast.FunctionDef) or node.name != name:
        raise ValueError(f"no function {name}")
    if not all(isinstance(part, ast.Import | ast.ImportFrom) for part in before):
        raise ValueError("more than the function")
    return node
