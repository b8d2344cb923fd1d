"""Which classes draft: the files of selfspec/drafters/, installed entry points, and classes of other packages by path;
and whether a drafter that was built has what the contract asks."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import typing
from dataclasses import is_dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import torch

import selfspec.drafters
from selfspec.core.contract import Accepted, Context, Session
from selfspec.core.generate import speculative
from selfspec.core.options import Options
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree
from selfspec.drafters.base import Drafter, DrafterConfig, Trained

GROUP = "selfspec.drafters"  # of entry points, each `name = "package.module:Class"`
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_MODES = ("greedy", "sampled")


class Untrusted(ValueError):
    """A drafter is code of another package, and nobody said that it may run."""


def kinds() -> list[str]:
    """The kinds of this package that can be trained or used by themselves."""
    names = (module.name for module in pkgutil.iter_modules(selfspec.drafters.__path__) if not module.ispkg)
    return [name for name in names if name not in ("base", "hybrid")]


def installed() -> dict[str, EntryPoint]:
    """Drafters that installed packages offer, by the names they give them."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def drafter_class(kind: str, trust: bool = False, away: Path | None = None) -> type[Drafter]:
    """The class of a kind: `early_exit` -> the drafter class of selfspec/drafters/early_exit.py; the name of an
    installed entry point; or a class's path, `package.module.Class`, where `trust` says that its code may run or its
    package is installed with an entry point. away: a folder that code is never taken from.

    Raises ValueError for a kind that does not exist or is no drafter, Untrusted for one that may not run.
    """
    name = f"selfspec.drafters.{kind}"
    if re.fullmatch(r"[a-z][a-z0-9_]*", kind) and kind != "base":
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
        else:
            own = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == name]
            if found := [c for c in own if issubclass(c, Drafter)]:
                return found[0]
    offered = installed()
    path = offered[kind].value.replace(":", ".") if kind in offered else kind
    package = path.partition(".")[0]
    spec = importlib.util.find_spec(package) if _PATH.fullmatch(path) else None
    if spec is None:
        raise ValueError(
            f"unknown drafter kind {kind!r}"
            + (f": there is no package {package!r}; install it, or put its folder on PYTHONPATH" if "." in path else "")
        )
    if not trust and package not in {entry.value.partition(".")[0].partition(":")[0] for entry in offered.values()}:
        raise Untrusted(
            f"drafter {kind!r} is code of the package {package!r}; if you trust it, load it with trust_code=True "
            f"(trust_code=true, --trust-code), or install it with an entry point of the group {GROUP}"
        )
    homes = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else ())]
    if away is not None and any(Path(home).resolve().is_relative_to(away.resolve()) for home in homes):
        raise ValueError(f"drafter {kind!r}: code is never taken from the checkpoint's own folder {away}; install it")
    return _imported(path)


def _imported(path: str) -> type[Drafter]:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ValueError(f"drafter {path!r}: {module} can not be imported ({error})") from error
    if not isinstance(found, type) or not issubclass(found, Drafter):
        raise ValueError(
            f"drafter {path!r}: {module} has no class {name} derived from selfspec.drafters.base.Drafter"
            + ("" if found is None else f", but {found!r:.60}")
        )
    return found


def config_class(kind: type[Drafter]) -> type[DrafterConfig]:
    """The config that a drafter class is built from. Raises ValueError where its annotation of `config` is none."""
    try:
        found = typing.get_type_hints(kind)["config"]
    except NameError as error:
        raise ValueError(f"{kind.__qualname__}: an annotation can not be resolved ({error})") from error
    if not (isinstance(found, type) and issubclass(found, DrafterConfig) and is_dataclass(found)):
        raise ValueError(f"{kind.__qualname__}.config must be annotated with a dataclass derived from DrafterConfig")
    return found


def build(kind: type[Drafter], target: Target, config: DrafterConfig) -> Drafter:
    """A drafter on a target. Raises ValueError naming what of the contract it lacks."""
    name = kind.__qualname__
    if lacking := sorted(kind.__abstractmethods__):
        raise ValueError(f"drafter {name} lacks {' and '.join(lacking)}; selfspec.drafters.base says what they return")
    drafter = kind(target, config)  # type: ignore[arg-type]
    base = "super().__init__(config, depth=...)" if isinstance(drafter, Trained) else "super().__init__(config, {})"
    for attribute in ("config", "calibration", *(("depth",) if isinstance(drafter, Trained) else ())):
        if not hasattr(drafter, attribute):
            raise ValueError(f"drafter {name} has no {attribute}; its __init__ has to call {base}")
    if not isinstance(drafter.config, config_class(kind)):
        raise ValueError(f"drafter {name}: self.config is a {type(drafter.config).__name__}; call {base}")
    if isinstance(drafter, Trained) and not (isinstance(drafter.depth, int) and drafter.depth >= 1):
        raise ValueError(f"drafter {name}: depth={drafter.depth!r} must be at least 1")
    if not isinstance(drafter.reads, tuple) or any(layer not in range(target.n_layers) for layer in drafter.reads):
        raise ValueError(
            f"drafter {name}: reads={drafter.reads!r} must be a tuple of layers, 0 to {target.n_layers - 1}"
        )
    return drafter


class _Seen:
    """A drafter whose proposals are checked as they come."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.reads, self.name = drafter, drafter.reads, type(drafter).__qualname__

    def session(self, target: Target, rows: int) -> Session:
        self.inner = self.drafter.session(target, rows)
        for method in ("propose", "observe"):
            if not callable(getattr(self.inner, method, None)):
                raise ValueError(f"drafter {self.name}: its session, {type(self.inner).__name__}, lacks {method}")
        return self

    def propose(self, context: Context) -> DraftTree:
        tree = self.inner.propose(context)
        where = f"drafter {self.name}: propose"
        if not isinstance(tree, DraftTree):
            raise ValueError(f"{where} returned a {type(tree).__name__}; it has to return a DraftTree")
        shape, rows = list(tree.tokens.shape), len(context.roots)
        if len(shape) != 2 or shape[0] != rows or not 1 <= shape[1] <= context.nodes:
            raise ValueError(f"{where} returned tokens {shape}; expected [{rows}, 1 to {context.nodes}]")
        if not bool((tree.tokens[:, 0] == context.roots).all()):
            raise ValueError(f"{where}: node 0 is not context.roots, the last emitted tokens")
        if tree.scores is None and tree.prunable and shape[1] > 1:
            raise ValueError(
                f"{where} returned a tree without scores, by which trees are cut and mixed; give it the nodes' path "
                "probabilities [B, N], or prunable=False"
            )
        return tree

    def observe(self, accepted: Accepted) -> None:
        self.inner.observe(accepted)


@torch.no_grad()
def try_out(drafter: Drafter, target: Target) -> None:
    """Draft a few tokens behind a short prompt. Raises ValueError naming what of the contract a proposal breaks, before
    long work starts."""
    was = drafter.training
    drafter.eval()
    speculative(target, [[0, 1, 0, 1, 0, 1]], Options(4), _Seen(drafter), 8)
    drafter.train(was)
