"""All that needs a GPU, in one command, with its results as one table: python eval/gpu.py

Without a GPU the same commands run on the CPU with tiny sizes, and nothing is written into notebooks/results/gpu.md.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from selfspec.cli.config import register
from selfspec.cli.errors import clear_errors
from selfspec.utils.files import write_section, write_text

register()
ROOT = Path(__file__).parents[1]
LIMITS = "eval/limits.py wandb.mode=disabled limits.rounds=9"
COMPARE = "eval/compare.py wandb.mode=disabled compare.methods=[hf_generate] compare.nodes=[16] compare.prompts=1"
AUDIT = "eval/audit.py -m wandb.mode=disabled audit.nodes=[16] audit.batch_sizes=[1] audit.distribution_samples=0"
TRAIN = "train/heads.py wandb.mode=disabled +experiment=demo loop.steps=60 loop.validate_every=60"
FEW = "compare.groups=[edit] compare.max_new_tokens=8 compare.temperatures=[0]"
SMALL = "limits.config=configs/models/llama_250m.json limits.sizes=[1,2] limits.rounds=3"
SMOLLM2 = "smollm2-medusa,smollm2-eagle3,prompt_lookup,smollm2-medusa+prompt_lookup,smollm2-eagle3+prompt_lookup"
REAL = f"{COMPARE} target=smollm2 compare.max_new_tokens=64 compare.temperatures=[0,1] compare.drafters=[{SMOLLM2}]"
ONE = f"{FEW} compare.nodes=[4] compare.drafters=[prompt_lookup] target=tiny-target"
BATCHES = (
    "eval/decode.py -m wandb.mode=disabled target=smollm2 tree.nodes=auto decode.prompts=32 decode.max_new_tokens=64 "
    "decode.arms=[autoregressive,speculative] decode.repeats=1 engine=eager"
)
DRAFTERS = "tiny-medusa,tiny-early-exit,tiny-eagle3"
# By name: the command, how it is changed where there is no GPU, and the GiB of memory that it needs
PARTS = {
    "passes of the embedded target": (
        LIMITS,
        "limits.sizes=[1,8] limits.rounds=3 limits.drafters=[tiny-medusa] limits.temperatures=[0] limits.starts=false",
        1,
    ),
    "passes of a Llama of 1B": (f"{LIMITS} limits.config=configs/models/llama_1b.json limits.drafters=[]", SMALL, 6),
    "drafters, eager": (f"{COMPARE} engine=eager", FEW, 1),
    "drafters, compiled": (f"{COMPARE} engine=compiled", f"{FEW} compare.nodes=[8] compare.drafters=[tiny-medusa]", 1),
    "SmolLM2, eager": (f"{REAL} engine=eager", ONE, 2),
    "SmolLM2, compiled": (f"{REAL} engine=compiled", f"{ONE} engine=eager", 2),
    "SmolLM2 in batches": (
        f"{BATCHES} drafter=smollm2-medusa+prompt_lookup,smollm2-eagle3+prompt_lookup decode.batch_size=1,4,16,32 "
        "decode.temperature=0,1",
        "target=tiny-target drafter=prompt_lookup decode.batch_size=2 decode.prompts=2 decode.max_new_tokens=8",
        2,
    ),
    "audits": (
        f"{AUDIT} audit.prompts=2 drafter={DRAFTERS} dtype=float32,bfloat16 engine=eager,compiled",
        "audit.prompts=1 audit.max_new_tokens=8 drafter=tiny-medusa engine=eager",
        1,
    ),
    "a short training": (
        TRAIN,
        "loop.steps=2 loop.validate_every=2 loop.checkpoint_every=2 data.count=200 data.held_out=20 train.prompts=2",
        2,
    ),
    "passes of a Llama of 8B": (
        f"{LIMITS} limits.config=configs/models/llama_8b.json limits.drafters=[] limits.sizes=[1,8,16,64]",
        SMALL,
        24,
    ),
}


def command(name: str, folder: Path, device: str) -> list[str]:
    """A part as it is typed: on a CPU with tiny sizes."""
    typed, tiny, _ = PARTS[name]
    where = "target.device" if typed.startswith("train") else "device"
    label = f"{folder.name}-{name}".replace(" ", "_").replace(",", "")
    own = [f"name={label}", f"{where}={device}", f"hydra.run.dir={folder / label}", f"hydra.sweep.dir={folder / label}"]
    changed = [*typed.split(), *own, *(tiny.split() if device == "cpu" else [])]
    return list({argument.split("=", 1)[0]: argument for argument in changed}.values())


def section_text(name: str, folder: Path, output: str) -> str:
    """What a part measured, as Markdown."""
    if (table := folder / "table.md").is_file():
        return table.read_text()
    if name == "audits":
        lines = ["| drafter | dtype | engine | verdict | texts | tokens |", "|---|---|---|---|---|---|"]
        for path in sorted(folder.rglob("audit.json")):
            found: dict[str, Any] = json.loads(path.read_text())
            run = found["config"]
            cells = [run["drafter"], run["dtype"], run["engine"], found["verdict"], found["rows"], found["tokens"]]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        return "\n".join(lines)
    return f"```\n{(output.strip().splitlines() or ['nothing was printed'])[-1]}\n```"


def run(name: str, typed: list[str], seconds: float) -> str:
    """Run a part; what it measured, or why there is nothing."""
    try:
        done = subprocess.run(
            [sys.executable, *typed], cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=True
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace").split()  # bytes, unlike a finished command's
        return f": stopped after {seconds:.0f} s, when the time was over; last `{' '.join(said)[-80:]}`"
    except subprocess.CalledProcessError as error:
        return f": failed\n\n```\n{error.stderr[-2000:]}\n```"
    where = next(argument for argument in typed if argument.startswith("hydra.run.dir=")).split("=", 1)[1]
    return f" (`python {' '.join(typed)}`)\n\n{section_text(name, Path(where), done.stdout)}"


@hydra.main(config_path="../configs", config_name="gpu", version_base="1.3")
def main(config: DictConfig) -> None:
    with clear_errors():
        folder = Path(HydraConfig.get().runtime.output_dir)
        wanted = PARTS if config.parts is None else config.parts
        if unknown := sorted(set(wanted) - set(PARTS)):
            raise ValueError(f"parts={unknown} are unknown; known are {', '.join(PARTS)}")
        gpu = torch.cuda.is_available()
        device = "cuda" if gpu else "cpu"
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30 if gpu else float("inf")
        title = torch.cuda.get_device_name() if gpu else "no GPU here: tiny sizes on the CPU, which measure nothing"
        print(title)
        end, parts = (
            time.monotonic() + 60 * config.minutes,
            [f"{datetime.date.today()}, {title}, torch {torch.__version__}"],
        )
        for name in wanted:
            needed = PARTS[name][2]
            left, typed = end - time.monotonic(), command(name, folder, device)
            print(f"{name}: python {' '.join(typed)}", flush=True)
            if memory < needed:
                parts.append(f"**{name}**: not run, it needs {needed} GiB")
            elif left <= 0:
                parts.append(f"**{name}**: not run, no time left of minutes={config.minutes}")
            else:
                parts.append(f"**{name}**{run(name, typed, left)}")
            text = "\n\n".join(parts)
            write_text(folder / "gpu.md", text + "\n")
            if gpu:
                write_section(Path(config.results), "gpu", text)
        print(f"\n{text}\n{folder}")
        if any(": failed" in part for part in parts):
            sys.exit(1)


if __name__ == "__main__":
    main()
