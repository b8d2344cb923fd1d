"""What limits a pass: the table of costs against the machine, and what drafters can bring."""

import itertools
import json
from functools import partial

import pytest
import torch
from conftest import compose_config, made, refused, tiny_model
from families import build

from selfspec.cli.evaluation_runs import run_limits
from selfspec.core.target import Target
from selfspec.drafters.base import Calibration, Trained
from selfspec.drafters.parts.static_tree import expected_length
from selfspec.engine.engine import Engine
from selfspec.evaluation import limits
from selfspec.evaluation.limits import LimitsConfig, bandwidth, measure_limits, peak, weights_of

MODEL = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 12}
MODEL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 300}


@pytest.fixture(autouse=True)
def _without_compiling(monkeypatch) -> None:
    monkeypatch.setattr(Target, "use_engine", lambda self, name: setattr(self, "engine", Engine()))


def test_weights_are_those_that_a_pass_reads():
    model = tiny_model(tie_word_embeddings=False)
    table = model.get_input_embeddings().weight
    size, products = weights_of(Target(model))
    assert size == sum(p.numel() * 8 for p in model.parameters()) - table.numel() * 8
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert products == 2 * (size // 8 - norms)
    tied = tiny_model(tie_word_embeddings=True)
    assert weights_of(Target(tied))[0] == sum(p.numel() * 8 for p in tied.parameters())


@pytest.mark.parametrize(
    ("family", "taken"),
    [
        ("Mixtral", "num_experts_per_tok"),
        ("gpt-oss (attention sinks)", "num_experts_per_tok"),
        ("Kimi Linear (MLA)", "num_experts_per_token"),
    ],
)
def test_a_token_takes_no_other_experts(family, taken):
    models = [build(family, **{taken: k}) for k in (2, 1)]
    names = [(name, p) for name, p in models[0].named_parameters() if ".experts." in name]
    one_expert = sum(p[0].numel() for _, p in names)
    (size_two, two), (size_one, one) = (weights_of(Target(model)) for model in models)
    assert two - one == 2 * one_expert > 0
    assert size_two - size_one == 8 * one_expert


def test_the_machine_is_measured(monkeypatch):
    """By a clock on which everything takes two seconds, and then one."""
    device = torch.device("cpu")
    for seconds in (2, 1):
        monkeypatch.setattr(limits, "clock", partial(next, itertools.count(0, seconds)))
        assert bandwidth(2**22, device) == 2**22 / seconds
        assert peak(torch.float32, device, 128) == 2 * 128**3 / seconds


def test_what_a_table_expects():
    target = Target(tiny_model())
    calibration = {"greedy": Calibration([[0.5, 0.2], [0.4, 0.1]], [1.0, 1.0])}
    heads, masks = made("medusa", target, heads=2, rank=2), made("mask", target, masks=2, rank=2)
    for drafter in (heads, masks):
        drafter.calibration = calibration

    def expected(drafter: Trained, nodes: int) -> float:
        return expected_length(drafter.session(target, 1), calibration["greedy"].acceptance, "greedy", nodes)

    assert expected(heads, 1) == 1.0
    assert expected(heads, 4) == pytest.approx(1 + 0.5 + 0.2 + 0.5 * 0.4)
    # two of three rows are a root and a child, behind one of which one mask slot stands
    assert 1.0 < expected(masks, 3) <= 1.5
    assert expected(masks, 12) < expected(heads, 12)


@pytest.mark.slow
def test_limits_of_random_weights(tmp_path, capsys):
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "RESULTS.md").write_text("# Before\n<!-- limits small -->\n<!-- end -->\nafter\n")
    config = compose_config(
        "limits",
        "name=small",
        "wandb.mode=disabled",
        f"limits.config={tmp_path / 'model.json'}",
        "limits.sizes=[1,4,8]",
        "limits.rounds=3",
        "limits.drafters=[tiny-medusa,tiny-early-exit]",
        f"results={tmp_path / 'RESULTS.md'}",
    )
    figures = run_limits(config, tmp_path / "run")
    assert [row["nodes"] for row in figures["passes"]] == [1, 4, 8]
    assert all(row["limit"] < row["eager"] for row in figures["passes"])
    assert {(f["drafter"], f["engine"], f["T"]) for f in figures["forecasts"]} == {
        (d, e, t) for d in ("tiny-medusa", "tiny-early-exit") for e in ("eager", "compiled") for t in (0.0, 1.0)
    }
    for found in figures["forecasts"]:
        plain = next(row[found["engine"]] for row in figures["passes"] if row["nodes"] == 1)
        plain = min(plain, found["pass"])  # a pass over more nodes takes no less
        assert found["speedup"] == pytest.approx(found["tau"] * plain / (found["pass"] + found["draft"]))
    text = (tmp_path / "RESULTS.md").read_text()
    assert "a forecast" in text
    assert text.startswith("# Before")
    assert text.endswith("after\n")
    assert "random weights of" in capsys.readouterr().out
    assert {p.name for p in (tmp_path / "run").glob("*.png")} == {"limits.png", "expected.png"}


def test_limits_of_a_target_of_ones_own(tiny_folder, heads_folder, tmp_path, capsys):
    config = compose_config(
        "limits",
        f"target={tiny_folder}",
        "wandb.mode=disabled",
        "limits.sizes=[1,2]",
        "limits.rounds=3",
        f"limits.drafters=[{heads_folder},prompt_lookup]",
    )
    figures = run_limits(config, tmp_path / "run")
    said = capsys.readouterr().out
    assert "prompt_lookup has no table of acceptance by depth" in said
    assert f"but that of {heads_folder} is a guess" in said
    assert not figures["forecast"]
    assert {f["nodes"] for f in figures["forecasts"]} == {2}
    model, settings = tiny_model(max_position_embeddings=64), LimitsConfig(rounds=3)
    refused(r"has 64 positions, too few for 80 nodes; give smaller limits\.sizes", measure_limits, model, {}, settings)
    assert limits._context(Target(model), 40) == 24  # the pass and its tree fit
