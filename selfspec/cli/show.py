"""Answers in the terminal: plain decoding on the left, speculative decoding on the right, what was drafted in green."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from selfspec.api import Spec
from selfspec.cli.terminal import COLORS, DIM, RESET
from selfspec.core.options import as_seed
from selfspec.core.sampling import Sampling
from selfspec.core.stats import Stats
from selfspec.data.questions import Answering
from selfspec.detokenize import text_of
from selfspec.evaluation.arms import Prompt
from selfspec.evaluation.measure import timed
from selfspec.output import Generated
from selfspec.utils.errors import visible
from selfspec.utils.files import Figures

GREEN = COLORS[0]
Cell = tuple[str, bool]  # one character, and whether it was drafted


@dataclass
class ShowConfig(Answering):
    """temperature: 0 is greedy; seed: of all noise, from which every prompt gets its own."""

    prompts: int = 5
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.check("show")
        as_seed(self.seed, "show.seed")
        Sampling(self.temperature)

    def arguments(self) -> Figures:
        return {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}


def show(spec: Spec, prompts: Sequence[Prompt], config: ShowConfig, nodes: int | str) -> None:
    """Answer each prompt both ways and print the two side by side, with rates, and right or wrong where it is known."""
    assert spec.tokenizer is not None
    width = max(30, (shutil.get_terminal_size((120, 24)).columns - 3) // 2)

    def answers(prompt: Prompt) -> tuple[Generated, Generated]:
        """Plain and speculative, decoded again where something was compiled on the way."""
        arguments = {"prompts": [prompt.ids], **config.arguments(), "seed": [prompt.seed]}
        plain = timed(spec, partial(spec.autoregressive, **arguments))
        return plain[0], timed(spec, partial(spec.generate, **arguments, nodes=nodes))[0]

    answers(prompts[0])  # warm-up
    dim, green, reset = (DIM, GREEN, RESET) if sys.stdout.isatty() else ("", "", "")
    print(f"{dim}{spec.target.exactness}{reset}")
    for prompt in prompts:
        plain, fast = answers(prompt)
        print(f"\n{visible(prompt.turn_text or text_of(spec.tokenizer, prompt.ids))}")
        print(f"{dim}{'plain':<{width}} | speculative, {green}drafted{reset}{dim} (group {prompt.group}){reset}")
        left, right = _lines(plain, width), _lines(fast, width)
        for i in range(max(len(left), len(right))):
            row = [lines[i] if i < len(lines) else [] for lines in (left, right)]
            print(" | ".join(_painted(line, width, green, reset) for line in row))
        verdicts = [_verdict(result, prompt.right(spec.tokenizer, result.token_ids[0])) for result in (plain, fast)]
        print(f"{verdicts[0]:<{width}} | {verdicts[1]}")
        same = (
            "the same tokens"
            if plain.token_ids == fast.token_ids
            else "other tokens (selfspec audit tells whether rounding explains it)"
        )
        print(f"{dim}{same}, {gain(plain.stats, fast.stats)}{reset}")


def gain(plain: Stats, fast: Stats) -> str:
    """What drafting brought. A speedup far above the tokens per pass is not its doing."""
    if fast.nodes == fast.calls:
        return "nothing was drafted"
    tau, ratio = fast.acceptance_length, fast.tokens_per_second / plain.tokens_per_second
    fair = ratio < 1.25 * tau
    return f"{tau:.2f} per pass, {f'{ratio:.2f}x as fast' if fair else 'times not compared: other programs ran beside'}"


def _lines(result: Generated, width: int) -> list[list[Cell]]:
    """The text cut at line breaks and, between words where there are any, at `width` characters."""
    cells = [(character, drafted) for text, drafted in result.pieces() for character in visible(text)]
    lines: list[list[Cell]] = [[]]
    for cell in cells:
        if cell[0] == "\n":
            lines.append([])
            continue
        if len(lines[-1]) == width:
            blanks = [i for i, (character, _) in enumerate(lines[-1]) if character == " "]
            cut = blanks[-1] + 1 if blanks and cell[0] != " " else width
            lines.append(lines[-1][cut:])
            del lines[-2][cut:]
            if cell[0] == " ":
                continue
        lines[-1].append(cell)
    return lines


def _painted(line: list[Cell], width: int, green: str, reset: str) -> str:
    runs = ((drafted, "".join(c for c, _ in run)) for drafted, run in groupby(line, key=lambda cell: cell[1]))
    return "".join(f"{green}{text}{reset}" if drafted else text for drafted, text in runs) + " " * (width - len(line))


def _verdict(result: Generated, right: bool | None) -> str:
    rate = f"{result.stats.tokens / result.stats.seconds:.0f} tokens/s"
    return rate if right is None else f"{'RIGHT' if right else 'WRONG'}, {rate}"
