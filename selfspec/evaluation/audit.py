"""The audit: is speculative output that of plain decoding, and where it is not, do numerics explain it?

Plain decoding passes one token at a time, verification many; the two run different kernels, whose results differ in the
last bits. How much is measured on stock transformers alone: token by token with its own cache, against each whole text
in one pass. The logits of both our decodings have to lie that close to each other and to the stock ones; where outputs
part for the first time, so has the target's margin between the two tokens. Beyond that noise, a difference is a bug.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache

from selfspec.api import Spec
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options, as_seed, check, end_tokens
from selfspec.core.rows import MAX_NODES
from selfspec.core.sampling import Sampling, gumbel, noise_bits, warp
from selfspec.core.support import cache_name
from selfspec.core.verify import Relaxed
from selfspec.data.questions import Asking
from selfspec.evaluation.arms import without_defaults
from selfspec.utils.checks import at_least, not_empty
from selfspec.utils.files import Figures
from selfspec.utils.progress import progress

VERDICTS = ("identical", "explained by numerics", "BUG")
_LIKELY = 16  # tokens whose logits count for the noise: unlikely ones decide nothing
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
                f"audit.distribution_samples={self.distribution_samples} can tell no distribution; give at least 500, "
                "or 0 for no test"
            )
        for temperature in self.temperatures:
            Sampling(temperature)


@dataclass
class Divergence:
    """Where a row parted from plain decoding: the index among new tokens, both tokens (-1: the text had ended), the
    target's margin between them (in logits, its noise included; infinite where one text ended and the other did not),
    and how far the two passes' logits lie apart there."""

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
    from the stock one-token passes; deviation: the largest between our two decodings."""

    dtype: str
    rows: int
    tokens: int
    noise: float
    noise_median: float
    deviation_plain: float
    deviation: float
    divergences: list[Divergence]

    @property
    def bound(self) -> float:
        return _SLACK * self.noise

    @property
    def verdict(self) -> str:
        found = (self.deviation, self.deviation_plain, *(d.margin for d in self.divergences))
        if not all(value <= self.bound for value in found):  # NaN is no less a bug
            return VERDICTS[2]
        return VERDICTS[1] if self.divergences else VERDICTS[0]

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


@torch.inference_mode()
def audit(spec: Spec, prompts: list[list[int]], config: AuditConfig) -> Audit:
    """Decode every prompt plainly, alone, and speculatively in every setting, and compare row by row."""
    target = spec.target
    eos = end_tokens(target)
    check(target, prompts, Options(config.max_new_tokens))
    rows = tokens = 0
    noise: list[Tensor] = []
    deviation = deviation_plain = least = 0.0
    divergences: list[Divergence] = []
    settings = [(t, s) for t in config.temperatures for s in (config.seeds if t > 0 else config.seeds[:1])]
    trees = [(n, b) for n in config.nodes for b in config.batch_sizes]
    bar = progress(total=len(settings) * len(prompts) * (1 + len(trees)), desc="audit")
    for temperature, seed in settings:
        seeds = [seed + i for i in range(len(prompts))]
        plain: list[list[int]] = []
        logits: list[Tensor] = []
        for prompt, own in zip(prompts, seeds, strict=True):
            options = Options(config.max_new_tokens, Sampling(temperature), [own], eos, record=True)
            result = autoregressive(target, [prompt], options)
            plain += result.token_ids
            logits.append(torch.stack([raw for raw, _ in result.records[0]]))
            if (temperature, seed) in (settings[0], settings[-1]):
                steps, whole = _stock(spec, prompt, plain[-1])
                noise.append(_swing(steps, whole))
                least = max(least, float(logits[-1].abs().max()))
                deviation_plain = max(deviation_plain, _largest(_swing(steps, logits[-1])))
            bar.update()
        for nodes, size in trees:
            for first in range(0, len(prompts), size):
                part = range(first, min(first + size, len(prompts)))
                options = Options(
                    config.max_new_tokens, Sampling(temperature), [seeds[i] for i in part], eos, record=True
                )
                result = speculative(target, [prompts[i] for i in part], options, spec.drafter, nodes)
                for i, new, records in zip(part, result.token_ids, result.records, strict=True):
                    pairs = enumerate(zip(plain[i], new, strict=False))
                    shorter = min(len(plain[i]), len(new))
                    at = next((j for j, (a, b) in pairs if a != b), shorter)
                    rows, tokens = rows + 1, tokens + at
                    same = min(at + 1, shorter)  # the logits behind one and the same prefix
                    swings = _swing(logits[i][:same], torch.stack([raw for raw, _ in records[:same]]))
                    deviation = max(deviation, _largest(swings))
                    if at < max(len(plain[i]), len(new)):
                        both = [row[at] if at < len(row) else -1 for row in (plain[i], new)]
                        before = logits[i][min(at, shorter - 1)]
                        margin = _margin(before, both, temperature, seeds[i], len(prompts[i]) + at)
                        where = (i, temperature, seed, nodes, size, at)
                        divergences.append(Divergence(*where, both[0], both[1], margin, float(swings[-1])))
                    bar.update()
                    bar.set_postfix(divergences=len(divergences), tokens=tokens, refresh=False)
    bar.close()
    measured = torch.cat(noise)
    least *= torch.finfo(target.dtype).eps  # of answers of one token, both sides of which are one pass over the prompt
    figures = (max(_largest(measured), least), float(measured.median()), deviation_plain, deviation)
    return Audit(f"torch.{target.dtype_name}", rows, tokens, *figures, divergences)


def _margin(logits: Tensor, tokens: list[int], temperature: float, seed: int, position: int) -> float:
    """How far the target's score of the first token lies above that of the second; from logits [V] and its noise."""
    if -1 in tokens:
        return math.inf
    pair = torch.tensor(tokens, device=logits.device)
    scores = logits[pair].double()
    if temperature > 0:
        zero = pair.new_tensor(0)
        scores = scores + temperature * gumbel(noise_bits(zero + seed, zero, zero + position, pair))
    return float(scores[0] - scores[1])


# -- whether sampled texts have the target's own distribution: chi-square tests of the first three tokens


@dataclass
class DistributionTest:
    """Chi-square of texts of three tokens: against the exact distribution (`name`: whose texts), or of two samples."""

    name: str
    samples: int
    bins: int
    statistic: float
    p: float


@torch.inference_mode()
def exact_distribution(spec: Spec, prompt: list[int], top_k: int, length: int = 3) -> dict[tuple[int, ...], float]:
    """Probabilities of all texts of `length` tokens under the model's own top-k distribution at temperature 1 (with
    transformers' warper, which keeps ties), from plain passes over every prefix."""
    warpers = Sampling(1.0, top_k=top_k).warpers()
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, prob in exact.items():
            ids = torch.tensor([prompt + list(prefix)], device=spec.target.device)
            scores = warp(spec.target.model(input_ids=ids, use_cache=False).logits[:, -1], warpers)
            p = scores[0].double().softmax(-1)
            for token in p.nonzero().flatten().tolist():
                longer[(*prefix, token)] = prob * float(p[token])
        exact = longer
    return exact


def _joined(order: Tensor, least: float, *columns: Tensor) -> list[Tensor]:
    """Columns [n] with the smallest bins by `order` summed into one until that one reaches `least`."""
    by_size = order.argsort()
    sizes = order[by_size]
    small = max(int((sizes < least).sum()), int((sizes.cumsum(0) < least).sum()) + 1)
    rest, first = by_size[small:], by_size[:small]
    return [torch.cat([column[first].sum(0, keepdim=True), column[rest]]) for column in columns]


def _p_value(statistic: Tensor, bins: int) -> float:
    freedom = torch.tensor(max(1, bins - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def chi_square(observed: Tensor, expected: Tensor) -> tuple[float, float, int]:
    """Statistic, p-value and bins of Pearson's test; observed, expected: float64 [n], small bins joined up to 5."""
    observed, expected = _joined(expected, 5.0, observed, expected)
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(statistic), _p_value(statistic, len(expected)), len(expected)


def two_samples(one: Tensor, other: Tensor) -> tuple[float, float, int]:
    """The same for two samples of one size, counts float64 [n]: in each bin half of both is expected of either."""
    one, other = _joined(one + other, 10.0, one, other)
    statistic = ((one - other) ** 2 / (one + other)).sum()
    return float(statistic), _p_value(statistic, len(one)), len(one)


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
    index = {text: i for i, text in enumerate(exact)}
    expected = torch.tensor(list(exact.values()), dtype=torch.float64) * samples

    def drafted(relaxed: Relaxed | None) -> Tensor:
        texts = []
        for first in range(0, samples, 100):
            seeds = [seed + first + i for i in range(min(100, samples - first))]
            options = Options(3, Sampling(1.0, top_k=top_k), seeds, relaxed=relaxed)
            texts += speculative(spec.target, [prompt] * len(seeds), options, spec.drafter, nodes).token_ids
        return _counted(texts, index)

    def unseen(logits: Tensor, picks: list[int], below: list[list[int]]) -> list[int]:
        return [children[0] if children else pick for pick, children in zip(picks, below, strict=True)]

    ours, biased = drafted(None), drafted(unseen)
    theirs = _counted(_of_transformers(spec, prompt, samples, top_k, seed), index)
    wanted = torch.cat([expected, torch.zeros(1)])  # 0 of texts outside, which rounding alone can produce
    tests = []
    for name, observed in (("speculative", ours), ("transformers", theirs), ("biased on purpose", biased)):
        statistic, p, bins = chi_square(observed, wanted)
        tests.append(DistributionTest(f"{name} against the exact distribution", samples, bins, statistic, p))
    statistic, p, bins = two_samples(ours, theirs)
    tests.append(DistributionTest("speculative against transformers", samples, bins, statistic, p))
    return tests


def _counted(texts: Sequence[Sequence[int]], index: dict[tuple[int, ...], int]) -> Tensor:
    """How often each text came, by its place in `index`; behind them, how many came that are not in it."""
    other = [tuple(text) for text in texts if tuple(text) not in index]
    at = torch.tensor([index[tuple(text)] for text in texts if tuple(text) in index], dtype=torch.long)
    counts = torch.bincount(at, minlength=len(index)).double()
    return torch.cat([counts, torch.tensor([float(len(other))])])


def _of_transformers(spec: Spec, prompt: list[int], samples: int, top_k: int, seed: int) -> list[list[int]]:
    """`samples` continuations of three tokens, sampled by transformers."""
    torch.manual_seed(seed)
    texts = list[list[int]]()
    ids = torch.tensor([prompt], device=spec.target.device)
    for first in range(0, samples, 100):
        with without_defaults(spec.target.model):
            out = spec.target.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=3,
                do_sample=True,
                top_k=top_k,
                temperature=1.0,
                eos_token_id=None,
                pad_token_id=0,
                num_return_sequences=min(100, samples - first),
            )
        texts += out[:, len(prompt) :].tolist()
    return texts


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
