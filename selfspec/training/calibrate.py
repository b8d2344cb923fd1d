"""Calibration: how often a drafter's choices are right on the target's own text, measured in advance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypedDict

import torch
from torch import Tensor

from selfspec.checkpoints.weights_hash import model_hash
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options, as_seed
from selfspec.core.sampling import Sampling, gumbel, noise_bits
from selfspec.core.target import Target
from selfspec.core.tree import chain
from selfspec.data.questions import Asking
from selfspec.drafters.base import CHOICES, Calibration, Drafter, Sample, Trained, no_reduce
from selfspec.drafters.parts.expansion import perturbed
from selfspec.drafters.parts.ngrams import Tally
from selfspec.drafters.parts.static_tree import expected_length, static_tree
from selfspec.training.distill import read, write
from selfspec.utils.files import NOTHING, cache_folder, digest, is_main_process, mean
from selfspec.utils.progress import progress

TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}  # what each decoding mode is calibrated at
NODES = (8, 16, 32)  # tree sizes whose acceptance length is told
_BATCH = 16  # rows the target writes at once
_DECODED = 16  # samples that are decoded again, where nothing else calibrates a drafter
_SCORES = 2**20  # of a text and depth, by which its inverse temperature is chosen, about: positions times vocabulary
_EXACT, _BINS, _BIN = 64, 512, 0.125  # scores of a row summed one by one; and by their distance below these, in nats
_FACTORS = [2 ** (i / 4) for i in range(-6, 13)]  # inverse temperatures that are tried


@dataclass
class CalibrateConfig(Asking):
    """seed: of the answers at temperature 1; each question is answered greedily too."""

    prompts: int = 32
    max_new_tokens: int = 96
    seed: int = 0

    def __post_init__(self) -> None:
        self.check("calibrate")
        as_seed(self.seed, "calibrate.seed")


class Expected(TypedDict, total=False):
    """top1, top5: per depth how often the first choice, or one of the first five, is the target's token; tau: the
    acceptance length that a static tree promises (drafters that are decoded: the acceptance length itself), by number
    of nodes; positions: how many were measured; NaN in all of them where that is none."""

    top1: list[float]
    top5: list[float]
    tau: dict[str, float]
    positions: int


def calibrate(
    target: Target,
    drafter: Drafter,
    mode: str,
    samples: Sequence[Sample],
    total: Callable[[Tensor], Tensor] = no_reduce,
) -> Expected:
    """Measure a drafter on the target's own text, greedy or sampled, and set its calibration for that decoding mode.
    total: the sum of a tensor over all processes, each of which measures samples of its own (trained drafters only)."""
    if isinstance(drafter, Trained):
        calibration, figures = measure_along(samples, drafter.depth, drafter.scores, total)
        if figures["positions"]:  # else what it was calibrated with stays
            drafter.calibration[mode] = calibration
            by = drafter.session(target, 1), calibration.acceptance, mode
            figures["tau"] = {str(n): expected_length(*by, n) for n in NODES}
        return figures
    return _by_decoding(target, drafter, mode, samples)


@torch.no_grad()
def measure_along(
    samples: Sequence[Sample],
    depths: int,
    scores: Callable[[Sample, Tensor], Tensor],
    total: Callable[[Tensor], Tensor] = no_reduce,
) -> tuple[Calibration, Expected]:
    """Measure a drafter along the target's own text.

    scores(sample, at): logits [depths, n, V] that the drafter gives, from positions at (int64 [n]), to the tokens
    2, 3, ... places on, each with the text itself as the path before it.
    The inverse temperature of a depth is the factor of the highest likelihood. total: see `calibrate`.
    """
    right, tried = torch.zeros(depths, CHOICES), torch.zeros(depths)
    agree = torch.zeros(depths, 2)
    surprise = torch.zeros(depths, len(_FACTORS), dtype=torch.float64)
    positions = 0
    for sample in progress(samples, desc="calibration", leave=False, disable=not is_main_process()):
        # positions from which all depths have a truth; none where the target ended at once
        first = max(sample.start - 2, 0)  # behind a prompt of one token nothing stands
        at = torch.arange(first, max(first, len(sample.tokens) - 1 - depths))
        if not len(at):
            continue
        logits = scores(sample, at)
        alive = torch.ones(len(at), dtype=torch.bool)
        positions += len(at)
        for d in range(depths):
            truth = sample.tokens[at + 2 + d].to(logits.device)
            values = logits[d].double()
            if sample.noise is not None:
                values = perturbed(values, sample.noise(at + 2 + d), sample.temperature)
            true_score = values.gather(1, truth[:, None])
            before = torch.arange(values.shape[1], device=values.device) < truth[:, None]
            rank = ((values > true_score) | ((values == true_score) & before)).sum(1)
            rank = rank.masked_fill(~true_score.isfinite()[:, 0], values.shape[1]).cpu()  # inf: never drafted
            agree[d] += torch.tensor([(rank == 0).sum(), (rank < 5).sum()])
            tried[d] += alive.sum()
            right[d] += torch.bincount(rank[alive & (rank < CHOICES)], minlength=CHOICES)
            likely = (alive & true_score.isfinite()[:, 0].cpu()).nonzero()[:, 0]
            few = likely[:: max(1, len(likely) * values.shape[1] // _SCORES)].to(values.device)
            surprise[d] += log_sums(values[few] - true_score[few]).sum(0).cpu()
            alive &= rank < CHOICES
    right, tried, agree, surprise = (total(counts) for counts in (right, tried, agree, surprise))
    positions = int(total(torch.tensor(positions)))
    acceptance = (right / tried.clamp(min=1)[:, None]).tolist()
    share = agree / positions
    figures: Expected = {"top1": share[:, 0].tolist(), "top5": share[:, 1].tolist(), "positions": positions}
    figures["tau"] = {str(n): sum(static_tree(acceptance, n)[2]) if positions else NOTHING for n in NODES}
    factors = [_FACTORS[int(row.argmin())] if row.any() else 1.0 for row in surprise]  # 1: nothing was measured
    return Calibration(acceptance, factors), figures


def log_sums(scores: Tensor) -> Tensor:
    """log sum exp(factor * score) of rows [n, V], for each of _FACTORS, [n, F]. Scores far below a row's largest are
    counted by bins of _BIN nats instead of one by one for each factor."""
    top, at = scores.float().topk(min(_EXACT, scores.shape[1]))
    edge = top.where(top.isfinite(), torch.inf).amin(1, keepdim=True)
    below = (edge - scores.float().scatter(1, at, -torch.inf)) / _BIN
    counts = below.new_zeros(len(below), _BINS)
    counts.scatter_add_(1, below.clamp(max=_BINS - 1).long(), torch.ones_like(below))
    centers = edge - _BIN * (torch.arange(_BINS, device=edge.device) + 0.5)
    points, weights = torch.cat([top, centers], 1), torch.cat([torch.zeros_like(top), counts.log()], 1)
    return torch.stack([(factor * points + weights).logsumexp(1) for factor in _FACTORS], 1)


def _by_decoding(target: Target, drafter: Drafter, mode: str, samples: Sequence[Sample]) -> Expected:
    """For drafters whose choices depend on more than the text: decode the samples' prompts again. `top1` is then how
    often some child of a node holds the target's token, by depth (32 nodes). A session that keeps a `tally` of its
    choices calibrates the drafter, by its counts with 32 nodes."""
    samples = [samples[i] for i in spread(len(samples))]
    if not samples:
        raise ValueError("there is no text to calibrate a drafter on; give at least one prompt")
    prompts = [sample.tokens[: sample.start].tolist() for sample in samples]
    longest = max(len(sample.tokens) - sample.start for sample in samples)
    options = Options(max(1, longest), Sampling(TEMPERATURES[mode]), eos=target.end_tokens)
    figures: Expected = {"tau": {}}
    for nodes in NODES:
        session = drafter.eval().session(target, len(prompts))
        once: Any = SimpleNamespace(reads=drafter.reads, session=lambda target, rows, made=session: made)
        stats = speculative(target, prompts, options, once, nodes).stats
        figures["tau"][str(nodes)] = stats.acceptance_length
        figures["top1"], figures["positions"] = stats.conditional_per_depth[:8], stats.passes
    if isinstance(tally := getattr(session, "tally", None), Tally):
        drafter.calibration[mode] = Calibration(tally.table(), [])
    return figures


def spread(count: int) -> list[int]:
    """Which of `count` samples are decoded again: few, spread evenly over them, since questions come before texts."""
    few = min(count, _DECODED)
    return [(2 * i + 1) * count // (2 * few) for i in range(few)]


def decoded(
    target: Target,
    drafter: Drafter,
    mode: str,
    samples: Sequence[Sample],
    new_tokens: int,
    seeds: Sequence[int],
    total: Callable[[Tensor], Tensor] = no_reduce,
) -> float:
    """Acceptance length of decoding the samples' prompts, each with its seed, with trees of 16 nodes, beside what
    `calibrate` promises for them. total: see `calibrate`."""
    counts = torch.zeros(2, dtype=torch.float64)
    if samples:
        prompts = [sample.tokens[: sample.start].tolist() for sample in samples]
        options = Options(new_tokens, Sampling(TEMPERATURES[mode]), list(seeds), target.end_tokens)
        with progress(total=1, desc=f"decoding, {mode}", leave=False, disable=not is_main_process()):
            stats = speculative(target, prompts, options, drafter.eval(), 16).stats
        counts = torch.tensor([stats.tokens, stats.passes], dtype=torch.float64)
    return mean(*total(counts).tolist())


def write_samples(
    target: Target,
    prompts: list[list[int]],
    new_tokens: int,
    temperature: float,
    seeds: Sequence[int],
    reads: tuple[int, ...] = (),
    quiet: bool = False,
) -> list[Sample]:
    """Let the target continue the prompts (each of at least 2 tokens) by plain decoding, each with its seed; keep its
    hidden states, and the outputs of the layers named by `reads`. The texts stay in the cache folder, for a training
    that goes on and for other drafters."""
    samples, made_by = [], (model_hash(target), target.dtype_name, target.int8, target.width, target.engine.name)
    for first in progress(range(0, len(prompts), _BATCH), desc=f"calibration texts, T={temperature:g}", disable=quiet):
        batch = prompts[first : first + _BATCH]
        own_seeds = list(seeds[first : first + len(batch)])
        options = Options(new_tokens, Sampling(temperature), own_seeds, target.end_tokens)
        for prompt, new, seed in zip(batch, _continued(target, batch, options, made_by), own_seeds, strict=True):
            tokens = torch.tensor(prompt + new)
            with torch.inference_mode():
                tree = chain(tokens[None].to(target.device))
                out = target.forward(tree, target.cache(1, len(tokens)), logits=False, reads=reads)
            features = {layer: states[0].clone() for layer, states in out.features.items()}
            noise = _noise(seed, target) if temperature > 0 else None
            samples.append(Sample(tokens, len(prompt), out.hidden[0].clone(), features, temperature, noise))
    return samples


def _continued(
    target: Target, prompts: list[list[int]], options: Options, made_by: tuple[object, ...]
) -> list[list[int]]:
    """What follows the prompts: as an earlier call wrote it, or written now and kept. made_by: what the texts depend on
    beside the options."""
    asked = prompts, options.max_new_tokens, options.sampling, options.seed, sorted(options.eos)
    settings = {"settings": digest(*made_by, target.device.type, torch.__version__, *asked)}
    path = cache_folder() / "calibration" / f"{settings['settings']}.safetensors"
    if (kept := read(path, settings, ("tokens", "sizes"))) is None:
        new = autoregressive(target, prompts, options).token_ids
        sizes = torch.tensor([len(row) for row in new])
        kept = {"tokens": torch.tensor([token for row in new for token in row], dtype=torch.int64), "sizes": sizes}
        with suppress(OSError):  # of a folder that can not be written to
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, settings, kept)
    return [part.tolist() for part in kept["tokens"].split(kept["sizes"].tolist())]


def _noise(seed: int, target: Target) -> Callable[[Tensor], Tensor]:
    ids = torch.arange(target.vocab_size, device=target.device)
    row_seed, sequence = torch.tensor(seed, device=target.device), torch.tensor(0, device=target.device)

    def at(positions: Tensor) -> Tensor:
        return gumbel(noise_bits(row_seed, sequence, positions.to(target.device)[:, None], ids))

    return at
