"""`nodes="auto"`: how many nodes pay in this pass, and whether drafting pays at all.

Nothing here can change the output. What a pass costs is measured within 20 seconds, once for a target and a machine,
when decoding has taken as long as that; until then trees have 4 or 8 nodes. The rules, each with what it rests on
(figures in notebooks/results/):

1. A pass runs the nodes that give it the most expected tokens per second: path probabilities, corrected by how often
   nodes of such a rank were accepted, over the measured cost of a pass (`selfspec.budget.cost`) and the time the draft
   took. Trees are cut to those nodes. Ranks differ: on other texts than it was calibrated on, a drafter's first node
   keeps its promise better than its eighth. The correction is slow, since one text must not decide for all others
   (Medusa at T=0 went plain at 0.91x where drafting brought 1.14x).
2. A drafter is asked for a power of two of nodes, since a compiled engine compiles every size. Twice as many are tried
   where most of them are kept, half as many where few are, and the size that expects more tokens per second stays.
3. Where mask slots stand in the pass, it has the rows, a power of two, that expect the most tokens per second at the
   measured costs. Any other tree that can not be cut gets the largest of 8, 16 and 32 nodes whose pass costs at most a
   quarter more than that of one node, and 8 where none does: early exit and lookahead lose more by dear passes than
   larger trees bring.
4. From the ninth pass of a call, drafting goes on only as long as its drafted passes expect more tokens per second
   than plain steps (trees that can not be cut: brought, since their nodes work for later passes too); else the rest of
   the call is plain. Earlier calls count as 24 passes in that, for texts differ: with prompt lookup at T=0.7 some
   decode plainly at best, others three times as fast (as 96 where trees can not be cut: lookahead has to collect
   first). Where earlier calls were slower than plain decoding by 3%, a call is plain from its first pass, but for every
   eighth, which tries. The first draft of a call, for which a drafter reads the prompt, counts for nothing here: it
   is spent when the others are judged (for EAGLE-3 with prompt lookup at T=1 one long prompt had ended all drafting).
5. Times are compared in units of measured costs: the speed of a machine drifts, the ratio of draft to pass does not.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace

import torch

from selfspec.budget.cost import LARGEST
from selfspec.core.contract import Accepted, Context, Drafts, MaskSlots, Session
from selfspec.core.rows import clock
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain
from selfspec.utils.files import mean, shown

_TRIAL = 8  # a drafter that does not pay after so many passes is given up; every so many calls it is tried again
_HOPE = 1.25  # speedup that drafting is believed to bring at first
_HOPED = {True: 8, False: 48}  # as if seen in so many passes; by whether trees can be cut
_EARLIER = {True: 24, False: 96}  # passes that earlier calls count as when a call is judged; as above
_LOSS = 0.97  # speedup below which a call is not even begun with drafts
# The weight that a pass keeps with every further pass: of times, of what expectations are worth, in the number of
# passes of a size.
_KEEP, _STEADY, _FORGOTTEN = 0.99, 0.998, 0.99
# Ranks that are corrected together, 1, 2 and 3, 4 to 7, ..., and accepted nodes of each that are believed at first.
_RANKS, _BELIEVED = 7, 20.0
_SMALLEST = 4  # nodes that a drafter is asked for


def unmeasured(device: torch.device) -> int:
    """Nodes of a tree while nothing is known of what a pass costs. Processors with AVX2 alone compute 8 at twice the
    cost of one."""
    weak = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
    return 4 if weak else 8


@dataclass
class Experience:
    """What earlier passes of one decoding mode and batch size taught, older ones weighing less. calls: so far; slow:
    time of passes over their measured costs; expected, accepted: nodes by their path probabilities, and those accepted,
    for ranks 1, 2 and 3, 4 to 7, ... of a tree; tokens, seconds: of drafted passes, per row and at measured costs;
    draft, passes: seconds of drafting, and how many passes were drafted for; asked: nodes that a drafter is asked for;
    kept: of them, as trees were cut; by_size: of passes by the nodes asked for, what they were worth, their time, and
    how many there were lately; prunable: whether trees can be cut."""

    calls: int = 0
    slow: float = 1.0
    expected: list[float] = field(default_factory=lambda: [_BELIEVED] * _RANKS)
    accepted: list[float] = field(default_factory=lambda: [_BELIEVED] * _RANKS)
    tokens: float = 0.0
    seconds: float = 0.0
    draft: float = 0.0
    passes: float = 0.0
    asked: int = 8
    kept: float = 6.0
    by_size: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    prunable: bool = True

    def speedup(self, costs: list[float]) -> float:
        """Tokens per second of drafted passes over those of plain steps, as believed so far."""
        hoped = _HOPED[self.prunable]
        return (self.tokens + hoped * _HOPE) / (self.seconds / costs[0] + hoped)

    def nodes(self, costs: list[float]) -> int:
        """What a drafter is asked for (rules 2 and 3)."""
        if self.prunable:
            return self.asked
        return max((n for n in (8, 16, 32) if costs[n] <= 1.25 * costs[1]), default=8)

    @property
    def trust(self) -> list[float]:
        """What the path probability of a node is multiplied with, by its rank in the tree, from rank 1 on."""
        ratios = [accepted / expected for accepted, expected in zip(self.accepted, self.expected, strict=True)]
        return [ratios[rank.bit_length() - 1] for rank in range(1, LARGEST)]

    def learn(self, ranks: list[int], probabilities: list[float], path: list[int]) -> None:
        """What came of one row's tree: ranks of its nodes below the root, their path probabilities, and which of them
        were accepted."""
        self.expected, self.accepted = ([_STEADY * x for x in of] for of in (self.expected, self.accepted))
        for node, (rank, probability) in enumerate(zip(ranks, probabilities, strict=True), 1):
            at = min(rank, LARGEST - 1).bit_length() - 1
            self.expected[at] += probability
            self.accepted[at] += node in path

    def book(self, tokens: float, rows: int, expected: float, draft: float, cost: float) -> float:
        """A drafted pass that emitted `tokens` tokens over so many rows; draft and cost in measured seconds. Returns
        what the pass is worth: tokens per row."""
        self.draft, self.passes = _KEEP * self.draft + draft, _KEEP * self.passes + 1
        worth = (rows + expected if self.prunable and expected > 0 else tokens) / rows
        self.tokens, self.seconds = _KEEP * self.tokens + worth, _KEEP * self.seconds + cost + draft
        if self.prunable:
            self._ask(worth, cost + draft)
        return worth

    def _ask(self, worth: float, seconds: float) -> None:
        """Choose what is asked for next, after a pass that was asked for `asked` nodes (rule 2)."""
        asked = self.asked  # other threads may change it
        sizes = {size: (w, s, _FORGOTTEN * n) for size, (w, s, n) in self.by_size.items()}
        w, s, n = sizes.get(asked, (0.0, 0.0, 0.0))
        sizes[asked] = _KEEP * w + worth, _KEEP * s + seconds, n + 1
        self.by_size = sizes
        if n + 1 < _TRIAL:
            return
        compared = [asked]
        larger, smaller = self.kept > 0.8 * asked, self.kept < 0.6 * asked
        for size, promising in ((2 * asked, larger), (asked // 2, smaller)):
            if sizes.get(size, (0.0, 0.0, 0.0))[2] >= _TRIAL / 2:
                compared.append(size)
            elif promising and _SMALLEST <= size <= LARGEST:
                self.asked = size
                return
        self.asked = max(compared, key=lambda size: sizes[size][0] / sizes[size][1])


@dataclass
class Forecast:
    """What was expected of a call, pass by pass and before each of them. passes; nodes, tokens: in all; steps: the time
    in plain steps; speedup over plain decoding without the reading of the prompt; measured: whether it is known what a
    pass costs, without which nothing is expected."""

    passes: int = 0
    nodes: int = 0
    tokens: float = 0.0
    steps: float = 0.0
    measured: bool = True

    @property
    def speedup(self) -> float:
        return self.tokens / self.steps if self.steps else 1.0

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "speedup": self.speedup}

    def __str__(self) -> str:
        if not self.measured:
            return "auto: small trees, until calls have taken 20 s in all; then the cost of a pass is measured once"
        nodes = mean(self.nodes, self.passes)
        if nodes == 1:
            return "auto: no tree pays, decoding plainly"
        return f"auto: {shown(nodes, 1)} nodes a pass, expected {self.speedup:.2f}x"


class Auto:
    """Stands in for a drafter during one call and sizes its trees."""

    def __init__(
        self, drafter: Drafts, costs: list[float], past: Experience, forecast: Forecast, rows: int, limit: int
    ) -> None:
        """costs: as `pass_costs` gives them; limit: new tokens of each of the rows at most."""
        self.drafter, self.costs, self.past, self.forecast, self.limit = drafter, costs, past, forecast, limit
        past.calls += 1
        self.plain = past.speedup(costs) < _LOSS and past.calls % _TRIAL > 0
        self.reads = () if self.plain else drafter.reads

    def session(self, target: Target, rows: int) -> Session:
        return AutoSession(self, None if self.plain else self.drafter.session(target, rows), rows, target)


@dataclass
class _Drafted:
    """A pass under way: its rows and their tokens before it, what its tree expects, and its times."""

    rows: int
    length: int
    expected: float
    nodes: int
    shared: bool  # whether drafting has run some of the target's layers
    ready: float  # when the draft was ready
    draft: float  # seconds of drafting
    ranked: list[tuple[list[int], list[float]]]  # of each row's nodes below the root: their ranks, path probabilities


def _ranked(tree: DraftTree) -> list[tuple[list[int], list[float]]]:
    if tree.scores is None:
        return []
    rows = []
    for scores in tree.scores.expand_as(tree.tokens).tolist():
        order = sorted(range(1, len(scores)), key=scores.__getitem__, reverse=True)
        ranks = dict(zip(order, range(1, len(scores)), strict=True))
        rows.append(([ranks[node] for node in range(1, len(scores))], scores[1:]))
    return rows


class AutoSession:
    """What one call keeps. inner: the drafter's session, None from where decoding is plain; compiled: functions that
    the engine had compiled before the last draft. What a pass took that compiled some teaches nothing."""

    def __init__(self, auto: Auto, inner: Session | None, rows: int, target: Target) -> None:
        self.target, self.compiled = target, target.compiled
        self.inner, self.rows, self.limit = inner, rows, auto.limit
        self.costs, self.past, self.forecast = auto.costs, auto.past, auto.forecast
        self.end = 0  # of the longest row
        self.earlier, self.tokens, self.steps = auto.past.speedup(auto.costs), 0.0, 0.0  # of earlier calls; of this one
        self.last: _Drafted | None = None
        self.root: DraftTree | None = None

    def propose(self, context: Context) -> DraftTree:
        past, rows, length = self.past, len(context.lengths), sum(map(len, context.tokens))
        self.end = self.end or self.limit + max(map(len, context.tokens))
        steady, self.compiled = self.target.compiled == self.compiled, self.target.compiled
        begun = self.forecast.passes > 1  # the first draft has read the prompt too, which is spent (rule 4)
        if (last := self.last) is not None and last.rows == rows and steady and begun:
            draft, cost = last.draft / past.slow, self._cost(last.nodes)
            self.tokens += past.book(length - last.length, rows, last.expected, draft, cost)
            self.steps += (draft + cost) / self.costs[0]
        weight = _EARLIER[past.prunable]
        lost = self.tokens + weight * self.earlier < self.steps + weight
        if self.inner is None or (self.forecast.passes >= _TRIAL and lost):
            return self._root(context)
        start, plain = clock(context.roots.device), 1 / self.costs[0]
        nodes = past.nodes(self.costs)
        if isinstance(masked := self.inner, MaskSlots):
            trust, mode = sum(past.accepted) / sum(past.expected), context.mode
            nodes = max(
                (4, 8, 16, 32, LARGEST), key=lambda n: (1 + trust * masked.expected_drafted(mode, n)) / self.costs[n]
            )
        limited = replace(context, nodes=nodes, rate=plain / past.slow)
        tree, expected = self.target.shaped(self.inner.propose(limited)), 0.0
        if tree.scores is not None and tree.tokens.shape[1] > 1:
            past.prunable = tree.prunable
            tree, expected = self._cut(tree, (clock(context.roots.device) - start) / past.slow)
        nodes = tree.tokens.shape[1]
        left = rows * min(nodes, max(1, self.end - max(map(len, context.tokens))))
        usual = past.draft / past.passes if past.passes else 0.0
        tokens = min(left, rows + expected)
        self._expect(nodes, tokens, (self._cost(nodes) + usual) * rows * plain)
        ready = clock(context.roots.device)
        self.last = _Drafted(rows, length, expected, nodes, tree.start > 0, ready, ready - start, _ranked(tree))
        return tree

    def _cost(self, nodes: int) -> float:
        return self.costs[min(nodes, LARGEST)]

    def _root(self, context: Context) -> DraftTree:
        """No tree: from here on this call decodes plainly, and the drafter sees nothing more of it."""
        rows = len(context.roots)
        if self.root is None or len(self.root.tokens) != rows:
            self.root = chain(context.roots[:, None])
        self.inner = self.last = None
        self._expect(1, rows, rows)
        return self.root.with_tokens(context.roots[:, None])

    def _expect(self, nodes: int, tokens: float, steps: float) -> None:
        self.forecast.passes += 1
        self.forecast.nodes += nodes
        self.forecast.tokens += tokens
        self.forecast.steps += steps

    def _cut(self, tree: DraftTree, spent: float) -> tuple[DraftTree, float]:
        """The best nodes of a tree, as many as give this pass the most tokens per second, `spent` seconds of drafting
        included (rule 1), and the drafted tokens they expect."""
        assert tree.scores is not None
        scores = tree.scores.expand_as(tree.tokens).tolist()
        # Parents come before their children and have no smaller probability: with a stable sort none is missing.
        order = [sorted(range(len(row)), key=row.__getitem__, reverse=True) for row in scores]
        trust = self.past.trust
        best, worth, expected, total = 1, 0.0, 0.0, 0.0
        for n in range(1, min(len(order[0]), LARGEST) + 1):
            if n > 1:
                total += trust[n - 2] * sum(row[at[n - 1]] for row, at in zip(scores, order, strict=True))
            if (rate := (len(scores) + total) / (spent + self.costs[n])) > worth:
                best, worth, expected = n, rate, total
        self.past.kept = 0.9 * self.past.kept + 0.1 * best
        if not tree.prunable or best == len(order[0]):
            return tree, total
        chosen = [sorted(at[:best]) for at in order]
        chosen_nodes = torch.tensor(chosen, device=tree.tokens.device)
        place = torch.full_like(tree.tokens, -1)
        place.scatter_(1, chosen_nodes, torch.arange(best, device=chosen_nodes.device).expand_as(chosen_nodes))
        above = tree.parents.gather(1, chosen_nodes)
        parents = place.gather(1, above.clamp(min=0)).where(above >= 0, above)
        cut = DraftTree(
            tree.tokens.gather(1, chosen_nodes), parents, tree.scores.expand_as(tree.tokens).gather(1, chosen_nodes)
        )
        if tree.sources is not None:
            cut = cut.with_sources([[s[n] for n in at] for s, at in zip(tree.sources, chosen, strict=True)])
        return cut, expected

    def observe(self, accepted: Accepted) -> None:
        if self.inner is None:
            return
        start = clock(accepted.hidden.device)
        steady = self.target.compiled == self.compiled
        if (last := self.last) is not None and last.rows == self.rows and not last.shared and steady:
            # costs are of whole passes of all rows
            self.past.slow = 0.9 * self.past.slow + 0.1 * (start - last.ready) / self._cost(last.nodes)
            for row, path in zip(accepted.rows, accepted.paths, strict=True):
                if last.ranked:
                    self.past.learn(*last.ranked[row], path)
        self.inner.observe(accepted)
        if last is not None:
            last.draft += clock(accepted.hidden.device) - start
