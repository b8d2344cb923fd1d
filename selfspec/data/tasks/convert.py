"""Instructions that convert data from one notation to another."""

from __future__ import annotations

import json
from contextlib import suppress
from random import Random
from typing import Any

import yaml

from selfspec.data.tasks.base import Pool, Turn, fenced, parsed


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


def _records(pool: Pool, rng: Random, count: int | None) -> tuple[list[str], list[list[str]]]:
    """(names of columns, rows of words and numbers)"""
    columns = pool.some(rng, rng.randint(2, 3))
    numeric = [rng.random() < 0.4 for _ in columns]
    rows = [
        [str(rng.randint(0, 99)) if number else pool.some(rng, 1)[0] for number in numeric]
        for _ in range(count or rng.randint(2, 4))
    ]
    return columns, rows


def csv_to_json(pool: Pool, rng: Random, count: int | None = None) -> list[Turn]:
    """count: rows (None: a few)."""
    columns, rows = _records(pool, rng, count)
    source = "\n".join(",".join(row) for row in [columns, *rows])
    value = [dict(zip(columns, row, strict=True)) for row in rows]
    text = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n]"
    ask = rng.choice(["Convert this CSV to a JSON list of objects:", "Give these rows as JSON, all values strings:"])
    return [Turn(f"{ask}\n{fenced('csv', source)}", fenced("json", text), parsed(json.loads, value))]
