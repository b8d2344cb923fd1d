"""Documents of records, and on which side of training and validation they fall."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any, ClassVar, TypeVar

from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.data.chat import NAMES, THOUGHTS, Chat, system_of, without_nulls
from selfspec.data.chat_template import ChatTemplate
from selfspec.data.corpus import Document
from selfspec.utils.checks import at_least, integer, shares

R = TypeVar("R")
_SMALL = 1000  # up to this many documents the split is by rank, so that no part is empty
_FORMS = ("text", "messages", "conversations")
_IDS, _MASK = "input_ids", "loss_mask"  # of records whose tokens an engine has written
_ASKED = 8  # tokens before an answer that can be a question; fewer begin any text
_NAMED = 10  # broken records whose reasons are listed


@dataclass
class Broken:
    """Records that can not be used. count: how many; named: place and reason of the first; empty: records that hold
    no text, or no assistant's turn; turns: of the assistant, in all records; left: how many of them were left out;
    why: place and reason of the first; unseen: turns of others that the chat template does not show; which: the place
    of the first."""

    count: int = 0
    named: list[str] = field(default_factory=list)
    empty: int = 0
    turns: int = 0
    left: int = 0
    why: str = ""
    unseen: int = 0
    which: str = ""


@dataclass(frozen=True, kw_only=True)
class Records(ABC):
    """A record is an object with ShareGPT `conversations`, OpenAI `messages`, or plain `text`, each judged by itself;
    or with `input_ids` and `loss_mask`, tokens that an engine has read and written, which then are taken as they are
    (`tokens` is a list of such objects, of which one conversation consists).

    Conversations go through the chat template of `tokenizer`, and only what the assistant says counts in the loss (see
    `ChatTemplate`). ends: token ids at which generation stops; chat_template_kwargs: arguments of the template, such as
    enable_thinking; validation_share: of the records, chosen by their text or by what stands before a conversation's
    first answer, that validate, so that equal ones fall on one side; tolerate: how many broken records are left out,
    with a line for the first of them; one more ends the run.
    """

    questions: ClassVar[str] = "source"
    tokenizer: Tokenizer
    ends: frozenset[int] = frozenset()
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    validation_share: float = 0.1
    tolerate: int = 0

    def __post_init__(self) -> None:
        shares(self, "data", "validation_share", ends="()")
        at_least(self, "data", 0, "tolerate")
        integer("data.tolerate", self.tolerate)

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.ends, dict(self.chat_template_kwargs))

    @abstractmethod
    def records(self) -> Iterator[tuple[str, object]]:
        """(place, record) one by one; an unreadable record is yielded as a ValueError that says why."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Of the records' content."""

    @abstractmethod
    def __str__(self) -> str:
        """What the records are called in messages."""

    def documents(self, broken: Broken | None = None) -> Iterator[tuple[Document, str]]:
        """Documents in their order, each with its part, `train` or `validation`. What is left out is counted in
        `broken`. Raises ValueError for more broken records than are tolerated, and where a part would be empty."""
        usable = self._usable(Broken() if broken is None else broken)
        first = list(islice(usable, _SMALL + 1))
        if len(first) < 2:
            raise ValueError(
                f"no usable example: {self} holds {len(first)} of text or with an assistant's turn, but one must train "
                "and another validate"
            )
        edge = self.validation_share
        if len(first) <= _SMALL:
            known = sorted({digest for _, digest in first})
            edge = known[min(len(known) - 1, max(1, round(edge * len(known))))]
        some = set[str]()
        for documents, digest in chain(first, usable):
            part = "validation" if digest < edge else "train"
            some.add(part)
            yield from ((document, part) for document in documents)
        if len(some) < 2:
            raise ValueError(
                f"no usable example: data.validation_share={self.validation_share} leaves a part of {self} empty; "
                "equal texts, and answers to one question, fall on one side, so give more different ones"
            )

    def _usable(self, broken: Broken) -> Iterator[tuple[list[Document], float]]:
        """The documents of each record, and the number by which it trains or validates."""
        for record, documents in self._read(broken, partial(self._documents, broken=broken)):
            if documents:
                yield documents, _digest(record)
            else:
                broken.empty += 1

    def _read(
        self, broken: Broken, read: Callable[[object, str], R], where: str = "data"
    ) -> Iterator[tuple[object, R]]:
        """Each record with what `read` makes of it and its place. where: the settings of this data. Raises ValueError
        for more broken records than are tolerated."""
        if self.chat_template_kwargs:
            _ = self.template  # wrong arguments are no record's fault
        for place, record in self.records():
            try:
                if isinstance(record, ValueError):
                    raise record
                found = read(record, place)
            except ValueError as error:
                broken.count += 1
                if broken.count <= _NAMED:
                    broken.named.append(str(error))
                if broken.count > self.tolerate:
                    more = f"; {self.tolerate} before it were tolerated" if self.tolerate else ""
                    raise ValueError(
                        f"{error}{more}; mend it, or leave such records out with {where}.tolerate="
                        f"{self.tolerate + 1} or more"
                    ) from error
                continue
            yield record, found

    def _documents(self, line: object, place: str, broken: Broken) -> list[Document]:
        if not isinstance(line, dict):
            raise ValueError(f"{place}: expected an object, found {type(line).__name__}; give one object a line")
        record = without_nulls(line)
        if parts := _with_ids(record):
            return self._of_tokens(parts, place)
        forms = {name: record[name] for name in _FORMS if name in record}
        text, turns = forms.get("text"), forms.get("messages") or forms.get("conversations") or []
        if not forms or not isinstance(text, str | None) or not isinstance(turns, list):
            types = {name: type(value).__name__ for name, value in record.items()}
            raise ValueError(
                f"{place}: expected a string as `text`, or a list as `messages` or `conversations`, found "
                f"{types!s:.200}"
            )
        if not turns:
            documents = [Document(place, ((text, True),))] if text and text.strip() else []
        else:
            chat = Chat.of(record, place)
            documents, left = self.template.documents(chat, place)
            broken.turns += len(chat.answers)
            broken.left += len(left)
            broken.why = broken.why or next(iter(left), "")
            broken.unseen += len(unseen := self.template.unseen(chat, documents, place))
            broken.which = broken.which or next(iter(unseen), "")
            last = len(chat.messages) - 1
            lost = [why for why in left if why.startswith(f"{place}, turn {last + 1}:")]
            if documents and chat.answers[-1:] == [last] and not lost and _is_cut(record.get("finish")):
                spans = _open_ended(documents.pop().spans, chat.messages[last])
                documents += [Document(place, spans)] if any(counts for _, counts in spans) else []
        for document in documents:
            _encodable(document.text, place)
        return documents

    def _of_tokens(self, parts: list[Any], place: str) -> list[Document]:
        documents = []
        for part in parts:
            sides = [part.get(name) if isinstance(part, dict) else None for name in (_IDS, _MASK)]
            ids, mask = (side if isinstance(side, list) else [] for side in sides)
            if not ids or len(ids) != len(mask) or not all(isinstance(x, int) for x in (*ids, *mask)):
                raise ValueError(f"{place}: {_IDS} and {_MASK} must be two lists of integers, of one length")
            if odd := set(mask) - {0, 1}:
                raise ValueError(f"{place}: {_MASK} holds {min(odd)}; give 1 for tokens that count, 0 for others")
            if 1 not in mask:  # cut before its answer
                continue
            if not 0 <= min(ids) <= max(ids) < len(self.tokenizer):
                raise ValueError(
                    f"{place}: {_IDS} reach from {min(ids)} to {max(ids)}, but tokenizer "
                    f"{self.tokenizer.name_or_path!r} has {len(self.tokenizer)}; they were made by another"
                )
            text = str(self.tokenizer.decode(ids))
            documents.append(Document(place, ((text, True),), (ids, [bool(counts) for counts in mask])))
        return documents

    def chats(self) -> Iterator[Chat]:
        """The conversations among the records, of which a server asks."""
        return (chat for _, chat in self._read(Broken(), _chat, "data.source") if chat is not None)

    def train(self) -> list[Document]:
        return [document for document, part in self.documents() if part == "train"]

    def validation(self) -> list[Document]:
        return [document for document, part in self.documents() if part == "validation"]

    def evaluation(self) -> list[Document]:
        return self.validation()


def _chat(record: object, place: str) -> Chat | None:
    """The conversation of a record that holds one."""
    if isinstance(record, dict) and (record.get("messages") or record.get("conversations")):
        return Chat.of(record, place)
    return None


def _is_cut(finish: object) -> bool:
    """Whether the last of the reasons why a server's answers ended is another than that it was whole."""
    finish = [finish] if isinstance(finish, str) else finish
    return isinstance(finish, list) and bool(finish) and finish[-1] not in ("stop", "tool_calls")


def _open_ended(spans: tuple[tuple[str, bool], ...], turn: dict[str, Any]) -> tuple[tuple[str, bool], ...]:
    """Spans of a document whose last answer was cut off, up to where its words end: what the chat template writes
    behind them does not count. Without that answer where they are not found."""
    at = max(i for i, (_, counts) in enumerate(spans) if counts)
    texts = (str(turn.get(name) or "").strip() for name in ("content", *THOUGHTS))
    said = next(filter(None, texts), "")
    end = spans[at][0].rfind(said) + len(said) if said in spans[at][0] else 0
    return (*spans[:at], (spans[at][0][:end], True)) if end else spans[:at]


def _digest(record: object) -> float:
    """A number in [0, 1) that follows from what a record says, however a chat template renders it: of a conversation
    from what is said before its first answer, so that other answers to the same fall on its side."""
    assert isinstance(record, dict)
    text, turns = record.get("text"), record.get("messages") or record.get("conversations")
    if turns:
        said_by = [_said(turn) for turn in turns]
        if (system := system_of(record, "")) and said_by[0][0] not in ("system", "developer"):
            said_by = [["system", system], *said_by]
        kinds = [role for role, _ in said_by]
        asked = next((i for i, kind in enumerate(kinds) if kind not in ("assistant", "system", "developer")), 0)
        answers = (i for i, kind in enumerate(kinds) if i > asked and kind == "assistant")
        said = json.dumps(said_by[: next(answers, len(said_by))])
    elif isinstance(text, str) and text:
        said = text
    else:
        first = next(iter(_with_ids(record)), record)
        ids, mask = first.get(_IDS) or [], first.get(_MASK) or []
        asked = mask.index(1) if 1 in mask else 0
        said = json.dumps(ids[:asked] if asked >= _ASKED else ids)
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest()) / 2**64


def _with_ids(record: dict[str, Any]) -> list[Any]:
    """The parts of a record that are given as token ids, or the record, if it is."""
    parts = record.get("tokens")
    if isinstance(parts, list) and any(isinstance(part, dict) for part in parts):
        return parts
    return [record] if _IDS in record else []


def _said(turn: Any) -> list[Any]:
    """Who says what in a turn, in whichever form it is written."""
    role, content = str(turn.get("role") or turn.get("from")).lower(), turn.get("content") or turn.get("value")
    if isinstance(content, list):  # OpenAI's content parts
        content = "".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    return [NAMES.get(role, role), content]


def _encodable(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: the text holds half of a surrogate pair ({error})") from error
