"""Where a drafter of a name lies."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from os.path import exists
from pathlib import Path

from selfspec.checkpoints.embedded import DRAFTERS, TARGETS, resolve
from selfspec.drafters import OWN_KINDS
from selfspec.utils.errors import did_you_mean
from selfspec.utils.files import inside, read_json

EXPORTED, OWN = "selfspec.json", "drafter"  # who drafts, in a folder that transformers runs, and its own drafter there
UNTRAINED = ("prompt_lookup", "lookahead")  # work without a checkpoint


def named_folder(drafter: Path, name: str) -> Path | None:
    """The folder that a drafter's own folder names as its target: an absolute path, or one relative to the drafter's
    folder. None for names of other kinds."""
    if Path(name).is_absolute():
        return Path(name)
    return inside(drafter.resolve().parent, name[3:], drafter / "drafter.json") if name.startswith("../") else None


def is_path(name: str) -> bool:
    """Whether a name can only be meant as a path: no hub id looks so."""
    return name.count("/") != 1 or name.endswith("/") or name.startswith((".", "/", "~", "runs/"))


def drafter_folder(name: str, revision: str | None = None) -> Path:
    """Where a drafter lies: an embedded name, a run folder (its `drafter`), a drafter's own folder, one in a form that
    others publish (see `selfspec.checkpoints.formats`), or a hub id. revision: of a hub id.

    Raises FileNotFoundError where there is none.
    """
    from selfspec.checkpoints.hub import fetch  # slow to import

    if (inside := _within(Path(resolve(name)))) is not None:
        return inside
    if Path(name).exists() or is_path(name):
        raise _no_drafter(name)
    seen = fetch(name, revision, "*.json")  # the weights of what is no drafter are not downloaded
    if (inside := _within(seen)) is None:
        raise FileNotFoundError(
            f"the hub's {name!r} holds no drafter: neither drafter.json nor a form of other engines"
        )
    return fetch(name, revision) / inside.relative_to(seen)  # with the target of an exported folder


def check_drafter_name(name: str) -> None:
    """Raises ValueError for names that are empty or come twice, FileNotFoundError for one that neither a drafter, a
    kind of one nor a hub id can have, before anything is read."""
    installed, members = {entry.name for entry in entry_points(group=OWN_KINDS)}, member_names(name)
    if not all(members):
        raise ValueError(f"drafter={name!r} holds an empty name; give an embedded one, a run folder or a hub id")
    if len(set(members)) < len(members):
        raise ValueError(f"drafter={name!r} names a drafter twice")
    for part in members:
        kind = part.isidentifier() and (Path(__file__).parents[1] / "drafters" / f"{part}.py").is_file()
        path = "." in part and all(word.isidentifier() for word in part.split("."))
        known = kind or path or part in (*DRAFTERS, *UNTRAINED, *installed)
        if (exists(part) and Path(part).is_file()) or (not known and not exists(part) and is_path(part)):
            raise _no_drafter(part)


def check_target_name(name: str, path: str | None = None) -> None:
    """Raises FileNotFoundError for a target's name that is neither embedded, a folder with a model nor a hub id. path:
    that it stands for."""
    place = Path(path or name)
    if path is None and name in TARGETS and not place.exists():
        return
    if not name:
        raise FileNotFoundError(f"target is empty; give a folder, a hub id owner/name, or one of {', '.join(TARGETS)}")
    if name.endswith(".gguf") and path is None:
        if not place.is_file():
            raise FileNotFoundError(f"target {name!r} is not a file")
    elif not (place / "config.json").is_file() and (place.is_dir() or is_path(str(place))):
        files = sorted(place.glob("*.gguf")) if place.is_dir() else []
        drafter = (place / "drafter.json").is_file() or (place / "drafter" / "drafter.json").is_file()
        holds = "; it is a file, so give its folder" if place.is_file() else ""
        holds = f"; give the file {files[0]}" if files else "; it holds a drafter: give drafter=" if drafter else holds
        what = holds or f"; give a folder, a hub id owner/name, or one of {', '.join(TARGETS)}"
        lacks = f"{place} has no config.json" if place.exists() else f"there is no folder {place}"
        raise FileNotFoundError(f"target {name!r}{did_you_mean(name, TARGETS)}: {lacks}{what}")


def _no_drafter(name: str) -> FileNotFoundError:
    place, embedded = Path(name), ", ".join(DRAFTERS)
    if place.is_file():
        return FileNotFoundError(f"no drafter at {name!r}: it is a file; give the folder of a drafter")
    if (place / "config.json").is_file():
        return FileNotFoundError(f"no drafter at {name!r}: it holds a model; give target={name}, and a drafter for it")
    runs = sorted(str(path.parents[1]) for path in place.glob("*/drafter/drafter.json"))
    lacks = f"the folder holds {'runs: give one, as ' + runs[0] if runs else 'no drafter'}"
    lacks = lacks if place.is_dir() else "there is no such folder"
    return FileNotFoundError(
        f"no drafter at {name!r}{did_you_mean(name, (*DRAFTERS, *UNTRAINED))}: {lacks}; give a folder with "
        "drafter.json or drafter/drafter.json, an EAGLE-3 or Medusa folder as others publish them, a hub id "
        f"owner/name, or one of the embedded {embedded}, or {' or '.join(UNTRAINED)}, which need no training (join "
        "several by +)"
    )


def on_hub(name: str) -> bool:
    """Whether a name can only be a hub id."""
    return not Path(resolve(name)).exists() and not is_path(name)


def _within(home: Path) -> Path | None:
    """The drafter's folder in a run's, an exported or a downloaded folder."""
    from selfspec.checkpoints.formats.imported import published  # slow to import

    for folder in (home / "drafter", home):
        if (folder / "drafter.json").is_file() or published(folder):
            return folder
    return None


def member_names(name: str) -> list[str]:
    """The drafters that a name stands for: several are joined by "+" and share one tree. An exported folder stands for
    all that draft there."""
    names = [part if exists(part) else part.strip() for part in split_at(name, "+", exists)]
    for folder in map(Path, list(names)):
        names += [member for member in exported_members(folder) if member not in names]
    return names


def exported_members(folder: Path) -> list[str]:
    """Who drafts in an exported folder beside its own drafter; none in other folders."""
    path = folder / EXPORTED
    members = str(read_json(path).get("drafter", OWN)).split("+") if path.is_file() else []
    return [member for member in members if member != OWN]


def split_at(text: str, mark: str, whole: Callable[[str], bool]) -> list[str]:
    """The parts of a text between marks. Those that are whole, such as paths that exist, may hold marks of their own;
    the longest are taken."""
    parts, found = text.split(mark), list[str]()
    while parts:
        size = next((n for n in range(len(parts), 1, -1) if whole(mark.join(parts[:n]))), 1)
        found.append(mark.join(parts[:size]))
        parts = parts[size:]
    return found
