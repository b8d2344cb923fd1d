"""What the embedded drafters did before the code was rebuilt, they do today: tokens, passes and losses of a record.

`record.json` was written by version 0.1.0 in float32 on two cores. A part of it is checked here; all of it is slow.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import compose_config, losses

import selfspec
from selfspec.api import Spec
from selfspec.cli.training_runs import run_training

RECORD_FILE = Path(__file__).parent / "record.json"
RECORD: dict[str, Any] = json.loads(RECORD_FILE.read_text())
POINTS = [tuple(key.split(" ")) for key in RECORD["passes"]]
FEW = ("0.0 8", "1.0 16")  # temperature and nodes of the points that are always checked, on one prompt


@cache
def spec(name: str) -> Spec:
    return selfspec.load(name, target="tiny-target", dtype="float32")


def settings_of(temperature: float, seed: int, nodes: int) -> dict[str, Any]:
    return {"temperature": temperature, "seed": seed, "nodes": nodes}


def check(name: str, temperature: str, nodes: str, count: int) -> None:
    passes = []
    for i, prompt in enumerate(RECORD["prompts"][:count]):
        settings = settings_of(float(temperature), RECORD["seed"] + i, int(nodes))
        result = spec(name).generate([prompt], RECORD["new_tokens"], **settings)
        assert result.token_ids[0] == RECORD["tokens"][temperature][i]
        passes.append(result.stats.passes)
    assert passes == RECORD["passes"][f"{name} {temperature} {nodes}"][:count]


@pytest.mark.parametrize(
    ("name", "temperature", "nodes"), [point for point in POINTS if " ".join(point[1:]) in FEW], ids="-".join
)
def test_tokens_and_passes(name, temperature, nodes):
    check(name, temperature, nodes, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "temperature", "nodes"), POINTS, ids="-".join)
def test_all_tokens_and_passes(name, temperature, nodes):
    check(name, temperature, nodes, len(RECORD["prompts"]))
    seeds = [RECORD["seed"] + i for i in range(len(RECORD["prompts"]))]
    together = spec(name).generate(
        RECORD["prompts"], RECORD["new_tokens"], float(temperature), seed=seeds, nodes=int(nodes)
    )
    assert together.token_ids == RECORD["tokens"][temperature]
    assert [together.stats.passes, together.stats.calls] == RECORD["batch_passes"][f"{name} {temperature} {nodes}"]


TRAINED = {
    "early_exit": ["drafter=early_exit"],
    "medusa": ["drafter=medusa", "drafter.blocks=2"],
    "medusa_full": ["drafter=medusa", "drafter.projection=full", "drafter.heads=2"],
    "medusa_ce": ["drafter=medusa", "drafter.loss=ce"],
    "sequential": ["drafter=sequential", "drafter.blocks=1"],
    "sequential_alone": ["drafter=sequential", "drafter.prefix=false"],
    "sequential_markov": ["drafter=sequential", "drafter.form=markov", "drafter.prefix=false"],
    "feature": ["drafter=feature"],
    "feature_lora": ["drafter=feature", "drafter.train=lora"],
    "feature_few": ["drafter=feature", "drafter.draft_vocab=512"],
}
SETTINGS = """target.name=tiny-target target.dtype=float32 data=text data.validation_share=0.5 train.length=64
train.lr=1e-3 train.validation_rows=2 train.prompts=2 train.prompt_tokens=8 train.new_tokens=16
loop.steps=50 loop.batch_size=2 loop.warmup=5 loop.precision=no loop.log_every=1 loop.validate_every=50
loop.checkpoint_every=50"""


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_losses(name, tmp_path):
    assert losses_of(name, tmp_path) == pytest.approx(RECORD["training"][name], rel=2e-6)


def losses_of(name: str, tmp_path: Path) -> list[float]:
    """Fifty steps on the text of the licence."""
    text = (Path(__file__).parents[1] / "LICENSE").read_bytes()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(text[:9000])
    (tmp_path / "text" / "b.txt").write_bytes(text[-2300:])
    overrides = [f"name={name}", f"data.root={tmp_path / 'text'}", *SETTINGS.split(), *TRAINED[name]]
    run_training(compose_config("train", *overrides), tmp_path / "run")
    return losses(tmp_path / "run")
