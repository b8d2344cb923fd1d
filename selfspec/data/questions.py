"""Evaluation sets: what a target is asked, in groups. One loader for the held-out instructions, source continuation and
files as others publish them (Spec-Bench, SPEED-Bench, MT-bench, HumanEval, GSM8K, chat messages, plain prompts)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.data.corpus import Document
from selfspec.data.instructions import instructions
from selfspec.data.prompts import GROUPS, prompts_of_group, sample_prompts
from selfspec.data.tasks import TASKS, pool

SETS = {"instructions": tuple(TASKS), "source": tuple(GROUPS)}  # and their groups; any other name is a file
_SEED = 1  # of the held-out instructions
_TEXT_KEYS = ("prompt", "question", "instruction", "text")


@dataclass
class Asking:
    """What a measurement asks. questions: an evaluation set (None: "instructions" where the data are Python source and
    the target has a chat template, else "source"); groups: of it (None: all); prompts: questions at most,
    evenly over the groups; prompt_tokens: of those cut from source; chat: through the target's chat template (false:
    the first turn as plain text); max_new_tokens: of each answer."""

    questions: str | None = None
    groups: list[str] | None = None
    prompts: int = 24
    prompt_tokens: int = 128
    chat: bool = True
    max_new_tokens: int = 128

    def check(self, place: str) -> None:
        """Raises ValueError for a number below 1, named as a field of `place`."""
        for name in ("prompts", "prompt_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{place}.{name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True)
class Question:
    """turns: what the user says, one after the other; system: said before; checks: whether the answer to a turn is
    right (none: nobody knows); ids: a plain text to continue instead, as token ids; record: the line of the file."""

    id: str
    group: str
    turns: tuple[str, ...] = ()
    system: str | None = None
    checks: tuple[Callable[[str], bool], ...] = ()
    ids: tuple[int, ...] = ()
    record: dict[str, Any] | None = None

    def opening(self, turn: int, answers: Sequence[str], tokenizer: Tokenizer) -> list[int]:
        """Token ids up to where the answer to a turn begins, behind the answers to those before."""
        if self.ids:
            return list(self.ids)
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for said, answer in zip(self.turns, answers[:turn], strict=False):
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": self.turns[turn]})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(str(text), add_special_tokens=False)["input_ids"])


def read_questions(
    asking: Asking, tokenizer: Tokenizer, documents: Callable[[], list[Document]], each: bool = False
) -> list[Question]:
    """At most `asking.prompts` questions of a set, evenly over its groups, or so many of each group.

    asking.questions: "instructions", made of the held-out `documents`; "source", stretches of them, from anywhere where
    no group is asked for; or a JSON-lines file, or a folder of such. Raises ValueError for a group that the set does
    not have, for a line that asks nothing, and where a chat template is needed and missing; FileNotFoundError for a
    file that does not exist.
    """
    name, groups, count = asking.questions or "source", asking.groups, asking.prompts
    if name not in SETS:
        found = _read(Path(name))
    elif unknown := set(groups or ()) - set(SETS[name]):
        raise ValueError(f"questions={name}: no group {sorted(unknown)}; it has {', '.join(SETS[name])}")
    elif name == "source":
        count *= len(groups) if groups and each else 1
        return _source(groups or (), count, tokenizer, documents(), asking.prompt_tokens)
    else:
        count *= len(groups or SETS[name]) if each else 1
        return _chat(_instructions(groups or SETS[name], count, documents()), tokenizer, name, asking.chat)
    own = list(dict.fromkeys(question.group for question in found))
    if unknown := set(groups or ()) - set(own):
        raise ValueError(f"questions={name}: no group {sorted(unknown)}; it has {', '.join(own)}")
    count *= len(groups or own) if each else 1
    chosen = _even({group: [q for q in found if q.group == group] for group in groups or own}, count)
    return _chat(chosen, tokenizer, name, asking.chat)


def _chat(chosen: list[Question], tokenizer: Tokenizer, name: str, chat: bool) -> list[Question]:
    if not chat:
        return [_plain(question, tokenizer) for question in chosen]
    if not tokenizer.chat_template:
        raise ValueError(
            f"questions={name} are asked in a chat, but tokenizer {tokenizer.name_or_path!r} has no chat template; "
            "give questions=source, or chat=false to ask their first turns as plain text"
        )
    return chosen


def _plain(question: Question, tokenizer: Tokenizer) -> Question:
    ids = tuple(tokenizer(question.turns[0])["input_ids"])
    return Question(question.id, question.group, checks=question.checks[:1], ids=ids, record=question.record)


def _even(groups: dict[str, list[Question]], count: int) -> list[Question]:
    """One question of each group in turn, of a group spread over what it holds."""
    shares = {g: count // len(groups) + (i < count % len(groups)) for i, g in enumerate(groups)}
    picked = {}
    for group, own in groups.items():
        n = min(shares[group], len(own))
        picked[group] = [own[(2 * i + 1) * len(own) // (2 * n)] for i in range(n)]
    return [own[i] for i in range(max(map(len, picked.values()))) for own in picked.values() if i < len(own)]


def _instructions(groups: Sequence[str], count: int, documents: list[Document]) -> list[Question]:
    made = instructions(pool(documents, "evaluation"), list(groups), count, _SEED)
    return [
        Question(
            f"{instruction.kind}-{i}",
            instruction.group,
            tuple(turn.question for turn in instruction.turns),
            checks=tuple(turn.check for turn in instruction.turns),
        )
        for i, instruction in enumerate(made)
    ]


def _source(
    groups: Sequence[str], count: int, tokenizer: Tokenizer, documents: list[Document], tokens: int
) -> list[Question]:
    found = {} if groups else {"source": _texts("source", sample_prompts(documents, tokenizer, count, tokens))}
    for i, group in enumerate(groups):
        share = count // len(groups) + (i < count % len(groups))
        rows = prompts_of_group(group, documents, tokenizer, share, tokens) if share else []
        found[group] = _texts(group, rows)
    return _even(found, count)


def _texts(group: str, rows: list[list[int]]) -> list[Question]:
    return [Question(f"{group}-{i}", group, ids=tuple(row)) for i, row in enumerate(rows)]


# -- files


def _read(path: Path) -> list[Question]:
    if not path.exists():
        raise FileNotFoundError(
            f"questions={str(path)!r} is neither {' nor '.join(SETS)} nor a JSON-lines file or a folder of them"
        )
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    found = []
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8-sig").split("\n"), 1):
            if line.strip():
                found.append(_question(line, f"{file}, line {number}", file.stem, number))
    if not found:
        raise ValueError(f"no usable example: {path} asks nothing")
    return found


def _question(line: str, place: str, stem: str, number: int) -> Question:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON ({error})") from error
    if isinstance(record, str):
        record = {"prompt": record}
    if not isinstance(record, dict):
        raise ValueError(f"{place}: expected an object or a string, found {type(record).__name__}")
    system, turns = _turns(record, place)
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip() or any(0xD800 <= ord(c) < 0xE000 for c in turn):
            raise ValueError(f"{place}: a turn without text: {turn!r:.80}")
    own = next((record[key] for key in ("question_id", "task_id", "id") if key in record), f"{stem}-{number}")
    group = record.get("category", record.get("subject", stem))
    return Question(str(own), str(group), tuple(turns), system, record=record)


def _turns(record: dict[str, Any], place: str) -> tuple[str | None, list[Any]]:
    """(what the system says, what the user says)"""
    turns = record.get("turns")
    if isinstance(turns, list) and turns:
        return None, turns
    messages = record.get("messages", record.get("conversations"))
    if isinstance(messages, list) and messages:
        said: dict[str, list[Any]] = {"system": [], "user": [], "assistant": []}
        for message in messages:
            role = message.get("role", message.get("from")) if isinstance(message, dict) else None
            role = {"human": "user", "gpt": "assistant"}.get(str(role), role)
            if role not in said:
                raise ValueError(
                    f"{place}: a message needs a `role` of system, user or assistant, found {message!r:.80}"
                )
            said[role].append(message.get("content", message.get("value")))
        if said["user"]:
            return (str(said["system"][0]) if said["system"] else None), said["user"]
    for key in _TEXT_KEYS:
        if isinstance(record.get(key), str):
            return None, [record[key]]
    raise ValueError(
        f"{place}: asks nothing; expected `turns`, `messages` or one of {', '.join(_TEXT_KEYS)}, found {sorted(record)}"
    )
