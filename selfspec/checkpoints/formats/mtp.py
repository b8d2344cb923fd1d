"""Multi-token prediction modules as models ship them: in the target's own checkpoint, beside its layers.

Families differ in names and in four switches. Sources: the checkpoints' indexes, and how transformers, vLLM and SGLang
read them. Position 0, whose embedding some engines set to zero, is read as any other, as transformers does.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

from selfspec.checkpoints.find import is_path
from selfspec.core.target import Target
from selfspec.drafters.mtp import Mtp, MtpConfig

_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"
_COPIES = re.compile(r"(shared_head\.head|embed_tokens)\.weight$|rotary_emb\.inv_freq$")  # of the target's own


@dataclass(frozen=True)
class Family:
    """Names behind `prefix`, in which {at} is the number of layers of the target, plus the module's index; block: of
    the decoder layer's tensors; settings: of `MtpConfig`."""

    prefix: str = "model.layers.{at}."
    enorm: str = "enorm.weight"
    hnorm: str = "hnorm.weight"
    proj: str = "eh_proj.weight"
    norm: str = "shared_head.norm.weight"
    block: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


_DEEPSEEK = Family()
_NORMS = "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"
_QWEN = Family("mtp.", *_NORMS, "fc.weight", "norm.weight", "layers.0.")
FAMILIES = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "hy_v3": Family(norm="final_layernorm.weight"),
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "exaone_moe": _QWEN,
    "mellum": _QWEN,
    "ernie4_5": Family(
        "model.",
        "mtp_emb_norm.0.weight",
        "mtp_hidden_norm.0.weight",
        "mtp_linear_proj.0.weight",
        "",
        "mtp_block.0.",
        {"final_norm": False},
    ),
}


def read(target: Target, source: str | Path | None = None) -> Mtp:
    """The module of a target's checkpoint as a drafter. It is not calibrated.  source: the checkpoint's folder or hub
    id (None: where the target came from). Where several modules are shipped, the first is iterated.

    Raises ValueError for a family that is not in FAMILIES, a checkpoint without such weights, and tensors that are
    missing, too many, or of another shape; FileNotFoundError where there is no checkpoint.
    """
    kind = target.model.config.get_text_config().model_type
    place = str(source or target.model.config.name_or_path)
    files = _files(place)
    if (family := FAMILIES.get(kind)) is None:
        named = sorted(name for name in files if "mtp" in name or "nextn" in name)
        told = f"; it holds {', '.join(named[:4])}, ..." if named else ""
        raise ValueError(f"no MTP module is known of {kind!r}, only of {', '.join(FAMILIES)}{told}")
    prefix = _prefix(family, target.n_layers, 0)
    own = {name.removeprefix(prefix): path for name, path in files.items() if name.startswith(prefix)}
    if family.prefix == "model.":
        own = {name: path for name, path in own.items() if name.startswith("mtp_")}
    own = {name: path for name, path in own.items() if not _COPIES.search(name)}
    if not own:
        looked = sorted({path.name for path in files.values()})
        raise ValueError(
            f"{place} holds no MTP weights: no tensor of {', '.join(looked)} begins with {prefix!r}; train a module "
            "instead: train/heads.py drafter=mtp"
        )
    if any(name.startswith(_prefix(family, target.n_layers, 1)) for name in files if "{" in family.prefix):
        print(f"{place} holds several MTP modules; the first one is iterated", file=sys.stderr)
    drafter = Mtp(target, MtpConfig(**family.settings))
    _fill(drafter, family, _tensors(own, prefix), place)
    return drafter.eval()


def _prefix(family: Family, layers: int, index: int) -> str:
    return family.prefix.format(at=layers + index, index=index)


def _files(place: str) -> dict[str, Path]:
    """The file of each tensor of a checkpoint."""
    folder = Path(place)
    found: dict[str, str | None] = {}
    for name in (_INDEX, _WHOLE):
        local = folder / name
        if folder.is_dir() or is_path(place):
            found[name] = str(local) if local.is_file() else None
        elif place:
            found[name] = cached_file(place, name, _raise_exceptions_for_missing_entries=False)
    if index := found.get(_INDEX):
        parts: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
        return {name: Path(index).with_name(file) for name, file in parts.items()}
    if not (whole := found.get(_WHOLE)):
        raise FileNotFoundError(f"{place or 'a target without a checkpoint'} has neither {_INDEX} nor {_WHOLE}")
    with safe_open(whole, "pt") as file:
        return dict.fromkeys(file.keys(), Path(whole))


def _tensors(own: dict[str, Path], prefix: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(set(own.values())):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(prefix + name) for name, at in own.items() if at == path}
    return tensors


@torch.no_grad()
def _fill(drafter: Mtp, family: Family, tensors: dict[str, Tensor], place: str) -> None:
    layer, block = drafter.layer, drafter.layer.tail.parts[0]
    wanted: dict[str, Tensor] = {
        family.enorm: next(layer.enorm.parameters()),
        family.hnorm: next(layer.hnorm.parameters()),
        family.proj: layer.proj.weight,
    }
    if family.norm:
        wanted[family.norm] = next(layer.norm.parameters())
    wanted |= {family.block + name: part for name, part in block.state_dict(keep_vars=True).items()}
    tensors = _fused(tensors, wanted)
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or unknown:
        raise ValueError(f"{place}: its MTP module lacks tensors {missing}, and holds {unknown} besides")
    for name, part in wanted.items():
        if part.shape != tensors[name].shape:
            raise ValueError(
                f"{place}: {name} of its MTP module is {list(tensors[name].shape)}, the target's layers have "
                f"{list(part.shape)}"
            )
        part.copy_(tensors[name])


def _fused(tensors: dict[str, Tensor], wanted: Iterable[str]) -> dict[str, Tensor]:
    """Weights of single experts put together as transformers holds them."""
    result = dict(tensors)
    for name in wanted:
        stem, _, last = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last)
        if parts is None or name in tensors or f"{stem}.0.{parts[0]}.weight" not in tensors:
            continue
        experts, count = [], 0
        while f"{stem}.{count}.{parts[0]}.weight" in tensors:
            experts.append(torch.cat([result.pop(f"{stem}.{count}.{part}.weight") for part in parts]))
            count += 1
        result[name] = torch.stack(experts)
    return result
