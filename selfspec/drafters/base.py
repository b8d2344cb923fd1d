"""The contract of a drafter: what proposes, and never decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.generate import Accepted, Context
from selfspec.options import integer
from selfspec.target import Target
from selfspec.tree import DraftTree


@dataclass(frozen=True)
class Sample:
    """Text that the target itself generated. tokens: int64 [S], a prompt and its continuation from index
    `start` >= 2; hidden: [S, H], the target's last hidden states on it; features: outputs [S, H] of the layers that
    the drafter asked for, by index; noise: positions int64 [n] -> float64 [n, V], or None where the text is greedy."""

    tokens: Tensor
    start: int
    hidden: Tensor
    features: dict[int, Tensor]
    temperature: float
    noise: Callable[[Tensor], Tensor] | None


class Drafter(nn.Module, ABC):
    """Proposes draft trees for a target. Nothing it does can change the output, only how many passes it takes.

    `kind` names the drafter on disk and its module here; `shape` is what its constructor needs to build it again.
    Parameters that require gradients are its own and all that is trained; target weights it reuses are views (the
    target's tensors themselves, frozen). Decoding runs on a shallow copy, so state kept between `observe` and `propose`
    belongs to one call of generate. `measured` is what `measure` found by kind of decoding and depth, by which the
    drafter shapes its trees. `features` are the target layers whose outputs it wants to see; `vocabulary`, int64, the
    only tokens it can draft (None: all), which training fills with the most frequent ones. `shortest` is how many
    tokens a row of training text has at least; `whole_layers` says whether target layers are trained in full, which a
    target in half precision runs under autocast alone. `free` says whether it works without a checkpoint; `own_tree`
    whether the pass has to run exactly the tree it proposed, because some of its work rides along with the nodes;
    `thrifty` that it only spends time that is worth it at `context.rate`.
    """

    kind: str
    shape: dict[str, Any]
    measured: dict[str, list[list[float]]]
    features: tuple[int, ...] = ()
    vocabulary: Tensor | None = None
    shortest: int
    whole_layers: bool = False
    free: bool = False
    own_tree: bool = False
    thrifty: bool = False

    @abstractmethod
    def propose(self, context: Context) -> DraftTree:
        """A tree of at most `context.nodes` nodes for every row, rooted at `context.roots`."""

    @abstractmethod
    def observe(self, accepted: Accepted) -> None:
        """Take in what the last pass kept; called while the prompt is read and after every pass."""

    @abstractmethod
    def products(self) -> list[nn.Module]:
        """The modules whose calls are the drafter's own products in decoding, none inside another, so that benchmarks
        can tell them from bookkeeping."""

    @abstractmethod
    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Training loss (a scalar) and figures per depth to log.

        batch: tokens int64 [B, S], mask bool [B, S] (which tokens count), and from the frozen target on those tokens
        hidden [B, S, H], logits [B, S, V] and features, outputs [B, S, H] by layer.
        """

    @abstractmethod
    def measure(self, kind: str, samples: Sequence[Sample]) -> dict[str, Any]:
        """Measure on the target's own text how often choices are right, and shape coming trees by it.

        kind: greedy or sampled, the decoding the samples came from. Returns per depth how often the first choice
        (`top1`) and, where scores are at hand, the first five (`top5`) hold the target's token, and `tau`, the
        acceptance length that a static tree grown from such a table promises, by number of nodes.
        """

    @abstractmethod
    def adapters(self) -> dict[str, nn.Module]:
        """PEFT adapters by name, each with the module it was injected into."""

    @abstractmethod
    def own_state(self) -> dict[str, Tensor]:
        """Trained tensors outside PEFT, by name."""

    def trained(self) -> dict[str, nn.Parameter]:
        """All parameters that training moves."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}


class Untrained(Drafter):
    """What drafters have in common that hold no parameters. `target` is for measuring themselves by decoding."""

    target: Target

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.__dict__["target"] = target  # not a part of the drafter

    @staticmethod
    def parameter_count(**_: Any) -> int:
        """Trained parameters: none."""
        return 0

    def products(self) -> list[nn.Module]:
        return []

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.zeros((), device=batch["tokens"].device), {}

    def adapters(self) -> dict[str, nn.Module]:
        return {}

    def own_state(self) -> dict[str, Tensor]:
        return {}


def whole(name: str, value: Any, low: int = 1, high: int | None = None, why: str = "") -> None:
    """A whole number of a drafter's shape. Raises ValueError naming it, the value and what it may be."""
    if integer(f"drafter.{name}", value) < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"drafter.{name}={value} must be {span}{why}")


def number(name: str, value: Any, low: float, high: float) -> None:
    """A number above `low` and below `high` (`low` itself where it is 0 and high 1: a share). Raises ValueError."""
    share = (low, high) == (0, 1)
    fits = isinstance(value, (int, float)) and (low <= value if share else low < value) and value < high
    if not fits:
        raise ValueError(f"drafter.{name}={value!r} must " + ("lie in [0, 1)" if share else f"be above {low}, finite"))


def one_of(name: str, value: Any, known: Sequence[Any]) -> None:
    """Raises ValueError for a value that is none of those known."""
    if not any(value is k or (isinstance(value, str) and value == k) for k in known):
        raise ValueError(f"drafter.{name}={value!r} must be one of {', '.join(map(str, known))}")


def training_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts beside a target of this dtype are trained: at least float32."""
    return torch.float32 if dtype.itemsize < 4 else dtype
