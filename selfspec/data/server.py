"""Answers of a model that an engine serves, to the questions of other data or to its own: text for drafters of targets
too large to run here."""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any, ClassVar, NoReturn, cast

from selfspec.data.chat import Chat
from selfspec.data.chat_template import ChatTemplate
from selfspec.data.documents import Records
from selfspec.data.own_questions import Template, answer_temperature, check_own_questions, usable
from selfspec.utils.checks import at_least, shares
from selfspec.utils.files import Figures, cache_folder, disk_room, write_text
from selfspec.utils.openai_client import Refused, Servers, first_choice, server_urls
from selfspec.utils.progress import progress

EXACT = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}  # else a server takes the model's own
_COMPARED = 16  # conversations whose prompts are held against the template here
_SPOKEN = ("content", "reasoning", "reasoning_content", "tool_calls")  # of an answer, as templates read it
_LISTS = ("tools", "documents")  # beside a conversation; all else are arguments of the template
_TRIES = 8  # questions that are drawn where the model's are not usable


@dataclass(frozen=True, kw_only=True)
class Server(Records):
    """Conversations whose answers an OpenAI-compatible server writes. url: of a server, or a list of servers that share
    the work; model: by which name it is served (null: the only one); source: where questions come from, `jsonl`,
    `parquet`, `hub` or `instructions` (null: the model asks itself); conversations: at most so many (needed without a
    source); openings: words that the model's own questions begin with, taken in turn; question_temperature,
    question_tokens: of these; new_tokens: of an answer, at most; sampled: share of conversations answered at
    temperature 1, the others greedily; seed: of sampling; at_once: requests that each server has at a time; errors:
    conversations that may fail, one more ends the run; patience: seconds that servers may be silent; folder: where the
    answers are kept (null: in the cache folder).

    Every question of a conversation is asked behind the model's own answers to those before. Turns with tool calls and
    tools' results stay as they are. Where the server returns token ids, these are what training reads."""

    questions: ClassVar[str] = "source"
    url: Any
    model: str | None = None
    source: Any = None
    conversations: int | None = None
    openings: Sequence[str] = ("",)
    question_temperature: float = 1.0
    question_tokens: int = 160
    new_tokens: int = 512
    sampled: float = 0.5
    seed: int = 0
    at_once: int = 32
    errors: int = 20
    patience: float = 120.0
    folder: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        server_urls("data.url", self.url)
        at_least(self, "data", 1, "new_tokens", "question_tokens", "at_once", "conversations")
        at_least(self, "data", 0, "errors", "patience", "seed")
        shares(self, "data", "sampled")
        if self.source is None and self.conversations is None:
            raise ValueError("data.conversations: without data.source the model asks itself; say how many questions")
        check_own_questions(self.openings, self.question_temperature)

    def __str__(self) -> str:
        return f"data.url={self.url!r}"

    def evaluation(self) -> NoReturn:
        """Raises ValueError: what is written here is for training."""
        raise ValueError("data=server is for training; measure with a file of questions, decode.questions=file.jsonl")

    @cached_property
    def _servers(self) -> Servers:
        return Servers(server_urls("data.url", self.url), self.model, self.patience)

    @cached_property
    def _compared(self) -> list[int]:
        """Requests of this run whose prompts were held against the template here."""
        return []

    @cached_property
    def _mark(self) -> str:
        """A hash of what is asked of whom."""
        asked = "its own" if self.source is None else self.source.fingerprint()
        own = (self.openings, self.question_temperature, self.question_tokens) if self.source is None else ()
        parts = [asked, self._servers.model, self.new_tokens, self.sampled, self.seed, *own]
        parts += [sorted(self.chat_template_kwargs.items()), str(self.tokenizer.chat_template), len(self.tokenizer)]
        return hashlib.sha256(json.dumps(parts, default=list).encode()).hexdigest()[:12]

    @property
    def place(self) -> Path:
        """The folder of these answers; without data.folder its name follows from what is asked of whom."""
        return Path(self.folder) if self.folder is not None else cache_folder() / "served" / self._mark

    @property
    def model_name(self) -> str:
        return self._servers.model

    @property
    def path(self) -> Path:
        return self.place / "answers.jsonl"

    def write(self, quiet: bool = False) -> None:
        """Have every question answered that is not yet. Raises ConnectionError where no server answers, ValueError for
        more failures than `errors`, for another model, and for a template that is not the tokenizer's; what was
        answered is kept."""
        self.place.mkdir(parents=True, exist_ok=True)
        with (self.place / ".lock").open("a") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another process is writing to {self.place}; wait for it") from None
            self._write(quiet)

    def _write(self, quiet: bool) -> None:
        mark, known = self._mark, self.place / "asked"
        if known.is_file() and known.read_text().strip() != mark:
            raise ValueError(
                f"data.folder={self.place} holds answers of other settings, questions or models; choose another"
            )
        write_text(known, mark + "\n")
        done = set(self.answered(mend=True))
        asked = ((i, chat) for i, chat in self.asked() if i not in done)
        first = next(asked, None)
        if first is None:
            if not done:
                raise ValueError(
                    "data.source holds no conversation with a question; one line is "
                    '{"messages": [{"role": "user", "content": "..."}]}'
                )
            return
        kinds, failed, tokens, begun = Counter[str](), 0, 0, time.perf_counter()
        total = None if self.conversations is None else self.conversations - len(done)
        bar = progress(total=total, desc="answers by server", unit=" conversations", disable=quiet)
        with bar, self.path.open("ab") as file, (self.place / "failed.jsonl").open("w") as failures:
            most, last = self.at_once * len(self._servers.urls), ""
            few = takewhile(lambda _: failed <= self.errors, chain([first], asked))
            for i, result in _at_once(self._conversation, few, most):
                if isinstance(result, Refused):
                    failed, last = failed + 1, str(result)
                    failures.write(json.dumps({"id": i, "why": last}) + "\n")
                    failures.flush()
                else:
                    with disk_room(self.path):
                        file.write(json.dumps(result, ensure_ascii=False).encode() + b"\n")
                        file.flush()
                    kinds.update(result["finish"])
                    tokens += result["new_tokens"]
                bar.update()
                rate = tokens / (time.perf_counter() - begun)
                bar.set_postfix({"tokens": tokens, "rate": f"{rate:.0f}/s", "failed": failed}, refresh=False)
        if failed > self.errors:
            raise ValueError(
                f"{failed} conversations failed, more than data.errors={self.errors}, the last: {last}; {self.path} "
                "keeps what was answered, failed.jsonl beside it says why others were not"
            )
        self._card(len(done), kinds, failed, tokens, time.perf_counter() - begun, quiet)
        if not done and not kinds:
            raise ValueError(f"none of {failed} conversations was answered; {self.place / 'failed.jsonl'} says why")

    def _card(self, before: int, kinds: Counter[str], failed: int, tokens: int, seconds: float, quiet: bool) -> None:
        figures: Figures = {"model": self._servers.model, "answers": dict(kinds), "failed": failed, "before": before}
        figures |= {"tokens": tokens, "seconds": round(seconds, 1), "sampled": self.sampled}
        write_text(self.place / "card.json", json.dumps(figures, indent=1) + "\n")
        if not quiet:
            cut = f", {kinds['length']} of them cut at data.new_tokens={self.new_tokens}" if kinds["length"] else ""
            lost = f"; {failed} conversations failed: {self.place / 'failed.jsonl'}" if failed else ""
            print(
                f"{kinds.total()} answers, {tokens} tokens, {tokens / seconds:.0f}/s{cut}{lost}; kept in {self.path}",
                file=sys.stderr,
            )

    def asked(self) -> Iterator[tuple[int, Chat | None]]:
        """Conversations by their numbers, in their order; None: the model's own."""
        if self.source is None:
            return ((i, None) for i in range(self.conversations or 0))
        if not hasattr(self.source, "chats"):
            raise ValueError(f"data.source: {type(self.source).__name__} has no questions; take jsonl, parquet or hub")
        return islice(enumerate(self.source.chats()), self.conversations)

    def _conversation(self, i: int, chat: Chat | None) -> Figures:
        """A conversation with the server's answers. Raises Refused where it gives none."""
        chat = self._invented(i) if chat is None else chat
        temperature = answer_temperature(i, self.sampled, len(self.openings) if self.source is None else 1)
        history, turns, finish, wrote = list[dict[str, Any]](), list[tuple[list[int], list[int]]](), list[str](), 0
        for message in [*chat.messages, {"role": "assistant", "content": ""}]:
            since = takewhile(lambda role: role != "assistant", (turn["role"] for turn in reversed(history)))
            asks = not {"system", "developer"}.issuperset(since)
            if message["role"] != "assistant" or message.get("tool_calls") or not asks:
                kept = {**message, "weight": 0} if message["role"] == "assistant" else message  # not what it says
                says = message.get("content") or message.get("tool_calls") or message["role"] == "tool"  # nothing, too
                history += [kept] if says else []
                continue
            try:
                said, ids, why, new = self._answer(i, Chat(history, chat.beside), temperature)
            except Refused:
                if not finish:
                    raise
                break  # too long by now, as a rule: the turns before it are whole
            history.append(said)
            turns += [ids] if ids is not None else []
            finish.append(why)
            wrote += new
            if why != "stop":
                break
        if not finish:
            raise Refused("the conversation asks nothing")
        while history[-1]["role"] != "assistant":  # a question that was not answered
            history.pop()
        record: Figures = {"id": i, "messages": history}
        record |= {name: chat.beside[name] for name in _LISTS if name in chat.beside}
        if arguments := self._arguments(chat):
            record["chat_template_kwargs"] = arguments
        if len(turns) == len(finish):
            record["tokens"] = merged(turns)
        return {**record, "temperature": temperature, "finish": finish, "new_tokens": wrote}

    def _answer(
        self, i: int, chat: Chat, temperature: float
    ) -> tuple[dict[str, Any], tuple[list[int], list[int]] | None, str, int]:
        """The message, its token ids behind those of the prompt (None: the server tells none), why it ended, and how
        many tokens it has."""
        body: Figures = {"messages": list(map(_sent, chat.messages)), "max_tokens": self.new_tokens}
        body |= {"seed": self.seed + i, "return_token_ids": True, "temperature": temperature, **EXACT}
        arguments = {**self._arguments(chat), **{k: v for k, v in chat.beside.items() if k == "documents"}}
        body |= {"chat_template_kwargs": arguments} if arguments else {}
        body |= {"tools": chat.beside["tools"]} if "tools" in chat.beside else {}
        answer = self._servers.post("/v1/chat/completions", body)
        if answer.get("kv_transfer_params"):
            raise ValueError(
                "this server hands out hidden states, and what it samples is not the model's own text; have answers "
                "written by a plain one (selfspec serve-target --plain)"
            )
        choice = first_choice(answer)
        message, why = choice.get("message") or {}, str(choice.get("finish_reason"))
        prompt, ids = cast(Any, answer.get("prompt_token_ids")), cast(Any, choice.get("token_ids"))
        usage = answer.get("usage") or {}
        if not isinstance(message, dict) or not isinstance(usage, dict):
            raise Refused(f"conversation {i}: the answer is in another form than OpenAI's: {answer!s:.200}")
        said = {"role": "assistant", "content": "", **{k: message[k] for k in _SPOKEN if message.get(k)}}
        said = json.loads(json.dumps(said, ensure_ascii=False).encode(errors="replace"))  # of half a character
        if not any(said[k] for k in _SPOKEN if k in said):
            raise Refused(f"conversation {i}: the answer is empty ({why})")
        if len(self._compared) < _COMPARED:
            self._compared.append(i)
            self._compare(chat, prompt, usage.get("prompt_tokens"))
        if not _are_ids(prompt) or not _are_ids(ids):
            count = usage.get("completion_tokens")
            return said, None, why, count if type(count) is int else 0
        if why == "stop" and self.ends and ids[-1] not in self.ends:  # the server leaves it out
            own = self.tokenizer.eos_token_id
            ids = [*ids, own if own in self.ends else min(self.ends)]
        return said, (prompt, ids), why, len(ids)

    def _arguments(self, chat: Chat) -> dict[str, Any]:
        """Of the chat template, a record's before those of all."""
        own = {name: value for name, value in chat.beside.items() if name not in _LISTS}
        return {**self.chat_template_kwargs, **own}

    def _compare(self, chat: Chat, prompt: list[int] | None, size: int | None) -> None:
        """Raises ValueError where the server's template or tokenizer gives another prompt than the one here."""
        ours = self.template.opening(chat, "data=server")
        if isinstance(prompt, list) and prompt != ours:
            at = next(
                (k for k, (a, b) in enumerate(zip(prompt, ours, strict=False)) if a != b), min(len(prompt), len(ours))
            )
            theirs, here = (str(self.tokenizer.decode(ids[at : at + 8])) for ids in (prompt, ours))
            raise ValueError(
                f"the server's prompt differs from the chat template here at token {at}: {theirs!r} there, {here!r} "
                "here; give the served model's own folder as target.name, or the same data.chat_template_kwargs"
            )
        if prompt is None and size is not None and size != len(ours):
            raise ValueError(
                f"the server counts {size} tokens of a prompt that has {len(ours)} by the chat template here; give the "
                "served model's own folder as target.name, or the same data.chat_template_kwargs"
            )

    @cached_property
    def _turns(self) -> Template:
        return Template.of(ChatTemplate(self.tokenizer, self.ends, self.chat_template_kwargs))

    def _invented(self, i: int) -> Chat:
        """A question of the model's own: what it writes behind the template's opening."""
        words = self.openings[i % len(self.openings)]
        ids = [*self._turns.opening, *self.tokenizer(words, add_special_tokens=False)["input_ids"]]
        ends = sorted(self.ends | {self._turns.answer[0]})
        for attempt in range(_TRIES):
            body: Figures = {"prompt": ids, "max_tokens": self.question_tokens, "seed": self.seed + i + (attempt << 32)}
            body |= {"temperature": self.question_temperature, "stop_token_ids": ends, **EXACT}
            choice = first_choice(self._servers.post("/v1/completions", body))
            question = words + str(choice.get("text") or "")
            known = list(self.tokenizer(question, add_special_tokens=False)["input_ids"])
            if choice.get("finish_reason") == "stop" and known and usable(known, self.tokenizer):
                return Chat([{"role": "user", "content": question.strip()}])
        raise Refused(f"question {i}: {_TRIES} that the model began with {words!r} came out empty or endless")

    # -- what was written

    def answered(self, mend: bool = False) -> dict[int, int]:
        """Where each answered conversation begins in the file, by its number; damaged lines are passed over. mend: a
        last one that was cut off is dropped."""
        found = dict[int, int]()
        if not self.path.is_file():
            return found
        with self.path.open("rb+" if mend else "rb") as file:
            at = 0
            for line in file:
                number = None
                with suppress(ValueError, LookupError, TypeError):
                    number = int(json.loads(line)["id"])
                if not line.endswith(b"\n"):
                    if mend:
                        file.truncate(at)
                        print(f"{self.path}: its last line was cut off; it is asked for again", file=sys.stderr)
                    break
                if number is not None:
                    found[number] = at
                elif mend:
                    print(f"{self.path}: the line at byte {at} is damaged; it is asked for again", file=sys.stderr)
                at += len(line)
        return found

    def records(self) -> Iterator[tuple[str, object]]:
        lines = {i: at for i, at in self.answered().items() if self.conversations is None or i < self.conversations}
        with self.path.open("rb") as file:
            for i in sorted(lines):
                file.seek(lines[i])
                yield f"{self.path}, conversation {i}", json.loads(file.readline())

    def fingerprint(self) -> str:
        whole = hashlib.sha256()
        for _, record in self.records():
            whole.update(json.dumps(record).encode())
        return whole.hexdigest()


def _are_ids(ids: Any) -> bool:
    return isinstance(ids, list) and bool(ids) and all(type(token) is int for token in ids)


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message as OpenAI's interface has it: arguments of tool calls are a string of JSON."""
    sent = {name: value for name, value in message.items() if name != "weight"}
    if isinstance(calls := message.get("tool_calls"), list):
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _json(call["function"].get("arguments", {}))}}
            if isinstance(call, dict) and isinstance(call.get("function"), dict)
            else call
            for call in calls
        ]
    return sent


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def merged(turns: Sequence[tuple[list[int], list[int]]]) -> list[dict[str, list[int]]]:
    """Documents of a conversation's (prompt, answer) in token ids; answers count in the loss. A turn whose prompt goes
    on from the one before lies in the same document; templates that rewrite earlier turns begin another."""
    documents = list[dict[str, list[int]]]()
    for prompt, answer in turns:
        ids, mask = ([], []) if not documents else documents[-1].values()
        if not documents or prompt[: len(ids)] != ids:
            documents.append({"input_ids": (ids := []), "loss_mask": (mask := [])})
        mask += [0] * (len(prompt) - len(ids)) + [1] * len(answer)
        ids += [*prompt[len(ids) :], *answer]
    return documents


def _at_once(
    run: Callable[[int, Any], Figures], questions: Iterator[tuple[int, Any]], most: int
) -> Iterator[tuple[int, Figures | Refused]]:
    """Results of work on numbered questions, as they end, with so many of them at once and none queued behind. After an
    interruption, or an error, nothing more is begun; what runs ends first, unless it is interrupted again."""
    going = dict[Future[Figures], int]()
    interrupted: BaseException | None = None
    with ThreadPoolExecutor(most) as pool:
        try:
            while interrupted is None or going:
                try:
                    for i, chat in islice(questions, 0 if interrupted else most - len(going)):
                        going[pool.submit(run, i, chat)] = i
                    if not going:
                        return
                    ended, _ = wait(going, return_when=FIRST_COMPLETED)
                except KeyboardInterrupt as again:
                    if interrupted is not None:
                        raise
                    interrupted = again
                    print(f"interrupted: {len(going)} running requests are waited for", file=sys.stderr)
                    continue
                except Exception as broken:  # where questions come from
                    interrupted = interrupted or broken
                    continue
                for future in ended:
                    i, error = going.pop(future), future.exception()
                    if error is not None and not isinstance(error, Refused):
                        interrupted = interrupted or error
                    else:
                        yield i, future.result() if error is None else error
            raise interrupted
        finally:
            for future in going:
                future.cancel()
