"""Other engines on the same model: llama.cpp and OpenVINO GenAI, each in a process of its own.

They live in an environment of their own (`make .venv-peers/.ready`), since they need other versions of the packages
that are used here. A process waits while others decode. What an engine can not run stays a blank.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from selfspec.checkpoints.named import gguf_file
from selfspec.core.generate import autoregressive
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.core.target import Target
from selfspec.utils.files import Figures
from selfspec.utils.progress import progress

PYTHON = Path(".venv-peers/bin/python")
_LLAMA = """
import ctypes, json, os, sys, time
import llama_cpp
source, folder, threads, name = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
ftype = {"bf16": 32, "Q8_0": 7}.get(name)
path = source if ftype is None else f"{folder}/{name}.gguf"
if ftype is not None and not os.path.exists(path):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = ftype, True, threads
    if llama_cpp.llama_model_quantize(source.encode(), f"{path}.tmp".encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp can not write {path}")
    os.replace(f"{path}.tmp", path)
model = llama_cpp.Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
system = llama_cpp.llama_print_system_info().decode().strip()
print(json.dumps({"version": f"llama-cpp-python {llama_cpp.__version__}: {system}"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    model.reset()
    made, start = model.generate(request["tokens"], temp=0.0, repeat_penalty=1.0), None
    for count, _ in enumerate(made):
        start = start or time.perf_counter()  # behind the prompt
        if count == request["count"] - 1:
            break
    print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)
"""
_OPENVINO = """
import json, os, shutil, subprocess, sys
import numpy, openvino, openvino_genai
source, folder, threads, name = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
path = f"{folder}/openvino_{name}"
if not os.path.exists(path):
    shutil.rmtree(f"{path}.tmp", ignore_errors=True)
    command = os.path.join(os.path.dirname(sys.executable), "optimum-cli"), "export", "openvino", "--model", source
    size = ["--group-size", "64"] if name == "int4" else []
    more = "--task", "text-generation-with-past", "--weight-format", name, *size, f"{path}.tmp"
    subprocess.run([*command, *more], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.replace(f"{path}.tmp", path)
pipe = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)
print(json.dumps({"version": f"OpenVINO GenAI {openvino_genai.__version__}"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    ids = numpy.array([request["tokens"]])
    given = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = request["count"], True, False
    metrics = pipe.generate(given, config).perf_metrics
    print(json.dumps({"seconds": (metrics.get_generate_duration().mean - metrics.get_ttft().mean) / 1000}), flush=True)
"""


class Peer:
    """One model in one engine. version: what the engine says of itself; failed: whether its process ended."""

    def __init__(self, program: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [str(PYTHON), "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.failed = False
        self.version = str(self._line().get("version", ""))

    def _line(self) -> Figures:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            with suppress(json.JSONDecodeError):  # a line of the engine's own
                reply = json.loads(line)
                if isinstance(reply, dict):
                    return reply
        self.failed = True
        return {}

    def rate(self, tokens: list[int], count: int) -> float:
        """Greedy tokens per second behind a prompt, the first of `count` not among them; NaN where it crashed."""
        if self.failed:
            return math.nan
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"tokens": tokens, "count": count}) + "\n")
            self.process.stdin.flush()
        except OSError:  # it has ended
            self.failed = True
            return math.nan
        seconds = self._line().get("seconds")
        return math.nan if seconds is None else (count - 1) / float(seconds)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def check_peers(target: str) -> None:
    """Raises ValueError where the other engines are not installed, or this target has no GGUF file."""
    if not PYTHON.is_file():
        raise ValueError(
            f"{PYTHON} is missing; in the repository's folder make .venv-peers/.ready builds the other engines (twenty "
            "minutes)"
        )
    gguf_file(target)


def start_peers(file: Path, target_folder: str, folder: Path) -> dict[str, Peer]:
    """A model in each engine and format, by name. file: its GGUF file, run as it is too; target_folder: its weights as
    safetensors; folder: where files in other formats are made, once for each file and version of the engines."""
    versions = [path.name for path in PYTHON.parents[1].glob("lib/*/site-packages/*.dist-info")]
    used = sorted(name for name in versions if name.startswith(("llama_cpp", "openvino", "optimum")))
    folder = folder / hashlib.sha256(repr((used, str(file.resolve()), file.stat().st_size)).encode()).hexdigest()[:8]
    folder.mkdir(parents=True, exist_ok=True)
    threads, peers = str(torch.get_num_threads()), {}
    for name in ("bf16", "Q8_0", re.split("[-.]", file.stem)[-1].upper() + ", the file"):
        peers[f"llama.cpp {name}"] = Peer(_LLAMA, str(file), str(folder), threads, name)
    for name in ("fp16", "int8", "int4"):
        peers[f"OpenVINO {name}"] = Peer(_OPENVINO, target_folder, str(folder), threads, name)
    return peers


def peer_speeds(target: Target, file: Path, target_folder: str, folder: Path, rounds: int) -> Figures:
    """Plain decoding here and in other engines: greedy tokens per second behind a prompt of 128 tokens, all in turn.
    By name: "rates" of each round (NaN: it crashed), and the "version" of the engine."""
    peers: dict[str, Any] = start_peers(file, target_folder, folder)
    prompt = [(7 + 131 * i) % target.vocab_size for i in range(128)]
    figures: Figures = {name: {"version": peer.version, "rates": []} for name, peer in peers.items()}
    ours = figures[f"selfspec {target.dtype_name}"] = {"version": f"torch {torch.__version__}", "rates": []}
    try:
        for turn in progress(range(rounds + 1), desc="other engines", leave=False):
            rates = {name: peer.rate(prompt, 64) for name, peer in peers.items()}
            stats = autoregressive(target, [prompt], Options(64, Sampling(0.0))).stats
            if turn:  # the first one warms up
                ours["rates"].append(64 / (stats.seconds - stats.seconds_prefill))
                for name, rate in rates.items():
                    figures[name]["rates"].append(rate)
    finally:
        for peer in peers.values():
            peer.close()
    return figures


def rate_rows(rates: dict[str, list[float]]) -> list[list[str]]:
    """Cells of a table: the name, the median and the quartiles. NaN: it crashed."""
    rows = []
    for name, values in rates.items():
        if len(values) < 2 or any(map(math.isnan, values)):
            rows.append([name, "crashed", ""])
            continue
        low, middle, high = statistics.quantiles(values, n=4)
        rows.append([name, f"{middle:.1f}", f"{low:.1f} to {high:.1f}"])
    return rows
