"""`loop.precision=auto` and `target.dtype=auto`: what a training takes on processors of two kinds."""

from pathlib import Path

import pytest
import torch
from conftest import compose_config
from omegaconf import OmegaConf

from selfspec.cli import training_runs as runs
from selfspec.cli.config import TrainRun
from selfspec.training.resources import bfloat16_is_faster


def chosen(folder: Path, *overrides: str) -> tuple[str, str]:
    config = compose_config("train", "name=precision", "target.name=tiny-target", "target.device=cpu", *overrides)
    run, config = runs.settled(TrainRun, config, folder)
    assert (run.loop.precision, run.target.dtype) == (config.loop.precision, config.target.dtype)
    return run.loop.precision, run.target.dtype


@pytest.mark.parametrize(
    ("faster", "overrides", "wanted"),
    [
        (True, [], ("bf16", "auto")),
        (False, [], ("no", "float32")),
        (False, ["target.dtype=bfloat16"], ("no", "bfloat16")),
        (True, ["loop.precision=no"], ("no", "auto")),
        (False, ["loop.precision=bf16"], ("bf16", "auto")),
    ],
)
def test_choice(faster, overrides, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "bfloat16_is_faster", lambda device: faster)
    assert chosen(tmp_path, *overrides) == wanted


def test_a_begun_run_keeps_its_choice(tmp_path, monkeypatch):
    """It may go on on another machine."""
    monkeypatch.setattr(runs, "bfloat16_is_faster", lambda device: True)
    saved = OmegaConf.create({"loop": {"precision": "no"}, "target": {"dtype": "float32"}})
    OmegaConf.save(saved, tmp_path / "config.yaml")
    assert chosen(tmp_path) == ("no", "float32")
    OmegaConf.save(
        OmegaConf.create({"loop": {"precision": "bf16"}, "target": {"dtype": "auto"}}), tmp_path / "config.yaml"
    )
    assert chosen(tmp_path) == ("bf16", "auto")
    saved.target.dtype = "bfloat16"
    OmegaConf.save(saved, tmp_path / "config.yaml")
    assert chosen(tmp_path) == ("no", "bfloat16")
    (tmp_path / "config.yaml").write_text("- [damaged")
    assert chosen(tmp_path) == ("bf16", "auto")


def test_bfloat16_is_measured(monkeypatch):
    """Slower products of one kind decide, whichever it is."""
    times = {torch.bfloat16: 1.0, torch.float32: 2.0}
    now = [0.0]
    product = torch.Tensor.__matmul__

    def slow(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        now[0] += times[a.dtype]
        return product(a[:1], b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", slow)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    assert bfloat16_is_faster("cpu")
    times[torch.float32] = 0.5
    assert not bfloat16_is_faster("cpu")
