import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.core.cache import KVCache
from selfspec.core.masks import tree_masks
from selfspec.core.memory import zeros
from selfspec.core.pass_cache import pass_cache
from selfspec.core.tree import DraftTree
from selfspec.engine.engine import Engine

LAYERS, HEADS = 2, 2


def random_tree(rows: int, nodes: int, generator: torch.Generator) -> DraftTree:
    parents = torch.stack(
        [torch.randint(-1, max(1, n), (rows,), generator=generator).clamp(max=n - 1) for n in range(nodes)], 1
    )
    parents[:, 0] = -1
    return DraftTree(torch.zeros_like(parents), parents)


def cache_of(rows: int) -> KVCache:
    like = [(torch.zeros(1, HEADS, 1, 3), torch.zeros(1, HEADS, 1, 5)) for _ in range(LAYERS)]
    return KVCache(like, rows, 4, 4, Engine(), torch.device("cpu"))


@given(st.integers(1, 3), st.integers(0, 10_000), st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_behaves_like_one_list_per_row(rows, seed, passes):
    """Any sequence of passes, commits, growth and departures leaves what a list of committed entries would hold."""
    g = torch.Generator().manual_seed(seed)
    cache, kept, alive = cache_of(rows), [[] for _ in range(rows)], rows
    for _ in range(passes):
        nodes = int(torch.randint(1, 17, (1,), generator=g))
        kv = cache.view(0, LAYERS, nodes)
        new = [
            (torch.rand(alive, HEADS, nodes, 3, generator=g), torch.rand(alive, HEADS, nodes, 5, generator=g))
            for _ in range(LAYERS)
        ]
        layers = pass_cache(kv, kv.lengths[:, None] + torch.arange(nodes), None, None)
        seen = [layers.update(k, v, layer) for layer, (k, v) in enumerate(new)]
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
        cache.commit(paths)
        for row, path in enumerate(paths):
            kept[row] += [[(k[row, :, n], v[row, :, n]) for k, v in new] for n in path]
        assert cache.lengths == [len(k) for k in kept]
        if alive > 1 and torch.rand(1, generator=g) < 0.3:
            going = sorted(torch.randperm(alive, generator=g)[: alive - 1].tolist())
            cache.select(going)
            kept, alive = [kept[i] for i in going], alive - 1


@pytest.mark.parametrize("going", [[0, 1, 3], [1, 2, 3], [0, 2], [3], [0, 1, 2], [3, 1], [0, 3, 2]])
def test_rows_of_compiled_sizes_leave(going):
    """Buffers stay in place: smaller ones are the first rows of the present ones."""
    like = [(torch.zeros(1, HEADS, 1, 3), torch.zeros(1, HEADS, 1, 5))]
    cache = KVCache(like, 4, 4, 4, Engine("inductor"), torch.device("cpu"))
    cache.view(0, 1, 2)
    for store in range(2):
        cache.stores[store].copy_(torch.rand(cache.stores[store].shape))
    cache.lengths = [3, 4, 2, 3]
    before = [cache.stores[store].clone() for store in range(2)]
    cache.select(going)
    assert cache.rows == {1: 1, 2: 2, 3: 4}[len(going)]
    assert cache.lengths == [[3, 4, 2, 3][row] for row in going]
    for store, old in enumerate(before):
        for row, (place, length) in enumerate(zip(going, cache.lengths, strict=True)):
            assert torch.equal(cache.stores[store][:, row, :, :length], old[:, place, :, :length])


@given(st.integers(1, 3), st.integers(0, 10_000), st.sampled_from([None, 1, 3, 7]), st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_mask_is_the_definition(rows, seed, window, ran):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 8, (rows,), generator=g)
    tree, size = random_tree(rows, 5, g), 16
    given = tree.mask, lengths, ran, size, [window], torch.float32
    depths, (mask,) = tree_masks(*given)
    assert torch.equal(depths, tree.depth[:, ran:])
    assert mask.shape == (rows, 1, 5 - ran, size)
    for row, length in enumerate(lengths.tolist()):
        for node in range(ran, 5):
            here = length + int(tree.depth[row, node])
            for slot in range(size):
                other = slot - length
                if other < 0:
                    allowed, position = True, slot
                else:
                    allowed = other < 5 and bool(tree.mask[row, node, min(other, 4)])
                    position = length + int(tree.depth[row, min(other, 4)])
                allowed = allowed and (window is None or here - position < window)
                assert (mask[row, 0, node - ran, slot] == 0) == allowed, (row, node, slot)


def test_memory_that_is_taken_when_it_is_written_to_is_zero():
    room = zeros((2, 3, 4), torch.bfloat16, torch.device("cpu"))
    assert room.shape == (2, 3, 4)
    assert not room.any()
    room[1, 2] = 5
    assert float(room.sum()) == 20
    assert zeros((0, 3), torch.float32, torch.device("cpu")).numel() == 0
