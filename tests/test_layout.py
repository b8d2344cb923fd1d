"""The directions of imports and the size of the core, held by reading the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "selfspec"
CORE = ("tree", "sampling", "verify", "cache", "target", "generate")
HELPERS = ("stats", "options", "prefix", "families", "fingerprint", "memory")  # what the core leans on
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def importers(package: str) -> set[str]:
    return {
        p.relative_to(PACKAGE).as_posix()
        for p in FILES
        if any(name == package or name.startswith(package + ".") for name in imports(p))
    }


def test_core_stays_small() -> None:
    assert sum(len((PACKAGE / f"{name}.py").read_text().splitlines()) for name in CORE) < 900


@pytest.mark.parametrize("name", [*CORE, *HELPERS])
def test_core_imports_torch_and_transformers_alone(name: str) -> None:
    allowed = {"torch", "transformers", *sys.stdlib_module_names} | ({"psutil"} if name == "memory" else set())
    inner = {f"selfspec.{other}" for other in (*CORE, *HELPERS)}
    for module in imports(PACKAGE / f"{name}.py"):
        assert module in inner or module.split(".")[0] in allowed, f"{name} imports {module}"


def test_each_heavy_library_lives_in_few_files() -> None:
    assert importers("wandb") == {"log.py"}
    assert importers("matplotlib") == {"evaluation/plots.py"}
    assert importers("peft") == {"checkpoint.py", "views.py"}
    assert importers("accelerate") == {"training/loop.py", "training/heads.py", "training/pretrain.py"}
    assert importers("hydra") | importers("omegaconf") == {"build.py", "config.py"}
    assert importers("transformers.cache_utils") == {"cache.py"}


def test_instantiate_is_called_in_build_alone() -> None:
    sources = [*FILES, *(ROOT / "train").glob("*.py"), *(ROOT / "eval").glob("*.py")]
    assert {p.name for p in sources if "instantiate(" in p.read_text()} == {"build.py"}


def test_drafters_do_not_know_each_other_and_evaluation_knows_none() -> None:
    drafters = {p.stem for p in (PACKAGE / "drafters").glob("*.py")} - {"__init__", "base"}
    for path in FILES:
        named = {n.rsplit(".", 1)[-1] for n in imports(path) if n.startswith("selfspec.drafters.")} & drafters
        assert not named, f"{path} imports {named}"
    for path in (PACKAGE / "evaluation").glob("*.py"):
        assert not any(re.search(rf"\b{name}\b", path.read_text()) for name in drafters), path


def test_entry_points_are_scripts_with_safe_names() -> None:
    for folder in ("train", "eval"):
        names = {p.stem for p in (ROOT / folder).glob("*.py")}
        assert "__init__" not in names
        assert not names & {"hydra", "peft", "datasets", "wandb", "torch", "transformers", "accelerate"}


def test_importing_selfspec_is_light() -> None:
    code = "import sys, selfspec; assert not {'torch', 'transformers', 'wandb', 'hydra'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_drafter_has_a_config() -> None:
    drafters = {p.stem for p in (PACKAGE / "drafters").glob("*.py")} - {"__init__", "base"}
    assert {p.stem for p in (ROOT / "configs" / "drafter").glob("*.yaml")} == drafters
