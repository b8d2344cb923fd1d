"""Targets that no tree can run over: chains from the model's own cache."""

from typing import Any

import pytest
import torch
from conftest import RandomTrees, made, random_drafter, refused, stock
from families import build
from sweep import tiny

import selfspec
from selfspec.core.chains import ChainTarget
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.probe import served
from selfspec.core.sampling import Sampling
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree
from selfspec.drafters.hybrid import Hybrid
from selfspec.training.draft_loss import DraftLoss
from selfspec.training.synthetic import Synthetic, synthetic

PROMPTS = [[5, 9, 2, 7, 7, 1, 12, 40, 8], [8, 1, 30, 4, 17]]


@pytest.mark.parametrize("sizes", [[124, 1, 124], [5, 127, 5], [5, 126, 2]])
def test_chains_end_at_the_last_position(sizes):
    target = served(tiny("gpt_neo"))
    assert target.max_positions == 128
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 60, (size,), generator=generator).tolist() for size in sizes]
    plain = autoregressive(target, prompts, Options(9)).token_ids
    trees = RandomTrees([p + t for p, t in zip(prompts, plain, strict=True)])
    for drafter in (made("prompt_lookup", target), trees):
        assert speculative(target, prompts, Options(9), drafter, 7).token_ids == plain


@pytest.mark.parametrize("kind", ["bloom", "gpt_neo", "deepseek_v32", "inkling_text", "llama4_text"])
def test_chains_give_plain_text(kind, capsys):
    target = served(tiny(kind))
    assert isinstance(target, ChainTarget)
    assert "served by chains alone" in capsys.readouterr().err
    heads = random_drafter("medusa", target, heads=3, rank=4)
    lookup = made("prompt_lookup", target)
    tokens, documents = torch.randint(1, 60, (2, 20)), torch.tensor([[0] * 20, [0] * 9 + [1] * 11])
    batch = {"tokens": tokens, "mask": torch.ones_like(tokens).bool(), "documents": documents}
    loss, _ = DraftLoss(heads.train(), target)(batch)
    loss.backward()
    assert all(p.grad is not None for p in heads.trained().values())
    drafters: list[Any] = [heads.eval(), lookup, Hybrid(target, {"medusa": heads, "prompt_lookup": lookup})]
    drafters.append(made("eagle3", target, depth=3, unroll=2, min_prob=0.0).eval())
    for temperature in (0.0, 1.0):
        options = Options(40, Sampling(temperature), seed=3)  # beyond the 32 of `chains.WAITING` and of inkling's reach
        plain = autoregressive(target, PROMPTS, options)
        for drafter in drafters:
            assert speculative(target, PROMPTS, options, drafter, 8).token_ids == plain.token_ids
        oracle = RandomTrees([p + t for p, t in zip(PROMPTS, plain.token_ids, strict=True)])
        fast = speculative(target, PROMPTS, options, oracle, 8)
        assert fast.token_ids == plain.token_ids
        assert fast.stats.passes < plain.stats.passes
        selects = "indexed_attention" in (getattr(target.model.config, "layer_types", None) or ())
        assert fast.stats.exact == ("up to rounding" if selects else "in every test")
        if temperature == 0 and kind == "bloom":
            for prompt, tokens in zip(PROMPTS, plain.token_ids, strict=True):
                assert stock(target.model, prompt, 40) == tokens


def test_the_likeliest_chain_of_a_tree_runs():
    target = served(tiny("bloom"))
    tree = DraftTree(
        torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]),
        torch.tensor([[-1, 0, 0, 2, 1], [-1, 0, -1, -1, -1]]),
        torch.tensor([[1.0, 0.3, 0.6, 0.5, 0.2], [1.0, 0.3, 0, 0, 0]]),
    )
    chain = target.shaped(tree)
    assert chain.tokens[0].tolist() == [1, 3, 4]
    assert chain.parents.tolist() == [[-1, 0, 1], [-1, 0, -1]]
    assert chain.tokens[1, :2].tolist() == [1, 2]


def test_what_chains_can_not_do_is_refused():
    target = served(tiny("bloom"))
    refused("inside its attention", made, "early_exit", target, exit=1, rank=2)
    with pytest.raises(ValueError, match="needs its whole tree"):
        speculative(target, PROMPTS, Options(4, Sampling(0.0)), made("lookahead", target), 8)
    refused("take engine=eager", target.use_engine, "compiled")
    refused("has no single stack of layers", made, "eagle3", served(tiny("bert")), depth=3)
    refused("nor are chains served", served, tiny("prophetnet"))


def test_loaded_by_name(tmp_path, tokenizer, capsys):
    model = tiny("bloom").float()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    spec = selfspec.load("prompt_lookup", target=str(tmp_path))
    assert "served by chains alone, not trees: BloomForCausalLM sets positions" in capsys.readouterr().err
    assert type(spec.target) is ChainTarget
    assert not isinstance(served(tiny("llama")), ChainTarget)
    assert isinstance(spec.target, Target)


def test_hybrids_with_attention_alone_are_trees():
    assert not isinstance(served(build("Granite 4 (hybrid)", layer_types=["attention", "attention"])), ChainTarget)


def test_rows_that_end_and_many_rejected_tokens():
    target = served(tiny("bloom"))
    ends = frozenset(range(0, 61, 9))
    alone = [autoregressive(target, [p], Options(60, Sampling(1.0), seed=[2], eos=ends)) for p in PROMPTS]
    heads = random_drafter("medusa", target, heads=3, rank=4)
    rows = speculative(target, PROMPTS, Options(60, Sampling(1.0), seed=[2] * 2, eos=ends), heads.eval(), 8)
    assert rows.token_ids == [one.token_ids[0] for one in alone]


def test_positions_are_those_of_stock_generate(capsys):
    """RoBERTa counts them by what is no padding, unless they are given: tokens like the padding, and texts up to the
    last position, are as transformers' generate has them."""
    target = served(tiny("roberta"))
    pad, limit = target.model.config.pad_token_id, target.max_positions
    for prompt in ([5, pad, 2, pad, 7], [3 + i % 50 for i in range(limit - 4)]):
        options = Options(24, Sampling(0.0))
        plain = autoregressive(target, [prompt], options).token_ids
        count = len(plain[0])
        assert count == min(24, limit - len(prompt))
        assert plain[0] == stock(target.model, prompt, count, pad)
        trees = RandomTrees([prompt + plain[0]])
        assert speculative(target, [prompt], options, trees, 7).token_ids == plain


def test_what_can_not_draft_for_chains_is_refused_by_name(capsys):
    block = made("block", target := served(tiny("bloom")), size=3, stack=1)
    plain = autoregressive(target, PROMPTS, Options(12)).token_ids
    assert speculative(target, PROMPTS, Options(12), block.eval(), 5).token_ids == plain
    for kind in ("mask", "early_exit", "feature", "sequential"):
        refused("it is served by chains, without drafters that run parts", made, kind, target)
    assert made("sequential", target, prefix=False)
    refused("data=synthetic writes text with draft trees, but BloomFor", synthetic, Synthetic(), target, None)
    target = served(tiny("modernbert-decoder"))
    with pytest.raises(ValueError, match=r"gives states of \d+ numbers, not of 32; trained drafters can not read them"):
        speculative(target, PROMPTS, Options(4), made("medusa", target, heads=2, rank=2).eval(), 5)
    target = served(tiny("deepseek_v4"))
    with pytest.raises(ValueError, match="instead of one state a token, which drafters that read layers can not take"):
        speculative(target, PROMPTS, Options(4), made("eagle3", target).eval(), 5)
