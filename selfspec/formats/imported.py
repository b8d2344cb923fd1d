"""Drafters that others have published, found by what their folders hold."""

from __future__ import annotations

from pathlib import Path

from selfspec.core.target import Target
from selfspec.drafters.base import Drafter
from selfspec.formats import eagle3, medusa, uno
from selfspec.formats.files import read_config


def published(folder: Path) -> str | None:
    """The form of a folder: eagle3 (plain or speculators), medusa (vLLM's, TGI's or FasterDecoding's), uno (a PEFT
    adapter), or None."""
    if (folder / uno.NAME).is_file() and not (folder / "config.json").is_file():
        return "uno"
    if not (folder / "config.json").is_file():
        return None
    config = read_config(folder)
    if "medusa_num_heads" in config or config.get("model_type") == "medusa":
        return "medusa"
    names = [*(config.get("architectures") or []), str(config.get("speculators_model_type"))]
    return "eagle3" if any("eagle3" in str(name).lower() for name in names) else None


def read(folder: Path, target: Target) -> Drafter:
    """A published drafter on this target. Raises ValueError for one that is not made for it."""
    readers = {"eagle3": eagle3.read, "medusa": medusa.read, "uno": uno.read}
    return readers[published(folder) or ""](folder, target)


def named_target(folder: Path) -> str | None:
    """The target that a published folder names."""
    config = read_config(folder, uno.NAME if published(folder) == "uno" else "config.json")
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    return config.get("base_model_name_or_path") or verifier.get("name_or_path")
