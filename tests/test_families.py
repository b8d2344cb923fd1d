"""Every family of the table: lossless at T=0 and T=1 against the oracle, and at T=0 against transformers' generate."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RandomTrees, made, refused, stock, trains
from families import EAGER_ONLY, FAMILIES, build, listing

import selfspec.core.passes as target_file
from selfspec.checkpoints.weights_hash import weights_hash
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.probe import probe
from selfspec.core.sampling import Sampling
from selfspec.core.target import Target

PROMPTS = [[5, 9, 2, 7, 7, 1, 12, 40, 8], [8, 1, 30, 4, 17]]
NEW = 16


SDPA = [name for name, (kind, _) in FAMILIES.items() if kind not in EAGER_ONLY]
# One of each way in which a layer is called and keeps its states
FORMS = ("Llama", "GPT-2", "Falcon", "Gemma 2", "gpt-oss", "DeepSeek-V3", "Qwen3-MoE", "Qwen3.5", "Falcon-H1", "LFM2")
FORMS = (*FORMS, "Jamba", "Mamba2", "Nemotron-H", "Zamba2")


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, "sdpa") for name in SDPA),  # masks are made once for both ways
        *(pytest.param(name, "eager", marks=[pytest.mark.slow] * (name in SDPA)) for name in FAMILIES),
    ],
)
def test_family_is_lossless(name, attention):
    target = Target(build(name, attention))
    probe(target)
    for temperature in (0.0, 1.0):
        options = Options(NEW, Sampling(temperature), seed=3)
        plain = autoregressive(target, PROMPTS, options)
        drafter = RandomTrees([p + t for p, t in zip(PROMPTS, plain.token_ids, strict=True)])
        fast = speculative(target, PROMPTS, options, drafter, 10)
        assert fast.token_ids == plain.token_ids
        assert fast.stats.passes < plain.stats.passes
        if temperature == 0:
            assert len({tuple(row) for row in plain.token_ids}) == 2
            for prompt, tokens in zip(PROMPTS, plain.token_ids, strict=True):
                assert tokens == stock(target.model, prompt, NEW)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (not n.startswith(FORMS))) for n in FAMILIES]
)
def test_drafters_with_views_of_layers_serve_the_family(name):
    """Early exit, sequential heads and feature head on every family: a loss with gradients, and the oracle's tokens."""
    target = Target(build(name))
    before = weights_hash(target.model)
    options = Options(12, Sampling(1.0), seed=3)
    plain = autoregressive(target, PROMPTS, options).token_ids
    for drafter in (
        made("early_exit", target, exit=1, rank=2, min_prob=0.0),
        made("sequential", target, heads=2, rank=2),
        made("feature", target, train="lora", rank=2, depth=3, unroll=2, min_prob=0.0),
    ):
        assert speculative(target, PROMPTS, options, trains(drafter, target), 8).token_ids == plain
    assert weights_hash(target.model) == before


def test_the_probe_refuses_a_model_that_ignores_the_tree(monkeypatch):
    target = Target(build("Llama"))
    probe(target)
    with monkeypatch.context() as patch:
        right = target_file.tree_masks
        patch.setattr(target_file, "tree_masks", lambda *given: (right(*given)[0], [0 * right(*given)[1][0]]))
        refused("a pass over one gave other logits", probe, target)
    rotary = type(target.model.model.rotary_emb)
    kept = rotary.forward

    def by_slot(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return kept(self, x, torch.arange(position_ids.shape[1])[None] + position_ids[:, :1])

    monkeypatch.setattr(rotary, "forward", by_slot)
    refused("mask and positions", probe, target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["Llama", "Qwen3-MoE", "Gemma 2 (alternating windows, soft-capping)", "GPT-2"])
def test_rounding_does_not_alarm_the_probe(name, dtype):
    probe(Target(build(name, dtype=dtype)))


@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2"])
def test_attention_without_tree_masks_is_refused(attention):
    model = build("Llama")
    model.config._attn_implementation = attention
    refused(f"'{attention}', which takes no tree mask.*sdpa", Target, model)


def test_results_list_the_families_of_the_table():
    results = (Path(__file__).parents[1] / "docs" / "families.md").read_text()
    between = results.split("<!-- families -->")[1].split("<!-- end -->")[0]
    assert " ".join(between.split()) == " ".join(listing().split())
