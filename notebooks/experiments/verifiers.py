"""Shared noise against the published lossless verifiers; nothing in the package decodes by them.

    python notebooks/experiments/verifiers.py --drafter tiny-medusa --nodes 16

prints a table of acceptance lengths, which notebooks/results/verifiers_v0.2.md quotes.

Each draws its drafts from the drafter's distribution and corrects for it by rejection, so that what it emits has the
target's distribution. They are written over any numbers (float64, or fractions for the proof by enumeration in the
tests) and any source of chance.

Legend: p[n], q[n] the target's and the drafter's distribution behind node n; a the chance to accept.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from selfspec.api import Spec, load
from selfspec.core.contract import Accepted, Context, Drafts, Session
from selfspec.core.generate import speculative
from selfspec.core.options import Options, check
from selfspec.core.sampling import Sampling, warp
from selfspec.core.stats import Stats
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain
from selfspec.data.corpus import PythonSource
from selfspec.data.cut_prompts import cut_prompts
from selfspec.drafters.base import Calibration, Drafter, Trained
from selfspec.drafters.parts.static_tree import static_tree
from selfspec.evaluation.metrics import bootstrap
from selfspec.evaluation.tables import markdown
from selfspec.training.calibrate import measure_along, write_samples
from selfspec.utils.files import Figures
from selfspec.utils.progress import progress

Vector = Any  # np.ndarray [V] of float64 or of fractions (dtype object)
Number = Any  # one of them


class Chance(Protocol):
    """Where decisions come from: a random generator, or a proof that takes every branch."""

    def flip(self, p: Number) -> bool: ...

    def choose(self, weights: Vector) -> int: ...


class Random:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def flip(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def choose(self, weights: Vector) -> int:
        total = np.cumsum(weights)
        return min(int(np.searchsorted(total, self.rng.random() * total[-1], side="right")), len(weights) - 1)


def residual(p: Vector, q: Vector, a: Number = 1) -> tuple[Vector, Number]:
    """max(a p - q, 0), normalized, and its sum before; p itself where nothing is left (it is then never drawn from)."""
    rest = np.maximum(a * p - q, 0 * p)
    total = rest.sum()
    return (rest / total if total > 0 else p), total


def without(q: Vector, token: int) -> Vector:
    """q after `token` was drawn from it and is not put back."""
    rest = q.copy()
    rest[token] = 0 * rest[token]
    total = rest.sum()
    return rest / total if total > 0 else rest


@dataclass(frozen=True)
class Drafted:
    """A tree as lists: parents (root -1), children in the order they were drawn, and each node's token."""

    parents: Sequence[int]
    children: Sequence[Sequence[int]]
    tokens: Sequence[int]


def draft(parents: Sequence[int], root: int, q: Sequence[Vector], chance: Chance) -> Drafted:
    """Draw tokens for a tree's shape, the children of a node from q[node] one after another without replacement."""
    children: list[list[int]] = [[] for _ in parents]
    left = list(q)
    tokens = [root]
    for node in range(1, len(parents)):
        parent = parents[node]
        token = chance.choose(left[parent])
        left[parent] = without(left[parent], token)
        children[parent].append(node)
        tokens.append(token)
    return Drafted(parents, children, tokens)


class Verifier(Protocol):
    __name__: str

    def __call__(
        self, tree: Drafted, p: Sequence[Vector], q: Sequence[Vector], chance: Chance
    ) -> tuple[list[int], int]: ...


def recursive_rejection(
    tree: Drafted, p: Sequence[Vector], q: Sequence[Vector], chance: Chance
) -> tuple[list[int], int]:
    """Recursive rejection sampling without replacement (arXiv 2402.14160); on a chain it is the rejection sampling of
    arXiv 2211.17192. Returns the accepted path, root first, and the bonus token."""
    path = [0]
    while True:
        node = path[-1]
        wanted, drawn = p[node], q[node]
        for child in tree.children[node]:
            token = tree.tokens[child]
            if chance.flip(min(1, wanted[token] / drawn[token])):
                path.append(child)
                break
            wanted, _ = residual(wanted, drawn)
            drawn = without(drawn, token)
        else:
            return path, chance.choose(wanted)


def block_verification(
    tree: Drafted, p: Sequence[Vector], q: Sequence[Vector], chance: Chance
) -> tuple[list[int], int]:
    """Block verification of a chain (arXiv 2403.10444): the longest prefix that a joint test accepts."""
    assert all(len(below) <= 1 for below in tree.children), "block verification knows chains alone"
    a: Number = 1
    longest, bonus = 0, residual(p[0], q[0])[0] if len(tree.parents) > 1 else p[0]
    for node in range(1, len(tree.parents)):
        token = tree.tokens[node]
        a = min(1, a * p[node - 1][token] / q[node - 1][token])
        if node + 1 < len(tree.parents):
            rest, total = residual(p[node], q[node], a)
            accept = total / (total + 1 - a) if total > 0 else 0 * total
        else:
            rest, accept = p[node], a
        if chance.flip(accept):
            longest, bonus = node, rest
    return list(range(longest + 1)), chance.choose(bonus)


def traversal(tree: Drafted, p: Sequence[Vector], q: Sequence[Vector], chance: Chance) -> tuple[list[int], int]:
    """Traversal verification (arXiv 2505.12398): from the leaves up, a rejected node leaving its parent a residual."""

    def visit(node: int, a: Number) -> tuple[list[int], int] | None:
        wanted, drawn = p[node], q[node]
        for child in tree.children[node]:
            token = tree.tokens[child]
            found = visit(child, min(1, a * wanted[token] / drawn[token]))
            if found is not None:
                return [node, *found[0]], found[1]
            wanted, total = residual(wanted, drawn, a)
            a = total / (total + 1 - a) if total > 0 else 0 * total
            drawn = without(drawn, token)
        return ([node], chance.choose(wanted)) if chance.flip(a) else None

    found = visit(0, 1)
    assert found is not None, "the root is always accepted"
    return found


# -- measured on a target with heads

# logits [depth, V] of what follows depth 1, 2, ... behind a hidden state [1, H]: heads that do not look at the path
Heads = Callable[[Tensor], Tensor]


def _distributions(logits: Tensor, warpers: list[LogitsProcessor]) -> Vector:
    return warp(logits, warpers).double().softmax(-1).cpu().numpy()


@torch.inference_mode()
def acceptance_length(
    spec: Spec,
    heads: Heads,
    prompts: list[list[int]],
    new_tokens: int,
    temperature: float,
    parents: Sequence[int],
    verifier: Verifier,
    seed: int = 0,
) -> list[Stats]:
    """Decode prompts one by one with a verifier over trees of one shape; per prompt, counts as `speculative` has."""
    total, chance = [], Random(seed)
    warpers = Sampling(temperature).warpers()
    shape = torch.tensor([list(parents)], device=spec.target.device)
    depth = DraftTree(torch.zeros_like(shape), shape).depth[0].tolist()
    device = spec.target.device
    for prompt in progress(prompts, desc=f"{verifier.__name__} T={temperature:g}", leave=False):
        stats = Stats()
        cache = spec.target.cache(1, len(prompt) + new_tokens + len(parents))
        hidden = spec.target.forward(chain(torch.tensor([prompt[:-1]], device=device)), cache, logits=False).hidden
        hidden = hidden[:, -1]
        cache.commit([list(range(len(prompt) - 1))])
        root, made = prompt[-1], 0
        while made < new_tokens:
            guesses = _distributions(heads(hidden), warpers)
            q = [guesses[min(d, len(guesses) - 1)] for d in depth]  # leaves' own are never read
            tree = draft(parents, root, q, chance)
            out = spec.target.forward(DraftTree(torch.tensor([list(tree.tokens)], device=device), shape), cache)
            assert out.logits is not None
            p = _distributions(out.logits[0], warpers)
            path, root = verifier(tree, list(p), q, chance)
            cache.commit([path])
            hidden = out.hidden[:, path[-1]]
            count = min(len(path), new_tokens - made)
            stats.count(min(len(path) - 1, count), count)
            made += count
        total.append(stats)
    return total


@torch.inference_mode()
def rejection_rates(
    spec: Spec, heads: Heads, texts: list[list[int]], start: int, temperature: float, children: int = 8, seed: int = 0
) -> list[list[float]]:
    """How often the r-th child drawn at each depth is accepted by recursive rejection, given that its parent was, on
    texts the target wrote from index `start` on: the table that shapes its trees."""
    warpers = Sampling(temperature).warpers()
    rng, positions = np.random.default_rng(seed), 0
    accepted: list[Vector] = []
    for text in texts:
        tokens = torch.tensor([text], device=spec.target.device)
        out = spec.target.forward(chain(tokens), spec.target.cache(1, len(text)))
        assert out.logits is not None
        distributions = _distributions(out.logits[0], warpers)
        depth = len(heads(out.hidden[:, 0]))
        for at in rng.choice(range(start - 2, len(text) - 1 - depth), 12) if len(text) > start + depth else ():
            guesses = _distributions(heads(out.hidden[:, at]), warpers)
            accepted = accepted or [np.zeros(children) for _ in guesses]
            positions += 1
            for d, guess in enumerate(guesses):
                wanted, drawn, left = distributions[at + 1 + d], guess, 1.0
                for r in range(children):
                    token = int(rng.choice(len(drawn), p=drawn / drawn.sum()))
                    chance = min(1.0, wanted[token] / drawn[token])
                    accepted[d][r] += left * chance
                    left *= 1 - chance
                    wanted, drawn = residual(wanted, drawn)[0], without(drawn, token)
    if not positions:
        raise ValueError(
            "no usable example: every text the target wrote is too short; raise max_new_tokens, or lower prompt_tokens "
            "where prompts reach the target's last position"
        )
    return [(row / positions).tolist() for row in accepted]


class _Blind:
    """A drafter whose sessions do not see the noise (top-k drafts under the same rule), and such a session."""

    def __init__(self, drafter: Drafter, inner: Session | None = None) -> None:
        self.reads, self.drafter, self.inner = drafter.reads, drafter, inner

    def session(self, target: Target, rows: int) -> _Blind:
        return _Blind(self.drafter, self.drafter.session(target, rows))

    def propose(self, context: Context) -> DraftTree:
        assert self.inner is not None
        return self.inner.propose(replace(context, noise=None))

    def observe(self, accepted: Accepted) -> None:
        assert self.inner is not None
        self.inner.observe(accepted)


@contextmanager
def _calibrated(drafter: Drafter, **modes: Calibration) -> Iterator[None]:
    """The drafter with other calibrations for some decoding modes while the block runs."""
    kept = drafter.calibration
    drafter.calibration = {**kept, **modes}
    try:
        yield
    finally:
        drafter.calibration = kept


def compare(
    spec: Spec,
    heads: Heads,
    validation: list[list[int]],
    prompts: list[list[int]],
    temperatures: Sequence[float],
    nodes: int,
    new_tokens: int,
    seed: int = 0,
) -> list[Figures]:
    """Acceptance length of every rule at every temperature: same heads, same prompts, same number of nodes, trees grown
    from tables measured at that temperature on text continuing the `validation` prompts (for recursive rejection, whose
    tree traversal takes too; for shared noise; for drafts blind to it), beside shared noise with its table as saved."""
    rows: list[Figures] = []
    drafter = spec.drafter
    assert isinstance(drafter, Trained), "trees of untrained drafters have no table to measure"
    check(spec.target, [*validation, *prompts], Options(new_tokens))
    for temperature in temperatures:
        samples = write_samples(spec.target, validation, new_tokens, temperature, range(seed, seed + len(validation)))
        texts, start = [s.tokens.tolist() for s in samples], samples[0].start
        table = rejection_rates(spec, heads, texts, start, temperature, seed=seed)
        depth, without_noise = len(table), [replace(sample, noise=None) for sample in samples]
        tuned, _ = measure_along(samples, drafter.depth, drafter.scores)
        unseeing, _ = measure_along(without_noise, drafter.depth, drafter.scores)
        line = Calibration([[0.5]] * depth, [1.0] * depth)

        def noisy(n: int, drafts: Drafts = drafter, T: float = temperature, **modes: Calibration) -> list[Stats]:
            with _calibrated(drafter, **modes):
                return [
                    speculative(spec.target, [p], Options(new_tokens, Sampling(T), [seed + i]), drafts, n).stats
                    for i, p in enumerate(prompts)
                ]

        def published(verifier: Verifier, parents: list[int], T: float = temperature) -> list[Stats]:
            return acceptance_length(spec, heads, prompts, new_tokens, T, parents, verifier, seed)

        tree, single = static_tree(table, nodes)[0], list(range(-1, depth))
        arms = {
            "shared noise": (nodes, noisy(nodes)),
            "shared noise, table measured at this T": (nodes, noisy(nodes, sampled=tuned)),
            "same rule, drafts blind to the noise": (nodes, noisy(nodes, _Blind(drafter), greedy=unseeing)),
            "recursive rejection (2402.14160)": (nodes, published(recursive_rejection, tree)),
            "traversal (2505.12398)": (nodes, published(traversal, tree)),
            "shared noise, chain": (depth + 1, noisy(depth + 1, sampled=line)),
            "rejection, chain (2211.17192)": (depth + 1, published(recursive_rejection, single)),
            "block verification, chain (2403.10444)": (depth + 1, published(block_verification, single)),
        }
        for rule, (count, stats) in arms.items():
            figures = torch.tensor([[s.tokens, s.passes] for s in stats], dtype=torch.float64)
            tau, low, high = bootstrap(figures, lambda total: total[:, 0] / total[:, 1])
            rows.append({"rule": rule, "T": temperature, "nodes": count, "tau": tau, "low": low, "high": high})
    return rows


def rules_table(rows: list[Figures]) -> str:
    """One row a rule and one column a temperature, τ with its 95% interval over prompts."""
    temperatures, lines = sorted({row["T"] for row in rows}), []
    for rule in dict.fromkeys(row["rule"] for row in rows):
        at = {row["T"]: row for row in rows if row["rule"] == rule}
        cells = [f"{at[t]['tau']:.2f} [{at[t]['low']:.2f}, {at[t]['high']:.2f}]" for t in temperatures]
        lines.append([rule, str(next(iter(at.values()))["nodes"]), *cells])
    return markdown(["rule", "nodes", *(f"τ at T={t:g}" for t in temperatures)], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--drafter", default="tiny-medusa", help="heads that guess each depth without the tokens before"
    )
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.3, 0.7, 1.0])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--measured", type=int, default=64, help="prompts that shape the trees")
    parser.add_argument("--new-tokens", type=int, default=128)
    args = parser.parse_args()
    spec = load(args.drafter)
    if spec.drafter.kind != "medusa" or spec.tokenizer is None:
        parser.error(f"--drafter={args.drafter} is of kind {spec.drafter.kind}; give one of kind medusa")
    source = PythonSource()
    validation = cut_prompts(source.validation(), spec.tokenizer, args.measured, 64)
    prompts = cut_prompts(source.evaluation(), spec.tokenizer, args.prompts, 64)
    sizes = args.temperatures, args.nodes, args.new_tokens
    print(rules_table(compare(spec, lambda hidden: spec.drafter(hidden)[:, 0], validation, prompts, *sizes)))


if __name__ == "__main__":
    main()
