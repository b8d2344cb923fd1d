"""Training in several processes gives what one process gives: real processes over gloo, started as users start them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_training import SMALL

ROOT = Path(__file__).parents[1]
LAUNCH = (sys.executable, "-m", "accelerate.commands.launch", "--config_file")
RUN = ("wandb.mode=disabled", "loop.steps=6", "loop.validate_every=3", "loop.checkpoint_every=3", *SMALL)


def command(folder: Path, target: str, source: Path, *more: str, launch: str | None = None) -> list[str]:
    start = [sys.executable] if launch is None else [*LAUNCH, str(ROOT / "configs" / "accelerate" / launch)]
    places = (f"hydra.run.dir={folder}", "name=run", f"target.name={target}", f"data.root={source}")
    return [*start, str(ROOT / "train" / "heads.py"), *places, *RUN, *more]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*args, **kwargs), env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def curve(folder: Path) -> tuple[list[float], list[dict[str, Any]]]:
    records = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    return [r["train"]["loss"] for r in records if "train" in r], [r["validation"] for r in records if "validation" in r]


def test_two_processes_give_the_curve_of_one(tiny_folder: str, source_root: Path, tmp_path: Path) -> None:
    distilled = ("train.distill.rows=16", "train.distill.prompt_tokens=8", "train.distill.new_tokens=40")
    run(tmp_path / "one", tiny_folder, source_root, *distilled)
    done = run(tmp_path / "two", tiny_folder, source_root, *distilled, launch="cpu_ddp.yaml")
    (one, validated), (two, validated_two) = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert len(one) == len(two) == 6  # one process alone writes
    assert two == pytest.approx(one, abs=1e-4)
    for a, b in zip(validated, validated_two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-4)
        assert b["greedy"]["positions"] == a["greedy"]["positions"]
        assert b["sampled"]["tau"] == pytest.approx(a["sampled"]["tau"], abs=1e-3)
    assert done.stdout.count("saved to") == 1
    assert torch.load(tmp_path / "two" / "state.pt", weights_only=True)["world"] == 2
    names = sorted(str(p.relative_to(tmp_path / "one")) for p in (tmp_path / "one" / "drafter").rglob("*"))
    assert names == sorted(str(p.relative_to(tmp_path / "two")) for p in (tmp_path / "two" / "drafter").rglob("*"))
    a, b = (load_file(tmp_path / name / "drafter" / "drafter.safetensors") for name in ("one", "two"))
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] - b[name]).abs().max() < 1e-3


@pytest.mark.parametrize("launch", [None, "cpu_ddp.yaml"])
def test_sigterm_saves_and_the_same_command_goes_on(
    launch: str | None, tiny_folder: str, source_root: Path, tmp_path: Path
) -> None:
    folder, steps = tmp_path / "cut", ("loop.steps=240", "loop.validate_every=120")
    started = subprocess.Popen(
        command(folder, tiny_folder, source_root, *steps, launch=launch),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (folder / "train.jsonl").exists() or not curve(folder)[0]:
        assert started.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    started.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    _, said = started.communicate(timeout=60)
    assert time.monotonic() - begun < 10
    assert started.returncode != 0
    assert "stopped by SIGTERM at step" in said and "Traceback" not in said.split("stopped by")[0]
    assert not (folder / "drafter").exists()
    assert len(curve(folder)[0]) < 240
    run(folder, tiny_folder, source_root, *steps, launch=launch)
    run(tmp_path / "whole", tiny_folder, source_root, *steps, launch=launch)
    (cut, _), (whole, _) = curve(folder), curve(tmp_path / "whole")
    assert cut == (whole if launch is None else pytest.approx(whole, abs=1e-6))
    if launch is None:
        for name in ("drafter.safetensors", "lora/head_0/adapter_model.safetensors"):
            assert (folder / "drafter" / name).read_bytes() == (tmp_path / "whole" / "drafter" / name).read_bytes()
        return
    done = run(folder, tiny_folder, source_root, "loop.steps=244")  # goes on in one process, with a line
    assert "resumed in 1 processes, begun in 2" in done.stdout
