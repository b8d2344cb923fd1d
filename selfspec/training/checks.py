"""What is refused before a training begins, and weights that it begins with."""

from __future__ import annotations

import torch

from selfspec.core.memory import free_memory
from selfspec.core.target import Target
from selfspec.drafters.base import Drafter, Trained
from selfspec.drafters.parts.losses import try_rule
from selfspec.drafters.parts.views import Block
from selfspec.drafters.parts.vocabulary import Reduced
from selfspec.training import shard
from selfspec.training.loop_config import LoopConfig
from selfspec.training.rows import DrafterTraining


@torch.no_grad()
def warm_start(drafter: Drafter, source: Drafter, name: str) -> None:
    """Give a drafter the trained weights and the draft vocabulary of another; optimizer and data begin anew. Raises
    ValueError, with `name`, where they are not of the same kind and shapes."""
    into, saved = ({**d.trained(), **d.saved_buffers()} for d in (drafter, source))
    shapes = [{key: list(p.shape) for key, p in tensors.items()} for tensors in (into, saved)]
    if drafter.kind != source.kind or shapes[0] != shapes[1]:
        odd = sorted(key for key in shapes[0].keys() | shapes[1].keys() if shapes[0].get(key) != shapes[1].get(key))
        raise ValueError(
            f"train.init_from={name!r} is a {source.kind} drafter that does not fit this {drafter.kind} drafter"
            + (f" ({odd[0]}: {shapes[1].get(odd[0])} instead of {shapes[0].get(odd[0])})" if odd else "")
            + "; give one of the same configuration"
        )
    if isinstance(drafter, Reduced) and drafter.vocabulary is not None:
        drafter.drafts_only(saved["vocabulary"])  # heads hold rows of lm_head by it
    for key, p in into.items():
        p.copy_(saved[key])


def agree(settings: dict[str, object]) -> None:
    """Raises ValueError, in every process, where they were started with different settings."""
    for name in settings:
        values = shard.gathered([repr(settings[name])])
        if odd := [i for i, value in enumerate(values) if value != values[0]]:
            raise ValueError(
                f"process {odd[0]} was started with another {name} than process 0: {values[odd[0]]} instead of "
                f"{values[0]}; start all with the same command"
            )


def check_training(target: Target, drafter: Drafter, config: DrafterTraining, loop: LoopConfig) -> None:
    """Raises ValueError for settings that would fail only once training has begun."""
    if isinstance(loss := getattr(drafter.config, "loss", None), str):
        try_rule(loss)
    if config.cache != "none" and shard.wanted():
        raise ValueError("train.cache is for a target that is whole in every process; take train.cache=none")
    if target.max_positions is not None and config.length > target.max_positions:
        raise ValueError(f"train.length={config.length} exceeds the target's {target.max_positions} positions")
    here = shard.group(str(target.device)).num_processes * loop.accumulate
    logits = loop.batch_size * config.length // here * target.vocab_size * target.dtype.itemsize
    if logits > (free := free_memory(target.device)):
        raise ValueError(
            f"loop.batch_size={loop.batch_size}: the target's logits alone take {logits / 2**30:.1f} GiB, of which "
            f"{free / 2**30:.1f} are free; lower it, or raise loop.accumulate={loop.accumulate}"
        )
    lengths = {"train.length": config.length}
    if config.distill.rows:
        lengths["train.distill.prompt_tokens + new_tokens"] = config.distill.prompt_tokens + config.distill.new_tokens
    least = drafter.depth + 2 if isinstance(drafter, Trained) else 2
    for name, length in lengths.items():
        if length < least:
            raise ValueError(f"{name}={length} is too short: this {drafter.kind} drafter needs {least} tokens")
    full = any(isinstance(module, Block) and module.full for module in drafter.modules())
    if full and target.dtype == torch.float16:
        raise ValueError("a layer can not be trained in full in float16; load the target with target.dtype=float32")
    if full and target.dtype == torch.bfloat16 and loop.precision == "no":
        raise ValueError(
            "loop.precision=no: a layer trained in full on a bfloat16 target needs loop.precision=bf16; or load the "
            "target with target.dtype=float32"
        )
