"""Documents through a tokenizer: their tokens, and which of them count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, islice, pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.data.corpus import Document

_BATCH = 512  # documents that go through the tokenizer at once


def beginning(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What a tokenizer puts before every text by itself, such as a BOS token: a text that is cut out of another begins
    with it too, as in decoding."""
    bare, whole = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True))
    starts = (i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return tuple(whole[: next(starts, 0)])


def encoded(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[bool], bool, int]]:
    """Each document's tokens, which of them count, whether it is a conversation, and the bytes of its text. Text stands
    behind a separator, the tokenizer's BOS, or EOS where it has none; a conversation begins as its chat template does,
    as in decoding. A document is encoded as a whole, but a conversation in pieces where a token would reach from what
    stands before an answer into it: a prompt ends there. A token counts where its last character does. Raises
    ValueError where the tokenizer has neither."""
    separator = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if separator is None:
        raise ValueError(f"tokenizer {tokenizer.name_or_path!r} has neither a BOS nor an EOS token to separate texts")
    left = iter(documents)
    while batch := list(islice(left, _BATCH)):
        texts = ["" if document.tokens else document.text for document in batch]
        if tokenizer.is_fast:
            encoding = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
            rows: Iterable[Any] = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
        else:
            rows = (_by_span(document, tokenizer) for document in batch)
        for document, (ids, offsets) in zip(batch, rows, strict=True):
            if document.conversation and tokenizer.is_fast and (cuts := _straddled(document, offsets)):
                parts = _in_pieces(document.text, cuts, tokenizer)
                # Some tokenizers put a space before every text, and so before every piece
                ids, offsets = parts if tokenizer.decode(parts[0]) == tokenizer.decode(ids) else (ids, offsets)
            ids, mask = document.tokens or (ids, _counting(document, offsets))
            if ids[:1] != [separator] and not document.conversation:
                ids, mask = [separator, *ids], [False, *mask]
            yield ids, mask, document.conversation, len(document.text.encode())


def _straddled(document: Document, offsets: list[tuple[int, int]]) -> list[int]:
    """The places at which an answer begins inside a token."""
    starts = list(accumulate((len(text) for text, _ in document.spans), initial=0))
    answers = {start for start, (_, counts) in zip(starts, document.spans, strict=False) if counts}
    return sorted({place for start, stop in offsets for place in range(start + 1, stop) if place in answers})


def _in_pieces(text: str, cuts: list[int], tokenizer: Tokenizer) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokens and offsets of a text whose pieces between the cuts are encoded on their own."""
    ids, offsets = list[int](), list[tuple[int, int]]()
    for start, stop in pairwise((0, *cuts, len(text))):
        new = tokenizer(text[start:stop], add_special_tokens=False, return_offsets_mapping=True)
        ids += new["input_ids"]
        offsets += [(start + a, start + b) for a, b in new["offset_mapping"]]
    return ids, offsets


def _by_span(document: Document, tokenizer: Tokenizer) -> tuple[list[int], list[tuple[int, int]]]:
    """For tokenizers that do not tell where a token stands: every span on its own, its tokens all at its start."""
    ids, offsets, at = list[int](), list[tuple[int, int]](), 0
    for text, _ in document.spans:
        new = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += new
        offsets += [(at, at)] * len(new)
        at += len(text)
    return ids, offsets


def _counting(document: Document, offsets: list[tuple[int, int]]) -> list[bool]:
    """Which tokens, of which `offsets` tell the characters, end in a span that counts: a token may begin with the space
    before an answer."""
    if len(document.spans) == 1:
        return [document.spans[0][1]] * len(offsets)
    mask, end, spans, counts = list[bool](), 0, iter(document.spans), False
    for start, stop in offsets:
        while max(start, stop - 1) >= end and (span := next(spans, None)) is not None:
            end, counts = end + len(span[0]), span[1]
        mask.append(counts)
    return mask
