"""Drafting without training: what prompt lookup finds, how the lookahead window is laid out, how trees are merged."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import VOCAB, Watch, made, random_drafter, refused, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

import selfspec
from selfspec.checkpoints.loading import find_drafter
from selfspec.core.contract import Accepted, Context
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain
from selfspec.drafters.hybrid import Hybrid, HybridSession, _Row
from selfspec.drafters.lookahead import Pool
from selfspec.drafters.prompt_lookup import NGrams


def context(target: Target, *rows: list[int], nodes: int = 12, rate: float = 0.0) -> Context:
    roots = torch.tensor([row[-1] for row in rows])
    cache: Any = None
    return Context(
        roots, [len(row) - 1 for row in rows], [list(r) for r in rows], nodes, 0.0, None, target, cache, rate
    )


# -- prompt lookup


def test_passes_that_draft_nothing_for_a_row_of_a_batch_do_not_count(llama):
    drafter, options = made("prompt_lookup", llama), Options(12)
    prompts = [[5, 9, 2, 5, 9, 2, 5, 9], [1, 2, 3, 4, 6, 7]]
    alone = [speculative(llama, [prompt], replace(options, seed=[0]), drafter, 8).stats for prompt in prompts]
    both = speculative(llama, prompts, replace(options, seed=[0, 0]), drafter, 8).stats
    assert both.drafts == sum(stats.drafts for stats in alone)
    assert both.drafts < both.passes


def test_longest_and_most_recent_matches_come_first():
    grams = NGrams(1, 3)
    grams.extend([1, 2, 3, 7, 9, 3, 8, 2, 3, 5, 9, 2])
    assert grams.next((2, 3), 4) == {5: 2, 7: 2, 8: 1}  # two tokens match before one; 5 was later than 7
    assert grams.next((2, 3), 2) == {5: 2, 7: 2}
    assert grams.next((4,), 4) == {}
    grams.extend([1, 2, 3, 7, 9, 3, 8, 2, 3, 5, 9, 2, 3, 7])
    assert list(grams.next((9, 2, 3), 4)) == [7, 5, 8]
    assert grams.next((9, 2, 3), 4) == {7: 3, 5: 2, 8: 1}


def test_copied_text_becomes_a_chain(llama):
    text = [*range(20), 40, *range(6)]
    tree = made("prompt_lookup", llama).session(llama, 1).propose(context(llama, text, nodes=5))
    assert tree.tokens.tolist() == [[5, 6, 7, 8, 9]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3]]


def test_rows_of_one_batch_do_not_mix(llama):
    drafter = made("prompt_lookup", llama).session(llama, 3)
    rows = [[*range(9), 30, 2, 3], [50, 51], [7, 8, 7, 9, 7]]
    together = drafter.propose(context(llama, *rows))
    for i, row in enumerate(rows):
        alone = made("prompt_lookup", llama).session(llama, 1).propose(context(llama, row))
        n = alone.tokens.shape[1]
        assert together.tokens[i, :n].tolist() == alone.tokens[0].tolist()
        assert together.parents[i].tolist() == alone.parents[0].tolist() + [-1] * (together.tokens.shape[1] - n)
    found = made("prompt_lookup", llama, min_prob=0.0).session(llama, 1).propose(context(llama, rows[2]))
    below = [t for t, p in zip(found.tokens[0].tolist(), found.parents[0].tolist(), strict=True) if p == 0]
    assert below == [9, 8]  # what followed 7, the most recent first


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(1, 20))
def test_trees_hold_every_path_once(text, nodes):
    target = _TARGET
    tree = made("prompt_lookup", target, min_prob=0.0).session(target, 1).propose(context(target, text, nodes=nodes))
    pairs = list(zip(tree.parents[0].tolist(), tree.tokens[0].tolist(), strict=True))
    assert len(set(pairs)) == len(pairs) <= nodes
    chances = tree.scores[0].tolist()
    assert all(chances[i] <= chances[p] for i, (p, _) in enumerate(pairs) if p >= 0)
    for node, (parent, token) in enumerate(pairs):  # every step was seen in the text
        if parent >= 0:
            before = pairs[parent][1]
            assert any(text[i : i + 2] == [before, token] for i in range(len(text) - 1)), node


@pytest.mark.parametrize(
    ("follows", "rises"), [((3, 4, 1, 2, 3, 4, 1, 2), True), ((30, 1, 2, 31, 1, 2, 32, 1, 2), False)]
)
def test_acceptance_is_counted_while_decoding(llama, follows, rises):
    drafter = made("prompt_lookup", llama, longest=2)
    session, text = drafter.session(llama, 1), [1, 2, 3, 4, 1, 2]
    before = drafter.calibration["greedy"].acceptance[1][0]
    for token in follows:
        session.propose(context(llama, text))
        text = [*text, token]
    session.propose(context(llama, text))
    assert (session.tally.rate(1, 0) > before) == rises
    assert drafter.calibration["greedy"].acceptance[1][0] == before  # what one call saw stays with it


# -- lookahead


def test_pool_is_bounded_and_forgets_the_oldest():
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


def test_the_windows_grams_are_the_targets_own_words(llama):
    """Every n-gram ends in what the target picks, on its own, behind the column's path: plain passes are the oracle."""
    levels_seen: list[list[list[int]]] = []

    class Spy(Watch):
        def propose(self, context: Context) -> DraftTree:
            tree = super().propose(context)
            levels_seen.append([list(level) for level in self.inner.rows[0].levels])
            return tree

        def observe(self, accepted: Accepted) -> None:
            super().observe(accepted)
            if accepted.logits is not None:
                self.check()

        def check(self) -> None:
            (texts, tree), levels = self.seen[-1], levels_seen[-1]
            tops, row = self.inner.tops, self.inner.rows[0]
            assert row.levels[:-1] == levels[1:]
            for column, top in enumerate(tops):
                path, node = [], top
                while node:
                    path.append(int(tree.tokens[0, node]))
                    node = int(tree.parents[0, node])
                path = path[::-1]
                # level 0 up to the column, then down the column
                assert path == levels[0][: column + 1] + [level[column] for level in levels[1:]]
                out = llama.forward(chain(torch.tensor([texts[0] + path])), llama.cache(1, 200))
                assert row.levels[-1][column] == int(out.logits[0, -1].argmax())
                gram = (levels[0][column], *(level[column] for level in levels[1:]), row.levels[-1][column])
                assert gram[1:] in row.pool.of(gram[0])

    with torch.inference_mode():
        speculative(llama, [[5, 9, 2, 7, 7, 1]], Options(12), Spy(made("lookahead", llama, window=3, ngram=4)), 20)
    assert len(levels_seen) > 3
    assert all(len(levels) == 3 and {len(level) for level in levels} == {3} for levels in levels_seen)


def test_lookahead_needs_fewer_passes(llama):
    prompts = [[5, 9, 2, 7, 7, 1], [8, 1, 30, 4]]
    plain = autoregressive(llama, prompts, Options(150))
    fast = speculative(llama, prompts, Options(150), made("lookahead", llama), 24)
    assert fast.token_ids == plain.token_ids
    assert fast.stats.passes < 0.9 * plain.stats.passes


# -- hybrid trees


def test_equal_paths_merge():
    one = ([9, 1, 2], [-1, 0, 1], [1.0, 0.5, 0.25])
    other = ([9, 1, 3, 9], [-1, 0, 1, -1], [1.0, 0.5, 0.25, 0.0])  # its last node is spare
    ids, parents, chances = _Row().merge([one, other], 10)
    assert (ids, parents) == ([9, 1, 2, 3], [-1, 0, 1, 1])
    assert chances[1] == pytest.approx(0.75)  # one of the two is right
    assert chances[2] == chances[3] < 0.75 * 0.5  # each doubted by the other
    assert _Row().merge([one, other], 2) == ([9, 1], [-1, 0], chances[:2])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12))
def test_merged_trees_are_trees(seed, nodes):
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
    ids, parents, chances = _Row().merge(trees, nodes)
    DraftTree(torch.tensor([ids]), torch.tensor([parents]))
    assert len(ids) <= nodes
    assert parents.count(-1) == 1
    assert len(set(zip(parents, ids, strict=True))) == len(ids)
    for node in range(len(ids)):
        below = sum(c for c, p in zip(chances, parents, strict=True) if p == node)
        assert below <= chances[node] + 1e-9


def test_sources_are_ranked_by_what_they_were_worth():
    row = _Row()
    good = ([9, 1], [-1, 0], [1.0, 0.5])
    bad = ([9, 2], [-1, 0], [1.0, 0.6])
    assert row.merge([good, bad], 2)[0] == [9, 2]
    text = [0, 9]
    for _ in range(12):  # the first source is always right
        row.merge([good, bad], 2)
        row.seen = len(text)
        text = [*text, 1]
        row.learn(text)
    assert row.merge([good, bad], 2)[0] == [9, 1]


class _Stub:
    """A member's session that always drafts the same and counts how often it is asked."""

    def __init__(self, tokens: list[int], scores: list[float]) -> None:
        self.asked, self.drawn = 0, (tokens, scores)

    def propose(self, context: Context) -> DraftTree:
        self.asked += 1
        tokens, scores = self.drawn
        tree = chain(torch.tensor([[int(context.roots[0]), *tokens]]))
        return DraftTree(tree.tokens, tree.parents, torch.tensor([[1.0, *scores]]))

    def observe(self, accepted: Accepted) -> None:
        pass


@pytest.mark.parametrize(("sure", "asked"), [(0.9, 2), (0.1, 5)])
def test_trained_members_rest_where_the_free_ones_promise_more(llama, sure, asked):
    free, trained = _Stub([1, 2], [sure, sure**2]), _Stub([3], [0.6])
    session = HybridSession([free], [trained], 1)
    for n in range(5):
        session.propose(context(llama, [4] * (n + 2)))
    assert free.asked == 5
    assert trained.asked == asked


def test_trained_members_rest_where_their_time_is_not_worth_it(llama):
    session = HybridSession([_Stub([1], [0.1])], [trained := _Stub([3], [0.6])], 1)
    for n in range(5):
        session.propose(context(llama, [4] * (n + 2), rate=1e9))
    assert trained.asked == 2  # the first time does not tell the price: the prompt may be read in it
    for n in range(5, 20):
        session.propose(context(llama, [4] * (n + 2), rate=1e9))
    assert trained.asked == 3  # tried again


def test_a_member_that_has_nothing_to_read_yet_is_not_judged(llama):
    session = HybridSession([_Stub([1], [0.1])], [trained := _Stub([], [])], 1)
    session.propose(context(llama, [4]))
    trained.drawn = ([3], [0.6])
    for n in range(4):
        session.propose(context(llama, [4] * (n + 2)))
    assert trained.asked == 5


def test_a_members_tree_without_scores_is_named(llama):
    class Silent(_Stub):
        def propose(self, context: Context) -> DraftTree:
            return chain(torch.tensor([[int(context.roots[0]), 3]]))

    with pytest.raises(ValueError, match="a tree without scores, by which trees are mixed; give it scores"):
        HybridSession([Silent([], [])], [], 1).propose(context(llama, [4, 4]))


def test_hybrids_that_can_not_be_are_refused(llama, heads_folder):
    early = random_drafter("early_exit", llama, rank=2)
    hybrid = Hybrid(llama, {"prompt_lookup": made("prompt_lookup", llama)})
    for kind, member in (("lookahead", made("lookahead", llama)), ("early_exit", early.eval()), ("hybrid", hybrid)):
        with pytest.raises(ValueError, match=rf"drafter 'x' \({kind}\) can not share a tree"):
            Hybrid(llama, {"prompt_lookup": made("prompt_lookup", llama), "x": member})
    for name, message in [
        ("prompt_lookup+prompt_lookup", "names a drafter twice"),
        ("prompt_lookup+lookahead", r"'lookahead' \(lookahead\) can not share a tree"),
        ("prompt_lookup+hybrid", r"join the names of its members by \+"),
        ("prompt_lookup+medusa", "selfspec train drafter=medusa"),
        (f"prompt_lookup+{heads_folder}", "was made for target"),
        ("prompt_lookup+", r"names no drafter on one side of a \+"),
    ]:
        refused(message, find_drafter, name, llama)
    refused("no drafter at 'runs/nothing'", find_drafter, "prompt_lookup+runs/nothing", llama, error=FileNotFoundError)


# -- by name


def test_drafters_load_without_a_checkpoint(heads_folder, tiny_folder):
    plain = selfspec.load(str(heads_folder)).autoregressive([[5, 9, 2, 5, 9, 2]], 20)
    for drafter, kind in [
        ("prompt_lookup", "prompt_lookup"),
        ("lookahead", "lookahead"),
        (f"{heads_folder}+prompt_lookup", "hybrid"),
        (heads_folder, "medusa"),
    ]:
        spec = selfspec.load(drafter, target=tiny_folder)
        assert spec.drafter.kind == kind
        assert spec.generate([[5, 9, 2, 5, 9, 2]], 20).token_ids == plain.token_ids
    assert selfspec.load(f"prompt_lookup+{heads_folder}").drafter.kind == "hybrid"  # the target that the heads name
    for drafter, message in [
        ("prompt_lookup", "names no target; give one"),
        ("", "must be an embedded name"),
        ("medusa", "selfspec train drafter=medusa"),
        ("hybrid", "nothing by itself"),
        (7, "must be an embedded name"),
        (["prompt_lookup"], "must be an embedded name"),
    ]:
        refused(message, selfspec.load, drafter)
    refused("no drafter at", selfspec.load, "runs/prompt_lookups", error=FileNotFoundError)


_TARGET = Target(tiny_model())
assert _TARGET.vocab_size == VOCAB
