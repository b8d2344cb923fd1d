"""The package's schemas without torch, whose import takes seconds: definitions read from source, each when it is asked
for."""

from __future__ import annotations

import ast
import importlib
import sys
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
_LIGHT = (*sys.stdlib_module_names, "omegaconf", "hydra", "yaml")


class NeedsImport(Exception):
    """A definition takes a package that is slow to import, so only the module itself has it."""


class _Names(dict[str, Any]):
    """The names of a module of this package. Those that other modules of it define are taken from there."""

    def __init__(self, module: str) -> None:
        super().__init__(__name__="selfspec")  # a module that is there, as dataclasses ask
        path = PACKAGE.parent.joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        self["__file__"] = str(path)
        self.nodes = {name: node for node in ast.parse(path.read_text()).body for name in _defined(node)}

    def __missing__(self, name: str) -> Any:
        node = self.nodes[name]  # a KeyError leads on to the builtins
        if isinstance(node, ast.Import):
            alias = next(a for a in node.names if (a.asname or a.name.partition(".")[0]) == name)
            self[name] = _imported(alias.name if alias.asname else name)
        elif isinstance(node, ast.ImportFrom):
            alias = next(a for a in node.names if (a.asname or a.name) == name)
            place = node.module or ""
            if place.partition(".")[0] != PACKAGE.name:
                found = _imported(place)
                self[name] = found if isinstance(found, _Absent) else getattr(found, alias.name)
            elif names_of(place) is not self and alias.name in names_of(place).nodes:
                self[name] = names_of(place)[alias.name]
            else:  # a module of the package
                self[name] = _Module(names_of(f"{place}.{alias.name}"))
        else:
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                node = ast.copy_location(ast.Assign([node.target], node.value), node)
            for used in (_used(node) & self.nodes.keys()) - {name}:
                self[used]
            exec(compile(ast.Module([node], []), self["__file__"], "exec", dont_inherit=True), self)
        return self[name]


class _Module:
    """Names as attributes."""

    def __init__(self, names: _Names) -> None:
        self._names = names

    def __getattr__(self, name: str) -> Any:
        return self._names[name]


def _defined(node: ast.stmt) -> list[str]:
    """The names that a statement of a module defines."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        whole = isinstance(node, ast.ImportFrom)
        return [a.asname or (a.name if whole else a.name.partition(".")[0]) for a in node.names]
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]


def _used(node: ast.AST) -> set[str]:
    """The names that a definition takes when it is executed. Functions lose their annotations, and take what is in
    them when they are called."""
    if isinstance(node, ast.FunctionDef):
        node.returns = None
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
        parts = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
        return set[str]().union(*map(_used, parts))
    inner = set[str]().union(*map(_used, ast.iter_child_nodes(node)))
    return inner | ({node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else set())


def _imported(module: str) -> Any:
    return importlib.import_module(module) if module.partition(".")[0] in _LIGHT else _Absent()


class _Absent:
    """What stands for a package that is slow to import, and for names of it: it may stand in annotations alone."""

    def __or__(self, other: object) -> Any:
        return Any

    __ror__ = __getitem__ = __or__

    def __getattr__(self, name: str) -> Any:
        raise NeedsImport(name)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise NeedsImport


@cache
def names_of(module: str) -> _Names:
    """The names of a module of this package by its dotted path. Raises NeedsImport for one that can not be had so."""
    return _Names(module)
