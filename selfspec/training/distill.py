"""Self-distillation data: the target's own continuations of stretches of the training data.

At inference a drafter drafts the target's text, not the data's: greedy text repeats itself and follows the mode, which
no data shows it (self-distillation, Medusa, arXiv 2401.10774, section 2.3.2).
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from selfspec.checkpoint import target_hash
from selfspec.core.generate import autoregressive
from selfspec.core.options import Options, end_tokens
from selfspec.core.sampling import Sampling
from selfspec.core.target import Target
from selfspec.data.windows import Stream
from selfspec.log import atomic

_CHUNK = 64  # rows generated at once, and the least that an interruption loses


@dataclass
class DistillConfig:
    """rows: texts the target continues (0: training reads the data itself); prompt_tokens: of the data that each
    begins with; new_tokens: of the target; sampled: share of rows at temperature 1, the others are greedy; folder:
    where the texts are kept, so that several drafters can train on the same (by default inside the run)."""

    rows: int = 0
    prompt_tokens: int = 128
    new_tokens: int = 192
    sampled: float = 0.5
    folder: str | None = None

    def __post_init__(self) -> None:
        if self.rows < 0:
            raise ValueError(f"train.distill.rows={self.rows} must be at least 0")
        for name in ("prompt_tokens", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.distill.{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.sampled <= 1:
            raise ValueError(f"train.distill.sampled={self.sampled} must lie in [0, 1]")


def distill(
    target: Target, stream: Stream, config: DistillConfig, seed: int, folder: Path, quiet: bool = False
) -> Stream:
    """The rows one after another as one stream, each of prompt_tokens + new_tokens tokens.

    Chunks are kept in `folder`, so that an interrupted call goes on where it stopped. Rows that reach an EOS token
    early are filled up with it, outside the loss mask. Raises ValueError where the data are shorter than one prompt.
    """
    if len(stream.tokens) <= config.prompt_tokens:
        raise ValueError(
            f"no usable example: {len(stream.tokens)} tokens of text are too few for prompts of "
            f"train.distill.prompt_tokens={config.prompt_tokens}"
        )
    if target.max_positions is not None and config.prompt_tokens + config.new_tokens > target.max_positions:
        raise ValueError(
            f"train.distill: {config.prompt_tokens} + {config.new_tokens} tokens exceed the target's "
            f"{target.max_positions} positions"
        )
    text = hashlib.sha256(stream.tokens.numpy().tobytes() + stream.mask.numpy().tobytes()).hexdigest()
    written = {name: value for name, value in asdict(config).items() if name != "folder"}
    settings = {"settings": f"{written} seed={seed} target={target_hash(target)} text={text}"}
    folder = folder / hashlib.sha256(settings["settings"].encode()).hexdigest()[:12]  # other settings, other texts
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for first in tqdm(range(0, config.rows, _CHUNK), desc="self-distillation", disable=quiet):
        path = folder / f"{first:06d}.safetensors"
        part = _read(path, settings)
        if part is None:
            part = _write(target, stream, config, seed, first)
            with atomic(path) as scratch:
                save_file(part, scratch, settings)
        parts.append(part)
    tokens = torch.cat([part["tokens"].flatten() for part in parts]).long()
    return Stream(tokens, torch.cat([part["mask"].flatten() for part in parts]), 0)


def _read(path: Path, settings: dict[str, str]) -> dict[str, Tensor] | None:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in ("tokens", "mask")} if file.metadata() == settings else None
    except (FileNotFoundError, SafetensorError):
        return None


def _write(target: Target, stream: Stream, config: DistillConfig, seed: int, first: int) -> dict[str, Tensor]:
    rows = min(_CHUNK, config.rows - first)
    g = torch.Generator().manual_seed(seed * 1_000_003 + first)
    starts = torch.randint(len(stream.tokens) - config.prompt_tokens, (rows,), generator=g)
    at = starts[:, None] + torch.arange(config.prompt_tokens)
    length = config.prompt_tokens + config.new_tokens
    eos = end_tokens(target)
    tokens = torch.full((rows, length), min(eos, default=0), dtype=torch.int32)
    mask = torch.zeros(rows, length, dtype=torch.bool)
    tokens[:, : config.prompt_tokens] = stream.tokens[at].int()
    mask[:, : config.prompt_tokens] = stream.mask[at]
    sampled = int(rows * config.sampled + 0.5)
    for temperature, part in ((1.0, range(sampled)), (0.0, range(sampled, rows))):
        if not part:
            continue
        options = Options(config.new_tokens, Sampling(temperature), [seed + first + row for row in part], eos)
        for row, new in zip(
            part, autoregressive(target, stream.tokens[at[list(part)]].tolist(), options).token_ids, strict=True
        ):
            tokens[row, config.prompt_tokens : config.prompt_tokens + len(new)] = torch.tensor(new, dtype=torch.int32)
            mask[row, config.prompt_tokens : config.prompt_tokens + len(new)] = True
    return {"tokens": tokens, "mask": mask}
