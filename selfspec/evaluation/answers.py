"""Answer files in Spec-Bench's form (github.com/hemingkx/Spec-Bench), one per arm: what its evaluation/speed.py and
equal.py read."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfspec.api import Spec
from selfspec.data.questions import Question
from selfspec.evaluation.arm_record import Record
from selfspec.evaluation.metrics import by_arm
from selfspec.evaluation.points import OWN
from selfspec.utils.files import Figures, write_text


def answer_files(folder: Path, name: str, arms: Sequence[str]) -> dict[str, Path]:
    """The file of each arm, in folders that exist then: the speculative one's is `name`, relative to the run's folder,
    any other's has the arm's name behind the stem. Raises ValueError where one exists or can not be written."""
    path = folder / name
    if not name or name.endswith("/") or path.is_dir():
        raise ValueError(f"decode.answers={name!r} must name a file, such as answers.jsonl")
    names = {arm: path if arm == "speculative" else path.with_name(f"{path.stem}-{arm}{path.suffix}") for arm in arms}
    for file in names.values():
        if file.parent.resolve() == folder.resolve() and file.name in OWN:
            raise ValueError(f"decode.answers={name}: the run writes its own {file.name}; choose another name")
        if file.exists():
            raise ValueError(f"decode.answers: {file} exists; choose another file, or delete it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(f"{path.parent} can not be written to")
    except OSError as error:
        raise ValueError(f"decode.answers={name}: {error}; choose another folder") from error
    return names


def check_ids(questions: Sequence[Question]) -> None:
    """Raises ValueError for two questions of one id, which an answer file can not tell apart."""
    ids = [_id(question) for question in questions]
    if twice := next((name for name in ids if ids.count(name) > 1), None):
        raise ValueError(
            f"decode.answers: two questions have the id {twice!r}; give each line a question_id of its own"
        )


def _id(question: Question) -> Any:
    return (question.record or {}).get("question_id", question.id)


def write_answers(
    files: dict[str, Path], questions: Sequence[Question], records: list[Record], spec: Spec, model_id: str
) -> None:
    """One line per question with all its turns, in the order of the questions, into the file of each arm. Questions of
    which a turn was not asked are left out. Every record holds one row."""
    for arm, rows in by_arm(records).items():
        by_question = {record.questions[0]: record for record in rows}
        lines = []
        for question in questions:
            turns = [by_question.get((question.id, turn)) for turn in range(max(1, len(question.turns)))]
            answered = [turn for turn in turns if turn is not None]
            if len(answered) == len(turns):
                lines.append(json.dumps(_line(question, answered, spec, f"{model_id}-{arm}")) + "\n")
        write_text(files[arm], "".join(lines))


def _line(question: Question, turns: list[Record], spec: Spec, model_id: str) -> Figures:
    lengths = [turn.stats.lengths if turn.stats is not None else [1] * turn.tokens for turn in turns]
    choice = {
        "index": 0,
        "turns": [str(spec.tokenizer.decode(t.token_ids[0], skip_special_tokens=True)) for t in turns],  # type: ignore[union-attr]
        "decoding_steps": [len(passes) for passes in lengths],
        "new_tokens": [turn.tokens for turn in turns],
        "wall_time": [turn.seconds for turn in turns],
        "accept_lengths": [length for passes in lengths for length in passes],
    }
    return {
        "question_id": _id(question),
        "category": question.group,
        "answer_id": f"{zlib.crc32(f'{model_id} {question.id}'.encode()):08x}",
        "model_id": model_id,
        "choices": [choice],
        "tstamp": time.time(),
    }
