"""What one call of generate is asked for, and the refusal of what it can not be asked."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from selfspec.sampling import Sampling
from selfspec.target import Target
from selfspec.verify import Relaxed


@dataclass(frozen=True)
class Options:
    """What to generate. seed: one integer (a row's sequence id is then its index), or one per row (ids are then 0, so
    that a row is reproduced alone by its own seed). eos: token ids that end a row; the ending token is emitted.
    processors: transformers' own, instead of those that `sampling` stands for; stops: further criteria that end a row;
    pads: what both see before each prompt; relaxed: a lossy rule, for `speculative` alone; record: keep the logits.

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

    def __post_init__(self) -> None:
        if integer("max_new_tokens", self.max_new_tokens) < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")


def integer(name: str, value: Any) -> int:
    """An int from anything that is exactly one (NumPy's and torch's scalars too). Raises ValueError."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"{name}={value!r} must be an integer")


def as_seed(seed: Any) -> int | list[int]:
    """One seed, or one per row, as plain ints. Raises ValueError for what is no integer of 64 bits."""
    one = not isinstance(seed, (list, tuple, torch.Tensor)) or (isinstance(seed, torch.Tensor) and seed.ndim == 0)
    seeds = [integer("seed", s) for s in ([seed] if one else seed)]
    if bad := [s for s in seeds if not -(2**63) <= s < 2**63]:
        raise ValueError(f"seed={bad[0]} does not fit into 64 bits")
    return seeds[0] if one else seeds


def check(target: Target, prompts: Sequence[Sequence[int]], options: Options) -> None:
    """Raises ValueError naming the prompt or option that can not be served."""
    if not prompts:
        raise ValueError("prompts is empty; give at least one prompt")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {i} is empty; give at least one token")
        if (bad := next((t for t in prompt if not 0 <= t < target.vocab_size), None)) is not None:
            raise ValueError(f"prompt {i} holds token id {bad}; the target has ids 0 to {target.vocab_size - 1}")
        if target.max_positions is not None and len(prompt) >= target.max_positions:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens; the target has {target.max_positions} positions, so a prompt "
                f"may have at most {target.max_positions - 1}"
            )
    if not isinstance(options.seed, int) and len(options.seed) != len(prompts):
        raise ValueError(
            f"seed has {len(options.seed)} entries for {len(prompts)} prompts; give one per row or one int"
        )
