"""selfspec: self-speculative decoding in one frozen model; the output is that of plain decoding."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.4.0"
__all__ = ["Spec", "Target", "load", "load_target"]
_PLACES = {"load": "api", "Spec": "api", "load_target": "checkpoints.load_target", "Target": "core.target"}


def __getattr__(name: str) -> Any:  # `import selfspec` stays light; torch and transformers load on first use
    if name not in _PLACES:
        raise AttributeError(f"module 'selfspec' has no attribute {name!r}")
    return getattr(import_module(f"selfspec.{_PLACES[name]}"), name)
