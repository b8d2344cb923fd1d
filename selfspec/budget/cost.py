"""What a pass costs here: measured once for a target, device and dtype, and kept in a file."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from selfspec.budget.predict import along, monotone
from selfspec.core.contract import Accepted, Context, Session
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.core.stats import clock
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree
from selfspec.utils.files import Figures, cache_folder, code_hash, read_json, write_text
from selfspec.utils.machine import device_name
from selfspec.utils.progress import progress

LARGEST = 64  # nodes of the largest tree that costs are measured for
SIZES = (1, 2, 4, 8, 16, 32, LARGEST)  # where the cost of a pass is measured; linear in between
SECONDS = 20.0  # Measuring takes at most so long, compiling excluded.
_FEWEST = 8  # nodes up to which costs are measured, however long that takes
_measuring = threading.Lock()  # threads would take the measured time from each other
# By file and whether it samples, for folders that can not be written to
_measured: dict[tuple[Path, bool], list[float]] = {}
# Plain steps, more than any acceptance length measured; larger trees are priced in proportion to their nodes.
_DEAR = 12
# Kept tokens that passes are measured behind, at most, in all rows together, and at least: every node attends to all of
# them, so that behind 128 tokens trees are cheaper than in most calls (notebooks/results/qwen_coder.md).
_CONTEXT, _ALL, _LEAST = 256, 1024, 128
_ROUNDS = 24  # of measuring all sizes, of which the median counts


def cost_file(target: Target, rows: int) -> Path:
    """Where the costs of this target on this device lie: in $SELFSPEC_CACHE, or selfspec's folder in the user's
    cache."""
    key = json.dumps([_identity(target, rows), target.model.config.to_json_string()])
    return cache_folder() / "costs" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _identity(target: Target, rows: int) -> Figures:
    return {
        "device": device_name(target.device),
        "target": target.name,
        "parameters": sum(p.numel() for p in target.model.parameters()),  # those of an adapter too
        "dtype": target.dtype_name,
        "attention": getattr(target.model.config, "_attn_implementation", None),
        "rows": rows,
        "context": _context(target, rows),
        "torch": torch.__version__,
        "engine": target.engine.name,
        "code": code_hash("core", "engine")[:16],  # another version of what runs passes has costs of its own
    }


def _context(target: Target, rows: int) -> int:
    """Tokens of each row's prompt, when costs are measured."""
    return min(max(_ALL // rows, _LEAST), _CONTEXT, (target.max_positions or 4096) // 2)


def pass_costs(target: Target, rows: int = 1, sampled: bool = False, insist: bool = False) -> list[float]:
    """Seconds of a pass over 0, 1, ..., LARGEST nodes per row, all but drafting included; over 0 nodes: of a plain
    step. They are measured where no file holds them. What can not be, since other programs took the machine, is
    measured once more and then not kept, so that it is measured again when it is asked for again (insist: kept for this
    process)."""
    with _measuring:
        if (costs := saved_costs(target, rows, sampled)) is not None:
            return costs
        path = cost_file(target, rows)
        with target.engine.at_once():
            seconds = measure_costs(target, rows, float(sampled))
            if implausible(seconds):
                seconds = measure_costs(target, rows, float(sampled))
        if why := implausible(seconds):
            print(f"auto: {why}, so other programs ran beside; these costs are not kept", file=sys.stderr)
        if insist or not why:
            _measured[path, sampled] = seconds
        if not why:
            listed = {str(n): s for n, s in zip((0, *SIZES), seconds, strict=True)}
            try:
                before = _saved(path, say=True) or _identity(target, rows)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, json.dumps({**before, _mode(sampled): listed}, indent=1) + "\n")
            except OSError as error:
                kept = "costs are not kept for later runs"
                print(f"{kept}: {error}; set SELFSPEC_CACHE to a folder of yours", file=sys.stderr)
        return _by_nodes(seconds, target)


def _saved(path: Path, say: bool = False) -> Figures | None:
    """A file of costs; None where there is none, or where it is damaged: it is measured again. say: that it is."""
    try:
        saved = read_json(path)
        for mode in (saved[mode] for mode in map(_mode, (False, True)) if mode in saved):
            if not all(0 < float(mode[str(n)]) < math.inf for n in (0, *SIZES)):
                raise ValueError("costs are seconds")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if say:
            print(f"auto: {path} is damaged ({error!r}); its costs are measured again", file=sys.stderr)
        return None
    return saved


def implausible(seconds: Sequence[float]) -> str:
    """What of measured costs, as `measure_costs` gives them, can not be: a pass over a root alone is a plain step, and
    more nodes do not take half the time. "" where nothing is."""
    ratios = [cost / seconds[0] for cost in seconds[1:]]
    if not 0.5 <= ratios[0] <= 2:
        return f"a pass over one node seemed to take {ratios[0]:.1f} plain steps"
    for i, largest in enumerate(itertools.accumulate(ratios, max)):
        if ratios[i] < 0.5 * largest:
            return f"a pass over {SIZES[i]} nodes seemed to take less than half of what a smaller one took"
    return ""


def saved_costs(target: Target, rows: int = 1, sampled: bool = False) -> list[float] | None:
    """The same where they have been measured, else None."""
    path, mode = cost_file(target, rows), _mode(sampled)
    saved = _saved(path) or {}
    seconds = [float(saved[mode][str(n)]) for n in (0, *SIZES)] if mode in saved else _measured.get((path, sampled))
    return None if seconds is None else _by_nodes(seconds, target)


def forget(target: Target, rows: int, sampled: bool) -> None:
    """Costs that turned out wrong are measured again when they are asked for."""
    path = cost_file(target, rows)
    _measured.pop((path, sampled), None)
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _mode(sampled: bool) -> str:
    return "sampled" if sampled else "greedy"


def _by_nodes(seconds: list[float], target: Target) -> list[float]:
    """Costs of 0 to LARGEST nodes; a compiled pass runs as many as the next size that is compiled."""
    smooth = monotone(seconds[1:])
    plain = min(seconds[0], smooth[0])  # a plain step is a pass without a tree
    return [plain, *(along(SIZES, smooth, target.engine.size(n)) for n in range(1, LARGEST + 1))]


class _Trees:
    """Drafter and session in one object: trees of arbitrary tokens, all `sizes` in turn, timed from the end of one
    `propose` to the start of the next."""

    reads: tuple[int, ...] = ()

    def __init__(self, vocab: int, sizes: Sequence[int], turn: int = 0) -> None:
        self.random, self.vocab, self.sizes = random.Random(turn), vocab, sizes
        self.seconds: dict[int, list[float]] = {n: [] for n in sizes}
        self.turn, self.start = turn, 0.0

    def session(self, target: Target, rows: int) -> Session:
        return self

    def propose(self, context: Context) -> DraftTree:
        if self.start:
            self.seconds[self.sizes[self.turn % len(self.sizes)]].append(clock(context.roots.device) - self.start)
            self.turn += 1
        n, rows = self.sizes[self.turn % len(self.sizes)], len(context.lengths)
        parents = [-1, *(self.random.randrange(max(0, i - 6), i) for i in range(1, n))]
        tokens = torch.tensor([[self.random.randrange(self.vocab) for _ in range(n)] for _ in range(rows)])
        tokens = tokens.to(context.roots.device)
        tokens[:, 0] = context.roots
        tree = DraftTree(tokens, torch.tensor([parents] * rows, device=tokens.device))
        self.start = clock(tokens.device)
        return tree

    def observe(self, accepted: Accepted) -> None:
        pass


def measure_costs(target: Target, rows: int, temperature: float) -> list[float]:
    """Median seconds of a plain step, then of a pass over each of SIZES nodes per row, behind prompts of `_context`.

    Every round runs all sizes between two stretches of plain steps, and what counts is their ratio, so that a machine
    whose speed drifts does not decide. After SECONDS only the first round may begin; after half of them no
    larger size is tried, and larger ones are priced along the line through the last two.
    """
    room = target.max_positions or 4096
    rng = random.Random(1)
    prompts = [[rng.randrange(target.vocab_size) for _ in range(_context(target, rows))] for _ in range(rows)]
    sampling, start, compiling, reading = Sampling(temperature), time.perf_counter(), 0.0, 0.0
    mode = _mode(temperature > 0)
    bar = progress(total=round(SECONDS), desc=f"auto: measuring a {mode} pass", unit="s", leave=False)

    def late(share: float = 1.0) -> bool:
        return time.perf_counter() - start - compiling > share * SECONDS

    def step() -> float:
        nonlocal reading
        stats = autoregressive(target, prompts, Options(min(len(SIZES), room // 2), sampling)).stats
        reading = stats.seconds_prefill
        return (stats.seconds_target + stats.seconds_other) / stats.calls

    def passes(sizes: Sequence[int], count: int, turn: int = 0) -> dict[int, list[float]]:
        trees = _Trees(target.vocab_size, sizes, turn)
        speculative(target, prompts, Options(min(count, room // 2), sampling), trees, LARGEST)
        return trees.seconds

    with bar:
        step()  # compiles, where passes are compiled
        compiling = time.perf_counter() - start
        plain, sizes = [step()], list[int]()
        if reading > SECONDS / 40:  # every call reads its prompt
            prompts = [prompt[:_LEAST] for prompt in prompts]
            plain = [step()]
        for n in SIZES:
            sizes.append(n)
            compiled, began = target.compiled, time.perf_counter()
            dear = min(passes([n], 4)[n][1:], default=0.0) > _DEAR * plain[0]  # the first one compiles
            if target.compiled > compiled:
                compiling += time.perf_counter() - began
            if dear or (late(0.5) and n >= _FEWEST):
                break
        ratios: dict[int, list[float]] = {n: [] for n in sizes}
        while len(plain) <= _ROUNDS and (len(plain) < 2 or not late()):
            timed: dict[int, list[float]] = {n: [] for n in sizes}
            while not all(timed.values()):
                for n, seconds in passes(sizes, 2 * len(SIZES), turn=sum(map(len, timed.values()))).items():
                    timed[n] += seconds
            plain.append(step())
            for n, seconds in timed.items():
                ratios[n].append(statistics.median(seconds) / statistics.mean(plain[-2:]))
            bar.update(min(bar.total, round(time.perf_counter() - start - compiling)) - bar.n)
            last = f"{ratios[sizes[-1]][-1]:.2f}x at {sizes[-1]} nodes"
            bar.set_postfix(plain=f"{1000 * plain[-1]:.2f} ms", last=last)
    base = statistics.median(plain)
    return [base, *_of_all_sizes({n: base * statistics.median(of) for n, of in ratios.items()}, dear)]


def _of_all_sizes(costs: dict[int, float], dear: bool) -> list[float]:
    """Costs of SIZES from those of the smaller ones. dear: whether larger trees can not pay."""
    sizes, seconds = [*costs], [*costs.values()]
    if dear:
        return [costs.get(n, seconds[-1] * n / sizes[-1]) for n in SIZES]
    return [costs.get(n, max(seconds[-1], along(sizes, seconds, n))) for n in SIZES]
