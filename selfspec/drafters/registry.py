"""Which classes draft: the files of selfspec/drafters/, installed entry points, and classes of other packages by path;
and whether a drafter that was built has what the contract asks."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import traceback
import typing
from contextlib import suppress
from dataclasses import is_dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import torch

import selfspec.drafters
from selfspec.core.contract import Accepted, Context, Session, checked
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree
from selfspec.drafters import OWN_KINDS
from selfspec.drafters.base import Drafter, DrafterConfig, Trained

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_DEPTH = 256  # of a tree at most


class Unknown(ValueError):
    """A kind that is neither of this package, nor installed, nor a path that leads into a package."""


class Untrusted(ValueError):
    """A drafter is code of another package, and nobody said that it may run."""


def kinds() -> list[str]:
    """The kinds of this package that can be trained or used by themselves."""
    names = (module.name for module in pkgutil.iter_modules(selfspec.drafters.__path__) if not module.ispkg)
    return [name for name in names if name not in ("base", "hybrid", "registry")]


def installed() -> dict[str, EntryPoint]:
    """Drafters that installed packages offer, by the names they give them."""
    return {entry.name: entry for entry in entry_points(group=OWN_KINDS)}


def drafter_class(kind: str, trust: bool = False, away: Path | None = None) -> type[Drafter]:
    """The class of a kind: `early_exit` -> the drafter class of selfspec/drafters/early_exit.py; the name of an
    installed entry point; or a class's path, `package.module.Class`, where `trust` says that its code may run or its
    package is installed with an entry point. away: a folder that code is never taken from.

    Raises ValueError for a kind that does not exist or is no drafter, Untrusted for one that may not run.
    """
    name = f"selfspec.drafters.{kind}"
    if re.fullmatch(r"[a-z][a-z0-9_]*", kind) and kind not in ("base", "registry"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
        else:
            classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == name]
            if drafters := [c for c in classes if issubclass(c, Drafter)]:
                return drafters[0]
    offered = installed()
    path = offered[kind].value.replace(":", ".") if kind in offered else kind
    package = path.partition(".")[0]
    spec = importlib.util.find_spec(package) if _PATH.fullmatch(path) else None
    if spec is None:
        missing = f": there is no package {package!r}; install it, or put its folder on PYTHONPATH"
        is_module = kind.isidentifier() and importlib.util.find_spec(kind) is not None
        more = f": it is a module; give a class in it, as {kind}.Class" if is_module else ""
        raise Unknown(f"unknown drafter kind {kind!r}{missing if '.' in path else more}")
    known = {"selfspec", *(re.split("[.:]", entry.value)[0] for entry in offered.values())}
    if not trust and package not in known:
        raise Untrusted(
            f"drafter {kind!r} is code of the package {package!r}; if you trust it, load it with trust_code=True "
            f"(trust_code=true, --trust-code), or install it with an entry point of the group {OWN_KINDS}"
        )
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else ())]
    if away is not None and any(Path(home).resolve().is_relative_to(away.resolve()) for home in places):
        raise ValueError(f"drafter {kind!r}: code is never taken from the checkpoint's own folder {away}; install it")
    return _imported(path)


def _imported(path: str) -> type[Drafter]:
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:  # whatever a module of another package does
        raise ValueError(f"drafter {path!r}: {module} can not be imported ({error!r})") from error
    if not isinstance(kind, type) or not issubclass(kind, Drafter):
        raise ValueError(
            f"drafter {path!r}: {module} has no class {name} derived from selfspec.drafters.base.Drafter"
            + ("" if kind is None else f", but {kind!r:.60}")
        )
    return kind


def config_class(kind: type[Drafter]) -> type[DrafterConfig]:
    """The config that a drafter class is built from. Raises ValueError where its annotation of `config` is none."""
    try:
        config = typing.get_type_hints(kind)["config"]
    except NameError as error:
        raise ValueError(f"{kind.__qualname__}: an annotation can not be resolved ({error})") from error
    if not (isinstance(config, type) and issubclass(config, DrafterConfig) and is_dataclass(config)):
        raise ValueError(f"{kind.__qualname__}.config must be annotated with a dataclass derived from DrafterConfig")
    if inspect.get_annotations(config) and "__dataclass_fields__" not in vars(config):
        raise ValueError(f"{config.__qualname__} is no dataclass, so its fields are not saved; put @dataclass above it")
    return config


def build(kind: type[Drafter], target: Target, config: DrafterConfig) -> Drafter:
    """A drafter on a target. Raises ValueError naming what of the contract it lacks."""
    name = kind.__qualname__
    if lacking := sorted(kind.__abstractmethods__):
        raise ValueError(f"drafter {name} lacks {' and '.join(lacking)}; docs/own_drafter.md shows what they return")
    base = "super().__init__(config, depth=...)" if issubclass(kind, Trained) else "super().__init__(config, {})"
    try:
        drafter = kind(target, config)  # type: ignore[arg-type]
    except (TypeError, AttributeError) as error:
        if kind.__module__.startswith("selfspec."):
            raise
        raise ValueError(
            f"drafter {name} can not be built ({error}); its __init__ takes (target, config), begins with {base}, and "
            "config is of the class that the annotation names"
        ) from error
    for attribute in ("config", "calibration", *(("depth",) if isinstance(drafter, Trained) else ())):
        if not hasattr(drafter, attribute):
            raise ValueError(f"drafter {name} has no {attribute}; its __init__ has to call {base}")
    if not isinstance(drafter.config, config_class(kind)):
        raise ValueError(f"drafter {name}: self.config is a {type(drafter.config).__name__}; call {base}")
    if isinstance(drafter, Trained) and not (type(drafter.depth) is int and 1 <= drafter.depth <= _DEPTH):
        raise ValueError(f"drafter {name}: depth={drafter.depth!r} must be a whole number from 1 to {_DEPTH}")
    if not isinstance(drafter.reads, tuple) or any(layer not in range(target.n_layers) for layer in drafter.reads):
        raise ValueError(
            f"drafter {name}: reads={drafter.reads!r} must be a tuple of layers, 0 to {target.n_layers - 1}"
        )
    drafter.trained()  # which parameters these are is settled while the target is frozen
    return drafter


class _Seen:
    """A drafter whose proposals are checked as they come."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.reads, self.name = drafter, drafter.reads, type(drafter).__qualname__
        self.inner: Any = None

    def session(self, target: Target, rows: int) -> Session:
        before, self.inner = self.inner, self.drafter.session(target, rows)
        if self.inner is before and before is not None:
            raise ValueError(f"drafter {self.name}: session gave that of an earlier call; it makes a new one each time")
        for method in ("propose", "observe"):
            if not callable(getattr(self.inner, method, None)):
                raise ValueError(f"drafter {self.name}: its session, {type(self.inner).__name__}, lacks {method}")
        return self

    def propose(self, context: Context) -> DraftTree:
        where = f"drafter {self.name}: propose"
        try:
            tree = checked(self.inner.propose(context), context)
        except ValueError as error:
            raise ValueError(f"drafter {self.name}: {error}") from error
        shape = tree.tokens.shape
        if not bool((tree.tokens[:, 0] == context.roots).all()):
            raise ValueError(f"{where}: node 0 is not context.roots, the last emitted tokens")
        if not bool(((tree.tokens >= 0) & (tree.tokens < context.target.vocab_size)).all()):
            raise ValueError(f"{where} returned token ids outside of 0 to {context.target.vocab_size - 1}")
        before = torch.arange(shape[1], device=tree.parents.device)
        if tree.parents.shape[1] != shape[1] or not bool(((tree.parents >= -1) & (tree.parents < before)).all()):
            raise ValueError(f"{where}: a node's parent has to stand before it (-1 for the root and spare nodes)")
        if tree.scores is not None and not (tree.scores.is_floating_point() and bool(tree.scores.isfinite().all())):
            raise ValueError(f"{where} returned scores that are not finite numbers; they are path probabilities [B, N]")
        if tree.scores is None and tree.prunable and shape[1] > 1:
            raise ValueError(
                f"{where} returned a tree without scores, by which trees are cut and mixed; give it the nodes' path "
                "probabilities [B, N], or prunable=False"
            )
        return tree

    def observe(self, accepted: Accepted) -> None:
        self.inner.observe(accepted)


CODE_ERRORS = TypeError, AttributeError, AssertionError, RuntimeError, IndexError, KeyError  # of code of other packages


def failed(drafter: Drafter, method: str, error: Exception) -> ValueError:
    """What a method of a drafter of another package raised, with the last of its own lines."""
    frames, source_file = traceback.extract_tb(error.__traceback__), ""
    with suppress(TypeError, OSError):  # of a class without a file
        source_file = inspect.getsourcefile(type(drafter)) or ""
    at = ([frame for frame in frames if frame.filename == source_file] or frames)[-1]
    name = type(drafter).__qualname__
    return ValueError(f"drafter {name}: {method} fails: {error!r:.300}, in {at.filename}, line {at.lineno}")


@torch.no_grad()
def try_out(drafter: Drafter, target: Target) -> None:
    """Draft a few tokens behind two short prompts. Raises ValueError naming what of the contract a proposal breaks,
    before long work starts."""
    was, name = drafter.training, type(drafter).__qualname__
    drafter.eval()
    prompts, seen = [[0, 1, 0, 1, 0, 1], [1, 0, 1, 1]], _Seen(drafter)
    exact = target.dtype.itemsize >= 4  # elsewhere near-ties can fall either way
    try:
        for temperature in (0.0, 1.0):
            options = Options(5, Sampling(temperature), 1)
            ids = speculative(target, prompts, options, seen, 8).token_ids
            if exact and ids != autoregressive(target, prompts, options).token_ids:
                raise ValueError(f"drafter {name} changes the output: its tree's start or hidden are not for it to set")
    except CODE_ERRORS as error:
        raise failed(drafter, "propose or observe", error) from error
    finally:
        drafter.train(was)
