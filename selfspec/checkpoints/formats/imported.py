"""Drafters that others have published, found by what their folders hold."""

from __future__ import annotations

from pathlib import Path

from selfspec.checkpoints.formats import block, eagle3, medusa, uno
from selfspec.checkpoints.formats.files import read_config
from selfspec.core.target import Target
from selfspec.drafters.base import Drafter


def published(folder: Path) -> str | None:
    """The form of a folder: eagle3 (also P-EAGLE; plain or speculators), block (DFlash or DSpark, in either form),
    medusa (vLLM's, TGI's or FasterDecoding's), uno (a PEFT adapter), or None."""
    if (folder / uno.NAME).is_file() and not (folder / "config.json").is_file():
        return "uno"
    if not (folder / "config.json").is_file():
        return None
    config = read_config(folder)
    if "medusa_num_heads" in config or config.get("model_type") == "medusa":
        return "medusa"
    if block.kind_of(config) is not None:
        return "block"
    names = f"{config.get('architectures')} {config.get('speculators_model_type')}".lower()
    own = "draft_vocab_size" in config  # as its authors' own configs, which name a plain Llama
    return "eagle3" if own or "eagle3" in names or "peagle" in names else None


def read(folder: Path, target: Target) -> Drafter:
    """A published drafter on this target. Raises ValueError for one that is not made for it."""
    readers = {"block": block.read, "eagle3": eagle3.read, "medusa": medusa.read, "uno": uno.read}
    try:
        return readers[published(folder) or ""](folder, target)
    except ValueError as error:
        if str(folder) in str(error):
            raise
        raise ValueError(f"{folder} can not be read: {error}") from error  # the drafter's own words
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(
            f"the config in {folder} holds a value of the wrong type ({error!r}); copy it again"
        ) from error


def named_target(folder: Path) -> str | None:
    """The target that a published folder names."""
    config = read_config(folder, uno.NAME if published(folder) == "uno" else "config.json")
    name = config.get("base_model_name_or_path")
    if isinstance(inner := config.get("speculators_config"), dict) and isinstance(inner.get("verifier"), dict):
        name = name or inner["verifier"].get("name_or_path")
    return name if isinstance(name, str) else None
