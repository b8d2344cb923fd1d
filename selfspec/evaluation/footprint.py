"""What a drafter takes beside the target: parameters, bytes on disk and in memory, and training; and how long a process
takes from its start to its first text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from selfspec.api import Spec
from selfspec.checkpoints.embedded import resolve
from selfspec.checkpoints.find import drafter_folder, member_names
from selfspec.checkpoints.loading import members_of, untrained
from selfspec.utils.files import Figures, cache_folder, read_json


def price(name: str, spec: Spec) -> Figures:
    """Of a drafter by its name, all members of a hybrid together."""
    figures: Figures = {"parameters": 0, "disk": 0, "memory": held_bytes(spec.drafter, spec.target.model)}
    members = members_of(name, spec.drafter)
    for part in member_names(name):
        figures["parameters"] += sum(p.numel() for p in members[part].trained().values())
        if untrained(part) is None:
            home = drafter_folder(part)
            figures["disk"] += _disk(home)
            for key, value in (_training(home) or {}).items():
                figures.setdefault("training", {}).setdefault(key, 0)
                figures["training"][key] += value
    return figures


def price_of_model(name: str, model: nn.Module) -> Figures:
    """Of a separate draft model by its name."""
    home = Path(resolve(name))
    parameters = list(model.parameters())
    return {
        "parameters": sum(p.numel() for p in parameters),
        "disk": _disk(home) if home.is_dir() else 0,
        "memory": sum(p.numel() * p.element_size() for p in parameters),
        "training": _training(home),
    }


def _training(home: Path) -> dict[str, float] | None:
    note = home / "training.json"
    return read_json(note) if note.is_file() else None


def _disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def held_bytes(part: nn.Module, beside: nn.Module) -> int:
    """Bytes of tensors that `part` holds beyond those of `beside`, whatever it laid out for decoding included."""
    others = {t.untyped_storage().data_ptr() for t in (*beside.parameters(), *beside.buffers())}
    sizes: dict[int, int] = {}
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if id(value) in seen or value is beside:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in others:
                sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            for item in list(value.values()):
                visit(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif isinstance(value, nn.Module) or type(value).__module__.startswith("selfspec."):
            for name, item in list(getattr(value, "__dict__", {}).items()):
                if name != "model":
                    visit(item)

    visit(part)
    return sum(sizes.values())


STARTS = {"eager": "eager", "compiled, nothing kept": "compiled", "compiled, kept": "compiled"}
_PROGRAM = """
import json, resource, sys, time
begin = time.perf_counter()
import selfspec
drafter, target, dtype, device, engine = json.loads(sys.argv[1])
spec = selfspec.load(drafter, target, dtype, device, engine=engine)
loaded = time.perf_counter()
spec.generate([[5, 9, 2, 7, 7, 1]], 32, temperature=0.0, nodes=8)
first = time.perf_counter()
spec.generate([[5, 9, 2, 7, 7, 1]], 32, temperature=0.0, nodes=8)
again = time.perf_counter()
engine = spec.target.engine
figures = {"load": loaded - begin, "first": first - loaded, "again": again - first}
try:  # where there is none, ru_maxrss, which begins at what the process that started this one held
    figures["megabytes"] = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
except OSError:
    figures["megabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
figures["functions"] = len(engine.compiled)
figures["compiling"] = sum(took for _, took, _ in engine.made)
print(json.dumps(figures))
"""


def start_costs(drafter: str, target: str, dtype: str, device: str | None) -> dict[str, Figures]:
    """Of each of STARTS, measured in a process of its own: seconds to load, of a first and of a second call of 32
    tokens, seconds of them spent on compiling, functions compiled, and the peak of memory in MB.

    Raises ChildProcessError with what a process said that failed.
    """
    costs = {}
    with tempfile.TemporaryDirectory() as top:
        for name, engine in STARTS.items():
            folder = Path(top, engine)  # what eager passes keep would help the first compiled ones
            if not folder.is_dir() and (targets := cache_folder() / "targets").is_dir():
                folder.mkdir()
                (folder / "targets").symlink_to(targets.resolve())  # converted once, which is no part of a start
            arguments = json.dumps([drafter, target, dtype, device, engine])
            done = subprocess.run(
                [sys.executable, "-c", _PROGRAM, arguments],
                env={**os.environ, "SELFSPEC_CACHE": str(folder), "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise ChildProcessError(f"a process that starts {engine} failed: {done.stderr.strip()[-2000:]}")
            costs[name] = json.loads(done.stdout.splitlines()[-1])
    return costs
