"""`nodes="auto"`: how many nodes pay in this pass, and whether drafting pays at all.

Nothing here can change the output. Times are in plain steps. What a pass costs is measured (`selfspec.budget.cost`);
what a node is worth is the path probability that its drafter gives it, times how often nodes of its rank kept such
promises (`Experience`). Everything else follows (figures in notebooks/results/):

1. A pass runs the best nodes of its tree, as many as give the most expected tokens per second, the draft's time
   included. Ranks are corrected apart: on other texts than it was calibrated on, a drafter's first node keeps its
   promise better than its eighth. The correction is slow, since one text must not decide for all others.
2. A drafter is asked for a power of two of nodes, since a compiled engine compiles every size. Twice as many are tried
   where most are kept, half as many where few are; the size that expects more tokens per second stays.
3. With mask slots a pass has the rows, a power of two, that expect the most tokens per second. Any other tree that can
   not be cut gets the largest of 8, 16 and 32 nodes that costs at most a quarter more than one node, or 8: early exit
   and lookahead lose more by dear passes than larger trees bring.
4. From the ninth pass of a call, drafting goes on while its passes promise more tokens per second than plain steps (of
   trees that can not be cut: bring); else the rest of the call is plain. Earlier calls count in that, since texts
   differ. Where earlier calls were slower than plain decoding by 3%, only every eighth call tries to draft. The first
   draft of a call reads the prompt and counts for nothing: it is spent when the others are judged.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from time import perf_counter

import torch

from selfspec.budget.cost import LARGEST
from selfspec.core.contract import Accepted, Context, Drafts, MaskSlots, Session
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain
from selfspec.utils.files import mean, shown

_TRIAL = 8  # passes before a call is judged; every so many calls a drafter that did not pay is tried again
_HOPE, _HOPED = 1.25, 48.0  # speedup that drafting is believed to bring at first, as if seen in so many passes
_EARLIER = {True: 24, False: 96}  # passes that earlier calls count as; by whether trees can be cut
_LOSS = 0.97  # speedup below which a call is not even begun with drafts
_KEEP, _STEADY = 0.99, 0.998  # the weight that a pass keeps with every further one: of times, of promises
_RANKS, _BELIEVED = 7, 20.0  # classes of ranks, 1, 2 and 3, 4 to 7, ...; accepted nodes of each that are believed first
_SMALLEST = 4  # nodes that a drafter is asked for


def unmeasured(device: torch.device) -> int:
    """Nodes of a tree while nothing is known of what a pass costs. Processors with AVX2 alone compute 8 at twice the
    cost of one."""
    weak = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
    return 4 if weak else 8


def _ranked(scores: list[float]) -> list[int]:
    """Nodes by their path probabilities, the likeliest first. Parents come before their children and have no smaller
    one, so that with a stable sort the first nodes are a tree."""
    return sorted(range(len(scores)), key=scores.__getitem__, reverse=True)


@dataclass
class Experience:
    """What earlier passes of one decoding mode and batch size taught, older ones weighing less.

    calls: so far; slow: time of passes over their measured costs; expected, accepted: by class of ranks, nodes by their
    path probabilities, and those accepted; tokens, steps: of drafted passes, per row; draft, passes: time of drafting,
    and for how many passes; asked: nodes that a drafter is asked for; kept: of them, as trees were cut; by_size: by the
    nodes asked for, tokens, steps and passes; prunable: whether trees can be cut."""

    calls: int = 0
    slow: float = 1.0
    expected: list[float] = field(default_factory=lambda: [_BELIEVED] * _RANKS)
    accepted: list[float] = field(default_factory=lambda: [_BELIEVED] * _RANKS)
    tokens: float = _HOPED * _HOPE
    steps: float = _HOPED
    draft: float = 0.0
    passes: float = 0.0
    asked: int = 8
    kept: float = 6.0
    by_size: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    prunable: bool = True

    @property
    def speedup(self) -> float:
        """Tokens per second of drafted passes over those of plain steps, as believed so far."""
        return self.tokens / self.steps

    def trust(self, rank: int) -> float:
        """How much of its path probability a node of this rank, from 1 on, keeps."""
        at = min(rank, LARGEST - 1).bit_length() - 1
        return self.accepted[at] / self.expected[at]

    def learn(self, scores: list[float], path: list[int]) -> None:
        """What came of one row's tree: its nodes' path probabilities, and which of them were accepted."""
        self.expected, self.accepted = ([_STEADY * x for x in of] for of in (self.expected, self.accepted))
        for rank, node in enumerate(_ranked(scores)[1:], 1):
            at = min(rank, LARGEST - 1).bit_length() - 1
            self.expected[at] += scores[node]
            self.accepted[at] += node in path

    def book(self, worth: float, draft: float, cost: float) -> None:
        """A drafted pass, worth so many tokens per row (rule 2)."""
        self.draft, self.passes = _KEEP * self.draft + draft, _KEEP * self.passes + 1
        self.tokens, self.steps = _KEEP * self.tokens + worth, _KEEP * self.steps + draft + cost
        sizes = {size: (w, s, _KEEP * n) for size, (w, s, n) in self.by_size.items()}
        w, s, n = sizes.get(asked := self.asked, (0.0, 0.0, 0.0))
        sizes[asked] = _KEEP * w + worth, _KEEP * s + draft + cost, n + 1
        self.by_size = sizes  # other threads may read it
        if n + 1 < _TRIAL or not self.prunable:
            return
        beside = {2 * asked: self.kept > 0.8 * asked, asked // 2: self.kept < 0.6 * asked}
        known = [size for size in beside if sizes.get(size, (0, 0, 0))[2] >= _TRIAL / 2]
        untried = [n for n, promising in beside.items() if promising and n not in known and _SMALLEST <= n <= LARGEST]
        self.asked = [*untried, max((asked, *known), key=lambda n: sizes[n][0] / sizes[n][1])][0]


@dataclass
class Forecast:
    """What was expected of a call, pass by pass and before each of them. passes; nodes, tokens: in all; steps: the time
    in plain steps; measured: whether it is known what a pass costs, without which nothing is expected."""

    passes: int = 0
    nodes: int = 0
    tokens: float = 0.0
    steps: float = 0.0
    measured: bool = True

    @property
    def speedup(self) -> float:
        """Over plain decoding, without the reading of the prompt."""
        return self.tokens / self.steps if self.steps else 1.0

    def expect(self, nodes: int, tokens: float, steps: float) -> None:
        """One pass more."""
        self.passes, self.nodes = self.passes + 1, self.nodes + nodes
        self.tokens, self.steps = self.tokens + tokens, self.steps + steps

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "speedup": self.speedup}

    def __str__(self) -> str:
        if not self.measured:
            return (
                "auto: small trees, until calls have taken 20 s in all and few other programs run; then the cost of a "
                "pass is measured once"
            )
        nodes = mean(self.nodes, self.passes)
        if nodes == 1:
            return "auto: no tree pays, decoding plainly"
        return f"auto: {shown(nodes, 1)} nodes a pass, expected {self.speedup:.2f}x"


class Auto:
    """Stands in for a drafter during one call and sizes its trees."""

    def __init__(self, drafter: Drafts, costs: list[float], past: Experience, forecast: Forecast, limit: int) -> None:
        """costs: as `pass_costs` gives them; limit: new tokens of each row at most."""
        self.drafter, self.costs, self.past, self.forecast, self.limit = drafter, costs, past, forecast, limit
        past.calls += 1
        self.plain = past.speedup < _LOSS and past.calls % _TRIAL > 0
        self.reads = () if self.plain else drafter.reads

    def session(self, target: Target, rows: int) -> Session:
        return AutoSession(self, None if self.plain else self.drafter.session(target, rows), rows, target)


@dataclass
class _Drafted:
    """A pass under way. rows, length: of its call, and their tokens before it; expected: drafted tokens of all rows;
    scores: path probabilities of each row's nodes, where known; ready: when the draft was; draft: its time in
    steps."""

    nodes: int
    start: int  # of the target's layers, which drafting has run up to there
    rows: int
    length: int
    expected: float
    scores: list[list[float]]
    ready: float
    draft: float


class AutoSession:
    """What one call keeps. inner: the drafter's session, None from where decoding is plain; compiled: functions that
    the engine had compiled before the last draft. What a pass took that compiled some teaches nothing."""

    def __init__(self, auto: Auto, inner: Session | None, rows: int, target: Target) -> None:
        self.target, self.compiled, self.inner, self.rows = target, target.compiled, inner, rows
        self.past, self.forecast, self.limit, self.step = auto.past, auto.forecast, auto.limit, auto.costs[0]
        self.costs = [cost / self.step for cost in auto.costs]
        self.earlier, self.tokens, self.steps, self.end = auto.past.speedup, 0.0, 0.0, 0
        self.last: _Drafted | None = None
        self.root: DraftTree | None = None  # of plain steps

    def propose(self, context: Context) -> DraftTree:
        past, rows, longest = self.past, len(context.lengths), max(map(len, context.tokens))
        length, self.end = sum(map(len, context.tokens)), self.end or self.limit + longest
        self._book(rows, length)
        weight = _EARLIER[past.prunable]
        if self.forecast.passes >= _TRIAL and self.tokens + weight * self.earlier < self.steps + weight:
            self.inner = None
        if self.inner is None:
            if self.root is None or len(self.root.tokens) != rows:
                self.root = chain(context.roots[:, None])
            self.last = None
            self.forecast.expect(1, rows, rows)
            return self.root.with_tokens(context.roots[:, None])
        start = perf_counter()
        limited = replace(context, nodes=self._nodes(context.mode), rate=1 / (self.step * past.slow))
        tree, expected, scores = self.target.shaped(self.inner.propose(limited)), 0.0, list[list[float]]()
        if tree.scores is not None and tree.tokens.shape[1] > 1:
            past.prunable = tree.prunable
            tree, expected, scores = self._cut(tree, start)
        nodes = tree.tokens.shape[1]
        left = rows * min(nodes, max(1, self.end - longest))
        usual = past.draft / past.passes if past.passes else 0.0
        self.forecast.expect(nodes, min(left, rows + expected), (self._cost(nodes) + usual) * rows)
        ready = perf_counter()
        self.last = _Drafted(nodes, tree.start, rows, length, expected, scores, ready, self._steps(start, ready))
        return tree

    def _book(self, rows: int, length: int) -> None:
        """Take in the last pass, whose rows have `length` tokens now; the first of a call read the prompt."""
        steady, self.compiled = self.target.compiled == self.compiled, self.target.compiled
        last = self.last
        if last is None or last.rows != rows or not steady or self.forecast.passes < 2:
            return
        tokens, cost = length - last.length, self._cost(last.nodes)
        promised = self.past.prunable and last.expected > 0  # varies less than what came of it
        worth = (rows + last.expected if promised else tokens) / rows
        self.past.book(worth, last.draft, cost)
        self.tokens, self.steps = self.tokens + worth, self.steps + last.draft + cost

    def _steps(self, start: float, end: float) -> float:
        """Time in plain steps of a machine that is as fast as when costs were measured."""
        return (end - start) / (self.step * self.past.slow)

    def _cost(self, nodes: int) -> float:
        return self.costs[min(nodes, LARGEST)]

    def _nodes(self, mode: str) -> int:
        """What the drafter is asked for (rules 2 and 3)."""
        if isinstance(slots := self.inner, MaskSlots):
            trust, sizes = sum(self.past.accepted) / sum(self.past.expected), (4, 8, 16, 32, LARGEST)
            return max(sizes, key=lambda n: (1 + trust * slots.expected_drafted(mode, n)) / self.costs[n])
        if self.past.prunable:
            return self.past.asked
        return max((n for n in (8, 16, 32) if self.costs[n] <= 1.25 * self.costs[1]), default=8)

    def _cut(self, tree: DraftTree, start: float) -> tuple[DraftTree, float, list[list[float]]]:
        """The best nodes of a tree, as many as give this pass the most tokens per second, drafting since `start`
        included (rule 1), the drafted tokens that they expect, and their scores."""
        assert tree.scores is not None
        scores = tree.scores.expand_as(tree.tokens).tolist()
        spent = self._steps(start, perf_counter())  # reading them has waited for a GPU
        order, sums = [_ranked(row) for row in scores], [0.0]
        for rank in range(1, min(len(order[0]), LARGEST)):
            drafted = sum(row[at[rank]] for row, at in zip(scores, order, strict=True))
            sums.append(sums[-1] + self.past.trust(rank) * drafted)
        best = max(range(len(sums)), key=lambda n: (len(scores) + sums[n]) / (spent + self.costs[n + 1])) + 1
        self.past.kept = 0.9 * self.past.kept + 0.1 * best
        if not tree.prunable or best == len(order[0]):
            return tree, sums[-1], scores
        kept = [sorted(at[:best]) for at in order]
        left = [[row[node] for node in at] for row, at in zip(scores, kept, strict=True)]
        return tree.only(kept), sums[best - 1], left

    def observe(self, accepted: Accepted) -> None:
        if self.inner is None:
            return
        start, last = perf_counter(), self.last  # the walk was read: a GPU is through with the pass
        self.inner.observe(accepted)
        if last is None:
            return
        if last.rows == self.rows and not last.start and self.target.compiled == self.compiled:
            took = start - last.ready  # of a whole pass of all rows, which costs are of
            self.past.slow = 0.9 * self.past.slow + 0.1 * took / (self.step * self._cost(last.nodes))
            for row, path in zip(accepted.rows, accepted.paths, strict=True):
                if last.scores:
                    self.past.learn(last.scores[row], path)
        last.draft += self._steps(start, perf_counter())
