"""The audit: is speculative output that of plain decoding, and where it is not, do numerics explain it?

Plain decoding passes one token at a time, verification many; the two run different kernels, whose results differ in the
last bits. How much is measured on stock transformers alone: token by token with its own cache, against each whole text
in one pass. The logits of both our decodings have to lie that close to each other and to the stock ones; where outputs
part for the first time, so has the target's margin between the two tokens; and each token of plain decoding has to be
the pick of the stock logits. Beyond that noise, a difference is a bug.

Logits are seen where they are recorded, which takes other code than decoding otherwise does: each setting is decoded
both ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import DynamicCache

from selfspec.api import Spec
from selfspec.core.generate import Result, autoregressive, speculative
from selfspec.core.options import Options, as_seed, check
from selfspec.core.rows import MAX_NODES
from selfspec.core.sampling import Sampling, gumbel, noise_bits
from selfspec.core.support import cache_name
from selfspec.core.verify import Relaxed
from selfspec.data.questions import Asking
from selfspec.evaluation.arms import hf_generate
from selfspec.utils.checks import at_least, not_empty
from selfspec.utils.files import Figures
from selfspec.utils.progress import progress

VERDICTS = ("identical", "explained by numerics", "BUG")
_LIKELY = 16  # tokens whose logits count for the noise: unlikely ones decide nothing
_ALIKE = 4  # roundings by which two passes over one prompt differ, where no noise is measured
_SLACK = 3.0  # what may lie beyond the largest noise measured, of fewer positions and one kind of pass


@dataclass
class AuditConfig(Asking):
    """Every prompt is decoded at every temperature, seed, tree size and batch size. temperatures: all of them; seeds:
    of the noise; nodes: of the draft trees; batch_sizes: prompts per call; distribution_samples: texts of the
    distribution test (0: leave it out); distribution_top_k: the likeliest tokens that it tells apart."""

    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.7, 1.0])
    seeds: list[int] = field(default_factory=lambda: [0])
    nodes: list[int] = field(default_factory=lambda: [8, 32])
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4])
    distribution_samples: int = 2000
    distribution_top_k: int = 5

    def __post_init__(self) -> None:
        self.check("audit")
        not_empty(self, "audit", "temperatures", "seeds", "nodes", "batch_sizes")
        at_least(self, "audit", 1, "distribution_top_k", "batch_sizes")
        at_least(self, "audit", 1, "nodes", most=MAX_NODES)
        as_seed(list(self.seeds))
        if self.distribution_samples < 0 or 0 < self.distribution_samples < 500:
            raise ValueError(
                f"audit.distribution_samples={self.distribution_samples} is too few for the test of the "
                "distribution; give at least 500, or 0 for no test"
            )
        for temperature in self.temperatures:
            Sampling(temperature)


@dataclass
class Divergence:
    """Where a row parted from plain decoding (of nodes 0: plain decoding from itself, when nothing is recorded): the
    index among new tokens, both tokens (-1: the text had ended), the target's margin between them (in logits, its noise
    included; infinite where one text ended and the other did not), and how far the two passes' logits lie apart there
    (NaN: not seen)."""

    prompt: int
    temperature: float
    seed: int
    nodes: int
    batch_size: int
    position: int
    plain_token: int
    speculative_token: int
    margin: float
    deviation: float


@dataclass
class Audit:
    """rows: texts compared; tokens: up to each one's first divergence. In logits: noise, the largest deviation of stock
    many-token passes from stock one-token passes, and its median; deviation_plain: the largest of our plain decoding
    from the stock one-token passes; deviation: the largest between our two decodings; missed: how far a token of plain
    decoding scores below the best by the stock logits, at most."""

    dtype: str
    rows: int
    tokens: int
    noise: float
    noise_median: float
    deviation_plain: float
    deviation: float
    missed: float
    divergences: list[Divergence]

    @property
    def bound(self) -> float:
        return _SLACK * self.noise

    @property
    def verdict(self) -> str:
        found = self.deviation, self.deviation_plain, self.missed
        if not all(value <= self.bound for value in found):  # NaN is no less a bug
            return VERDICTS[2]
        if not all(map(self.explained, self.divergences)):
            return VERDICTS[2]
        return VERDICTS[1] if self.divergences else VERDICTS[0]

    def explained(self, divergence: Divergence) -> bool:
        """Whether noise explains it: either token may have been the pick."""
        return abs(divergence.margin) <= self.bound

    def as_dict(self) -> Figures:
        return {**asdict(self), "bound": self.bound, "verdict": self.verdict}


def _swing(one: Tensor, other: Tensor) -> Tensor:
    """Largest change [n] of any logit difference among the likely tokens, from logits [n, V] to other logits [n, V]."""
    likely = one.topk(min(_LIKELY, one.shape[-1])).indices
    change = (other.gather(1, likely) - one.gather(1, likely)).double()
    return change.amax(1) - change.amin(1)


def _largest(swings: Tensor) -> float:
    """The largest change; infinite where logits are NaN."""
    return float(swings.nan_to_num(nan=math.inf).max())


def _stock(spec: Spec, prompt: list[int], new: list[int]) -> tuple[Tensor, Tensor]:
    """Logits [len(new), V] before each new token by transformers alone: token by token, and in one pass."""
    model, text = spec.target.model, torch.tensor([prompt + new[:-1]], device=spec.target.device)
    whole = model(input_ids=text, use_cache=False).logits[0, len(prompt) - 1 :]
    cache = {cache_name(model): DynamicCache(config=model.config)}
    steps = [model(input_ids=text[:, : len(prompt)], use_cache=True, **cache).logits[:, -1]]
    for at in range(len(prompt), text.shape[1]):
        steps.append(model(input_ids=text[:, at : at + 1], use_cache=True, **cache).logits[:, -1])
    return torch.cat(steps), whole


class _Comparison:
    """Adds to an audit, setting by setting. noise: of each position."""

    def __init__(self, spec: Spec, prompts: list[list[int]], config: AuditConfig) -> None:
        self.spec, self.prompts, self.config = spec, prompts, config
        self.eos = spec.target.end_tokens
        self.trees = [(n, b) for n in config.nodes for b in config.batch_sizes]
        self.found = Audit(f"torch.{spec.target.dtype_name}", 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, [])
        self.noise: list[Tensor] = []
        self.largest = 0.0  # logit

    def setting(self, temperature: float, seed: int, stock: bool, update: Callable[[int], object]) -> None:
        """Decode every prompt plainly, alone, and in every tree and batch size. stock: whether plain decoding is held
        against transformers; update: called with the number of texts that were decoded."""
        seeds = [seed + i for i in range(len(self.prompts))]
        plain, logits, own, found = list[list[int]](), list[Tensor](), list[list[int]](), self.found

        def decoded(part: range, record: bool, nodes: int = 0) -> Result:
            sampling, chosen = Sampling(temperature), [seeds[i] for i in part]
            options = Options(self.config.max_new_tokens, sampling, chosen, self.eos, record=record)
            given = self.spec.target, [self.prompts[i] for i in part], options
            result = speculative(*given, self.spec.drafter, nodes) if nodes else autoregressive(*given)
            update(len(part))
            return result

        def compare(i: int, new: list[int], nodes: int, size: int, swings: Tensor) -> int:
            """Where a text parts from plain decoding, or ends. swings: of its logits, as far as they were seen."""
            at = _parting(plain[i], new)
            if at < max(len(plain[i]), len(new)):
                both = [row[at] if at < len(row) else -1 for row in (plain[i], new)]
                margin = _margin(logits[i][min(at, len(plain[i]) - 1)], both, temperature, seeds[i], start[i] + at)
                apart = float(swings[at]) if at < len(swings) else math.nan
                where = i, temperature, seed, nodes, size, at
                if not found.divergences or astuple(found.divergences[-1])[:6] != where:
                    found.divergences.append(Divergence(*where, both[0], both[1], margin, apart))
            return at

        start = [len(prompt) for prompt in self.prompts]
        for i, prompt in enumerate(self.prompts):
            result = decoded(range(i, i + 1), True)
            plain += result.token_ids
            logits.append(torch.stack([raw for raw, _ in result.records[0]]))
            if stock:
                steps, whole = _stock(self.spec, prompt, plain[i])
                self.noise.append(_swing(steps, whole))
                self.largest = max(self.largest, float(logits[i].abs().max()))
                found.deviation_plain = max(found.deviation_plain, _largest(_swing(steps, logits[i])))
                found.missed = max(found.missed, _missed(steps, plain[i], temperature, seeds[i], start[i]))
            own += decoded(range(i, i + 1), False).token_ids
            compare(i, own[i], 0, 1, torch.empty(0))
        for nodes, size in self.trees:
            for first in range(0, len(self.prompts), size):
                part = range(first, min(first + size, len(self.prompts)))
                seen, unseen = decoded(part, True, nodes), decoded(part, False, nodes)
                for i, new, records, text in zip(part, seen.token_ids, seen.records, unseen.token_ids, strict=True):
                    same = min(_parting(plain[i], new) + 1, len(plain[i]), len(new))  # logits behind one prefix
                    swings = _swing(logits[i][:same], torch.stack([raw for raw, _ in records[:same]]))
                    found.deviation = max(found.deviation, _largest(swings))
                    compare(i, new, nodes, size, swings)
                    found.rows += 1
                    found.tokens += len(text) if text == own[i] else compare(i, text, nodes, size, swings)


def _parting(one: list[int], other: list[int]) -> int:
    """Where two texts differ for the first time, or the shorter one ends."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


@torch.inference_mode()
def audit(spec: Spec, prompts: list[list[int]], config: AuditConfig) -> Audit:
    """Decode every prompt plainly, alone, and speculatively in every setting, and compare row by row."""
    check(spec.target, prompts, Options(config.max_new_tokens))
    if large := [size for size in config.batch_sizes if size > len(prompts)]:
        print(f"warning: audit.batch_sizes={large}, but there are {len(prompts)} prompts: one batch of them")
    settings = [(t, s) for t in config.temperatures for s in (config.seeds if t > 0 else config.seeds[:1])]
    comparison = _Comparison(spec, prompts, config)
    found = comparison.found
    with progress(total=2 * len(settings) * len(prompts) * (1 + len(comparison.trees)), desc="audit") as bar:
        for setting in settings:
            comparison.setting(*setting, setting in (settings[0], settings[-1]), bar.update)
            bar.set_postfix(divergences=len(found.divergences), tokens=found.tokens, refresh=False)
    noise = torch.cat(comparison.noise)
    # Of answers of one token, both sides of which are one pass over the prompt
    least = _ALIKE * comparison.largest * torch.finfo(spec.target.dtype).eps
    found.noise, found.noise_median = max(_largest(noise), least), float(noise.median())
    return found


def _scores(logits: Tensor, ids: Tensor, temperature: float, seed: int, positions: Tensor) -> Tensor:
    """What picks are made by, in logits: float64, of logits of these tokens, int64, at positions, int64; the three are
    broadcast."""
    if not temperature:
        return logits.double()
    zero = ids.new_tensor(0)
    return logits.double() + temperature * gumbel(noise_bits(zero + seed, zero, positions, ids))


def _missed(logits: Tensor, new: list[int], temperature: float, seed: int, start: int) -> float:
    """How far below the best the tokens of a text score at most, from logits [n, V] before each; start: the first's
    position."""
    ids, at = (torch.arange(n, device=logits.device) for n in (logits.shape[1], len(new)))
    scores = _scores(logits, ids, temperature, seed, (start + at)[:, None])
    own = scores.gather(1, torch.tensor(new, device=logits.device)[:, None])
    return _largest(scores.amax(1, keepdim=True) - own)


def _margin(logits: Tensor, tokens: list[int], temperature: float, seed: int, position: int) -> float:
    """How far the target's score of the first token lies above that of the second; from logits [V] and its noise."""
    if -1 in tokens:
        return math.inf
    pair = torch.tensor(tokens, device=logits.device)
    scores = _scores(logits[pair], pair, temperature, seed, pair.new_tensor(position))
    return float(scores[0] - scores[1])


# -- whether sampled texts have the target's own distribution: chi-square tests of the first three tokens


@dataclass
class DistributionTest:
    """Chi-square of texts of three tokens: against the exact distribution (`name`: whose texts), or of two samples."""

    name: str
    samples: int
    statistic: float
    p: float
    bins: int


@torch.inference_mode()
def exact_distribution(spec: Spec, prompt: list[int], top_k: int, length: int = 3) -> dict[tuple[int, ...], float]:
    """Probabilities of all texts of `length` tokens at temperature 1, from plain passes over every prefix. Behind each
    prefix the `top_k` likeliest tokens are distinguished; -1 stands for any other, and ends a text."""
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, prob in exact.items():
            if prefix[-1:] == (-1,):
                longer[prefix] = prob
                continue
            ids = torch.tensor([prompt + list(prefix)], device=spec.target.device)
            law = spec.target.model(input_ids=ids, use_cache=False).logits[0, -1].double().softmax(-1)
            likely = law.topk(min(top_k, len(law)))
            named = dict(zip(likely.indices.tolist(), likely.values.tolist(), strict=True))
            rest = max(0.0, 1.0 - sum(named.values()))
            longer |= {(*prefix, token): prob * p for token, p in (named | {-1: rest}).items()}
        exact = longer
    return exact


def _joined(order: Tensor, least: float, *columns: Tensor) -> list[Tensor]:
    """Columns [n] with the smallest bins by `order` summed into one until that one reaches `least`."""
    by_size = order.argsort()
    sizes = order[by_size]
    small = max(int((sizes < least).sum()), int((sizes.cumsum(0) < least).sum()) + 1)
    rest, first = by_size[small:], by_size[:small]
    return [torch.cat([column[first].sum(0, keepdim=True), column[rest]]) for column in columns]


def chi_square(observed: Tensor, expected: Tensor, sampled: bool = False) -> tuple[float, float, int]:
    """Statistic, p-value and bins of Pearson's test; observed, expected: float64 [n], small bins joined up to 5.
    sampled: `expected` is a sample of the same size; in each bin half of both is expected of either."""
    observed, expected = _joined(observed * sampled + expected, 5.0 * (1 + sampled), observed, expected)
    statistic, bins = ((observed - expected) ** 2 / (observed * sampled + expected)).sum(), len(expected)
    half = torch.tensor(max(1, bins - 1) / 2, dtype=torch.float64)
    return float(statistic), float(torch.special.gammaincc(half, statistic / 2)), bins


@torch.inference_mode()
def distribution_tests(
    spec: Spec, prompts: list[list[int]], samples: int, top_k: int, nodes: int, seed: int = 0
) -> list[DistributionTest]:
    """Speculative texts against the exact distribution and against transformers' own sampling; and, as a negative
    control that has to fail, those of a rule that is biased on purpose (it takes the first drafted token unseen).

    Of the prompts, the one whose distribution has the most entropy is continued.
    """
    distributions = [exact_distribution(spec, prompt, top_k) for prompt in prompts]
    entropies = [-sum(p * math.log(p) for p in exact.values() if p > 0) for exact in distributions]
    best = entropies.index(max(entropies))
    exact, prompt = distributions[best], prompts[best]
    wanted = torch.tensor(list(exact.values()), dtype=torch.float64) * samples
    parts = [range(first, min(first + 100, samples)) for first in range(0, samples, 100)]

    def drafted(part: range, relaxed: Relaxed | None = None) -> list[list[int]]:
        options = Options(3, Sampling(1.0), [seed + i for i in part], relaxed=relaxed)
        return speculative(spec.target, [prompt] * len(part), options, spec.drafter, nodes).token_ids

    def of_transformers(part: range) -> list[list[int]]:
        """Their own sampling, which no end token ends."""
        return hf_generate(spec, [prompt] * len(part), 3, Sampling(1.0), seed + part[0], eos=()).token_ids

    def unseen(logits: Tensor, picks: list[int], below: list[list[int]]) -> list[int]:
        return [children[0] if children else pick for pick, children in zip(picks, below, strict=True)]

    arms = (drafted, of_transformers, partial(drafted, relaxed=unseen))
    ours, theirs, biased = (_counted([text for part in parts for text in arm(part)], exact) for arm in arms)
    against = "against the exact distribution"
    return [
        DistributionTest(f"speculative {against}", samples, *chi_square(ours, wanted)),
        DistributionTest(f"transformers {against}", samples, *chi_square(theirs, wanted)),
        DistributionTest(f"biased on purpose {against}", samples, *chi_square(biased, wanted)),
        DistributionTest("speculative against transformers", samples, *chi_square(ours, theirs, sampled=True)),
    ]


def _counted(texts: Sequence[Sequence[int]], exact: dict[tuple[int, ...], float]) -> Tensor:
    """How often each of the texts that are distinguished came."""
    counts, known = dict.fromkeys(exact, 0.0), {text[:n] for text in exact for n in range(len(text) + 1)}
    for text in map(tuple, texts):
        other = next((n for n in range(len(text)) if text[: n + 1] not in known), None)
        counts[text if other is None else (*text[:other], -1)] += 1
    return torch.tensor(list(counts.values()), dtype=torch.float64)


def distribution_verdict(tests: list[DistributionTest], level: float = 1e-4) -> str:
    """`exact` where all tests pass but the control, which fails; else what is wrong."""
    control = [t for t in tests if t.name.startswith("biased")]
    wrong = [t.name for t in tests if t not in control and t.p < level]
    if wrong:
        return f"BUG: {', '.join(wrong)}"
    return (
        "exact"
        if all(t.p < level for t in control)
        else "undecided: the biased control passed too; raise distribution_samples"
    )
