"""Where training text comes from: Python source or a folder of text, as documents with a loss mask."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from selfspec.utils.checks import at_least, shares

# Held out by name and never trained on. The two lists are disjoint: trees are measured on VALIDATION, figures in
# reports come from EVALUATION. Modules are held out with the tests named after them; tests of a held-out package that
# go by other names (test_json/, test_logging.py, test_robotparser.py) use these modules and are trained on.
VALIDATION = (
    *("bisect.py", "calendar.py", "fractions.py", "gzip.py", "json/encoder.py", "logging/handlers.py"),
    *("mailbox.py", "queue.py", "statistics.py", "wave.py", "test/test_bisect.py", "test/test_calendar.py"),
    *("test/test_fractions.py", "test/test_gzip.py", "test/test_queue.py", "test/test_wave.py"),
)
EVALUATION = (
    *("argparse.py", "configparser.py", "csv.py", "heapq.py", "json/decoder.py", "pprint.py", "shlex.py"),
    *("tempfile.py", "textwrap.py", "urllib/robotparser.py", "xmlrpc/client.py", "test/test_configparser.py"),
    *("test/test_csv.py", "test/test_heapq.py", "test/test_pprint.py", "test/test_shlex.py"),
    *("test/test_tempfile.py", "test/test_textwrap.py"),
)
# Held out from training as well, so that no near-copy of an evaluation module is learned.
_UNUSED = ("test/test_argparse.py", "test/test_statistics.py", "test/test_mailbox.py", "test/test_xmlrpc.py")
# Tables and grammars rather than source.
_SKIPPED = ("encodings/", "pydoc_data/", "lib2to3/tests/data/", "site-packages/", "dist-packages/")


@dataclass(frozen=True)
class Document:
    """One text. `spans` are the (text, counts in the loss) parts whose concatenation is the document; tokens: the token
    ids that an engine read and wrote, and which of them count, where these are known."""

    name: str
    spans: tuple[tuple[str, bool], ...]
    tokens: tuple[list[int], list[bool]] | None = None

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.spans)

    @property
    def conversation(self) -> bool:
        """Whether this is a conversation: it begins outside the loss, and answers in it count."""
        counts = [counts for _, counts in self.spans] if self.tokens is None else self.tokens[1]
        return any(counts) and not counts[0]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:  # a handful of the library's test files are not UTF-8 on purpose
        return None


def _check_folder(root: Path) -> None:
    if not root.is_dir():
        raise ValueError(f"data.root={str(root)!r} is not a folder")


@dataclass(frozen=True)
class PythonSource:
    """The Python source of the running interpreter's standard library, tests included, or of another interpreter's.

    `max_files` keeps that many training files, spread over the sorted list (for quick runs).
    """

    questions: ClassVar[str] = "instructions"  # the evaluation set made of it
    root: str | None = None
    max_files: int | None = None

    def __post_init__(self) -> None:
        _check_folder(self._root())
        at_least(self, "data", 1, "max_files")

    def _root(self) -> Path:
        return Path(self.root or sysconfig.get_paths()["stdlib"])

    def _held_out(self, names: tuple[str, ...]) -> list[Document]:
        root = self._root()
        modules = [(name, _read(root / name)) for name in names if (root / name).is_file()]
        return [Document(name, ((text, True),)) for name, text in modules if text]

    def train(self) -> list[Document]:
        root = self._root()
        held_out = {*VALIDATION, *EVALUATION, *_UNUSED}
        names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
        names = [n for n in names if n not in held_out and not any(part in n for part in _SKIPPED)]
        if self.max_files is not None:
            names = names[:: max(1, len(names) // self.max_files)][: self.max_files]
        documents = [Document(n, ((text, True),)) for n in names if (text := _read(root / n))]
        return _usable(documents, f"no .py file with text under {root}")

    @property
    def _none_held_out(self) -> str:
        why = "none of the standard library's modules that validate and measure lies under"
        return f"{why} {self._root()}; for source of your own take data=text 'data.pattern=*.py'"

    def validation(self) -> list[Document]:
        return _usable(self._held_out(VALIDATION), self._none_held_out)

    def evaluation(self) -> list[Document]:
        return _usable(self._held_out(EVALUATION), self._none_held_out)


def _usable(documents: list[Document], problem: str) -> list[Document]:
    if not documents:
        raise ValueError(f"no usable example: {problem}")
    return documents


def _split(documents: list[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """(training, validation): `fraction` of the documents, at least one, validates. A document's text decides, so that
    equal ones fall on one side."""
    keys = [hashlib.blake2b(document.text.encode(), digest_size=8).digest() for document in documents]
    known = sorted(set(keys))
    if len(known) < 2:
        raise ValueError(
            f"no usable example: {len(known)} document among {len(documents)}, but one must train and another validate"
        )
    edge = known[min(len(known) - 1, max(1, round(fraction * len(known))))]
    sides: tuple[list[Document], list[Document]] = ([], [])
    for document, key in zip(documents, keys, strict=True):
        sides[key < edge].append(document)
    return sides


@dataclass(frozen=True)
class TextFolder:
    """Every file under `root` whose name matches `pattern`, as UTF-8 text; `validation_share` of them validates."""

    questions: ClassVar[str] = "source"
    root: str
    pattern: str = "*.txt"
    validation_share: float = 0.1

    def __post_init__(self) -> None:
        _check_folder(Path(self.root))
        shares(self, "data", "validation_share", ends="()")

    def _documents(self) -> list[Document]:
        root, documents = Path(self.root), []
        for path in sorted(p for p in root.rglob(self.pattern) if p.is_file()):
            if (text := _read(path)) is None:
                raise ValueError(f"{path} is not UTF-8 text; convert it or narrow data.pattern={self.pattern!r}")
            if text.strip():
                documents.append(Document(str(path), ((text, True),)))
        return _usable(documents, f"no file with text matches {self.pattern!r} under {root}")

    def train(self) -> list[Document]:
        return _split(self._documents(), self.validation_share)[0]

    def validation(self) -> list[Document]:
        return _split(self._documents(), self.validation_share)[1]

    def evaluation(self) -> list[Document]:
        return self.validation()
