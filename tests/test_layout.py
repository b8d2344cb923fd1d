"""Where code lives and which way it is imported, held by reading the source."""

import ast
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "selfspec"
FILES = {p.relative_to(PACKAGE).as_posix(): p.read_text() for p in sorted(PACKAGE.rglob("*.py"))}
# Rooms from the ground up: a file imports from its own room or from rooms above it in this list, which lie below it.
ROOMS = (
    ("utils/", "data/"),
    ("engine/",),
    ("core/",),
    ("drafters/", "budget/"),
    ("checkpoints/", "trace.py", "hf_generate.py", "encode.py", "detokenize.py", "output.py"),
    ("request.py",),
    ("api.py",),
    ("training/", "integrations/"),
    ("evaluation/", "page/"),
    ("cli/", "served.py"),
    ("__init__.py", "__main__.py"),
)
APART = {"core/": "data/", "data/": "core/", "drafters/": "budget/", "budget/": "drafters/"}  # on one floor, not linked


@cache
def imports(source: str) -> set[str]:
    """All modules that a file imports, inside functions too; `from selfspec.core import x` counts as both."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def inner(source: str, files: dict[str, str]) -> set[str]:
    """The package's files that a file imports."""
    names = {name.removeprefix("selfspec.").replace(".", "/") + ".py" for name in imports(source)}
    return names & files.keys()


def floor(name: str) -> int:
    return next(i for i, rooms in enumerate(ROOMS) for room in rooms if name == room or name.startswith(room))


def faults(files: dict[str, str]) -> list[str]:
    """Imports against the direction, and files that import each other in a circle."""
    arrows = {name: inner(source, files) - {name} for name, source in files.items()}
    found = []
    for name, targets in arrows.items():
        room = name.split("/")[0] + "/"
        for other in targets:
            if floor(other) > floor(name) or other.startswith(APART.get(room, "-")):
                found.append(f"{name} imports {other}")

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            found.append("circle: " + " -> ".join(path[path.index(name) :]))
            return
        if name not in done:
            for other in sorted(arrows[name]):
                visit(other, (*path, name))
            done.add(name)

    done: set[str] = set()
    for name in files:
        visit(name, ())
    return found


def importers(package: str) -> set[str]:
    return {
        name
        for name, source in FILES.items()
        if any(module == package or module.startswith(package + ".") for module in imports(source))
    }


def test_arrows_point_one_way_and_in_no_circle():
    assert faults(FILES) == []


def test_the_core_imports_torch_and_transformers_alone():
    for name in (n for n in FILES if n.startswith("core/")):
        allowed = {"torch", "transformers", "selfspec", *sys.stdlib_module_names}
        allowed |= {"psutil"} if name == "core/memory.py" else set()  # which tells how much memory is free
        outside = {module.split(".")[0] for module in imports(FILES[name])} - allowed
        assert not outside, f"{name} imports {outside}"


def test_each_heavy_library_lives_in_few_files():
    assert importers("wandb") == {"utils/tracking.py"}
    assert importers("tqdm") == {"utils/progress.py"}
    assert importers("matplotlib") == {"evaluation/plots.py"}
    assert importers("peft") == {"checkpoints/drafter_folder.py", "drafters/parts/views.py"}
    training = {f"training/{name}.py" for name in ("loop", "step", "train_drafter", "pretrain", "shard")}
    assert importers("accelerate") == {"utils/tracking.py", "checkpoints/target_parts.py", *training}
    assert importers("httpx") == {"utils/openai_client.py"}
    assert importers("hydra") | importers("omegaconf") == {
        f"cli/{name}.py"
        for name in (
            *("arguments", "config", "errors", "launch", "precheck"),
            *("run_folders", "training_runs", "evaluation_runs", "compare_runs", "reports"),
        )
    }
    assert importers("datasets") == {"data/records.py"}
    assert importers("transformers.cache_utils") == {"core/pass_cache.py"}


def test_instantiate_is_called_in_one_file():
    sources = {**FILES, **{p.name: p.read_text() for f in ("train", "eval") for p in (ROOT / f).glob("*.py")}}
    assert {name for name, source in sources.items() if "instantiate(" in source} == {"cli/training_runs.py"}


def test_drafters_do_not_know_each_other():
    kinds = {p.stem for p in (PACKAGE / "drafters").glob("*.py")} - {"__init__", "base", "registry"}
    for name, source in FILES.items():
        known = {n.rsplit("/", 1)[-1].removesuffix(".py") for n in inner(source, FILES) if n.count("/") == 1}
        # Which puts hybrids together, and knows what is shipped with a target.
        known &= kinds if name != "checkpoints/loading.py" else kinds - {"hybrid", "mtp"}
        # Each form is of one kind.
        if name.startswith(("checkpoints/formats/", "integrations/engines.py", "integrations/export.py")):
            known -= {"block", "eagle3", "medusa", "mask", "mtp"}
        assert not known, f"{name} imports {known}"


def test_nothing_is_copied_in_decoding():
    assert not [name for name, source in FILES.items() if "copy.copy(" in source]
    copying = {name for name, source in FILES.items() if "copy.deepcopy(" in source}
    # Views; a model's own cache, which chains go back to; norms that begin as the target's; a config, at loading.
    assert copying == {"core/support.py", "core/chains.py", "drafters/mtp.py", "checkpoints/cast.py"}


def test_entry_points_are_scripts_with_safe_names():
    for folder in ("train", "eval"):
        names = {p.stem for p in (ROOT / folder).glob("*.py")}
        assert "__init__" not in names
        assert not names & {"hydra", "peft", "datasets", "wandb", "torch", "transformers", "accelerate"}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
