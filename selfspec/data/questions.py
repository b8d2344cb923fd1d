"""Evaluation sets: what a target is asked, in groups. One loader for the held-out instructions, source continuation and
files as others publish them (Spec-Bench, SPEED-Bench, MT-bench, HumanEval, GSM8K, chat messages, plain prompts)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.data.chat import Chat, without_nulls
from selfspec.data.chat_template import ChatTemplate, on_one_day
from selfspec.data.corpus import Document
from selfspec.data.cut_prompts import cut_prompts, sampled
from selfspec.data.execution import Solves, check_of, is_problem
from selfspec.data.instructions import edits, instructions
from selfspec.data.records import json_lines
from selfspec.data.store import tokenize
from selfspec.data.tasks import EDITS, TASKS, Instruction, pool
from selfspec.data.tasks.base import reference_checks
from selfspec.utils.checks import at_least, not_empty

# Sets and their groups; any other name is a file
SETS = {"instructions": tuple(TASKS), "edits": tuple(EDITS), "source": ("continuation",)}
HUMAN_EVAL, _PLACE = "human_eval", "SELFSPEC_HUMAN_EVAL"  # a set that lies elsewhere, and what names its file
_COMPLETE = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{}\n```"
_SEED = 1  # the held-out instructions are drawn with
_TEXT_KEYS = ("prompt", "question", "instruction", "text")


@dataclass
class Asking:
    """What a measurement asks. questions: an evaluation set (None: "instructions" where the data are Python source and
    the target has a chat template, else "source"); groups: of the questions that are asked (None: all); prompts:
    questions at most, evenly over the groups (each turn of a question is a text); prompt_tokens: length of prompts cut
    from source; chat: whether questions go through the target's chat template (false: the first turn as plain text);
    max_new_tokens: of each answer; chat_template_kwargs: of the template, such as enable_thinking."""

    questions: str | None = None
    groups: list[str] | None = None
    prompts: int = 24
    prompt_tokens: int = 128
    chat: bool = True
    max_new_tokens: int = 128
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def check(self, place: str) -> None:
        """Raises ValueError for a number below 1 and for what is empty, named as a field of `place`."""
        not_empty(self, place, "questions", give=f"give {', '.join(SETS)} or a file, or null for the default")
        not_empty(self, place, "groups", give="give at least one, or null for all")
        at_least(self, place, 1, "prompts", "prompt_tokens", "max_new_tokens")


@dataclass
class Answering(Asking):
    """allow_code_execution: whether code that the target writes may be run against a problem's tests, as HumanEval's
    are: in a process with limits, which is no protection against hostile code."""

    allow_code_execution: bool = False


@dataclass(frozen=True)
class Question:
    """turns: what the user says, one after the other; system: said before; checks: whether the answer to a turn is
    right (none where it can not be checked); ids: texts to continue instead, one a turn, as token ids; record: the line
    of the file; beside: what a chat template reads beside the turns, such as tools."""

    id: str
    group: str
    turns: tuple[str, ...] = ()
    system: str | None = None
    checks: tuple[Callable[[str], bool], ...] = ()
    ids: tuple[tuple[int, ...], ...] = ()
    record: dict[str, Any] | None = None
    beside: dict[str, Any] = field(default_factory=dict)

    @property
    def asks(self) -> int:
        """How many turns it has."""
        return len(self.ids or self.turns)

    def opening(self, turn: int, answers: Sequence[str], tokenizer: Tokenizer) -> list[int]:
        """Token ids up to where the answer to a turn begins, behind the answers to those before."""
        if self.ids:
            return list(self.ids[turn])
        return ChatTemplate(on_one_day(tokenizer)).opening(Chat(self.messages(turn, answers), self.beside), self.id)

    def messages(self, turn: int, answers: Sequence[str]) -> list[dict[str, str]]:
        """The conversation up to what the user says in a turn, behind the answers to those before."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn_text, answer in zip(self.turns, answers[:turn], strict=False):
            messages += [{"role": "user", "content": turn_text}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": self.turns[turn]}]


def groups_of(name: str) -> tuple[str, ...]:
    """The groups that a set or a file has."""
    place = file_of(name)
    return SETS.get(name) or tuple(
        dict.fromkeys(question.group for question in ([] if place is None else _read(place)))
    )


def read_questions(
    asking: Asking, tokenizer: Tokenizer, documents: Callable[[], list[Document]], each: bool = False
) -> list[Question]:
    """At most `asking.prompts` questions of a set, evenly over its groups (`each`: of each group).

    asking.questions: "instructions" and "edits", made of the held-out `documents`; "source", stretches of them, from
    anywhere where no group is asked for; "human_eval", the file that SELFSPEC_HUMAN_EVAL names; or a JSON-lines file,
    or a folder of such. Raises ValueError for a group that the set does not have, for a line that asks nothing, where a
    chat template is needed and missing, and where answers are programs that nobody allowed to be run; FileNotFoundError
    for a file that does not exist.
    """
    name = asking.questions or "source"
    place = file_of(name)
    questions = [] if place is None else _read(place)
    if isinstance(asking, Answering) and not asking.allow_code_execution and any(map(_is_program, questions)):
        raise ValueError(
            f"questions={name}: whether an answer is right is found by running the code that the target wrote; if you "
            "want that (best in a container), give decode.allow_code_execution=true (show., compare. likewise)"
        )
    known = SETS.get(name) or tuple(dict.fromkeys(question.group for question in questions))
    if unknown := set(asking.groups or ()) - set(known):
        raise ValueError(f"questions={name}: no group {sorted(unknown)}; it has {', '.join(known)}")
    groups = asking.groups or ([] if name == "source" else list(known))
    count = asking.prompts * (max(1, len(groups)) if each else 1)
    most = asking.prompts if each else count  # of a group
    if name == "source":
        return _source(groups, count, tokenizer, documents(), asking)
    if name == "instructions":
        questions = _instructions(instructions(pool(documents(), "evaluation"), groups, count, _SEED), groups)
    if name == "edits":
        questions = _instructions(edits(documents(), "evaluation", groups, count, _SEED), groups)
    chosen = _even({group: [q for q in questions if q.group == group] for group in groups}, count, most)
    if not asking.chat:
        return [_plain(question, tokenizer) for question in chosen]
    if not tokenizer.chat_template:
        raise ValueError(
            f"questions={name} are asked in a chat, but tokenizer {tokenizer.name_or_path!r} has no chat template; "
            "give questions=source, or chat=false to ask their first turns as plain text"
        )
    return [replace(q, beside={**asking.chat_template_kwargs, **q.beside}) for q in chosen]


def _plain(question: Question, tokenizer: Tokenizer) -> Question:
    first = question.checks[0] if question.checks else None
    ids = tuple(tokenizer(first.prompt if isinstance(first, Solves) else question.turns[0])["input_ids"])
    return Question(question.id, question.group, checks=question.checks[:1], ids=(ids,), record=question.record)


def _even(groups: dict[str, list[Question]], count: int, most: int) -> list[Question]:
    """One question of each group in turn, as long as it has any, of a group spread over what it holds and `most` of
    them."""
    room = {group: min(most, len(each)) for group, each in groups.items()}
    turns = [group for i in range(max(room.values(), default=0)) for group in groups if i < room[group]]
    shares = Counter(turns[:count])
    picked = [
        [each[(2 * i + 1) * len(each) // (2 * shares[group])] for i in range(shares[group])]
        for group, each in groups.items()
    ]
    return [question for turn in zip_longest(*picked) for question in turn if question is not None]


def _instructions(chosen: list[Instruction], groups: Sequence[str]) -> list[Question]:
    return [
        Question(
            f"{instruction.task}-{i // len(groups)}",
            instruction.group,
            tuple(turn.question for turn in instruction.turns),
            checks=tuple(turn.check for turn in instruction.turns),
        )
        for i, instruction in enumerate(chosen)
    ]


def _source(
    groups: Sequence[str], count: int, tokenizer: Tokenizer, documents: list[Document], asking: Asking
) -> list[Question]:
    tokens = asking.prompt_tokens
    if not groups:
        end = ChatTemplate(tokenizer, arguments=asking.chat_template_kwargs).prompt_end
        corpus = tokenize(documents, tokenizer, end)
        conversations: dict[int, list[tuple[int, ...]]] = {}  # whose turns are one question
        prompts = sampled(corpus, tokenizer, count, tokens, asking.max_new_tokens)
        for i, (start, prompt) in enumerate(prompts):
            conversations.setdefault(-i - 1 if start is None else start, []).append(tuple(prompt))
        return _texts("source", list(map(tuple, conversations.values())))
    modules = [document for document in documents if not document.name.startswith("test/")]
    return _texts("continuation", [(tuple(row),) for row in cut_prompts(modules, tokenizer, count, tokens)])


def _texts(group: str, texts: list[tuple[tuple[int, ...], ...]]) -> list[Question]:
    return [Question(f"{group}-{i}", group, ids=ids) for i, ids in enumerate(texts)]


# -- files


def file_of(name: str) -> Path | None:
    """Where the questions of a name lie; None for a set that is made here. Raises FileNotFoundError."""
    place = os.environ.get(_PLACE, "") if name == HUMAN_EVAL else name
    if name == HUMAN_EVAL and not Path(place).is_file():
        said = f"{_PLACE}={place} is no file; set it" if place else f"set {_PLACE}"
        raise FileNotFoundError(
            f"questions={name}: {said} to HumanEval.jsonl.gz (in data/ of github.com/openai/human-eval)"
        )
    if name in SETS:
        return None
    if Path(place).exists():
        return Path(place)
    raise FileNotFoundError(
        f"questions={name!r}: there is no such file or folder of JSON lines, and no such set; there are "
        f"{', '.join((*SETS, HUMAN_EVAL))}"
    )


def _read(path: Path) -> list[Question]:
    files = sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")]) if path.is_dir() else [path]
    if twice := [file.name for file in files if file.with_name(f"{file.name}.gz") in files]:
        raise ValueError(f"questions {str(path)!r} hold {twice[0]} and {twice[0]}.gz; take one of them out")
    questions: dict[str, Question] = {}
    for file in files:
        stem = Path(file.stem).stem if file.suffix == ".gz" else file.stem
        for place, record in json_lines(file):
            name = f"{stem}-{place.rpartition(' ')[2]}"  # with the number of its line
            question = _question(record, place, stem, name)
            if question.id in questions:
                question = replace(question, id=f"{name}-{question.id}")
            questions[question.id] = question
    if not questions:
        raise ValueError(f"no usable example: {path} asks nothing")
    return list(questions.values())


def _is_program(question: Question) -> bool:
    return any(isinstance(check, Solves) for check in question.checks)


def _question(line: object, place: str, stem: str, name: str) -> Question:
    if isinstance(line, ValueError):
        raise line
    record = {"prompt": line} if isinstance(line, str) else line
    if not isinstance(record, dict):
        raise ValueError(f"{place}: expected an object, found {type(record).__name__}")
    plain = without_nulls(record)
    if is_problem(plain):
        check, asked = check_of(plain, place), _COMPLETE.format(plain["prompt"].rstrip())
        return Question(plain["task_id"], stem, (asked,), checks=(check,), record=record)
    system, turns, beside = _turns(plain, place)
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip():
            raise ValueError(f"{place}: a turn without text: {turn!r:.80}")
        if any(0xD800 <= ord(c) < 0xE000 for c in turn):
            raise ValueError(f"{place}: a turn with half of a surrogate pair, which is no text: {turn!r:.80}")
    identity = next((plain[key] for key in ("question_id", "task_id", "id") if key in plain), name)
    group = plain.get("category", plain.get("subject", stem))
    checks = reference_checks(plain, len(turns))
    return Question(str(identity), str(group), tuple(turns), system, checks, record=record, beside=beside)


def _turns(record: dict[str, Any], place: str) -> tuple[str | None, list[Any], dict[str, Any]]:
    """(what the system says, what the user says, what a chat template reads beside)"""
    turns = record.get("turns")
    if turns is not None and not isinstance(turns, list):
        raise ValueError(f"{place}: turns must be a list of texts, not {turns!r:.80}")
    given = isinstance(record.get("messages", record.get("conversations")), list) and not turns
    chat = Chat.of(record if given else {**record, "messages": [{"role": "user", "content": ""}]}, place)
    roles = ["system" if m["role"] == "developer" else m["role"] for m in chat.messages]
    count = next((i for i, role in enumerate(roles) if role != "system"), len(roles))  # what stands before all turns
    system = "\n\n".join(str(m["content"]) for m in chat.messages[:count]) or None
    if turns:
        return system, turns, chat.beside
    if given and "user" in roles:
        if odd := sorted({*roles[count:]} - {"user", "assistant"}):
            raise ValueError(f"{place}: a turn of the role {odd[0]!r} between questions can not be asked; leave it out")
        asked = zip(roles, chat.messages, strict=True)
        return system, [m["content"] for role, m in asked if role == "user"], chat.beside
    for key in _TEXT_KEYS:
        if isinstance(text := record.get(key), str):
            before, behind = (record.get(name) for name in ("context", "input"))
            parts = [part for part in (before, text, behind) if isinstance(part, str) and part.strip()]
            return system, ["\n\n".join(parts) or text], chat.beside
    raise ValueError(
        f"{place}: asks nothing; expected `turns`, `messages` or one of {', '.join(_TEXT_KEYS)}, found {sorted(record)}"
    )
