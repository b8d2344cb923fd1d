"""The one claim: speculative output equals plain decoding, token for token, whatever is drafted."""

import pytest
import torch
from conftest import VOCAB, RandomTrees, stock

from selfspec.core.contract import Context
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.rows import moved_up
from selfspec.core.sampling import Sampling
from selfspec.core.tree import DraftTree

pytestmark = pytest.mark.filterwarnings("error::FutureWarning")  # of transformers: what it drops next

PROMPTS = [[5, 9, 2, 7, 7, 1], [3], [8, 1, 30, 4, 17, 22, 9, 40, 2, 11, 12], [60, 59]]


def sampling(temperature: float) -> Sampling:
    return Sampling(temperature, top_k=40, top_p=0.95, min_p=0.001) if temperature == 0.7 else Sampling(temperature)


@pytest.mark.parametrize("nodes", [1, 2, 9, 24])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["batch1", "batch4"])
def test_equals_the_oracle(target, prompts, temperature, nodes):
    options = Options(40, sampling(temperature), seed=3)
    plain = autoregressive(target, prompts, options)
    assert [len(t) for t in plain.token_ids] == [40] * len(prompts)
    drafter = RandomTrees([p + t for p, t in zip(prompts, plain.token_ids, strict=True)], nodes)
    fast = speculative(target, prompts, options, drafter, nodes)
    assert fast.token_ids == plain.token_ids
    assert fast.stats.tokens == plain.stats.tokens == sum(map(len, fast.token_ids))
    assert fast.stats.passes == plain.stats.passes if nodes == 1 else fast.stats.passes < plain.stats.passes


def test_a_prompt_of_one_token_is_that_of_transformers(target):  # longer ones: tests/test_families.py
    assert autoregressive(target, [[3]], Options(40)).token_ids[0] == stock(target.model, [3], 40)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_is_its_rows(target, temperature):
    """Ragged prompts, rows that end early: every row equals itself alone, given its own seed."""
    seeds = [11, 12, 13, 14]
    alone = [
        autoregressive(target, [prompt], Options(30, Sampling(temperature), [seed])).token_ids[0]
        for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    eos = frozenset({alone[0][4], alone[3][11]})
    cut = [row[: next((i + 1 for i, t in enumerate(row) if t in eos), len(row))] for row in alone]
    assert len({len(row) for row in cut}) > 1
    options = Options(30, Sampling(temperature), seeds, eos)
    drafter = RandomTrees([p + t for p, t in zip(PROMPTS, alone, strict=True)])
    fast = speculative(target, PROMPTS, options, drafter, 8)
    assert fast.token_ids == autoregressive(target, PROMPTS, options).token_ids == cut
    assert fast.stats.tokens == sum(map(len, cut))


def test_a_rows_sequence_id_is_its_index(llama):
    same = [PROMPTS[0]] * 3
    rows = autoregressive(llama, same, Options(20, Sampling(1.0), 7)).token_ids
    assert rows[0] == autoregressive(llama, same[:1], Options(20, Sampling(1.0), 7)).token_ids[0]
    assert len({tuple(row) for row in rows}) == 3


def test_generates_up_to_the_last_position(target):
    assert target.max_positions == 256
    prompt = [(7 * i) % VOCAB for i in range(240)]
    plain = autoregressive(target, [prompt, PROMPTS[0]], Options(30))
    assert [len(row) for row in plain.token_ids] == [16, 30]
    drafter = RandomTrees([prompt + plain.token_ids[0], PROMPTS[0] + plain.token_ids[1]])
    assert speculative(target, [prompt, PROMPTS[0]], Options(30), drafter, 12).token_ids == plain.token_ids


def test_long_prompts_are_read_in_parts(target, monkeypatch):
    prompts = [[(5 * i) % VOCAB for i in range(n)] for n in (50, 9, 33)]
    whole = autoregressive(target, prompts, Options(10)).token_ids
    monkeypatch.setattr("selfspec.core.rows.PREFILL", 8)
    assert autoregressive(target, prompts, Options(10)).token_ids == whole


def test_statistics_count_what_was_returned(llama):
    plain = autoregressive(llama, [PROMPTS[0]], Options(21))

    class Right(RandomTrees):
        def propose(self, context: Context) -> DraftTree:
            at = len(context.tokens[0])
            full = (self.oracle[0] + [0, 0, 0])[at - 1 : at + 3]
            return DraftTree(torch.tensor([full]), torch.tensor([[-1, 0, 1, 2]]))

    fast = speculative(llama, [PROMPTS[0]], Options(21), Right([PROMPTS[0] + plain.token_ids[0]]), 4)
    assert fast.token_ids == plain.token_ids
    stats = fast.stats
    assert (stats.passes, stats.tokens) == (6, 21)  # five passes of four tokens, one of one
    assert stats.acceptance_length == 21 / 6
    assert stats.accepted[:1] == [6] or stats.accepted[:1] == [5]
    assert stats.accepted[1:] == [5, 5]
    assert stats.seconds >= stats.seconds_target > 0
    assert fast.from_draft[0][:4] == [True, True, True, False]


@pytest.mark.parametrize(
    ("going", "order"), [([0, 1, 2], [0, 1, 2]), ([1, 3], [3, 1]), ([2, 4, 5], [4, 5, 2]), ([], [])]
)
def test_the_last_rows_take_the_places_of_rows_that_ended(going, order):
    assert sorted(moved_up(going)) == going
    assert moved_up(going) == order
