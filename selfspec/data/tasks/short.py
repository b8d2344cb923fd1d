"""Short tasks: an edit, a conversion, something to look up, a few steps, code from a description."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from contextlib import suppress
from random import Random
from typing import Any

import yaml

from selfspec.data.tasks.base import RESERVED, Pool, Turn, code_of, concludes, exactly, fenced, parsed, same_code

# -- edits of functions: real ones of the split's files

_PLAIN = re.compile(r"def \w+\([\w, ]*\):\n")  # a header without defaults, stars and annotations


def rename(pool: Pool, rng: Random) -> list[Turn]:
    _, source = pool.function(rng, lambda _, source: bool(local_names(source)))
    old, (new, newer) = rng.choice(local_names(source)), pool.some(rng, 2, without=source)
    first = re.sub(rf"\b{old}\b", new, source)
    asks = f"Rename `{old}` to `{new}` in this function:", f"Please rename the variable `{old}` to `{new}`:"
    ask = rng.choice([*asks, f"In the code below, `{old}` should be called `{new}`."])
    turns = [Turn(f"{ask}\n{fenced('python', source)}", fenced("python", first), same_code(first))]
    if rng.random() < 0.25:
        second = re.sub(rf"\b{new}\b", newer, first)
        turns.append(Turn(f"Now rename `{new}` to `{newer}`.", fenced("python", second), same_code(second)))
    return turns


def local_names(source: str) -> list[str]:
    """Names that are parameters or variables wherever they stand."""
    nodes = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Name | ast.arg))
    counts = Counter(node.id if isinstance(node, ast.Name) else node.arg for node in nodes)
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


# -- conversions from one notation to another


def _value(pool: Pool, rng: Random) -> Any:
    turn = rng.randrange(6)
    if turn < 2:
        return pool.some(rng, 1)[0]
    if turn == 2:
        return " ".join(pool.some(rng, 2))
    if turn == 3:
        return rng.choice([True, False, None])
    return rng.randint(0, 999)


def _nested(pool: Pool, rng: Random) -> dict[str, Any]:
    """Three to five keys, of which one may hold a list or a mapping."""
    keys = pool.some(rng, rng.randint(3, 5))
    found: dict[str, Any] = {key: _value(pool, rng) for key in keys}
    if rng.random() < 0.5:
        inner = pool.some(rng, rng.randint(2, 3))
        found[keys[-1]] = inner if rng.random() < 0.5 else {key: _value(pool, rng) for key in inner}
    return found


def dict_to_json(pool: Pool, rng: Random) -> list[Turn]:
    value = _nested(pool, rng)
    ask = rng.choice(["Convert this Python dictionary to JSON:", "Write this dict as JSON with two spaces of indent:"])
    text = json.dumps(value, indent=2)
    return [Turn(f"{ask}\n{fenced('python', repr(value))}", fenced("json", text), parsed(json.loads, value))]


def json_to_yaml(pool: Pool, rng: Random) -> list[Turn]:
    value = _nested(pool, rng)
    ask = rng.choice(["Convert this JSON to YAML:", "Write this as YAML:"])
    text = yaml.safe_dump(value, sort_keys=False).rstrip()
    return [Turn(f"{ask}\n{fenced('json', json.dumps(value))}", fenced("yaml", text), parsed(_load_yaml, value))]


def _load_yaml(text: str) -> Any:
    value = None
    with suppress(ValueError):
        value = json.loads(text)
    if value is not None:  # JSON is YAML too
        raise ValueError("it is JSON as it was")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def csv_to_json(pool: Pool, rng: Random, count: int | None = None) -> list[Turn]:
    """count: rows (None: a few)."""
    columns = pool.some(rng, rng.randint(2, 3))
    numeric = [rng.random() < 0.4 for _ in columns]
    rows = [
        [str(rng.randint(0, 99)) if number else pool.some(rng, 1)[0] for number in numeric]
        for _ in range(count or rng.randint(2, 4))
    ]
    source = "\n".join(",".join(row) for row in [columns, *rows])
    value = [dict(zip(columns, row, strict=True)) for row in rows]
    text = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n]"
    ask = rng.choice(["Convert this CSV to a JSON list of objects:", "Give these rows as JSON, all values strings:"])
    return [Turn(f"{ask}\n{fenced('csv', source)}", fenced("json", text), parsed(json.loads, value))]


# -- looking something up, picking something out


def look_up(pool: Pool, rng: Random) -> list[Turn]:
    count = rng.randint(4, 7)
    what, *words = pool.some(rng, 1 + 2 * count)
    names = words[:count]
    values = [str(rng.randint(1, 999)) if rng.random() < 0.5 else word for word in words[count:]]
    listed = "\n".join(f"- {name}: {value}" for name, value in zip(names, values, strict=True))
    asked = rng.sample(range(len(names)), rng.choice([1, 2, 2, 3]))
    turns: list[Turn] = []
    for i in asked:
        ask = f"What is the {what} of {names[i]}?" if not turns else f"And the {what} of {names[i]}?"
        if not turns:
            ask = f"Here is a list of each {what}:\n{listed}\n{ask}"
        answer = f"The {what} of {names[i]} is {values[i]}."
        turns.append(Turn(ask, answer, concludes(values[i], asked=listed)))
    return turns


def list_signatures(pool: Pool, rng: Random) -> list[Turn]:
    functions = rng.sample(pool.functions, 2)
    lines = []
    for name, source in functions:
        given = ast.parse(source).body[0].args  # type: ignore[attr-defined]
        arguments = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
        lines.append(f"- {name}: {', '.join(a.arg for a in arguments if a) or 'none'}")
    ask = rng.choice(
        ["List the functions below with their parameters:", "Which functions are these, and what do they take?"]
    )
    code = "\n\n".join(source for _, source in functions)
    return [Turn(f"{ask}\n{fenced('python', code)}", "\n".join(lines), exactly("\n".join(lines)))]


# -- several steps, which the answer shows


def _listed(names: list[str], numbers: list[int]) -> str:
    return "\n".join(f"- {name}: {number}" for name, number in zip(names, numbers, strict=True))


def add_up(pool: Pool, rng: Random) -> list[Turn]:
    names = pool.some(rng, rng.randint(3, 5))
    numbers = [rng.randint(1, 20) for _ in names]
    total, steps = 0, []
    for name, number in zip(names, numbers, strict=True):
        steps.append(f"{name}: {total} + {number} = {total + number}")
        total += number
    last = f"The sum is {total}."
    ask = rng.choice(["Add these up, step by step:", "What is the sum of these? Work it out step by step."])
    return [Turn(f"{ask}\n{_listed(names, numbers)}", "\n".join([*steps, last]), concludes(total))]


def largest(pool: Pool, rng: Random) -> list[Turn]:
    names = pool.some(rng, rng.randint(3, 6))
    numbers = rng.sample(range(1, 100), len(names))
    best, steps = 0, []
    for i, (name, number) in enumerate(zip(names, numbers, strict=True)):
        if number > numbers[best]:
            best = i
        steps.append(f"{name}: {number}, largest so far {names[best]} with {numbers[best]}")
    last = f"The largest is {names[best]} with {numbers[best]}."
    ask = rng.choice(["Which of these is the largest? Go through them one by one.", "Find the largest, step by step:"])
    listed = _listed(names, numbers)
    check = concludes(names[best], numbers[best], asked=listed)
    return [Turn(f"{ask}\n{listed}", "\n".join([*steps, last]), check)]


# -- code from a description, and records that are free but for their form

_TYPES = {"str": ('""', "str"), "int": ("0", "int"), "float": ("0.0", "float"), "bool": ("False", "bool")}
_FUNCTIONS = [  # what it returns in words, and in Python
    ("their sum", "{a} + {b}"),
    ("their product", "{a} * {b}"),
    ("the difference of {a} and {b}", "{a} - {b}"),
    ("the larger of the two", "max({a}, {b})"),
    ("the smaller of the two", "min({a}, {b})"),
    ("both as a tuple", "({a}, {b})"),
    ("both as a list", "[{a}, {b}]"),
    ("whether they are equal", "{a} == {b}"),
    ("{a} repeated {b} times as a list", "[{a}] * {b}"),
    ("{a} under the key {b} of a dict", "{{{b}: {a}}}"),
]


def dataclass(pool: Pool, rng: Random) -> list[Turn]:
    name = "".join(word.capitalize() for word in pool.some(rng, rng.randint(1, 2)))
    fields = pool.some(rng, rng.randint(2, 4))
    types = [rng.choice(list(_TYPES)) for _ in fields]
    defaults = rng.random() < 0.5
    described = ", ".join(f"{f} ({t})" for f, t in zip(fields, types, strict=True))
    lines = [f"    {f}: {t}" + (f" = {_TYPES[t][0]}" if defaults else "") for f, t in zip(fields, types, strict=True)]
    code = "\n".join(["from dataclasses import dataclass", "", "", "@dataclass", f"class {name}:", *lines])
    ask = f"Write a dataclass `{name}` with the fields {described}" + (
        ", each with an empty default." if defaults else "."
    )
    return [Turn(ask, fenced("python", code), same_code(code))]


def function(pool: Pool, rng: Random) -> list[Turn]:
    a, b = pool.some(rng, 2)
    name = "_".join(pool.some(rng, 2))
    words, code = rng.choice(_FUNCTIONS)
    words, code = words.format(a=a, b=b), code.format(a=a, b=b)
    text = f'def {name}({a}, {b}):\n    """Return {words}."""\n    return {code}'
    ask = rng.choice(
        [
            f"Write a function `{name}` that takes {a} and {b} and returns {words}.",
            f"Please write `{name}({a}, {b})`. It returns {words}.",
        ]
    )
    return [Turn(ask, fenced("python", text), same_code(text, documented=False))]


def tests(pool: Pool, rng: Random) -> list[Turn]:
    name = "_".join(pool.some(rng, rng.randint(1, 2)))
    cases = []
    for _ in range(rng.randint(2, 4)):
        given = repr(pool.some(rng, 1)[0]) if rng.random() < 0.5 else str(rng.randint(0, 99))
        cases.append((given, str(rng.randint(0, 99)) if rng.random() < 0.5 else repr(pool.some(rng, 1)[0])))
    listed = "\n".join(f"- {given} gives {wanted}" for given, wanted in cases)
    code = "\n".join([f"def test_{name}():", *(f"    assert {name}({g}) == {w}" for g, w in cases)])
    ask = rng.choice([f"Write a test of `{name}` for these cases:", f"Write `test_{name}` with these cases:"])
    return [Turn(f"{ask}\n{listed}", fenced("python", code), same_code(code))]


def records(pool: Pool, rng: Random) -> list[Turn]:
    """Free but for its form: the values are the answer's own."""
    what, *keys = pool.some(rng, rng.randint(3, 4))
    numeric = [rng.random() < 0.4 for _ in keys]
    many = rng.randint(2, 3)
    described = ", ".join(f"{key} (a {'number' if n else 'word'})" for key, n in zip(keys, numeric, strict=True))
    rows = [
        {key: rng.randint(0, 99) if n else pool.some(rng, 1)[0] for key, n in zip(keys, numeric, strict=True)}
        for _ in range(many)
    ]

    def check(answer: str) -> bool:
        try:
            found = [json.loads(line) for line in code_of(answer).splitlines()]
        except (ValueError, RecursionError):
            return False
        return len(found) == many and all(
            isinstance(row, dict)
            and list(row) == keys
            and all(type(v) in ((int, float) if n else (str,)) for v, n in zip(row.values(), numeric, strict=True))
            for row in found
        )

    ask = rng.choice([f"Make up {many} examples of {what}", f"Write {many} sample records for {what}"])
    return [Turn(f"{ask} as JSON lines with {described}.", fenced("json", "\n".join(map(json.dumps, rows))), check)]
