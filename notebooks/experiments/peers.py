"""A model here, under llama.cpp and under OpenVINO GenAI: the same questions, the same machine, the same hour.

    make peers QUESTIONS=question.jsonl   # builds the other engines in an environment of their own, then runs this file

llama.cpp's bfloat16 and Q8_0 files are made from the model's own GGUF file by llama.cpp itself; OpenVINO's are exported
from the weights in bfloat16. Arms take turns on every question; greedy, without end tokens, so that all of them decode
the same number of tokens. What crashes is named in the table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import selfspec
from selfspec.checkpoints.named import gguf_file
from selfspec.core.generate import Result, autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.evaluation.peers import check_peers, rate_rows, start_peers
from selfspec.evaluation.tables import markdown
from selfspec.utils.files import cache_folder, write_text
from selfspec.utils.machine import processor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("questions", help="Spec-Bench's question.jsonl")
    parser.add_argument("--target", default="smollm2", help="smollm2, a GGUF file, or qwen-coder")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", default="notebooks/results/peers.md")
    args = parser.parse_args()
    check_peers(args.target)

    dtypes = "bfloat16", "int8"
    ours = {d: selfspec.load("prompt_lookup", target=args.target, dtype=d, engine="compiled") for d in dtypes}
    folder = str(ours["bfloat16"].target.model.config.name_or_path)
    peers = start_peers(gguf_file(args.target), folder, cache_folder() / "peers")
    options = Options(args.tokens, Sampling(0.0), 0, frozenset())
    rows = [json.loads(line) for line in Path(args.questions).read_text().splitlines()]
    asked = [ours["int8"].encode([{"role": "user", "content": row["turns"][0][:2000]}])[0] for row in rows]
    asked = asked[:: max(1, len(asked) // args.prompts)][: args.prompts]

    def rate(result: Result) -> float:
        return args.tokens / (result.stats.seconds - result.stats.seconds_prefill)

    def plain(dtype: str, tokens: list[int]) -> float:
        return rate(autoregressive(ours[dtype].target, [tokens], options))

    def drafted(dtype: str, tokens: list[int]) -> float:
        return rate(speculative(ours[dtype].target, [tokens], options, ours[dtype].drafter, 8))

    arms: dict[str, Callable[[list[int]], float]] = {}
    for dtype in dtypes:
        arms[f"selfspec {dtype}"] = partial(plain, dtype)
        arms[f"selfspec {dtype}, prompt lookup, 8 nodes"] = partial(drafted, dtype)
    for name, peer in peers.items():
        arms[name] = partial(peer.rate, count=args.tokens)
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for tokens in [*asked[:2], *asked]:  # the first two compile and warm up
        for name, arm in arms.items():
            rates[name].append(arm(tokens))
    table = markdown(
        ["decoding", "tokens/s, median", "quartiles"], rate_rows({name: values[2:] for name, values in rates.items()})
    )
    features = "with AMX" if torch.cpu._is_amx_tile_supported() else "without AMX"
    versions = "\n".join(
        f"- {version}" for version in dict.fromkeys(peer.version for peer in peers.values()) if version
    )
    text = f"""# Beside llama.cpp and OpenVINO

`make peers`: {args.target}, {len(asked)} Spec-Bench questions, {args.tokens} greedy tokens,
batch 1, {torch.get_num_threads()} cores ({processor()["model name"]}, {features}). Arms take turns on every question.

{table}

{versions}
"""
    write_text(Path(args.out), text)
    print(text, time.strftime("%H:%M"), file=sys.stderr)
    for peer in peers.values():
        peer.close()


if __name__ == "__main__":
    main()
