"""`nodes="auto"`: how large a tree pays on this machine, decided anew in every pass.

The cost of a pass over n nodes is measured once for a target, device and dtype and kept in a file. What a tree is worth
is the sum of its nodes' chances to be accepted, which every drafter gives from its measured acceptance, corrected by
how many tokens such promises have brought so far. A node stays in the tree if it brings more tokens than its time would
bring otherwise; where drafting brings less than plain steps, decoding is plain.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import platform
import random
import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from selfspec.generate import Accepted, Context, Options, autoregressive, clock, speculative
from selfspec.sampling import Sampling
from selfspec.target import Target
from selfspec.tree import DraftTree, chain

LARGEST = 64
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, LARGEST)  # where the cost of a pass is measured; linear in between
_WHOLE = (8, 16, 32)  # sizes for drafters whose tree can not be cut
_ROUNDS = 24
_HOPE, _HOPED = 1.25, 8  # at first drafting is believed to be so much faster than plain steps, as if so many were seen
_WHOLE_HOPED = 48  # the same for trees that can not be cut: their nodes work for later passes too
_FAIR = 8  # passes that drafting is given in a call before it is judged
_TRY = 8  # calls after which what did not pay is tried again
_KEEP = 0.99  # weight that a pass keeps in the averages with every further pass
_STEADY = 0.998  # the same where one text must not decide


def device_name(device: torch.device) -> str:
    """What a cost depends on beside target and dtype: the device, and on a CPU how many threads compute."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{model or platform.processor()}, {capability}, {torch.get_num_threads()} threads"


def cost_file(target: Target, rows: int) -> Path:
    """Where the costs of this target on this device lie: in $SELFSPEC_CACHE, or selfspec's folder in the user's
    cache."""
    cache = os.environ.get("SELFSPEC_CACHE")
    home = Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selfspec"
    key = json.dumps([_identity(target, rows), target.model.config.to_json_string()])
    return home / "costs" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _identity(target: Target, rows: int) -> dict[str, Any]:
    return {
        "device": device_name(target.device),
        "target": target.name,
        "dtype": str(target.dtype),
        "rows": rows,
        "torch": torch.__version__,
    }


def pass_costs(target: Target, rows: int = 1, sampled: bool = False) -> list[float]:
    """Seconds of a pass over 0, 1, ..., LARGEST nodes per row, all but drafting included; over 0 nodes: of a plain
    step.

    Raises ValueError for a file of costs that was measured on another device, or is damaged.
    """
    path = cost_file(target, rows)
    identity = _identity(target, rows)
    kind = "sampled" if sampled else "greedy"
    if path.is_file():
        try:
            found = json.loads(path.read_text())
            seconds = [float(found[kind][str(n)]) for n in (0, *SIZES)]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error!r}); delete it, it will be measured again") from error
        wrong = {key: found.get(key) for key, value in identity.items() if found.get(key) != value}
        if wrong:
            raise ValueError(
                f"{path} holds costs of {wrong}, not of { ({key: identity[key] for key in wrong}) }; delete it, they "
                "will be measured again"
            )
        return _interpolated(seconds)
    costs: dict[str, Any] = {}
    for way in ("greedy", "sampled"):
        measured = measure_costs(target, rows, float(way == "sampled"))
        costs[way] = {str(n): s for n, s in zip((0, *SIZES), measured, strict=True)}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps({**identity, **costs}, indent=1) + "\n")
    os.replace(scratch, path)
    return _interpolated(list(costs[kind].values()))


def _interpolated(seconds: list[float]) -> list[float]:
    """Costs of 0 to LARGEST nodes. A larger tree is not cheaper; where it seems so, that is noise, and both are given
    their mean."""
    blocks: list[tuple[float, int]] = []  # (mean, sizes it stands for)
    for value in seconds[1:]:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            (a, m), (b, n) = blocks[-2:]
            blocks[-2:] = [((a * m + b * n) / (m + n), m + n)]
    smooth = [mean for mean, count in blocks for _ in range(count)]
    line = [min(seconds[0], smooth[0])]  # a plain step is a pass without a tree
    points = list(zip(SIZES, smooth, strict=True))
    for (n, low), (m, high) in itertools.pairwise(points):
        line += [low + (high - low) * i / (m - n) for i in range(m - n)]
    return [*line, smooth[-1]]


class _Probe:
    """Trees of arbitrary tokens, all sizes in turn, timed from the end of one `propose` to the start of the next."""

    features: tuple[int, ...] = ()

    def __init__(self, vocab: int) -> None:
        self.random, self.vocab = random.Random(0), vocab
        self.seconds: dict[int, list[float]] = {n: [] for n in SIZES}
        self.clock = {"turn": 0, "start": 0.0}  # decoding works on copies, which share it

    def propose(self, context: Context) -> DraftTree:
        if self.clock["start"]:
            size = SIZES[int(self.clock["turn"]) % len(SIZES)]
            self.seconds[size].append(clock(context.roots.device) - self.clock["start"])
            self.clock["turn"] += 1
        n, rows = SIZES[int(self.clock["turn"]) % len(SIZES)], len(context.lengths)
        parents = [-1, *(self.random.randrange(max(0, i - 6), i) for i in range(1, n))]
        tokens = torch.tensor([[self.random.randrange(self.vocab) for _ in range(n)] for _ in range(rows)])
        tokens = tokens.to(context.roots.device)
        tokens[:, 0] = context.roots
        tree = DraftTree(tokens, torch.tensor([parents] * rows, device=tokens.device))
        self.clock["start"] = clock(tokens.device)
        return tree

    def observe(self, accepted: Accepted) -> None:
        pass


def measure_costs(target: Target, rows: int, temperature: float) -> list[float]:
    """Median seconds of a plain step, then of a pass over each of SIZES nodes per row, behind a prompt of 128 tokens.

    Every round runs all sizes between two stretches of plain steps, and what counts is their ratio, so that a machine
    whose speed drifts does not decide.
    """
    room = target.max_positions or 4096
    made = random.Random(1)
    prompts = [[made.randrange(target.vocab_size) for _ in range(min(128, room // 2))] for _ in range(rows)]
    sampling = Sampling(temperature)

    def step() -> float:
        stats = autoregressive(target, prompts, Options(min(len(SIZES), room // 2), sampling)).stats
        return (stats.seconds_target + stats.seconds_other) / stats.forwards

    ratios: dict[int, list[float]] = {n: [] for n in SIZES}
    plain = [step()]
    bar = tqdm(range(_ROUNDS), desc="measure the cost of a pass", mininterval=1.0, leave=False)
    for _ in bar:
        probe = _Probe(target.vocab_size)
        while not all(probe.seconds.values()):
            probe.clock["start"] = 0.0  # a prompt comes first
            speculative(target, prompts, Options(min(2 * len(SIZES), room // 2), sampling), probe, LARGEST)
        plain.append(step())
        for n, seconds in probe.seconds.items():
            ratios[n].append(statistics.median(seconds) / statistics.mean(plain[-2:]))
        bar.set_postfix(plain=f"{1000 * plain[-1]:.2f} ms", last=f"{ratios[SIZES[-1]][-1]:.2f}x at {SIZES[-1]} nodes")
    base = statistics.median(plain)
    return [base, *(base * statistics.median(ratios[n]) for n in SIZES)]


@dataclass
class Average:
    """Tokens and seconds of late, older passes weighing less."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens, self.seconds = _KEEP * self.tokens + tokens, _KEEP * self.seconds + seconds

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Seen:
    """What earlier passes taught, call after call, of one way of decoding. slow: seconds over measured costs of late,
    by which all other times here are divided, since a machine's speed drifts; promised, kept: drafted tokens by their
    chances, and those accepted; trust: the same (kept, promised), slowly, beginning with what was measured before;
    draft: seconds, and passes drafted for; size: nodes that paid; ways: tokens and seconds by tree size asked for (0:
    whatever the chances said)."""

    calls: int = 0
    slow: float = 1.0
    promised: float = 20.0
    kept: float = 20.0
    trust: list[float] = field(default_factory=lambda: [300.0, 300.0])
    draft: list[float] = field(default_factory=lambda: [0.0, 0.0])
    size: float = 16.0
    ways: dict[int, Average] = field(default_factory=dict)


@dataclass
class Forecast:
    """What was expected of a call, pass by pass and before each of them. passes; nodes, tokens: in all; steps: the time
    in plain steps; speedup over plain decoding without the reading of the prompt."""

    passes: int = 0
    nodes: int = 0
    tokens: float = 0.0
    steps: float = 0.0

    @property
    def speedup(self) -> float:
        return self.tokens / self.steps if self.steps else 1.0

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "speedup": self.speedup}

    def __str__(self) -> str:
        mean = self.nodes / max(1, self.passes)
        if mean == 1:
            return "auto: no tree pays, decoding plainly"
        return f"auto: {mean:.1f} nodes a pass, expected {self.speedup:.2f}x"


class Auto:
    """Stands in for a drafter during one call and sizes its trees."""

    def __init__(self, drafter: Any, costs: list[float], seen: Seen, forecast: Forecast, rows: int, limit: int) -> None:
        """costs: as `pass_costs` gives them; limit: new tokens of each of the rows at most."""
        self.drafter, self.costs, self.seen, self.forecast = copy.copy(drafter), costs, seen, forecast
        self.whole, self.thrifty = drafter.own_tree, drafter.thrifty
        for way in _WHOLE if self.whole else (0,):
            steps = _WHOLE_HOPED if self.whole else _HOPED
            seen.ways.setdefault(way, Average(_HOPE * steps, steps * costs[0]))
        self.way, self.passes, self.nodes, self.promise = 0, 0, 1, 0.0
        self.start = self.ready = self.drafting = self.end = 0.0
        self.all_rows, self.rows, self.length = rows, 0, 0
        self.end_at = limit  # of the longest row, once its prompt is known
        self.root: DraftTree | None = None
        self.shared = False  # whether drafting has run some of the target's layers
        seen.calls += 1
        self.plain = not self._pays() and seen.calls % _TRY > 0
        self.features = () if self.plain else drafter.features

    def _pays(self) -> bool:
        """Whether drafting is worth its time."""
        return self.thrifty or max(way.rate for way in self.seen.ways.values()) >= 1 / self.costs[0]

    def propose(self, context: Context) -> DraftTree:
        seen, rows, length = self.seen, len(context.lengths), sum(map(len, context.tokens))
        if self.end and rows == self.rows:
            self._book(length - self.length)
        if not self.passes:
            self.end_at += max(map(len, context.tokens))
        self.passes += 1
        if self.plain or (self.passes > _FAIR and not self._pays()):
            return self._root(context)
        self.start, self.rows, self.length = clock(context.roots.device), rows, length
        self.way = max(seen.ways, key=lambda n: seen.ways[n].rate)
        asked = self.way or int(min(LARGEST, max(8, 2 * seen.size)))
        plain = rows / self.costs[0]
        tree: DraftTree = self.drafter.propose(replace(context, nodes=asked, rate=plain / seen.slow))
        self.promise = 0.0
        if tree.scores is not None and tree.tokens.shape[1] > 1:
            spent = (clock(context.roots.device) - self.start) / seen.slow
            tree, self.promise = self._cut(tree, spent)
        self.nodes, self.shared = tree.tokens.shape[1], tree.start > 0
        drafting = seen.draft[0] / seen.draft[1] if seen.draft[1] else 0.0
        left = rows * min(self.nodes, max(1, self.end_at - max(map(len, context.tokens))))
        tokens = min(left, rows + self.promise * seen.kept / seen.promised)
        self._expect(tokens, (self.costs[min(self.nodes, LARGEST)] + drafting) * plain)
        self.ready = clock(context.roots.device)
        self.drafting = self.ready - self.start
        return tree

    def _root(self, context: Context) -> DraftTree:
        """No tree: from here on this call decodes plainly, and the drafter sees nothing more of it."""
        rows = len(context.roots)
        if self.root is None or len(self.root.tokens) != rows:
            self.root = chain(context.roots[:, None])
        self.plain, self.features, self.nodes, self.end = True, (), 1, 0.0
        self._expect(rows, rows)
        return self.root.with_tokens(context.roots[:, None])

    def _expect(self, tokens: float, steps: float) -> None:
        self.forecast.passes += 1
        self.forecast.nodes += self.nodes
        self.forecast.tokens += tokens
        self.forecast.steps += steps

    def _cut(self, tree: DraftTree, spent: float) -> tuple[DraftTree, float]:
        """The best nodes of a tree, as many as give this pass the most tokens per second, `spent` seconds of drafting
        included, and the drafted tokens they promise."""
        assert tree.scores is not None
        scores = tree.scores.expand_as(tree.tokens).tolist()
        # Parents come before their children and have no smaller chance: with a stable sort none is missing.
        order = [sorted(range(len(row)), key=row.__getitem__, reverse=True) for row in scores]
        trust = self.seen.kept / self.seen.promised
        best, worth, promise, total = 1, 0.0, 0.0, 0.0
        for n in range(1, min(len(order[0]), LARGEST) + 1):
            total += sum(row[at[n - 1]] for row, at in zip(scores, order, strict=True)) if n > 1 else 0.0
            if (rate := (len(scores) + trust * total) / (spent + self.costs[n])) > worth:
                best, worth, promise = n, rate, total
        self.seen.size = 0.9 * self.seen.size + 0.1 * best
        if self.whole or best == len(order[0]):
            return tree, total
        kept = torch.tensor([sorted(at[:best]) for at in order], device=tree.tokens.device)
        place = torch.full_like(tree.tokens, -1)
        place.scatter_(1, kept, torch.arange(best, device=kept.device).expand_as(kept))
        above = tree.parents.gather(1, kept)
        parents = place.gather(1, above.clamp(min=0)).where(above >= 0, above)
        return DraftTree(tree.tokens.gather(1, kept), parents), promise

    def observe(self, accepted: Accepted) -> None:
        if self.plain:
            return
        start = clock(accepted.hidden.device)
        if self.ready and self.rows == self.all_rows and not self.shared:  # costs are of whole passes of all rows
            slow = (start - self.ready) / self.costs[min(self.nodes, LARGEST)]
            self.seen.slow = 0.9 * self.seen.slow + 0.1 * slow
        self.drafter.observe(accepted)
        self.end = clock(accepted.hidden.device)
        self.drafting += self.end - start

    def _book(self, tokens: int) -> None:
        """Take in what the pass before this one brought, now that its text is there."""
        seen, drafting = self.seen, self.drafting / self.seen.slow
        if self.nodes > 1:
            seen.promised = _KEEP * seen.promised + self.promise
            seen.kept = _KEEP * seen.kept + tokens - self.rows
            kept, promised = seen.trust
            seen.trust = [_STEADY * kept + tokens - self.rows, _STEADY * promised + self.promise]
        seen.draft = [_KEEP * seen.draft[0] + drafting, _KEEP * seen.draft[1] + 1]
        cost = self.costs[min(self.nodes, LARGEST)] + drafting
        expected = self.rows + self.promise * seen.trust[0] / seen.trust[1]
        seen.ways[self.way].add((tokens if self.whole else expected) / self.rows, cost)
