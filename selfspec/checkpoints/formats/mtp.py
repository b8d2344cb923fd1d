"""Multi-token prediction modules as models ship them: in the target's own checkpoint, beside its layers.

Families differ in names (`mtp_families`). Position 0, whose embedding some engines set to zero, is read as any other,
as transformers does.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from selfspec.checkpoints.formats.files import fill, renamed
from selfspec.checkpoints.formats.mtp_families import FAMILIES, Family
from selfspec.checkpoints.target_files import Shards
from selfspec.core.target import Target
from selfspec.drafters.mtp import Mtp, MtpConfig, MtpLayer
from selfspec.utils.files import read_json

_FIRST = "model-00001.safetensors"  # of a checkpoint with a module beside it
_FLOATS = torch.float64, torch.float32, torch.float16, torch.bfloat16
# As transformers holds them.
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
_COPIES = re.compile(r"(shared_head\.head|embed_tokens)\.weight$|rotary_emb\.inv_freq$")  # of the target's own
_GAP = 8  # modules that are looked for behind one that is missing


def read(target: Target, source: str | Path | None = None) -> Mtp:
    """The module of a target's checkpoint as a drafter. It is not calibrated. source: the checkpoint's folder or hub
    id (None: where the target came from). Where several modules are shipped, they draft in a row.

    Raises ValueError for a family that is not in FAMILIES, a checkpoint without such weights, quantized ones, and
    tensors that are missing, too many, or of another shape; FileNotFoundError where there is no checkpoint.
    """
    model_type = target.model.config.get_text_config().model_type
    place = str(source or target.model.config.name_or_path)
    if not place:
        raise FileNotFoundError("mtp reads the module from the target's own safetensors; load the target by its folder")
    index = Shards(place, None if source else getattr(target.model.config, "_commit_hash", None))
    if (family := FAMILIES.get(model_type)) is None:
        odd = sorted(name for name in index.files if "mtp" in name or "nextn" in name)
        hint = f" (it holds {', '.join(odd[:4])}, ...)" if odd else ""
        raise ValueError(
            f"{place}: no MTP module is known of {model_type!r}{hint}, only of {', '.join(FAMILIES)}; train one "
            "instead: selfspec train drafter=mtp"
        )
    prefixes = _prefixes(family, target, index)
    named = [{name.removeprefix(prefix) for name in index.files if name.startswith(prefix)} for prefix in prefixes]
    parts = [{name for name in names if not _COPIES.search(name)} for names in named]
    if not parts[0]:
        raise ValueError(
            f"{place} holds no MTP weights: no tensor of {', '.join(sorted(set(index.files.values())))} begins with "
            f"{prefixes[0]!r}; train a module instead: selfspec train drafter=mtp"
        )
    if any(name.endswith("weight_scale_inv") for names in parts for name in names):
        raise ValueError(
            f"{place}: its MTP module is quantized (weight_scale_inv), which is not read; give a checkpoint in bfloat16"
        )
    field, count = family.count, len(prefixes)
    stated = getattr(target.model.config.get_text_config(), field, None)
    if source is not None and (Path(source) / "config.json").is_file():  # which says how many lie beside it
        config = read_json(Path(source) / "config.json")
        stated = config.get(field, (config.get("text_config") or {}).get(field))
    if (stated or count) != count:
        raise ValueError(f"{place}: {field} is {stated!r}, but it holds {count} MTP module{'s' * (count > 1)}")
    for prefix, names in zip(prefixes, named, strict=True):
        _check_copies(target, index, [prefix + name for name in names], place)
    usual = _usual(family, target)
    ahead = max(count, usual.unroll), max(count, usual.depth)
    drafter = Mtp(target, replace(usual, modules=count, unroll=ahead[0], depth=ahead[1]))
    for layer, prefix, names in zip(drafter.draft_layers, prefixes, parts, strict=True):
        tensors = index.tensors(prefix + name for name in names)
        _fill(layer, family, {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, place)
    return drafter.eval()


def _usual(family: Family, target: Target) -> MtpConfig:
    """The form of a family's modules."""
    first = bool(getattr(target.model.config.get_text_config(), "mtp_hidden_states_first", False))
    return MtpConfig(hidden_first=first, final_norm=family.norm is not None, form=family.layer_form(target))


def _check_copies(target: Target, index: Shards, names: list[str], place: str) -> None:
    """Raises ValueError where a module has embeddings or an lm_head of its own: modules are given the target's."""
    for name in (name for name in names if _COPIES.search(name) and name.endswith(".weight")):
        part = target.lm_head if "shared_head" in name else target.model.get_input_embeddings()
        copy = index.tensors([name])[name].to(part.weight)
        if not torch.equal(copy, part.weight):
            raise ValueError(f"{place}: {name} differs from the target's own, which modules share here")


def _prefixes(family: Family, target: Target, index: Shards) -> list[str]:
    """Of the names of every module that a checkpoint holds; of the first, where it holds none. Raises ValueError where
    one between them is missing."""

    def there(k: int) -> bool:
        prefix = family.module(target, k)
        return (not k or prefix != family.module(target, 0)) and any(name.startswith(prefix) for name in index.files)

    count = next(k for k in itertools.count() if not there(k))
    if behind := next((k for k in range(count + 1, count + _GAP) if there(k)), None):
        first, missing = (family.module(target, k) for k in (behind, count))
        raise ValueError(f"{index.name}: its MTP modules have a gap: it holds tensors of {first} but none of {missing}")
    return [family.module(target, k) for k in range(max(1, count))]


def _parts(layer: MtpLayer, family: Family) -> dict[str, Tensor]:
    """A module's tensors by the family's names, those of experts together as transformers holds them."""
    block = layer.tail.parts[0]
    named: dict[str, Tensor] = {
        family.enorm: next(layer.enorm.parameters()),
        family.hnorm: next(layer.hnorm.parameters()),
        family.proj: layer.proj.weight,
    }
    if family.norm is not None:
        named[family.norm] = next(layer.norm.parameters())
    return named | {family.block + name: part for name, part in block.state_dict(keep_vars=True).items()}


@torch.no_grad()
def _fill(layer: MtpLayer, family: Family, tensors: dict[str, Tensor], place: str) -> None:
    wanted = _parts(layer, family)
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise ValueError(
                f"{place}: {name} of its MTP module is {tensor.dtype}; quantized modules are not read, so give a "
                "checkpoint in bfloat16"
            )
    where = f"{place}, its MTP module"
    named = renamed(tensors, family.ours, where)
    fill(_apart(wanted, named), named, where, layer.tail.dtype)


def _apart(tensors: dict[str, Tensor], whole: Collection[str] = ()) -> dict[str, Tensor]:
    """Weights of experts one by one, as checkpoints hold them, but for those of these names."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        parts = _EXPERTS.get(last)
        if parts is None or name in whole:
            result[name] = tensor
            continue
        for expert, weights in enumerate(tensor):
            for part, weight in zip(parts, weights.chunk(len(parts)), strict=True):
                result[f"{stem}.{expert}.{part}.weight"] = weight
    return result


@torch.no_grad()
def write(drafter: Mtp, target: Target, source: Path, folder: Path) -> None:
    """The checkpoint in `source`, which the target was read from, with the modules under their family's names, in the
    new folder `folder`: what serving engines read. Modules that were shipped there are left out.

    Raises ValueError for a family that is not in FAMILIES, and for modules that its engines would run otherwise.
    """
    model_type = target.model.config.get_text_config().model_type
    if (family := FAMILIES.get(model_type)) is None:
        raise ValueError(f"{model_type!r} ships no MTP module that is known here, only {', '.join(FAMILIES)} do")
    usual = _usual(family, target)
    for name in ("hidden_first", "fed", "recycled", "final_norm", "form"):
        if (value := getattr(drafter.config, name)) != (expected := getattr(usual, name)):
            raise ValueError(f"drafter.{name}={value!r}: modules of {model_type!r} have {expected!r}; train with that")
    prefixes = [family.module(target, k) for k in range(len(drafter.draft_layers))]
    if len(set(prefixes)) < len(prefixes):
        raise ValueError(
            f"drafter.modules={len(prefixes)}: {model_type!r} has one module; train with drafter.modules=1"
        )
    index = Shards(str(source))
    replaced = tuple({*prefixes, *_prefixes(family, target, index)})
    folder.mkdir()
    files: dict[str, str] = {}
    own = next(
        name for i in itertools.count() if (name := f"model-mtp{i or ''}.safetensors") not in index.files.values()
    )
    for name in sorted(set(index.files.values())):
        to = _FIRST if name == SAFE_WEIGHTS_NAME else name  # loaders that find the whole file look for no other
        kept = [key for key, file in index.files.items() if file == name and not key.startswith(replaced)]
        save_file(index.tensors(kept), folder / to, {"format": "pt"})
        files |= dict.fromkeys(kept, to)
    modules: dict[str, Tensor] = {}
    for prefix, layer in zip(prefixes, drafter.draft_layers, strict=True):
        parts = _parts(layer, family)
        trained = {name: part.to(target.saved_dtype) for name, part in parts.items() if isinstance(part, nn.Parameter)}
        modules |= {prefix + name: part.cpu().contiguous() for name, part in _apart(parts | trained).items()}
    for published, name in family.renamed:
        modules = {key.replace(name, published): part for key, part in modules.items()}
    save_file(modules, folder / own, {"format": "pt"})
    files |= dict.fromkeys(modules, own)
    size = sum(path.stat().st_size for path in folder.iterdir())
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": files}, indent=1) + "\n"
    )
    config = read_json(source / "config.json")
    for part in (config, config.get("text_config")):  # readers differ in which of them they read
        if isinstance(part, dict):
            part[family.count] = len(prefixes)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
