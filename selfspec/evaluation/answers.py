"""Answer files in Spec-Bench's form (github.com/hemingkx/Spec-Bench), one per arm: what its evaluation/speed.py and
equal.py read."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from selfspec.api import Spec
from selfspec.data.questions import Question
from selfspec.evaluation.metrics import by_arm
from selfspec.evaluation.records import Record
from selfspec.log import Figures, write_text


def answer_files(path: Path, arms: Sequence[str]) -> dict[str, Path]:
    """The file of each arm: the speculative one's is `path`, any other's has the arm's name behind the stem. Raises
    ValueError where one exists."""
    names = {arm: path if arm == "speculative" else path.with_name(f"{path.stem}-{arm}{path.suffix}") for arm in arms}
    for file in names.values():
        if file.exists():
            raise ValueError(f"decode.answers: {file} exists; choose another file, or delete it")
    return names


def write_answers(
    files: dict[str, Path], questions: Sequence[Question], records: list[Record], spec: Spec, model_id: str
) -> None:
    """One line per question with all its turns, in the order of the questions, into the file of each arm. Questions of
    which a turn was not asked are left out. Every record holds one row."""
    for arm, rows in by_arm(records).items():
        found = {record.questions[0]: record for record in rows}
        lines = []
        for question in questions:
            turns = [found.get((question.id, turn)) for turn in range(max(1, len(question.turns)))]
            own = [turn for turn in turns if turn is not None]
            if len(own) == len(turns):
                lines.append(json.dumps(_line(question, own, spec, f"{model_id}-{arm}")) + "\n")
        files[arm].parent.mkdir(parents=True, exist_ok=True)
        write_text(files[arm], "".join(lines))


def _line(question: Question, turns: list[Record], spec: Spec, model_id: str) -> Figures:
    record = question.record or {}
    lengths = [turn.stats.lengths if turn.stats is not None else [1] * turn.tokens for turn in turns]
    choice = {
        "index": 0,
        "turns": [str(spec.tokenizer.decode(t.token_ids[0], skip_special_tokens=True)) for t in turns],  # type: ignore[union-attr]
        "decoding_steps": [len(own) for own in lengths],
        "new_tokens": [turn.tokens for turn in turns],
        "wall_time": [turn.seconds for turn in turns],
        "accept_lengths": [length for own in lengths for length in own],
    }
    return {
        "question_id": record.get("question_id", question.id),
        "category": question.group,
        "answer_id": f"{zlib.crc32(f'{model_id} {question.id}'.encode()):08x}",
        "model_id": model_id,
        "choices": [choice],
        "tstamp": time.time(),
    }
