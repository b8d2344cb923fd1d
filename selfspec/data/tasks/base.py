"""What an instruction is, and the words and functions that instructions are made of."""

from __future__ import annotations

import ast
import builtins
import json
import keyword
import math
import re
import textwrap
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from selfspec.data.corpus import Document
from selfspec.data.execution import fenced_blocks
from selfspec.utils.progress import progress

SPLITS = ("train", "validation", "evaluation")
RESERVED = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "self", "cls", "true", "false", "none"}
_FILES = 3  # that use a word at least (of many files: 1%), for it to be a common one
_WORDS, _FUNCTIONS = 20, 5  # fewer of them make no instructions
_REFERENCE = re.compile(r"####\s*(\S+)\s*$")
_NUMBER = re.compile(r"(?<![\d.])-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+\b)?")


@dataclass(frozen=True)
class Turn:
    """check: whether an answer is right, be it `answer` or another."""

    question: str
    answer: str
    check: Callable[[str], bool]


@dataclass(frozen=True)
class Instruction:
    """What a user asks. Each turn has one right answer, or a check that accepts all right ones."""

    task: str
    group: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Pool:
    """words: lower-case English words; functions: (name, source) of short functions of the split's own files."""

    words: tuple[str, ...]
    functions: tuple[tuple[str, str], ...]

    def some(self, rng: Random, count: int, without: str = "") -> list[str]:
        """Different words; none of them in the text `without`, unless a hundred draws found no others."""
        words = rng.sample(self.words, count)
        for _ in range(100):
            if not without or not any(word in without for word in words):
                break
            words = rng.sample(self.words, count)
        return words

    def function(self, rng: Random, fits: Callable[[str, str], bool]) -> tuple[str, str]:
        """A function (name, source) that fits. Raises ValueError where none of a thousand does."""
        for _ in range(1000):
            name, source = rng.choice(self.functions)
            if fits(name, source):
                return name, source
        raise ValueError("no usable example: none of a thousand functions of the source fits; give more (data.root)")


Make = Callable[[Pool, Random], list[Turn]]


def pool(documents: Sequence[Document], split: str, lines: tuple[int, int] = (2, 10), most: int = 400) -> Pool:
    """The words and functions of a split. No word is in two splits: a word's hash decides where it belongs. lines: of a
    function; most: characters of it.

    Raises ValueError where the documents hold too few of them.
    """
    files: Counter[str] = Counter()  # that use a word
    for document in documents:
        files.update(set(re.findall(r"\b[a-z]{3,9}\b", document.text)))
    common = min(max(_FILES, len(documents) // 100), max(1, len(documents) // 4))
    words = [w for w, n in files.items() if n >= common and w not in RESERVED and _split_of(w) == split]
    bar = progress(documents, desc=f"functions of the {split} files", unit=" files", leave=False)
    functions = [f for document in bar for f in _functions(document.text, lines, most)]
    if len(words) < _WORDS or len(functions) < _FUNCTIONS:
        raise ValueError(
            f"no usable example: {len(words)} words and {len(functions)} short functions in the {split} files are too "
            "few to make instructions of; give more source (data.root)"
        )
    return Pool(tuple(sorted(words)), tuple(functions))


def _split_of(word: str) -> str:
    """Five eighths of all words train, one eighth validates, a quarter evaluates."""
    return SPLITS[(0, 0, 0, 0, 0, 1, 2, 2)[zlib.crc32(word.encode()) % 8]]


def _functions(text: str, size: tuple[int, int], most: int) -> list[tuple[str, str]]:
    """Functions of so many lines, and characters at most, whose header is one line, dedented."""
    if not text.isascii() or "\t" in text:
        return []
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines = text.splitlines()
    found = []
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef) or node.decorator_list or node.end_lineno is None:
            continue
        cut = lines[node.lineno - 1 : node.end_lineno]
        if not size[0] <= len(cut) <= size[1] or not cut[0].rstrip().endswith("):") or len("\n".join(cut)) > most:
            continue
        source = textwrap.dedent("\n".join(line.rstrip() for line in cut))
        try:
            ast.parse(source)
        except SyntaxError:  # a string that lies further left than the code
            continue
        found.append((node.name, source))
    return found


def code_of(answer: str) -> str:
    """The first fenced block, or the whole answer."""
    return next(iter(fenced_blocks(answer)), answer).strip()


def fenced(language: str, code: str) -> str:
    return f"```{language}\n{code}\n```"


def exactly(code: str) -> Callable[[str], bool]:
    """Right where the code of the answer is this one, blanks at the ends of lines aside."""

    def tidy(text: str) -> list[str]:
        return [line.rstrip() for line in text.strip().splitlines()]

    return lambda answer: tidy(code_of(answer)) == tidy(code)


def parsed(parse: Callable[[str], object], value: object) -> Callable[[str], bool]:
    """Right where the code of the answer parses to this value, which JSON can hold: 1 is neither True nor 1.0."""

    def check(answer: str) -> bool:
        try:
            return json.dumps(parse(code_of(answer)), sort_keys=True) == json.dumps(value, sort_keys=True)
        except (SyntaxError, ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError):
            return False

    return check


def same_code(code: str, documented: bool = True) -> Callable[[str], bool]:
    """Right where the answer is the same Python program, blanks and quotes aside, and docstrings where it need not be
    documented."""

    def tree(text: str) -> str:
        whole = ast.parse(text)
        for node in () if documented else ast.walk(whole):
            if isinstance(node, ast.FunctionDef) and len(node.body) > 1 and ast.get_docstring(node) is not None:
                del node.body[0]
        return ast.dump(whole)

    return parsed(tree, tree(code))


def concludes(*values: object, asked: str = "") -> Callable[[str], bool]:
    """Right where the last line of the answer holds these words and numbers, the last one as its last or last but one
    word, and is none of the lines that were asked about."""

    def check(answer: str) -> bool:
        line = (answer.strip().splitlines() or [""])[-1]
        last = re.findall(r"-?\d(?:[\d.,/]*\d)?|\w+", line)  # 47, and not of -47, 3.47 or 47/7
        return (
            line.strip() not in asked.splitlines()
            and {str(value) for value in values} <= set(last)
            and str(values[-1]) in last[-2:]
        )

    return check


def reference_checks(record: dict[str, Any], turns: int) -> tuple[Callable[[str], bool], ...]:
    """Of answers to be compared with a number, which stands behind #### at the end of a reference, as in GSM8K."""
    references = record.get("reference")
    if references is None:
        references = [record.get("answer")]
    if not isinstance(references, list) or len(references) != turns:
        return ()
    matches = [_REFERENCE.search(text) if isinstance(text, str) else None for text in references]
    numbers = [None if match is None else _number(match.group(1)) for match in matches]
    known = [number for number in numbers if number is not None]
    return tuple(partial(_ends_in, number) for number in known) if len(known) == turns else ()


def _ends_in(number: float, answer: str) -> bool:
    """Whether the last number of an answer is this one (lm-evaluation-harness compares GSM8K's answers in a similar
    way, its flexible-extract)."""
    said = _NUMBER.findall(answer)
    return bool(said) and _number(said[-1]) == number


def _number(text: str) -> float | None:
    try:
        value = float(text.strip("$%").replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
