"""Medusa heads as vLLM up to 0.32 reads them, and as FasterDecoding's files and TGI do."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from torch import Tensor

from selfspec.checkpoints.formats import files
from selfspec.core.target import Target
from selfspec.drafters.medusa import Medusa, MedusaConfig

FILE = "medusa_lm_head.safetensors"  # of TGI and FasterDecoding
_VLLM = "blocks.{i}.layers.{j}", "lm_heads.{i}.weight"  # names of a block and of a projection


def write_vllm(drafter: Medusa, target: Target, folder: Path) -> None:
    """The folder that vLLM up to 0.32 serves with `method: medusa`. No other key may hold "num" and "heads" or "layers"
    in its name: the reader would take it for these."""
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_heads": drafter.config.heads,
        "num_hidden_layers": drafter.config.blocks,
        "truncated_vocab_size": target.vocab_size,
        "medusa_fc_bias": True,  # without it biases are passed over in silence
        "original_lm_head": False,
        "torch_dtype": str(target.saved_dtype).removeprefix("torch."),
    }
    files.write_files(folder, config, _tensors(drafter, target, *_VLLM))


def write_tgi(drafter: Medusa, target: Target, folder: Path, target_name: str) -> None:
    """The folder that TGI serves; its config must not have `architectures`, by whose absence TGI knows Medusa."""
    config = {
        "medusa_num_heads": drafter.config.heads,
        "medusa_num_layers": drafter.config.blocks,
        "base_model_name_or_path": target_name,
        "version": "2",
    }
    last = f"{{i}}.{drafter.config.blocks}.weight"
    files.write_files(folder, config, _tensors(drafter, target, "{i}.{j}.linear", last), FILE)


@torch.no_grad()
def _tensors(drafter: Medusa, target: Target, block: str, head: str) -> dict[str, Tensor]:
    """All tensors of the heads, in the target's saved dtype; LoRA is folded into a full projection for each head."""
    if drafter.vocabulary is not None:
        raise ValueError(
            f"heads of a reduced vocabulary (drafter.draft_vocab={len(drafter.vocabulary)}) can not be written in this "
            "form, which has a row for each token; export heads that were trained with drafter.draft_vocab=null"
        )
    parts = _parts(drafter, block, head)
    if (shared := drafter.shared) is not None:
        for i, (narrow, wide) in enumerate(zip(*shared.weights(), strict=True)):  # [H, r], [r, V]
            parts[head.format(i=i)] = shared.base.weight.float() + (narrow.float() @ wide.float()).T
    return {name: part.to(target.saved_dtype) for name, part in parts.items()}


def _parts(drafter: Medusa, block: str, head: str) -> dict[str, Tensor]:
    """What is trained, as views by a file's names of blocks and of projections; LoRA has none."""
    parts: dict[str, Tensor] = {}
    for i in range(drafter.config.heads):
        for j in range(drafter.config.blocks):
            name = block.format(i=i, j=j)
            parts |= {f"{name}.weight": drafter.weight[j, i], f"{name}.bias": drafter.bias[j, i, 0]}
        if drafter.shared is None:
            parts[head.format(i=i)] = drafter.full[i]
    return parts


def read(folder: Path, target: Target) -> Medusa:
    """Published heads as a drafter, with projections of their own: FasterDecoding's `medusa_lm_head.pt` (read without
    running code in it), the same as safetensors, or vLLM's folder. It is not calibrated.

    Raises ValueError for keys, shapes and sizes that do not fit this target; FileNotFoundError where there is no file.
    """
    config = files.read_config(folder)
    found, _ = files.read_weights(folder, (FILE, "model.safetensors", "medusa_lm_head.pt"))
    tensors = files.renamed(found, _plain, folder)
    key = "medusa_num_heads" if "medusa_num_heads" in config else "num_heads"
    heads = files.number(config, key, folder)
    held = {int(match[1]) for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))}
    if held == set(range(len(held))) and len(held) not in (0, heads):  # as of FasterDecoding's own for Vicuna
        where, heads = f"{folder}/config.json: {key} is {heads}", len(held)
        print(f"{where}, the file holds {heads} heads, which are read", file=sys.stderr)
    layers = files.number(config, "medusa_num_layers" if "medusa_num_layers" in config else "num_hidden_layers", folder)
    if config.get("medusa_fc_bias") is False:  # as vLLM reads it
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".bias")}
    biased = any(name.endswith(".bias") for name in tensors)
    files.check_fits(config, {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}, folder)
    if config.get("truncated_vocab_size") not in (None, target.vocab_size):
        few = config["truncated_vocab_size"]
        raise ValueError(f"{folder}: truncated_vocab_size={few}: heads need all {target.vocab_size} tokens")
    for name in ("original_lm_head", "medusa_fc_bias"):
        if not isinstance(config.get(name) or False, bool):
            raise ValueError(f"{folder}/config.json: {name}={config[name]!r} must be true or false")
    whole = tensors.pop("lm_head.weight", None) if config.get("original_lm_head") else None  # one for all heads
    if whole is not None and not torch.equal(whole.to(target.lm_head.weight), target.lm_head.weight):
        tensors |= {f"lm_heads.{i}.weight": whole for i in range(heads)}
    has_heads = any(name.startswith("lm_heads.") for name in tensors)
    numbers = heads * target.hidden_size * (layers * target.hidden_size + has_heads * target.vocab_size)
    files.check_held(numbers, tensors, f"{heads} heads of {layers} layers", folder)
    # Heads without a projection read through the target's lm_head
    drafter = Medusa(target, MedusaConfig(heads, layers, "full" if has_heads else "lora", 1))
    parts = _parts(drafter, *_VLLM).items()
    with torch.no_grad():
        files.fill({name: part for name, part in parts if biased or not name.endswith(".bias")}, tensors, folder)
    return drafter.eval()


def _plain(name: str) -> str:
    """A tensor's name as vLLM writes it. FasterDecoding's `0.1.linear.weight` is `blocks.0.layers.1.weight`, and its
    `0.2.weight` behind two blocks `lm_heads.0.weight`."""
    name = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
    if match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if match := re.fullmatch(r"(\d+)\.(\d+)\.weight", name):
        return f"lm_heads.{match[1]}.weight"
    return name
