"""A drafter on disk: drafter.json, drafter.safetensors, one regular PEFT folder per adapter, a model card."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
from peft import LoraConfig
from peft.functional import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec import __version__
from selfspec.checkpoints.card import card
from selfspec.checkpoints.embedded import TARGETS
from selfspec.checkpoints.formats.files import fill, read_tensors
from selfspec.checkpoints.named import same_model
from selfspec.checkpoints.weights_hash import parts_hash, same_weights, target_hash, tokenizer_hash
from selfspec.core.support import quantized_by
from selfspec.core.target import Target
from selfspec.drafters.base import Calibration, Drafter, DrafterConfig
from selfspec.drafters.parts.views import Adapted
from selfspec.drafters.registry import build, config_class, drafter_class
from selfspec.utils.errors import one_line
from selfspec.utils.files import Figures, atomic, digest, inside, read_json

FORMAT = 3
RENAMED = {"vocabulary": "draft_vocab"}  # keys of configs that older versions wrote
ADDED = {"draft_vocab": None}  # keys that older versions did not write, with what they did
_SIZES = {"layers": "n_layers", "hidden_size": "hidden_size", "vocab_size": "vocab_size"}  # there and of targets
_PREFIX = "base_model.model."  # PEFT's own folders name tensors so


def adapters(drafter: Drafter) -> dict[str, nn.Module]:
    """A drafter's PEFT adapters by name, each with the module it was injected into."""
    return {k: v for module in drafter.modules() if isinstance(module, Adapted) for k, v in module.adapters.items()}


def own_state(drafter: Drafter) -> dict[str, Tensor]:
    """What is saved beside the adapters: parameters that training moves, and buffers of the drafter itself."""
    trained = {name: p for name, p in drafter.trained().items() if ".lora_A." not in name and ".lora_B." not in name}
    return {**trained, **drafter.saved_buffers()}


def save_drafter(
    drafter: Drafter,
    folder: Path,
    target: Target,
    target_name: str,
    tokenizer: Tokenizer | None,
    note: str,
    training: dict[str, float] | None = None,
) -> None:
    """Write the drafter's folder; an interruption leaves the old folder or the new one. `note` goes into the card;
    training: the seconds and tokens it took. A target in a folder is named by its path, relative to `folder` where it
    lies in the same run's folder."""
    target_name = _portable(target_name, folder)
    with atomic(folder) as scratch:
        scratch.mkdir(parents=True)
        kept = drafter.saved_buffers()  # such as a router's bias, which is float32 in any model
        state = {n: _at_rest(t, t.dtype if n in kept else target.saved_dtype) for n, t in own_state(drafter).items()}
        save_file(state, scratch / "drafter.safetensors")
        for name, module in adapters(drafter).items():
            out = scratch / "lora" / name
            out.mkdir(parents=True)
            lora = get_peft_model_state_dict(module, adapter_name=name, save_embedding_layers=False)
            at_rest = {_PREFIX + key: _at_rest(t, target.saved_dtype) for key, t in lora.items()}
            save_file(at_rest, out / "adapter_model.safetensors")
            peft_config: LoraConfig = module.peft_config[name]  # type: ignore[assignment, index]
            peft_config.base_model_name_or_path, peft_config.inference_mode = target_name, True
            if isinstance(peft_config.target_modules, set):  # which would be written in any order
                peft_config.target_modules = sorted(peft_config.target_modules)
            peft_config.save_pretrained(str(out))
        files = sorted(p.relative_to(scratch).as_posix() for p in scratch.rglob("*") if p.is_file())
        meta = {
            "format": FORMAT,
            "kind": drafter.kind,
            "config": asdict(drafter.config),
            "parameters": sum(p.numel() for p in drafter.trained().values()),
            "target": {
                "name": target_name,
                "revision": getattr(target.model.config, "_commit_hash", None),
                "weights_hash": target_hash(target),
                "parts_hash": parts_hash(target),
                "layers": target.n_layers,
                "hidden_size": target.hidden_size,
                "vocab_size": target.vocab_size,
                "int8": target.int8,
            },
            "tokenizer": tokenizer_hash(tokenizer),
            "calibration": {mode: asdict(found) for mode, found in drafter.calibration.items()},
            "files": {name: hashlib.sha256((scratch / name).read_bytes()).hexdigest() for name in files},
            "versions": {
                **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft")},
                "selfspec": __version__,
            },
        }
        (scratch / "drafter.json").write_text(json.dumps(meta, indent=1) + "\n")
        (scratch / "README.md").write_text(card(meta, note))
        if training is not None:  # apart from what is the same again whenever the same run is repeated
            (scratch / "training.json").write_text(json.dumps(training) + "\n")


def _portable(name: str, folder: Path) -> str:
    """A target's name that means the same from every working directory."""
    if name in TARGETS or not Path(name).exists():
        return name
    place, run = Path(name).resolve(), folder.resolve().parent
    return f"../{place.relative_to(run).as_posix()}" if place.is_relative_to(run) else str(place)


def _at_rest(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype).contiguous().cpu()


def read_meta(folder: Path) -> Figures:
    """drafter.json, checked. Raises FileNotFoundError or ValueError naming the file."""
    path = folder / "drafter.json"
    if not path.is_file():
        raise FileNotFoundError(f"no drafter in {folder}: drafter.json is missing")
    meta = read_json(path)
    version = meta.get("format")
    if version != FORMAT:
        raise ValueError(
            f"{path} is of format {version!r}, this version reads format {FORMAT}: train the drafter again "
            "(train/heads.py), or load it with the version of selfspec that wrote it"
        )
    kinds = {"kind": str, "config": dict, "target": dict, "calibration": dict, "files": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(meta.get(name), kind)]
    wrong += [name for name in ("name", "weights_hash") if not wrong and not isinstance(meta["target"].get(name), str)]
    if wrong or not isinstance(meta.get("tokenizer", 0), (str, type(None))):
        raise ValueError(
            f"{path} was altered: {', '.join(wrong) or 'tokenizer'} is not what was written; copy it again"
        )
    return dict(meta)


def check_files(folder: Path, meta: Figures) -> None:
    """Raises FileNotFoundError or ValueError for a drafter's file that is missing or not what was written."""
    for name, known in meta["files"].items():
        path = inside(folder, name, folder / "drafter.json")
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; copy the whole folder again")
        if hashlib.sha256(path.read_bytes()).hexdigest() != known:
            raise ValueError(f"{path} is truncated or was altered: its SHA-256 differs from drafter.json")


def read_config(path: Path, kind: type[Drafter], saved: Figures) -> DrafterConfig:
    """A drafter's config from its JSON. Raises ValueError naming keys that are unknown or missing, and the ones that
    exist."""
    config = config_class(kind)
    known = {f.name for f in fields(config)}
    saved = {RENAMED.get(key, key): value for key, value in saved.items()}
    saved = {key: value for key, value in ADDED.items() if key in known} | saved
    if known != saved.keys():
        unknown, missing = sorted(saved.keys() - known), sorted(known - saved.keys())
        raise ValueError(
            f"{path}: unknown keys {unknown}, missing keys {missing}; {config.__name__} has {sorted(known)}"
        )
    try:
        return config(**saved)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {one_line(error):.400}") from error


def load_drafter(folder: Path, target: Target, tokenizer: Tokenizer | None = None, trust: bool = False) -> Drafter:
    """Build the drafter of `folder` on `target`, in eval mode. trust: whether it may be a class of another package.

    Raises FileNotFoundError for a missing file; ValueError for a drafter of another target or tokenizer, damaged
    files, and tensors that are missing, unknown or of another shape.
    """
    meta = read_meta(folder)
    theirs = meta["target"]
    if not (known := same_weights(theirs, target)):
        ours = target_hash(target)
        origin = f"made for target {theirs['name']!r} (weights {theirs['weights_hash'][:12]})"
        quantized, sizes = quantized_by(target.model), {key: theirs.get(key) for key in _SIZES}
        same = same_model(theirs["name"], target.name)
        fits = sizes == {key: getattr(target, of) for key, of in _SIZES.items()}
        if not same and not ((quantized or known is None) and fits):
            cast = fits and target.dtype == torch.float16  # in which small weights are lost
            hint = '; weights cast to float16 are not known again: load with dtype="float16" instead' if cast else ""
            raise ValueError(
                f"the drafter in {folder} was {origin}, not for {target.name!r} (weights {ours[:12]}){hint}"
            )
        here = f"weights that {quantized} has quantized" if quantized else "others of the same model"
        print(
            f"{folder.name}: {origin}; here are {here} (weights {ours[:12]}): fewer of its drafts may be accepted, the "
            "output is the target's own",
            file=sys.stderr,
        )
    if target.int8 and not theirs.get("int8"):
        print(
            f"{folder.name}: trained on weights that were not quantized; on dtype=int8 fewer of its drafts may be "
            "accepted, the output is that of plain decoding in int8",
            file=sys.stderr,
        )
    check_tokenizer(folder, meta, tokenizer)
    check_files(folder, meta)
    kind = drafter_class(meta["kind"], trust, away=folder)
    path = folder / "drafter.json"
    config = read_config(path, kind, meta["config"])
    try:
        drafter = build(kind, target, config)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {one_line(error):.400}") from error
    weights = folder / "drafter.safetensors"
    fill(own_state(drafter), read_tensors(weights), weights)
    for name, module in adapters(drafter).items():
        part = folder / "lora" / name / "adapter_model.safetensors"
        state = {key.removeprefix(_PREFIX): t for key, t in read_tensors(part).items()}
        fill(get_peft_model_state_dict(module, adapter_name=name, save_embedding_layers=False), state, part)
    drafter.calibration = _read_calibration(meta["calibration"], drafter.calibration, path)
    drafter.saved_hash = files_hash(meta)
    return drafter.eval()


def files_hash(meta: Figures) -> str:
    """A hash of a drafter's weights and calibration, as its drafter.json has them."""
    return digest(sorted(meta["files"].items()), json.dumps(meta["calibration"], sort_keys=True))


def shaped_as(folder: Path, target: Target, trust: bool = False) -> Drafter:
    """A drafter on any target with the kind, config and calibration of the one in `folder` and untrained weights, to
    forecast what it would cost there. An exit moves to the same share of the layers."""
    meta, path = read_meta(folder), folder / "drafter.json"
    kind = drafter_class(meta["kind"], trust, away=folder)
    config = read_config(path, kind, meta["config"])
    if (at := getattr(config, "exit", None)) is not None:
        share = target.n_layers / meta["target"].get("layers", target.n_layers)
        config = replace(config, exit=max(1, round(at * share)))  # type: ignore[call-arg]
    drafter = build(kind, target, config)
    drafter.calibration = _read_calibration(meta["calibration"], drafter.calibration, path)
    return drafter.eval()


def check_tokenizer(folder: Path, meta: Figures, tokenizer: Tokenizer | None) -> None:
    """Raises ValueError where a drafter was trained with another tokenizer than this one."""
    if tokenizer is not None and meta["tokenizer"] is not None and meta["tokenizer"] != tokenizer_hash(tokenizer):
        raise ValueError(
            f"the drafter in {folder} was trained with another tokenizer (vocabulary {meta['tokenizer'][:12]}) than "
            f"{tokenizer.name_or_path!r} (vocabulary {str(tokenizer_hash(tokenizer))[:12]})"
        )


def _read_calibration(found: Figures, expected: dict[str, Calibration], path: Path) -> dict[str, Calibration]:
    """Raises ValueError for what is not of the drafter's own shape, or not finite."""
    if unknown := sorted(found.keys() - expected.keys()):
        raise ValueError(
            f"{path}: calibration has unknown decoding modes {unknown!r:.200}, known are {sorted(expected)}"
        )
    result = {}
    for mode, own in expected.items():
        try:
            saved = result[mode] = Calibration(**found[mode])
            rows = (
                *zip(saved.acceptance, own.acceptance, strict=True),
                (saved.inverse_temperature, own.inverse_temperature),
            )
            sound = all(0 <= x < 1e6 for row, wanted in rows for x, _ in zip(row, wanted, strict=True))
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound:
            raise ValueError(
                f"{path}: calibration[{mode!r}] must hold numbers from 0 to 1,000,000 for each of "
                f"{len(own.acceptance)} depths; calibrate the drafter again, or copy the folder again"
            )
    return result
