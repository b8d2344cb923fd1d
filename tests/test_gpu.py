"""What `make gpu` runs: every part is a command that its script takes, on a GPU and on the CPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import compose_config
from omegaconf import OmegaConf

ROOT = Path(__file__).parents[1]
CONFIGS = {"limits": "limits", "compare": "compare", "audit": "audit", "heads": "train"}


@pytest.fixture(scope="module")
def gpu() -> Any:
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "eval" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_part_is_a_command_that_its_script_takes(gpu: Any, tmp_path: Path, device: str) -> None:
    for name in gpu.PARTS:
        script, *arguments = gpu.command(name, tmp_path, device)
        given = [argument for argument in arguments if not argument.startswith("hydra.") and argument != "-m"]
        if "-m" in arguments:
            given = [argument.split(",")[0] if "[" not in argument else argument for argument in given]
        config = compose_config(CONFIGS[Path(script).stem], *given)
        OmegaConf.to_object(config)  # the schemas check their values
        assert (config.target.device if "train" in script else config.device) == device
        assert len(set(given)) == len(given)


@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_runs_the_same(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    before = (ROOT / "notebooks" / "RESULTS.md").read_text()
    done = subprocess.run(
        [sys.executable, "eval/gpu.py", f"hydra.run.dir={tmp_path / 'gpu'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU here" in done.stdout
    found = (tmp_path / "gpu" / "gpu.md").read_text()
    assert ": failed" not in found
    assert "identical" in found
    assert "Llama of 1B" in found
    assert (ROOT / "notebooks" / "RESULTS.md").read_text() == before
