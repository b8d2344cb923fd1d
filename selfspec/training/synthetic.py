"""Training data out of nothing: the target writes both sides of conversations.

Given only what its chat template puts before a user's turn, a chat model writes such a turn (Magpie, arXiv 2406.08464).
It then answers it. What it says is kept as the tokens it wrote, so that a drafter trains on what it will draft.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, product
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.checkpoints.cast import Stock
from selfspec.checkpoints.weights_hash import model_hash, target_hash, tokenizer_hash
from selfspec.core.chains import ChainTarget
from selfspec.core.quantized import has_kernel, quantize
from selfspec.core.support import view
from selfspec.core.target import Target
from selfspec.data.chat_template import ChatTemplate
from selfspec.data.corpus import PythonSource
from selfspec.data.encoded import beginning
from selfspec.data.instructions import edits
from selfspec.data.own_questions import Template, answer_temperature, check_own_questions, first_paragraph, usable
from selfspec.data.store import Corpus, in_a_row
from selfspec.data.tasks import EDITS, MOST
from selfspec.training import shard
from selfspec.training.conversations import Conversation, Rules, write_conversations
from selfspec.training.distill import read, write
from selfspec.utils.checks import at_least, integer, shares
from selfspec.utils.files import Figures, cache_folder, is_main_process, write_text
from selfspec.utils.progress import progress

_FIELDS = ("tokens", "mask", "sizes")  # of a chunk's file
# Settings that do not change what is written, or do so by the template's tokens
_BESIDE = "folder", "conversations", "validation_share", "batch", "chat_template_kwargs"
_LATER = "edits", "paragraph"  # that older versions had not, and that are off where they are false
_CHUNK = 64  # conversations in a file
_PLASTIC = 0.7548776662466927  # its multiples spread edits evenly, as if drawn apart from the sampled answers


@dataclass(frozen=True)
class Synthetic:
    """Conversations that the target writes. conversations: how many are begun (some are left out, see `usable`); turns:
    questions in each, at most; openings: words that first questions begin with, taken in turn ("": the target's own);
    question_temperature: that questions are sampled at; question_tokens, new_tokens: of a question and of an answer, at
    most; edits: share of conversations whose first question asks for an edit of the standard library's source (see
    `data.tasks.edits`); paragraph: whether a question ends with its first paragraph where that leaves nothing open, for
    models that go on to answer in the same breath; sampled: share of conversations answered at temperature 1, the
    others greedily; batch: conversations held at once; int8: whether the target's weights are quantized while it
    writes; validation_share: of the conversations; chat_template_kwargs: arguments of the chat template; folder: where
    they are kept (None: in the cache folder)."""

    questions: ClassVar[str] = "source"
    conversations: int = 4096
    turns: int = 2
    openings: tuple[str, ...] = ("",)
    question_temperature: float = 1.0
    question_tokens: int = 96
    new_tokens: int = 320
    edits: float = 0.0
    paragraph: bool = False
    sampled: float = 0.5
    batch: int = 128
    int8: bool = False
    seed: int = 0
    validation_share: float = 0.05
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    folder: str | None = None

    def __post_init__(self) -> None:
        counts = "conversations", "turns", "question_tokens", "new_tokens", "batch"
        for name in (*counts, "seed"):
            integer(f"data.{name}", getattr(self, name))
        at_least(self, "data", 1, *counts)
        check_own_questions(self.openings, self.question_temperature)
        object.__setattr__(self, "openings", tuple(self.openings))
        shares(self, "data", "sampled", "edits")
        shares(self, "data", "validation_share", ends="()")
        for name in ("int8", "paragraph"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"data.{name}={getattr(self, name)!r} must be true or false")
        if self.folder is not None and not isinstance(self.folder, str):
            raise ValueError(f"data.folder={self.folder!r} must be a path, or null for the cache folder")

    def evaluation(self) -> NoReturn:
        """Raises ValueError: what is written here is for training."""
        raise ValueError(
            "data=synthetic is for training and has no questions to measure with; give a file of questions "
            "(decode.questions=file.jsonl), or another data="
        )


def synthetic(config: Synthetic, target: Target, tokenizer: Tokenizer) -> tuple[Corpus, Corpus]:
    """Conversations for training and for validation, as tokens; answers count in the loss.

    They are kept on disk, so that an interrupted call goes on where it stopped, and a later one reads them. Each
    process writes files of its own, and then waits for the others. Raises ValueError where no conversation is usable.
    """
    check_writes(target)
    (part, processes), quiet = shard.share(), not is_main_process()
    template = Template.of(ChatTemplate(tokenizer, target.end_tokens, config.chat_template_kwargs))
    if template.once and config.turns > 1:
        shard.say([f"data.turns={config.turns}: the chat template rewrites earlier answers, so there is one turn each"])
        config = replace(config, turns=1)
    _check_positions(config, target, _longest(config, template, _ids(config, tokenizer)))
    writer = _writer(target, config.int8)
    identity = {k: v for k, v in asdict(config).items() if k not in _BESIDE and (k not in _LATER or v)}
    folder, settings = _place(config, target, tokenizer, template, str(identity), writer)
    folder.mkdir(parents=True, exist_ok=True)
    chunks = range(0, config.conversations, _CHUNK)
    file_of = {first: folder / f"{first:06d}.safetensors" for first in chunks}
    known = {first: read(file_of[first], settings, _FIELDS) for first in chunks}
    missing = [first for first in chunks[part::processes] if known[first] is None]
    numbers = [i for first in missing for i in range(first, first + _CHUNK)]  # whole chunks, whatever is read of them
    new, start, parts = 0, time.perf_counter(), defaultdict[int, list[Conversation]](list)
    with progress(total=len(numbers), desc="conversations", disable=quiet or not numbers) as bar:
        for each in _written(writer, tokenizer, template, config, numbers) if numbers else ():
            first = each.number // _CHUNK * _CHUNK
            parts[first].append(each)
            new += sum(each.mask)
            rate = processes * new / (time.perf_counter() - start)
            bar.set_postfix({"answers": f"{new} tokens", "rate": f"{rate:.0f}/s"}, refresh=False)
            bar.update()
            if len(parts[first]) == _CHUNK:
                write(file_of[first], settings, _packed(parts.pop(first)))
    shard.wait()
    conversations = []
    for first in chunks:
        chunk = known[first] or read(file_of[first], settings, _FIELDS)
        assert chunk is not None, "each process has written its share"
        sizes = chunk["sizes"].tolist()
        pairs = zip(chunk["tokens"].split(sizes), chunk["mask"].split(sizes), strict=True)
        conversations += [pair for pair in islice(pairs, config.conversations - first) if len(pair[0])]
    train, validation = _divided(conversations, len(template.opening), config.validation_share, beginning(tokenizer))
    if not quiet:
        _card(folder, config, target, tokenizer, train, validation)
    return train, validation


def check_writes(target: Target) -> None:
    """Raises ValueError for a target that can not write conversations."""
    if isinstance(target, ChainTarget):
        raise ValueError(
            f"data=synthetic writes text with draft trees, but {target.why}; take data=jsonl, text or python_source"
        )


def _place(
    config: Synthetic, target: Target, tokenizer: Tokenizer, template: Template, what: str, writer: Target
) -> tuple[Path, dict[str, str]]:
    """The folder of these conversations, and the settings that its files carry. The template counts by its source:
    what it renders may hold the date. Earlier versions went by that, and by the target's weights alone; what they wrote
    is read."""
    source = f"{tokenizer.chat_template} {sorted(config.chat_template_kwargs.items())}"
    for model, form in product((target_hash(target), model_hash(target)), (asdict(template), source)):
        read_by = f"{form} {tokenizer_hash(tokenizer)} {sorted(target.end_tokens)}"
        settings = {"settings": f"{what} target={model} {writer.dtype_name} {read_by}"}
        name = hashlib.sha256(settings["settings"].encode()).hexdigest()[:12]
        folder = Path(config.folder or cache_folder() / "synthetic") / name
        if folder.is_dir():
            break
    return folder, settings


def _check_positions(config: Synthetic, target: Target, longest: int) -> None:
    """Raises ValueError where a conversation may be longer than the target's positions."""
    if target.max_positions is not None and longest > target.max_positions:
        raise ValueError(
            f"data=synthetic: {config.turns} turns of {config.question_tokens} + {config.new_tokens} tokens may take "
            f"{longest}, more than the target's {target.max_positions} positions; lower data.turns or data.new_tokens"
            + (f", or set data.edits={config.edits} to 0" if config.edits else "")
        )


def _writer(target: Target, int8: bool) -> Target:
    """The target as it writes: compiled where a compiler is found, quantized if asked for and if that is faster."""
    model = view(target.model)
    if int8 and (target.device.type != "cpu" or not has_kernel()):
        print("data.int8=true: no kernel here, conversations are written with the target's own weights")
    elif int8 and not target.int8:
        if target.dtype != torch.bfloat16:
            model = deepcopy(target.model)
            Stock(model, torch.bfloat16).cast()
        quantize(model)
    writer = Target(model, returns=target.returns)
    try:
        writer.use_engine("compiled")
    except ValueError as error:
        print(f"conversations are written by the eager engine: {error}")
    return writer


def _written(
    target: Target, tokenizer: Tokenizer, template: Template, config: Synthetic, numbers: Iterable[int]
) -> Iterator[Conversation]:
    """The conversations of these numbers, as they end."""
    words, ends, edits = _ids(config, tokenizer), target.end_tokens, _edits(config, tokenizer)
    rules = Rules(
        template,
        config.turns,
        config.question_tokens,
        config.new_tokens,
        ends | {template.answer[0]},
        ends,
        config.question_temperature,
        lambda question: usable(question, tokenizer),
        first_paragraph(tokenizer) if config.paragraph else lambda question: None,
    )

    def begun(i: int) -> Conversation:
        temperature = answer_temperature(i, config.sampled, len(words))
        if i * _PLASTIC % 1 < config.edits:
            return Conversation.asked(i, template, edits[i], temperature)
        return Conversation.begun(i, template, words[i % len(words)], temperature)

    longest = _longest(config, template, words)
    return write_conversations(target, map(begun, numbers), rules, config.batch, longest, config.seed)


def _longest(config: Synthetic, template: Template, words: list[list[int]]) -> int:
    """Tokens that a conversation may have at most."""
    between = len(template.opening) + max(map(len, words)) + config.turns * (len(template.answer) + len(template.again))
    return config.turns * (config.question_tokens + config.new_tokens) + between + (MOST if config.edits else 0)


def _packed(conversations: list[Conversation]) -> dict[str, Tensor]:
    """Tokens and loss mask of conversations one after another, by their numbers, and the size of each."""
    everyone = sorted(conversations, key=attrgetter("number"))
    tokens = torch.tensor([token for one in everyone for token in one.tokens], dtype=torch.int32)
    mask = torch.tensor([counts for one in everyone for counts in one.mask], dtype=torch.bool)
    return {"tokens": tokens, "mask": mask, "sizes": torch.tensor([len(one.tokens) for one in everyone])}


def _edits(config: Synthetic, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of as many edits as there are conversations, in chunks of whole files."""
    if not config.edits:
        return []
    count = -(-config.conversations // _CHUNK) * _CHUNK
    chosen = edits(PythonSource().train(), "train", list(EDITS), count, config.seed)
    return [list(tokenizer(edit.turns[0].question, add_special_tokens=False)["input_ids"]) for edit in chosen]


def _ids(config: Synthetic, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of the words that first questions begin with."""
    return [list(tokenizer(words, add_special_tokens=False)["input_ids"]) for words in config.openings]


def _divided(
    conversations: list[tuple[Tensor, Tensor]], opening: int, share: float, begins: tuple[int, ...]
) -> tuple[Corpus, Corpus]:
    """(training, validation), without conversations whose first question came before. opening: tokens before a first
    question; begins: see `beginning`. Raises ValueError where one of the two is empty."""
    seen = set[tuple[int, ...]]()
    sides: tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]] = ([], [])
    for tokens, mask in conversations:
        question = tuple(tokens[opening : int(mask.int().argmax())].tolist())
        if question in seen:
            continue
        seen.add(question)
        digest = hashlib.blake2b(str(question).encode(), digest_size=8).digest()
        sides[int.from_bytes(digest) / 2**64 < share].append((tokens, mask))
    if len(sides[0]) > 1 and not sides[1]:  # of few conversations chance may choose none
        sides[1].append(sides[0].pop(len(sides[0]) // 2))
    if not all(sides):
        raise ValueError(
            f"data=synthetic: of {len(seen)} usable conversations none is left to {'train' if sides[1] else 'validate'}"
            "; raise data.conversations, or take data=jsonl where the model's own questions come out empty or endless"
        )
    train, validation = (in_a_row(side, torch.ones(len(side), dtype=torch.bool), begins) for side in sides)
    return train, validation


def _card(
    folder: Path, config: Synthetic, target: Target, tokenizer: Tokenizer, train: Corpus, validation: Corpus
) -> None:
    """Say what was made, in words and on disk."""
    count = len(train.is_chat) + len(validation.is_chat)
    figures: Figures = {"target": target.name, "weights_hash": target_hash(target), "begun": config.conversations}
    figures |= {"usable": count, "tokens": len(train.tokens) + len(validation.tokens)}
    figures |= {"of_answers": train.counted + validation.counted, "settings": asdict(config)}
    figures["first"] = [tokenizer.decode(train.document(i).tokens) for i in range(min(3, len(train.is_chat)))]
    write_text(folder / "card.json", json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    print(
        f"{count} of {config.conversations} conversations are usable, {figures['of_answers']} tokens of answers; "
        f"{folder / 'card.json'} shows three"
    )
