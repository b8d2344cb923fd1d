"""Functions on tensors, run as they are or compiled once for each shape."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.engine.capture import Captured, parts_of
from selfspec.utils.files import cache_folder, code_hash

ENGINES = ("eager", "compiled")
KEPT = 2**30  # bytes of compiled code kept on disk; what was not used for longest goes first


@dataclass(eq=False)
class Engine:
    """Runs functions compiled by torch.compile, with full graphs and static shapes.

    Every combination of a function, the modules it is given and the layouts of its tensors has a compiled function of
    its own, so torch never compiles one again and a call checks no guards. On CUDA devices it is then captured as a
    graph (`selfspec.engine.capture`). Weights are inputs of the compiled code, not constants: what is trained later is
    seen. Arguments are tensors, modules, functions, numbers, None, and lists, tuples and dicts of them. Tensors that
    the function writes to stand in lists.

    backend: torch.compile's, or None to run the functions as they are; folder: where compiled code is kept for the next
    process (None: nowhere); compiled: functions by what they were made for; made: (what, seconds, "compiled", "read" or
    "not compiled") in the order of time; failed: the reason for each function that runs as it is instead; busy: seconds
    spent in functions, by name.
    """

    backend: str | None = "inductor"
    folder: Path | None = None
    quiet: bool = False
    compiled: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)
    made: list[tuple[str, float, str]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.RLock)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(*args), compiled on first use; as it is, with a line that says so, where it can not be compiled."""
        if self.backend is None:
            return function(*args)
        key = (function, _ambient(), *map(signature, args))
        made = self.compiled.get(key)
        if made is None:
            with self._lock:  # another thread may have made it meanwhile
                made = self.compiled.get(key) or self._make(key, function, args)
        start, name = time.perf_counter(), function.__name__
        result = made(*args)
        self.busy[name] = self.busy.get(name, 0.0) + time.perf_counter() - start
        return result

    def _make(self, key: Hashable, function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
        start, what = time.perf_counter(), f"{function.__name__} {_told(args)}"
        path = self._path(function, args)
        made: Any
        made, how = _read(path), "read"
        if made is None:
            from torch._dynamo.exc import RestartAnalysis  # slow to import

            how = "compiled"
            try:
                compiling: Any = torch.compile(
                    function,
                    backend=self.backend,  # type: ignore[arg-type]
                    fullgraph=True,
                    dynamic=False,
                    options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe, **_options(str(self.backend))},
                )
                try:
                    made = compiling.aot_compile((args, {}))
                except RestartAnalysis:  # torch.compile itself begins again then; aot_compile leaves it to its caller
                    made = compiling.aot_compile((args, {}))
                made.disable_guard_check()
            except Exception as error:  # torch raises many kinds, and the function itself is still right
                made, how = function, "not compiled"
                self.failed[what] = f"{type(error).__name__}: {(str(error).strip() or repr(error)).splitlines()[0]}"
                print(f"not compiled, runs as it is: {what}: {self.failed[what]}", file=sys.stderr)
            else:
                self._write(path, made)
        took = time.perf_counter() - start
        self.made.append((what, took, how))
        if not self.quiet and made is not function:
            print(f"{how} in {took:.1f} s: {what}", file=sys.stderr)
        if made is not function and len({part.device for part, _ in parts_of(args) if part.is_cuda}) == 1:
            made = Captured(made, partial(self._uncaptured, what))
        self.compiled[key] = made
        return made  # type: ignore[no-any-return]

    def _uncaptured(self, what: str, error: Exception) -> None:
        """A function can not be captured as a graph."""
        self.failed[what] = f"{type(error).__name__}: {(str(error).strip() or repr(error)).splitlines()[0]}"
        print(f"not captured as a graph, launched kernel by kernel: {what}: {self.failed[what]}", file=sys.stderr)

    def _path(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Path | None:
        """Where the compiled function lies on disk; None where nothing is kept, or it can not be named."""
        if self.folder is None:
            return None
        try:
            return self.folder / f"{_name(function, args, str(self.backend))}.bin"
        except TypeError as error:
            print(f"compiled code is not kept: {error}", file=sys.stderr)
            return None

    def _write(self, path: Path | None, made: Any) -> None:
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            made.save_compiled_function(str(path))
            _trim(path.parent)
        except OSError as error:
            print(f"compiled code is not kept in {path.parent}: {error}", file=sys.stderr)
            self.folder = None
        except Exception as error:  # of what can not be pickled
            print(f"compiled code is not kept: {error}", file=sys.stderr)

    def forget(self, modules: Iterable[nn.Module]) -> None:
        """Drop what was compiled for modules that are no longer used."""
        gone = {id(module) for module in modules}
        with self._lock:
            self.compiled = {key: made for key, made in self.compiled.items() if not _holds(key, gone)}


def _options(backend: str) -> dict[str, Any]:
    """What the backend is told beside."""
    if backend != "inductor":
        return {}
    from selfspec.engine.kernels.skinny_gemm import options  # slow to import

    return options()


def check_engine(name: str) -> None:
    """Raises ValueError for an unknown engine."""
    if name not in ENGINES:
        raise ValueError(f"engine={name!r} must be one of {', '.join(ENGINES)}")


def engine_for(name: str, device: torch.device) -> Engine | None:
    """The engine of this name; None for eager. Raises ValueError for an unknown one, and where none can compile."""
    check_engine(name)
    if name == "eager":
        return None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"engine=compiled serves CPUs and CUDA devices, not {device}; take engine=eager")
    if not hasattr(torch.compiler, "load_compiled_function"):
        raise ValueError(
            f"engine=compiled needs a newer torch than {torch.__version__}; upgrade it, or take engine=eager"
        )
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise ValueError(
                "engine=compiled needs a C++ compiler, and there is none; install one (the package g++ of Debian and "
                "Ubuntu, gcc-c++ of Fedora, clang of conda-forge; CXX names another), or take engine=eager"
            ) from None
    return Engine(folder=cache_folder() / "compiled")


def bucket(count: int, smallest: int = 1) -> int:
    """The least power of two, times `smallest`, that is at least `count`."""
    size = smallest
    while size < count:
        size *= 2
    return size


def filled(rows: Tensor) -> Tensor:
    """rows [B, ...] with idle ones behind them, up to a number that is compiled for; contiguous."""
    if idle := bucket(len(rows)) - len(rows):
        rows = torch.cat([rows, rows[:1].expand(idle, *rows.shape[1:])])
    return rows.contiguous()


def signature(argument: Any) -> Hashable:
    """The key of an argument: the layout of a tensor, or the one that a list brings along; all else is its own key."""
    if isinstance(argument, Tensor):
        shape = argument.shape  # the stride of a dimension of size 1 has no effect
        if argument.is_contiguous():
            return shape, None, argument.dtype, argument.device
        strides = tuple(s if n > 1 else 0 for n, s in zip(shape, argument.stride(), strict=True))
        return shape, strides, argument.dtype, argument.device
    if isinstance(argument, (list, tuple)):
        return getattr(argument, "layout", None) or tuple(map(signature, argument))
    if isinstance(argument, dict):
        return tuple((name, signature(part)) for name, part in argument.items())
    return argument  # type: ignore[no-any-return]


def _told(args: tuple[Any, ...]) -> str:
    """Shapes of the tensors directly among the arguments, for a line that a user reads."""
    return " ".join(str(list(a.shape)) for a in args if isinstance(a, Tensor))


def _read(path: Path | None) -> Any:
    """What an earlier process compiled; None where there is nothing, or nothing that can be used here."""
    if path is None or not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            made: Any = torch.compiler.load_compiled_function(file)
        made.disable_guard_check()
    except Exception as error:
        print(f"compiled anew, since {path} can not be read: {error}", file=sys.stderr)
        return None
    with suppress(OSError):  # of a file that another user owns
        os.utime(path)
    return made


def _trim(folder: Path) -> None:
    """Delete what was not used for longest, where more than KEPT bytes lie there."""
    found, total = [], 0
    for path in folder.glob("*.bin"):
        with suppress(FileNotFoundError):  # another process trims too
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    for _, size, path in sorted(found, reverse=True):
        total += size
        if total > KEPT:
            path.unlink(missing_ok=True)


def _ambient() -> tuple[Hashable, ...]:
    """What compiled code depends on beside its arguments and the machine."""
    modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    return (*modes, torch.is_autocast_enabled("cuda"), torch.get_num_threads(), torch.get_default_dtype())


def _name(function: Callable[..., Any], args: tuple[Any, ...], backend: str) -> str:
    """A name for compiled code by all that it depends on: sources, versions, the machine, modes of torch, the structure
    of modules and the layouts of tensors."""
    parts = [_shape(function), backend, _here(), str(_ambient()), *map(_shape, args)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


@cache
def _here() -> str:
    from torch._inductor import config as inductor  # slow to import

    from selfspec.engine.kernels.skinny_gemm import served  # read code finds its kernel there

    own = code_hash("core", "engine", "drafters")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "peft")]
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    machine = [torch.backends.cpu.get_cpu_capability(), served(), *devices]
    settings = inductor.get_config_copy()
    return f"{own} {versions} {torch.__version__} {sys.version} {machine} {sorted(settings.items(), key=str)}"


def _shape(argument: Any) -> str:
    if isinstance(argument, nn.Module):
        return structure(argument)
    if isinstance(argument, (list, tuple)):
        return f"({', '.join(map(_shape, argument))})"
    if isinstance(argument, dict):
        return f"({', '.join(f'{name}: {_shape(part)}' for name, part in argument.items())})"
    if isinstance(argument, (Tensor, torch.dtype, str, int, float, type(None))):
        return str(signature(argument))
    if hasattr(argument, "__qualname__"):
        return f"{argument.__module__}.{argument.__qualname__} {_source(argument.__module__)}"
    if isinstance(argument, partial):
        return f"{_shape(argument.func)} {_shape(argument.args)}"
    raise TypeError(f"a compiled function is given {argument!r}, by which its code can not be found again on disk")


@cache
def _source(module: str) -> str:
    """The hash of a module's source, where it has a file."""
    path = getattr(sys.modules.get(module), "__file__", None)
    return "" if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def structure(module: nn.Module) -> str:
    """What the graph of a module depends on beside its inputs: classes and their sources, configs, layouts of tensors,
    hooks, and the numbers and names that its parts hold."""
    told, configs = [], dict[int, Any]()
    for name, part in module.named_modules():
        held = {k: v for k, v in sorted(vars(part).items()) if isinstance(v, _PLAIN) or k in _ADAPTER}
        tensors = {k: signature(t) for k, t in (*part._parameters.items(), *part._buffers.items()) if t is not None}
        hooks = [_shape(h) for h in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())]
        told.append(f"{name} {_shape(type(part))} {held} {tensors} {hooks}")
        if (config := getattr(part, "config", None)) is not None:
            configs[id(config)] = config
    for config in configs.values():
        kernels = [getattr(config, name, None) for name in ("_attn_implementation", "_experts_implementation")]
        said = config.to_dict() if hasattr(config, "to_dict") else {"": repr(config)}
        said.pop("_name_or_path", None)  # where it was loaded from
        told.append(f"{sorted(said.items(), key=str)} {kernels}")
    return "\n".join(told)


def _holds(key: Any, gone: set[int]) -> bool:
    """Whether a key of compiled code is one of these objects, or has one inside."""
    return id(key) in gone or (isinstance(key, tuple) and any(_holds(part, gone) for part in key))


_PLAIN = (bool, int, float, str, torch.dtype)
_ADAPTER = ("scaling", "_disable_adapters", "_active_adapter", "merged_adapters")  # of PEFT's layers
