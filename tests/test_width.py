"""Passes of one width: library kernels give a token the same bits in drafted and in plain passes."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import VOCAB, RandomTrees, made, random_drafter, refused, tiny_model
from families import FAMILIES, build

import selfspec
from selfspec.core import width as module
from selfspec.core.generate import Result, autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.same_bits import same_bits
from selfspec.core.sampling import Sampling
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain
from selfspec.core.width import refusal
from selfspec.utils.exactness import EXACT, ROUNDED

PROMPTS = [[5, 9, 2, 7, 7, 1, 12, 40, 8] * 3, [8, 1, 30, 4, 17], [3] * 20]


@pytest.fixture(autouse=True)
def library(monkeypatch) -> None:
    """No kernels of our own, as on other processors and on GPUs."""
    monkeypatch.setattr("selfspec.engine.kernels.redirect.served", lambda: False)


def of_width(model: Any, width: int | None) -> Target:
    target = Target(model)
    target.use_width(width)
    return target


def odd(plain: Result, fast: Result) -> int:
    """Tokens whose logits differ in a bit."""
    pairs = [pair for row in zip(plain.records, fast.records, strict=True) for pair in zip(*row, strict=False)]
    assert len(pairs) > 35
    return sum(not torch.equal(one[0], other[0]) for one, other in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_logits_have_the_bits_of_plain_passes(dtype):
    """Heads of 128 numbers, sums of which fall into other groups where siblings stand between a path's keys; rows that
    end at different times."""
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
    model = tiny_model(dtype=dtype, **sizes)
    different = []
    for width in (None, 16):
        target, options = of_width(model, width), Options(40, Sampling(1.0), 3, frozenset({11}), record=True)
        plain = autoregressive(target, PROMPTS, options)
        drafter = RandomTrees([a + b for a, b in zip(PROMPTS, plain.token_ids, strict=True)])
        fast = speculative(target, PROMPTS, options, drafter, 12)
        assert len({len(row) for row in plain.token_ids}) == 3
        assert fast.stats.passes < plain.stats.passes
        different.append(odd(plain, fast))
        assert (fast.token_ids == plain.token_ids) or width is None
        assert (fast.stats.exact == plain.stats.exact == EXACT) == (width is not None)
    assert different[0] > 0 or dtype != torch.float32
    assert different[1] == 0


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_attention_by_paths_is_the_attention_of_the_model(family):
    """In float64, windows included, behind texts shorter and longer than the width."""
    model, g = tiny_model(family), torch.Generator().manual_seed(0)
    parents = torch.tensor([[-1, 0, 0, 1, 1, 3, 5, 0], [-1, 0, 1, 2, 3, 4, -1, 6]])
    tree = DraftTree(torch.randint(VOCAB, (2, 8), generator=g), parents)
    found = []
    for width in (None, 8):
        target = of_width(model, width)
        cache = target.cache(2, 64, 64)
        target.forward(chain(torch.randint(VOCAB, (2, 21), generator=g.manual_seed(1))), cache, False, prompt=True)
        cache.commit([[*range(3)], [*range(21)]])
        for _ in range(2):
            found.append(target.forward(tree, cache).logits)
            cache.commit([[0, 1, 3], [0, 1, 2, 3]])
    for one, other in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(one, other)


def test_products_of_float16_stay_finite():
    """As in sdpa, scores are scaled before they are rounded."""
    query, key, value = (torch.full((1, 2, 4, 128), 30.0).half() for _ in range(3))
    mask, each = torch.zeros(1, 1, 4, 4).half(), torch.arange(4)
    paths = module.Paths.of((each[:, None] >= each)[None], each[None], torch.tensor([0]), 4)
    layer = torch.nn.Module()
    found, _ = module.by_paths(layer, query, key, value, mask, tree_paths=paths)
    assert found.isfinite().all()


def test_what_changes_the_model_is_tried_again():
    """A hook that mixes rows was not there when the model was tried."""
    target, options = of_width(tiny_model(dtype=torch.float32), 8), Options(4)
    assert autoregressive(target, PROMPTS[1:2], options).stats.exact == EXACT
    target.layers[0].register_forward_hook(lambda m, a, out: out + out.mean(1, keepdim=True))
    assert autoregressive(target, PROMPTS[1:2], options).stats.exact != EXACT


def test_keys_in_another_order_are_noticed(monkeypatch):
    """What is said to be exact was tried: here siblings stand between a path's keys again."""
    model = tiny_model(dtype=torch.float32, hidden_size=256, num_attention_heads=2, num_key_value_heads=1, head_dim=128)
    assert same_bits(of_width(model, 16), 1, 256)
    sdpa = module.sdpa_attention_forward
    monkeypatch.setattr(module, "by_paths", lambda *given, tree_paths=None, **more: sdpa(*given, **more))
    target = of_width(model, 16)
    assert not same_bits(target, 1, 256)
    assert speculative(target, PROMPTS[:1], Options(4), None).stats.exact != EXACT


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_same_bits_or_is_refused(family):
    target, alike = Target(build(family, dtype=torch.bfloat16)), False
    if why := refusal(target.model, target.decoder, target.recurrent):
        refused(f"width=16: .*{re.escape(why)}", target.use_width, 16)
    else:
        target.use_width(16)
        alike = all(same_bits(target, rows, 256) for rows in (1, 3))
    assert alike == (not why)


def test_what_runs_beside_the_passes_is_not_by_construction():
    """Early exit runs the target's first layers over fewer nodes, mask slots run in a view of it."""
    target = of_width(tiny_model(dtype=torch.bfloat16), 16)
    exact = {}
    for kind, settings in {"early_exit": {"rank": 0}, "mask": {"masks": 2, "rank": 2}, "medusa": {}}.items():
        drafter, options = made(kind, target, **settings).eval(), Options(8)
        fast = speculative(target, PROMPTS[1:2], options, drafter, 8)
        assert fast.token_ids == autoregressive(target, PROMPTS[1:2], options).token_ids
        exact[kind] = fast.stats.exact
        assert ("by construction" in target.exactness) == (kind == "medusa"), target.exactness
        target.use_width(16)
    assert exact == {"early_exit": ROUNDED, "mask": ROUNDED, "medusa": EXACT}


def test_an_early_exit_runs_the_rows_that_are_left():
    """While passes run all of them."""
    target = of_width(tiny_model(), 16)
    drafter, ends = random_drafter("early_exit", target), Options(24, Sampling(1.0), 2)
    plain = autoregressive(target, [[3, 4, 5]] * 3, ends)
    options = replace(ends, eos=frozenset({plain.token_ids[0][5]}))
    plain = autoregressive(target, [[3, 4, 5]] * 3, options)
    assert len({*map(len, plain.token_ids)}) > 1
    assert speculative(target, [[3, 4, 5]] * 3, options, drafter, 8).token_ids == plain.token_ids


def test_what_a_width_does_not_serve(tiny_folder):
    for family, message in {
        "Mixtral": "picks experts",
        "Qwen3-Next": "layers that keep a state",
        "GPT-J": "attends by 'eager', not by sdpa",
    }.items():
        refused(f"width=8: .* {message}.*leave width out", of_width, build(family), 8)
    for width in (1, 257):
        refused(f"width={width} must lie between 2 and 256", of_width, tiny_model(), width)
    spec = selfspec.load("prompt_lookup", tiny_folder, width=8)
    assert spec.generate([PROMPTS[0]], 6).token_ids == spec.autoregressive([PROMPTS[0]], 6).token_ids
    refused("nodes=9: every pass runs width=8 nodes; give fewer, or a larger width", spec.generate, [[1]], nodes=9)
    refused("nodes='auto' sizes passes, which width=8 fixes; leave nodes out", spec.generate, [[1]], nodes="auto")
