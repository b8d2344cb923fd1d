"""Self-distillation data: the target's own continuations of stretches of the training data, and its own answers to
what conversations in it ask.

At inference a drafter drafts the target's text, not the data's: greedy text repeats itself and follows the mode, which
no data shows it (self-distillation, Medusa, arXiv 2401.10774, section 2.3.2).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from selfspec.checkpoints.weights_hash import target_hash
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options, end_tokens
from selfspec.core.rows import MAX_NODES
from selfspec.core.sampling import Sampling
from selfspec.core.stats import Stats
from selfspec.core.target import Target
from selfspec.data.store import Corpus, Stream, joined
from selfspec.data.windows import openings, share_of_questions
from selfspec.drafters.base import Drafter
from selfspec.utils.checks import at_least, shares
from selfspec.utils.files import atomic, digest, mean, shown, wrapped
from selfspec.utils.progress import progress

_FIELDS = ("tokens", "mask", "used")  # of a chunk's file
_CHUNK = 64  # rows generated at once, and the least that an interruption loses


@dataclass
class DistillConfig:
    """rows: texts the target continues (0: training reads the data itself); prompt_tokens: of the data that each begins
    with (answers begin with all that stands before them); new_tokens: of the target, at most; sampled: share of rows at
    temperature 1, the others are greedy; folder: where the texts are kept, so that several drafters can train on the
    same (by default inside the run); drafter: what drafts while the target writes, by name, with trees of `nodes` nodes
    (None: plain decoding); nodes: of those trees. It changes how long the writing takes, not the texts (in bfloat16
    near-ties can flip)."""

    rows: int = 0
    prompt_tokens: int = 128
    new_tokens: int = 192
    sampled: float = 0.5
    folder: str | None = None
    drafter: str | None = None
    nodes: int = 8

    def __post_init__(self) -> None:
        if self.folder is not None and not self.rows:
            raise ValueError(f"train.distill.folder={self.folder} is not read without train.distill.rows; give both")
        at_least(self, "train.distill", 1, "nodes", most=MAX_NODES)
        at_least(self, "train.distill", 0, "rows")
        at_least(self, "train.distill", 1, "prompt_tokens", "new_tokens")
        shares(self, "train.distill", "sampled")


@dataclass(frozen=True)
class _Source:
    """What prompts are drawn from. texts: int64 [D], the documents whose stretches are continued, in all `amount`
    tokens; starts, ends: int64 [Q], the questions that leave room for an answer."""

    corpus: Corpus
    texts: Tensor
    amount: int
    starts: Tensor
    ends: Tensor

    @classmethod
    def of(cls, corpus: Corpus, length: int) -> _Source:
        starts, ends = openings(corpus)
        fitting = ends - starts + len(corpus.prompt_end) + 1 < length
        texts = (~corpus.is_chat).nonzero()[:, 0]
        return cls(corpus, texts, int(corpus.lengths()[texts].sum()), starts[fitting], ends[fitting])

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


def _temperature(row: int, rows: int, sampled: float) -> float:
    """Of a row of a chunk of so many: those sampled stand first."""
    return float(row < int(rows * sampled + 0.5))


def distill(
    target: Target,
    corpus: Corpus,
    config: DistillConfig,
    seed: int,
    folder: Path,
    quiet: bool = False,
    share: tuple[int, int] = (0, 1),
    drafter: Drafter | None = None,
    wait: Callable[[], None] = lambda: None,
) -> tuple[Corpus, list[Stats]]:
    """Texts of the target's own, each a document of at most prompt_tokens + new_tokens tokens.

    Stretches of the corpus's texts are continued, and answers of its conversations written anew, in the proportion of
    `share_of_questions`. Behind a continued stretch that ended early stand EOS tokens, outside the loss mask.
    Chunks are kept in `folder`, so that an interrupted call goes on where it stopped. share: this process's number and
    how many there are, each of which writes chunks of its own, and then waits for the others in `wait`. drafter: drafts
    while the target writes. Returned are the texts of all processes, and what this call took to write.
    Raises ValueError where the data are shorter than one prompt, or rows longer than the target's positions.
    """
    length = config.prompt_tokens + config.new_tokens
    source = _Source.of(corpus, length)
    _refuse(target, corpus, config, source)
    identity = {name: value for name, value in asdict(config).items() if name not in ("folder", "drafter", "nodes")}
    text = " ".join(map(str, (corpus.key, *corpus.prompt_end, *corpus.begins)))
    settings = {"settings": f"{identity} seed={seed} target={target_hash(target)}{' int8' * target.int8} text={text}"}
    others = folder.is_dir() and any(folder.iterdir())
    folder = folder / hashlib.sha256(settings["settings"].encode()).hexdigest()[:12]  # other settings, other texts
    if others and not folder.exists() and not quiet:
        print(f"{folder.parent} holds texts of other settings, data or targets: these are written anew")
    folder.mkdir(parents=True, exist_ok=True)
    stats = list[Stats]()

    def chunk(first: int) -> dict[str, Tensor]:
        def write() -> dict[str, Tensor]:
            return _write(target, source, config, seed, first, drafter, stats)

        return read_or_write(folder / f"{first:06d}.safetensors", settings, _FIELDS, write)

    chunks = range(0, config.rows, _CHUNK)
    for first in (bar := progress(chunks[share[0] :: share[1]], desc="self-distillation", disable=quiet)):
        chunk(first)
        bar.set_postfix(written(stats))
    wait()
    parts = [chunk(first) for first in chunks]
    tokens, mask, used = (torch.cat([part[name] for part in parts]) for name in _FIELDS)
    inside = torch.arange(length) < used[:, None]
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), used.cumsum(0)])
    return joined(tokens[inside], mask[inside], starts, torch.ones(len(used), dtype=torch.bool)), stats


def _refuse(target: Target, corpus: Corpus, config: DistillConfig, source: _Source) -> None:
    """Raises ValueError for data shorter than one prompt, and rows longer than the target's positions."""
    length = config.prompt_tokens + config.new_tokens
    if source.amount <= config.prompt_tokens and not len(source.starts):
        questions = len(openings(corpus)[0])
        longest = (
            f", and none of {questions} questions leaves room for an answer in {length} tokens" if questions else ""
        )
        raise ValueError(
            f"no usable example: {source.amount} tokens of text are too few for prompts of "
            f"train.distill.prompt_tokens={config.prompt_tokens}{longest}; raise train.distill.new_tokens or give more"
        )
    if target.max_positions is not None and length > target.max_positions:
        raise ValueError(
            f"train.distill: {config.prompt_tokens} + {config.new_tokens} tokens exceed the target's "
            f"{target.max_positions} positions"
        )


def written(stats: list[Stats], processes: int = 1) -> dict[str, str]:
    """Tokens that were written by so many processes at once, their rate, and tokens per pass."""
    tokens, seconds, passes = (sum(getattr(s, name) for s in stats) for name in ("tokens", "seconds", "passes"))
    return {
        "tokens": f"{tokens}",
        "rate": f"{processes * tokens / max(seconds, 1e-9):.0f}/s",
        "tau": shown(mean(tokens, passes)),
    }


def read_or_write(
    path: Path, settings: dict[str, str], fields: Sequence[str], make: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Tensors of a file that was made with these settings; it is written where it is not there."""
    tensors = read(path, settings, fields)
    if tensors is None:
        write(path, settings, tensors := make())
    return tensors


def read(path: Path, settings: dict[str, str], fields: Sequence[str]) -> dict[str, Tensor] | None:
    """Tensors of a file that was made with these settings; None where there is none, or the disk has changed it."""
    with suppress(FileNotFoundError, SafetensorError), safe_open(path, "pt") as file:
        about = dict(file.metadata() or {})
        written = about.pop("digest", None)
        if about == settings:
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
    target: Target,
    source: _Source,
    config: DistillConfig,
    seed: int,
    first: int,
    drafter: Drafter | None,
    stats: list[Stats],
) -> dict[str, Tensor]:
    """A chunk of rows: tokens [rows, length], their loss mask, and how many tokens each row holds. Each call's
    stats are appended to `stats`."""
    rows = min(_CHUNK, config.rows - first)
    g = torch.Generator().manual_seed(wrapped(seed * 1_000_003 + first))
    length = config.prompt_tokens + config.new_tokens
    prompts, chosen = source.prompts(config.prompt_tokens, rows, length, g)
    eos = end_tokens(target)
    tokens = torch.full((rows, length), min(eos, default=0), dtype=torch.int32)
    mask = torch.zeros(rows, length, dtype=torch.bool)
    used = torch.full((rows,), length)
    for temperature in (1.0, 0.0):
        part = [row for row in range(rows) if _temperature(row, rows, config.sampled) == temperature]
        if not part:
            continue
        options = Options(config.new_tokens, Sampling(temperature), [seed + first + row for row in part], eos)
        openings = [prompts[row].tokens.tolist() for row in part]
        if drafter is None:
            result = autoregressive(target, openings, options)
        else:
            result = speculative(target, openings, options, drafter, config.nodes)
        stats.append(result.stats)
        for row, new in zip(part, result.token_ids, strict=True):
            start = len(prompts[row].tokens)
            end = min(start + len(new), length)
            tokens[row, :start], mask[row, :start] = prompts[row].tokens.int(), prompts[row].mask
            tokens[row, start:end], mask[row, start:end] = torch.tensor(new[: end - start], dtype=torch.int32), True
            used[row] = end if chosen[row] else length
    return {"tokens": tokens, "mask": mask, "used": used}
