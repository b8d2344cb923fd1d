"""What the embedded drafters did before the code was rebuilt, they do today: tokens, passes and losses of a record.

`record.json` was written by version 0.1.0 in float32 on two cores. A part of it is checked here; all of it is slow.
`python tests/test_record.py` writes it anew: only where the embedded models or what they are asked changed.
"""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import compose_config, losses

import selfspec
from selfspec.api import Spec
from selfspec.cli.training_runs import run_training
from selfspec.core.stats import Stats
from selfspec.data.corpus import PythonSource
from selfspec.data.questions import Asking, read_questions

RECORD_FILE = Path(__file__).parent / "record.json"
RECORD: dict[str, Any] = json.loads(RECORD_FILE.read_text())
POINTS = [tuple(key.split(" ")) for key in RECORD["passes"]]
NEW_TOKENS, SEED = RECORD["new_tokens"], RECORD["seed"]
FEW = ("0.0 8", "1.0 16")  # temperature and nodes of the points that are always checked, on one prompt


@cache
def spec(name: str) -> Spec:
    return selfspec.load(name, target="tiny-target", dtype="float32")


def decoded(name: str, temperature: str, nodes: str, prompts: list[list[int]]) -> tuple[Any, list[int], Stats]:
    """Tokens and passes of prompts one by one, each with a seed of its own; tokens and statistics as one batch."""
    given, seeds = (NEW_TOKENS, float(temperature)), [SEED + i for i in range(len(prompts))]
    alone = [
        spec(name).generate([prompt], *given, seed=seed, nodes=int(nodes))
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    batch = spec(name).generate(prompts, *given, seed=seeds, nodes=int(nodes))
    assert batch.token_ids == [result.token_ids[0] for result in alone]
    return batch.token_ids, [result.stats.passes for result in alone], batch.stats


@pytest.mark.parametrize(
    ("name", "temperature", "nodes"), [point for point in POINTS if " ".join(point[1:]) in FEW], ids="-".join
)
def test_tokens_and_passes(name, temperature, nodes):
    tokens, passes, _ = decoded(name, temperature, nodes, RECORD["prompts"][:1])
    assert tokens == RECORD["tokens"][temperature][:1]
    assert passes == RECORD["passes"][f"{name} {temperature} {nodes}"][:1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "temperature", "nodes"), POINTS, ids="-".join)
def test_all_tokens_and_passes(name, temperature, nodes):
    key, (tokens, passes, batch) = f"{name} {temperature} {nodes}", decoded(name, temperature, nodes, RECORD["prompts"])
    assert tokens == RECORD["tokens"][temperature]
    assert passes == RECORD["passes"][key]
    assert [batch.passes, batch.calls] == RECORD["batch_passes"][key]


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


if __name__ == "__main__":
    torch.set_num_threads(2)
    tokenizer, source = spec("tiny-medusa").tokenizer, PythonSource()
    asked = [
        read_questions(Asking(name, None, 8, 48), tokenizer, source.evaluation) for name in ("instructions", "source")
    ]
    prompts = [question.opening(0, [], tokenizer) for questions in asked for question in questions]
    RECORD |= {"prompts": prompts, "tokens": {}, "passes": {}, "batch_passes": {}, "training": {}}
    for name, temperature, nodes in POINTS:
        tokens, passes, batch = decoded(name, temperature, nodes, prompts)
        assert tokens == RECORD["tokens"].setdefault(temperature, tokens), (name, temperature, nodes)
        RECORD["passes"][f"{name} {temperature} {nodes}"] = passes
        RECORD["batch_passes"][f"{name} {temperature} {nodes}"] = [batch.passes, batch.calls]
        print(name, temperature, nodes, sum(passes), flush=True)
    for name in TRAINED:
        with tempfile.TemporaryDirectory() as folder:
            RECORD["training"][name] = losses_of(name, Path(folder))
        print(name, RECORD["training"][name][-1], flush=True)
    RECORD_FILE.write_text(json.dumps(RECORD) + "\n")
