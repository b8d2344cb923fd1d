import itertools

import pytest
import torch
from conftest import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.core.tree import DraftTree, depths_of
from selfspec.drafters.parts.static_tree import static_tree


@st.composite
def parent_rows(draw: st.DrawFn) -> list[list[int]]:
    nodes = draw(st.integers(1, 12))
    row = st.tuples(st.just(-1), *(st.integers(-1, n - 1) for n in range(1, nodes)))
    return [list(draw(row)) for _ in range(draw(st.integers(1, 3)))]


def ancestors(parents: list[int], node: int) -> set[int]:
    return {node} if parents[node] < 0 else {node} | ancestors(parents, parents[node])


@given(parent_rows())
@settings(max_examples=60, deadline=None)
def test_mask_depth_and_children_follow_from_parents(rows):
    parents = torch.tensor(rows)
    tree = DraftTree(torch.zeros_like(parents), parents)
    for b, row in enumerate(rows):
        for node in range(len(row)):
            above = ancestors(row, node)
            assert set(tree.mask[b, node].nonzero().flatten().tolist()) == above
            assert tree.depth[b, node] == len(above) - 1
            assert tree.children[b][node] == [c for c in range(len(row)) if row[c] == node]


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1, 0, 3], [-1, -2]])
def test_parents_must_precede_their_children(parents):
    refused(r"must precede.*row 0", DraftTree, torch.zeros(1, len(parents), dtype=torch.long), torch.tensor([parents]))


def test_shapes_must_agree():
    refused(r"\[1, 2\], \[1, 3\]", DraftTree, torch.zeros(1, 2, dtype=torch.long), torch.full((1, 3), -1))


def test_prints_itself_with_tokens_and_scores():
    parents = torch.tensor([[-1, 0, 0, 1]])
    tree = DraftTree(torch.tensor([[7, 8, 9, 10]]), parents, torch.tensor([[1.0, 0.5, 0.25, 0.125]]))
    assert str(tree) == "[0] 7\n  [1] 8  0.500\n    [3] 10  0.125\n  [2] 9  0.250"


@given(st.lists(st.lists(st.floats(0.01, 0.5), min_size=1, max_size=3), min_size=1, max_size=3), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_grow_finds_the_best_tree(table, nodes):
    parents, ranks, chance = static_tree(table, nodes)
    assert parents[0] == -1
    assert all(p < n for n, p in enumerate(parents))
    assert len(parents) <= nodes
    depths = depths_of(parents)
    for node in range(1, len(parents)):
        assert chance[node] == pytest.approx(chance[parents[node]] * table[depths[node] - 1][ranks[node]])
    paths: list[float] = [1.0]
    for depth in range(1, len(table) + 1):
        for choice in itertools.product(*(range(len(row)) for row in table[:depth])):
            value = 1.0
            for d, r in enumerate(choice):
                value *= table[d][r]
            paths.append(value)
    best = sum(sorted(paths, reverse=True)[:nodes])
    assert sum(chance) == pytest.approx(best)
    assert len(set(zip(parents, ranks, strict=True))) == len(parents)
