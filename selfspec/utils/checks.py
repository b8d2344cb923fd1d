"""What values of a config or a call may be. Functions of a config raise ValueError for the first named field whose
value is not allowed; None is allowed where it is the default."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from dataclasses import fields
from typing import Any


def integer(name: str, value: object) -> int:
    """An int from anything that is exactly one (NumPy's and torch's scalars too). Raises ValueError."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise ValueError(f"{name}={value!r} must be an integer")


def at_least(config: object, place: str, least: int, *names: str, most: float = math.inf) -> None:
    """Finite numbers of at least `least` (and at most `most`), or lists of such."""
    for name, value in _named(config, names):
        listed = isinstance(value, (list, tuple))
        for number in value if listed else (value,):
            if not _is_number(number) or not least <= number <= most or math.isinf(number):
                said = f"{place}.{name} holds {number!r}; it" if listed else f"{place}.{name}={number!r}"
                limit = f", at most {most}" if most < math.inf else ", finite" if isinstance(number, float) else ""
                raise ValueError(f"{said} must be at least {least}{limit}")


def above_zero(config: object, place: str, *names: str) -> None:
    """Finite numbers above 0."""
    for name, value in _named(config, names):
        if not _is_number(value) or not 0 < value < math.inf:
            raise ValueError(f"{place}.{name}={value!r} must be above 0, finite")


def shares(config: object, place: str, *names: str, ends: str = "[]") -> None:
    """Numbers from 0 to 1. ends: whether 0 and 1 belong to them, as brackets: [] both, [) 0 alone, () neither."""
    for name, value in _named(config, names):
        low = _is_number(value) and (value >= 0 if ends[0] == "[" else value > 0)
        if not low or not (value <= 1 if ends[1] == "]" else value < 1):
            raise ValueError(f"{place}.{name}={value!r} must lie in {ends[0]}0, 1{ends[1]}")


def not_empty(config: object, place: str, *names: str, give: str = "give at least one") -> None:
    """Lists or texts with something in them."""
    for name, value in _named(config, names):
        if not value:
            raise ValueError(f"{place}.{name} is empty; {give}")


def all_known(config: object, place: str, **known: Collection[str]) -> None:
    """Lists whose entries are known ones."""
    for name, names in known.items():
        if unknown := sorted(set(getattr(config, name)) - set(names)):
            raise ValueError(f"{place}.{name} holds {unknown}; known are {', '.join(names)}")


def _named(config: object, names: tuple[str, ...]) -> list[tuple[str, Any]]:
    optional = {part.name for part in fields(config) if part.default is None}  # type: ignore[arg-type]
    pairs = [(name, getattr(config, name)) for name in names]
    return [(name, value) for name, value in pairs if value is not None or name not in optional]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
