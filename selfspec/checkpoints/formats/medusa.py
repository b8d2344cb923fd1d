"""Medusa heads as vLLM up to 0.32 reads them, and as FasterDecoding's files and TGI do."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from torch import Tensor

from selfspec.checkpoints.formats.files import Contract, hold, number, read_config, read_tensors, renamed, write_files
from selfspec.core.target import Target
from selfspec.drafters.medusa import Medusa, MedusaConfig
from selfspec.utils.files import Figures

FILE = "medusa_lm_head.safetensors"  # of TGI and FasterDecoding


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
    write_files(folder, config, _tensors(drafter, target, "blocks.{i}.layers.{j}", "lm_heads.{i}.weight"))


def write_tgi(drafter: Medusa, target: Target, folder: Path, target_name: str) -> None:
    """The folder that TGI serves; its config must not have `architectures`, by whose absence TGI knows Medusa."""
    config = {
        "medusa_num_heads": drafter.config.heads,
        "medusa_num_layers": drafter.config.blocks,
        "base_model_name_or_path": target_name,
        "version": "2",
    }
    last = f"{{i}}.{drafter.config.blocks}.weight"
    write_files(folder, config, _tensors(drafter, target, "{i}.{j}.linear", last), FILE)


@torch.no_grad()
def _tensors(drafter: Medusa, target: Target, block: str, head: str) -> dict[str, Tensor]:
    """All tensors of the heads, in the target's saved dtype; LoRA is folded into a full projection for each head."""
    tensors, dtype = dict[str, Tensor](), target.saved_dtype
    if drafter.vocabulary is not None:
        raise ValueError(
            f"heads of a reduced vocabulary (drafter.draft_vocab={len(drafter.vocabulary)}) can not be written in this "
            "form, which has a row for each token; export heads that were trained with drafter.draft_vocab=null"
        )
    lora = None if drafter.shared is None else drafter.shared.weights()  # [K, H, r], [K, r, V]
    for i in range(drafter.config.heads):
        if lora is None:
            projection = drafter.full[i]
        else:
            assert drafter.shared is not None
            projection = drafter.shared.base.weight.float() + (lora[0][i].float() @ lora[1][i].float()).T
        for j in range(drafter.config.blocks):
            name = block.format(i=i, j=j)
            tensors[f"{name}.weight"] = drafter.weight[j, i].to(dtype)
            tensors[f"{name}.bias"] = drafter.bias[j, i, 0].to(dtype)
        tensors[head.format(i=i)] = projection.to(dtype)
    return tensors


def contract(config: Figures, folder: Path) -> Contract:
    """Names and shapes of vLLM's folder, from its config."""
    H, V, heads, layers = (
        number(config, n, folder) for n in ("hidden_size", "vocab_size", "num_heads", "num_hidden_layers")
    )
    shapes: Contract = {}
    for i in range(heads):
        for j in range(layers):
            shapes[f"blocks.{i}.layers.{j}.weight"] = [H, H], None
            if config.get("medusa_fc_bias"):
                shapes[f"blocks.{i}.layers.{j}.bias"] = [H], None
        shapes[f"lm_heads.{i}.weight"] = [V, H], None
    return shapes


def read(folder: Path, target: Target) -> Medusa:
    """Published heads as a drafter, with projections of their own: FasterDecoding's `medusa_lm_head.pt` (read without
    running code in it), the same as safetensors, or vLLM's folder. It is not calibrated.

    Raises ValueError for keys, shapes and sizes that do not fit this target; FileNotFoundError where there is no file.
    """
    config = read_config(folder)
    tensors = renamed(_found(folder), _plain)
    V, H = target.vocab_size, target.hidden_size
    key = "medusa_num_heads" if "medusa_num_heads" in config else "num_heads"
    heads = number(config, key, folder)
    held = {int(match[1]) for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))}
    if held == set(range(len(held))) and len(held) not in (0, heads):  # as of FasterDecoding's own for Vicuna
        where, heads = f"{folder}/config.json: {key} is {heads}", len(held)
        print(f"{where}, the file holds {heads} heads, which are read", file=sys.stderr)
    layers = number(config, "medusa_num_layers" if "medusa_num_layers" in config else "num_hidden_layers", folder)
    if max(heads, layers) > len(tensors):
        where = f"{folder}/config.json: {heads} heads of {layers} layers"
        raise ValueError(f"{where} can not lie in a file of {len(tensors)} tensors; copy the folder again")
    biased = any(name.endswith(".bias") for name in tensors)
    if config.get("truncated_vocab_size") not in (None, V):
        raise ValueError(f"{folder}: truncated_vocab_size={config['truncated_vocab_size']}: heads need all {V} tokens")
    whole = tensors.pop("lm_head.weight", None) if config.get("original_lm_head") else None  # one for all heads
    if whole is not None and not torch.equal(whole.to(target.lm_head.weight), target.lm_head.weight):
        tensors |= {f"lm_heads.{i}.weight": whole for i in range(heads)}
    has_heads = any(name.startswith("lm_heads.") for name in tensors)
    as_vllm = {
        "hidden_size": H,
        "vocab_size": V,
        "num_heads": heads,
        "num_hidden_layers": layers,
        "medusa_fc_bias": biased,
    }
    wanted = contract(as_vllm, folder)
    if not has_heads:  # heads that read through the target's lm_head
        wanted = {name: shape for name, shape in wanted.items() if not name.startswith("lm_heads.")}
    hold(tensors, wanted, folder)
    drafter = Medusa(target, MedusaConfig(heads, layers, "full" if has_heads else "lora", 1))
    with torch.no_grad():
        for i in range(heads):
            for j in range(layers):
                drafter.weight[j, i] = tensors[f"blocks.{i}.layers.{j}.weight"]
                if biased:
                    drafter.bias[j, i, 0] = tensors[f"blocks.{i}.layers.{j}.bias"]
            if has_heads:
                drafter.full[i] = tensors[f"lm_heads.{i}.weight"]
    return drafter.eval()


def _found(folder: Path) -> dict[str, Tensor]:
    for name in (FILE, "model.safetensors"):
        if (folder / name).is_file():
            return read_tensors(folder / name)
    path = folder / "medusa_lm_head.pt"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has neither {FILE}, model.safetensors nor {path.name}")
    return read_tensors(path)


def _plain(name: str) -> str:
    """A tensor's name as vLLM writes it. FasterDecoding's `0.1.linear.weight` is `blocks.0.layers.1.weight`, and its
    `0.2.weight` behind two blocks `lm_heads.0.weight`."""
    name = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
    if match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if match := re.fullmatch(r"(\d+)\.(\d+)\.weight", name):
        return f"lm_heads.{match[1]}.weight"
    return name
