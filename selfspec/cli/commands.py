"""The commands of selfspec: what each does, and an example."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """what: it does; example: its arguments; script: the same in a clone; config: of configs/, for those whose
    options are Hydra's."""

    what: str
    example: str
    script: str = ""
    config: str = ""

    @property
    def trains(self) -> bool:
        """Whether it takes `drafter` as a group of options, not as a name."""
        return self.config == "train"


COMMANDS = {
    "complete": Command(
        "complete a prompt by speculative decoding",
        "'Which is larger, 9 or 7?' --chat --drafter tiny-medusa+prompt_lookup --color",
    ),
    "train": Command("train a drafter on a frozen target", "+experiment=demo name=mine", "train/heads.py", "train"),
    "distill": Command(
        "write a training's self-distillation data, and train nothing",
        "+experiment=tiny_medusa name=texts",
        "train/distill.py",
        "train",
    ),
    "target": Command(
        "train a small target and its tokenizer from scratch", "+experiment=tiny_target", "train/target.py", "target"
    ),
    "decode": Command(
        "measure speculative against plain decoding",
        "-m drafter=tiny-medusa,runs/mine tree.nodes=8,16 decode.temperature=0,1",
        "eval/decode.py",
        "eval",
    ),
    "compare": Command(
        "all drafters and transformers' own methods on equal terms",
        "name=compare compare.prompts=4",
        "eval/compare.py",
        "compare",
    ),
    "show": Command(
        "answers side by side in the terminal, drafted tokens green",
        "drafter=tiny-medusa show.prompts=5",
        "eval/show.py",
        "show",
    ),
    "audit": Command(
        "check exactness on your own model; exit status 1 where the verdict is BUG",
        "drafter=runs/mine dtype=float32",
        "eval/audit.py",
        "audit",
    ),
    "calibrate": Command(
        "measure how often a published or training-free drafter is right, and save it with that",
        "drafter=mtp target=path/to/a/model name=calibrated",
        "eval/calibrate.py",
        "calibrate",
    ),
    "limits": Command(
        "what limits a pass here, and what drafters can bring", "target=tiny-target", "eval/limits.py", "limits"
    ),
    "page": Command(
        "one HTML file that explains, predicts and replays, from runs of decode, limits and compare",
        '"page.runs=[runs/traces,runs/limits,runs/compare]"',
        "eval/page.py",
        "page",
    ),
    "report": Command(
        "one table and the plots of all runs of a sweep", "sweep=runs/decode/<date>", "eval/report.py", "report"
    ),
    "compile": Command(
        "compile what a drafter needs, for later processes", "--drafter prompt_lookup --target smollm2 --nodes 16"
    ),
    "export": Command("write a drafter in the form that another engine serves", "runs/mine --to vllm --out mine-vllm"),
    "serve-target": Command(
        "the command of a vLLM that hands a target's hidden states to a trainer",
        "smollm2 --drafter eagle3 --folder states",
    ),
    "states": Command("what a folder of hidden states holds", "--check states --target smollm2"),
    "acceptance": Command(
        "what a vLLM server accepts of its drafter", "http://localhost:8000 --questions chat.jsonl --target smollm2"
    ),
    "push": Command("upload a drafter to the hub", "runs/mine user/mine --results runs/mine-measured"),
}
