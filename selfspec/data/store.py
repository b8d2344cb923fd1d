"""Documents as tokens: in memory, or written once into files that are mapped into memory."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.data.corpus import Document
from selfspec.data.documents import Broken, Records
from selfspec.data.encoded import beginning, encoded
from selfspec.utils.errors import visible
from selfspec.utils.files import disk_room, is_main_process, read_json
from selfspec.utils.progress import progress

_PARTS = ("train", "validation")
_SIZES = {"tokens": ("tokens", 4), "mask": ("tokens", 1), "ends": ("documents", 8), "talks": ("documents", 1)}
_VERSION = 10  # of the files and of what stands in them


@dataclass(frozen=True)
class Stream:
    """Texts in a row. tokens: int64 or int32 [T]; mask: bool [T], True where the token counts in the loss; n_bytes:
    UTF-8 bytes of the text."""

    tokens: Tensor
    mask: Tensor
    n_bytes: int


@dataclass(frozen=True)
class Corpus(Stream):
    """Documents in a row. starts: int64 [D + 1], where each begins and the last ends; is_chat: bool [D], which are
    conversations; counted: how many tokens count in the loss; key: a hash of the tokens, their mask and starts;
    prompt_end: see `ChatTemplate.prompt_end`; begins: see `beginning`."""

    starts: Tensor
    is_chat: Tensor
    counted: int
    key: str
    prompt_end: tuple[int, ...] = ()
    begins: tuple[int, ...] = ()

    def document(self, i: int) -> Stream:
        part = slice(int(self.starts[i]), int(self.starts[i + 1]))
        return Stream(self.tokens[part].long(), self.mask[part], 0)

    def prompt(self, start: int, end: int) -> Tensor:
        """What stands before an answer that begins at `end`, int64 [n], as a prompt for it."""
        before, more = self.tokens[start:end].long(), torch.tensor(self.prompt_end, dtype=torch.int64)
        return before if torch.equal(before[-len(more) :], more) else torch.cat([before, more])

    def lengths(self) -> Tensor:
        """int64 [D]"""
        return self.starts.diff()


def tokenize(documents: Iterable[Document], tokenizer: Tokenizer, prompt_end: Sequence[int] = ()) -> Corpus:
    """Documents as tokens in memory; see `encoded`. prompt_end: see `ChatTemplate.prompt_end`."""
    parts, is_chat, n_bytes = list[tuple[Tensor, Tensor]](), list[bool](), 0
    bar = progress(encoded(documents, tokenizer), desc="tokenizing", unit=" documents", leave=False)
    for tokens, mask, talk, size in bar:
        parts.append((torch.tensor(tokens, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool)))
        is_chat.append(talk)
        n_bytes += size
    corpus = in_a_row(parts, torch.tensor(is_chat, dtype=torch.bool), beginning(tokenizer))
    return replace(corpus, n_bytes=n_bytes, prompt_end=tuple(prompt_end))


def joined(tokens: Tensor, mask: Tensor, starts: Tensor, is_chat: Tensor) -> Corpus:
    """A corpus of tensors, its figures counted but for the bytes of its text."""
    return Corpus(tokens, mask, 0, starts, is_chat, int(mask.sum()), _hash(tokens, mask, starts))


def in_a_row(documents: Sequence[tuple[Tensor, Tensor]], is_chat: Tensor, begins: tuple[int, ...] = ()) -> Corpus:
    """A corpus of documents, each its tokens and their mask. begins: see `beginning`."""
    starts = torch.tensor([0, *(len(tokens) for tokens, _ in documents)]).cumsum(0)
    none = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
    tokens, mask = (torch.cat(parts) for parts in zip(none, *documents, strict=True))
    return replace(joined(tokens, mask, starts, is_chat), begins=begins)


def _hash(*parts: Tensor) -> str:
    key = hashlib.sha256()
    for part in parts:
        key.update(part.contiguous().numpy().tobytes())
    return key.hexdigest()


# -- files


class _Writer:
    """The files of one part: tokens int32, masks, and the lengths of documents, appended as they come."""

    def __init__(self, folder: Path, part: str) -> None:
        self.files: dict[str, BinaryIO] = {n: (folder / f"{part}.{n}").open("wb") for n in ("tokens", "mask", "ends")}
        self.is_chat = bytearray()
        self.end = self.n_bytes = self.counted = 0
        self.key = hashlib.sha256()

    def add(self, ids: list[int], counts: list[bool], talk: bool, size: int) -> None:
        tokens, mask = np.asarray(ids, np.int32).tobytes(), np.asarray(counts, np.bool_).tobytes()
        self.end += len(ids)
        self.files["tokens"].write(tokens)
        self.files["mask"].write(mask)
        self.files["ends"].write(np.int64(self.end).tobytes())
        self.is_chat.append(talk)
        self.n_bytes += size
        self.counted += sum(counts)
        self.key.update(tokens + mask + np.int64(self.end).tobytes())

    def close(self) -> dict[str, int | str]:
        for file in self.files.values():
            file.close()
        counts = {"tokens": self.end, "documents": len(self.is_chat), "bytes": self.n_bytes, "counted": self.counted}
        return {**counts, "key": self.key.hexdigest()}


def stored(source: Records, tokenizer: Tokenizer, folder: Path) -> tuple[Corpus, Corpus]:
    """Training and validation texts of records, tokenized once into files in `folder`, under a hash of the records, the
    tokenizer and its chat template. A second call maps the files; only pages that are read take memory. What was left
    out is printed by both. Raises ValueError as `Records.documents` does."""
    folder = folder / _key(source, tokenizer)
    if (about := _about(folder)) is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}-"))
        try:
            with disk_room(folder):
                _write(source, tokenizer, scratch)
            if _about(folder) is None:  # still not there, or damaged
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # another process was faster: what it wrote is the same
                os.rename(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        about = _about(folder)
        assert about is not None
    if about["broken"] > source.tolerate:
        why = f"{about['named'][0]}; it is one of {about['broken']} broken records"
        raise ValueError(f"{why}, and data.tolerate={source.tolerate}")
    if is_main_process():
        sys.stderr.writelines(f"{line}\n" for line in _left_out(about, source))
    shared = about, tuple(source.template.prompt_end), beginning(tokenizer)
    return _mapped(folder, _PARTS[0], *shared), _mapped(folder, _PARTS[1], *shared)


def _left_out(about: dict[str, Any], source: Records) -> Iterator[str]:
    if about["broken"]:
        yield f"{about['broken']} broken records of {source} are left out, among them:"
        yield from (f"  {visible(why)}" for why in about["named"])
    if about["empty"]:
        yield f"{about['empty']} records of {source} hold no text, or no assistant's turn"
    if about["unseen"]:
        which = visible(about["which"])
        yield f"the chat template does not show {about['unseen']} turns of {source}, the first: {which}"
    if about["left"]:
        share = f"{about['left']} of {about['turns']}"
        yield f"{share} assistant turns of {source} are left out, the first: {visible(about['why'])}"


def _about(folder: Path) -> dict[str, Any] | None:
    """What stands in a folder; None where it is not whole."""
    try:
        about: dict[str, Any] = read_json(folder / "about.json")
        named = [(part, name) for part in _PARTS for name in _SIZES]
        sizes = {f"{part}.{name}": about[part][_SIZES[name][0]] * _SIZES[name][1] for part, name in named}
        if any((folder / name).stat().st_size != size for name, size in sizes.items()):
            return None
        if odd := [name for name, wanted in about.get("files", {}).items() if _file_hash(folder / name) != wanted]:
            print(f"{folder / odd[0]} was changed on the disk; the texts are tokenized anew", file=sys.stderr)
            return None
        return about
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _key(source: Records, tokenizer: Tokenizer) -> str:
    whole = hashlib.sha256(f"{_VERSION} {source.fingerprint()} {source.validation_share}".encode())
    whole.update(f"{sorted(source.ends)} {sorted(source.chat_template_kwargs.items())}".encode())
    # Two tokenizers of one class can differ, so all of their settings are hashed.
    settings = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(tokenizer)
    whole.update(f"{settings} {tokenizer.chat_template} {tokenizer.special_tokens_map}".encode())
    return whole.hexdigest()[:24]


def _write(source: Records, tokenizer: Tokenizer, folder: Path) -> None:
    writers = {part: _Writer(folder, part) for part in _PARTS}
    broken, sides = Broken(), deque[str]()  # of the documents that are on their way through the tokenizer

    def noted() -> Iterator[Document]:
        for document, side in source.documents(broken):
            sides.append(side)
            yield document

    with progress(desc=f"tokenizing {source}", unit=" records") as bar:
        for one in encoded(noted(), tokenizer):
            writers[sides.popleft()].add(*one)
            if bar.update():
                figures = {"tokens": sum(writer.end for writer in writers.values()), "broken": broken.count}
                bar.set_postfix(figures, refresh=False)
    about = {part: writer.close() for part, writer in writers.items()}
    for part, writer in writers.items():
        (folder / f"{part}.talks").write_bytes(bytes(writer.is_chat))
    files = {f"{part}.{name}": _file_hash(folder / f"{part}.{name}") for part in _PARTS for name in _SIZES}
    (folder / "about.json").write_text(json.dumps({**about, **vars(broken), "broken": broken.count, "files": files}))


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mapped(
    folder: Path, part: str, about: dict[str, Any], prompt_end: tuple[int, ...], begins: tuple[int, ...]
) -> Corpus:
    counts = about[part]

    def read(name: str, dtype: torch.dtype, size: int) -> Tensor:
        return torch.from_file(str(folder / f"{part}.{name}"), size=size, dtype=dtype)

    tokens = read("tokens", torch.int32, counts["tokens"])
    mask = read("mask", torch.bool, counts["tokens"])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), read("ends", torch.int64, counts["documents"])])
    is_chat = read("talks", torch.bool, counts["documents"])
    found = counts["bytes"], starts, is_chat, counts["counted"], str(counts["key"])
    return Corpus(tokens, mask, *found, prompt_end, begins)
