"""How a token is picked: warped logits plus Gumbel noise that depends on (seed, sequence, position, token) alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from selfspec.engine.engine import Engine

# SplitMix64 (Steele, Lea, Flood 2014): increment and the two multipliers of its mixer, as signed 64-bit integers.
_STEP, _MUL1, _MUL2 = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


LEAST = 1e-30  # temperature above 0: logits divided by less overflow in float32
_NUCLEUS = 512  # tokens that a nucleus has at most, as a rule
NOTHING = -2  # in a token's place where none has a finite score


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's mixer on int64, which torch multiplies modulo 2**64; shifts are made logical by masking. In place:
    of all noise of a vocabulary, memory takes more time than arithmetic."""
    x.bitwise_xor_((x >> 30).bitwise_and_((1 << 34) - 1)).mul_(_MUL1)
    x.bitwise_xor_((x >> 27).bitwise_and_((1 << 37) - 1)).mul_(_MUL2)
    return x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1))


def noise_bits(seeds: Tensor, sequences: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """64 hash bits as int64 for each (seed, sequence, position, token id); the four int64 tensors broadcast.

    The same integers on every device, for every batch and for any subset of ids.
    """
    key = _mix(_mix(_mix(seeds + _STEP) ^ sequences * _STEP) ^ positions * _STEP)
    return _mix(key + (ids + 1) * _STEP)


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, from 52 of the hash bits: u = (n + 1/2) / 2**52 is never 0 or 1."""
    uniform = (bits >> 12).bitwise_and_((1 << 52) - 1).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def _block(seeds: Tensor, sequences: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    return gumbel(noise_bits(seeds, sequences, positions, ids))


@dataclass(frozen=True)
class Sampling:
    """temperature 0 picks the most likely token; the others warp as in transformers, in its order (top_k 0: no limit).

    Raises ValueError for a temperature below 0, not finite or too small for float32, top_k below 0, top_p or min_p
    outside [0, 1].
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        values = {name: _number(name, getattr(self, name)) for name in ("temperature", "top_k", "top_p", "min_p")}
        for name, value in values.items():  # plain numbers also of NumPy's and torch's scalars
            object.__setattr__(self, name, value)
        if not (self.temperature == 0 or LEAST <= self.temperature < math.inf):
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or at least {LEAST}, and finite")
        if self.top_k is not None and not (0 <= self.top_k < math.inf and self.top_k == int(self.top_k)):
            raise ValueError(f"top_k={self.top_k} must be an integer of at least 1, or 0 or None for no limit")
        object.__setattr__(self, "top_k", None if self.top_k is None else int(self.top_k))
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in [0, 1], or be None for no limit")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must lie in [0, 1], or be None for no limit")

    def warpers(self) -> list[LogitsProcessor]:
        """transformers' own warpers; empty for greedy decoding, which no warper changes."""
        if self.temperature == 0:
            return []
        temperature = [] if self.temperature == 1 else [TemperatureLogitsWarper(float(self.temperature))]
        return [*temperature, *limiting(*self.limits)]

    @property
    def limits(self) -> tuple[int | None, float | None, float | None]:
        """What leaves tokens out: top_k, top_p and min_p."""
        return self.top_k, self.top_p, self.min_p

    @classmethod
    def of(cls, warpers: Sequence[LogitsProcessor]) -> Sampling | None:
        """What transformers' warpers stand for; None for others, in another order or with settings of their own."""
        values = {key: value for warper in warpers for key, value in getattr(warper, "__dict__", {}).items()}
        try:
            one = cls(values.get("temperature", 1.0), *map(values.get, ("top_k", "top_p", "min_p")))
        except (ValueError, RuntimeError):  # of numbers that are none
            return None
        ours, theirs = ([(type(w), getattr(w, "__dict__", None)) for w in each] for each in (one.warpers(), warpers))
        return one if ours == theirs else None


def limiting(top_k: int | None, top_p: float | None, min_p: float | None) -> list[LogitsProcessor]:
    """transformers' warpers of these limits, in its order; None: no limit."""
    result: list[LogitsProcessor] = [TopKLogitsWarper(top_k)] if top_k else []
    result += [TopPLogitsWarper(top_p)] if top_p is not None and top_p < 1 else []
    return result + ([MinPLogitsWarper(min_p)] if min_p is not None and min_p > 0 else [])


def _number(name: str, value: object) -> float | None:
    """A float from anything that is a number; None stays None but for the temperature. Raises ValueError."""
    if value is None and name != "temperature":
        return None
    try:
        if not isinstance(value, (str, bytes, bool)):
            return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{name}={value!r} must be a number")


class Noise:
    """The noise of B rows, made for a block of coming positions at once and reused until a row has passed them.

    Verification and drafter read the same values, and rejected positions are read again in the next pass. The noise
    of a compiled engine may differ in the last bit of the logarithms.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        sequences: Sequence[int],
        vocab: int,
        device: torch.device,
        engine: Engine | None = None,
    ) -> None:
        self.engine = engine or Engine()
        self.seeds = torch.tensor([s - 2**64 if s >= 2**63 else s for s in seeds], device=device)[:, None, None]
        self.sequences = torch.tensor(list(sequences), device=device)[:, None, None]
        self.ids = torch.arange(vocab, device=device)
        self.width = max(8, min(32, 2**22 // (vocab * len(seeds))))  # positions per block; about 32 MB
        self.starts = [0] * len(seeds)
        self.begins = torch.zeros(len(seeds), dtype=torch.long, device=device)  # the same on the device
        self.block = torch.empty(len(seeds), 0, vocab, dtype=torch.float64, device=device)

    def ahead(self, positions: list[int], count: int, at: Tensor | None = None) -> Tensor:
        """float64 [B, count, V]: noise at positions[row] .. positions[row] + count - 1. at: the positions on the
        device, int64 [B], which spares uploads."""
        offsets = [p - s for p, s in zip(positions, self.starts, strict=True)]
        if min(offsets) < 0 or max(offsets) + count > self.block.shape[1]:
            self.starts, offsets = list(positions), [0] * len(positions)
            self.begins = torch.tensor(positions, device=self.ids.device) if at is None else at
            first = self.begins[:, None, None]
            steps = torch.arange(max(self.width, count), device=self.ids.device)[:, None]
            of_rows = self.seeds, self.sequences, first + steps
            padded = map(self.engine.padded, of_rows)
            self.block = self.engine.run(_block, *padded, self.ids)[: len(positions)]
        if len(set(offsets)) == 1:
            return self.block[:, offsets[0] : offsets[0] + count]
        begin = torch.tensor(offsets, device=self.ids.device) if at is None else at - self.begins
        places = begin[:, None] + torch.arange(count, device=self.ids.device)
        return self.block[torch.arange(len(offsets), device=self.ids.device)[:, None], places]

    def select(self, left: list[int]) -> None:
        """Keep these rows, in this order."""
        rows = torch.tensor(left, device=self.ids.device)
        moved = {to: row for to, row in enumerate(left) if to != row}
        if moved:
            self.block[list(moved)] = self.block[list(moved.values())]
        self.seeds, self.sequences, self.block = self.seeds[rows], self.sequences[rows], self.block[: len(left)]
        self.starts, self.begins = [self.starts[row] for row in left], self.begins[rows]


def warp(logits: Tensor, warpers: Sequence[LogitsProcessor]) -> Tensor:
    """Warpers that look at no prefix, in float32 or better as in transformers; logits [A, V]."""
    if not warpers:
        return logits
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    for warper in warpers:
        scores = _nucleus(scores, warper) if type(warper) is TopPLogitsWarper else warper(None, scores)
    return scores


def _nucleus(scores: Tensor, warper: TopPLogitsWarper) -> Tensor:
    """The scores [A, V] that the warper leaves, others -inf. On a CPU only the largest are sorted, as long as those
    that are left are among them: all of a vocabulary of 150,000 take 12 ms, a fifth of a pass."""
    few = scores.device.type == "cpu" and scores.shape[-1] > _NUCLEUS and warper.min_tokens_to_keep == 1
    if not few or warper.filter_value != -math.inf:
        return warper(None, scores)  # type: ignore[no-any-return]
    values, tokens = scores.topk(_NUCLEUS)
    probs = (values - scores.logsumexp(-1, keepdim=True)).exp()
    left = probs.cumsum(-1) - probs < warper.top_p  # what is above a token
    left[:, 0] = True
    result = torch.full_like(scores, -math.inf).scatter_(-1, tokens, values.where(left, -math.inf))
    more = left[:, -1] | ~values[:, 0].isfinite()  # left than were sorted, or no distribution at all; a row by itself
    if more.any():
        result[more] = warper(None, scores[more])
    return result


def pick(scores: Tensor, noise: Tensor | None) -> Tensor:
    """The one rule: argmax(scores + noise), scores = warp(logits) [A, V]; noise float64 [A, V], or None for greedy;
    int64 [A].

    By the Gumbel-max trick the result is an exact sample from softmax(scores). NOTHING stands where no token has a
    finite score.
    """
    best, tokens = (scores if noise is None else noise + scores).max(-1)
    return torch.where(best.isfinite(), tokens, NOTHING)


def nothing_to_pick() -> FloatingPointError:
    return FloatingPointError(
        "the target's logits are NaN, infinite or all forbidden by logits processors: its weights may be damaged, "
        "its dtype may overflow (float16: try bfloat16), or a processor set +inf or left no token to choose"
    )
