"""Whether sampled texts have the target's own distribution: chi-square tests of the first three tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.api import Spec
from selfspec.core.generate import speculative
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling, warp
from selfspec.core.verify import Relaxed
from selfspec.evaluation.arms import without_defaults


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
