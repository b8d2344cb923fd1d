"""The target's own text on held-out prompts: what drafters are measured on after (and during) training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from selfspec.drafters.base import Sample
from selfspec.generate import autoregressive
from selfspec.options import Options
from selfspec.sampling import Sampling, gumbel, noise_bits
from selfspec.spec import end_tokens
from selfspec.target import Target
from selfspec.tree import chain

KINDS = {"greedy": 0.0, "sampled": 1.0}  # the temperatures trees are measured for
_BATCH = 16


def own_text(
    target: Target,
    prompts: list[list[int]],
    new_tokens: int,
    temperature: float,
    seed: int,
    features: tuple[int, ...] = (),
) -> list[Sample]:
    """Let the target continue the prompts (each of at least 2 tokens) by plain decoding; keep its hidden states, and
    the outputs of the layers named by `features`."""
    samples = []
    for first in range(0, len(prompts), _BATCH):
        batch = prompts[first : first + _BATCH]
        seeds = [seed + first + i for i in range(len(batch))]
        options = Options(new_tokens, Sampling(temperature), seeds, end_tokens(target))
        for prompt, new, own in zip(batch, autoregressive(target, batch, options).token_ids, seeds, strict=True):
            tokens = torch.tensor(prompt + new)
            with torch.inference_mode():
                tree = chain(tokens[None].to(target.device))
                out = target.forward(tree, target.cache(1, len(tokens)), logits=False, features=features)
            kept = {layer: states[0].clone() for layer, states in out.features.items()}
            noise = _noise(own, target) if temperature > 0 else None
            samples.append(Sample(tokens, len(prompt), out.hidden[0].clone(), kept, temperature, noise))
    return samples


def _noise(seed: int, target: Target) -> Callable[[Tensor], Tensor]:
    ids = torch.arange(target.vocab_size, device=target.device)
    own, sequence = torch.tensor(seed, device=target.device), torch.tensor(0, device=target.device)

    def at(positions: Tensor) -> Tensor:
        return gumbel(noise_bits(own, sequence, positions.to(target.device)[:, None], ids))

    return at
