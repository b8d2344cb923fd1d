"""The one claim: speculative output equals plain decoding, token for token, whatever is drafted."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB, tiny_model
from transformers import MistralConfig, MistralForCausalLM

from selfspec.generate import Accepted, Context, Options, autoregressive, speculative
from selfspec.sampling import Sampling
from selfspec.target import Target
from selfspec.tree import DraftTree

PROMPTS = [[5, 9, 2, 7, 7, 1], [3], [8, 1, 30, 4, 17, 22, 9, 40, 2, 11, 12], [60, 59]]


class RandomTrees:
    """Drafts arbitrary trees, another one each pass and row, of half the time right tokens; spare nodes included."""

    def __init__(self, oracle: list[list[int]], seed: int = 0) -> None:
        self.oracle, self.generator = oracle, torch.Generator().manual_seed(seed)

    def propose(self, context: Context) -> DraftTree:
        tokens, parents = [], []
        for root, row in zip(context.roots.tolist(), context.tokens, strict=True):
            full = next(o for o in self.oracle if o[: len(row)] == row)
            drafted, above, depth = [root], [-1], [0]
            for node in range(1, context.nodes):
                parent = int(torch.randint(-1, node, (1,), generator=self.generator))
                at = len(row) + (depth[parent] if parent >= 0 else 0)
                right = parent >= 0 and at < len(full) and torch.rand(1, generator=self.generator) < 0.7
                drafted.append(full[at] if right else int(torch.randint(VOCAB, (1,), generator=self.generator)))
                above.append(parent)
                depth.append(depth[parent] + 1 if parent >= 0 else 0)
            tokens.append(drafted)
            parents.append(above)
        return DraftTree(torch.tensor(tokens), torch.tensor(parents))

    def observe(self, accepted: Accepted) -> None:
        pass


def sampling(temperature: float) -> Sampling:
    return Sampling(temperature, top_k=40, top_p=0.95, min_p=0.001) if temperature == 0.7 else Sampling(temperature)


@pytest.mark.parametrize("nodes", [1, 2, 9, 24])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["batch1", "batch4"])
def test_equals_the_oracle(target: Target, prompts: list[list[int]], temperature: float, nodes: int) -> None:
    options = Options(40, sampling(temperature), seed=3)
    plain = autoregressive(target, prompts, options)
    drafter = RandomTrees([p + t for p, t in zip(prompts, plain.token_ids, strict=True)], nodes)
    fast = speculative(target, prompts, options, drafter, nodes)
    assert fast.token_ids == plain.token_ids
    assert fast.stats.tokens == plain.stats.tokens == sum(map(len, fast.token_ids))
    assert fast.stats.passes == plain.stats.passes if nodes == 1 else fast.stats.passes < plain.stats.passes


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_greedy_equals_transformers(target: Target, attention: str) -> None:
    target.model.set_attn_implementation(attention)
    try:
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            reference = target.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, eos_token_id=None
            )[0, len(prompt) :].tolist()
            assert autoregressive(target, [prompt], Options(40)).token_ids[0] == reference
            drafter = RandomTrees([prompt + reference])
            assert speculative(target, [prompt], Options(40), drafter, 12).token_ids[0] == reference
    finally:
        target.model.set_attn_implementation("sdpa")
