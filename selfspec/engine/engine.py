"""Functions on tensors, run as they are or compiled once for each shape."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.engine import disk
from selfspec.engine.capture import Captured, devices_of, mapped, modules_in
from selfspec.engine.kernels.fastest import measured
from selfspec.engine.kernels.redirect import run_uncompiled
from selfspec.engine.kernels.weights import freeze, laid_out_bytes
from selfspec.engine.keys import bucket, file_name, follows_its_caller, holds, key
from selfspec.engine.layers import compiled_once

_SLOW = 5.0  # Seconds; compiling that takes longer is reported.
_AGAIN = 4  # times that compiling begins again


@dataclass(eq=False)
class Engine:
    """Runs functions as they are (backend None), or compiled by torch.compile with full graphs and static shapes.

    Every combination of a function, the modules it is given and the layouts of its tensors has a compiled function of
    its own, so torch never compiles one again and a call checks no guards (see `selfspec.engine.keys`). On CUDA devices
    it is then captured as a graph (`selfspec.engine.capture`). Weights are inputs of the compiled code, not constants:
    what is trained later is seen. Arguments are tensors, modules, functions, numbers, None, and lists, tuples and dicts
    of them. Tensors that the function writes to stand in lists.

    backend: torch.compile's; folder: where compiled code is kept for the next process (None: nowhere); compiled:
    functions by `keys.key`; made: (what, seconds, "compiled", "read" or "not compiled") in the order of time; failed:
    the reason for each function that runs as it is instead; varying: for each function whose rows may depend on how
    many there are, the operations by which they do; busy: seconds spent in functions, by name; later: seconds that a
    function runs as it is before a thread compiles it (0: its first call does); waited: calls that ran before
    their code was compiled, or on a GPU before their graph was captured.
    """

    backend: str | None = None
    folder: Path | None = None
    quiet: bool = False
    compiled: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)
    made: list[tuple[str, float, str]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    varying: dict[str, str] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    later: float = 0.0
    waited: int = 0
    _alone: dict[str, float] = field(default_factory=dict)  # seconds of calls that waited, by name
    _absent: set[Hashable] = field(default_factory=set)  # keys of what is not on disk
    _worker: threading.Thread | None = None
    _starting: Any = field(default_factory=threading.Lock)
    _lock: Any = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        _engines[id(self)] = self

    @property
    def eager(self) -> bool:
        """Whether functions run as they are: shapes may then follow the data."""
        return self.backend is None

    @property
    def name(self) -> str:
        """eager or compiled."""
        return "eager" if self.backend is None else "compiled"

    def row_invariant(self, function: str) -> bool:
        """Whether all that ran of this function gives a row the same bits whatever rows are beside it, and however
        many. What ran as it is before it was compiled has other bits than what is compiled (see `waits`)."""
        known = (self.eager and function in self.busy) or any(what.startswith(function) for what, _, _ in self.made)
        return known and not any(what.startswith(function) for what in list(self.varying))

    def waits(self, function: str) -> float:
        """Seconds of this function's calls that ran before it was compiled."""
        return self._alone.get(function, 0.0)

    @property
    def kernels(self) -> dict[str, Any]:
        """products: what was measured of each and chosen (see `fastest.measure`); bytes: of weights laid out for it."""
        return {"products": measured(), "bytes": laid_out_bytes()}

    def size(self, count: int, most: int | None = None) -> int:
        """The size of a dimension that holds `count` entries, and in other calls up to `most`: `count` itself in eager
        passes; else a power of two, the same for all calls."""
        return count if self.backend is None else bucket(count if most is None else most)

    def padded(self, rows: Tensor) -> Tensor:
        """rows [B, ...], contiguous, with copies of the first row behind them up to `size(B)`."""
        if idle := self.size(len(rows)) - len(rows):
            rows = torch.cat([rows, rows[:1].expand(idle, *rows.shape[1:])])
        return rows.contiguous()

    def run(self, function: Callable[..., Any], *args: Any, compiled: bool = True) -> Any:
        """function(*args), compiled on first use; as it is, with a line that says so, where it can not be compiled, or
        where it should not be, since its shapes seldom come again."""
        start = time.perf_counter()
        if self.backend is None or not compiled:
            result, varying = run_uncompiled(function, args)
            if varying and self.backend is None:
                self.varying[function.__name__] = varying
        else:
            wanted = key(function, args)
            code = self.compiled.get(wanted)
            if code is None and self.later and (self._compiles() or not self._on_disk(wanted, function, args)):
                return self._meanwhile(wanted, function, args)
            if code is None:
                with self._lock:  # another thread may have made it meanwhile
                    code = self.compiled.get(wanted) or self._make(wanted, function, args)
                start = time.perf_counter()
            result = code(*args)
        self.busy[function.__name__] = self.busy.get(function.__name__, 0.0) + time.perf_counter() - start
        return result

    def _compiles(self) -> bool:  # in a thread, which holds the lock for a minute or more
        return self._worker is not None and self._worker.is_alive()

    def _on_disk(self, wanted: Hashable, function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Whether an earlier process compiled it."""
        if wanted not in self._absent and not ((path := self._path(function, args)) is not None and path.is_file()):
            self._absent.add(wanted)
        return wanted not in self._absent

    def _meanwhile(self, wanted: Hashable, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """function(*args) as it is. Once such calls have taken `later` seconds, a thread compiles the function."""
        start, name = time.perf_counter(), function.__name__
        if self._alone.get(name, 0.0) >= self.later:
            with self._starting:
                if not self._compiles():
                    given = mapped(args, lambda part: part, lists=True)  # whose lists the caller may fill anew
                    modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
                    self._worker = threading.Thread(target=self._beside, args=(modes, wanted, function, given))
                    self._worker.start()
        result, varying = run_uncompiled(function, args)
        if varying:
            self.varying[name] = varying
        self.waited += 1
        self._alone[name] = self._alone.get(name, 0.0) + time.perf_counter() - start
        return result

    def _beside(
        self, modes: tuple[bool, bool], wanted: Hashable, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        """In a thread: compile it under the caller's modes."""
        with torch.inference_mode(modes[0]), torch.set_grad_enabled(modes[1]), self._lock:
            try:
                self._make(wanted, function, args)
            except Exception as error:  # nobody is there to catch it, and the function itself is still right
                self._refused("not compiled, runs as it is", function.__name__, error)
                self.compiled[wanted] = function

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, functions are compiled by their first call, so that what is timed is compiled."""
        before, self.later = self.later, 0.0
        try:
            yield
        finally:
            self.later = before

    def _make(self, wanted: Hashable, function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
        shapes = " ".join(str(list(a.shape)) for a in args if isinstance(a, Tensor))
        start, what = time.perf_counter(), f"{function.__name__} {shapes}"
        if own := follows_its_caller(modules_in(args)):
            why = f"{own} has a hook or a forward of its own, which compiled code would not follow"
            self._refused("not compiled, runs as it is", what, ValueError(why))
            self.varying[what], self.compiled[wanted] = "not compiled", function
            return function
        for module in modules_in(args):
            freeze(module)
        path, how = self._path(function, args), "read"
        code: Any = disk.read(path)
        if code is not None and (varying := disk.varying(path)):
            self.varying[what] = varying
        if code is None:
            if not self.quiet and all(done != "compiled" for _, _, done in self.made):
                place = "" if self.folder is None else f", kept in {self.folder} for the next start"
                who = "a thread compiles passes, which run uncompiled until then" if self.later else "compiling"
                print(f"{who}: seconds to minutes for each new shape{place}", file=sys.stderr)
            code, how = self._compile(function, args, what), "compiled"
            if code is None:
                code, how, self.varying[what] = function, "not compiled", "not compiled"
            elif not disk.write(path, code, self.varying.get(what, "")):
                self.folder = None
        self.made.append((what, took := time.perf_counter() - start, how))
        if how == "compiled" and took > _SLOW and not self.quiet:
            count = sum(done == how for _, _, done in self.made)
            print(f"compiled {function.__name__} in {took:.0f} s, function {count} of this run", file=sys.stderr)
        gpus = [device for device in devices_of(args) if device.type == "cuda"]
        if code is not function and len(gpus) == 1:
            note = partial(self._refused, "not captured as a graph, launched kernel by kernel", what)
            code = Captured(code, gpus[0], note, self._waited)
        self.compiled[wanted] = code
        return code

    def _compile(self, function: Callable[..., Any], args: tuple[Any, ...], what: str) -> Any:
        """The compiled function; None where torch can not compile it."""
        code, options = None, dict[str, Any]()
        for modules in ([*modules_in(args)], []):  # layers that change what they hold can not be nested
            with compiled_once(modules) as nested:
                try:
                    if self.backend == "inductor":
                        from selfspec.engine.kernels import graph_pass  # slow to import

                        options = graph_pass.options()
                    code = self._code(function, args, options)
                    break
                except Exception as error:  # torch raises many kinds, and the function itself is still right
                    if not nested:
                        self._refused("not compiled, runs as it is", what, error)
                        return None
        rewritten = options.get("post_grad_custom_pre_pass")
        if varying := ["of the library"] if rewritten is None else rewritten.varying:
            self.varying[what] = ", ".join(sorted(set(varying)))
        return code

    def _code(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        import torch._dynamo.config as dynamo  # slow to import
        from torch._dynamo.exc import RestartAnalysis

        dynamo.enable_aot_compile = True  # not so by default before torch 2.12
        compiling: Any = torch.compile(
            function,
            backend=self.backend,  # type: ignore[arg-type]
            fullgraph=True,
            dynamic=False,
            options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe, **options},
        )
        code, failures = None, 0
        while code is None:
            try:
                code = compiling.aot_compile((args, {}))
            except Exception as error:
                # torch.compile itself begins again after RestartAnalysis; aot_compile leaves that to its caller
                failures += 1
                if failures > _AGAIN or not (isinstance(error, RestartAnalysis) or disk.mended(error)):
                    raise
        code.disable_guard_check()
        return code

    def _refused(self, instead: str, what: str, error: Exception) -> None:
        if "interpreter shutdown" in str(error):  # a thread that still compiled when the process ended
            return
        self.failed[what] = f"{type(error).__name__}: {(str(error).strip() or repr(error)).splitlines()[0]}"
        print(f"{instead}: {what}: {self.failed[what]}", file=sys.stderr)

    def _waited(self) -> None:
        self.waited += 1

    def _path(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Path | None:
        """Where the compiled function lies on disk; None where nothing is kept, or it has no name."""
        if self.folder is None:
            return None
        try:
            return self.folder / f"{file_name(function, args, str(self.backend))}.bin"
        except (TypeError, ImportError) as error:  # ImportError: of a torch whose inductor has other names
            print(f"compiled code is not kept: {error}", file=sys.stderr)
            return None

    def forget(self, modules: Iterable[nn.Module]) -> None:
        """Drop what was compiled for modules that are no longer used. Without the lock, which may be held for as long
        as a thread compiles."""
        gone = {id(module) for module in modules}
        for known in [known for known in [*self.compiled] if holds(known, gone)]:
            self.compiled.pop(known, None)
        for known in [known for known in [*self._absent] if holds(known, gone)]:
            self._absent.discard(known)


_engines: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()


def replaced_weights(module: nn.Module) -> None:
    """A module has other tensors than before: graphs that were captured over them are not replayed."""
    for engine in list(_engines.values()):
        for known, code in list(engine.compiled.items()):
            if isinstance(code, Captured) and holds(known, {id(module)}):
                code.weights = None


def _forked() -> None:
    """In a child process: the thread that compiled is not there, and holds no lock."""
    for engine in _engines.values():
        engine._worker, engine._starting, engine._lock = None, threading.Lock(), threading.RLock()


getattr(os, "register_at_fork", lambda **_: None)(after_in_child=_forked)  # there is none on Windows
