"""selfspec: self-speculative decoding in one frozen model; the output is that of plain decoding."""

from __future__ import annotations

from typing import Any

__version__ = "0.4.0"
__all__ = ["Spec", "Target", "load", "load_target"]


def __getattr__(name: str) -> Any:  # `import selfspec` stays light; torch and transformers load on first use
    if name in ("load", "Spec"):
        from selfspec import api

        return getattr(api, name)
    if name == "load_target":
        from selfspec.checkpoints.load_target import load_target

        return load_target
    if name == "Target":
        from selfspec.core.target import Target

        return Target
    raise AttributeError(f"module 'selfspec' has no attribute {name!r}")
