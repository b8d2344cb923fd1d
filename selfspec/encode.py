"""Prompts as users give them, as token ids."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.data.chat import Chat
from selfspec.data.chat_template import ChatTemplate
from selfspec.utils.checks import integer
from selfspec.utils.errors import one_line

Ids = Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Record = Mapping[str, Any]  # with `messages` and what a chat template reads beside them: tools, documents, ...
Prompts = str | Ids | Messages | Record | Sequence[str] | Sequence[Ids] | Sequence[Messages] | Sequence[Record]


def encode(prompts: Prompts, tokenizer: Tokenizer | None, target: str) -> list[list[int]]:
    """Token ids of prompts: a text, a list of token ids or a conversation, which is one row, or a list of these. A
    conversation is a list of messages, or a record of `messages` and what a chat template reads beside them: `tools`,
    `documents`, `chat_template_kwargs`. target: its name, for messages.

    Raises ValueError for what is none of these, for an empty prompt, and for text without a tokenizer.
    """
    given: Any = prompts
    if hasattr(given, "tolist"):  # of NumPy or torch
        if given.ndim > 2:
            raise ValueError(f"prompts has {given.ndim} dimensions; give one row of token ids per prompt: [[...]]")
        given = given.tolist()
    if _is_record(given):
        given = [given]
    if isinstance(given, (bytes, bytearray, memoryview, Mapping, Set)) or not isinstance(given, Iterable):
        raise ValueError(
            f"prompts is of type {type(given).__name__}; give a text, a list of token ids or a conversation, or a "
            "list of these"
        )
    rows: list[Any] = [given] if isinstance(given, str) else list(given)
    one = not isinstance(given, str) and rows and (_is_number(rows[0]) or _is_message(rows[0]))
    made = [_encoded(i, prompt, tokenizer, target) for i, prompt in enumerate([rows] if one else rows)]
    pad = None if tokenizer is None or len(made) < 2 else tokenizer.pad_token_id
    if pad is not None and pad not in (tokenizer.eos_token_id, tokenizer.bos_token_id):  # type: ignore[union-attr]
        padded = [i for i, row in enumerate(made) if row and not isinstance(rows[i], str) and pad in (row[0], row[-1])]
        if padded:
            warnings.warn(
                f"prompt {padded[0]} begins or ends with the padding token {pad}, decoded like any other; give "
                "rows of token ids without padding, or use model.generate(..., custom_generate=spec) with a mask",
                stacklevel=4,
            )
    return made


def _is_number(value: object) -> bool:
    return isinstance(value, int) or (hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0)


def _is_record(value: object) -> bool:
    return isinstance(value, Mapping) and bool({"messages", "conversations"} & value.keys())


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and not _is_record(value)


def _encoded(i: int, prompt: Any, tokenizer: Tokenizer | None, target: str) -> list[int]:
    prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    talk = _is_record(prompt) or (listed and prompt and isinstance(prompt[0], Mapping))
    if prompt is None or (not talk and isinstance(prompt, (bytes, bytearray, memoryview, Mapping, Set, float, int))):
        raise ValueError(f"prompt {i} is {type(prompt).__name__}; give text or a list of token ids")
    if (talk or isinstance(prompt, str)) and tokenizer is None:
        what = "a conversation" if talk else "text"
        raise ValueError(f"prompt {i} is {what}, but target {target!r} has no tokenizer; give ids")
    if talk:
        assert tokenizer is not None
        chat = Chat.of(prompt if _is_record(prompt) else {"messages": list(prompt)}, f"prompt {i}")
        return ChatTemplate(tokenizer).opening(chat, f"prompt {i}")
    if isinstance(prompt, str):
        assert tokenizer is not None
        if not prompt:
            raise ValueError(f"prompt {i} is empty; give at least one character")
        if any(0xD800 <= ord(character) < 0xE000 for character in prompt):
            raise ValueError(f"prompt {i} holds a lone surrogate, which is no Unicode text; decode it as UTF-8")
        try:
            return list(tokenizer(prompt)["input_ids"])
        except Exception as error:  # of a tokenizer in another language
            raise ValueError(f"the tokenizer of {target!r} fails on prompt {i}: {one_line(error):.300}") from error
    return [integer(f"prompt {i}: token id", token) for token in prompt]
