"""Models with names: a small target and three drafters for it, which are embedded; SmolLM2 and Qwen2.5-Coder with
drafters.

The embedded ones lie in selfspec/assets in a clone, and in the package `selfspec_models` where selfspec was installed
from a wheel.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from selfspec.checkpoints.gguf import dequantized
from selfspec.checkpoints.named import HUB, qwen_coder, smollm2

TARGETS = ("tiny-target", *HUB)
DRAFTERS = ("tiny-early-exit", "tiny-eagle3", "tiny-medusa", "smollm2-medusa", "smollm2-eagle3", "qwen-coder-eagle3")


def assets() -> Path | None:
    """Where the embedded models lie, if they are here."""
    beside = Path(__file__).parents[1] / "assets"
    if (beside / "tiny-target").is_dir():
        return beside
    spec = importlib.util.find_spec("selfspec_models")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def resolve(name: str) -> str:
    """An embedded model's folder by its name (`tiny-target`, `tiny-medusa`), and that of a GGUF file; any other name as
    it is. Raises FileNotFoundError for one that is not here, and says how to get it."""
    if name.endswith(".gguf"):
        return str(dequantized(Path(name)))
    if name not in (*TARGETS, *DRAFTERS) or Path(name).exists():
        return name
    if name in HUB:
        return str(smollm2()) if name == "smollm2" else qwen_coder()
    if (home := assets()) is None:
        raise FileNotFoundError(
            f"{name!r} is one of the embedded models, which are not installed: pip install 'selfspec[models]', or in a "
            "clone pip install ./selfspec/assets"
        )
    return str(home / name)
