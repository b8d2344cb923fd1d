"""The published verifiers emit the target's law exactly, by enumeration in fractions; broken ones do not."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import made, randomize, tiny_model

from selfspec.api import Spec
from selfspec.core.target import Target
from selfspec.drafters.medusa import Medusa
from selfspec.drafters.parts.static_tree import static_tree

sys.path.insert(0, str(Path(__file__).parents[1] / "notebooks" / "experiments"))
import verifiers
from verifiers import (
    Random,
    acceptance_length,
    block_verification,
    draft,
    recursive_rejection,
    rejection_rates,
    traversal,
)

V = 3
SHAPES = {
    "chain1": [-1, 0],
    "chain2": [-1, 0, 1],
    "chain3": [-1, 0, 1, 2],
    "two": [-1, 0, 0],
    "three": [-1, 0, 0, 0],
    "tree": [-1, 0, 0, 1, 1, 2],
}
CASES = [
    *[(recursive_rejection, s) for s in SHAPES],
    *[(traversal, s) for s in SHAPES],
    *[(block_verification, s) for s in SHAPES if "chain" in s],
]


class Exhaustive:
    """Takes every branch of a computation in turn, with its exact probability."""

    def __init__(self) -> None:
        self.trail: list[tuple[int, list[tuple[int, Fraction]]]] = []

    def choose(self, weights: Any) -> int:
        total = sum(weights)
        options = [(i, w / total) for i, w in enumerate(weights) if w > 0]
        if self.at == len(self.trail):
            self.trail.append((0, options))
        taken, known = self.trail[self.at]
        assert known == options
        self.at += 1
        self.probability *= options[taken][1]
        return options[taken][0]

    def flip(self, p: Any) -> bool:
        return bool(self.choose([1 - Fraction(p), Fraction(p)]))

    def outcomes(self, run: Callable[[Exhaustive], Any]) -> dict[Any, Fraction]:
        found: dict[Any, Fraction] = {}
        while True:
            self.at, self.probability = 0, Fraction(1)
            outcome = run(self)
            found[outcome] = found.get(outcome, Fraction(0)) + self.probability
            while self.trail and self.trail[-1][0] + 1 == len(self.trail[-1][1]):
                self.trail.pop()
            if not self.trail:
                return found
            taken, options = self.trail.pop()
            self.trail.append((taken + 1, options))


def law(rng: np.random.Generator) -> Any:
    weights = [Fraction(int(w)) for w in rng.integers(1, 9, V)]
    return np.array([w / sum(weights) for w in weights], dtype=object)


def emitted(verifier: Any, parents: list[int], seed: int) -> tuple[dict[Any, Fraction], dict[Any, Any]]:
    """The distribution of what one pass emits, and the target's next-token laws by prefix."""
    rng = np.random.default_rng(seed)
    p = {prefix: law(rng) for n in range(4) for prefix in itertools.product(range(V), repeat=n)}
    q = [law(rng) for _ in parents]

    def run(chance: Exhaustive) -> tuple[int, ...]:
        tree = draft(parents, 0, q, chance)
        prefixes: list[tuple[int, ...]] = [()]
        for node in range(1, len(parents)):
            prefixes.append((*prefixes[parents[node]], tree.tokens[node]))
        path, bonus = verifier(tree, [p[x] for x in prefixes], q, chance)
        return (*(tree.tokens[n] for n in path[1:]), bonus)

    return Exhaustive().outcomes(run), p


def completed(found: dict[Any, Fraction], p: dict[Any, Any], length: int) -> dict[Any, Fraction]:
    """The distribution of `length` tokens where what a pass left open is sampled from the target."""
    result: dict[Any, Fraction] = {}
    for text in itertools.product(range(V), repeat=length):
        chance = Fraction(0)
        for n in range(1, length + 1):
            if text[:n] in found:
                rest = Fraction(1)
                for i in range(n, length):
                    rest *= p[text[:i]][text[i]]
                chance += found[text[:n]] * rest
        result[text] = chance
    return result


def is_exact(verifier: Any, shape: str, seed: int) -> bool:
    found, p = emitted(verifier, SHAPES[shape], seed)
    assert sum(found.values()) == 1
    length = max(map(len, found))
    for text, chance in completed(found, p, length).items():
        wanted = Fraction(1)
        for i in range(length):
            wanted *= p[text[:i]][text[i]]
        if chance != wanted:
            return False
    return True


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("verifier", "shape"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_the_distribution_is_the_targets(verifier: Any, shape: str, seed: int) -> None:
    assert is_exact(verifier, shape, seed)


@pytest.mark.parametrize(
    ("verifier", "shape", "name", "broken"),
    [
        (recursive_rejection, "chain2", "residual", lambda p, q, a=1: (p, 1)),
        (block_verification, "chain2", "residual", lambda p, q, a=1: (p, np.maximum(a * p - q, 0 * p).sum())),
        (traversal, "tree", "residual", lambda p, q, a=1: (p, np.maximum(a * p - q, 0 * p).sum())),
        (recursive_rejection, "two", "without", lambda q, token: q),
        (traversal, "two", "without", lambda q, token: q),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_broken_verifier_is_found(
    verifier: Any, shape: str, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(verifiers, name)

    def wrapped(tree: Any, p: Any, q: Any, chance: Any) -> Any:
        with monkeypatch.context() as patch:  # verification alone is broken, not the drafting
            patch.setattr(verifiers, name, broken)
            return verifier(tree, p, q, chance)

    assert not is_exact(wrapped, shape, 0)
    assert getattr(verifiers, name) is right


def test_block_verification_is_traversal_of_a_chain_and_accepts_no_less() -> None:
    for seed in range(4):
        lengths = {}
        for verifier in (recursive_rejection, block_verification, traversal):
            found, _ = emitted(verifier, SHAPES["chain3"], seed)
            lengths[verifier] = sum(len(text) * chance for text, chance in found.items())
        assert lengths[block_verification] == lengths[traversal] >= lengths[recursive_rejection]


def test_acceptance_on_a_target() -> None:
    target = Target(tiny_model())
    drafter = made(Medusa, target, heads=3, rank=4)
    randomize(drafter)
    drafter.eval()
    spec = Spec(target, drafter)

    def heads(hidden: torch.Tensor) -> torch.Tensor:
        return drafter(hidden)[:, 0]

    chances = rejection_rates(spec, heads, [list(range(40))], 8, 1.0)
    assert len(chances) == 3
    assert all(0 < sum(row) <= 1 for row in chances)
    parents = static_tree(chances, 8)[0]
    assert len(parents) == 8
    for verifier in (recursive_rejection, traversal):
        stats = acceptance_length(spec, heads, [[5, 9, 2], [8, 1, 30]], 20, 1.0, parents, verifier)
        assert [s.tokens for s in stats] == [20, 20]
        assert all(1 <= s.acceptance_length < 4 for s in stats)


def test_random_choices_follow_their_weights() -> None:
    chance = Random(0)
    counts = np.bincount([chance.choose(np.array([0.0, 0.5, 0.25, 0.0, 0.25])) for _ in range(8000)], minlength=5)
    assert counts[0] == counts[3] == 0
    assert np.allclose(counts / 8000, [0, 0.5, 0.25, 0, 0.25], atol=0.03)
    assert abs(sum(chance.flip(0.3) for _ in range(8000)) / 8000 - 0.3) < 0.03


def test_the_experiment_prints_one_table() -> None:
    target = Target(tiny_model())
    drafter = made(Medusa, target, heads=3, rank=4)
    randomize(drafter)
    spec, prompts = Spec(target, drafter), [[5, 9, 2, 7], [8, 1, 30, 4]]

    def heads(hidden: torch.Tensor) -> torch.Tensor:
        return drafter(hidden)[:, 0]

    rows = verifiers.compare(spec, heads, prompts, prompts, [0.5, 1.0], 6, 14)
    assert len(rows) == 16
    assert all(1 <= row["low"] <= row["tau"] <= row["high"] < 5 for row in rows)
    assert {row["nodes"] for row in rows} == {4, 6}
    assert len(verifiers.rules_table(rows).splitlines()) == 10
