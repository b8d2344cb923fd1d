"""The wheel, unpacked beside nothing of a clone: what travels in it, and that it works from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def built(source: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    wheel = built(ROOT, folder)
    assert wheel.stat().st_size < 2e6
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def run(place: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """With the unpacked wheel in front of everything that is installed here."""
    env = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=env, timeout=200)


def test_what_travels(unpacked: Path) -> None:
    own = unpacked / "selfspec"
    there = {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*") if path.is_file()}
    assert {path.relative_to(own / "configs") for path in (own / "configs").rglob("*") if path.is_file()} == there
    assert (own / "py.typed").is_file()
    assert (own / "engine" / "kernels" / "attention.cpp").is_file()
    assert not (own / "assets").exists()
    commands = next(unpacked.glob("*.dist-info")) / "entry_points.txt"
    assert "selfspec = selfspec.cli.main:main" in commands.read_text()


@pytest.mark.slow
def test_training_and_inference_from_another_folder(unpacked: Path, tmp_path: Path, tiny_folder: str) -> None:
    """Composes from the wheel's own configs, and says how to get the embedded models, which it does not hold."""
    (tmp_path / "text").mkdir()
    for i in range(3):
        (tmp_path / "text" / f"{i}.txt").write_text(f"The number of this line is {i}.\n" * 40)
    small = "loop.steps=2 loop.batch_size=1 train.length=32 train.prompts=2 train.new_tokens=8 train.validation_rows=2"
    data = f"target.name={tiny_folder} data=text data.root=text data.validation_share=0.4 train.prompt_tokens=8"
    code = f"""
import sys, selfspec
from selfspec.cli import main as cli
assert selfspec.__file__.startswith({str(unpacked)!r}), selfspec.__file__
sys.argv = "selfspec train name=mine logger=none {small} {data}".split()
cli.main()
print(selfspec.load("runs/mine").generate([5, 9, 2], 4))
try:
    selfspec.load("tiny-medusa")
except FileNotFoundError as error:
    print(error)
"""
    done = run(unpacked, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert "4 tokens in" in done.stdout
    assert "'tiny-medusa' is one of the embedded models, which are not installed: pip install" in done.stdout
    assert not (tmp_path / "multirun").exists()


@pytest.mark.slow
def test_the_embedded_models_are_a_wheel_of_their_own(unpacked: Path, tmp_path: Path) -> None:
    wheel = built(ROOT / "selfspec" / "assets", tmp_path)
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    env = {**os.environ, "PYTHONPATH": f"{unpacked}{os.pathsep}{tmp_path / 'site'}"}
    call = [sys.executable, "-m", "selfspec", "complete", "import os", "--max-new-tokens", "8"]
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("import os")


def test_from_the_folder_above_a_clone(tmp_path: Path) -> None:
    """There the clone's own folder has the package's name."""
    (tmp_path / "selfspec").symlink_to(ROOT, target_is_directory=True)
    code = "import selfspec; print(selfspec.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
