"""Training data out of nothing: the target writes both sides of conversations.

Given only what its chat template puts before a user's turn, a chat model writes such a turn (Magpie, arXiv 2406.08464).
It then answers it. What it says is kept as the tokens it wrote, so that a drafter trains on what it will draft.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.checkpoints.weights_hash import target_hash, tokenizer_hash
from selfspec.core.generate import autoregressive
from selfspec.core.options import Options, end_tokens
from selfspec.core.quantized import has_kernel, quantize
from selfspec.core.sampling import Sampling
from selfspec.core.support import view
from selfspec.core.target import Target
from selfspec.data.store import Corpus, joined
from selfspec.training.chat_template import Template
from selfspec.training.distill import read_or_write
from selfspec.utils.files import Figures, cache_folder, write_text
from selfspec.utils.progress import progress

_FIELDS = ("tokens", "mask", "sizes")  # of a chunk's file
_LETTERS = 8  # that a question has at least


@dataclass(frozen=True)
class Synthetic:
    """Conversations that the target writes. conversations: how many are begun (some are left out, see `usable`); turns:
    questions in each, at most; openings: words that first questions begin with, taken in turn ("": the target's own);
    question_temperature: that questions are sampled at; question_tokens, new_tokens: of a question and of an answer, at
    most; sampled: share of conversations answered at temperature 1, the others greedily; batch: conversations written
    at once; int8: whether the target's weights are quantized while it writes, for speed (see
    `selfspec.core.quantized`); validation_share: of the conversations; folder: where they are kept (None: in the cache
    folder)."""

    questions: ClassVar[str] = "source"
    conversations: int = 4096
    turns: int = 2
    openings: tuple[str, ...] = ("",)
    question_temperature: float = 1.0
    question_tokens: int = 96
    new_tokens: int = 320
    sampled: float = 0.5
    batch: int = 256
    int8: bool = False
    seed: int = 0
    validation_share: float = 0.05
    folder: str | None = None

    def __post_init__(self) -> None:
        for name in ("conversations", "turns", "question_tokens", "new_tokens", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name}={getattr(self, name)} must be at least 1")
        whole = isinstance(self.openings, Sequence) and not isinstance(self.openings, str)  # Hydra has lists of its own
        if not whole or not self.openings or not all(isinstance(words, str) for words in self.openings):
            raise ValueError(f"data.openings={self.openings!r} must list texts; [''] for none")
        object.__setattr__(self, "openings", tuple(self.openings))
        warmth = self.question_temperature
        if not isinstance(warmth, (int, float)) or not 0 < warmth <= 2:
            raise ValueError(f"data.question_temperature={warmth!r} must lie above 0, at most 2")
        if not 0 <= self.sampled <= 1:
            raise ValueError(f"data.sampled={self.sampled} must lie in [0, 1]")
        if not 0 < self.validation_share < 1:
            raise ValueError(f"data.validation_share={self.validation_share} must lie between 0 and 1")


@dataclass
class _Conversation:
    tokens: list[int]
    mask: list[bool]
    going: bool = True

    def add(self, tokens: list[int], counts: bool) -> None:
        self.tokens += tokens
        self.mask += [counts] * len(tokens)


def synthetic(
    config: Synthetic,
    target: Target,
    tokenizer: Tokenizer,
    quiet: bool = False,
    share: tuple[int, int] = (0, 1),
    wait: Callable[[], None] = lambda: None,
) -> tuple[Corpus, Corpus]:
    """Conversations for training and for validation, as tokens; answers count in the loss.

    Chunks are kept on disk, so that an interrupted call goes on where it stopped, and a later one reads them. share:
    this process's number and how many there are, each of which writes chunks of its own, and then waits for the others
    in `wait`. Raises ValueError where no conversation is usable.
    """
    template = Template.of(tokenizer)
    _check_positions(config, target, template, max(map(len, _ids(config, tokenizer))))
    writer = _writer(target, config.int8)
    identity = {k: v for k, v in asdict(config).items() if k not in ("folder", "conversations", "validation_share")}
    read_by = f"{asdict(template)} {tokenizer_hash(tokenizer)} {sorted(end_tokens(target))}"
    settings = {"settings": f"{identity} target={target_hash(target)} {writer.dtype_name} {read_by}"}
    name = hashlib.sha256(settings["settings"].encode()).hexdigest()[:12]
    folder = Path(config.folder or cache_folder() / "synthetic") / name
    folder.mkdir(parents=True, exist_ok=True)
    chunks, new, seconds = range(0, config.conversations, config.batch), 0, 0.0

    def chunk(first: int) -> dict[str, Tensor]:
        def write() -> dict[str, Tensor]:
            return _chunk(writer, tokenizer, template, config, first)

        return read_or_write(folder / f"{first:06d}.safetensors", settings, _FIELDS, write)

    for first in (bar := progress(chunks[share[0] :: share[1]], desc="conversations", disable=quiet)):
        start, known = time.perf_counter(), (folder / f"{first:06d}.safetensors").exists()
        count = int(chunk(first)["mask"].sum())
        if not known:
            new, seconds = new + count, seconds + time.perf_counter() - start
            bar.set_postfix({"answers": f"{new} tokens", "rate": f"{share[1] * new / seconds:.0f}/s"})
    wait()
    conversations = [each for first in chunks for each in _split(chunk(first), config.conversations - first)]
    train, validation = _divided(conversations, len(template.opening), config.validation_share)
    if not quiet:
        _card(folder, config, target, tokenizer, template, train, validation)
    return train, validation


def _check_positions(config: Synthetic, target: Target, template: Template, words: int) -> None:
    """Raises ValueError where a conversation may be longer than the target's positions."""
    between = len(template.opening) + words + config.turns * (len(template.answer) + len(template.again))
    longest = config.turns * (config.question_tokens + config.new_tokens) + between
    if target.max_positions is not None and longest > target.max_positions:
        raise ValueError(
            f"data=synthetic: {config.turns} turns of {config.question_tokens} + {config.new_tokens} tokens may take "
            f"{longest}, more than the target's {target.max_positions} positions; lower data.turns or data.new_tokens"
        )


def _writer(target: Target, int8: bool) -> Target:
    """The target as it writes: compiled where a compiler is found, quantized if asked for and if that is faster."""
    model = view(target.model)
    if int8 and (target.device.type != "cpu" or not has_kernel()):
        print("data.int8=true: no kernel here, conversations are written with the target's own weights")
    elif int8 and not target.int8:
        if target.dtype != torch.bfloat16:
            model = deepcopy(target.model).to(torch.bfloat16)
        quantize(model)
    writer = Target(model, returns=target.returns)
    try:
        writer.use_engine("compiled")
    except ValueError as error:
        print(f"conversations are written by the eager engine: {error}")
    return writer


def _chunk(
    target: Target, tokenizer: Tokenizer, template: Template, config: Synthetic, first: int
) -> dict[str, Tensor]:
    """Conversations from number `first` on: their tokens and loss mask one after another, and the size of each."""
    rows, ends = config.batch, end_tokens(target)  # whole chunks, whatever number of conversations is read
    question_ends = ends | {template.answer[0]}
    openings = [template.opening + ids for ids in _ids(config, tokenizer)]
    everyone = [_Conversation([], []) for _ in range(rows)]
    for i, conversation in enumerate(everyone, first):
        conversation.add(openings[i % len(openings)], False)
    greedy = round(rows * (1 - config.sampled))
    for turn in range(config.turns):
        at = [i for i, conversation in enumerate(everyone) if conversation.going]
        seeds = [((config.seed * 100 + turn) * 1_000_003 + first + i) * 2 for i in at]
        open_rows = [everyone[i] for i in at]
        written = _texts(target, open_rows, config.question_temperature, seeds, config.question_tokens, question_ends)
        for i, new in zip(at, written, strict=True):
            given = [] if turn else everyone[i].tokens[len(template.opening) :]
            everyone[i].going = new[-1] in question_ends and usable(given + new[:-1], tokenizer)
            if everyone[i].going:
                everyone[i].add(new[:-1] + template.answer, False)
            elif turn:  # it ends with the answer before
                everyone[i] = _up_to_answer(everyone[i])
        for part, temperature in ((range(greedy), 0.0), (range(greedy, rows), 1.0)):
            at = [i for i in part if everyone[i].going]
            seeds = [((config.seed * 100 + turn) * 1_000_003 + first + i) * 2 + 1 for i in at]
            written = _texts(target, [everyone[i] for i in at], temperature, seeds, config.new_tokens, ends)
            for i, new in zip(at, written, strict=True):
                everyone[i].add(new, True)
                everyone[i].going = new[-1] in ends and turn + 1 < config.turns
                if everyone[i].going:
                    everyone[i].add(template.again[int(template.again[0] == new[-1]) :], False)
    for conversation in everyone:
        if not any(conversation.mask):  # its question is not usable
            conversation.tokens, conversation.mask = [], []
    tokens = torch.tensor([token for one in everyone for token in one.tokens], dtype=torch.int32)
    mask = torch.tensor([counts for one in everyone for counts in one.mask], dtype=torch.bool)
    return {"tokens": tokens, "mask": mask, "sizes": torch.tensor([len(one.tokens) for one in everyone])}


def _ids(config: Synthetic, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of the words that first questions begin with."""
    return [list(tokenizer(words, add_special_tokens=False)["input_ids"]) for words in config.openings]


def _texts(
    target: Target, rows: list[_Conversation], temperature: float, seeds: list[int], most: int, ends: frozenset[int]
) -> list[list[int]]:
    """What the target writes next in each conversation."""
    if not rows:
        return []
    prompts = [row.tokens for row in rows]
    return autoregressive(target, prompts, Options(most, Sampling(temperature), seeds, ends)).token_ids


def _up_to_answer(conversation: _Conversation) -> _Conversation:
    """The conversation up to the end of its last answer."""
    size = len(conversation.mask) - conversation.mask[::-1].index(True)
    return _Conversation(conversation.tokens[:size], conversation.mask[:size], False)


def usable(question: list[int], tokenizer: Tokenizer) -> bool:
    """Whether a question holds some letters, and no special token."""
    if any(token in tokenizer.all_special_ids for token in question):
        return False
    return sum(map(str.isalpha, tokenizer.decode(question))) >= _LETTERS


def _split(chunk: dict[str, Tensor], most: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and loss mask of a chunk's first `most` conversations, without those that are empty."""
    sizes = chunk["sizes"].tolist()
    pairs = zip(chunk["tokens"].split(sizes), chunk["mask"].split(sizes), strict=True)
    return [(tokens, mask) for tokens, mask in islice(pairs, most) if len(tokens)]


def _divided(conversations: list[tuple[Tensor, Tensor]], opening: int, share: float) -> tuple[Corpus, Corpus]:
    """(training, validation), without conversations whose first question came before. opening: tokens before a first
    question. Raises ValueError where one of the two is empty."""
    seen = set[tuple[int, ...]]()
    sides: tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]] = ([], [])
    for tokens, mask in conversations:
        question = tuple(tokens[opening : int(mask.int().argmax())].tolist())
        if question in seen:
            continue
        seen.add(question)
        digest = hashlib.blake2b(str(question).encode(), digest_size=8).digest()
        sides[int.from_bytes(digest) / 2**64 < share].append((tokens, mask))
    if not all(sides):
        raise ValueError(
            f"data=synthetic: of {len(seen)} usable conversations none is left to {'train' if sides[1] else 'validate'}"
            "; raise data.conversations, or take data=jsonl where the model's own questions come out empty or endless"
        )
    return _corpus(sides[0]), _corpus(sides[1])


def _corpus(documents: list[tuple[Tensor, Tensor]]) -> Corpus:
    sizes = torch.tensor([len(tokens) for tokens, _ in documents])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    tokens, mask = (torch.cat(parts) for parts in zip(*documents, strict=True))
    return joined(tokens, mask, starts, torch.ones(len(documents), dtype=torch.bool))


def _card(
    folder: Path,
    config: Synthetic,
    target: Target,
    tokenizer: Tokenizer,
    template: Template,
    train: Corpus,
    validation: Corpus,
) -> None:
    """Say what was made, in words and on disk."""
    count = len(train.talks) + len(validation.talks)
    figures: Figures = {
        "target": target.name,
        "weights_hash": target_hash(target),
        "begun": config.conversations,
        "usable": count,
        "tokens": len(train.tokens) + len(validation.tokens),
        "of_answers": train.counted + validation.counted,
        "settings": asdict(config),
        "first": [tokenizer.decode(train.document(i).tokens) for i in range(min(3, len(train.talks)))],
    }
    write_text(folder / "card.json", json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    print(
        f"{count} of {config.conversations} conversations are usable, {figures['of_answers']} tokens of answers; "
        f"{folder / 'card.json'} shows three"
    )
