"""Self-distillation data: the target's own continuations of stretches of the training data, and its own answers to
what conversations in it ask.

At inference a drafter drafts the target's text, not the data's: greedy text repeats itself and follows the mode, which
no data shows it (self-distillation, Medusa, arXiv 2401.10774, section 2.3.2).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from selfspec.checkpoints.weights_hash import model_hash, target_hash
from selfspec.core.generate import autoregressive
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.core.stats import Stats
from selfspec.core.target import Target
from selfspec.data.packing import openings, share_of_questions
from selfspec.data.store import Corpus, Stream, joined
from selfspec.training import shard
from selfspec.utils.checks import at_least, shares
from selfspec.utils.files import atomic, digest, is_main_process, mean, shown, wrapped
from selfspec.utils.progress import progress

_FIELDS = ("tokens", "mask", "used")  # of a chunk's file
_CHUNK = 64  # rows generated at once, and the least that an interruption loses


@dataclass
class DistillConfig:
    """rows: texts the target continues (0: training reads the data itself); prompt_tokens: of the data that each begins
    with (answers begin with all that stands before them); new_tokens: of the target, at most; sampled: share of rows at
    temperature 1, the others are greedy; folder: where the texts are kept, so that several drafters can train on the
    same (by default inside the run)."""

    rows: int = 0
    prompt_tokens: int = 128
    new_tokens: int = 192
    sampled: float = 0.5
    folder: str | None = None

    def __post_init__(self) -> None:
        if self.folder is not None and not self.rows:
            raise ValueError(f"train.distill.folder={self.folder} is not read without train.distill.rows; give both")
        at_least(self, "train.distill", 0, "rows")
        at_least(self, "train.distill", 1, "prompt_tokens", "new_tokens")
        shares(self, "train.distill", "sampled")

    @property
    def length(self) -> int:
        """Tokens of a text, at most."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True)
class _Source:
    """What prompts are drawn from. texts: int64 [D], the documents whose stretches are continued, in all `amount`
    tokens; starts, ends: int64 [Q], the questions that leave room for an answer; long: how many others there are."""

    corpus: Corpus
    texts: Tensor
    amount: int
    starts: Tensor
    ends: Tensor
    long: int

    @classmethod
    def of(cls, corpus: Corpus, length: int) -> _Source:
        starts, ends = openings(corpus)
        fitting = ends - starts + len(corpus.prompt_end) + 1 < length
        texts = (~corpus.is_chat).nonzero()[:, 0]
        amount, long = int(corpus.lengths()[texts].sum()), int((~fitting).sum())
        return cls(corpus, texts, amount, starts[fitting], ends[fitting], long)

    def prompts(self, tokens: int, rows: int, length: int, g: torch.Generator) -> tuple[list[Stream], Tensor]:
        """The beginnings of rows, and which of them are questions: bool [rows]. tokens: of a stretch."""
        count, stretches = len(self.starts), max(0, self.amount - tokens)
        share = share_of_questions(count, stretches, length)
        at = torch.randint(max(1, stretches), (rows,), generator=g)[:, None] + torch.arange(tokens)
        chosen = torch.rand(rows, generator=g) < share if count else torch.zeros(rows, dtype=torch.bool)
        numbers = torch.randint(max(1, count), (rows,), generator=g)
        return [
            self._question(int(number)) if question else self._stretch(where)
            for number, question, where in zip(numbers, chosen, at, strict=True)
        ], chosen

    def _question(self, number: int) -> Stream:
        tokens = self.corpus.prompt(int(self.starts[number]), int(self.ends[number]))
        return Stream(tokens, torch.zeros_like(tokens, dtype=torch.bool), 0)

    def _stretch(self, at: Tensor) -> Stream:
        """Tokens `at` of all texts in a row; the last give way to what a text begins with."""
        sizes = self.corpus.lengths()[self.texts]
        ends = sizes.cumsum(0)
        text = torch.searchsorted(ends, at, right=True)
        where = self.corpus.starts[self.texts[text]] + at - (ends - sizes)[text]
        tokens, mask = self.corpus.tokens[where].long(), self.corpus.mask[where]
        begins = torch.tensor(self.corpus.begins, dtype=torch.int64)
        if not torch.equal(tokens[: len(begins)], begins):
            tokens = torch.cat([begins, tokens])[: len(at)]
            mask = torch.cat([torch.zeros_like(begins, dtype=torch.bool), mask])[: len(at)]
        return Stream(tokens, mask, 0)


def distill(
    target: Target, corpus: Corpus, config: DistillConfig, seed: int, folder: Path
) -> tuple[Corpus, dict[str, str]]:
    """Texts of the target's own, each a document of at most prompt_tokens + new_tokens tokens; and figures of what this
    call took to write.

    Stretches of the corpus's texts are continued, and answers of its conversations written anew, in the proportion of
    `share_of_questions`. Behind a continued stretch that ended early stand EOS tokens, outside the loss mask.
    Chunks are kept in `folder`, so that an interrupted call goes on where it stopped. Each process writes chunks of its
    own, and then waits for the others; returned are the texts of all.
    Raises ValueError where the data are shorter than one prompt, or rows longer than the target's positions.
    """
    source, (part, parts), quiet = _Source.of(corpus, config.length), shard.share(), not is_main_process()
    _refuse(target, config, source)
    if source.long and not quiet:
        questions = source.long + len(source.starts)
        print(
            f"{source.long} of {questions} questions leave no room for an answer in {config.length} tokens and are "
            "passed over; raise train.distill.new_tokens"
        )
    identity = {name: value for name, value in asdict(config).items() if name != "folder"}
    text = " ".join(map(str, (corpus.key, *corpus.prompt_end, *corpus.begins)))
    others, place = folder.is_dir() and any(folder.iterdir()), folder
    for model in (target_hash(target), model_hash(target)):  # earlier versions went by the weights; theirs are read
        settings = {"settings": f"{identity} seed={seed} target={model}{' int8' * target.int8} text={text}"}
        folder = place / hashlib.sha256(settings["settings"].encode()).hexdigest()[:12]  # other settings, other texts
        if folder.is_dir():
            break
    if others and not folder.exists() and not quiet:
        print(f"{folder.parent} holds texts of other settings, data or targets: these are written anew")
    folder.mkdir(parents=True, exist_ok=True)
    stats = list[Stats]()

    def chunk(first: int) -> dict[str, Tensor]:
        path = folder / f"{first:06d}.safetensors"
        if (tensors := read(path, settings, _FIELDS)) is None:
            write(path, settings, tensors := _write(target, source, config, seed, first, stats))
        return tensors

    chunks = range(0, config.rows, _CHUNK)
    for first in (bar := progress(chunks[part::parts], desc="self-distillation", disable=quiet)):
        chunk(first)
        if stats:
            bar.set_postfix(_written(stats))
    shard.wait()
    every = [chunk(first) for first in chunks]
    tokens, mask, used = (torch.cat([each[name] for each in every]) for name in _FIELDS)
    inside = torch.arange(config.length) < used[:, None]
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), used.cumsum(0)])
    texts = joined(tokens[inside], mask[inside], starts, torch.ones(len(used), dtype=torch.bool))
    return texts, _written(shard.gathered(stats), parts)


def _refuse(target: Target, config: DistillConfig, source: _Source) -> None:
    """Raises ValueError for data shorter than one prompt, and rows longer than the target's positions."""
    length = config.length
    if source.amount <= config.prompt_tokens and not len(source.starts):
        none = f", and none of {source.long} questions leaves room for an answer in {length} tokens"
        longest = none if source.long else ""
        raise ValueError(
            f"no usable example: {source.amount} tokens of text are too few for prompts of "
            f"train.distill.prompt_tokens={config.prompt_tokens}{longest}; raise train.distill.new_tokens or give more"
        )
    if target.max_positions is not None and length > target.max_positions:
        raise ValueError(
            f"train.distill: {config.prompt_tokens} + {config.new_tokens} tokens exceed the target's "
            f"{target.max_positions} positions"
        )


def _written(stats: list[Stats], processes: int = 1) -> dict[str, str]:
    """Tokens that were written by so many processes at once, their rate, and tokens per pass."""
    tokens, seconds, passes = (sum(getattr(s, name) for s in stats) for name in ("tokens", "seconds", "passes"))
    return {
        "tokens": f"{tokens}",
        "rate": f"{processes * tokens / max(seconds, 1e-9):.0f}/s",
        "tau": shown(mean(tokens, passes)),
    }


def read(path: Path, settings: dict[str, str], fields: Sequence[str]) -> dict[str, Tensor] | None:
    """Tensors of a file that was made with these settings; None where there is none, or the disk has changed it."""
    if not path.is_file():
        return None
    with suppress(SafetensorError), safe_open(path, "pt") as file:
        about = dict(file.metadata() or {})
        written = about.pop("digest", None)
        if about != settings:
            return None
        tensors = {name: file.get_tensor(name) for name in fields}
        if written in (None, _digest(tensors)):  # older versions wrote none
            return tensors
    print(f"{path} was changed on the disk and is written anew", file=sys.stderr)
    return None


def _digest(tensors: dict[str, Tensor]) -> str:
    return digest(*(part for name, t in sorted(tensors.items()) for part in (name, t.contiguous().numpy().tobytes())))


def write(path: Path, settings: dict[str, str], tensors: dict[str, Tensor]) -> None:
    with atomic(path) as scratch:
        save_file(tensors, scratch, {**settings, "digest": _digest(tensors)})


def _write(
    target: Target, source: _Source, config: DistillConfig, seed: int, first: int, stats: list[Stats]
) -> dict[str, Tensor]:
    """A chunk of rows: tokens [rows, length], their loss mask, and how many tokens each row holds; those sampled stand
    first. Each call's stats are appended to `stats`."""
    rows, length, eos = min(_CHUNK, config.rows - first), config.length, target.end_tokens
    g = torch.Generator().manual_seed(wrapped(seed * 1_000_003 + first))
    prompts, chosen = source.prompts(config.prompt_tokens, rows, length, g)
    tokens = torch.full((rows, length), min(eos, default=0), dtype=torch.int32)
    mask = torch.zeros(rows, length, dtype=torch.bool)
    used = torch.full((rows,), length)
    hot = int(rows * config.sampled + 0.5)
    for temperature, part in ((1.0, range(hot)), (0.0, range(hot, rows))):
        if not part:
            continue
        options = Options(config.new_tokens, Sampling(temperature), [seed + first + row for row in part], eos)
        result = autoregressive(target, [prompts[row].tokens.tolist() for row in part], options)
        stats.append(result.stats)
        for row, new in zip(part, result.token_ids, strict=True):
            start = len(prompts[row].tokens)
            end = min(start + len(new), length)
            tokens[row, :start], mask[row, :start] = prompts[row].tokens.int(), prompts[row].mask
            tokens[row, start:end], mask[row, start:end] = torch.tensor(new[: end - start], dtype=torch.int32), True
            used[row] = end if chosen[row] else length
    return {"tokens": tokens, "mask": mask, "used": used}
