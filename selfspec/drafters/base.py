"""What a drafter is: weights and a config. The state of one call is a session (see `selfspec.core.contract`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from selfspec.core.contract import Session
from selfspec.core.pass_cache import TextCache
from selfspec.core.target import Target
from selfspec.utils.checks import integer

_COUNTS = ("heads", "blocks", "stack", "depth", "unroll", "modules")  # of layers and the like
_COUNTED, _LARGEST = 256, 16_384
MODES = ("greedy", "sampled")  # the decoding modes that drafters are calibrated for
CHOICES = 16  # choices per depth that are measured, and that a static tree may hold below one node


def no_reduce(value: Tensor) -> Tensor:
    """The mean, or the sum, over one process."""
    return value


@dataclass(frozen=True)
class Calibration:
    """What was measured in advance, for one decoding mode, so that scores become probabilities.

    acceptance: `[depth][rank]`, how often the drafter's choice of that rank is the target's token, given that its
    parent was (n-gram drafters: by class of match instead of depth); inverse_temperature: [depth], the factor on scores
    that makes their softmax the best forecast of the target's token.
    """

    acceptance: list[list[float]]
    inverse_temperature: list[float]


@dataclass
class DrafterConfig:
    """What a drafter is built from: the Hydra schema, the constructor's argument, and what `drafter.json` saves.
    Every default stands in its subclasses alone."""


# Of a draft vocabulary: logits [B, S, V'], whether the likeliest of all tokens is in it, bool [B, S], and, for drafters
# with a confidence head, the probability of its tokens, [B, S]
Few = tuple[Tensor, ...]


@dataclass(frozen=True)
class Batch:
    """Text to train on and what the frozen target says of it. tokens: int64 [B, S]; mask: bool [B, S], which tokens
    count in the loss; hidden: [B, S, H], its last hidden states; logits: [B, S, V], or of a draft vocabulary `Few`;
    features: outputs [B, S, H] of the layers that the drafter reads, by index; cache: its keys and values, for passes
    behind the text (None where hidden states alone were kept); documents: int64 [B, S], which of its row's documents a
    token belongs to (None: each row is one); average: maps this batch's counts to the counts to divide by: the mean
    over processes, or, in a step of several parts, the whole step's; epochs: int64 [B], how often each row was read
    before (None: never)."""

    tokens: Tensor
    mask: Tensor
    hidden: Tensor
    logits: Tensor | Few
    features: dict[int, Tensor]
    cache: TextCache | None
    documents: Tensor | None = None
    average: Callable[[Tensor], Tensor] = no_reduce
    epochs: Tensor | None = None

    def counted(self, ahead: int) -> Tensor:
        """bool [B, S - ahead]: for every position, whether the token `ahead` places later counts and is of the same
        document."""
        counts = self.mask[:, ahead:]
        if self.documents is not None:
            counts = counts & (self.documents[:, ahead:] == self.documents[:, :-ahead])
        return counts


@dataclass(frozen=True)
class Sample:
    """Text that the target itself generated. tokens: int64 [S], a prompt and its continuation from index
    `start` >= 2; hidden: [S, H], the target's last hidden states on it; features: outputs [S, H] of the layers that
    the drafter reads, by index; noise: positions int64 [n] -> float64 [n, V], or None where the text is greedy."""

    tokens: Tensor
    start: int
    hidden: Tensor
    features: dict[int, Tensor]
    temperature: float
    noise: Callable[[Tensor], Tensor] | None


class Drafter(nn.Module, ABC):
    """Weights that propose draft trees for a target. What it proposes can not change the output, only how many
    passes it takes; sessions must not write to the noise and the cache of their `Context`, which are shared.

    A drafter of kind `early_exit` is the one drafter class in `selfspec/drafters/early_exit.py`, built as
    `EarlyExit(target, config)`; for a class of another package the kind is its path, `package.module.Class`. The
    annotation of `config` names its config. Parameters that require gradients and buffers of the drafter itself are
    what is saved; target weights it reuses are views (the target's tensors themselves, frozen). `reads` are the target
    layers whose outputs it wants to see; `prunable`: whether its trees may be cut and mixed with those of others.
    """

    config: DrafterConfig
    reads: tuple[int, ...] = ()
    prunable: bool = True

    def __init__(self, config: DrafterConfig, calibration: dict[str, Calibration]) -> None:
        super().__init__()
        self.config, self.calibration = config, calibration
        self._trained: frozenset[str] | None = None
        self.saved_hash: str | None = None  # of the files it was read from

    @property
    def kind(self) -> str:
        """The drafter's name on disk: its module's, or for classes of other packages their path."""
        module = type(self).__module__
        ours = module.startswith("selfspec.drafters.")
        return module.rsplit(".", 1)[-1] if ours else f"{module}.{type(self).__qualname__}"

    @property
    def sources(self) -> tuple[str, ...]:
        """Who proposes nodes: the drafter itself, or the members of a hybrid."""
        return (self.kind,)

    @abstractmethod
    def session(self, target: Target, rows: int) -> Session:
        """The state of one call of generate over so many rows."""

    def trained(self) -> dict[str, nn.Parameter]:
        """All parameters that training moves. The set is fixed when the drafter is built. Later changes of
        `requires_grad`, which views share with the target's own parameters, do not alter it."""
        if self._trained is None:
            self._trained = frozenset(name for name, p in self.named_parameters() if p.requires_grad)
        return {name: p for name, p in self.named_parameters() if name in self._trained}

    def saved_buffers(self) -> dict[str, Tensor]:
        """Buffers of the drafter itself that are saved; packed weights are not."""
        buffers = self.named_buffers(recurse=False)
        return {name: buffer for name, buffer in buffers if name not in self._non_persistent_buffers_set}


def _prior(depth: int) -> Calibration:
    return Calibration([[0.5 * 0.5**rank for rank in range(CHOICES)] for _ in range(depth)], [1.0] * depth)


class Trained(Drafter):
    """A drafter with a loss."""

    def __init__(self, config: DrafterConfig, depth: int) -> None:
        """depth: how many tokens ahead it drafts. Until it is calibrated, each choice is assumed to be
        accepted half as often as the one before."""
        super().__init__(config, {mode: _prior(depth) for mode in MODES})
        self.depth = depth

    @property
    def calibrated(self) -> bool:
        """Whether its acceptance was measured."""
        return any(calibration != _prior(self.depth) for calibration in self.calibration.values())

    @abstractmethod
    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Training loss (a scalar) and figures per depth to log."""

    @torch.no_grad()
    def counts(self, batch: Batch) -> Tensor:
        """How many positions each mean of the loss is over, [K], in the order in which it asks `Batch.average`. It is
        asked before a step in several parts; a drafter that can tell it without its loss saves a pass."""
        asked = list[Tensor]()

        def noted(counts: Tensor) -> Tensor:
            asked.append(counts)
            return counts

        self.loss(replace(batch, average=noted))
        return torch.cat(asked or [torch.zeros(0, device=batch.tokens.device)])

    @abstractmethod
    def scores(self, sample: Sample, at: Tensor) -> Tensor:
        """From positions `at` (int64 [n]) of a known text: logits [depth, n, V] of the tokens 2, 3, ... places later,
        with the text between as the path."""


def pack(module: nn.Module, **weights: Tensor | None) -> None:
    """Set weights that are laid out for decoding (None in training) as buffers of a module, so that whoever asks for
    its storage finds them; they are neither trained nor saved."""
    for name, weight in weights.items():
        module.register_buffer(name, weight, persistent=False)


def training_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts beside a target of this dtype are trained: at least float32. Hidden states keep the
    target's own in decoding, so a drafter casts its weights when it leaves training mode (see `Medusa.prepare`)."""
    return torch.float32 if dtype.itemsize < 4 else dtype


# -- checks of a config's values


def whole(name: str, value: object, low: int = 1, high: int | None = None, why: str = "") -> None:
    """A whole number of a drafter's config. Raises ValueError naming it, the value and what it may be: by default no
    more than any drafter has, since configs come from elsewhere and sizes take memory."""
    number = integer(f"drafter.{name}", value)
    high = (_COUNTED if name in _COUNTS else _LARGEST) if high is None else high
    if not low <= number <= high:
        raise ValueError(f"drafter.{name}={value!s:.40} must be between {low} and {high}{why}")


def one_of(name: str, value: object, known: Sequence[object]) -> None:
    """Raises ValueError for a value that is none of those known."""
    if not any(value is k or (isinstance(value, str) and value == k) for k in known):
        raise ValueError(f"drafter.{name}={value!r} must be one of {', '.join(map(str, known))}")
