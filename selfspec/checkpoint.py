"""A trained drafter on disk: drafter.json, drafter.safetensors, one regular PEFT folder per adapter, a model card."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.functional import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from selfspec.drafters.base import Drafter
from selfspec.fingerprint import tokenizer_hash
from selfspec.target import Target

FORMAT = 2
_PREFIX = "base_model.model."  # PEFT's own folders name tensors so


def drafter_class(kind: str) -> type[Drafter]:
    """`early_exit` -> selfspec.drafters.early_exit.EarlyExit. Raises ValueError for a kind that does not exist."""
    name = "".join(part.title() for part in kind.split("_"))
    if re.fullmatch(r"[a-z][a-z_]*", kind):
        try:
            found = getattr(importlib.import_module(f"selfspec.drafters.{kind}"), name, None)
        except ModuleNotFoundError:
            found = None
        if isinstance(found, type) and issubclass(found, Drafter):
            return found
    raise ValueError(f"unknown drafter kind {kind!r}")


def fingerprint(target: Target) -> str:
    """SHA-256 of the target's weights rounded to bfloat16, the same whatever dtype they are loaded in."""
    return target.fingerprint or target.checksum(torch.bfloat16)


def save_drafter(
    drafter: Drafter,
    folder: Path,
    target: Target,
    target_name: str,
    tokenizer: Any,
    note: str,
    training: dict[str, float] | None = None,
) -> None:
    """Write the drafter's folder; an interruption leaves the old folder or the new one. `note` goes into the card;
    training: the seconds and tokens it took."""
    scratch = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    save_file(
        {name: _at_rest(t, target.saved_dtype) for name, t in drafter.own_state().items()},
        scratch / "drafter.safetensors",
    )
    for name, module in drafter.adapters().items():
        out = scratch / "lora" / name
        out.mkdir(parents=True)
        state = get_peft_model_state_dict(module, adapter_name=name, save_embedding_layers=False)
        save_file(
            {_PREFIX + key: _at_rest(t, target.saved_dtype) for key, t in state.items()},
            out / "adapter_model.safetensors",
        )
        config: LoraConfig = module.peft_config[name]  # type: ignore[index, union-attr, assignment]
        config.base_model_name_or_path, config.inference_mode = target_name, True
        config.save_pretrained(str(out))
    files = sorted(p.relative_to(scratch).as_posix() for p in scratch.rglob("*") if p.is_file())
    meta = {
        "format": FORMAT,
        "kind": drafter.kind,
        "shape": drafter.shape,
        "parameters": sum(p.numel() for p in drafter.trained().values()),
        "target": {
            "name": target_name,
            "revision": getattr(target.model.config, "_commit_hash", None),
            "fingerprint": fingerprint(target),
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
        },
        "tokenizer": tokenizer_hash(tokenizer),
        "measured": drafter.measured,
        "files": {name: hashlib.sha256((scratch / name).read_bytes()).hexdigest() for name in files},
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft", "selfspec")},
    }
    (scratch / "drafter.json").write_text(json.dumps(meta, indent=1) + "\n")
    (scratch / "README.md").write_text(_card(meta, note))
    if training is not None:  # apart from what is the same again whenever the same run is repeated
        (scratch / "training.json").write_text(json.dumps(training) + "\n")
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(scratch, folder)
    shutil.rmtree(old, ignore_errors=True)


def _at_rest(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype).contiguous().cpu()


def read_meta(folder: Path) -> dict[str, Any]:
    """drafter.json, checked. Raises FileNotFoundError or ValueError naming the file."""
    path = folder / "drafter.json"
    if not path.is_file():
        raise FileNotFoundError(f"no drafter in {folder}: drafter.json is missing")
    try:
        meta: dict[str, Any] = json.loads(path.read_text())
        complete = {"format", "kind", "shape", "target", "tokenizer", "measured", "files"} <= meta.keys()
        kinds = {"kind": str, "shape": dict, "target": dict, "measured": dict, "files": dict}
        wrong = [name for name, kind in kinds.items() if name in meta and not isinstance(meta[name], kind)]
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a drafter's JSON: {error}") from error
    if not complete or meta["format"] != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}; retrain, or load it with the version that wrote it")
    if wrong or not {"name", "fingerprint"} <= meta["target"].keys():
        raise ValueError(f"{path} was altered: {', '.join(wrong) or 'target'} is not what was written; copy it again")
    return meta


def load_drafter(folder: Path, target: Target, tokenizer: Any = None) -> Drafter:
    """Build the drafter of `folder` on `target`, in eval mode.

    Raises FileNotFoundError for a missing file; ValueError for heads of another target or tokenizer, damaged files, and
    tensors that are missing, unknown or of another shape.
    """
    meta = read_meta(folder)
    theirs, ours = meta["target"], fingerprint(target)
    if theirs["fingerprint"] != ours:
        raise ValueError(
            f"the heads in {folder} were trained on target {theirs['name']!r} (weights {theirs['fingerprint'][:12]}), "
            f"not on {target.name!r} (weights {ours[:12]})"
        )
    check_tokenizer(folder, meta, tokenizer)
    for name, digest in meta["files"].items():
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; copy the whole folder again")
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise ValueError(f"{path} is truncated or was altered: its SHA-256 differs from drafter.json")
    kind = drafter_class(meta["kind"])
    known = inspect.signature(kind).parameters.keys() - {"target"}
    if known != meta["shape"].keys():
        raise ValueError(
            f"{folder / 'drafter.json'}: {meta['kind']} heads have the shape {sorted(known)}, not "
            f"{sorted(meta['shape'])}: is it a checkpoint of another kind?"
        )
    drafter = kind(target, **meta["shape"])  # type: ignore[call-arg]
    _copy(_read(folder / "drafter.safetensors"), drafter.own_state(), folder / "drafter.safetensors")
    for name, module in drafter.adapters().items():
        path = folder / "lora" / name / "adapter_model.safetensors"
        state = {key.removeprefix(_PREFIX): t for key, t in _read(path).items()}
        expected = get_peft_model_state_dict(module, adapter_name=name, save_embedding_layers=False)
        _compare(state, expected, path)
        set_peft_model_state_dict(module, state, adapter_name=name)
    _check_measured(meta["measured"], drafter.measured, folder / "drafter.json")
    drafter.measured = meta["measured"]
    drafter.requires_grad_(False)
    drafter.eval()
    return drafter


def check_tokenizer(folder: Path, meta: dict[str, Any], tokenizer: Any) -> None:
    """Raises ValueError where heads were trained with another tokenizer than this one."""
    if tokenizer is not None and meta["tokenizer"] is not None and meta["tokenizer"] != tokenizer_hash(tokenizer):
        raise ValueError(
            f"the heads in {folder} were trained with another tokenizer (vocabulary {meta['tokenizer'][:12]}) than "
            f"{tokenizer.name_or_path!r} (vocabulary {str(tokenizer_hash(tokenizer))[:12]})"
        )


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor], path: Path) -> None:
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(f"{path}: missing tensors {missing}, unknown tensors {unknown}")
    for name, tensor in found.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{path}: {name} holds numbers that are not finite; train again")
        if tensor.shape != expected[name].shape:
            raise ValueError(f"{path}: {name} is {list(tensor.shape)}, expected {list(expected[name].shape)}")


def _check_measured(found: dict[str, Any], expected: dict[str, list[list[float]]], path: Path) -> None:
    def fits(kind: str) -> bool:
        rows = found.get(kind)
        return (
            isinstance(rows, list)
            and len(rows) == len(expected[kind])
            and all(
                isinstance(row, list) and row and all(isinstance(x, (int, float)) and math.isfinite(x) for x in row)
                for row in rows
            )
        )

    for kind in expected:
        if not fits(kind):
            raise ValueError(
                f"{path}: measured[{kind!r}] must hold finite numbers for each of {len(expected[kind])} depths; "
                "measure the drafter again, or copy the folder again"
            )


def _copy(found: dict[str, Tensor], into: dict[str, Tensor], path: Path) -> None:
    _compare(found, into, path)
    with torch.no_grad():
        for name, tensor in found.items():
            into[name].copy_(tensor)


def _card(meta: dict[str, Any], note: str) -> str:
    shape = "\n".join(f"- {key}: {value}" for key, value in meta["shape"].items())
    return f"""---
library_name: selfspec
base_model: {meta["target"]["name"]}
tags: [speculative-decoding, {meta["kind"]}]
---
# {meta["kind"]} drafter for {meta["target"]["name"]}

Drafting parts for self-speculative decoding: {meta["parameters"]:,} parameters beside a frozen target. They change how
many passes the target takes, never which tokens it emits.

```python
import selfspec

spec = selfspec.load("path/to/this/folder")
```

{shape}
- target weights (SHA-256 in bfloat16): {meta["target"]["fingerprint"]}

{note}
"""
