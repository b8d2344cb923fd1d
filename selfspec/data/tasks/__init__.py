"""Instructions with one right answer, or with answers that can be checked: thousands of each task from a few words."""

from __future__ import annotations

from selfspec.data.tasks import convert, edit, extract, reason, write
from selfspec.data.tasks.base import Instruction, Make, Pool, Turn, pool
from selfspec.data.tasks.edits import EDITS, LINES, MOST

TASKS: dict[str, tuple[Make, ...]] = {
    "edit": (edit.rename, edit.add_parameter, edit.add_docstring),
    "convert": (convert.dict_to_json, convert.json_to_yaml, convert.csv_to_json),
    "extract": (extract.look_up, extract.list_signatures),
    "reason": (reason.add_up, reason.largest),
    "write": (write.dataclass, write.function, write.tests, write.records),
}

__all__ = ["EDITS", "LINES", "MOST", "TASKS", "Instruction", "Make", "Pool", "Turn", "pool"]
