"""Train a drafter on a frozen target that runs online, without gradients."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from selfspec.checkpoint import load_drafter, save_drafter
from selfspec.drafters.base import Drafter
from selfspec.evaluation.prompts import cut_prompts
from selfspec.log import RunLog
from selfspec.target import Target
from selfspec.training.corpus import Document
from selfspec.training.data import Windows, consecutive, tokenize
from selfspec.training.loop import LoopConfig, autocast, fit
from selfspec.training.measure import KINDS, own_text
from selfspec.training.own_text import OwnTextConfig, write_own_text


@dataclass
class HeadsConfig:
    """length: tokens per row of the data; lr: peak learning rate (AdamW); weight_decay; validation_rows: rows of
    validation text for the loss; prompts, prompt_tokens, new_tokens: the target's own text that trees are measured on;
    own_text: the target's own text to train on instead of the data's."""

    length: int = 512
    lr: float = 1e-3
    weight_decay: float = 0.0
    validation_rows: int = 32
    prompts: int = 64
    prompt_tokens: int = 64
    new_tokens: int = 128
    own_text: OwnTextConfig = field(default_factory=OwnTextConfig)

    def __post_init__(self) -> None:
        for name in ("length", "validation_rows", "prompts", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"heads.{name}={getattr(self, name)} must be at least 1")
        if self.prompt_tokens < 2:
            raise ValueError(f"heads.prompt_tokens={self.prompt_tokens} must be at least 2")
        if not self.lr > 0:
            raise ValueError(f"heads.lr={self.lr} must be above 0")


class DraftLoss(nn.Module):
    """The drafter's loss on what the frozen target says of a batch; only the drafter is a submodule."""

    def __init__(self, drafter: Drafter, target: Target) -> None:
        super().__init__()
        self.drafter = drafter
        object.__setattr__(self, "target", target)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            seen = bare_forward(self.__dict__["target"], batch["tokens"], self.drafter.features)
        return self.drafter.loss({**batch, **seen})


def bare_forward(target: Target, tokens: Tensor, features: tuple[int, ...] = ()) -> dict[str, Any]:
    """What the target says of plain text, tokens int64 [B, S], without a cache: last hidden states `hidden` [B, S, H],
    `logits` [B, S, V], and `features`, the outputs [B, S, H] of the layers so named."""
    seen: dict[int, Tensor] = {}
    with target.patched(0, target.n_layers, None, features, seen):
        logits = target.model(input_ids=tokens, use_cache=False).logits
    return {"hidden": seen.pop(-1), "logits": logits, "features": seen}


def train_heads(
    target: Target,
    target_name: str,
    tokenizer: Any,
    drafter: Drafter,
    train: list[Document],
    validation: list[Document],
    config: HeadsConfig,
    loop: LoopConfig,
    folder: Path,
    log: RunLog,
) -> dict[str, Any]:
    """Train the drafter, measure its trees on the target's own text, and save it as `folder/drafter`.

    Raises ValueError for data too short to train on, before anything long starts.
    """
    _check(target, drafter, config, loop)
    accelerator = Accelerator(cpu=target.device.type == "cpu")
    if target.max_positions is not None and config.length > target.max_positions:
        raise ValueError(f"heads.length={config.length} exceeds the target's {target.max_positions} positions")
    texts = Path(config.own_text.folder or folder / "own_text")
    if config.own_text.rows:
        try:
            texts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"heads.own_text.folder={texts} can not be made: {error}") from error
    world, main = (accelerator.process_index, accelerator.num_processes), accelerator.is_main_process
    stream = tokenize(train, tokenizer)
    windows = Windows(stream, config.length, loop.batch_size, loop.seed, *world)
    held_out = tokenize(validation, tokenizer)
    rows = consecutive(held_out.tokens, config.length, config.validation_rows)
    masks = consecutive(held_out.mask, config.length, config.validation_rows)
    prompts = cut_prompts(validation, tokenizer, config.prompts, config.prompt_tokens)
    before = target.checksum()
    samples = {
        kind: own_text(target, prompts, config.new_tokens, temperature, loop.seed, drafter.features)
        for kind, temperature in KINDS.items()
    }
    if config.own_text.rows and drafter.trained():
        with accelerator.main_process_first():  # the others then find it on disk
            stream = write_own_text(target, stream, config.own_text, loop.seed, texts, quiet=not main)
        length = config.own_text.prompt_tokens + config.own_text.new_tokens
        per_process = max(1, loop.batch_size * config.length // length // accelerator.num_processes)
        size = per_process * accelerator.num_processes
        windows = Windows(stream, length, size, loop.seed, *world, aligned=True)
    if drafter.vocabulary is not None:
        counts = stream.tokens[stream.mask].bincount(minlength=target.vocab_size)
        drafter.vocabulary.copy_(counts.argsort(descending=True, stable=True)[: len(drafter.vocabulary)])
    module = DraftLoss(drafter, target)

    def validate() -> dict[str, Any]:
        losses = [
            float(module({"tokens": row[None].to(target.device), "mask": mask[None].to(target.device)})[0])
            for row, mask in zip(rows, masks, strict=True)
        ]
        figures = {kind: drafter.measure(kind, samples[kind]) for kind in KINDS}
        return {"loss": sum(losses) / len(losses), "tau32": figures["greedy"]["tau"]["32"], **figures}

    training = None
    if trained := drafter.trained():
        optimizer = torch.optim.AdamW(
            trained.values(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        figures = fit(accelerator, module, [optimizer], windows.batch, validate, loop, folder, log, headline="tau32")
        figures |= _relative_cost(module, target, windows.batch(0), autocast(target.device, loop))
        training = {"seconds": figures["seconds"], "tokens": loop.steps * windows.size * windows.length}
        note = f"Trained for {loop.steps} steps of {windows.size} x {windows.length} tokens."
    else:
        module.eval()
        with torch.no_grad(), autocast(target.device, loop):
            figures, note = validate(), "Training-free; measured on the target's own text."
    if target.checksum() != before:
        raise RuntimeError(f"the weights of target {target_name!r} changed during training; this is a bug")
    summary = {**figures, "target_checksum": before, "peak_memory_mb": _peak_memory_mb(target.device)}
    if main:
        save_drafter(drafter, folder / "drafter", target, target_name, tokenizer, note, training)
        load_drafter(folder / "drafter", target, tokenizer)  # what was written can be read
        log.write({"summary": summary})
    return summary


def _check(target: Target, drafter: Drafter, config: HeadsConfig, loop: LoopConfig) -> None:
    """Raises ValueError for settings that would fail only once training has begun."""
    own = config.own_text
    lengths = {"heads.length": config.length}
    if own.rows:
        lengths["heads.own_text.prompt_tokens + new_tokens"] = own.prompt_tokens + own.new_tokens
    for name, length in lengths.items():
        if length < drafter.shortest:
            raise ValueError(f"{name}={length} is too short: a {drafter.kind} drafter needs {drafter.shortest} tokens")
    if drafter.whole_layers and target.dtype == torch.float16:
        raise ValueError("a layer can not be trained in full in float16; load the target with target.dtype=float32")
    if drafter.whole_layers and target.dtype == torch.bfloat16 and loop.precision == "no":
        raise ValueError(
            "loop.precision=no: a layer trained in full on a bfloat16 target needs loop.precision=bf16; or load the "
            "target with target.dtype=float32"
        )


def _relative_cost(
    module: nn.Module, target: Target, batch: dict[str, Tensor], precision: torch.autocast
) -> dict[str, float]:
    """Seconds of a training step over seconds of the target's bare forward on the same batch; alternated, medians."""
    batch = {key: value.to(target.device) for key, value in batch.items()}
    steps, forwards = [], []
    module.train()
    for _ in range(6):
        start = time.perf_counter()
        with torch.no_grad(), precision:
            bare_forward(target, batch["tokens"])  # what any drafter trained online has to run
        _wait(target.device)
        middle = time.perf_counter()
        with precision:
            loss, _ = module(batch)
        loss.backward()
        _wait(target.device)
        forwards.append(middle - start)
        steps.append(time.perf_counter() - middle)
        module.zero_grad(set_to_none=True)
    module.eval()
    step, forward = sorted(steps[1:])[2], sorted(forwards[1:])[2]
    return {"seconds_step": step, "seconds_target_forward": forward, "step_over_forward": step / forward}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
