"""Conversations as records hold them, and the chat template of the embedded target."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

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
NAMES = {"human": "user"} | dict.fromkeys(("gpt", "model", "chatgpt", "bing", "bard"), "assistant")
_ARGUMENTS = "chat_template_kwargs"  # of a record, as TRL and serving engines call them
_RESERVED = {"chat_template", "messages", "tokenize", "add_generation_prompt", "continue_final_message"}
_DEEPEST = 100  # levels of lists and objects in a record
THOUGHTS = "reasoning_content", "reasoning", "thinking"  # fields of a turn that hold what it thinks
_SPOKEN = ("content", "tool_calls", *THOUGHTS)  # what a turn may consist of


def without_nulls(value: Any, depth: int = 0) -> Any:
    """A record without fields that are null: tables give every record, and every part of it, all fields. Raises
    ValueError for one that is nested too deep."""
    if depth > _DEEPEST:
        raise ValueError(f"a record is nested deeper than {_DEEPEST} levels")
    if isinstance(value, Mapping):
        return {key: without_nulls(part, depth + 1) for key, part in value.items() if part is not None}
    return [without_nulls(part, depth + 1) for part in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class Chat:
    """messages: `role`, `content` and whatever else a turn has; beside: what else a template reads: `tools`,
    `documents` and further arguments of it."""

    messages: list[dict[str, Any]]
    beside: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, record: Mapping[str, Any], place: str) -> Chat:
        """A record with `messages` or `conversations`. Raises ValueError that names the place."""
        record = without_nulls(record)
        turns = record.get("messages") or record.get("conversations") or []
        if not isinstance(turns, list):
            raise ValueError(f"{place}: messages must be a list of turns, found {turns!r:.80}")
        beside = dict[str, Any]()
        for name in ("tools", "documents"):
            values = _read(record.get(name, []))  # tables can hold lists of unlike objects as JSON alone
            if not isinstance(values, list):
                raise ValueError(f"{place}: {name} must be a list of objects, found {values!r:.80}")
            beside |= {name: values} if values else {}
        if not isinstance(arguments := _read(record.get(_ARGUMENTS, {})), dict) or _RESERVED & arguments.keys():
            wanted = f"an object without {', '.join(sorted(_RESERVED))}"
            raise ValueError(f"{place}: {_ARGUMENTS} must be {wanted}, found {arguments!r:.80}")
        messages = [message(turn, place) for turn in turns]
        first = messages[0]["role"] if messages else "system"
        if (system := system_of(record, place)) and first not in ("system", "developer"):
            messages = [message({"role": "system", "content": system}, place), *messages]
        return cls(messages, {**beside, **arguments})

    @property
    def answers(self) -> list[int]:
        """Which messages are the assistant's and count: not those without anything, nor those of OpenAI's `weight`
        0."""
        turns = enumerate(self.messages)
        return [i for i, turn in turns if turn["role"] == "assistant" and _speaks(turn) and turn.get("weight") != 0]

    def until(self, turn: int, *more: dict[str, Any]) -> Chat:
        """The turns before one, and more behind them."""
        return replace(self, messages=[*self.messages[:turn], *more])


def system_of(record: Mapping[str, Any], place: str) -> str:
    """What the system says beside the turns, as ShareGPT has it; empty where it says nothing. Raises ValueError for
    what is no text."""
    system = record.get("system") or record.get("system_prompt") or ""
    if not isinstance(system, str):
        raise ValueError(f"{place}: system must be a string, found {system!r:.80}")
    return system


def message(turn: Any, place: str) -> dict[str, Any]:
    """A turn with `role` and `content`, from those or from ShareGPT's `from` and `value`, and its other fields as they
    are. Raises ValueError that names the place."""
    fields = without_nulls(turn) if isinstance(turn, Mapping) else {}
    role, content = (
        next((fields.pop(name) for name in names if name in fields), None)
        for names in (("role", "from"), ("content", "value"))
    )
    if isinstance(content, list):  # OpenAI's content parts
        content = "".join(_text_of(part, place) for part in content)
    if content is None and any(fields.get(name) for name in _SPOKEN):
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(
            f"{place}: a turn needs `role` and `content` (or `from` and `value`) as strings, found {turn!r:.80}"
        )
    if any(0xD800 <= ord(character) < 0xE000 for character in content):
        raise ValueError(f"{place} holds a lone surrogate, which is no Unicode text; decode it as UTF-8")
    name = NAMES.get(role.lower(), role.lower())
    if name not in ROLE_NAMES:
        near = difflib.get_close_matches(name, [*ROLE_NAMES, *NAMES], 1, 0.75)
        hint = f"did you mean {near[0]!r}" if near else "use system, user, assistant or tool"
        raise ValueError(f"{place}: the role {role!r} is unknown; {hint}")
    if not isinstance(fields.get("weight", 0), (int, float)):
        raise ValueError(f"{place}: the weight of a turn must be a number, 0 or 1, found {fields['weight']!r:.80}")
    if isinstance(calls := fields.get("tool_calls"), list):
        fields["tool_calls"] = [_call(call) for call in calls]
    return {"role": name, "content": content, **fields}


def _speaks(turn: dict[str, Any]) -> bool:
    return any(value.strip() if isinstance(value := turn.get(name), str) else value for name in _SPOKEN)


def _text_of(part: Any, place: str) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
        return str(part["text"])
    kind = part.get("type", sorted(part)) if isinstance(part, dict) else type(part).__name__
    raise ValueError(f"{place}: a turn has a part of type {kind!r:.80}; only parts of type 'text' can be read")


def _call(call: Any) -> Any:
    """A tool call whose arguments are an object, which templates expect; OpenAI's are a string of JSON."""
    if isinstance(call, dict) and isinstance(function := call.get("function"), dict) and "arguments" in function:
        return {**call, "function": {**function, "arguments": _read(function["arguments"])}}
    return call


def with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose tool calls have their arguments as a string of JSON."""

    def written(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or isinstance(function.get("arguments"), str | None):
            return call
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        {**turn, "tool_calls": list(map(written, calls))} if isinstance(calls := turn.get("tool_calls"), list) else turn
        for turn in messages
    ]


def _read(value: Any) -> Any:
    """What a string of JSON holds; anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
