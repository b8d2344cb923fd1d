"""How long a process takes from its start to its first text, and how much memory: eager, compiled the first time, and
compiled with what the first time left on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from selfspec.utils.files import Figures, cache_folder

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
