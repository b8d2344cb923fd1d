"""nodes="auto": costs are measured once, trees are cut where nodes do not pay, and the output stays what it was."""

import itertools
import json
from typing import Any

import pytest
import torch
from conftest import made, randomize, refused

from selfspec.api import Spec
from selfspec.budget import cost, policy
from selfspec.budget.cost import LARGEST, SIZES, cost_file, implausible, pass_costs, saved_costs
from selfspec.budget.policy import _TRIAL, Auto, AutoSession, Experience, Forecast
from selfspec.core.contract import Accepted, Context
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree
from selfspec.drafters.base import Drafter

PROMPTS = [[5, 9, 2, 7, 7, 1], [3], [8, 1, 30, 4, 17, 22, 9, 40, 2, 11, 12], [60, 59]]
FREE = [1e-3] * (LARGEST + 1)  # nodes cost nothing
DEAR = [1e-3 * max(1, n) for n in range(LARGEST + 1)]  # every node costs a plain step


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cost, "_ROUNDS", 2)


def drafters(target: Target) -> list[Drafter]:
    torch.manual_seed(0)
    trained: list[Drafter] = [made("medusa", target, heads=3, rank=4), made("early_exit", target, rank=2)]
    for drafter in trained:
        randomize(drafter)
    return [*(d.eval() for d in trained), made("prompt_lookup", target), made("lookahead", target)]


def auto(drafter: Any, costs: list[float], limit: int = 30) -> tuple[Auto, Forecast, Experience]:
    past, forecast = Experience(), Forecast()
    return Auto(drafter, costs, past, forecast, limit), forecast, past


def session_of(drafter: Any, costs: list[float], target: Target, limit: int = 30) -> tuple[AutoSession, Forecast]:
    sized, forecast, _ = auto(drafter, costs, limit=limit)
    made_: Any = sized.session(target, 1)
    return made_, forecast


def test_costs_are_measured_once(llama, monkeypatch):
    monkeypatch.setattr(cost, "implausible", lambda _: "")  # whatever else runs beside the tests
    first = pass_costs(llama)
    assert len(first) == LARGEST + 1
    assert all(a <= b for a, b in itertools.pairwise(first[1:]))
    assert min(first) > 0
    other = pass_costs(llama, sampled=True)
    assert other != first
    monkeypatch.setattr(cost, "measure_costs", lambda *_: pytest.fail("measured twice"))
    assert pass_costs(llama) == first
    assert pass_costs(llama, sampled=True) == other


def test_damaged_costs_are_measured_again(llama, monkeypatch, capsys):
    steady = [1.0, 1.0, 1.1, 1.2, 1.4, 1.8, 2.6, 4.0]
    monkeypatch.setattr(cost, "measure_costs", lambda *_: steady)
    wanted = pass_costs(llama)
    path = cost_file(llama, 1)
    saved = json.loads(path.read_text())
    zero, endless = ({**saved["greedy"], "0": value} for value in (0, float("inf")))
    broken = [{**saved, "greedy": mode} for mode in ({"1": 2}, zero, endless)]
    for text in (path.read_text()[:50], "[]", *map(json.dumps, broken)):
        cost._measured.clear()
        path.write_text(text)
        assert saved_costs(llama) is None
        assert pass_costs(llama) == wanted
        assert "is damaged" in capsys.readouterr().err
        assert json.loads(path.read_text()) == saved
    cost._measured.clear()
    path.unlink()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cost, "write_text", full)
    assert pass_costs(llama) == wanted
    assert "costs are not kept for later runs: [Errno 28]" in capsys.readouterr().err
    assert saved_costs(llama) == wanted
    assert cost_file(llama, 1) != cost_file(llama, 4)
    before = cost_file(llama, 1)
    monkeypatch.setattr(llama.model.config, "_attn_implementation", "eager")
    assert cost_file(llama, 1) != before


def test_what_was_measured_on_a_busy_machine_is_not_kept(llama, monkeypatch, capsys):
    steady = [1.0, 1.0, 1.1, 1.2, 1.4, 1.8, 2.6, 4.0]
    assert not implausible(steady)
    assert "one node seemed to take 6.0 plain steps" in implausible([1.0, 6.0, *[7.0] * 6])
    assert "8 nodes seemed to take less than half" in implausible([1.0, 0.7, 2.9, 2.2, 1.0, 0.8, 1.0, 4.0])
    tries = iter([[1.0, 6.0, *[7.0] * 6]] * 4 + [[1.0, 0.1, *steady[2:]], steady])
    monkeypatch.setattr(cost, "measure_costs", lambda *_: next(tries))
    pass_costs(llama)  # tried twice
    assert "other programs ran beside; these costs are not kept" in capsys.readouterr().err
    assert saved_costs(llama) is None
    assert not cost_file(llama, 1).exists()
    spec = Spec(llama, made("prompt_lookup", llama))
    spec._learned.decoded = 100.0
    assert not spec.generate([[5, 9, 2, 7]], 4, nodes="auto").forecast.measured  # small trees, and later again
    assert spec._learned.decoded < 100 < 3 * spec._learned.due < 200
    spec._learned.decoded = 100.0
    assert spec.generate([[5, 9, 2, 7]], 4, nodes="auto").forecast.measured
    assert pass_costs(llama)[:3] == steady[:3]


def test_nothing_is_measured_beside_other_work(llama, monkeypatch):
    monkeypatch.setattr("selfspec.budget.learned.crowded", lambda: True)
    monkeypatch.setattr(cost, "measure_costs", lambda *_: pytest.fail("the machine is busy"))
    spec = Spec(llama, made("prompt_lookup", llama))
    spec._learned.decoded = 100.0
    assert not spec.generate([[5, 9, 2, 7]], 4, nodes="auto").forecast.measured


def test_costs_that_passes_do_not_have_are_measured_again(llama, monkeypatch, capsys):
    monkeypatch.setattr(cost, "measure_costs", lambda *_: [60.0] * 8)  # on a machine that was busy throughout
    spec, prompt = Spec(llama, made("prompt_lookup", llama)), [[5, 9, 2, 7] * 3]
    spec._learned.decoded = 100.0
    found = spec.generate(prompt, 60, nodes="auto")
    assert found.token_ids == spec.autoregressive(prompt, 60).token_ids
    assert "it is measured again" in capsys.readouterr().err
    assert saved_costs(llama) is None
    assert spec._learned.past == {}


def test_sizes_that_can_not_pay_are_not_measured(llama, monkeypatch):
    monkeypatch.setattr(cost, "_DEAR", 0)  # of a tree of one node, say
    measured = cost.measure_costs(llama, 2, 0.0)
    assert measured[1:] == [pytest.approx(measured[1] * n) for n in SIZES]


def test_noise_in_costs_is_smoothed(llama):
    measured = [0.9, *(float(n) for n in SIZES)]
    measured[3], measured[4] = 6.0, 4.0  # four nodes seemed dearer than eight
    line = cost._by_nodes(measured, llama)
    assert line[0] == 0.9
    assert line[4] == line[8] == 5.0
    assert line[LARGEST] == LARGEST
    assert line[20] == pytest.approx(20)


@pytest.mark.parametrize("costs", [FREE, DEAR], ids=["free", "dear"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rows", [1, 4])
def test_lossless(target, costs, temperature, rows):
    options = Options(30, Sampling(temperature), 5)
    plain = autoregressive(target, PROMPTS[:rows], options)
    for drafter in drafters(target):
        sized, forecast, past = auto(drafter, costs)
        for _ in range(2):  # what the first call taught is there in the second
            fast = speculative(target, PROMPTS[:rows], options, sized, LARGEST)
            assert fast.token_ids == plain.token_ids
            sized = Auto(drafter, costs, past, forecast, 30)
        assert forecast.speedup > 0


class _Spy:
    """A drafter with one session, itself, of fixed path probabilities below the root, that keeps what it was asked
    for."""

    reads: tuple[int, ...] = ()

    def __init__(self, scores: list[float], prunable: bool = True) -> None:
        self.scores, self.prunable = scores, prunable
        self.asked: list[int] = []
        self.observed = 0

    def session(self, target: Target, rows: int) -> Any:
        return self

    def propose(self, context: Context) -> DraftTree:
        self.asked.append(context.nodes)
        n = min(context.nodes, len(self.scores) + 1)
        parents = torch.tensor([[-1] + [0] * (n - 1)] * len(context.roots))
        tokens = (context.roots[:, None] + torch.arange(n)) % 61
        scores = torch.tensor([1.0, *self.scores[: n - 1]]).expand(len(tokens), -1)
        return DraftTree(tokens, parents, scores, self.prunable)

    def observe(self, accepted: Accepted) -> None:
        self.observed += 1


def context(target: Target, length: int) -> Context:
    tokens: Any = [[1] * length]
    return Context(torch.tensor([1]), [length - 1], tokens, LARGEST, 0.0, None, target, None)


def test_a_node_stays_if_it_is_worth_its_time(llama):
    probs, sizes = [0.5, 0.2, 0.1, 0.04, 0.01], []
    for price in (0.0, 0.03, 0.06, 0.3, 2.0):  # plain steps per further node
        costs = [1.0] + [1 + price * (n - 1) for n in range(1, LARGEST + 1)]
        sized, _ = session_of(_Spy(probs), costs, llama)
        sizes.append(sized.propose(context(llama, 5)).tokens.shape[1])
        best = max(range(1, 7), key=lambda n: (1 + sum(probs[: n - 1])) / costs[n])
        assert sizes[-1] == best, price
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 6
    assert sizes[-1] == 1


@pytest.mark.parametrize("price", [0.0, 0.02, 0.1, 0.3])
def test_the_size_that_expects_most_per_second_is_asked_for(llama, price):
    """A draft takes 0.01 plain steps for each node; node n is accepted with probability 0.5 / n."""
    probs = [0.5 / n for n in range(1, LARGEST)]
    costs = [1.0] + [1 + price * (n - 1) for n in range(1, LARGEST + 1)]

    def rate(asked: int) -> float:
        return max((1 + sum(probs[: n - 1])) / (costs[n] + 0.01 * asked) for n in range(1, asked + 1))

    spy, length = _Spy(probs), 5.0
    session, _ = session_of(spy, costs, llama, limit=2000)
    for _ in range(400):
        tree = session.propose(context(llama, int(length)))
        length += 1 + sum(probs[: tree.tokens.shape[1] - 1])
        session.last.draft = 0.01 * spy.asked[-1]
    late = spy.asked[-200:]
    best = max((4, 8, 16, 32, 64), key=rate)
    assert late.count(best) > 140, late
    assert all(rate(size) > 0.9 * rate(best) for size in late)


def test_ranks_that_keep_less_than_they_promise_are_cut(llama):
    """Nodes behind the third are never accepted, whatever their scores say."""
    probs = [0.5, 0.3, 0.3, 0.25, 0.25, 0.25, 0.25]
    spy, length = _Spy(probs), 5
    session, _ = session_of(spy, [1.0] + [1 + 0.05 * (n - 1) for n in range(1, LARGEST + 1)], llama, limit=2000)
    sizes = []
    for step in range(400):
        nodes = session.propose(context(llama, length)).tokens.shape[1]
        sizes.append(nodes)
        path = [0, 1 + step % 3] if step % 3 < 2 and nodes > 1 + step % 3 else [0]
        session.observe(Accepted(torch.zeros(1, nodes, 8), {}, [0], [path]))
        session.last.draft, session.past.slow = 0.0, 1.0  # no time passes here
        length += len(path)
    assert sizes[0] == 8
    assert sum(size <= 5 for size in sizes[-100:]) > 80
    assert session.past.trust(1) > 0.6 > 0.4 > session.past.trust(5)


def test_cut_trees_keep_parents_in_order(llama, monkeypatch):
    tokens, parents = torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.tensor([[-1, 0, 1, 0, 3, 2]])
    scores = torch.tensor([[1.0, 0.2, 0.02, 0.7, 0.6, 0.01]])
    sized, _ = session_of(_Spy([]), [1.0] + [1 + 0.1 * n for n in range(LARGEST)], llama)
    monkeypatch.setattr(policy, "perf_counter", lambda: 1.0)  # the draft took a plain step
    tree, promise, left = sized._cut(DraftTree(tokens, parents, scores), 0.0)
    assert torch.tensor(left).equal(tree.scores)
    assert tree.tokens.tolist() == [[1, 2, 4, 5]]
    assert tree.parents.tolist() == [[-1, 0, 0, 2]]
    assert promise == pytest.approx(1.5)
    kept = DraftTree(tokens, parents, scores, prunable=False)
    assert sized._cut(kept, 0.0)[0] is kept


def test_what_can_not_be_cut_is_asked_for_what_a_pass_can_carry(llama):
    for costs, nodes in ((FREE, 32), (DEAR, 8), ([1.0] + [1 + 0.01 * n for n in range(LARGEST)], 16)):
        spy = _Spy([0.9] * 40, prunable=False)
        sized, _, past = auto(spy, costs)
        speculative(llama, PROMPTS[:1], Options(6), sized, LARGEST)
        assert not past.prunable
        assert spy.asked[1] == nodes


class _Rider(_Spy):
    """One with mask slots in the pass, which expect as many tokens as `promises` says."""

    def __init__(self, promises: dict[int, float]) -> None:
        super().__init__([0.5] * 20, prunable=False)
        self.promises = promises

    def expected_drafted(self, mode: str, rows: int) -> float:
        return self.promises[rows]

    def draft(self, context: Context) -> DraftTree:
        return self.propose(context)

    def add_slots(self, tree: DraftTree, context: Context) -> DraftTree:
        return tree


def test_mask_rows_are_as_many_as_pay(llama):
    promises = {4: 0.6, 8: 1.0, 16: 2.0, 32: 2.2, 64: 2.3}
    gentle = [1.0] + [1 + 0.02 * n for n in range(LARGEST)]
    for costs, best in ((FREE, 64), (DEAR, 4), (gentle, 16)):
        session, _ = session_of(_Rider(promises), costs, llama)
        session.propose(context(llama, 5))
        assert session.inner.asked == [best]


def test_decodes_plainly_where_no_tree_pays(llama, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(policy, "perf_counter", lambda: 1e-3 * next(ticks))  # a draft takes as long as a plain step
    spy = _Spy([0.01] * 20)
    sized, forecast, past = auto(spy, DEAR, limit=60)
    past.draft, past.passes = 1.0, 1.0
    plain = autoregressive(llama, PROMPTS[:1], Options(60))
    fast = speculative(llama, PROMPTS[:1], Options(60), sized, LARGEST)
    assert fast.token_ids == plain.token_ids
    assert _TRIAL <= len(spy.asked) < 50 < fast.stats.passes  # then nothing more was drafted in this call
    assert spy.observed <= len(spy.asked) + 1  # nor read
    past.tokens, past.steps = 50.0, 100.0  # drafting was clearly slower
    for call in range(2, 2 * _TRIAL + 1):  # the calls after it do not try, but for every eighth
        spy = _Spy([0.01] * 20)
        speculative(llama, PROMPTS[:1], Options(5), Auto(spy, DEAR, past, forecast := Forecast(), 5), LARGEST)
        assert (len(spy.asked) > 0) == (call % _TRIAL == 0)
        if call % _TRIAL:
            assert forecast.speedup == 1.0
            assert "decoding plainly" in str(forecast)
        past.tokens, past.steps = 50.0, 100.0


def test_a_text_that_pays_is_not_given_up_for_others(llama):
    """Calls before it were a little slower than plain decoding; this one begins with drafts, and goes on with them."""
    for tau, drafted in ((1.9, 40), (0.5, _TRIAL)):
        spy = _Spy([tau / 2] * 2)
        sized, _, past = auto(spy, FREE, limit=40)
        past.calls, past.tokens, past.steps = 1, 98.0, 100.0
        past.draft, past.passes = 50 * 0.6, 50.0
        session: Any = sized.session(llama, 1)
        for length in range(5, 45):
            session.propose(context(llama, length))
            if session.last is not None:
                session.last.draft = 0.6  # of a plain step
        assert len(spy.asked) <= 40
        assert (len(spy.asked) == 40) == (drafted == 40), (tau, len(spy.asked))


def test_what_a_pass_took_that_compiled_teaches_nothing(llama):
    for compiled in (False, True):
        sized, _, past = auto(_Spy([0.5] * 4), FREE, limit=60)
        target = Target(llama.model)
        session: Any = sized.session(target, 1)
        session.propose(context(target, 4))
        session.propose(context(target, 5))
        if compiled:
            target.engine.made.append(("drafted", 10.0, "compiled"))
        session.last.ready -= 10.0  # seconds that the pass took
        session.observe(Accepted(torch.zeros(1, 4, 8), {}, [0], [[0]]))
        session.last.draft = 10.0
        session.propose(context(target, 6))
        assert (past.slow == 1.0) == compiled
        assert (past.passes == 0) == compiled


def test_reading_the_prompt_does_not_count_against_drafts(llama):
    """A first draft of a hundred plain steps neither ends drafting in its call nor in later ones."""
    past = Experience()
    for call in range(3):
        spy = _Spy([0.9] * 2)
        session: Any = Auto(spy, FREE, past, Forecast(), 40).session(llama, 1)
        for length in range(5, 45):
            session.propose(context(llama, length))
            session.last.draft = 0.1 if length > 5 else 100.0
        assert len(spy.asked) == 40, call


def test_the_forecast_is_what_was_expected_before_each_pass(llama):
    costs = [1e-3] + [1.1e-3] * LARGEST
    sized, forecast = session_of(_Spy([0.5, 0.25]), costs, llama)
    sized.propose(context(llama, 5))
    assert (forecast.passes, forecast.nodes) == (1, 3)
    assert forecast.tokens == pytest.approx(1.75)
    assert forecast.steps == pytest.approx(1.1)
    last, forecast = session_of(_Spy([0.9, 0.9]), costs, llama, limit=1)
    last.propose(context(llama, 5))
    assert forecast.tokens == 1.0  # there is room for no more


def test_measuring_is_bounded(llama, monkeypatch):
    """On a target that takes a second a call, there are few rounds, of the sizes that half of the time is left for."""
    clock, calls = [0.0], []
    real = cost.speculative

    def slow(target: Target, prompts: Any, options: Any, trees: Any, most: int) -> Any:
        clock[0] += 1
        calls.append(list(trees.sizes))
        return real(target, prompts, options, trees, most)

    monkeypatch.setattr(cost, "_ROUNDS", 24)
    monkeypatch.setattr(cost, "SECONDS", 7.0)
    monkeypatch.setattr(cost, "speculative", slow)
    ticks = itertools.count()
    monkeypatch.setattr("selfspec.budget.cost.time.perf_counter", lambda: clock[0] + 1e-6 * next(ticks))
    measured = cost.measure_costs(llama, 1, 0.0)
    assert calls[:4] == [[1], [2], [4], [8]]
    assert set(map(tuple, calls[4:])) == {(1, 2, 4, 8)}
    assert len(calls) < 9
    slope = max(0.0, (measured[4] - measured[3]) / 4)
    assert measured[5:] == [pytest.approx(measured[4] + slope * (n - 8)) for n in SIZES[4:]]


def test_spec_takes_auto(llama, monkeypatch):
    """Costs are measured when calls have taken as long as measuring does; until then trees are small."""
    monkeypatch.setattr(cost, "implausible", lambda _: "")  # whatever else runs beside the tests
    spec = Spec(llama, made("prompt_lookup", llama))
    prompt = [[5, 9, 2, 7] * 3]
    short = spec.generate(prompt, 40, nodes="auto")
    assert short.token_ids == spec.generate(prompt, 40, nodes=policy.unmeasured(llama.device)).token_ids
    assert short.stats.nodes == spec.generate(prompt, 40, nodes=policy.unmeasured(llama.device)).stats.nodes
    assert "calls have taken 20 s in all" in str(short.forecast)
    assert not cost_file(llama, 1).exists()
    assert spec._learned.decoded > short.stats.seconds
    spec._learned.decoded = cost.SECONDS
    for temperature in (0.0, 1.0):
        plain = spec.autoregressive(prompt, 40, temperature, seed=2)
        found = spec.generate(prompt, 40, temperature, seed=2, nodes="auto")
        assert found.token_ids == plain.token_ids
        assert found.forecast.passes == found.stats.passes
        assert "auto: " in str(found.forecast)
    assert spec.generate(prompt, 4, nodes=3).forecast is None
    ids = torch.tensor(prompt)
    out = llama.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, custom_generate=spec, nodes="auto"
    )
    assert out[0, 12:].tolist() == spec.autoregressive(prompt, 10).token_ids[0]
    refused("nodes='best' must be a number or 'auto'", spec.generate, prompt, 4, nodes="best")
    refused("prompt 0 is empty", spec.generate, [[]], 4, nodes="auto")
