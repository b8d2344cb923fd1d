"""What a chat template puts around turns."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase as Tokenizer

_MARKS = ("first question", "first answer", "second question")  # that a template is tried out with


@dataclass(frozen=True)
class Template:
    """Token ids that a chat template puts before the first question, before an answer, and between an answer and the
    next question."""

    opening: list[int]
    answer: list[int]
    again: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Template:
        """Raises ValueError for a tokenizer without a chat template, or one that does not keep turns as they are."""
        instead = "take data=jsonl with conversations, or data=text with plain text"
        if not tokenizer.chat_template:
            raise ValueError(
                f"data=synthetic needs a chat model: {tokenizer.name_or_path!r} has no chat template; {instead}"
            )
        roles = ("user", "assistant", "user")
        turns = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
        try:
            text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
            parts, rest = [], text
            for mark in _MARKS:
                before, rest = rest.split(mark)
                parts.append(before)
        except Exception as error:  # a template is a program
            raise ValueError(
                f"data=synthetic: the chat template of {tokenizer.name_or_path!r} fails ({error})"
            ) from error
        opening, _, again = (list(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in parts)
        answer = list(tokenizer(rest, add_special_tokens=False)["input_ids"])
        if not opening or not answer or not again:
            raise ValueError(f"data=synthetic: the chat template marks no turns; {instead}")
        return cls(opening, answer, again)
