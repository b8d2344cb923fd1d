"""From questions to prompts: a conversation's later turns stand behind the target's own answers to the earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tqdm.auto import tqdm

from selfspec.api import Spec
from selfspec.data.questions import Question
from selfspec.log import Figures


@dataclass(frozen=True)
class Prompt:
    """One turn of a question: everything before its answer. seed: of the answer; check: whether an answer is right
    (None: nobody knows)."""

    ids: list[int]
    seed: int = 0
    group: str = "all"
    question: str = ""
    turn: int = 0
    check: Callable[[str], bool] | None = None


def prompts_of(
    spec: Spec, questions: Sequence[Question], arguments: Figures, seed: int
) -> tuple[list[Prompt], list[str]]:
    """Every turn of every question as a prompt with a seed of its own, and the turns that were left out since they fill
    the target's context, each with its length. The answers to earlier turns are those of plain decoding with these
    arguments. Raises ValueError where all were left out."""
    assert spec.tokenizer is not None
    prompts: list[Prompt] = []
    skipped: list[str] = []
    bar = tqdm(questions, desc="questions", mininterval=1.0, disable=all(len(q.turns) < 2 for q in questions))
    for question in bar:
        answers: list[str] = []
        for turn in range(max(1, len(question.turns))):
            ids = question.opening(turn, answers, spec.tokenizer)
            if spec.target.max_positions is not None and len(ids) >= spec.target.max_positions:
                skipped.append(f"{question.id}, turn {turn + 1} ({len(ids)} tokens)")
                break
            check = question.checks[turn] if question.checks else None
            prompts.append(Prompt(ids, seed + len(prompts), question.group, question.id, turn, check))
            if turn + 1 < len(question.turns):
                own = spec.autoregressive([ids], **arguments, seed=[prompts[-1].seed])
                answers.append(own.texts[0])
    if not prompts:
        raise ValueError(f"no usable example: all questions fill the target's {spec.target.max_positions} positions")
    return prompts, skipped
