"""Instructions with one right answer, or with answers that can be checked: thousands of each task from a few words."""

from __future__ import annotations

from selfspec.data.tasks import short
from selfspec.data.tasks.base import Instruction, Make, Pool, Turn, pool
from selfspec.data.tasks.edits import EDITS, LINES, MOST

TASKS: dict[str, tuple[Make, ...]] = {
    "edit": (short.rename, short.add_parameter, short.add_docstring),
    "convert": (short.dict_to_json, short.json_to_yaml, short.csv_to_json),
    "extract": (short.look_up, short.list_signatures),
    "reason": (short.add_up, short.largest),
    "write": (short.dataclass, short.function, short.tests, short.records),
}

__all__ = ["EDITS", "LINES", "MOST", "TASKS", "Instruction", "Make", "Pool", "Turn", "pool"]
