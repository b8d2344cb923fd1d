"""Instructions that write code from a description, and records that are free but for their form."""

from __future__ import annotations

import json
from random import Random

from selfspec.data.tasks.base import Pool, Turn, code_of, fenced, same_code

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


def _class_name(words: list[str]) -> str:
    return "".join(word.capitalize() for word in words)


def dataclass(pool: Pool, rng: Random) -> list[Turn]:
    name, fields = _class_name(pool.some(rng, rng.randint(1, 2))), pool.some(rng, rng.randint(2, 4))
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
        except ValueError:
            return False
        return len(found) == many and all(
            isinstance(row, dict)
            and list(row) == keys
            and all(type(v) in ((int, float) if n else (str,)) for v, n in zip(row.values(), numeric, strict=True))
            for row in found
        )

    ask = rng.choice([f"Make up {many} examples of {what}", f"Write {many} sample records for {what}"])
    return [Turn(f"{ask} as JSON lines with {described}.", fenced("json", "\n".join(map(json.dumps, rows))), check)]
