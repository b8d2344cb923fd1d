"""Losses: what they say of two distributions, and that their gradients are those of what they say."""

from dataclasses import replace

import pytest
import torch
from conftest import refused
from torch import Tensor

from selfspec.drafters.base import Batch
from selfspec.drafters.parts.losses import (
    RULES,
    accepted_share,
    check_loss,
    distance,
    drafted_logits,
    losses,
    random_hosts,
    random_rows,
    share_of,
    shared,
)


def logits(*shape: int, seed: int, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])
def test_shared_is_how_often_both_pick_alike(spread):
    p, q = (logits(4, 9, seed=seed, spread=spread).log_softmax(-1) for seed in (0, 1))
    noise = torch.rand(200_000, 1, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    noise = -(-noise.log()).log()
    often = ((p + noise).argmax(-1) == (q + noise).argmax(-1)).double().mean(0)
    torch.testing.assert_close(shared(q, p), often, atol=0.005, rtol=0)
    torch.testing.assert_close(shared(p, p), torch.ones(4, dtype=torch.float64))


def test_what_total_variation_and_lk_say():
    p, q = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.25, 0.25, 0.5]]).log()
    assert RULES["tv"](q, p).item() == pytest.approx(0.5)
    far, near = logits(1, 9, seed=0, spread=30.0).log_softmax(-1), logits(1, 9, seed=1).log_softmax(-1)
    apart = RULES["tv"](near, far)
    kl = (far.exp() * (far - near)).sum(-1)
    weight = torch.exp(-3 * (1 - apart))
    torch.testing.assert_close(RULES["lk"](near, far), weight * kl + (1 - weight) * apart)


def test_a_rule_that_is_added_is_a_loss(monkeypatch):
    refused(r"drafter.loss='mine' must be one of kl, ce, ce_tv, tv, lk, accept, or", check_loss, "mine")
    monkeypatch.setitem(RULES, "mine", RULES["tv"])
    check_loss("mine")


@pytest.mark.parametrize("loss", losses())
def test_gradients_are_those_of_the_loss(loss, monkeypatch):
    """More positions than a chunk holds."""
    monkeypatch.setattr("selfspec.drafters.parts.losses._CHUNK", 300)
    draft, target = logits(2, 80, 11, seed=0).requires_grad_(), logits(2, 80, 11, seed=1)
    tokens = torch.randint(11, (2, 80), generator=torch.Generator().manual_seed(0))
    weights = torch.rand(2, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = distance(loss, draft, target, tokens)
    (found * weights).sum().backward()
    own = draft.detach().clone().requires_grad_()
    log_q, log_p = own.log_softmax(-1), target.log_softmax(-1)
    rules = {"kl": lambda: (log_p.exp() * (log_p - log_q)).sum(-1)}
    rules["ce"] = lambda: -log_q.gather(-1, tokens[..., None])[..., 0]
    rules["ce_tv"] = lambda: 0.1 * rules["ce"]() + 0.9 * RULES["tv"](log_q, log_p)
    plain = rules[loss]() if loss in rules else RULES[loss](log_q, log_p)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if "ce" in loss.split("_") else {}  # in float32
    torch.testing.assert_close(found.double(), plain, **tolerance)
    (plain * weights).sum().backward()
    torch.testing.assert_close(draft.grad, own.grad, **tolerance)


@pytest.mark.parametrize("loss", losses())
def test_losses_fall_towards_the_target(loss):
    target = logits(1, 3, 11, seed=1)
    tokens = target.argmax(-1)
    near, far = target + 0.1 * logits(1, 3, 11, seed=2), logits(1, 3, 11, seed=3)
    assert (distance(loss, near, target, tokens) < distance(loss, far, target, tokens)).all()
    assert distance(loss, 1e4 * far, target, tokens).isfinite().all()


def test_of_a_draft_vocabulary_count_positions_whose_likeliest_token_is_in_it():
    logits = torch.tensor([[[3.0, 1.0, 2.0], [0.0, 5.0, 1.0]]])
    few, drafted = drafted_logits(logits, torch.tensor([0, 2]))
    assert few.tolist() == [[[3.0, 2.0], [0.0, 1.0]]]
    assert drafted.tolist() == [[True, False]]
    whole, everywhere = drafted_logits(logits, None)
    assert whole is logits
    assert everywhere.all()


def test_every_epoch_draws_other_positions_and_a_resumed_one_the_same():
    tokens, nothing = torch.arange(40).view(2, 20), torch.empty(0)
    first = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), nothing, nothing, {}, None)
    drawn = [random_rows(replace(first, epochs=torch.tensor(epochs)), 12) for epochs in ([0, 0], [0, 1], [1, 1])]
    assert torch.equal(drawn[0], random_rows(first, 12))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[1][1], drawn[2][1])
    assert not torch.equal(drawn[0][0], drawn[2][0])
    assert not torch.equal(random_hosts(first, 3, 4), random_hosts(replace(first, epochs=torch.tensor([1, 1])), 3, 4))


def test_what_a_draft_vocabulary_lacks_is_not_accepted():
    whole, draft, ids = logits(1, 3, 9, seed=0), logits(1, 3, 4, seed=1), torch.tensor([7, 0, 3, 5])
    few, _ = drafted_logits(whole, ids)
    wanted = torch.minimum(draft.softmax(-1), whole.softmax(-1)[..., ids]).sum(-1)
    torch.testing.assert_close(accepted_share(draft, few, share_of(whole, few)), wanted.float())
    assert (wanted < 1 - distance("tv", draft, few, torch.zeros(1, 3))).all()
