"""Conversations: the chat template of the embedded target, and what of a templated conversation the assistant says."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

END = "<|end|>"
ROLES = ("system", "user", "assistant")
# Every turn is its role, its words and an end token. The generation tags tell transformers what the assistant says.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '" + END + "' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '" + END + "' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ROLE_NAMES = {"system", "developer", "user", "assistant", "tool", "function", "function_call", "observation"}
ROLE_NAMES |= {"ipython", "environment", "context"}  # of templates
_NAMES = {"human": "user"} | dict.fromkeys(("gpt", "model", "chatgpt", "bing", "bard"), "assistant")


def message(turn: Any, place: str) -> dict[str, str]:
    """A turn as `role` and `content`, from those or from ShareGPT's `from` and `value`. Raises ValueError that names
    the place."""
    if isinstance(turn, dict):
        role, content = (
            next((turn[name] for name in names if turn.get(name) is not None), None)  # tables hold None for no field
            for names in (("role", "from"), ("content", "value"))
        )
        if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
            content = "".join(str(part["text"]) for part in content)  # OpenAI's content parts
        if isinstance(role, str) and isinstance(content, str):
            if any(0xD800 <= ord(character) < 0xE000 for character in content):
                raise ValueError(f"{place} holds a lone surrogate, which is no Unicode text; decode it as UTF-8")
            name = _NAMES.get(role.lower(), role.lower())
            if name not in ROLE_NAMES:
                near = difflib.get_close_matches(name, [*ROLE_NAMES, *_NAMES], 1, 0.75)
                hint = f"did you mean {near[0]!r}" if near else "use system, user, assistant or tool"
                raise ValueError(f"{place}: the role {role!r} is unknown; {hint}")
            return {"role": name, "content": content}
    raise ValueError(
        f"{place}: a turn needs `role` and `content` (or `from` and `value`) as strings, found {turn!r:.80}"
    )


def opening(messages: Sequence[dict[str, str]], tokenizer: Tokenizer, place: str) -> list[int]:
    """Token ids of a conversation up to where the next answer begins. Raises ValueError, with the place, where the
    tokenizer has no chat template."""
    return list(tokenizer(_templated(messages, tokenizer, place, True), add_special_tokens=False)["input_ids"])


def spans(messages: Sequence[dict[str, str]], tokenizer: Tokenizer, place: str) -> tuple[tuple[str, bool], ...]:
    """The conversation through the tokenizer's chat template, cut into (text, counts in the loss): what the assistant
    says counts, by the template's generation tags where it has them; otherwise its words where they stand in the text,
    and the EOS token behind them. Raises ValueError, with the place, where the tokenizer has no template, or the
    template refuses the conversation."""
    return tuple(_spans(messages, tokenizer, place))


def _templated(messages: Sequence[dict[str, str]], tokenizer: Tokenizer, place: str, answer: bool) -> str:
    _has_template(tokenizer, place)
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer))
    except Exception as error:  # a template is a program
        raise ValueError(f"{place}: the chat template refuses it ({error})") from error


def _tagged(messages: Sequence[dict[str, str]], tokenizer: Tokenizer, place: str) -> Iterator[tuple[str, bool]]:
    """Spans by the template's own generation tags."""
    special_tokens: Any = tokenizer.special_tokens_map
    try:
        rendered: Any = render_jinja_template(
            [list(messages)],
            chat_template=tokenizer.get_chat_template(),
            return_assistant_tokens_mask=True,
            **special_tokens,
        )
    except Exception as error:  # a template is a program
        raise ValueError(f"{place}: the chat template refuses it ({error})") from error
    text, tagged, done = rendered[0][0], rendered[1][0], 0
    for start, end in tagged:
        if start > done:
            yield text[done:start], False
        if end > start:
            yield text[start:end], True
        done = end
    if text[done:]:
        yield text[done:], False


def _has_template(tokenizer: Tokenizer, place: str) -> None:
    if not tokenizer.chat_template:
        raise ValueError(
            f"{place}: a conversation needs a chat template, and tokenizer {tokenizer.name_or_path!r} has none; use a "
            "chat model's tokenizer, or plain text"
        )


def _spans(messages: Sequence[dict[str, str]], tokenizer: Tokenizer, place: str) -> Iterator[tuple[str, bool]]:
    if re.search(r"\{%-?\s*generation\s*-?%\}", str(tokenizer.chat_template)):
        yield from _tagged(messages, tokenizer, place)
        return
    text = _templated(messages, tokenizer, place, False)
    done = 0
    for i, turn in enumerate(messages):
        content = turn["content"].strip()
        if turn["role"] != "assistant" or not content:
            continue
        before = _templated(messages[:i], tokenizer, place, True) if i else ""
        # Searched for behind what stands before it: an answer may be part of the template's own words.
        start = len(before) if text.startswith(before) else done
        if (start_of_answer := text.find(content, max(done, start))) < 0:
            continue  # a template may leave a message out
        end = start_of_answer + len(content)
        if tokenizer.eos_token and (tail := re.compile(r"\s*" + re.escape(tokenizer.eos_token)).match(text, end)):
            end = tail.end()  # an answer may end in a space
        yield text[done:start_of_answer], False
        yield text[start_of_answer:end], True
        done = end
    if text[done:]:
        yield text[done:], False
