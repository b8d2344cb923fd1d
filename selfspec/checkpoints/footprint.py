"""What a drafter takes beside the target: parameters, bytes on disk and in memory, and training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from selfspec.checkpoints.embedded import resolve
from selfspec.checkpoints.find import drafter_folder, member_names
from selfspec.checkpoints.loading import members_of, untrained
from selfspec.core.target import Target
from selfspec.drafters.base import Drafter
from selfspec.utils.files import Figures, read_json


def price(name: str, drafter: Drafter, target: Target) -> Figures:
    """Of a drafter by its name, all members of a hybrid together."""
    figures: Figures = {"parameters": 0, "disk": 0, "memory": held_bytes(drafter, target.model)}
    members, notes = members_of(name, drafter), list[dict[str, float] | None]()
    for part in member_names(name):
        figures["parameters"] += sum(p.numel() for p in members[part].trained().values())
        if untrained(part) is None:
            home = drafter_folder(part)
            figures["disk"] += _disk(home)
            notes.append(training_note(home))
    if notes and all(notes):  # else nobody knows what all of it took
        figures["training"] = {key: sum(note[key] for note in notes if note) for key in notes[0] or ()}
    return figures


def price_of_model(name: str, model: nn.Module) -> Figures:
    """Of a separate draft model by its name."""
    home = Path(resolve(name))
    parameters = list(model.parameters())
    return {
        "parameters": sum(p.numel() for p in parameters),
        "disk": _disk(home) if home.is_dir() else 0,
        "memory": sum(p.numel() * p.element_size() for p in parameters),
        "training": training_note(home),
    }


def training_note(home: Path | None) -> dict[str, float] | None:
    """Seconds and tokens of the training of what is in a folder, where it says them."""
    note = None if home is None else home / "training.json"
    return None if note is None or not note.is_file() else read_json(note)


def _disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.suffix in (".safetensors", ".bin", ".pt"))


def held_bytes(part: nn.Module, beside: nn.Module) -> int:
    """Bytes of tensors that `part` holds beyond those of `beside`, whatever it laid out for decoding included."""
    others = {t.untyped_storage().data_ptr() for t in (*beside.parameters(), *beside.buffers())}
    sizes: dict[int, int] = {}
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if id(value) in seen or value is beside:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in others:
                sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            for item in list(value.values()):
                visit(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif isinstance(value, nn.Module) or type(value).__module__.startswith("selfspec."):
            for name, item in list(getattr(value, "__dict__", {}).items()):
                if name != "model":
                    visit(item)

    visit(part)
    return sum(sizes.values())
