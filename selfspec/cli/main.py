"""The command `selfspec` and the scripts in train/ and eval/: what each is told, before anything slow is imported."""

from __future__ import annotations

import difflib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from selfspec import __version__


@dataclass(frozen=True)
class Command:
    """told: what it does; example: its arguments; script: the same in a clone; config: of configs/, for those whose
    options are Hydra's; drafter: how it takes `drafter`, as a name or (in training) as a group of options."""

    told: str
    example: str
    script: str = ""
    config: str = ""
    trains: bool = False


COMMANDS = {
    "complete": Command("complete a prompt by speculative decoding", "'def fib(n):' --color"),
    "train": Command(
        "train a drafter on a frozen target", "+experiment=demo name=mine", "train/heads.py", "train", trains=True
    ),
    "distill": Command(
        "write a training's self-distillation data, and train nothing",
        "+experiment=tiny_medusa name=texts",
        "train/distill.py",
        "train",
        trains=True,
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
    "limits": Command(
        "what limits a pass here, and what drafters can bring", "target=tiny-target", "eval/limits.py", "limits"
    ),
    "verifiers": Command(
        "shared noise against the published lossless verifiers", "verifiers.nodes=16", "eval/verifiers.py", "verifiers"
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
    "export": Command("write a drafter in the form that another engine serves", "runs/mine --to vllm --out mine-vllm"),
    "push": Command("upload a drafter to the hub", "runs/mine user/mine --dry-run card"),
}


def main() -> None:
    """The command `selfspec`, and `python -m selfspec`."""
    given = sys.argv[1:]
    if not given or given[0] in ("-h", "--help"):
        print(overview())
    elif given[0] == "--version":
        print(f"selfspec {__version__}")
    elif given[0] not in COMMANDS:
        near = difflib.get_close_matches(given[0], COMMANDS, 1)
        meant = f"selfspec {near[0]}" if near else f"selfspec complete {given[0]!r}"
        print(f"selfspec: there is no command {given[0]!r}; did you mean: {meant}", file=sys.stderr)
        sys.exit(2)
    else:
        sys.argv = [f"selfspec {given[0]}", *given[1:]]
        start(given[0])


def start(name: str) -> None:
    """A command with the arguments in sys.argv, as its script does it."""
    try:
        _start(name)
    except KeyboardInterrupt:
        print(f"{os.path.basename(sys.argv[0])}: interrupted", file=sys.stderr)
        sys.exit(130)


def _start(name: str) -> None:
    command, given = COMMANDS[name], sys.argv[1:]
    if not command.config:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from selfspec.cli import terminal

        getattr(terminal, name)(given)
    elif "--help" in given or "-h" in given:
        print((Path(__file__).parents[1] / "help" / f"{name}.txt").read_text(), end="")
    elif "--version" in given:
        print(f"selfspec {__version__}")
    else:
        from selfspec.cli.launch import launch

        launch(name, command.config, command.trains)


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.told}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "selfspec: self-speculative decoding in one frozen model; drafters change the speed, never the output\n",
            *lines,
            "\nselfspec COMMAND --help: its options, and an example. selfspec --version",
        ]
    )
