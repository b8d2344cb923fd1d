"""Questions that a chat model asks itself, behind what its template puts before a question (arXiv 2406.08464)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.data.chat import Chat
from selfspec.data.chat_template import ChatTemplate

_MARKS = ("first question", "first answer", "second question")  # that a template is tried out with
_THOUGHT = "thought before the answer"
_LETTERS = 8  # that a question has at least
_GOLDEN, _SILVER = (5**0.5 - 1) / 2, 2**0.5 - 1  # their multiples spread sampled answers evenly


@dataclass(frozen=True)
class Template:
    """Token ids that a chat template puts before the first question, before an answer, and between an answer and the
    next question. once: whether it rewrites earlier answers, as Qwen3's drops thoughts, so that one turn alone can be
    written."""

    opening: list[int]
    answer: list[int]
    again: list[int]
    once: bool = False

    @classmethod
    def of(cls, template: ChatTemplate) -> Template:
        """Raises ValueError for a tokenizer without a chat template, or one that marks no turns."""
        roles, tokenizer = ("user", "assistant", "user"), template.tokenizer
        turns = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
        rest, parts = template.text(Chat(turns), "data=synthetic", True), list[list[int]]()
        for mark in (*_MARKS, None):
            before, _, rest = (rest, "", "") if mark is None else rest.partition(mark)
            parts.append(list(tokenizer(before, add_special_tokens=False)["input_ids"]))
        opening, first, again, answer = parts
        if not opening or not answer or not again:
            raise ValueError(
                "data=synthetic: the chat template marks no turns; take data=jsonl with conversations, or data=text "
                "with plain text"
            )
        turns[1] = {**turns[1], "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_MARKS[1]}"}
        kept = _THOUGHT in template.text(Chat(turns), "data=synthetic", True)
        return cls(opening, answer, again, first != answer or not kept)


def check_own_questions(openings: object, temperature: object) -> None:
    """Raises ValueError for what first questions can not begin with, and for no temperature of theirs."""
    whole = isinstance(openings, Sequence) and not isinstance(openings, str)  # Hydra has lists of its own
    if not whole or not openings or not all(isinstance(words, str) for words in openings):  # type: ignore[attr-defined]
        raise ValueError(f"data.openings={openings!r} must list texts; [''] for none")
    if not isinstance(temperature, (int, float)) or not 0 < temperature <= 2:
        raise ValueError(f"data.question_temperature={temperature!r} must lie above 0, at most 2")


def answer_temperature(number: int, sampled: float, openings: int = 1) -> float:
    """At which the answers of a conversation are written: a share `sampled` of them at 1, the others greedily. The
    conversations of each of so many openings, which take turns, are shared out alike."""
    turn, opening = divmod(number, openings)
    return float((turn * _GOLDEN + opening * _SILVER) % 1 < sampled)


def first_paragraph(tokenizer: Tokenizer) -> Callable[[list[int]], list[int] | None]:
    """`Rules.completed` of a question that ends behind a blank line, and leaves no colon and no code block open."""
    every = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    breaks = {token for token, text in enumerate(every) if text.endswith("\n")}

    def completed(question: list[int]) -> list[int] | None:
        if question[-1] not in breaks:
            return None
        text = str(tokenizer.decode(question))
        opens = text.rstrip().endswith(":") or text.count("```") % 2
        if not text.endswith("\n\n") or opens or not usable(question, tokenizer):
            return None
        last = every[question[-1]].rstrip("\n")  # the tokens before it were read already
        return question[:-1] + list(tokenizer(last, add_special_tokens=False)["input_ids"] if last else [])

    return completed


def usable(question: list[int], tokenizer: Tokenizer) -> bool:
    """Whether a question holds some letters, and no special token."""
    if any(token in tokenizer.all_special_ids for token in question):
        return False
    return sum(map(str.isalpha, tokenizer.decode(question))) >= _LETTERS
