"""The noise must be as good as random numbers, and reproducible from its coordinates alone."""

import math

import pytest
import torch
from transformers import GenerationConfig, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper
from transformers.generation.logits_process import LogitsProcessorList

from selfspec.core import sampling as module
from selfspec.core.sampling import Noise, Sampling, gumbel, noise_bits, pick, warp

MASK = 2**64 - 1


def scalar(value: int) -> torch.Tensor:
    return torch.tensor(value)


def reference_bits(seed: int, sequence: int, position: int, token: int) -> int:
    """The same hash in Python's integers: what every device must give."""
    step = 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    key = mix((seed + step) & MASK)
    key = mix(key ^ ((sequence * step) & MASK))
    key = mix(key ^ ((position * step) & MASK))
    return mix((key + (token + 1) * step) & MASK)


def test_bits_are_those_of_plain_integers():
    for seed, sequence, position, token in [(0, 0, 0, 0), (1, 2, 3, 4), (-5, 7, 100_000, 151_935), (2**62, 1, 1, 1)]:
        got = int(noise_bits(scalar(seed), scalar(sequence), scalar(position), scalar(token)))
        assert got & MASK == reference_bits(seed & MASK, sequence, position, token)


def test_any_subset_of_ids_and_rows_gives_the_same_noise():
    ids = torch.arange(500)
    whole = noise_bits(scalar(3), torch.tensor([[0], [1], [2]]), scalar(17), ids)
    part = torch.tensor([4, 77, 499])
    assert torch.equal(noise_bits(scalar(3), scalar(1), scalar(17), part), whole[1, part])
    noise = Noise([3, 3, 3], [0, 1, 2], 500, torch.device("cpu"))
    assert torch.equal(noise.ahead([17, 17, 17], 1)[:, 0], gumbel(whole))


def test_block_reuse_never_changes_the_values():
    noise = Noise([1, 2], [0, 0], 50, torch.device("cpu"))
    for positions, count in [([5, 5], 4), ([7, 6], 3), ([7, 6], 60), ([100, 9], 2), ([101, 9], 1)]:
        fresh = Noise([1, 2], [0, 0], 50, torch.device("cpu")).ahead(positions, count)
        assert torch.equal(noise.ahead(positions, count), fresh)
    noise.select([1])
    assert torch.equal(noise.ahead([9], 2)[0], Noise([2], [0], 50, torch.device("cpu")).ahead([9], 2)[0])


def uniforms(bits: torch.Tensor) -> torch.Tensor:
    return torch.exp(-torch.exp(-gumbel(bits)))


def chi_square(counts: torch.Tensor) -> float:
    """Standardized chi-square statistic of cells expected to be equal; about N(0, 1)."""
    expected = counts.sum() / counts.numel()
    degrees = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


COORDINATES = {
    "ids": (scalar(0), scalar(0), scalar(0), torch.arange(200_000)),
    "positions": (scalar(0), scalar(0), torch.arange(200_000), scalar(7)),
    "sequences": (scalar(0), torch.arange(200_000), scalar(3), scalar(7)),
    "seeds": (torch.arange(200_000), scalar(0), scalar(3), scalar(7)),
}


@pytest.mark.parametrize("name", COORDINATES)
def test_uniform_along_every_coordinate(name):
    u = uniforms(noise_bits(*COORDINATES[name]))
    assert float(u.min()) > 0
    assert float(u.max()) < 1
    assert abs(chi_square(torch.histc(u, 1000, 0, 1))) < 4


@pytest.mark.parametrize("name", COORDINATES)
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbours_are_independent(name, lag):
    u = uniforms(noise_bits(*COORDINATES[name]))
    cells = (u[:-lag] * 20).long() * 20 + (u[lag:] * 20).long()
    assert abs(chi_square(torch.bincount(cells, minlength=400).double())) < 4


def test_every_bit_flips_half_of_the_time():
    ids = torch.arange(20_000)
    a, b = (noise_bits(scalar(0), scalar(0), scalar(p), ids) for p in (10, 11))
    for bit in range(64):
        share = ((((a ^ b) >> bit) & 1).double()).mean()
        assert abs(float(share) - 0.5) < 0.02


def test_gumbel_is_finite_at_the_ends_of_the_range():
    ends = gumbel(torch.tensor([0, -1, (1 << 12) - 1, -(1 << 63), (1 << 63) - 1]))
    assert ends.isfinite().all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_gumbel_max_samples_the_warped_softmax(temperature):
    """Chi-square over 40,000 seeds; the same test fails clearly for a distribution that is off by a little."""
    torch.manual_seed(0)
    logits = torch.randn(12)
    seeds = torch.arange(40_000)[:, None]
    noise = gumbel(noise_bits(seeds, scalar(0), scalar(5), torch.arange(12)))
    picked = pick(warp(logits.expand(len(seeds), -1), Sampling(temperature).warpers()), noise)
    counts = torch.bincount(picked, minlength=12).double()

    def statistic(p: torch.Tensor) -> float:
        return float(((counts - len(seeds) * p) ** 2 / (len(seeds) * p)).sum())

    law = torch.softmax(logits.double() / temperature, -1)
    biased = torch.softmax(logits.double() / (temperature * 1.1), -1)
    assert statistic(law) < 31.3  # 99.9% of chi-square with 11 degrees of freedom
    assert statistic(biased) > 60


def test_warps_are_those_of_transformers(llama):
    settings = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.05}
    config = GenerationConfig(do_sample=True, **settings)
    processors = LogitsProcessorList(llama.model._get_logits_processor(config))
    logits = torch.randn(5, 61, dtype=torch.float64)
    ours = logits
    for warper in Sampling(**settings).warpers():
        ours = warper(None, ours)
    assert torch.equal(ours, processors(torch.zeros(5, 1, dtype=torch.long), logits))


def test_counts_stay_whole():
    """transformers' own generate takes no top_k of 5.0."""
    assert [type(Sampling(1.0, top_k).top_k) for top_k in (5, 5.0, None)] == [int, int, type(None)]


@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.5, 0.9, 0.99])
def test_a_nucleus_is_that_of_transformers(top_p, monkeypatch):
    """Of flat and of steep distributions, with equal scores; those that reach beyond what is sorted, too."""
    monkeypatch.setattr(module, "_NUCLEUS", 64)
    generator, warper = torch.Generator().manual_seed(0), TopPLogitsWarper(top_p)
    for spread in (0.1, 1.0, 3.0, 9.0):
        scores = (spread * torch.randn(8, 999, generator=generator)).bfloat16().float()
        found, wanted = warp(scores, [warper]), warper(None, scores)
        assert found.sort().values.equal(wanted.sort().values)
        assert (found == scores)[found.isfinite()].all()
        rows = [*scores, torch.zeros(999)]  # a row is what it is beside one that is flat
        alone = torch.cat([warp(row[None], [warper]) for row in rows])
        assert warp(torch.stack(rows), [warper]).equal(alone)
    assert not warp(torch.full((1, 999), math.nan), [warper]).isfinite().any()


def test_warpers_stand_for_what_is_sampled():
    for sampling in (Sampling(0.7), Sampling(1.0, 5, 0.9, 0.1), Sampling(1.0)):
        assert Sampling.of(sampling.warpers()) == sampling
    for others in (
        [TopPLogitsWarper(0.9), TopKLogitsWarper(5)],
        [TopKLogitsWarper(5, min_tokens_to_keep=2)],
        [TypicalLogitsWarper(0.9)],
    ):
        assert Sampling.of(others) is None
