"""Training in several processes gives what one process gives: real processes over gloo, started as users start them."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_training import SMALL, small
from torch import nn

from selfspec.cli.training_runs import run_training
from selfspec.training import shard

ROOT = Path(__file__).parents[1]
LAUNCH = (sys.executable, "-m", "accelerate.commands.launch", "--config_file")
RUN = ("wandb.mode=disabled", "loop.steps=6", "loop.validate_every=3", "loop.checkpoint_every=3")


def command(folder: Path, target: str, source: Path, *more: str, launch: str | None = None) -> list[str]:
    start = [sys.executable] if launch is None else [*LAUNCH, str(ROOT / "configs" / "accelerate" / launch)]
    places = (f"hydra.run.dir={folder}", "name=run", f"target.name={target}", f"data.root={source}")
    other = any(setting.startswith("drafter=") for setting in more)
    settings = [*RUN, *(setting for setting in SMALL if not (other and setting.startswith("drafter.")))]
    return [*start, str(ROOT / "train" / "heads.py"), *places, *settings, *more]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*args, **kwargs), env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def curve(folder: Path) -> tuple[list[float], list[dict[str, Any]]]:
    records = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    return [r["train"]["loss"] for r in records if "train" in r], [
        r["validation"] for r in records if "validation" in r
    ]


def test_two_processes_give_the_curve_of_one(tiny_folder, source_root, tmp_path):
    distilled = ("train.distill.rows=16", "train.distill.prompt_tokens=8", "train.distill.new_tokens=40")
    check_curves(tmp_path, tiny_folder, source_root, ("cpu_ddp",), *distilled)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["medusa", "mask", "sequential", "feature", "early_exit"])
def test_so_does_every_drafter(drafter, tiny_folder, source_root, tmp_path):
    more = () if drafter == "medusa" else (f"drafter={drafter}",)
    check_curves(tmp_path, tiny_folder, source_root, ("cpu_ddp", "cpu_fsdp2"), *more)


def check_curves(tmp_path: Path, target: str, source: Path, launches: tuple[str, ...], *more: str) -> None:
    run_training(small("run", target, source, *RUN, *more), tmp_path / "one")
    (one, validated), folder = curve(tmp_path / "one"), tmp_path / "one" / "drafter"
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))
    weights = load_file(folder / "drafter.safetensors")
    for launch in launches:
        done = run(tmp_path / launch, target, source, *more, launch=f"{launch}.yaml")
        (two, validated_two), own = curve(tmp_path / launch), tmp_path / launch / "drafter"
        assert len(one) == len(two) == 6  # one process alone writes
        assert two == pytest.approx(one, abs=1e-4)
        for a, b in zip(validated, validated_two, strict=True):
            assert b["loss"] == pytest.approx(a["loss"], abs=1e-4)
            assert b["greedy"]["positions"] == a["greedy"]["positions"]
            assert b["sampled"]["tau"] == pytest.approx(a["sampled"]["tau"], abs=1e-2)
        assert done.stdout.count("saved to") == 1
        assert torch.load(tmp_path / launch / "state.pt", weights_only=True)["world"] == 2
        assert names == sorted(str(p.relative_to(own)) for p in own.rglob("*"))
        again = load_file(own / "drafter.safetensors")
        assert again.keys() == weights.keys()
        for name in weights:
            assert (again[name] - weights[name]).abs().max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("launch", [None, pytest.param("cpu_ddp.yaml", marks=pytest.mark.slow)])
def test_a_signal_saves_and_the_same_command_goes_on(launch, tiny_folder, source_root, tmp_path):
    sent = signal.SIGINT if launch is None else signal.SIGTERM
    folder, steps = tmp_path / "cut", ("loop.steps=160", "loop.validate_every=80")
    started = subprocess.Popen(
        command(folder, tiny_folder, source_root, *steps, launch=launch),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (folder / "train.jsonl").exists() or not curve(folder)[0]:
        assert started.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    started.send_signal(sent)
    begun = time.monotonic()
    _, said = started.communicate(timeout=60)
    assert time.monotonic() - begun < 10
    assert started.returncode != 0
    assert f"stopped by {sent.name} at step" in said
    if launch is None:
        assert started.returncode == 130
        lines = said.splitlines()
        typed = lines[next(i for i, line in enumerate(lines) if "stopped by" in line) + 1]
        assert shlex.split(typed)[1:] == command(folder, tiny_folder, source_root, *steps)[1:]
    assert "Traceback" not in said.split("stopped by")[0]
    assert not (folder / "drafter").exists()
    assert len(curve(folder)[0]) < 160
    run(folder, tiny_folder, source_root, *steps, launch=launch)
    run(tmp_path / "whole", tiny_folder, source_root, *steps, launch=launch)
    (cut, _), (whole, _) = curve(folder), curve(tmp_path / "whole")
    assert cut == (whole if launch is None else pytest.approx(whole, abs=1e-6))
    if launch is None:
        for name in ("drafter.safetensors", "lora/head_0/adapter_model.safetensors"):
            assert (folder / "drafter" / name).read_bytes() == (tmp_path / "whole" / "drafter" / name).read_bytes()
        return
    done = run(folder, tiny_folder, source_root, "loop.steps=164")  # goes on in one process, with a line
    assert "resumed in 1 processes, begun in 2" in done.stdout


def test_a_buffer_may_stand_where_a_gathered_weight_was():
    """As the rows of a draft vocabulary do."""
    layer = nn.Linear(3, 4)
    layer.__class__ = shard._gathering(nn.Linear, ("weight",))
    del layer.weight
    layer.register_buffer("weight", torch.ones(4, 3), persistent=False)
    assert torch.equal(layer.weight, torch.ones(4, 3))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["medusa", "mask", "sequential", "feature", "early_exit", "ddp"])
def test_four_kills_at_random_moments_lose_nothing(drafter, tiny_folder, source_root, tmp_path):
    """Twenty kills of one process in all; what is left of a killed run ends in the bytes of one that was not."""
    launch = "cpu_ddp.yaml" if drafter == "ddp" else None
    settings = ("loop.steps=60", "loop.validate_every=20", "loop.checkpoint_every=5", "train.distill.rows=128")
    settings += ("train.distill.prompt_tokens=8", "train.distill.new_tokens=40")
    settings += () if drafter in ("ddp", "medusa") else (f"drafter={drafter}",)
    begun = time.monotonic()
    run(tmp_path / "whole", tiny_folder, source_root, *settings, launch=launch)
    took, dice = time.monotonic() - begun, random.Random(drafter)
    folder, kills = tmp_path / "killed", 0
    while kills < 4:
        started = subprocess.Popen(
            command(folder, tiny_folder, source_root, *settings, launch=launch),
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            started.wait(dice.uniform(0.3, 0.95) * took)
        except subprocess.TimeoutExpired:
            subprocess.run(["pkill", "-KILL", "-f", f"hydra.run.dir={folder}"], check=True)  # launcher and workers
            kills += 1
        started.wait()
    run(folder, tiny_folder, source_root, *settings, launch=launch)
    (cut, _), (whole, _) = curve(folder), curve(tmp_path / "whole")
    assert len(cut) == 60
    if launch is not None:
        assert cut == pytest.approx(whole, abs=1e-5)
        return
    assert cut == whole
    made = list((tmp_path / "whole" / "drafter").rglob("*.safetensors"))
    assert made
    for path in made:
        assert path.read_bytes() == (folder / "drafter" / path.relative_to(tmp_path / "whole" / "drafter")).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "submitit_local"])
def test_a_killed_sweep_goes_on_with_what_is_missing(launcher, tiny_folder, source_root, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    folder = tmp_path / "runs" / "sweep"
    own = command(folder, tiny_folder, source_root, f"hydra.sweep.dir={folder}", "loop.seed=1,2,3")
    own.insert(2, "-m")  # behind the script
    started = subprocess.Popen(
        [*own, f"hydra/launcher={launcher}"], env=environment(), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 200
    while not list(folder.glob("*/drafter")):
        assert started.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started.kill()
    subprocess.run(["pkill", "-KILL", "-f", str(tmp_path)], check=False)
    time.sleep(1)
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("*/drafter/drafter.json")}
    assert kept
    subprocess.run([*own, "hydra/launcher=local"], env=environment(), cwd=tmp_path, check=True, timeout=300)
    names = sorted(path.parent.name for path in folder.glob("*/drafter"))
    assert len(names) == 3
    assert all(f"loop.seed={seed}" in name for seed, name in zip((1, 2, 3), names, strict=True))
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())  # what was finished is left as it is
    assert not (tmp_path / "multirun").exists()
