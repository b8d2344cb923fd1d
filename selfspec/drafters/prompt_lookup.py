"""Prompt lookup: what followed the last few tokens where they stood before, as a tree. Nothing is trained.

Source: n-gram matching in the prompt as in transformers' `prompt_lookup_num_tokens` (prompt lookup decoding, Saxena
2023), there one match and one chain. Here every node of the tree is looked up anew with its own path, so that all good
matches share one tree, and equal paths are one path.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from selfspec.core.contract import Accepted, Context
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree
from selfspec.drafters.base import Calibration, Drafter, DrafterConfig, whole
from selfspec.drafters.parts.ngrams import ListTree, Tally, as_tree
from selfspec.utils.checks import shares

# Acceptance by length of the match (1, 2, ... tokens) and rank of the choice before anything was measured: what
# calibration finds on the embedded target's own text (notebooks/LOG.md).
_PRIOR = {
    "greedy": [[0.46, 0.02, 0.01], [0.72, 0.03, 0.02], [0.84, 0.06, 0.03], [0.86, 0.07, 0.02], [0.94, 0.05, 0.02]],
    "sampled": [[0.21, 0.08, 0.04], [0.47, 0.17, 0.06], [0.61, 0.15, 0.07], [0.68, 0.18, 0.1], [0.74, 0.24, 0.05]],
}


class NGrams:
    """What followed every n-gram of one row's text: its different next tokens, the most recent last."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest
        self.after: dict[tuple[int, ...], dict[int, None]] = {}
        self.read = 1

    def extend(self, tokens: list[int]) -> None:
        """Take in what is new of the row's text."""
        for end in range(self.read, len(tokens)):
            for n in range(self.shortest, min(self.longest, end) + 1):
                after = self.after.setdefault(tuple(tokens[end - n : end]), {})
                after.pop(tokens[end], None)
                after[tokens[end]] = None
        self.read = max(self.read, len(tokens))

    def next(self, suffix: tuple[int, ...], choices: int) -> dict[int, int]:
        """Tokens that followed the end of `suffix`, each with the length of its match: longest and most recent
        first."""
        choices_found: dict[int, int] = {}
        for n in range(len(suffix), self.shortest - 1, -1):
            for token in reversed(self.after.get(suffix[-n:], {})):
                if token not in choices_found:
                    choices_found[token] = n
                    if len(choices_found) == choices:
                        return choices_found
        return choices_found


class _Row:
    """One row of a call: its text's n-grams, and what the last tree offered below each of its nodes."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.grams = NGrams(shortest, longest)
        self.offers: list[list[tuple[int, int, int, int]]] = []  # per node (token, tokens matched, rank, node or -1)
        self.seen = 0

    def learn(self, tokens: list[int], tally: Tally) -> None:
        """Count which of the last tree's choices were right, as far down as the text followed it."""
        node = 0
        for token in tokens[self.seen :] if self.offers else ():
            below = -1
            for choice, n, rank, child in self.offers[node]:
                tally.count(n - 1, rank, choice == token)
                below = child if choice == token else below
            if below < 0:
                break
            node = below
        self.seen = len(tokens)

    def grow(self, tokens: list[int], nodes: int, tally: Tally, config: PromptLookupConfig) -> ListTree:
        """Best-first: every node's choices come from the longest matches of its own path."""
        ids, parents, probs = [tokens[-1]], [-1], [1.0]
        waiting: list[tuple[float, int, int, int, tuple[int, ...]]] = []  # (-probability, order, parent, offer, path)
        self.offers = []
        order = 0

        def offer(node: int, path: tuple[int, ...]) -> None:
            nonlocal order
            self.offers.append([])
            for rank, (token, n) in enumerate(self.grams.next(path, config.choices).items()):
                prob = probs[node] * tally.rate(n - 1, rank)
                self.offers[node].append((token, n, rank, -1))
                if prob >= config.min_prob:
                    order += 1
                    heapq.heappush(waiting, (-prob, order, node, rank, (*path, token)[-config.longest :]))

        offer(0, tuple(tokens[-config.longest :]))
        while waiting and len(ids) < nodes:
            prob, _, parent, rank, path = heapq.heappop(waiting)
            token, n, _, _ = self.offers[parent][rank]
            self.offers[parent][rank] = (token, n, rank, len(ids))
            ids.append(token)
            parents.append(parent)
            probs.append(-prob)
            offer(len(ids) - 1, path)
        return ids, parents, probs


@dataclass
class PromptLookupConfig(DrafterConfig):
    """longest, shortest: tokens of a match; choices: children of a node at most; min_prob: nodes with less path
    probability are left out, so that a tree may be smaller than its budget.

    Raises ValueError for a number below 1 and shortest > longest.
    """

    longest: int = 8
    shortest: int = 1
    choices: int = 4
    min_prob: float = 0.05

    def __post_init__(self) -> None:
        whole("longest", self.longest)
        whole("shortest", self.shortest, 1, self.longest, f": drafter.longest is {self.longest}")
        whole("choices", self.choices)
        shares(self, "drafter", "min_prob", ends="[)")


class PromptLookup(Drafter):
    """N-grams of the row's own text, prompt and answer. No parameters, no checkpoint, no product at all."""

    config: PromptLookupConfig

    def __init__(self, target: Target, config: PromptLookupConfig) -> None:
        """Raises ValueError for an n-gram longer than the target's context."""
        if target.max_positions is not None:
            why = f": the target's context has {target.max_positions} positions"
            whole("longest", config.longest, 1, target.max_positions - 1, why)
        # acceptance[n - 1][r]: of the r-th choice where the match has n tokens
        prior = {
            mode: [[table[min(n, 4)][min(r, 2)] for r in range(config.choices)] for n in range(config.longest)]
            for mode, table in _PRIOR.items()
        }
        super().__init__(config, {mode: Calibration(table, []) for mode, table in prior.items()})

    def session(self, target: Target, rows: int) -> PromptLookupSession:
        return PromptLookupSession(self, rows)


class PromptLookupSession:
    """What one call keeps: each row's n-grams, and how often choices were right so far."""

    def __init__(self, drafter: PromptLookup, rows: int) -> None:
        self.config, self.calibration = drafter.config, drafter.calibration
        self.rows = [_Row(drafter.config.shortest, drafter.config.longest) for _ in range(rows)]
        self.tally: Tally | None = None

    def propose(self, context: Context) -> DraftTree:
        return as_tree(context.roots, self.lists(context))

    def lists(self, context: Context) -> list[ListTree]:
        tally = self.tally = self.tally or Tally(self.calibration[context.mode].acceptance)
        for row, tokens in zip(self.rows, context.tokens, strict=True):
            row.learn(tokens, tally)
            row.grams.extend(tokens)
        rows = zip(self.rows, context.tokens, strict=True)
        return [row.grow(tokens, context.nodes, tally, self.config) for row, tokens in rows]

    def observe(self, accepted: Accepted) -> None:
        self.rows = [self.rows[row] for row in accepted.rows]
