"""Token ids as text: all at once, as they come, and where a text ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers import StoppingCriteria

_UNFINISHED = "\ufffd"  # what stands for bytes that make no character yet


def text_of(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """The text of token ids. Those that the tokenizer does not know, such as rows that pad a target's vocabulary, are
    left out."""
    try:
        return str(tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
    except (ValueError, TypeError, KeyError, IndexError, OverflowError):
        known = [token for token in ids if _known(tokenizer, token)]
        return str(tokenizer.decode(known, skip_special_tokens=skip_special_tokens))


def _known(tokenizer: Tokenizer, token: int) -> bool:
    try:
        return token < len(tokenizer) and tokenizer.decode([token]) is not None
    except (ValueError, TypeError, KeyError, IndexError, OverflowError):
        return False


class Detokenizer:
    """Text of tokens as they come. The pieces, joined, are the text of all of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.ids, self.shown = tokenizer, list[int](), ""
        # WordPiece and space clean-up can change a word once the next one is known; BPE is not cleaned up
        backend = getattr(tokenizer, "backend_tokenizer", None)
        cleans = tokenizer.clean_up_tokenization_spaces and type(getattr(backend, "model", None)).__name__ != "BPE"
        decoder = repr(getattr(backend, "decoder", None))
        self.rewrites, self.falls_back = "WordPiece" in decoder or bool(cleans), "ByteFallback" in decoder
        self.skipped = set(tokenizer.all_special_ids)

    def add(self, tokens: Sequence[int]) -> str:
        """The text that is certain by now and was not yet given."""
        self.ids += tokens
        size = len(self.ids)  # without bytes at the end, which are text together or not at all
        while self.falls_back and size and self._is_byte(self.ids[size - 1]):
            size -= 1
        text = text_of(self.tokenizer, self.ids[:size])
        if self.rewrites:
            text = text[: max(0, *(text.rstrip().rfind(mark) for mark in " \n\t"))]
        if text.endswith(_UNFINISHED) or not text.startswith(self.shown):
            return ""
        piece, self.shown = text[len(self.shown) :], text
        return piece

    def _is_byte(self, token: int) -> bool:
        """Or a special token, which may stand between bytes."""
        return token in self.skipped or str(self.tokenizer.convert_ids_to_tokens(token)).startswith("<0x")

    def rest(self) -> str:
        """What is left when no more tokens come."""
        text = text_of(self.tokenizer, self.ids)
        piece, self.shown = text[len(self.shown) :], text
        return piece


class StopStrings(StoppingCriteria):
    """Ends a row whose text holds one of some strings, once a token brings it to its end. By the text and not by the
    vocabulary's entries as transformers' own does, so that every kind of tokenizer is served. prompts: tokens of each
    row's prompt, in whose text no string may begin (none given: it may, as in transformers)."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], prompts: Sequence[int] = ()) -> None:
        self.tokenizer, self.strings, self.prompts = tokenizer, list(strings), prompts
        self.tail = 4 * max(map(len, self.strings)) + 16  # tokens that hold the longest, a byte each

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Of ids int64 [B, S]: bool [B]."""
        begins, tail = max(0, input_ids.shape[1] - self.tail), input_ids[:, -self.tail :].tolist()
        prompts = self.prompts or [0] * len(tail)
        rows = [(tuple(row), max(0, prompt - begins)) for row, prompt in zip(tail, prompts, strict=True)]
        ended = {row: self._ended(*row) for row in set(rows)}
        return torch.tensor([ended[row] for row in rows], device=input_ids.device)

    def _ended(self, ids: tuple[int, ...], prompt: int) -> bool:
        before, text = (text_of(self.tokenizer, part, False) for part in (ids[:-1], ids))
        same = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
        first = len(text_of(self.tokenizer, ids[:prompt], False)) if prompt else 0
        return any(text.find(string, max(first, same - len(string) + 1)) >= 0 for string in self.strings)
