"""Prompts cut from documents: the same ones for everybody, spread evenly over the text."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.data.corpus import Document
from selfspec.data.encoded import beginning
from selfspec.data.packing import openings, share_of_questions
from selfspec.data.store import Corpus


def cut_prompts(
    documents: list[Document], tokenizer: Tokenizer, count: int, tokens: int, fewer: bool = False
) -> list[list[int]]:
    """`count` prompts of exactly `tokens` tokens, each starting at the start of a line, behind what texts begin with.

    Raises ValueError where the documents are too short for that many; with `fewer`, gives those that fit.
    """
    if not documents:
        raise ValueError("no usable example: the data holds no held-out text of this group")
    texts = [d.text for d in documents]
    total = sum(map(len, texts))
    begins = list(beginning(tokenizer))
    prompts: dict[tuple[int, int], list[int]] = {}  # by document and offset: none is taken twice
    for i in range(count):
        offset = (2 * i + 1) * total // (2 * count)
        document = 0
        while offset >= len(texts[document]):
            offset -= len(texts[document])
            document += 1
        text = texts[document]
        # Back from the end of the document, so that what is cut is whole and something is left to write.
        offset = max(0, min(offset, len(text) - 16 * tokens))
        line = text.rfind("\n", 0, offset) + 1
        ids = begins + tokenizer(text[line : line + 16 * tokens], add_special_tokens=False)["input_ids"]
        ids = ids[:tokens]
        if len(ids) == tokens:
            prompts[document, line] = ids
    if len(prompts) < count and not fewer:
        raise ValueError(
            f"no usable example: {len(prompts)} of {count} prompts of {tokens} tokens fit into the documents; ask for "
            "fewer or shorter prompts"
        )
    return list(prompts.values())


_MANY = 2000  # texts at most that prompts are cut from


def sample_prompts(
    corpus: Corpus, tokenizer: Tokenizer, count: int, tokens: int, new_tokens: int, limit: int | None = None
) -> list[list[int]]:
    """Prompts of `sampled`, whichever conversations they are of."""
    return [prompt for _, prompt in sampled(corpus, tokenizer, count, tokens, new_tokens, limit)]


def sampled(
    corpus: Corpus, tokenizer: Tokenizer, count: int, tokens: int, new_tokens: int, limit: int | None = None
) -> list[tuple[int | None, list[int]]]:
    """At most `count` prompts for the target to continue by `new_tokens` tokens: what stands before answers of
    conversations, and stretches of `tokens` tokens of other texts, in the proportion of `share_of_questions`, as far as
    there are such stretches. There are fewer where the corpus holds fewer. Each with where its conversation starts.

    limit: positions of the target; questions that leave no room for an answer are left out. Raises ValueError where
    none is left.
    """
    starts, ends = openings(corpus)
    turn = torch.arange(len(starts)) - torch.searchsorted(starts, starts)  # every first turn, every second one, ...
    order = turn.argsort(stable=True)
    sizes = (ends - starts)[order] + len(corpus.prompt_end)
    fitting = order if limit is None else order[sizes + new_tokens <= limit]
    texts = (~corpus.is_chat).nonzero()[:, 0]
    many = count if not len(texts) else 0
    if len(fitting) and len(texts):
        amount = int(corpus.lengths()[texts].sum())
        many = round(count * share_of_questions(len(fitting), amount, tokens + new_tokens))
    if many and not len(fitting):
        raise ValueError(
            f"too few held-out conversations: 0 of {len(starts)} questions leave room for an answer of {new_tokens} "
            "tokens; give more of them, or ask for fewer tokens (train.new_tokens=)"
        )
    cut = list[list[int]]()
    if many < count:
        some = texts[:: max(1, len(texts) // _MANY)].tolist()
        texts_of = [str(tokenizer.decode(corpus.document(i).tokens[1:])) for i in some]
        documents = [Document("", ((text, True),)) for text in texts_of if text]
        if documents:
            cut = cut_prompts(documents, tokenizer, count - min(many, len(fitting)), tokens, fewer=True)
    many = min(count - len(cut), len(fitting))  # texts may be too short for their share
    chosen = [int(fitting[(2 * i + 1) * len(fitting) // (2 * many)]) for i in range(many)]
    prompts: list[tuple[int | None, list[int]]]
    prompts = [(int(starts[i]), corpus.prompt(int(starts[i]), int(ends[i])).tolist()) for i in chosen]
    prompts += [(None, prompt) for prompt in cut]
    if not prompts:
        raise ValueError(
            f"no usable example: 0 of {count} prompts of {tokens} tokens fit into the documents; lower prompt_tokens"
        )
    return prompts
