"""What a measurement was made with: the machine, the target, the drafters, other engines and models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

import torch

from selfspec.checkpoints.loading import members_of
from selfspec.checkpoints.weights_hash import drafter_hash, settings_of, target_hash
from selfspec.core.target import Target
from selfspec.drafters.base import Drafter
from selfspec.utils.errors import command_line
from selfspec.utils.files import ORIGIN, Figures, code_hash, differences, read_json, write_text
from selfspec.utils.machine import device_name

_MEASURED = ("core", "engine", "drafters", "budget")  # folders of code that decodes
_BELOW = ("torch", "transformers")


def origin(device: torch.device) -> Figures:
    """Where and by which command something is measured."""
    return {"machine": device_name(device), "command": command_line()}


def check_origin(
    folder: Path,
    begun: Path,
    target: Target,
    drafters: Mapping[str, Drafter],
    kept: Iterable[str] | None = None,
    others: Mapping[str, str] | None = None,
) -> None:
    """Write what a measurement is made with beside it. kept: the arms that `begun` has results of (None: all drafters);
    others: what further arms are made with, by their names. Raises ValueError where `begun` is there and was measured
    with another device or target, or with another drafter or engine under the name of a measured arm; in a finished
    one, which is only shown, another device is named, and other code of selfspec in any."""
    now: Figures = {"device": device_name(target.device), "target": f"{target.name} {target_hash(target)[:16]}"}
    now["settings"] = settings_of(target)
    now |= {"code": f"selfspec {code_hash(*_MEASURED)[:12]}, " + ", ".join(f"{n} {version(n)}" for n in _BELOW)}
    now |= others or {}
    for name, drafter in drafters.items():
        members = members_of(name, drafter)
        now[f"drafter {name}"] = "+".join(drafter_hash(member)[:16] for member in members.values())
        if drafter.saved_hash is not None:
            now[f"files {name}"] = drafter.saved_hash
    path, measured = folder / ORIGIN, [*drafters] if kept is None else [*kept]
    if begun.exists() and not path.is_file():
        return  # of an older version, which did not say
    try:
        before = read_json(path) if begun.exists() else {}
    except ValueError as error:
        raise ValueError(f"{error}; delete the folder, or choose another name=") from error
    before.pop("engines", None)  # of an older version, all in one
    for key in (key for key in now if before.get(key, now[key]) != now[key]):
        what = "; ".join(differences(before[key], now[key])) if key == "settings" else f"{before[key]}, now {now[key]}"
        said = f"{begun} was measured with another {'target' if key == 'settings' else key} ({what})"
        if key == "code":  # a change may be of what is not measured
            print(f"warning: {said}; figures of before and now may not be alike")
        elif key == "device" and begun.name == "summary.json":
            print(said)
        elif key in ("device", "target", "settings") or _arm(key) in measured:
            raise ValueError(f"{said}; delete the folder, or choose another name=")
    if begun.name != "summary.json":
        if begun.exists():  # an arm that was measured without a word stays without one
            now = {key: value for key, value in now.items() if key in before or _arm(key) not in measured}
        write_text(path, json.dumps({**before, **now}, indent=1) + "\n")


def _arm(key: str) -> str:
    return key.removeprefix("drafter ")
