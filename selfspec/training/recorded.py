"""Texts for calibration, from held-out documents whose hidden states are recorded: no target is here to write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from selfspec.core.sampling import gumbel, noise_bits
from selfspec.core.target import Target
from selfspec.data.store import Corpus, Stream
from selfspec.drafters.base import Sample
from selfspec.training.states import States, behind_layers

_TRIED = 4  # times as many documents as are wanted are looked at
_GREEDY = 0.98  # share of tokens that are the target's likeliest, from which on a text is taken for greedy


def posterior_noise(target: Target, outputs: Tensor, tokens: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
    """The Gumbel noise with which a text may have been sampled at temperature 1: positions int64 [n] -> float64 [n, V],
    drawn given that each of its tokens was the pick (the top-down construction of Maddison et al., arXiv 1411.0030).

    outputs: [S, H] of the target's last layer; tokens: int64 [S].
    """
    ids = torch.arange(target.vocab_size, device=target.device)
    number = torch.tensor(seed, device=target.device)

    @torch.no_grad()
    def at(positions: Tensor) -> Tensor:
        where = positions.to(target.device)
        picked = tokens.to(target.device)[where][None]
        logits = behind_layers(target, picked, {target.n_layers - 1: outputs[where - 1][None]}).logits
        assert logits is not None
        scores, picked = logits[0].double(), picked[0, :, None]
        free = gumbel(noise_bits(number, torch.zeros_like(number), where[:, None], ids))
        top = scores.logsumexp(-1, keepdim=True) + free.gather(1, picked)
        below = -torch.logaddexp(-top, -(scores + free))  # truncated at the top
        return below.scatter(1, picked, top) - scores

    return at


@torch.no_grad()
def recorded_samples(
    target: Target,
    corpus: Corpus,
    states: States,
    count: int,
    new_tokens: int,
    length: int,
    part: int = 0,
    parts: int = 1,
) -> dict[str, list[Sample]]:
    """Held-out answers by decoding mode, at most `count` of each. A document of which nearly every token is the
    target's likeliest counts as greedy, every other as sampled at temperature 1; where none of one kind is among the
    first few times `count`, the others serve. length: tokens of a row, at which documents are cut; part, parts: this
    process's number and how many there are, each of which reads documents of its own."""
    found: dict[str, list[Sample]] = {"greedy": [], "sampled": []}
    every = list[Sample]()
    for i in range(part, len(corpus.is_chat), parts):
        if min(map(len, found.values())) >= count or len(every) >= _TRIED * count:
            break
        if (read := _answer(target, corpus.document(i), states, new_tokens, length)) is None:
            continue
        sample, greedy = read
        mode = "greedy" if greedy else "sampled"
        every.append(sample)
        if len(found[mode]) < count:
            found[mode].append(sample)
        elif len(every) > count:
            every[-1] = every[0]  # counted, not kept
    found = {mode: samples or every[:count] for mode, samples in found.items()}
    last = target.n_layers - 1
    for i, sample in enumerate(found["sampled"]):
        noise = posterior_noise(target, sample.features[last], sample.tokens, i)
        found["sampled"][i] = replace(sample, temperature=1.0, noise=noise)
    return found


def _answer(
    target: Target, document: Stream, states: States, new_tokens: int, length: int
) -> tuple[Sample, bool] | None:
    """A document's first answer, as if greedy, and whether it is; None where it holds none."""
    tokens, mask = document.tokens[:length], document.mask[:length]
    begins = mask[2:].nonzero()
    if not len(begins):
        return None
    start = int(begins[0]) + 2
    behind = (~mask[start:]).nonzero()
    stop = min(start + new_tokens, start + int(behind[0]) if len(behind) else len(tokens))
    batch = tokens[None].to(target.device)
    features = {layer: part[:, :stop].clone() for layer, part in states.features({"tokens": batch}).items()}
    out = behind_layers(target, batch[:, :stop], features)
    assert out.logits is not None
    likeliest = (out.logits[0, start - 1 : stop - 1].argmax(-1).cpu() == tokens[start:stop]).float().mean()
    of_layers = {layer: part[0] for layer, part in features.items()}
    return Sample(tokens[:stop], start, out.hidden[0].clone(), of_layers, 0.0, None), bool(likeliest >= _GREEDY)
