"""The audit finds nothing where there is nothing, and finds what is put there."""

import json
import math
from typing import Any

import pytest
import torch
from conftest import compose_config, random_drafter, tiny_model

import selfspec.core.passes as target_file
from selfspec.api import Spec
from selfspec.cli.evaluation_runs import run_audit
from selfspec.core import rows
from selfspec.core.target import Target
from selfspec.evaluation.audit import (
    Audit,
    AuditConfig,
    DistributionTest,
    Divergence,
    audit,
    chi_square,
    distribution_tests,
    distribution_verdict,
    exact_distribution,
)
from selfspec.evaluation.tables import audit_report

PROMPTS = [[5, 9, 2, 7, 7, 1], [8, 1, 30, 4], [3, 3, 12, 50, 6]]
CONFIG = AuditConfig(max_new_tokens=24, nodes=[4, 12], batch_sizes=[1, 2], seeds=[0, 7])


@pytest.fixture(scope="module")
def spec() -> Spec:
    target = Target(tiny_model())
    drafter = random_drafter("medusa", target, heads=3, rank=4)
    return Spec(target, drafter)


def test_identical_output_is_called_identical(spec):
    found = audit(spec, PROMPTS, CONFIG)
    assert (found.verdict, found.divergences) == ("identical", [])
    assert found.rows == 3 * 4 * (1 + 2 + 2)  # greedy takes one seed
    assert found.tokens == 24 * found.rows
    assert 0 < found.noise < 1e-10
    assert found.deviation < 1e-10


def test_a_wrong_walk_is_called_a_bug(spec, monkeypatch):
    """Where nothing is recorded a pass walks its tree itself: here it takes every first child unseen."""
    right = target_file.walk

    def first_child(logits: Any, tokens: Any, parents: Any, below: Any, noise: Any) -> Any:
        each = torch.arange(tokens.shape[1])
        first = ~((parents[:, :, None] == parents[:, None]) & (each < each[:, None])).any(-1) & (parents >= 0)
        for row, child in first.nonzero().tolist():
            logits[row, parents[row, child], tokens[row, child]] = 1e4
        return right(logits, tokens, parents, below, noise)

    monkeypatch.setattr(target_file, "walk", first_child)
    config = AuditConfig(max_new_tokens=12, nodes=[12], batch_sizes=[1], temperatures=[0.0])
    assert audit(spec, PROMPTS, config).verdict == "BUG"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("both", [True, False])
def test_wrong_picks_of_plain_decoding_are_called_a_bug(both, temperature, spec, monkeypatch):
    """Every pick of a plain pass, or of each one, is the second best."""
    right, real = rows.pick, target_file.walk

    def second(scores: Any, noise: Any) -> Any:
        best = right(scores, noise)
        return right(scores.scatter(-1, best[..., None], -torch.inf), noise)

    def walked(logits: Any, tokens: Any, parents: Any, below: Any, noise: Any) -> Any:
        if both or tokens.shape[1] == 1:
            picks = real(logits[:, :1], tokens[:, :1], parents[:, :1], below[:, :1, :1], noise)[:, 1, :1, None]
            logits[:, :1] = logits[:, :1].scatter(-1, picks, -1e4)
        return real(logits, tokens, parents, below, noise)

    monkeypatch.setattr(target_file, "walk", walked)
    if both:
        monkeypatch.setattr(rows, "pick", second)
    config = AuditConfig(max_new_tokens=12, nodes=[12], batch_sizes=[1], temperatures=[temperature])
    found = audit(spec, PROMPTS, config)
    assert found.verdict == "BUG"
    assert (found.missed > found.bound) == both
    assert "plain" in audit_report(found, [])


def test_a_wrong_mask_is_called_a_bug(spec, monkeypatch):
    right = target_file.tree_masks

    def all_above(*given: Any) -> Any:
        """Nodes see what was drafted beside them."""
        depths, (mask,) = right(*given)
        lengths, nodes = given[1], mask.shape[2]
        mask[..., lengths[0] : lengths[0] + nodes] = torch.full(
            (nodes, nodes), torch.finfo(mask.dtype).min, dtype=mask.dtype
        ).triu(1)
        return depths, [mask]

    monkeypatch.setattr(target_file, "tree_masks", all_above)
    found = audit(spec, PROMPTS, AuditConfig(max_new_tokens=24, nodes=[12], batch_sizes=[1]))
    assert found.verdict == "BUG"
    worst = max(found.divergences, key=lambda d: d.margin)
    assert worst.margin > 1e6 * found.bound
    assert worst.plain_token != worst.speculative_token
    assert "**BUG**" in audit_report(found, [])


def test_a_text_that_ends_early_is_called_a_bug(spec, monkeypatch):
    kept = rows.Rows.advance

    def cut(self: Any, emitted: list[list[int]]) -> Any:
        tokens, going = kept(self, emitted)
        return tokens, [] if self.cache.lengths[0] > 20 and max(map(len, tokens)) > 1 else going

    monkeypatch.setattr(rows.Rows, "advance", cut)
    found = audit(spec, PROMPTS, AuditConfig(max_new_tokens=24, nodes=[12], batch_sizes=[1]))
    assert found.verdict == "BUG"
    assert all(d.speculative_token == -1 for d in found.divergences)


def test_a_bug_in_both_loops_is_called_one(spec, monkeypatch):
    right = target_file.tree_masks

    def forgets(*given: Any) -> Any:
        """The text's first token is never seen."""
        depths, (mask,) = right(*given)
        mask[..., 0] = torch.finfo(mask.dtype).min
        return depths, [mask]

    monkeypatch.setattr(target_file, "tree_masks", forgets)
    found = audit(spec, PROMPTS, AuditConfig(max_new_tokens=8, nodes=[4], batch_sizes=[1], temperatures=[0.0]))
    assert (found.verdict, found.deviation_plain > found.bound) == ("BUG", True)


def test_noise_of_a_dtype_is_told_from_a_bug():
    target = Target(tiny_model(dtype=torch.bfloat16))
    drafter = random_drafter("medusa", target, heads=3, rank=4)
    config = AuditConfig(max_new_tokens=24, nodes=[12], batch_sizes=[2], seeds=[0])
    found = audit(Spec(target, drafter), PROMPTS, config)
    assert found.verdict in ("identical", "explained by numerics")
    assert found.noise > 1e-3


def test_the_verdict_follows_the_margin():
    def verdict(*margins: float, plain: float = 0.1, apart: float = 0.1, missed: float = 0.1) -> str:
        divergences = [Divergence(0, 0.0, 0, 8, 1, 5, 1, 2, margin, 0.1) for margin in margins]
        return Audit("torch.bfloat16", 3, 100, 0.1, 0.05, plain, apart, missed, divergences).verdict

    assert verdict() == "identical"
    assert verdict(0.05, 0.29) == "explained by numerics"
    assert verdict(0.05, 0.31) == verdict(-0.31) == verdict(missed=0.31) == "BUG"
    assert verdict(plain=0.31) == "BUG"
    assert verdict(apart=0.31) == "BUG"
    assert verdict(float("inf")) == "BUG"
    assert verdict(apart=math.nan) == verdict(plain=math.nan) == verdict(math.nan) == "BUG"


def test_answers_of_one_token_are_no_bug(spec):
    """Both sides are then the prompt's one pass, which transformers repeats to the bit."""
    found = audit(spec, [[1, 2, 3], [4, 5]], AuditConfig(max_new_tokens=1, temperatures=[0.0], nodes=[4]))
    assert found.verdict == "identical"
    assert found.noise > 0


def test_the_law_is_the_models_and_bias_is_found(spec):
    found = exact_distribution(spec, PROMPTS[0], 4)
    assert len(found) == 64 + 16 + 4 + 1  # the last three: of others behind two tokens, one and none
    assert sum(found.values()) == pytest.approx(1.0)
    text = max((text for text in found if -1 not in text), key=found.__getitem__)
    wanted = 1.0
    for i in range(3):
        with torch.no_grad():
            logits = spec.target.model(torch.tensor([[*PROMPTS[0], *text[:i]]])).logits[0, -1]
        wanted *= float(logits.softmax(-1)[text[i]])
    assert found[text] == pytest.approx(wanted)
    tests = distribution_tests(spec, PROMPTS[:1], 2000, 4, 12)
    assert distribution_verdict(tests) == "exact"
    assert [t.p > 1e-4 for t in tests] == [True, True, False, True]


def test_chi_square_is_pearsons():
    statistic, p, bins = chi_square(torch.tensor([60.0, 40.0]).double(), torch.tensor([50.0, 50.0]).double())
    assert (statistic, bins) == (4.0, 2)
    assert p == pytest.approx(0.0455, abs=1e-4)  # of the tables
    observed, expected = torch.tensor([60.0, 40, 1, 2, 0]).double(), torch.tensor([50.0, 48, 2, 3, 0]).double()
    statistic, _, bins = chi_square(observed, expected)
    assert bins == 3  # 0, 2 and 3 make the first bin of 5
    assert statistic == pytest.approx(100 / 50 + 64 / 48 + 4 / 5)
    assert chi_square(expected, expected, sampled=True)[0] == 0
    statistic, p, bins = chi_square(torch.tensor([60.0, 40]).double(), torch.tensor([40.0, 60]).double(), sampled=True)
    assert (statistic, bins) == (pytest.approx(8.0), 2)
    assert p == pytest.approx(0.00468, abs=1e-4)


def test_distribution_verdicts():
    def tests(ours: float, control: float) -> list[DistributionTest]:
        return [
            DistributionTest("speculative against the exact distribution", 1000, 1.0, ours, 9),
            DistributionTest("biased on purpose against the exact distribution", 1000, 1.0, control, 9),
        ]

    assert distribution_verdict(tests(0.3, 1e-9)) == "exact"
    assert distribution_verdict(tests(1e-9, 1e-9)) == "BUG: speculative against the exact distribution"
    assert distribution_verdict(tests(0.3, 0.3)).startswith("undecided")


def test_the_command_writes_report_figures_and_plot(tmp_path, heads_folder, source_root):
    config = compose_config(
        "audit",
        f"drafter={heads_folder}",
        f"data.root={source_root}",
        "audit.prompts=3",
        "audit.prompt_tokens=12",
        "audit.max_new_tokens=8",
        "audit.nodes=[6]",
        "audit.distribution_samples=500",
    )
    figures = run_audit(config, tmp_path)
    assert figures["verdict"] == "identical"
    assert figures["distribution_verdict"] == "exact"
    assert json.loads((tmp_path / "audit.json").read_text())["tokens"] == figures["tokens"]
    assert "Distribution of the first three tokens: **exact**" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "margins.png").stat().st_size > 1000
