"""Draft models as other engines keep them: config.json beside one safetensors file, held to the drafter they make."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from selfspec.core.target import Target
from selfspec.drafters.parts.llama_config import OWN
from selfspec.utils.errors import one_line
from selfspec.utils.files import Figures, inside, read_json

_BUILT = 2**22  # numbers that a drafter may have whatever its file holds: the error then names a tensor
_MAPPINGS = (  # of configs, where they have them
    *("rope_parameters", "rope_scaling", "eagle_config", "dflash_config"),
    *("transformer_layer_config", "speculators_config"),
)
_MOST = 5  # names that an error lists
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)


def write_files(folder: Path, config: Figures, tensors: dict[str, Tensor], name: str = "model.safetensors") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file({key: t.detach().cpu().contiguous() for key, t in tensors.items()}, folder / name, {"format": "pt"})


def read_config(folder: Path, name: str = "config.json") -> Figures:
    """The folder's JSON of this name. Raises FileNotFoundError or ValueError naming the file."""
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    config = read_json(path)
    for key in _MAPPINGS:
        if not isinstance(config.get(key) or {}, dict):
            raise ValueError(f"{path}: {key}={config[key]!r:.200} must be a mapping")
    return config


def weight_map(path: Path) -> dict[str, str]:
    """Which file holds which tensor, of a checkpoint's index. Raises ValueError for a damaged one."""
    try:
        files = read_json(path)["weight_map"]
        if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
            raise TypeError("weight_map must give a file for each tensor")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); copy it again") from error
    return files


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of one of torch's, in which no code is run. Raises FileNotFoundError for a
    missing file, ValueError for one that is not whole, or holds anything else."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    if path.suffix == ".safetensors":
        try:
            tensors = load_file(path)
        except (SafetensorError, RuntimeError) as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    else:
        tensors = read_torch(path)
        if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
            raise ValueError(f"{path} must hold tensors by name")
    for name, tensor in tensors.items():
        check_plain(name, tensor, path)
    return tensors


def read_torch(path: Path) -> Any:
    """What a file of torch's holds, without running code. Raises ValueError for one that holds more than tensors, or
    that takes more memory than its bytes."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as parts:
                if any(entry.compress_type for entry in parts.infolist()):
                    raise ValueError("its parts are compressed, as torch writes none")
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise ValueError(f"{path} is no file of tensors alone: {one_line(error):.200}") from error


def check_plain(name: str, tensor: Any, path: Path) -> None:
    """Raises ValueError for what is no tensor of numbers that lie in the file."""
    whole = isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_nested
    if not whole or tensor.is_meta or tensor.is_quantized or tensor.dtype not in _DTYPES:
        of = (
            f"{tensor.dtype}, {tensor.layout}, {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
        )
        raise ValueError(f"{path}: {name!r:.200} is no plain tensor of a dtype that drafters have ({of})")
    if tensor.nbytes > path.stat().st_size:
        raise ValueError(f"{path}: {name!r:.200} has {tensor.nbytes} bytes, the file {path.stat().st_size}")


def read_weights(
    folder: Path, names: Sequence[str] = ("model.safetensors", "pytorch_model.bin")
) -> tuple[dict[str, Tensor], Path]:
    """The weights of a folder and the file that holds or lists them, of one of these names, whole or in shards. Raises
    FileNotFoundError where there is none of these, ValueError as `read_tensors`."""
    for name in names:
        if (folder / name).is_file():
            return read_tensors(folder / name), folder / name
        if (index := folder / f"{name}.index.json").is_file():
            tensors: dict[str, Tensor] = {}
            for shard in sorted({*weight_map(index).values()}):
                found = read_tensors(inside(folder, shard, index))
                if twice := tensors.keys() & found.keys():
                    raise ValueError(f"{index}: two files hold {few(twice)}; copy the folder again")
                tensors |= found
            return tensors, index
    raise FileNotFoundError(f"{folder}/{names[0]} is missing, and so are its shards and {' and '.join(names[1:])}")


def renamed(tensors: Mapping[str, Tensor], name_of: Callable[[str], str], path: Path | str) -> dict[str, Tensor]:
    """Tensors of a file by other names. Raises ValueError where two would have the same one."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if (ours := name_of(name)) in result:
            raise ValueError(f"{path}: two tensors are called {ours!r:.200}, one of them as {name!r:.200}; keep one")
        result[ours] = tensor
    return result


def few(names: Collection[str]) -> str:
    """Names in a list, at most five of them."""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(f"{name!r:.200}" for name in sorted(names)[:_MOST]) + more


def compare_names(found: Collection[str], wanted: Collection[str], path: Path | str) -> None:
    """Raises ValueError for names that are missing or too many."""
    missing, unknown = set(wanted) - set(found), set(found) - set(wanted)
    if missing or unknown:
        odd = [f"missing tensors [{few(missing)}]", f"unknown tensors [{few(unknown)}]"]
        raise ValueError(f"{path}: {', '.join(odd)}; expected {len(wanted)} tensors, found {len(found)}")


@torch.no_grad()
def fill(
    into: Mapping[str, Tensor], found: Mapping[str, Tensor], path: Path | str, dtype: torch.dtype | None = None
) -> None:
    """Copy a file's tensors into those of the same names. dtype: in which the tensors have to be finite (None:
    in that of `into`).
    Raises ValueError for names that are missing or too many, and for tensors of another shape or kind."""
    compare_names(found, into, path)
    for name, part in into.items():
        tensor = found[name]
        if tensor.shape != part.shape:
            raise ValueError(
                f"{path}: {name} is {list(tensor.shape)}, the config and the target ask for {list(part.shape)}"
            )
        if tensor.is_floating_point() != part.is_floating_point():
            raise ValueError(f"{path}: {name} is {tensor.dtype}, expected {part.dtype}")
        if not tensor.to(dtype or part.dtype).isfinite().all():
            raise ValueError(f"{path}: {name} holds numbers that are not finite in {dtype or part.dtype}")
        part.copy_(tensor)


def number(config: Figures, name: str, folder: Path, file: str = "config.json") -> int:
    """A whole number above 0 of a config. Raises ValueError naming it."""
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ValueError(f"{folder}/{file}: {name}={value!r:.40} must be a whole number above 0, below 2**31")
    return value


def check_read(config: Figures, readable: Figures, folder: Path) -> None:
    """Raises ValueError for a value that is neither left out nor null, nor the one that can be read."""
    for name, wanted in _others(config, readable):
        can = "" if wanted is None else f" here, {wanted!r} can"
        raise ValueError(f"{folder}/config.json: {name}={config[name]!r:.60} can not be read{can}")


def check_fits(config: Figures, of_target: Figures, folder: Path) -> None:
    """Raises ValueError for a value that is neither left out nor null, nor the target's."""
    for name, wanted in _others(config, of_target):
        raise ValueError(f"{folder}/config.json: {name} is {config[name]!r:.60}, the target's is {wanted}")


def _others(config: Figures, values: Figures) -> Iterator[tuple[str, Any]]:
    """The keys under which a config has another value, with the one that it should have."""
    for name, wanted in values.items():
        if (value := config.get(name)) is not None and (type(value) is bool or value != wanted):
            yield name, wanted


def check_held(numbers: int, tensors: Mapping[str, Tensor], what: str, folder: Path, file: str = "config.json") -> None:
    """Raises ValueError for more numbers than a file holds, before memory is taken for them."""
    if numbers > max(_BUILT, sum(tensor.numel() for tensor in tensors.values())):
        raise ValueError(f"{folder}/{file}: {what} can not lie in its file; copy it again")


# -- draft models of Llama's form


def settle(config: Figures, tensors: Mapping[str, Tensor], target: Target, folder: Path) -> int:
    """Fill in Llama's own defaults, where a key is missing or null. Returns the number of tokens that can be drafted.
    Raises ValueError for sizes that do not fit the target."""
    for name, wanted in {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}.items():
        if config.get(name) != wanted:
            raise ValueError(f"{folder}/config.json: {name} is {config.get(name)!r}, the target's is {wanted}")
    few = config.get("draft_vocab_size") or target.vocab_size
    if not isinstance(few, int) or not 0 < few <= target.vocab_size:
        raise ValueError(
            f"{folder}/config.json: draft_vocab_size={few!r} must lie between 1 and {target.vocab_size}, or be null"
        )
    heads = number(config, "num_attention_heads", folder)
    usual = {"head_dim": target.hidden_size // heads, "num_key_value_heads": heads, "rms_norm_eps": 1e-6}
    usual["num_hidden_layers"] = 1
    config |= {name: value for name, value in usual.items() if config.get(name) is None}
    layers, inner = (number(config, name, folder) for name in ("num_hidden_layers", "intermediate_size"))
    number(config, "num_key_value_heads", folder)
    widest = max(inner, heads * number(config, "head_dim", folder))
    check_held(layers * target.hidden_size * widest, tensors, f"{layers} layers of {inner}", folder)
    return few


def llama_keys(target: Target, llama: LlamaConfig, layers: int) -> Figures:
    """Keys of a config for draft layers of Llama's form, in the target's saved dtype."""
    own = {name: getattr(llama, name) for name in OWN}
    return {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **own,
        "rope_theta": own["rope_parameters"].get("rope_theta"),  # readers of older transformers look for it here
        "torch_dtype": str(target.saved_dtype).removeprefix("torch."),
    }


def vocabulary(tensors: dict[str, Tensor], few: int, target: Target, path: Path) -> Tensor | None:
    """The tokens, int64, of a draft vocabulary of `few` tokens (None: it is the target's), by the map d2t. It is taken
    out, and so is t2d, the mask of these tokens. Raises ValueError for maps that are missing, contradict each other, or
    lead nowhere."""
    d2t, t2d, every = tensors.pop("d2t", None), tensors.pop("t2d", None), target.vocab_size
    if d2t is None and few == every:
        return None
    if d2t is None or d2t.ndim != 1 or d2t.is_floating_point() or d2t.dtype == torch.bool or len(d2t) != few:
        is_ = "missing" if d2t is None else f"{list(d2t.shape)} of {d2t.dtype}"
        raise ValueError(
            f"{path}: d2t is {is_}; by draft_vocab_size it must list {few} whole numbers: one of the two is wrong"
        )
    if few == every:
        if d2t.any():
            raise ValueError(
                f"{path}: d2t leads to other tokens, though draft_vocab_size={few} is the whole vocabulary; one of the "
                "two is wrong"
            )
        return None
    ids = d2t.long() + torch.arange(few)
    if not 0 <= int(ids.min()) <= int(ids.max()) < every:
        raise ValueError(
            f"{path}: d2t leads to tokens from {int(ids.min())} to {int(ids.max())}; it must hold each draft token's "
            f"distance to a token of the target, 0 to {every - 1}"
        )
    if t2d is not None and not torch.equal(t2d.flatten().bool().nonzero()[:, 0], ids.sort().values):
        if not d2t.any():
            raise unwritten(few, every, path)
        raise ValueError(f"{path}: d2t and t2d name different tokens; copy or convert the drafter again")
    return ids


def unwritten(few: int, every: int, path: Path) -> ValueError:
    return ValueError(
        f"{path}: d2t is all zero, so that only the first {few} of {every} tokens could be drafted; the map was not "
        "written: copy or convert the drafter again"
    )
