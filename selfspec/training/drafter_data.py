"""What a drafter's training reads: its settings, and the rows that they make of texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec.core.target import Target
from selfspec.data.packing import Packed
from selfspec.data.store import Corpus
from selfspec.drafters.base import Drafter
from selfspec.drafters.parts.vocabulary import Reduced
from selfspec.training import shard
from selfspec.training.distill import DistillConfig
from selfspec.training.loop_config import LoopConfig
from selfspec.training.states import States
from selfspec.training.states_folder import FromFolder
from selfspec.training.states_server import SERVER, FromServer
from selfspec.utils.checks import above_zero, at_least
from selfspec.utils.openai_client import Servers, server_urls


@dataclass
class DrafterTraining:
    """length: tokens per row of the data, in which whole documents stand side by side, each of which sees itself alone;
    cache: none, or disk, where the target's hidden states on them are kept for later epochs and other runs (see
    `HiddenStates`); lr: peak learning rate (AdamW); validation_rows: rows of validation text for the loss; prompts:
    texts that the target writes, on which drafters are calibrated; prompt_tokens: of each such prompt; new_tokens: of
    each such text; distill: self-distillation data to train on instead of the data's text; init_from: a drafter of the
    same kind and shapes (an embedded name, a run folder or a hub id) whose weights training begins with.

    states: null runs the target here; `server` asks a vLLM for its hidden states, a folder reads those that one has
    written; of the target, embeddings, final norm and lm_head alone are then read (docs/large_targets.md); states_url:
    the server, or a list of servers; states_layers: whose states they are, in the server's counting (null: as
    `selfspec serve-target` has them written); states_gb: of states that are asked for in advance, at most."""

    length: int = 512
    cache: str = "none"
    lr: float = 1e-3
    validation_rows: int = 32
    prompts: int = 64
    prompt_tokens: int = 64
    new_tokens: int = 128
    distill: DistillConfig = field(default_factory=DistillConfig)
    init_from: str | None = None
    states: str | None = None
    states_url: Any = None
    states_layers: list[int] | None = None
    states_gb: float = 8.0

    def __post_init__(self) -> None:
        at_least(self, "train", 1, "length", "validation_rows", "prompts", "new_tokens")
        at_least(self, "train", 2, "prompt_tokens")
        above_zero(self, "train", "lr")
        if self.cache not in ("none", "disk"):
            raise ValueError(f"train.cache={self.cache!r} must be one of none, disk")
        above_zero(self, "train", "states_gb")
        if self.init_from == "":
            raise ValueError("train.init_from is empty; give the name of a drafter")
        if self.states is None:
            if self.states_url is not None or self.states_layers is not None:
                raise ValueError(
                    "train.states_url and train.states_layers are read with train.states=server or a folder"
                )
            return
        if self.distill.rows:
            raise ValueError("train.distill.rows: no target is here to write with train.states; take data=server")
        if (self.states == SERVER) != (self.states_url is not None):
            raise ValueError("train.states=server and train.states_url=http://host:port go together")
        if self.states == SERVER:
            server_urls("train.states_url", self.states_url)
        elif not Path(self.states).is_dir():
            raise ValueError(f"train.states={self.states} is no folder; give one, or train.states=server")


def distilled_size(config: DrafterTraining, loop: LoopConfig) -> int:
    """Rows of self-distillation data in a step."""
    return max(1, loop.batch_size * config.length // config.distill.length)


def states_of(
    config: DrafterTraining, target: Target, reads: tuple[int, ...], train: Corpus, validation: Corpus
) -> tuple[States | None, Corpus, Corpus]:
    """Where hidden states come from (None: from the target here), and the documents whose states there are."""
    if config.states is None:
        return None, train, validation
    shard.agree({"data": (train.key, validation.key)})
    if config.states == SERVER:
        servers = Servers(server_urls("train.states_url", config.states_url))
        return FromServer(target, reads, servers, config.states_layers, config.states_gb), train, validation
    folder = FromFolder(target, reads, Path(config.states), config.states_layers, config.length)
    train = folder.covered(train, config.length, "training")
    if folder.of_rows:
        return folder, *folder.held_out(train)
    return folder, train, folder.covered(validation, config.length, "validation")


def texts_folder(config: DrafterTraining, folder: Path) -> Path:
    """Where self-distillation data lie. Raises ValueError where the folder can not be made."""
    texts = Path(config.distill.folder or folder / "distill")
    if config.distill.rows:
        try:
            texts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"train.distill.folder={texts} can not be made: {error}") from error
    return texts


def validation_rows(corpus: Corpus, config: DrafterTraining) -> dict[str, Tensor]:
    """Rows for the loss, spread over the corpus. Raises ValueError where it is too short for one."""
    packed = Packed(corpus, config.length, 1, seed=0)  # the same rows for all seeds of training
    starts = torch.linspace(0, packed.per_epoch - 1, min(config.validation_rows, packed.per_epoch)).long().tolist()
    chosen = [  # from each start on the first row in which something counts
        next((row for row in range(first, after) if packed.rows([row])["mask"][0, 1:].any()), None)
        for first, after in pairwise([*starts, packed.per_epoch])
    ]
    if not (at := [row for row in chosen if row is not None]):
        raise ValueError("no usable example: none of the validation tokens counts in the loss; give other texts")
    found = packed.rows(at)
    del found["rows"]  # their numbers are not those of training rows
    return found


def fill_vocabulary(drafter: Drafter, corpus: Corpus, vocab: int) -> None:
    """A reduced draft vocabulary becomes the text's most frequent tokens."""
    if isinstance(drafter, Reduced) and (ids := drafter.vocabulary) is not None:
        counts = torch.zeros(vocab, dtype=torch.int64)
        for tokens, mask in zip(corpus.tokens.split(1 << 24), corpus.mask.split(1 << 24), strict=True):
            counts += tokens[mask].bincount(minlength=vocab)
        drafter.drafts_only(counts.argsort(descending=True, stable=True)[: len(ids)])
