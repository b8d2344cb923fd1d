"""The wheel, unpacked beside nothing of a clone: what travels in it, and that it works from any folder."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from selfspec.cli.commands import COMMANDS

ROOT = Path(__file__).parents[1]


def built(source: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    wheel = built(ROOT, folder)
    assert wheel.stat().st_size < 2e6
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def run(place: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """With the unpacked wheel in front of everything that is installed here."""
    env = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=env, timeout=200)


def test_what_travels(unpacked):
    own = unpacked / "selfspec"
    there = {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*") if path.is_file()}
    assert {path.relative_to(own / "configs") for path in (own / "configs").rglob("*") if path.is_file()} == there
    package = {path.relative_to(ROOT / "selfspec") for path in (ROOT / "selfspec").rglob("*") if path.is_file()}
    package = {path for path in package if path.parts[0] != "assets" and "__pycache__" not in path.parts}
    opened = {"py.typed", "page/page.html", "page/embedded.json", "engine/kernels/attention.cpp"}
    assert opened <= set(map(str, package))
    assert {str(path) for path in package if not (own / path).is_file()} == set()
    assert not (own / "assets").exists()
    commands = next(unpacked.glob("*.dist-info")) / "entry_points.txt"
    assert "selfspec = selfspec.cli.main:main" in commands.read_text()


SMALL = "logger=none loop.steps=2 loop.batch_size=1 train.length=32 train.prompts=2 train.new_tokens=8"
DATA = "data=text data.root=text data.validation_share=0.4"
MADE = f"{SMALL} {DATA} target.name=TARGET train.validation_rows=2 train.prompt_tokens=8"
ASKED = "logger=none engine=eager target=TARGET {0}.questions=source {0}.prompts=1 {0}.prompt_tokens=8 "
ASKED += f"{{0}}.max_new_tokens=6 {DATA}"
COMPARED = ASKED.format("compare").replace("compare.questions=source", "compare.questions=[source]")
SHORT = {  # a short call of every command
    "train": f"name=mine {MADE}",
    "distill": f"name=texts {MADE} train.distill.rows=1 train.distill.new_tokens=8 train.distill.prompt_tokens=4",
    "target": f"name=target logger=none {DATA} data.pattern=*.txt loop.steps=2 loop.batch_size=1 pretrain.length=32 "
    "pretrain.model.vocab_size=300 pretrain.model.num_hidden_layers=1 pretrain.model.hidden_size=48",
    "complete": "import --target TARGET --drafter runs/mine --max-new-tokens 4 --engine eager",
    "decode": f"drafter=runs/mine {ASKED.format('decode')} decode.traces=1 hydra.run.dir=runs/point",
    "show": f"drafter=runs/mine {ASKED.format('show')}",
    "audit": f"drafter=runs/mine {ASKED.format('audit')}",
    "calibrate": f"drafter=runs/mine name=again {ASKED.format('calibrate')}",
    "compare": f"name=compare compare.drafters=[runs/mine] compare.groups=null {COMPARED} "
    "compare.nodes=[4] compare.methods=[hf_generate]",
    "limits": "target=TARGET logger=none limits.drafters=[] limits.sizes=[1,2] limits.rounds=3",
    "report": "sweep=runs",
    "page": "page.runs=[runs/point]",
    "compile": "--target TARGET --drafter prompt_lookup --nodes 4 --temperatures 0",
    "export": "runs/mine --to medusa --out exported",
    "push": "runs/mine user/mine --dry-run card",
    "serve-target": "TARGET --plain",
}
SERVED = {"states", "acceptance"}  # need a server or what one wrote: see test_states.py


def test_every_command_has_a_short_call():
    assert set(SHORT) == set(COMMANDS) - SERVED


@pytest.mark.slow
def test_every_command_from_another_folder(unpacked, tmp_path, tiny_folder):
    """Composes from the wheel's own configs, and says how to get the embedded models, which it does not hold."""
    (tmp_path / "text").mkdir()
    for i in range(3):
        (tmp_path / "text" / f"{i}.txt").write_text(f"The number of this line is {i}.\n" * 40)
    calls = {name: ["selfspec", name, *words.replace("TARGET", tiny_folder).split()] for name, words in SHORT.items()}
    code = f"""
import sys, selfspec
from selfspec.cli import main as cli
assert selfspec.__file__.startswith({str(unpacked)!r}), selfspec.__file__
for name, words in {calls!r}.items():
    sys.argv = words
    try:
        cli.main()
    except SystemExit as error:
        print(name, "left with", error.code)
try:
    selfspec.load("tiny-medusa")
except FileNotFoundError as error:
    print(error)
"""
    done = run(unpacked, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert "left with" not in done.stdout, done.stdout + done.stderr
    assert "'tiny-medusa' is one of the embedded models, which are not installed: pip install" in done.stdout
    for made in ("runs/mine/drafter", "runs/target/target", "page.html", "exported", "card", "runs/point/table.md"):
        assert (tmp_path / made).exists(), made
    assert not (tmp_path / "multirun").exists()


@pytest.mark.slow
def test_the_embedded_models_are_a_wheel_of_their_own(unpacked, tmp_path):
    wheel = built(ROOT / "selfspec" / "assets", tmp_path)
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    env = {**os.environ, "PYTHONPATH": f"{unpacked}{os.pathsep}{tmp_path / 'site'}"}
    call = [sys.executable, "-m", "selfspec", "complete", "import os", "--max-new-tokens", "8"]
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("import os")


def test_from_the_folder_above_a_clone(tmp_path):
    """There the clone's own folder has the package's name."""
    (tmp_path / "selfspec").symlink_to(ROOT, target_is_directory=True)
    code = "import selfspec; print(selfspec.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
