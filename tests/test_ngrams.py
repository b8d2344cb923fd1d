"""Drafting without training: what prompt lookup finds, how the lookahead window is laid out, how trees are merged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

import selfspec
from selfspec.drafters.hybrid import Hybrid, _Row
from selfspec.drafters.lookahead import Lookahead, Pool
from selfspec.drafters.prompt_lookup import NGrams, PromptLookup
from selfspec.generate import Accepted, Context, Options, autoregressive, speculative
from selfspec.target import Target
from selfspec.tree import DraftTree, chain


def context(target: Target, *rows: list[int], nodes: int = 12, rate: float = 0.0) -> Context:
    roots = torch.tensor([row[-1] for row in rows])
    cache: Any = None
    return Context(
        roots, [len(row) - 1 for row in rows], [list(r) for r in rows], nodes, 0.0, None, target, cache, rate
    )


# -- prompt lookup


def test_longest_and_most_recent_matches_come_first() -> None:
    grams = NGrams(1, 3)
    grams.extend([1, 2, 3, 7, 9, 3, 8, 2, 3, 5, 9, 2])
    assert grams.next((2, 3), 4) == {5: 2, 7: 2, 8: 1}  # two tokens match before one; 5 was later than 7
    assert grams.next((2, 3), 2) == {5: 2, 7: 2}
    assert grams.next((4,), 4) == {}
    grams.extend([1, 2, 3, 7, 9, 3, 8, 2, 3, 5, 9, 2, 3, 7])
    assert list(grams.next((9, 2, 3), 4)) == [7, 5, 8]
    assert grams.next((9, 2, 3), 4) == {7: 3, 5: 2, 8: 1}


def test_copied_text_becomes_a_chain(llama: Target) -> None:
    text = [*range(20), 40, *range(6)]
    tree = PromptLookup(llama).propose(context(llama, text, nodes=5))
    assert tree.tokens.tolist() == [[5, 6, 7, 8, 9]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3]]


def test_rows_of_one_batch_do_not_mix(llama: Target) -> None:
    drafter = PromptLookup(llama)
    rows = [[*range(9), 30, 2, 3], [50, 51], [7, 8, 7, 9, 7]]
    together = drafter.propose(context(llama, *rows))
    for i, row in enumerate(rows):
        alone = PromptLookup(llama).propose(context(llama, row))
        n = alone.tokens.shape[1]
        assert together.tokens[i, :n].tolist() == alone.tokens[0].tolist()
        assert together.parents[i].tolist() == alone.parents[0].tolist() + [-1] * (together.tokens.shape[1] - n)
    found = PromptLookup(llama, least=0.0).propose(context(llama, rows[2]))
    below = [t for t, p in zip(found.tokens[0].tolist(), found.parents[0].tolist(), strict=True) if p == 0]
    assert below == [9, 8]  # what followed 7, the most recent first


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(1, 20))
def test_trees_hold_every_path_once(text: list[int], nodes: int) -> None:
    target = _TARGET
    tree = PromptLookup(target, least=0.0).propose(context(target, text, nodes=nodes))
    pairs = list(zip(tree.parents[0].tolist(), tree.tokens[0].tolist(), strict=True))
    assert len(set(pairs)) == len(pairs) <= nodes
    assert tree.scores is not None
    chances = tree.scores[0].tolist()
    assert all(chances[i] <= chances[p] for i, (p, _) in enumerate(pairs) if p >= 0)
    for node, (parent, token) in enumerate(pairs):  # every step was seen in the text
        if parent >= 0:
            before = pairs[parent][1]
            assert any(text[i : i + 2] == [before, token] for i in range(len(text) - 1)), node


def test_acceptance_is_counted_while_decoding(llama: Target) -> None:
    drafter = PromptLookup(llama, longest=2)
    text = [1, 2, 3, 4, 1, 2]
    before = drafter.measured["greedy"][1][0]
    for token in (3, 4, 1, 2, 3, 4, 1, 2):
        drafter.propose(context(llama, text))
        text = [*text, token]
    drafter.propose(context(llama, text))
    assert drafter._tally is not None
    assert drafter._tally.chance(1, 0) > before  # always right
    wrong = PromptLookup(llama, longest=2)
    text = [1, 2, 3, 4, 1, 2]
    for token in (30, 1, 2, 31, 1, 2, 32, 1, 2):
        wrong.propose(context(llama, text))
        text = [*text, token]
    assert wrong._tally is not None
    assert wrong._tally.chance(1, 0) < before


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"longest": 0}, "drafter.longest=0"),
        ({"shortest": 0}, "drafter.shortest=0"),
        ({"longest": 256}, "drafter.longest=256 must be between 1 and 255: the target's context has 256"),
        ({"shortest": 5, "longest": 3}, "drafter.shortest=5 must be between 1 and 3: drafter.longest is 3"),
        ({"longest": 2.5}, "drafter.longest=2.5"),
        ({"choices": 0}, "drafter.choices=0"),
        ({"least": 1.0}, "drafter.least=1.0"),
        ({"least": math.nan}, "drafter.least=nan"),
    ],
)
def test_prompt_lookup_refuses_bad_shapes(llama: Target, shape: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptLookup(llama, **shape)


# -- lookahead


def test_pool_is_bounded_and_forgets_the_oldest() -> None:
    pool = Pool(size=5, guesses=2)
    for i in range(4):
        pool.add(1, (i, i))
    assert pool.of(1) == [(3, 3), (2, 2)]
    pool.add(1, (2, 2))
    assert pool.of(1) == [(2, 2), (3, 3)]
    for first in (2, 3, 4):
        pool.add(first, (0, 0))
    assert pool.held == 5
    pool.add(5, (0, 0))
    assert pool.of(1) == []
    assert pool.held == sum(len(own) for own in pool.grams.values()) == 4


def test_the_windows_grams_are_the_targets_own_words(llama: Target) -> None:
    """Every n-gram ends in what the target picks, on its own, behind the column's path: plain passes are the oracle."""
    drafter = Lookahead(llama, window=3, ngram=4)
    seen: list[tuple[list[int], DraftTree, list[list[int]]]] = []

    class Spy:
        features = ()

        def propose(self, context: Context) -> DraftTree:
            tree = drafter.propose(context)
            seen.append((list(context.tokens[0]), tree, [list(level) for level in drafter._rows[0].levels]))  # type: ignore[index]
            return tree

        def observe(self, accepted: Accepted) -> None:
            drafter.observe(accepted)
            if accepted.logits is not None:
                self.check()

        def check(self) -> None:
            text, tree, levels = seen[-1]
            tops, row = drafter._tops, drafter._rows[0]  # type: ignore[index]
            assert row.levels[:-1] == levels[1:]
            for column, top in enumerate(tops):
                path, node = [], top
                while node:
                    path.append(int(tree.tokens[0, node]))
                    node = int(tree.parents[0, node])
                path = path[::-1]
                # level 0 up to the column, then down the column
                assert path == levels[0][: column + 1] + [level[column] for level in levels[1:]]
                out = llama.forward(chain(torch.tensor([text + path])), llama.cache(1, 200))
                assert out.logits is not None
                assert row.levels[-1][column] == int(out.logits[0, -1].argmax())
                gram = (levels[0][column], *(level[column] for level in levels[1:]), row.levels[-1][column])
                assert gram[1:] in row.pool.of(gram[0])

    with torch.inference_mode():
        speculative(llama, [[5, 9, 2, 7, 7, 1]], Options(12), Spy(), 20)
    assert len(seen) > 3
    assert all(len(levels) == 3 and {len(level) for level in levels} == {3} for _, _, levels in seen)


def test_lookahead_needs_fewer_passes(llama: Target) -> None:
    prompts = [[5, 9, 2, 7, 7, 1], [8, 1, 30, 4]]
    plain = autoregressive(llama, prompts, Options(150))
    fast = speculative(llama, prompts, Options(150), Lookahead(llama), 24)
    assert fast.token_ids == plain.token_ids
    assert fast.stats.passes < 0.9 * plain.stats.passes


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"window": 0}, "drafter.window=0"),
        ({"ngram": 1}, "drafter.ngram=1"),
        ({"ngram": 256}, "drafter.ngram=256 must be between 2 and 255: the target's context has 256"),
        ({"guesses": 0}, "drafter.guesses=0"),
        ({"pool": 0}, "drafter.pool=0"),
    ],
)
def test_lookahead_refuses_bad_shapes(llama: Target, shape: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lookahead(llama, **shape)


# -- hybrid trees


def test_equal_paths_merge() -> None:
    one = ([9, 1, 2], [-1, 0, 1], [1.0, 0.5, 0.25])
    other = ([9, 1, 3, 9], [-1, 0, 1, -1], [1.0, 0.5, 0.25, 0.0])  # its last node is spare
    ids, parents, chances = _Row().merge([one, other], 10, 0.0)
    assert (ids, parents) == ([9, 1, 2, 3], [-1, 0, 1, 1])
    assert chances[1] == pytest.approx(0.75)  # one of the two is right
    assert chances[2] == chances[3] < 0.75 * 0.5  # each doubted by the other
    assert _Row().merge([one, other], 2, 0.0) == ([9, 1], [-1, 0], chances[:2])
    assert _Row().merge([one, other], 10, 0.5)[0] == [9, 1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12))
def test_merged_trees_are_trees(seed: int, nodes: int) -> None:
    g = torch.Generator().manual_seed(seed)
    trees = []
    for _ in range(3):
        n = int(torch.randint(1, 9, (1,), generator=g))
        parents = [-1, *(int(torch.randint(0, i, (1,), generator=g)) for i in range(1, n))]
        ids = [7, *torch.randint(0, 4, (n - 1,), generator=g).tolist()]
        chances = [1.0]
        for parent in parents[1:]:
            chances.append(chances[parent] * float(torch.rand(1, generator=g)))
        trees.append((ids, parents, chances))
    ids, parents, chances = _Row().merge(trees, nodes, 0.0)
    DraftTree(torch.tensor([ids]), torch.tensor([parents]))
    assert len(ids) <= nodes
    assert parents.count(-1) == 1
    assert len(set(zip(parents, ids, strict=True))) == len(ids)
    for node in range(len(ids)):
        below = sum(c for c, p in zip(chances, parents, strict=True) if p == node)
        assert below <= chances[node] + 1e-9


def test_sources_are_ranked_by_what_they_were_worth() -> None:
    row = _Row()
    good = ([9, 1], [-1, 0], [1.0, 0.5])
    bad = ([9, 2], [-1, 0], [1.0, 0.6])
    assert row.merge([good, bad], 2, 0.0)[0] == [9, 2]
    text = [0, 9]
    for _ in range(12):  # the first source is always right
        row.merge([good, bad], 2, 0.0)
        row.seen = len(text)
        text = [*text, 1]
        row.learn(text)
    assert row.merge([good, bad], 2, 0.0)[0] == [9, 1]


class _Stub:
    """A member that always drafts the same and counts how often it is asked."""

    free = own_tree = thrifty = False
    features: tuple[int, ...] = ()

    def __init__(self, products: int, tokens: list[int], chances: list[float]) -> None:
        self.asked, self.drawn, self.modules = [0], (tokens, chances), [torch.nn.Identity()] * products

    def products(self) -> list[torch.nn.Module]:
        return self.modules

    def propose(self, context: Context) -> DraftTree:
        self.asked[0] += 1
        tokens, chances = self.drawn
        tree = chain(torch.tensor([[int(context.roots[0]), *tokens]]))
        tree.scores = torch.tensor([[1.0, *chances]])
        return tree

    def observe(self, accepted: Accepted) -> None:
        pass


@pytest.mark.parametrize(("sure", "asked"), [(0.9, 2), (0.1, 5)])
def test_trained_members_rest_where_the_free_ones_promise_more(llama: Target, sure: float, asked: int) -> None:
    drafter = Hybrid(llama, ["prompt_lookup"])
    free, trained = _Stub(0, [1, 2], [sure, sure**2]), _Stub(1, [3], [0.6])
    drafter.__dict__["members"] = [free, trained]
    for n in range(5):
        drafter.propose(context(llama, [4] * (n + 2)))
    assert free.asked == [5]
    assert trained.asked == [asked]


def test_trained_members_rest_where_their_time_is_not_worth_it(llama: Target) -> None:
    drafter = Hybrid(llama, ["prompt_lookup"])
    drafter.__dict__["members"] = [_Stub(0, [1], [0.1]), trained := _Stub(1, [3], [0.6])]
    for n in range(5):
        drafter.propose(context(llama, [4] * (n + 2), rate=1e9))
    assert trained.asked == [2]  # the first time does not tell the price: the prompt may be read in it
    for n in range(5, 20):
        drafter.propose(context(llama, [4] * (n + 2), rate=1e9))
    assert trained.asked == [3]  # tried again


def test_a_member_that_has_nothing_to_read_yet_is_not_judged(llama: Target) -> None:
    drafter = Hybrid(llama, ["prompt_lookup"])
    drafter.__dict__["members"] = [_Stub(0, [1], [0.1]), trained := _Stub(1, [], [])]
    drafter.propose(context(llama, [4]))
    trained.drawn = ([3], [0.6])
    for n in range(4):
        drafter.propose(context(llama, [4] * (n + 2)))
    assert trained.asked == [5]


def test_hybrids_that_can_not_be_are_refused(llama: Target, heads_folder: Path) -> None:
    for drafters, message in [
        ([], "at least one drafter"),
        ("prompt_lookup", "must be a list"),
        (["prompt_lookup", "prompt_lookup"], "names a drafter twice"),
        (["prompt_lookup", "lookahead"], r"'lookahead' \(lookahead\) can not share a tree"),
        (["prompt_lookup", "hybrid"], "give the list of its drafters"),
        (["prompt_lookup", "medusa"], "train it: train/heads.py drafter=medusa"),
        (["prompt_lookup", str(heads_folder)], "were trained on target"),
    ]:
        with pytest.raises(ValueError, match=message):
            Hybrid(llama, drafters)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="no drafter at 'runs/nothing'"):
        Hybrid(llama, ["prompt_lookup", "runs/nothing"])


# -- by name


def test_drafters_load_without_a_checkpoint(heads_folder: Path, tiny_folder: str) -> None:
    plain = selfspec.load(str(heads_folder)).autoregressive([[5, 9, 2, 5, 9, 2]], 20)
    for drafter, kind in [
        ("prompt_lookup", "prompt_lookup"),
        ("lookahead", "lookahead"),
        ([str(heads_folder), "prompt_lookup"], "hybrid"),
        (f"{heads_folder}+prompt_lookup", "hybrid"),
        ([heads_folder], "hybrid"),
    ]:
        spec = selfspec.load(drafter, target=tiny_folder)
        assert spec.drafter.kind == kind
        assert spec.generate([[5, 9, 2, 5, 9, 2]], 20).token_ids == plain.token_ids
    assert selfspec.load(["prompt_lookup", heads_folder]).drafter.kind == "hybrid"  # the target that the heads name
    for drafter, message in [
        ("prompt_lookup", "names no target; give one"),
        ([], "is empty"),
        ("medusa", "train/heads.py drafter=medusa"),
        ("hybrid", "give the list"),
        (7, "must be an embedded name"),
        ([3], "must be an embedded name"),
    ]:
        with pytest.raises(ValueError, match=message):
            selfspec.load(drafter)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="no drafter at"):
        selfspec.load("runs/prompt_lookups")


_TARGET = Target(tiny_model())
assert _TARGET.vocab_size == VOCAB
