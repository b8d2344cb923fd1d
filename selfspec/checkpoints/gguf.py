"""GGUF files as targets: dequantized once into the cache folder, where transformers reads a plain folder."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import shutil
import sys
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

from selfspec.utils.files import atomic, cache_folder

_FORM = 2  # of what is kept: before, a file of which transformers left out a part was taken
_SCALING, _NONE = ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"), ("none", 0, 1)
_GROWTH = 8  # bytes on disk for one of a file's at most: four bits become 16, and a scratch copy may lie beside


class _Unread(ValueError):
    """Of a file that is whole, and holds what transformers would leave out."""


def dequantized(file: Path, folder: Path | None = None, quiet: bool = False) -> Path:
    """The folder of a GGUF file's model, made by the first call: `folder`, or one in the cache that the file's path,
    size and time name. Weights are kept in bfloat16, those of files in float32 or float16 in float32. quiet: without
    transformers' progress bars.

    Raises FileNotFoundError where there is no such file; ValueError without the package that reads it, without room,
    and for a file that is damaged or of a form that transformers does not know.
    """
    if folder is None:
        if not file.is_file():
            raise FileNotFoundError(f"target {str(file)!r} is not a file")
        state = file.stat()
        key = f"{_FORM} {file.resolve()} {state.st_size} {state.st_mtime_ns}"
        key = hashlib.sha256(key.encode()).hexdigest()[:16]
        folder = cache_folder() / "targets" / f"{file.stem}-{key}"
    if (folder / "config.json").is_file():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"target {str(file)!r} is read by the package gguf, which is missing: pip install gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder.parent).free) < (room := _GROWTH * file.stat().st_size):
        raise ValueError(
            f"{free / 2**20:.0f} MB are free in {folder.parent}, {file.name} needs {room / 2**20:.0f}; free some, or "
            "set SELFSPEC_CACHE to a folder with room"
        )
    with file.open("rb") as head:
        if head.read(4) != b"GGUF":
            raise ValueError(f"target {str(file)!r} is no GGUF file, or was cut off; copy it again")
    print(f"{file.name} is dequantized once, seconds to minutes, into {folder}", file=sys.stderr)
    with redirect_stderr(io.StringIO()) if quiet else nullcontext():  # errors are raised
        _convert(file, folder)
    return folder


def _convert(file: Path, folder: Path) -> None:
    import torch
    import transformers
    from gguf import GGUFReader

    target, whole = f"target {str(file)!r}", dict[str, Any]()
    if hasattr(transformers, "GgufConfig"):  # from 5.17 on; before, every file was dequantized
        whole = {"quantization_config": transformers.GgufConfig(dequantize=True, gguf_file=file.name)}
    try:
        reader = GGUFReader(file)
        widest = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
        dtype = torch.float32 if widest <= {"F32", "F16"} else torch.bfloat16
        tensors = [tensor for tensor in reader.tensors if tensor.name.startswith(("rope_freqs", "rope_factors"))]
        factors = [tensor.name for tensor in tensors if (tensor.data != 1).any()]
        given = {name: field.contents() for name, field in reader.fields.items() if name.endswith(_SCALING)}
        factors += [name for name, how in given.items() if how not in _NONE and not name.startswith("gpt-oss")]
        if factors:  # transformers reads neither, and would place tokens elsewhere
            raise _Unread(f"{target} scales positions by {factors[0]}, which is not read; take the model's folder")
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=dtype, output_loading_info=True, **whole
        )
        model, report = loaded
        if drawn := sorted(report["missing_keys"]):
            why = f"{target} holds no weights for {', '.join(drawn[:3])}"
            raise _Unread(f"{why}; merge the parts of a split file: llama-gguf-split --merge")
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except _Unread:
        raise
    except Exception as error:  # of two libraries, for damaged files of many kinds
        raise ValueError(f"{target} is damaged or cut off: {type(error).__name__}: {error!s:.300}") from error
    model.config.__dict__.pop("quantization_config", None)  # it is a plain model now, and saved as one
    model.hf_quantizer = None
    with atomic(folder) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
