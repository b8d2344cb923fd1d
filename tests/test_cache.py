from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.core.cache import TreeCache
from selfspec.core.tree import DraftTree

LAYERS, HEADS = 2, 2


def random_tree(rows: int, nodes: int, generator: torch.Generator) -> DraftTree:
    parents = torch.stack(
        [torch.randint(-1, max(1, n), (rows,), generator=generator).clamp(max=n - 1) for n in range(nodes)], 1
    )
    parents[:, 0] = -1
    return DraftTree(torch.zeros_like(parents), parents)


@given(st.integers(1, 3), st.integers(0, 10_000), st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_behaves_like_one_list_per_row(rows: int, seed: int, passes: int) -> None:
    """Any sequence of appends, keeps, growth and departures leaves what a list of kept entries would hold."""
    g = torch.Generator().manual_seed(seed)
    cache, kept, alive = TreeCache(LAYERS, rows, 4, torch.float32), [[] for _ in range(rows)], rows
    for _ in range(passes):
        nodes = int(torch.randint(1, 7, (1,), generator=g))
        cache.begin(random_tree(alive, nodes, g))
        new = [
            (torch.rand(alive, HEADS, nodes, 3, generator=g), torch.rand(alive, HEADS, nodes, 5, generator=g))
            for _ in range(LAYERS)
        ]
        seen = [cache.update(k, v, layer) for layer, (k, v) in enumerate(new)]
        for row in range(alive):
            for layer, (keys, values) in enumerate(seen):
                for j, (k, v) in enumerate(entry[layer] for entry in kept[row]):
                    assert torch.equal(keys[row, :, j], k)
                    assert torch.equal(values[row, :, j], v)
                at = len(kept[row])
                assert torch.equal(keys[row, :, at : at + nodes], new[layer][0][row])
        paths = [
            torch.randperm(nodes, generator=g)[: int(torch.randint(0, nodes + 1, (1,), generator=g))] for _ in kept
        ]
        paths = [sorted(p.tolist()) for p in paths]
        if not any(paths):
            paths[0] = [0]
        cache.keep(paths)
        for row, path in enumerate(paths):
            kept[row] += [[(k[row, :, n], v[row, :, n]) for k, v in new] for n in path]
        assert cache.lengths == [len(k) for k in kept]
        if alive > 1 and torch.rand(1, generator=g) < 0.3:
            going = sorted(torch.randperm(alive, generator=g)[: alive - 1].tolist())
            cache.select(torch.tensor(going))
            kept, alive = [kept[i] for i in going], alive - 1


@given(st.integers(1, 3), st.integers(0, 10_000), st.sampled_from([None, 1, 3, 7]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_mask_is_the_definition(rows: int, seed: int, window: int | None, even: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 8, (rows,), generator=g).tolist()
    cache = TreeCache(1, rows, 64, torch.float32)
    cache.lengths = [lengths[0]] * rows if even else lengths
    tree = random_tree(rows, 5, g)
    cache.begin(tree)
    mask = cache.mask(tree, window)
    longest = max(cache.lengths)
    assert mask.shape[1:] == (1, 5, longest + 5)
    for row, length in enumerate(cache.lengths):
        for node in range(5):
            here = length + int(tree.depth[row, node])
            for slot in range(longest + 5):
                other = slot - length
                if other < 0:
                    allowed, position = True, slot
                else:
                    allowed = other < 5 and bool(tree.mask[row, node, other])
                    position = length + int(tree.depth[row, min(other, 4)])
                allowed = allowed and (window is None or here - position < window)
                assert (mask[row, 0, node, slot] == 0) == allowed, (row, node, slot)


def test_the_mask_of_a_new_tree_is_never_an_older_trees() -> None:
    cache = TreeCache(1, 1, 16, torch.float32)
    for parents in ([[-1, 0, 1]], [[-1, 0, 0]], [[-1, -1, 0]]):
        tree = DraftTree(torch.zeros(1, 3, dtype=torch.long), torch.tensor(parents))
        cache.begin(tree)
        assert torch.equal(cache.mask(tree)[0, 0] == 0, tree.mask[0])
