"""Prompts as users give them, as token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.core.options import integer
from selfspec.data.chat import message, opening

Ids = Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Prompts = str | Ids | Messages | Sequence[str] | Sequence[Ids] | Sequence[Messages]


def encode(prompts: Prompts, tokenizer: Tokenizer | None, target: str) -> list[list[int]]:
    """Token ids of prompts: a text, a list of token ids or a conversation (a list of messages), which is one row, or a
    list of these. target: its name, for messages.

    Raises ValueError for what is none of these, for an empty prompt, and for text without a tokenizer.
    """
    given: Any = prompts
    if hasattr(given, "tolist"):  # of NumPy or torch
        if given.ndim > 2:
            raise ValueError(f"prompts has {given.ndim} dimensions; give one row of token ids per prompt: [[...]]")
        given = given.tolist()
    if isinstance(given, (bytes, bytearray, memoryview, Mapping, Set)) or not isinstance(given, Iterable):
        raise ValueError(
            f"prompts is a {type(given).__name__}; give a text, a list of token ids or a conversation, or a list of "
            "these"
        )
    rows: list[Any] = [given] if isinstance(given, str) else list(given)
    one = not isinstance(given, str) and rows and (_is_number(rows[0]) or isinstance(rows[0], Mapping))
    return [_encoded(i, prompt, tokenizer, target) for i, prompt in enumerate([rows] if one else rows)]


def _is_number(value: object) -> bool:
    return isinstance(value, int) or (hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0)


def _encoded(i: int, prompt: Any, tokenizer: Tokenizer | None, target: str) -> list[int]:
    prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if prompt is None or isinstance(prompt, (bytes, bytearray, memoryview, Mapping, Set, float, int)):
        raise ValueError(f"prompt {i} is {type(prompt).__name__}; give text or a list of token ids")
    talk = isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping)
    if (talk or isinstance(prompt, str)) and tokenizer is None:
        what = "a conversation" if talk else "text"
        raise ValueError(f"prompt {i} is {what}, but target {target!r} has no tokenizer; give ids")
    if talk:
        assert tokenizer is not None
        return opening([message(turn, f"prompt {i}") for turn in prompt], tokenizer, f"prompt {i}")
    if isinstance(prompt, str):
        assert tokenizer is not None
        if not prompt:
            raise ValueError(f"prompt {i} is empty; give at least one character")
        if any(0xD800 <= ord(character) < 0xE000 for character in prompt):
            raise ValueError(f"prompt {i} holds a lone surrogate, which is no Unicode text; decode it as UTF-8")
        return list(tokenizer(prompt)["input_ids"])
    return [integer(f"prompt {i}: token id", token) for token in prompt]
