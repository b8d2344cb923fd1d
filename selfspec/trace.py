"""The trace of a call: what every pass drafted, picked and kept, as lines of JSON.

A file holds one trace or several. Each begins with a header, the line that has `trace`, the version of this form:

- `target`, `drafter` ("plain": plain decoding), `sources` (who proposes nodes), `dtype`, `device`, `engine`;
- `nodes`, `temperature`, `top_k`, `top_p`, `min_p`, `lossy`, `seed`, as they were asked for;
- `prompts` (token ids, by row), `prompt_texts`;
- `seconds_prefill`; further keys of the writer (`selfspec decode` adds `group` and `question`).

A line for each pass and row follows:

- `pass` (from 0), `row`, `position` (of the root in the row);
- `tokens`, `texts`, `parents` (-1: the root, or a spare node), `scores` (path probabilities; null where the drafter has
  none), `sources` (indexes into the header's) of the tree's nodes; `masks`: mask slots behind them;
- `path`: the kept nodes, root first; `emitted`: the new tokens, the i-th picked at `path[i]`; the i-th is also the
  node `path[i + 1]`, and the last one, where there is no such node, is the bonus token;
- `pieces`: the text that each of these adds (empty where a character needs further tokens);
- `choices`: for each of these the tokens it was picked among: `[id, text, probability, noise]`, what was emitted first,
  then the best of the others and the drafted ones; unless a lossy rule decided, the pick is the largest log-probability
  plus noise (noise null: greedy);
- `seconds`: `draft`, `target` and `other`, of the whole batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from selfspec.core.options import Options, Seen
from selfspec.core.sampling import Noise
from selfspec.core.stats import Stats
from selfspec.core.target import Target
from selfspec.detokenize import Detokenizer, text_of
from selfspec.utils.files import Figures, parse_json, write_text

VERSION = 1
_CALL = "target dtype device engine drafter sources nodes temperature top_k top_p min_p lossy seed"
_HEADER = frozenset((*_CALL.split(), "prompts", "prompt_texts", "seconds_prefill"))
_LINE = "row position tokens texts parents scores sources masks path emitted pieces choices seconds"
_PASS = frozenset(_LINE.split())
_BEST = 4  # tokens that are kept of a choice, beside those that were drafted
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


@dataclass(frozen=True)
class Token:
    """A token of a traced text. text: what it adds; sources: who drafted it, none for a bonus token; depth: in its
    tree (0: a bonus token); score: the probability that the drafter gave its path; probability: the target's own."""

    text: str
    sources: tuple[str, ...]
    depth: int
    score: float | None
    probability: float


@dataclass(frozen=True)
class Trace:
    """header, passes: as in the file."""

    header: Figures
    passes: list[Figures]

    def __repr__(self) -> str:
        return f"Trace({self.header['drafter']}, {len(self.passes)} passes)"

    def lines(self) -> str:
        """As lines of JSON."""
        return "".join(json.dumps(line) + "\n" for line in (self.header, *self.passes))

    def write(self, path: str | Path) -> None:
        """Write a file of this trace alone. Raises ValueError where there is no folder for it."""
        if not Path(path).parent.is_dir():
            raise ValueError(f"{path}: there is no folder {Path(path).parent}; make it")
        write_text(Path(path), self.lines())

    def tokens(self, row: int = 0) -> list[Token]:
        """A row's text, token by token."""
        names, tokens = self.header["sources"], []
        for line in self.passes:
            if line["row"] != row:
                continue
            for i, (text, choices) in enumerate(zip(line["pieces"], line["choices"], strict=True)):
                node = line["path"][i + 1] if i + 1 < len(line["path"]) else None
                whose = () if node is None else tuple(names[source] for source in line["sources"][node])
                score = None if node is None or line["scores"] is None else line["scores"][node]
                tokens.append(Token(text, whose, 0 if node is None else i + 1, score, choices[0][2]))
        return tokens


def read_traces(path: str | Path) -> list[Trace]:
    """The traces of a file. Raises ValueError naming a line that is none, or is of another version."""
    traces: list[Trace] = []
    for number, text in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = parse_json(text)
            missing = (_HEADER if "trace" in line else _PASS) - line.keys()
            if missing and line.get("trace", VERSION) == VERSION:
                raise ValueError(f"it has no {sorted(missing)[0]!r}")
            if "trace" in line:
                traces.append(Trace(line, []))
            else:
                traces[-1].passes.append(line)
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path}, line {number} is no line of a trace ({error}); make it anew") from error
        if (version := traces[-1].header["trace"]) != VERSION:
            raise ValueError(f"{path}, line {number}: a trace of version {version}, not {VERSION}; make it anew")
    if not traces:
        raise ValueError(f"{path} holds no trace; make it anew")
    return traces


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """A token alone: bytes that are no text as \\xNN; its number where there is no tokenizer."""
    if tokenizer is None:
        return str(token)
    text = text_of(tokenizer, [token], False)
    if "\ufffd" not in text:
        return text
    entry = str(tokenizer.convert_ids_to_tokens(token))
    whole = entry and all(character in _BYTES for character in entry)
    return "".join(f"\\x{_BYTES[character]:02x}" for character in entry) if whole else entry


class Tracer:
    """Watches one call."""

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer | None,
        prompts: Sequence[Sequence[int]],
        options: Options,
        call: Figures,
    ) -> None:
        self.tokenizer, self.passes, self.count = tokenizer, list[Figures](), 0
        self.shown = [None if tokenizer is None else Detokenizer(tokenizer) for _ in prompts]
        self.last: list[Figures] = [{} for _ in prompts]
        self.texts: dict[int, str] = {}
        self.noise: list[Noise] = []
        seed = options.seed if isinstance(options.seed, int) else list(options.seed)
        if options.sampling.temperature > 0:
            rows = range(len(prompts))
            seeds = [(seed, row) for row in rows] if isinstance(seed, int) else [(each, 0) for each in seed]
            self.noise = [
                Noise([row_seed], [sequence], target.vocab_size, target.device) for row_seed, sequence in seeds
            ]
        self.header = {
            "trace": VERSION,
            "target": target.name,
            "dtype": target.dtype_name,
            "device": str(target.device),
            "engine": target.engine.name,
            **call,
            **asdict(options.sampling),
            "seed": seed,
            "prompts": [list(prompt) for prompt in prompts],
            "prompt_texts": ["" if tokenizer is None else text_of(tokenizer, prompt, False) for prompt in prompts],
        }

    def __call__(self, seen: Seen) -> None:
        tree = seen.tree
        count = tree.tokens.shape[1] if tree.plain is None else tree.plain
        seconds = dict(zip(("draft", "target", "other"), seen.seconds, strict=True))
        scores = None if tree.scores is None else tree.scores.expand_as(tree.tokens)[:, :count].tolist()
        tokens, parents = tree.tokens[:, :count].tolist(), tree.parents[:, :count].tolist()
        for i, row in enumerate(seen.rows):
            emitted = seen.emitted[i]
            whose = [1] * count if tree.sources is None else tree.sources[i]
            line: Figures = {
                "pass": self.count,
                "row": row,
                "position": seen.positions[i],
                "tokens": tokens[i],
                "texts": [self._text(token) for token in tokens[i]],
                "parents": parents[i],
                "scores": None if scores is None else [round(score, 4) for score in scores[i]],
                "sources": [
                    [b for b in range(bits.bit_length()) if bits >> b & 1] if parent >= 0 else []
                    for bits, parent in zip(whose, parents[i], strict=False)
                ],
                "masks": tree.tokens.shape[1] - count,
                "path": seen.paths[i][: len(emitted) + 1],  # a row may end above where the walk did
                "emitted": emitted,
                "pieces": self._pieces(row, emitted),
                "choices": self._choices(seen, i, tokens[i], parents[i]),
                "seconds": {name: round(value, 7) for name, value in seconds.items()},
            }
            for j, token in enumerate(emitted):  # a lossy rule may emit another token than the best one
                line["choices"][j].sort(key=lambda choice, token=token: choice[0] != token)
            self.passes.append(line)
            self.last[row] = line
        self.count += 1

    def _text(self, token: int) -> str:
        if token not in self.texts:
            self.texts[token] = token_text(self.tokenizer, token)
        return self.texts[token]

    def _pieces(self, row: int, emitted: Iterable[int]) -> list[str]:
        text = self.shown[row]
        return [f" {token}" if text is None else text.add([token]) for token in emitted]

    def _choices(self, seen: Seen, i: int, tokens: list[int], parents: list[int]) -> list[list[list[object]]]:
        choices, path, position = [], seen.paths[i], seen.positions[i] + 1
        for j, (_, scores) in enumerate(seen.records[i]):
            logs = scores.double().log_softmax(-1)
            noise = torch.zeros_like(logs)
            if self.noise:
                noise = self.noise[seen.rows[i]].ahead([position + j], 1)[0, 0]
            total = logs + noise
            best = total.topk(min(_BEST, len(total))).indices.tolist()
            drafted = [tokens[node] for node, parent in enumerate(parents) if parent == path[j] and node]
            listed = [
                [token, self._text(token), _rounded(float(logs[token].exp())), _rounded(float(noise[token]))]
                for token in dict.fromkeys([*best, *sorted(drafted, key=lambda token: -float(total[token]))])
            ]
            choices.append([[*choice[:3], choice[3] if self.noise else None] for choice in listed])
        return choices

    def trace(self, stats: Stats) -> Trace:
        """Everything seen, when the call is over."""
        for text, last in zip(self.shown, self.last, strict=True):
            if text is not None and text.ids:  # bytes at the end that are no whole character
                last["pieces"][-1] += text.rest()
        return Trace({**self.header, "seconds_prefill": round(stats.seconds_prefill, 7)}, self.passes)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
