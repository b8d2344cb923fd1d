"""The rules that change the output: off by default, named, and their distance measured."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import VOCAB, RandomTrees, refused
from transformers import MaxLengthCriteria

import selfspec
from selfspec.core.contract import Context
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.lossy import Lossy
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.core.tree import DraftTree, chain
from selfspec.evaluation.arms import Prompt
from selfspec.evaluation.decode import DecodeConfig, run_benchmark, summarize
from selfspec.evaluation.measure import regime
from selfspec.evaluation.points import rows_of
from selfspec.evaluation.tables import table

LOGITS = torch.log(torch.tensor([[0.5, 0.3, 0.12, 0.06, 0.02]], dtype=torch.float64))


def test_typical_acceptance_is_its_formula():
    p = LOGITS[0].exp()
    threshold = min(0.09, 0.3 * math.exp(float((p * p.log()).sum())))
    rule = Lossy("typical")
    assert [rule.accepts(LOGITS[0], i) for i in range(5)] == [float(x) > threshold for x in p]
    assert 0 < sum(float(x) > threshold for x in p) < 5
    strict = Lossy("typical:0.4,1.0")
    assert [strict.accepts(LOGITS[0], i) for i in range(5)] == [True, True, False, False, False]
    assert not strict.accepts(LOGITS[0] / 0.5, 1)  # the temperature sharpens what counts as likely


def test_the_pick_stays_where_it_was_drafted_and_the_likeliest_stands_in_elsewhere():
    rule = Lossy("top_k:3")
    assert rule(LOGITS, [4], [[1, 4]]) == [4]
    assert rule(LOGITS, [0], [[2, 1]]) == [1]
    assert rule(LOGITS, [0], [[3, 4]]) == [0]
    assert rule(LOGITS, [0], [[]]) == [0]
    assert rule.altered == 1


@pytest.mark.parametrize(
    "name",
    ["none", "typical:0.3", "typical:0,1", "top_k", "top_k:0", "top_k:1.5", "typical:a,b", "top_k:inf", "typical:", 5],
)
def test_unknown_rules_are_named(name):
    refused("lossy=", Lossy, name)


def test_off_by_default_and_named_in_the_result(heads_folder):
    spec = selfspec.load(str(heads_folder))
    prompts = [[5, 9, 2], [8, 1, 30, 4]]
    exact = spec.generate(prompts, max_new_tokens=40, nodes=12)
    assert exact.lossy is None
    assert exact.token_ids == spec.autoregressive(prompts, max_new_tokens=40, lossy="top_k:30").token_ids
    loose = spec.generate(prompts, max_new_tokens=40, nodes=12, lossy="top_k:30")
    assert (loose.lossy.name, loose.lossy.altered > 0) == ("top_k:30", True)
    assert loose.stats.exact == "no: by a lossy rule"
    assert loose.token_ids != exact.token_ids
    assert loose.stats.passes < exact.stats.passes


def test_altered_tokens_bound_the_distance_from_the_exact_distribution(llama):
    """The two rules share their noise, so the first token's distributions lie at most the altered share apart."""
    prompt, samples = [5, 9, 2, 7], 1500
    seeds = list(range(samples))
    rule = Lossy("typical:0.05,1.0")
    options = Options(1, Sampling(1.0, top_k=8), seeds)
    plain = autoregressive(llama, [prompt] * samples, options).token_ids
    drafter = RandomTrees([[*prompt, 31, 31, 31]])
    relaxed = Options(1, Sampling(1.0, top_k=8), seeds, relaxed=rule)
    loose = speculative(llama, [prompt] * samples, relaxed, drafter, 6).token_ids
    rates = [torch.bincount(torch.tensor(t).flatten(), minlength=VOCAB) / samples for t in (plain, loose)]
    distance = float((rates[0] - rates[1]).abs().sum() / 2)
    different = sum(a != b for a, b in zip(plain, loose, strict=True)) / samples
    assert 0 < different <= rule.altered / samples
    assert distance <= different + 1e-9


def test_what_is_not_emitted_is_not_altered(llama):
    class Same(RandomTrees):
        def propose(self, context: Context) -> DraftTree:
            return chain(torch.cat([context.roots[:, None], torch.full((1, 6), 31)], 1))

    for ends in (Options(3), Options(9, stops=[MaxLengthCriteria(4 + 3)])):
        rule = Lossy("top_k:61")  # takes whatever is drafted
        result = speculative(llama, [[5, 9, 2, 7]], replace(ends, relaxed=rule), Same([]), 7)
        assert result.token_ids == [[31] * 3]
        assert rule.altered == 3


def test_the_benchmark_names_and_measures_it(heads_folder):
    spec = selfspec.load(str(heads_folder))
    prompts = [[5, 9, 2], [8, 1, 30, 4]]
    config = DecodeConfig(max_new_tokens=12, repeats=1, temperature=1.0, lossy="top_k:40")
    records = run_benchmark(spec, [Prompt(ids, seed) for seed, ids in enumerate(prompts)], config, 8)
    point = {"label": "x", "config": {"tree": {"nodes": 8}, "decode": {"lossy": "top_k:40"}}, **summarize(records)}
    assert 0 < point["lossy"]["altered"] < 1
    assert "LOSSY top_k:40" in table(rows_of([point]))
    exact = next(r for r in records if r.arm == "autoregressive")
    scores = torch.log_softmax(spec.target.model(torch.tensor([[*prompts[0], *exact.token_ids[0]]])).logits[0], -1)
    wanted = sum(float(scores[2 + i, t]) for i, t in enumerate(exact.token_ids[0]))
    found = regime(spec, [Prompt(prompts[0])], exact.token_ids, Sampling(1.0))
    assert found.log_prob == pytest.approx(wanted, rel=1e-4)
    refused("lossy=", DecodeConfig, lossy="a bit")


def test_what_is_forbidden_stays_forbidden(heads_folder):
    spec = selfspec.load(str(heads_folder))
    ids = torch.tensor([[5, 9, 2, 7]])
    settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    settings |= {"attention_mask": torch.ones_like(ids), "custom_generate": spec, "nodes": 16, "lossy": "top_k:1000"}
    free = spec.target.model.generate(ids, **settings)[0, 4:].tolist()
    banned = sorted(set(free))[: len(set(free)) // 2]
    made = spec.target.model.generate(ids, bad_words_ids=[[token] for token in banned], **settings)[0, 4:].tolist()
    assert not set(made) & set(banned)
    assert spec.target.model.generate(ids, return_dict_in_generate=True, **settings).lossy.altered > 0
    rule = Lossy("top_k:5")
    forbidden = LOGITS.clone()
    forbidden[0, 1] = -torch.inf
    assert rule(forbidden, [0], [[1]]) == [0]
