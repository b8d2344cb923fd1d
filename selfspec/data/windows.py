"""Documents as one stream of tokens, and batches as a pure function of the step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.data.corpus import Document

_OPEN = 16  # rows that `packed` fills at the same time


@dataclass(frozen=True)
class Stream:
    """All documents in a row, each behind one separator token.

    tokens: int64 [T]; mask: bool [T], True where the token counts in the loss; n_bytes: UTF-8 bytes of the text.
    """

    tokens: Tensor
    mask: Tensor
    n_bytes: int


def tokenize(documents: list[Document], tokenizer: Tokenizer) -> Stream:
    """Encode documents with a Hugging Face tokenizer; the separator is its BOS, or EOS where it has no BOS.

    Raises ValueError where the tokenizer has neither.
    """
    separator = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if separator is None:
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} has neither a BOS nor an EOS token to separate texts")
    spans = [span for document in documents for span in document.spans]
    encoded = iter(tokenizer([text for text, _ in spans], add_special_tokens=False)["input_ids"] if spans else [])
    tokens: list[int] = []
    mask: list[bool] = []
    for document in documents:
        for i, (_, counts) in enumerate(document.spans):
            ids = next(encoded)
            if i == 0 and ids[:1] != [separator]:  # a chat template may begin with it
                tokens.append(separator)
                mask.append(False)
            tokens.extend(ids)
            mask.extend([counts] * len(ids))
    n_bytes = sum(len(text.encode()) for text, _ in spans)
    return Stream(torch.tensor(tokens, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool), n_bytes)


class Windows:
    """Batches of windows of `length` tokens; every epoch shifts and shuffles them anew (`aligned`: shuffles only, for
    a stream whose every `length` tokens are a text of their own).

    `batch(step)` depends on the arguments alone, so a resumed run sees the batches of an uninterrupted one.
    """

    def __init__(
        self, stream: Stream, length: int, size: int, seed: int, rank: int = 0, world: int = 1, aligned: bool = False
    ) -> None:
        """Raises ValueError where the stream is shorter than one window or `size` does not divide over `world`."""
        if len(stream.tokens) < (1 if aligned else 2) * length:
            raise ValueError(
                f"no usable example: {len(stream.tokens)} tokens of text, but a length of {length} needs at least "
                f"{(1 if aligned else 2) * length}; give more text or a smaller length"
            )
        if size % world:
            raise ValueError(f"{size} rows a step do not divide over {world} processes; choose another loop.batch_size")
        self.stream, self.length, self.size, self.seed = stream, length, size, seed
        self.rank, self.world = rank, world
        self.aligned = aligned
        self.per_epoch = len(stream.tokens) // length - (not aligned)
        self._epoch = (-1, torch.empty(0))

    def _starts(self, epoch: int) -> Tensor:
        if self._epoch[0] != epoch:
            g = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            shift = 0 if self.aligned else int(torch.randint(self.length, (1,), generator=g))
            self._epoch = (epoch, torch.randperm(self.per_epoch, generator=g) * self.length + shift)
        return self._epoch[1]

    def batch(self, step: int) -> dict[str, Tensor]:
        """tokens int64 [size/world, length] and mask bool of the same shape."""
        first = step * self.size + self.rank * (self.size // self.world)
        indices = range(first, first + self.size // self.world)
        starts = torch.stack([self._starts(i // self.per_epoch)[i % self.per_epoch] for i in indices])
        at = starts[:, None] + torch.arange(self.length)
        return {"tokens": self.stream.tokens[at], "mask": self.stream.mask[at]}


def packed(streams: list[Stream], length: int, pad: int) -> Stream:
    """Whole documents, one stream each, side by side in rows of `length` tokens, rows one after another; what is left
    of a row is `pad`, outside the loss. A document goes to the fullest row it fits in; a longer one is cut."""
    open_rows: list[list[Stream]] = []
    rows: list[list[Stream]] = []
    for stream in streams:
        need = min(len(stream.tokens), length)
        fits = [row for row in open_rows if _filled(row) + need <= length]
        if not fits:
            if len(open_rows) == _OPEN:
                rows.append(open_rows.pop(max(range(_OPEN), key=lambda i: _filled(open_rows[i]))))
            fits = [[]]
            open_rows.append(fits[0])
        max(fits, key=_filled).append(stream)
    rows += open_rows
    tokens = torch.full((len(rows), length), pad)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        own, counts = torch.cat([s.tokens for s in row])[:length], torch.cat([s.mask for s in row])[:length]
        tokens[i, : len(own)], mask[i, : len(own)] = own, counts
    return Stream(tokens.flatten(), mask.flatten(), sum(s.n_bytes for s in streams))


def openings(stream: Stream) -> list[Stream]:
    """What stands before each answer of a conversation: the stream up to every token at which its mask begins. Nothing
    of it counts in the loss."""
    begins = (stream.mask[1:] & ~stream.mask[:-1]).nonzero()[:, 0] + 1
    none = torch.zeros_like(stream.mask)
    return [Stream(stream.tokens[:at], none[:at], 0) for at in begins.tolist()]


def share_of_questions(questions: int, tokens: int, length: int) -> float:
    """Share of rows that are questions where others are stretches of a text of `tokens` tokens: each question counts as
    a row, and so does every `length` tokens of text."""
    return questions / (questions + tokens / length) if questions else 0.0


def _filled(row: list[Stream]) -> int:
    return sum(len(stream.tokens) for stream in row)


def consecutive(values: Tensor, length: int, limit: int | None = None) -> Tensor:
    """A stream [T] cut into rows without overlap, [R, length]; `limit` keeps R rows spread over the stream.

    Raises ValueError where it is shorter than one row.
    """
    rows = len(values) // length
    if rows < 1:
        raise ValueError(f"no usable example: {len(values)} validation tokens, one row needs {length}")
    cut = values[: rows * length].view(rows, length)
    if limit is not None and limit < rows:
        cut = cut[torch.linspace(0, rows - 1, limit).long()]
    return cut
