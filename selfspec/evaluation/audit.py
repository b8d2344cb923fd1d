"""The audit: is speculative output that of plain decoding, and where it is not, do numerics explain it?

Plain decoding passes one token at a time, verification many; the two run different kernels, whose results differ in the
last bits. How much is measured without any tree: stock transformers over each whole text in one pass, against the
logits of plain decoding. Where the outputs part for the first time, the target's own margin between the two tokens has
to lie within that noise; beyond it, the difference is a bug.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from selfspec.generate import autoregressive, speculative
from selfspec.options import Options, check
from selfspec.sampling import Sampling, gumbel, noise_bits
from selfspec.spec import Spec, end_tokens
from selfspec.verify import Relaxed

VERDICTS = ("identical", "explained by numerics", "BUG")
_LIKELY = 16  # tokens whose logits count for the noise: unlikely ones decide nothing
_SLACK = 2.0  # a first divergence may lie this many times beyond the largest noise that was measured elsewhere


@dataclass
class AuditConfig:
    """prompts of prompt_tokens tokens are cut from the held-out text, or taken from prompt_file (JSON lines); each is
    decoded at every temperature, seed, tree size and batch size. law_samples: texts of the distribution test, over the
    law_top_k likeliest tokens (0: leave that test out)."""

    prompts: int = 24
    prompt_tokens: int = 128
    prompt_file: str | None = None
    max_new_tokens: int = 128
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.7, 1.0])
    seeds: list[int] = field(default_factory=lambda: [0])
    nodes: list[int] = field(default_factory=lambda: [8, 32])
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4])
    law_samples: int = 4000
    law_top_k: int = 5

    def __post_init__(self) -> None:
        for name in ("prompts", "prompt_tokens", "max_new_tokens", "law_top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"audit.{name}={getattr(self, name)} must be at least 1")
        for name in ("temperatures", "seeds", "nodes", "batch_sizes"):
            if not getattr(self, name):
                raise ValueError(f"audit.{name} is empty; give at least one value")
        for name in ("nodes", "batch_sizes"):
            if bad := [v for v in getattr(self, name) if v < 1]:
                raise ValueError(f"audit.{name} holds {bad[0]}; it must be at least 1")
        if 0 < self.law_samples < 500:
            raise ValueError(
                f"audit.law_samples={self.law_samples} can tell no law; give at least 500, or 0 for no test"
            )
        for temperature in self.temperatures:
            Sampling(temperature)


@dataclass
class Divergence:
    """Where a row parted from plain decoding: the index among new tokens, both tokens, the target's margin between
    them (in logits, its noise included), and how far the two passes' logits lie apart there."""

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
    """rows: texts compared; tokens: up to each one's first divergence; noise: the largest deviation, in logits, of
    stock many-token passes from one-token passes, and its median; deviation: the largest between the two decodings."""

    dtype: str
    rows: int
    tokens: int
    noise: float
    noise_median: float
    deviation: float
    divergences: list[Divergence]

    @property
    def bound(self) -> float:
        return _SLACK * self.noise

    @property
    def verdict(self) -> str:
        if any(d.margin > self.bound for d in self.divergences):
            return VERDICTS[2]
        return VERDICTS[1] if self.divergences else VERDICTS[0]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bound": self.bound, "verdict": self.verdict}


def _swing(one: Tensor, other: Tensor) -> Tensor:
    """Largest change [n] of any logit difference among the likely tokens, from logits [n, V] to other logits [n, V]."""
    likely = one.topk(min(_LIKELY, one.shape[-1])).indices
    change = (other.gather(1, likely) - one.gather(1, likely)).double()
    return change.amax(1) - change.amin(1)


@torch.inference_mode()
def audit(spec: Spec, prompts: list[list[int]], config: AuditConfig) -> Audit:
    """Decode every prompt plainly, alone, and speculatively in every setting, and compare row by row."""
    target = spec.target
    eos = end_tokens(target)
    check(target, prompts, Options(config.max_new_tokens))
    rows = tokens = 0
    noise: list[Tensor] = []
    deviation = 0.0
    found: list[Divergence] = []
    settings = [(t, s) for t in config.temperatures for s in (config.seeds if t > 0 else config.seeds[:1])]
    trees = [(n, b) for n in config.nodes for b in config.batch_sizes]
    bar = tqdm(total=len(settings) * len(prompts) * (1 + len(trees)), desc="audit", mininterval=1.0)
    for temperature, seed in settings:
        seeds = [seed + i for i in range(len(prompts))]
        plain: list[list[int]] = []
        logits: list[Tensor] = []
        for prompt, own in zip(prompts, seeds, strict=True):
            options = Options(config.max_new_tokens, Sampling(temperature), [own], eos, record=True)
            result = autoregressive(target, [prompt], options)
            plain += result.token_ids
            logits.append(torch.stack([raw for raw, _ in result.records[0]]))
            text = torch.tensor([prompt + plain[-1][:-1]], device=target.device)
            whole = target.model(input_ids=text, use_cache=False).logits[0, len(prompt) - 1 :]
            noise.append(_swing(logits[-1], whole))
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
                    at = next((j for j, (a, b) in pairs if a != b), min(len(plain[i]), len(new)))
                    rows, tokens = rows + 1, tokens + at
                    same = min(at + 1, len(plain[i]), len(new))  # the logits behind one and the same prefix
                    swings = _swing(logits[i][:same], torch.stack([raw for raw, _ in records[:same]]))
                    deviation = max(deviation, float(swings.max()))
                    if at < min(len(plain[i]), len(new)):
                        pair = torch.tensor([plain[i][at], new[at]], device=target.device)
                        scores = logits[i][at][pair].double()
                        if temperature > 0:
                            where = torch.tensor(len(prompts[i]) + at, device=target.device)
                            bits = noise_bits(pair.new_tensor(seeds[i]), pair.new_tensor(0), where, pair)
                            scores = scores + temperature * gumbel(bits)
                        margin = float(scores[0] - scores[1])
                        where_to = (temperature, seed, nodes, size, at, plain[i][at], new[at])
                        found.append(Divergence(i, *where_to, margin, float(swings[-1])))
                    bar.update()
                    bar.set_postfix(divergences=len(found), tokens=tokens, refresh=False)
    bar.close()
    measured = torch.cat(noise)
    return Audit(str(target.dtype), rows, tokens, float(measured.max()), float(measured.median()), deviation, found)


# -- the distribution test


@dataclass
class LawTest:
    """Chi-square of texts of three tokens: against the exact law (`name` says whose texts), or of two samples."""

    name: str
    samples: int
    bins: int
    statistic: float
    p: float


@torch.inference_mode()
def exact_law(spec: Spec, prompt: list[int], top_k: int, length: int = 3) -> dict[tuple[int, ...], float]:
    """Probabilities of all texts of `length` tokens under the model's own top-k distribution at temperature 1, from
    plain passes over every prefix."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        prefixes = list(law)
        ids = torch.tensor([prompt + list(prefix) for prefix in prefixes], device=spec.target.device)
        logits = torch.cat([spec.target.model(input_ids=row[None], use_cache=False).logits[:, -1] for row in ids])
        scores = logits.double()
        kept = scores.topk(top_k)
        p = kept.values.softmax(-1)
        law = {
            (*prefix, int(token)): law[prefix] * float(chance)
            for prefix, tokens, chances in zip(prefixes, kept.indices, p, strict=True)
            for token, chance in zip(tokens, chances, strict=True)
        }
    return law


def chi_square(observed: Tensor, expected: Tensor) -> tuple[float, float, int]:
    """Statistic, p-value and bins of Pearson's test; observed, expected: float64 [n], small bins (< 5) joined."""
    small = expected < 5
    if small.any():
        observed = torch.cat([observed[~small], observed[small].sum(0, keepdim=True)])
        expected = torch.cat([expected[~small], expected[small].sum(0, keepdim=True)])
        keep = expected > 0
        observed, expected = observed[keep], expected[keep]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor(max(1, len(expected) - 1), dtype=torch.float64)
    p = torch.special.gammaincc(freedom / 2, statistic / 2)
    return float(statistic), float(p), len(expected)


@torch.inference_mode()
def law_tests(
    spec: Spec, prompts: list[list[int]], samples: int, top_k: int, nodes: int, seed: int = 0
) -> list[LawTest]:
    """Speculative texts against the exact law and against transformers' own sampling; and, as a negative control that
    has to fail, those of a rule that is biased on purpose (it takes the first drafted token unseen) against the exact
    law.

    Of the prompts, the one whose law has the most entropy is continued.
    """
    laws = [exact_law(spec, prompt, top_k) for prompt in prompts]
    entropies = [-sum(p * math.log(p) for p in law.values() if p > 0) for law in laws]
    best = entropies.index(max(entropies))
    law, prompt = laws[best], prompts[best]
    index = {text: i for i, text in enumerate(law)}
    expected = torch.tensor(list(law.values()), dtype=torch.float64) * samples

    def counted(texts: Sequence[Sequence[int]]) -> Tensor:
        other = [tuple(text) for text in texts if tuple(text) not in index]
        at = torch.tensor([index[tuple(text)] for text in texts if tuple(text) in index], dtype=torch.long)
        counts = torch.bincount(at, minlength=len(index)).double()
        return torch.cat([counts, torch.tensor([float(len(other))])])

    def drafted(relaxed: Relaxed | None) -> Tensor:
        texts = []
        for first in range(0, samples, 100):
            seeds = [seed + first + i for i in range(min(100, samples - first))]
            options = Options(3, Sampling(1.0, top_k=top_k), seeds, relaxed=relaxed)
            texts += speculative(spec.target, [prompt] * len(seeds), options, spec.drafter, nodes).token_ids
        return counted(texts)

    def sampled() -> Tensor:
        torch.manual_seed(seed)
        texts = []
        ids = torch.tensor([prompt], device=spec.target.device)
        for first in range(0, samples, 100):
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
        return counted(texts)

    def unseen(logits: Tensor, picks: list[int], below: list[list[int]]) -> list[int]:
        return [children[0] if children else pick for pick, children in zip(picks, below, strict=True)]

    ours, biased, theirs = drafted(None), drafted(unseen), sampled()
    wanted = torch.cat([expected, torch.tensor([1e-9])])  # texts outside the law: none are expected
    tests = []
    for name, observed in (("speculative", ours), ("transformers", theirs), ("biased on purpose", biased)):
        statistic, p, bins = chi_square(observed, wanted)
        tests.append(LawTest(f"{name} against the exact law", samples, bins, statistic, p))
    # Two samples of one size: each is expected to be half of both.
    both = torch.stack([ours, theirs]).flatten()
    half = ((ours + theirs) / 2).repeat(2)
    used = half >= 5
    squares = ((both[used] - half[used]) ** 2 / half[used]).sum()
    freedom = torch.tensor(max(1, int(used.sum()) // 2 - 1), dtype=torch.float64)
    p = float(torch.special.gammaincc(freedom / 2, squares / 2))
    tests.append(LawTest("speculative against transformers", samples, int(used.sum()) // 2, float(squares), p))
    return tests


def law_verdict(tests: list[LawTest], level: float = 1e-4) -> str:
    """`exact` where all tests pass but the control, which fails; else what is wrong."""
    control = [t for t in tests if t.name.startswith("biased")]
    wrong = [t.name for t in tests if t not in control and t.p < level]
    if wrong:
        return f"BUG: {', '.join(wrong)}"
    return (
        "exact" if all(t.p < level for t in control) else "undecided: the biased control passed too; raise law_samples"
    )
