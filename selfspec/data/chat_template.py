"""What of a conversation a chat template shows, and what of that the assistant says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cached_property
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from selfspec.data.chat import THOUGHTS, Chat, with_text_arguments
from selfspec.data.corpus import Document

_DAY = datetime(2024, 7, 26, tzinfo=UTC)  # on which all questions are asked
_DATED = re.compile(r"""strftime_now\(\s*['"]([^'"]+)['"]\s*\)""")  # in chat templates
_MARK = "\u2063end\u2063"  # an answer, to see what a template writes behind one


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template. ends: token ids at which generation stops (none: the tokenizer's EOS token);
    arguments: of the template, such as enable_thinking, below those of a record."""

    tokenizer: Tokenizer
    ends: frozenset[int] = frozenset()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError for a mistyped argument."""
        known = {*re.findall(r"\w+", str(self.tokenizer.chat_template)), "enable_thinking"}
        for name in self.arguments.keys() - known:
            if near := get_close_matches(name, known, 1, 0.85):
                raise ValueError(f"chat_template_kwargs: {name!r} is read by no template; did you mean {near[0]!r}?")

    def opening(self, chat: Chat, place: str) -> list[int]:
        """Token ids of a conversation up to where the next answer begins. Raises ValueError, with the place, where the
        tokenizer has no chat template, or it refuses the conversation."""
        return self._ids(self.text(chat, place, True))

    def documents(self, chat: Chat, place: str) -> tuple[list[Document], list[str]]:
        """What the model reads and what of it counts in the loss, and why turns of the assistant were left out.

        The counted part of a turn begins where its text departs from the prompt that asks for it, and ends with the
        first token at which generation stops. In a template with generation tags they mark it instead. Where a later
        turn changes how an earlier one is written, the conversation becomes several documents, each up to another turn.
        Raises ValueError, with the place, where the tokenizer has no template, or the template refuses the conversation
        or shows no turn of the assistant.
        """
        whole, documents, left = self.text(chat, place, False), list[Document](), list[str]()
        text, counted = "", list[tuple[int, int]]()  # of the document that is still open
        for i in chat.answers:
            try:
                longer, spans = self._turn(chat, i, place)
            except ValueError as error:
                left.append(f"{place}, turn {i + 1}: {error}")
                continue
            if counted and not longer.startswith(text[: counted[-1][1]]):
                documents.append(Document(place, _cut(text, self._ended(text, counted))))
                counted = []
            text, counted = longer, counted + spans
        if counted:
            text = whole if whole.startswith(text[: counted[-1][1]]) else text
            documents.append(Document(place, _cut(text, self._ended(text, counted))))
        if left and not documents:
            why = f"the chat template leaves out what the assistant says ({left[0].removeprefix(f'{place}, ')})"
            raise ValueError(f"{place}: {why}; use another tokenizer")
        return documents, left

    def unseen(self, chat: Chat, documents: Sequence[Document], place: str) -> list[str]:
        """Turns that the template does not show, such as those of a role unknown to it; of answers their thoughts and
        what they say beside tool calls; tools."""
        shown, found = "\n".join(document.text for document in documents), list[str]()
        tools = [tool.get("function", tool) for tool in chat.beside.get("tools", ()) if isinstance(tool, dict)]
        if documents and any(str(t.get("name", "")) not in shown for t in tools if isinstance(t, dict)):
            found.append(f"{place}, its tools")
        for i, turn in enumerate(chat.messages if documents else ()):
            if i in chat.answers:
                thought = next(filter(None, map(turn.get, THOUGHTS)), turn["content"].rpartition("</think>")[0])
                if str(thought).split("<think>")[-1].strip() not in shown:
                    found.append(f"{place}, what turn {i + 1} thinks")
                if not turn.get("tool_calls"):
                    continue
            words = max(re.findall(r"\w+", turn["content"]), key=len, default="")
            counts = turn["role"] != "assistant" or turn.get("tool_calls")
            if counts and words not in shown and words not in self.text(chat, place, False):
                found.append(f"{place}, turn {i + 1} of the role {turn['role']!r}")
        return found

    @cached_property
    def prompt_end(self) -> list[int]:
        """Token ids that a prompt ends in and finished turns do not begin with, such as an opened thought."""
        chat = Chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        try:
            opening = self.text(chat.until(1), "", True)
            start = self._shared(opening, self.text(chat, "", False))
            return [] if self._rewritten(chat, 1, opening, start) else self._ids(opening[start:])
        except ValueError:  # a template that wants more than a question
            return []

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, chat: Chat, place: str, answer: bool) -> str:
        """A conversation through the template; answer: up to where the next answer begins."""
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"{place}: a conversation needs a chat template, and tokenizer {self.tokenizer.name_or_path!r} has "
                "none; use a chat model's tokenizer, or plain text"
            )
        arguments, why = {**self.arguments, **chat.beside}, None
        for messages in (chat.messages, with_text_arguments(chat.messages)):  # the second as of DeepSeek's templates
            try:
                rendered = self.tokenizer.apply_chat_template(
                    [messages],  # as a batch, which may hold no message yet
                    tokenize=False,
                    add_generation_prompt=answer,
                    **arguments,
                )
                return str(rendered[0])
            except Exception as error:  # a template is a program
                why = why or error
        raise ValueError(f"{place}: the chat template refuses it ({why})") from why

    def _turn(self, chat: Chat, i: int, place: str) -> tuple[str, list[tuple[int, int]]]:
        """The conversation up to turn i, and what counts of that turn, as [start, end) in the text."""
        until, turn, opening = chat.until(i + 1), chat.messages[i], ""
        try:
            text = self.text(until, place, False)
            if i:
                opening = self.text(chat.until(i), place, True)
            else:  # nothing asks for it, so that a template has no prompt; it begins where its words do
                marked = self.text(chat.until(0, {"role": "assistant", "content": _MARK}), place, False)
                opening = text[: _same(text, marked)]
        except ValueError as error:
            raise ValueError(f"the chat template refuses what stands up to it ({error.__cause__ or error})") from error
        if turn.get("tool_calls"):
            silent, other = {key: value for key, value in turn.items() if key != "tool_calls"}, ""
            with suppress(ValueError):  # a template may refuse a turn that says nothing
                other = self.text(chat.until(i, silent), place, False)
            if text == other:
                raise ValueError("the chat template does not show its tool calls")
        start = self._shared(opening, text)
        if start < len(opening) and i and not self._tagged and self._rewritten(chat, i, opening, start):
            text, start = self._aligned(chat, i, opening, text)
        if self._tagged:
            spans = [(max(first, start), end) for first, end in self._tags(until) if end > start]
        else:
            spans = [(start, self._end(until, text, start))]
        said = "".join(text[first:end] for first, end in spans)
        for stop in self._stops:
            said = said.replace(stop, "")
        if not said.strip():
            raise ValueError("the chat template does not show it")
        return text, spans

    def _marked(self, chat: Chat, i: int) -> dict[str, Any]:
        """The message before turn i with a mark behind its words."""
        return {**chat.messages[i - 1], "content": chat.messages[i - 1]["content"] + _MARK}

    def _rewritten(self, chat: Chat, i: int, opening: str, start: int) -> bool:
        """Whether a prompt parts from the finished text before its last message has ended: what then differs is more
        than how an answer begins."""
        words = _same(opening, self.text(chat.until(i - 1, self._marked(chat, i)), "", True))
        return start < words or any(stop in opening[start:] for stop in self._stops)

    def _aligned(self, chat: Chat, i: int, opening: str, text: str) -> tuple[str, int]:
        """The prompt of turn i with what the template writes behind it in the finished text, and where that begins: for
        templates that write the last question in another way before it is answered."""
        marked, head = self._marked(chat, i), self.text(chat.until(i), "", False)
        ends = [self.text(chat.until(i - 1, marked, *more), "", not more) for more in ((), (chat.messages[i],))]
        asked, done = _same(opening, ends[0]), _same(text, ends[1])  # where the last message's words end
        begins = opening.removeprefix(head) if opening.startswith(head) else ""
        if begins and (at := text.find(begins, done)) >= 0:
            return opening + text[at + len(begins) :], len(opening)
        more = _same(opening[asked:], text[done:])
        if done == len(text) or any(stop in opening[asked + more :] for stop in self._stops):
            raise ValueError("the chat template writes what stands before it in another way than the prompt for it")
        return opening[: asked + more] + text[done + more :], asked + more

    @cached_property
    def _tagged(self) -> bool:
        return re.search(r"\{%-?\s*generation\s*-?%\}", str(self.tokenizer.chat_template)) is not None

    def _tags(self, chat: Chat) -> list[tuple[int, int]]:
        """What the template's own generation tags enclose."""
        special_tokens: Any = self.tokenizer.special_tokens_map
        rendered: Any = render_jinja_template(
            [chat.messages],
            chat_template=self.tokenizer.get_chat_template(tools=chat.beside.get("tools")),
            return_assistant_tokens_mask=True,
            **{**special_tokens, **self.arguments, **chat.beside},
        )
        return list(rendered[1][0])

    def _shared(self, opening: str, text: str) -> int:
        """Characters of the longest part that both begin with, in whole tokens where they part before its end."""
        shared = _same(opening, text)
        if shared == len(opening) or not self.tokenizer.is_fast:
            return shared
        one, two = (
            self.tokenizer(side, add_special_tokens=False, return_offsets_mapping=True) for side in (opening, text)
        )
        pairs = zip(one["input_ids"], two["input_ids"], two["offset_mapping"], strict=False)
        return min(shared, next((start for a, b, (start, _) in pairs if a != b), shared))

    @cached_property
    def _stops(self) -> list[str]:
        ids = self.ends or {self.tokenizer.eos_token_id} - {None}
        return [text for i in sorted(ids) if (text := str(self.tokenizer.decode([i], skip_special_tokens=False)))]

    def _ended(self, text: str, counted: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Spans with the token at which generation stops where that is what the next turn begins with (GLM)."""
        if self._tagged:
            return counted
        behind = [next((stop for stop in self._stops if text.startswith(stop, end)), "") for _, end in counted]
        whole = [any(text.endswith(stop, start, end) for stop in self._stops) for start, end in counted]
        return [(a, b if done else b + len(more)) for (a, b), more, done in zip(counted, behind, whole, strict=True)]

    def _end(self, chat: Chat, text: str, start: int) -> int:
        """Where what the assistant says ends: behind the first token at which generation stops; where the turn holds
        none, before what the template writes behind an answer."""
        found = [(at, at + len(stop)) for stop in self._stops if (at := text.find(stop, start)) >= 0]
        if found:
            return min(found)[1]
        closing = ""
        with suppress(ValueError):
            marked = self.text(chat.until(-1, {"role": "assistant", "content": _MARK}), "", False)
            closing = marked.rpartition(_MARK)[2]
        return len(text.removesuffix(closing))


def _same(one: str, two: str) -> int:
    """Characters that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _cut(text: str, counted: Sequence[tuple[int, int]]) -> tuple[tuple[str, bool], ...]:
    """A text cut into (part, counts in the loss)."""
    edges = [0, *(edge for span in counted for edge in span), len(text)]
    parts = [(text[a:b], i % 2 == 1) for i, (a, b) in enumerate(pairwise(edges))]
    return tuple(part for part in parts if part[0])


def on_one_day(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer whose chat template writes no date of today, so that questions are the same tomorrow."""
    if not isinstance(source := tokenizer.chat_template, str) or not _DATED.search(source):
        return tokenizer
    tokenizer = copy(tokenizer)
    tokenizer.chat_template = _DATED.sub(lambda found: repr(_DAY.strftime(found[1])), source)
    return tokenizer
