"""What is written down of one arm on one batch of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from selfspec.core.stats import Stats
from selfspec.utils.files import Figures, read_jsonl

RECORDS = "records.jsonl"
# Arms of transformers: its generate, the same over a static cache with compiled passes, and its three ways to draft
METHODS = ("hf_generate", "hf_static", "hf_prompt_lookup", "hf_early_exit", "hf_assisted")
# Arms of other engines; file: the GGUF file as it is; lookup: the same with llama.cpp's prompt lookup
PEERS = (
    *("llamacpp_bf16", "llamacpp_q8_0", "llamacpp_file", "llamacpp_lookup"),
    *("openvino_fp16", "openvino_int8", "openvino_int4"),
)


@dataclass(frozen=True)
class Regime:
    """What kind of text some tokens are, under the distributions they were drawn from (greedy text: under those at
    temperature 1), summed over the tokens: log-probability of the token (before top-k, top-p and min-p), entropy in
    nats, largest probability. Beside them the number of 4-grams of the texts, and how many differ within their text."""

    log_prob: float
    entropy: float
    top1: float
    grams: int
    distinct: int


@dataclass(frozen=True)
class Beside:
    """Plain decoding of the same batch beside an arm: seconds of the whole call, those behind the prompts, tokens."""

    seconds: float
    decode: float
    tokens: int


@dataclass(frozen=True)
class Record:
    """One arm on one batch of prompts; group: of these, "all" where they are of several. prompt: number of the first
    one; nodes: see `Arm`; seconds: wall-clock of a whole call, prompt included, the median of its repeats; plain: of
    plain decoding beside it, None where that was not asked for. The record of plain decoding itself has its first run
    there, and in `seconds` the median of the later ones. questions: (id, turn) of each row; right: whether each row's
    answer is (None where it can not be checked); same: whether each row's tokens are those of plain decoding, of arms
    of selfspec; regime: of the texts of plain decoding and of lossy arms; altered: tokens that a lossy rule put in
    place of the target's pick; forecast: with nodes="auto", what was expected; texts: of each row, see
    `Prompt.text`."""

    prompt: int
    arm: str
    nodes: str
    temperature: float
    seconds: float
    tokens: int
    token_ids: list[list[int]]
    stats: Stats
    group: str = "all"
    questions: list[tuple[str, int]] = field(default_factory=list)
    plain: Beside | None = None
    right: list[bool | None] = field(default_factory=list)
    same: list[bool] | None = None
    regime: Regime | None = None
    altered: int | None = None
    forecast: dict[str, float] | None = None
    texts: list[int] = field(default_factory=list)

    @property
    def point(self) -> tuple[Any, ...]:
        """What it was run on: temperature, group and questions."""
        return point_of(self.temperature, self.group, self.prompt, self.questions)

    @property
    def cluster(self) -> str:
        """Records that are one draw of the bootstrap: the turns of a question, or a batch."""
        named = len(self.questions) == 1 and self.questions[0][0]
        return f"{self.group} {self.questions[0][0] if named else self.prompt}"

    @property
    def decode(self) -> float:
        """Seconds behind the prompts."""
        return self.stats.seconds - self.stats.seconds_prefill


def ours(arm: str) -> bool:
    """Whether an arm is of selfspec, not of transformers or of another engine."""
    return arm not in METHODS + PEERS


def point_of(temperature: float, group: str, number: int, questions: Iterable[tuple[str, int]]) -> tuple[Any, ...]:
    """What arms are run on, by the names of its questions, or by its number where they have none."""
    return temperature, group, *((name or str(number), turn) for name, turn in questions)


def lines_of(records: Iterable[Record]) -> str:
    """Records as JSON lines."""
    return "".join(json.dumps(asdict(record)) + "\n" for record in records)


def read_records(path: Path) -> list[Record]:
    """Those of a file, of earlier comparisons too. Raises ValueError as `read_jsonl` does, and for those of an earlier
    benchmark, which do not say what stood beside them."""
    return read_jsonl(path, lambda line: _of_run(line) if "plain_tokens" in line else _record(line), "record")


def _record(line: Figures) -> Record:
    if "plain" not in line:
        raise ValueError("an earlier version wrote it; delete the folder to measure anew")
    numbers = [line[name] for name in ("seconds", "temperature", "tokens", "prompt")]
    if not all(type(value) in (int, float) for value in numbers) or not isinstance(line["token_ids"], list):
        raise ValueError(f"its numbers are {numbers}")
    stats, regime, plain = line["stats"], line["regime"], line["plain"]
    line = {**line, "questions": [tuple(each) for each in line["questions"]], "stats": Stats(**stats)}
    return Record(**line | {"regime": regime and Regime(**regime), "plain": plain and Beside(**plain)})


def _of_run(line: Figures) -> Record:
    """A record of the lines of `runs.jsonl`, which had no tokens."""
    draft, target, other = (line.get(part) or 0.0 for part in ("draft", "target", "other"))
    stats = Stats(line["passes"], line["passes"], line.get("nodes_run") or 0, line["tokens"])
    stats.seconds_draft, stats.seconds_target, stats.seconds_other = draft, target, other
    stats.seconds_prefill = line["seconds"] - draft - target - other
    regime, same = line.get("regime"), line.get("same")
    return Record(
        -1,
        **{name: line[name] for name in ("arm", "nodes", "temperature", "seconds", "tokens", "group")},
        token_ids=[],
        stats=stats,
        questions=[(line["question"], line["turn"])],
        plain=Beside(line["plain"], line.get("plain_decode") or 0.0, line["plain_tokens"]),
        right=[line.get("right")],
        same=None if same is None else [same],
        regime=regime and Regime(**regime),
        forecast=line.get("forecast"),
        texts=[line["text"]],
    )
