"""Training on what inference meets: rounds of decoding with the present drafter, and training at the roots it left.

Drafting starts only at the prompt's last token and at bonus tokens: the roots. The more tokens a pass accepts, the
fewer they are. Plain training weighs all positions alike. Here the drafter decodes some texts before each round, and
part of every step's rows are those texts, with the loss of what is drafted behind their roots alone (after Draft-OPD,
arXiv 2605.29343).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from selfspec.core.generate import speculative
from selfspec.core.options import Options, end_tokens
from selfspec.core.sampling import Sampling
from selfspec.core.stats import Stats
from selfspec.core.target import Target
from selfspec.data.store import Corpus, joined
from selfspec.data.windows import Packed
from selfspec.drafters.base import Trained
from selfspec.training import shard
from selfspec.training.distill import Written, written
from selfspec.utils.files import atomic
from selfspec.utils.progress import progress

_BATCH = 16  # texts decoded at once
_NODES = 16


@dataclass
class RoundsConfig:
    """count: rounds that training is divided into, 1 for none; rows: self-distillation texts that are decoded before
    each but the first; share: of the rows of a step in those rounds that are such texts."""

    count: int = 1
    rows: int = 256
    share: float = 0.5

    def __post_init__(self) -> None:
        for name in ("count", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.rounds.{name}={getattr(self, name)} must be at least 1")
        if not 0 < self.share < 1:
            raise ValueError(f"train.rounds.share={self.share} must lie between 0 and 1")


class Rounds:
    """Batches of `plain` rows in the first round; in later rounds part of them are decoded texts, and the number of
    rows is the same. What a round decoded lies in `folder`, so that an interrupted run goes on with it."""

    def __init__(
        self,
        plain: Packed,
        texts: Written,
        target: Target,
        drafter: Trained,
        calibrate: Callable[[], object],
        config: RoundsConfig,
        steps: int,
        folder: Path,
        part: tuple[int, int],
    ) -> None:
        """calibrate: measures the drafter as it is; steps: of the whole training; part: this process's number among
        those that decode texts of their own, and how many these are. A process needs two rows a step."""
        own = plain.size // plain.world
        self.again = min(own - 1, max(1, round(config.share * own)))
        self.plain, self.texts, self.target, self.drafter, self.calibrate = plain, texts, target, drafter, calibrate
        self.config, self.folder, self.part = config, folder, part
        self.steps = max(1, -(-steps // config.count))
        self.size, self.length = plain.size, plain.length
        self._round: tuple[int, Packed] | None = None

    def batch(self, step: int) -> dict[str, Tensor]:
        """As `Packed.batch`, with roots, bool [size/world, length]: behind which tokens the loss is taken."""
        number = step // self.steps
        plain = self.plain.batch(step)
        plain["roots"] = torch.ones_like(plain["mask"])
        if number == 0:
            return plain
        if self._round is None or self._round[0] != number:
            p = self.plain
            size = self.again * p.world
            corpus = self._decoded(number)
            self._round = number, Packed(corpus, p.length, size, p.seed + number, p.rank, p.world, p.pad)
        again = self._round[1].batch(step)
        kept = len(plain["mask"]) - self.again
        del plain["rows"]  # numbers of the two overlap
        return {name: torch.cat([values[:kept], again[name]]) for name, values in plain.items()}

    def _decoded(self, number: int) -> Corpus:
        """The texts of a round as the present drafter decoded them."""
        path, begins = self.folder / f"round_{number}.safetensors", number * self.steps
        settings = {"settings": f"{self.config} step={begins} seed={self.plain.seed} texts={self.texts.key}"}
        try:
            with safe_open(path, "pt") as file:
                own = file.metadata() == settings
                found = {name: file.get_tensor(name) for name in ("tokens", "mask", "roots", "starts") if own}
        except (FileNotFoundError, SafetensorError):
            found = {}
        if not found:
            found = self._decode(number)
            if self.plain.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                with atomic(path) as scratch:
                    save_file(found, scratch, settings)
        talks = torch.ones(len(found["starts"]) - 1, dtype=torch.bool)
        return joined(found["tokens"], found["mask"], found["starts"], talks, roots=found["roots"])

    def _decode(self, number: int) -> dict[str, Tensor]:
        training, texts, part = self.drafter.training, self.texts, self.part
        self.drafter.eval()
        self.calibrate()
        order = torch.randperm(len(texts.talks), generator=torch.Generator().manual_seed(self.plain.seed + number))
        chosen = order[: self.config.rows].tolist()
        by_temperature = {t: [i for i in chosen if texts.temperature(i) == t] for t in (0.0, 1.0)}
        batches = [
            (t, rows[first : first + _BATCH])
            for t, rows in by_temperature.items()
            for first in range(0, len(rows), _BATCH)
        ]
        found, told, eos = list[Any](), list[Stats](), end_tokens(self.target)
        bar = progress(batches[part[0] :: part[1]], desc=f"round {number + 1}: decoding", disable=part[0] > 0)
        for temperature, rows in bar:
            prompts = [texts.document(i).tokens[: texts.answers[i]].tolist() for i in rows]
            options = Options(texts.new_tokens, Sampling(temperature), [texts.seed + i for i in rows], eos)
            result = speculative(self.target, prompts, options, self.drafter, _NODES)
            told.append(result.stats)
            bar.set_postfix(written(told))
            for i, prompt, new, drafted in zip(rows, prompts, result.token_ids, result.from_draft, strict=True):
                tokens = torch.tensor([*prompt, *new])[: self.length]
                roots = torch.tensor([False] * (len(prompt) - 1) + [True] + [not one for one in drafted])
                mask = torch.zeros(len(tokens), dtype=torch.bool)
                mask[len(prompt) :] = True
                found.append((i, tokens, mask, roots[: len(tokens)]))
        self.drafter.train(training)
        if part[1] > 1:
            found = shard.gathered(found)
        found.sort(key=lambda one: one[0])
        starts = torch.tensor([0, *(len(one[1]) for one in found)]).cumsum(0)
        parts = {name: torch.cat([one[k] for one in found]) for k, name in ((1, "tokens"), (2, "mask"), (3, "roots"))}
        return {**parts, "starts": starts}
