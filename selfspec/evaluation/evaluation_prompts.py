"""From questions to prompts: a conversation's later turns stand behind the target's own answers to the earlier ones."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.api import Spec
from selfspec.data.questions import Question
from selfspec.detokenize import text_of
from selfspec.utils.files import Figures
from selfspec.utils.progress import progress


@dataclass(frozen=True)
class Prompt:
    """One turn of a question: everything before its answer. seed: of the answer; check: whether an answer is right
    (None where it can not be checked); turn_text: what the turn says, without the chat template."""

    ids: list[int]
    seed: int = 0
    group: str = "all"
    question: str = ""
    turn: int = 0
    check: Callable[[str], bool] | None = None
    turn_text: str | None = None

    @property
    def text(self) -> int:
        """crc32 of its ids and seed, by which a text that changed is noticed."""
        return zlib.crc32(f"{self.seed} {self.ids}".encode())

    def right(self, tokenizer: Tokenizer | None, answer: list[int]) -> bool | None:
        """Whether an answer is right, None where that can not be checked."""
        if self.check is None or tokenizer is None:
            return None
        said = text_of(tokenizer, answer)
        if self.turn_text is None:  # it continues a text; alone, some tokenizers drop the space that it begins with
            before, whole = (text_of(tokenizer, ids) for ids in (self.ids, self.ids + answer))
            said = whole[len(before) :] if whole.startswith(before) else said
        return self.check(said)


def prompts_of(
    spec: Spec, questions: Sequence[Question], arguments: Figures, seed: int
) -> tuple[list[Prompt], list[str]]:
    """Every turn of every question as a prompt, and the turns that were left out since they or one before fill the
    target's context. The seed of a prompt depends on `seed`, its question and its turn alone. The answers to earlier
    turns are those of plain decoding with these arguments. Raises ValueError where all were left out."""
    assert spec.tokenizer is not None
    prompts: list[Prompt] = []
    skipped: list[str] = []
    bar = progress(questions, desc="questions", disable=all(len(q.turns) < 2 for q in questions))
    for question in bar:
        answers: list[str] = []
        turns = max(1, len(question.turns))
        for turn in range(turns):
            ids = question.opening(turn, answers, spec.tokenizer)
            if spec.target.max_positions is not None and len(ids) >= spec.target.max_positions:
                skipped += [f"{question.id}, turn {t + 1} ({len(ids)} tokens)" for t in range(turn, turns)]
                break
            prompt_seed = zlib.crc32(f"{seed} {question.group} {question.id} {turn}".encode())
            check = question.checks[turn] if question.checks else None
            turn_text = question.turns[turn] if question.turns else None
            prompts.append(Prompt(ids, prompt_seed, question.group, question.id, turn, check, turn_text))
            if turn + 1 < turns:
                answers.append(spec.autoregressive([ids], **arguments, seed=[prompt_seed]).texts[0])
    if not prompts:
        raise ValueError(f"no usable example: all questions fill the target's {spec.target.max_positions} positions")
    return prompts, skipped
