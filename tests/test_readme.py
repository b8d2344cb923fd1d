"""What README shows is run: the drafter of "Add a drafter", from its file to a benchmark."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import compose_config

import selfspec
import selfspec.drafters
from selfspec.measures import run_decode
from selfspec.runs import run_training

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def bigram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file of README's drafter, in place as if it lay in selfspec/drafters/."""
    source = next(block for block in BLOCKS if "class Bigram(" in block)
    (tmp_path / "drafters").mkdir()
    (tmp_path / "drafters" / "bigram.py").write_text(source)
    monkeypatch.setattr(selfspec.drafters, "__path__", [*selfspec.drafters.__path__, str(tmp_path / "drafters")])
    importlib.invalidate_caches()
    yield source
    sys.modules.pop("selfspec.drafters.bigram", None)


def test_a_drafter_of_forty_lines(bigram: str, tiny_folder: str, source_root: Path, tmp_path: Path) -> None:
    assert len(bigram.splitlines()) <= 40
    small = """train.length=48 train.prompts=2 train.prompt_tokens=8 train.new_tokens=16 train.validation_rows=4
    train.lr=0.05 loop.steps=30 loop.batch_size=4 loop.precision=no loop.validate_every=10 loop.log_every=1"""
    names = [f"target.name={tiny_folder}", f"data.root={source_root}"]
    config = compose_config("train", "name=x", "drafter=bigram", "drafter.rank=8", *names, *small.split())
    figures = run_training(config, tmp_path / "run")
    losses = [json.loads(line) for line in (tmp_path / "run" / "train.jsonl").read_text().splitlines()]
    falling = [record["train"]["loss"] for record in losses if "train" in record]
    assert sum(falling[-5:]) < 0.9 * sum(falling[:5])
    assert figures["target_hash"]

    spec = selfspec.load(str(tmp_path / "run"), dtype="float32")
    assert (spec.drafter.kind, spec.drafter.config.rank) == ("bigram", 8)  # type: ignore[attr-defined]
    for temperature in (0.0, 1.0):
        fast = spec.generate(["def f():", "import os"], 24, temperature, seed=1)
        assert fast.token_ids == spec.autoregressive(["def f():", "import os"], 24, temperature, seed=1).token_ids
        alone = spec.generate(["def f():", "import os"], 24, temperature, seed=1, nodes=1)
        assert alone.token_ids == fast.token_ids
        assert alone.stats.acceptance_length == 1
    both = selfspec.load(f"{tmp_path / 'run'}+prompt_lookup")
    assert len(both.generate([[5, 9, 2]], 8).token_ids[0]) == 8

    measured = "decode.prompts=2 decode.prompt_tokens=8 decode.max_new_tokens=8 dtype=float32 tree.nodes=6"
    config = compose_config("eval", f"drafter={tmp_path / 'run'}", f"data.root={source_root}", *measured.split())
    (tmp_path / "point").mkdir()
    point = run_decode(config, tmp_path / "point", "bigram")
    assert point["identical"]["autoregressive"] == {"rows": 2, "of": 2}
    assert point["speculative"]["acceptance_length"] >= 1


def test_the_first_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    exec(compile(BLOCKS[0], "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 2
