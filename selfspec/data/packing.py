"""Rows of tokens to train on, as a pure function of the step: whole documents, packed."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from selfspec.data.store import Corpus
from selfspec.utils.files import wrapped

_OPEN = 16  # rows that are filled at the same time


class Packed:
    """Batches of rows of `length` tokens in which whole documents lie side by side; every epoch shuffles the rows anew.
    Only documents longer than a row are cut, into rows' lengths, each part a document of its own. It begins as texts of
    the tokenizer do (`Corpus.begins`), outside the loss.

    `batch(step)` depends on the arguments alone, so a resumed run sees the batches of an uninterrupted one.
    """

    def __init__(
        self, corpus: Corpus, length: int, size: int, seed: int, rank: int = 0, world: int = 1, pad: int = 0
    ) -> None:
        """pad: the token that fills rows up, outside the loss. Raises ValueError where there is no document, or `size`
        does not divide over `world`."""
        if not len(corpus.tokens):
            raise ValueError("no usable example: there is no text")
        _divides(size, world)
        self.corpus, self.length, self.size, self.seed, self.pad = corpus, length, size, seed, pad
        self.rank, self.world = rank, world
        documents, self.begins = corpus.lengths(), torch.tensor(corpus.begins, dtype=torch.int64)
        if (step := length - len(self.begins)) < 1:  # of a text's further parts
            raise ValueError(
                f"length={length} leaves no room behind the {len(self.begins)} tokens that texts begin with; raise it"
            )
        parts = ((documents - length).clamp(min=0) + step - 1) // step + (documents > 0)
        number = torch.arange(int(parts.sum())) - (parts.cumsum(0) - parts).repeat_interleave(parts)
        self.more = (number > 0) * len(self.begins)  # tokens that a part begins with and the text has not there
        before = number * step + self.more
        self.starts = corpus.starts[:-1].repeat_interleave(parts) + before
        self.lengths = (documents.repeat_interleave(parts) - before + self.more).clamp(max=length)
        order = torch.randperm(len(self.starts), generator=torch.Generator().manual_seed(seed))
        self.members, self.ends = plan(self.lengths[order].tolist(), length)
        self.members = order[self.members]
        self.per_epoch = len(self.ends)
        self._epoch = (-1, torch.empty(0))

    def _row(self, i: int) -> int:
        """The row that is read as the i-th of all, all epochs counted."""
        epoch, at = divmod(i, self.per_epoch)
        if self._epoch[0] != epoch:
            g = torch.Generator().manual_seed(wrapped(self.seed * 1_000_003 + epoch))
            self._epoch = (epoch, torch.randperm(self.per_epoch, generator=g))
        return int(self._epoch[1][at])

    def _read(self, step: int) -> range:
        """Which rows this process's part of a step reads, all epochs counted."""
        first = step * self.size + self.rank * (self.size // self.world)
        return range(first, first + self.size // self.world)

    def numbers(self, step: int) -> list[int]:
        """The rows of this process's part of a step."""
        return [self._row(i) for i in self._read(step)]

    def batch(self, step: int) -> dict[str, Tensor]:
        """tokens int64 [size/world, length], mask bool and documents int64 of the same shape: which document of its row
        a token belongs to; rows, epochs int64 [size/world]: their numbers, and how often each was read before."""
        epochs = torch.tensor([i // self.per_epoch for i in self._read(step)])
        return {**self.rows(self.numbers(step)), "epochs": epochs}

    def rows(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """As `batch`, of rows by their numbers in 0 .. per_epoch - 1, without their epochs."""
        tokens = torch.full((len(numbers), self.length), self.pad)
        mask = torch.zeros(len(numbers), self.length, dtype=torch.bool)
        documents = torch.full((len(numbers), self.length), -1)
        for i, row in enumerate(numbers):
            end = 0
            for n, member in enumerate(self.members[self.ends[row - 1] if row else 0 : self.ends[row]].tolist()):
                start, count, more = int(self.starts[member]), int(self.lengths[member]), int(self.more[member])
                documents[i, end : end + count] = n
                tokens[i, end : end + more] = self.begins[:more]
                place, part = slice(end + more, end + count), slice(start, start + count - more)
                tokens[i, place], mask[i, place] = self.corpus.tokens[part].long(), self.corpus.mask[part]
                end += count
        return {"tokens": tokens, "mask": mask, "documents": documents, "rows": torch.tensor(numbers)}

    @property
    def filled(self) -> float:
        """Share of the rows' tokens that are text."""
        return float(self.lengths.sum()) / (self.per_epoch * self.length)


def parts_of(tokens: Tensor, length: int, begins: tuple[int, ...]) -> Iterator[tuple[Tensor, int]]:
    """A document's parts as `Packed` cuts it, int64 [n], and how many of its tokens each has."""
    yield tokens[:length], len(tokens[:length])
    for part in tokens[length:].split(length - len(begins)) if len(tokens) > length else ():
        yield torch.cat([torch.tensor(begins, dtype=tokens.dtype), part]), len(part)


def plan(lengths: Iterable[int], length: int) -> tuple[Tensor, Tensor]:
    """Which documents share rows of `length` tokens: members, int64 [D], and for each row where its members end, int64
    [R]. A document goes to the fullest row it fits in, of the 16 that are open."""
    free, rows = list[int](), list[list[int]]()  # of the open rows, by what is left of them, the fullest first
    members, ends = array("q"), array("q")

    def close(row: list[int]) -> None:
        members.extend(row)
        ends.append(len(members))

    for i, whole in enumerate(lengths):
        need = min(whole, length)
        at = bisect_left(free, need)
        if at < len(free):
            left, row = free.pop(at) - need, [*rows.pop(at), i]
        else:
            if len(free) == _OPEN:
                free.pop(0)
                close(rows.pop(0))
            left, row = length - need, [i]
        at = bisect_left(free, left)
        free.insert(at, left)
        rows.insert(at, row)
    for row in rows:
        close(row)
    return torch.from_numpy(np.array(members, np.int64)), torch.from_numpy(np.array(ends, np.int64))


def openings(corpus: Corpus) -> tuple[Tensor, Tensor]:
    """What stands before each answer of the conversations, as where it starts and ends in the corpus, int64 [Q] each:
    from the start of the conversation up to every token at which the mask begins."""
    ends = _begins(corpus.mask)
    documents = torch.searchsorted(corpus.starts, ends, right=True) - 1
    starts = corpus.starts[documents]
    asks = corpus.is_chat[documents] & (ends > starts)
    return starts[asks], ends[asks]


def _begins(mask: Tensor, piece: int = 1 << 24) -> Tensor:
    """Where a mask [T] turns True, a piece at a time, so that long ones are not held."""
    parts, before = [torch.zeros(0, dtype=torch.int64)], torch.zeros(1, dtype=torch.bool)
    for first in range(0, len(mask), piece):
        part = torch.cat([before, mask[first : first + piece]])
        parts.append((part[1:] & ~part[:-1]).nonzero()[:, 0] + first)
        before = part[-1:]
    return torch.cat(parts)


def share_of_questions(questions: int, tokens: int, length: int) -> float:
    """Share of rows that are questions where others are stretches of a text of `tokens` tokens: each question counts as
    a row, and so does every `length` tokens of text."""
    return questions / (questions + tokens / length) if questions else 0.0


def _divides(size: int, world: int) -> None:
    if size % world:
        raise ValueError(f"{size} rows a step do not divide over {world} processes; choose another loop.batch_size")
