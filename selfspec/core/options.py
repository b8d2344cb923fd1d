"""What one call of generate is asked for, and the refusal of what it can not be asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from selfspec.core.sampling import Sampling
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree
from selfspec.core.verify import Relaxed
from selfspec.utils.checks import integer


@dataclass(frozen=True)
class Seen:
    """What a pass did. rows: of which prompts the tree's rows are; positions: of their roots; paths: the kept nodes,
    root first; emitted: each row's new tokens, picked at the nodes of its path in order, and cut where the row ends;
    records: each of these tokens' logits and processed scores, both [V]; seconds: of drafting, of the pass, and of the
    rest."""

    rows: list[int]
    positions: list[int]
    tree: DraftTree
    paths: list[list[int]]
    emitted: list[list[int]]
    records: list[list[tuple[Tensor, Tensor]]]
    seconds: Sequence[float]


@dataclass(frozen=True)
class Options:
    """What to generate. seed: one integer (a row's sequence id is then its index), or one per row (ids are then 0, so
    that a row is reproduced alone by its own seed). eos: token ids that end a row; the ending token is emitted.
    processors: transformers' own, instead of those that `sampling` stands for; stops: further criteria that end a row;
    pads: padding that processors and stops see before each prompt; relaxed: a lossy rule, for `speculative` alone;
    record: keep the logits; watch: shown every pass when it is over, out of the measured time.

    Raises ValueError for max_new_tokens < 1.
    """

    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | Sequence[int] = 0
    eos: frozenset[int] = frozenset()
    processors: Sequence[LogitsProcessor] | None = None
    stops: Sequence[StoppingCriteria] = ()
    pads: Sequence[Sequence[int]] | None = None
    relaxed: Relaxed | None = None
    record: bool = False
    watch: Callable[[Seen], None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_new_tokens", integer("max_new_tokens", self.max_new_tokens))  # never a tensor
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")


def as_seed(seed: object, name: str = "seed") -> int | list[int]:
    """One seed, or one per row (a list, tuple, range, array or tensor), as plain ints; None draws one from torch's
    global generator. Raises ValueError for what is no integer of 64 bits."""
    if seed is None:
        return int(torch.randint(2**62, (1,)))
    if hasattr(seed, "tolist"):  # of NumPy or torch
        seed = seed.tolist()
    listed = list(seed) if isinstance(seed, (list, tuple, range)) else None
    seeds = [integer(name, s) for s in ([seed] if listed is None else listed)]
    if bad := [s for s in seeds if not -(2**63) <= s < 2**63]:
        raise ValueError(f"{name}={bad[0]} does not fit into 64 bits")
    return seeds[0] if listed is None else seeds


def check(target: Target, prompts: Sequence[Sequence[int]], options: Options) -> None:
    """Raises ValueError naming the prompt or option that can not be served, or how the model was changed."""
    target.check()
    if not prompts:
        raise ValueError("prompts is empty; give at least one prompt")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {i} is empty; give at least one token")
        if (bad := next((t for t in prompt if not 0 <= t < target.vocab_size), None)) is not None:
            raise ValueError(f"prompt {i} holds token id {bad}; the target has ids 0 to {target.vocab_size - 1}")
        if target.max_positions is not None and len(prompt) >= target.max_positions:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens; the target is served up to {target.max_positions} positions "
                f"({target.limited_by}), so a prompt may have at most {target.max_positions - 1}"
            )
    if not isinstance(options.seed, int) and len(options.seed) != len(prompts):
        raise ValueError(
            f"seed has {len(options.seed)} entries for {len(prompts)} prompts; give one per row or one int"
        )


def limited(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> str | None:
    """A warning where rows will end at the target's last position before they have max_new_tokens; else None."""
    if target.max_positions is None:
        return None
    lengths = [len(prompt) for prompt in prompts]
    rows = [i for i, n in enumerate(lengths) if target.max_positions - max_new_tokens < n < target.max_positions]
    if not rows:
        return None
    return (
        f"row {rows[0]} ends after {target.max_positions - len(prompts[rows[0]])} new tokens instead of "
        f"{max_new_tokens}: {target.name!r} is served up to {target.max_positions} positions ({target.limited_by})"
    )
