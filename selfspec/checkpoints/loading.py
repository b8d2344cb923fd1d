"""Drafters: from names, folders and hub ids to one that drafts for a target, and to both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.checkpoints.drafter_folder import check_tokenizer, load_drafter, read_meta
from selfspec.checkpoints.find import EXPORTED, drafter_folder, exported_members, member_names, named_folder, on_hub
from selfspec.checkpoints.formats import mtp
from selfspec.checkpoints.formats.imported import named_target, published
from selfspec.checkpoints.formats.imported import read as read_published
from selfspec.checkpoints.load_target import load_target
from selfspec.core.target import Target
from selfspec.drafters.base import Drafter, Trained
from selfspec.drafters.hybrid import Hybrid
from selfspec.drafters.mtp import Mtp
from selfspec.drafters.registry import Unknown, Untrusted, build, config_class, drafter_class
from selfspec.utils.files import Figures


def untrained(name: str, trust: bool = False) -> type[Drafter] | None:
    """The kind of drafter of this name, where it works without a checkpoint. Raises ValueError where a kind of this
    name needs one and no checkpoint has the name, and for a class of another package that may not run."""
    if (Path(name) / "drafter").is_dir() or (Path(name) / "drafter.json").is_file() or published(Path(name)):
        return None
    try:
        kind = drafter_class(name, trust)
    except Untrusted:
        if Path(name).exists():
            return None
        raise
    except Unknown:
        return None
    if kind is Hybrid:
        raise ValueError(f"drafter {name!r} is nothing by itself; join the names of its members by +: a+b")
    if kind is Mtp:  # shipped with the target
        return kind
    if issubclass(kind, Trained):
        raise ValueError(
            f"drafter {name!r} is a kind that has to be trained first: selfspec train drafter={name} "
            "target.name=TARGET name=mine, then runs/mine"
        )
    return kind


def _member(name: str, folder: Path | None, target: Target, tokenizer: Tokenizer | None, trust: bool) -> Drafter:
    if (kind := untrained(name, trust)) is not None:
        return mtp.read(target) if kind is Mtp else build(kind, target, config_class(kind)()).eval()
    folder = folder or drafter_folder(name)
    if (folder / "drafter.json").is_file():
        return load_drafter(folder, target, tokenizer, trust)
    return read_published(folder, target)


def find_drafter(
    name: str,
    target: Target,
    tokenizer: Tokenizer | None = None,
    folders: dict[str, Path] | None = None,
    trust: bool = False,
) -> Drafter:
    """A drafter for this target by the name of a kind that needs no training, of a checkpoint (`drafter_folder`), or
    of several of these joined by "+", which share one tree. folders: where checkpoints lie, as far as it is known;
    trust: whether they may name classes of other packages.

    Raises ValueError for a checkpoint of another target, a kind that has to be trained, a name given twice, and members
    that can not share a tree; FileNotFoundError for a name that stands for nothing.
    """
    names = member_names(name)
    if "" in names:
        raise ValueError(f"drafter={name!r} names no drafter on one side of a +; give names such as a+b")
    if len(set(names)) < len(names):
        raise ValueError(f"drafter={name!r} names a drafter twice")
    drawn_on = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(drawn_on):  # weights are drawn before they are read
        members = {one: _member(one, (folders or {}).get(one), target, tokenizer, trust) for one in names}
    return joined(target, members)


def joined(target: Target, members: dict[str, Drafter]) -> Drafter:
    """One drafter, or several that share one tree. Raises ValueError for members that can not."""
    return next(iter(members.values())) if len(members) == 1 else Hybrid(target, members).eval()


def members_of(name: str, drafter: Drafter) -> dict[str, Drafter]:
    """The drafters that one of this name is made of."""
    return drafter.members if isinstance(drafter, Hybrid) else {name: drafter}


def load_pair(
    drafter: str,
    target: str | Path | PreTrainedModel | None,
    dtype: str | torch.dtype,
    device: str | None,
    engine: str = "eager",
    revision: str | None = None,
    trust: bool = False,
    width: int | None = None,
    **loading: Any,
) -> tuple[Target, Drafter, Tokenizer | None, Path | None]:
    """A target, a drafter for it, the tokenizer (None where there is none), and the folder of a single checkpoint. The
    target is the one given or the one that the first trained drafter names. revision: of a drafter on the hub, or,
    where none is, of the target; width: see `Target.use_width`.

    Raises ValueError and FileNotFoundError as `load_target` and `find_drafter` do.
    """
    names = [name for name in member_names(drafter) if name and untrained(name, trust) is None]
    theirs = None  # the target's
    if revision is not None and not any(on_hub(name) for name in names):
        if not isinstance(target, str) or not on_hub(target):
            raise ValueError(f"revision={revision!r}: drafter={drafter!r} is not on the hub; leave revision out")
        theirs, revision = revision, None
    places = {name: drafter_folder(name, revision) for name in names}
    folders = list(places.values())
    for folder in [place for name, place in places.items() if on_hub(name)]:
        more = [member for member in exported_members(folder.parent) if member not in member_names(drafter)]
        drafter = "+".join([drafter, *more])
    ours = [folder for folder in folders if (folder / "drafter.json").is_file()]
    for folder in ours:  # before a target is loaded, which may take minutes
        drafter_class(str(read_meta(folder)["kind"]), trust, away=folder)
    meta: Figures = {}
    if ours:
        meta = dict(read_meta(ours[0])["target"])
        if (ours[0].parent / EXPORTED).is_file():  # the target lies there, too
            meta = {"name": str(ours[0].parent)}
        if (place := named_folder(ours[0], meta["name"])) is not None:
            if target is None and not place.exists():
                raise FileNotFoundError(
                    f"the drafter in {ours[0]} was trained for the target in {place}, which is not there; say where it "
                    "is now with target= (--target)"
                )
            meta["name"] = str(place)
    elif folders:
        meta = {"name": named_target(folders[0])}
    if target is None and not meta.get("name"):
        raise ValueError(f"drafter={drafter!r} names no target; give one: target=tiny-target, --target tiny-target")
    source = meta["name"] if target is None else target
    if target is None and on_hub(str(source)):  # what lies here is held against the weights' hash
        theirs = meta.get("revision")
    frozen, tokenizer = load_target(source, dtype, device, theirs, engine, **loading)
    if width is not None:
        frozen.use_width(width)
    for folder in ours:
        check_tokenizer(folder, read_meta(folder), tokenizer)
    home = ours[0] if ours and len(member_names(drafter)) == 1 else None
    return frozen, find_drafter(drafter, frozen, tokenizer, places, trust), tokenizer, home
