"""What decides that compiled code fits a call: in this process by `key`, on disk by `file_name`."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Hashable, Iterable
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.utils.files import code_hash
from selfspec.utils.machine import processor

ROUNDS = torch.__version__ >= "2.13"  # from there on inductor keeps every rounding of a model
_PLAIN = (bool, int, float, str, torch.dtype)
# Attributes of modules that are no part of a graph: torch's own, and those that hold addresses in this process
_OF_MODULES = vars(nn.Module()).keys() - {"training"} | {"_made_of", "_copies"}
_SMALL = 4096  # numbers of a tensor that is no buffer, by which it is known


def key(function: Callable[..., Any], args: tuple[Any, ...]) -> Hashable:
    """All that compiled code depends on within one process: the function, torch's modes, and of the arguments the
    layouts of tensors and the identity of modules. Whoever changes a module's structure drops its code
    (`Engine.forget`)."""
    return (function, modes(), *map(layout, args))


def file_name(function: Callable[..., Any], args: tuple[Any, ...], backend: str) -> str:
    """The same across processes: sources, versions, the machine, modes, structures of modules, layouts of tensors.
    Raises TypeError for an argument that has no description."""
    parts = [_described(function), backend, _machine(), str(modes()), *map(_described, args)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def modes() -> tuple[Hashable, ...]:
    """Settings of torch that change what is compiled."""
    grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    products = *float32_products(), torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    return (*grad, *autocast, *products, torch.get_num_threads(), torch.get_default_dtype())


def float32_products() -> tuple[str, ...]:
    """How torch multiplies float32 on a GPU and on a CPU, by its older switch or its newer one."""
    try:
        return (torch.get_float32_matmul_precision(),)
    except RuntimeError:  # of the older switch, once the newer one was used
        return tuple(backend.matmul.fp32_precision for backend in (torch.backends.cuda, torch.backends.mkldnn))


def layout(argument: Any) -> Hashable:
    """Shape, strides, dtype and device of a tensor, or the layout that a list brings along; anything else stands for
    itself."""
    if isinstance(argument, Tensor):
        shape = argument.shape  # the stride of a dimension of size 1 has no effect
        if argument.is_contiguous():
            return shape, None, argument.dtype, argument.device
        strides = tuple(s if n > 1 else 0 for n, s in zip(shape, argument.stride(), strict=True))
        return shape, strides, argument.dtype, argument.device
    if isinstance(argument, (list, tuple)):
        return getattr(argument, "layout", None) or tuple(map(layout, argument))
    if isinstance(argument, dict):
        return tuple((name, layout(part)) for name, part in argument.items())
    return argument


@cache
def _machine() -> str:
    from torch._inductor import config as inductor  # slow to import

    import selfspec.engine.kernels.lowering  # noqa: F401 - code read from disk finds its kernels there
    from selfspec.engine.kernels.int8 import has_kernel
    from selfspec.engine.kernels.native import has_tiles, trust_known_vectors

    sources = code_hash("core", "engine", "drafters")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "peft")]
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    machine = [processor(), torch.backends.cpu.get_cpu_capability(), has_tiles(), has_kernel(), *devices]
    trust_known_vectors()  # it changes a setting
    settings = inductor.get_config_copy()
    return f"{sources} {versions} {torch.__version__} {sys.version} {machine} {sorted(settings.items(), key=str)}"


def _described(argument: Any) -> str:
    if isinstance(argument, nn.Module):
        return structure(argument)
    if isinstance(argument, (list, tuple)):
        return f"({', '.join(map(_described, argument))})"
    if isinstance(argument, dict):
        return f"({', '.join(f'{name}: {_described(part)}' for name, part in argument.items())})"
    if isinstance(argument, (Tensor, torch.dtype, str, int, float, type(None))):
        return str(layout(argument))
    if hasattr(argument, "__qualname__"):
        return f"{argument.__module__}.{argument.__qualname__} {_source(argument.__module__)}"
    if isinstance(argument, partial):
        return f"{_described(argument.func)} {_described(argument.args)}"
    raise TypeError(f"a compiled function is given {argument!r}, by which its code can not be found again on disk")


@cache
def _source(module: str) -> str:
    """The hash of a module's source, where it has a file."""
    path = getattr(sys.modules.get(module), "__file__", None)
    return "" if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def structure(module: nn.Module) -> str:
    """What the graph of a module depends on beside its inputs: classes, their sources and what they run, configs,
    layouts of tensors, hooks, and what its parts hold."""
    lines, configs = [], dict[int, Any]()
    for name, part in module.named_modules():
        held = {k: _value(v) for k, v in sorted(vars(part).items()) if k not in _OF_MODULES}
        tensors = {k: layout(t) for k, t in (*part._parameters.items(), *part._buffers.items()) if t is not None}
        hooks = [_described(h) for h in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())]
        lines.append(f"{name} {_described(type(part))} {_bytecode(type(part).forward)} {held} {tensors} {hooks}")
        if (config := getattr(part, "config", None)) is not None:
            configs[id(config)] = config
    for config in configs.values():
        kernels = [getattr(config, name, None) for name in ("_attn_implementation", "_experts_implementation")]
        values = config.to_dict() if hasattr(config, "to_dict") else {"": repr(config)}
        values.pop("_name_or_path", None)  # where it was loaded from
        lines.append(f"{sorted(values.items(), key=str)} {kernels}")
    return "\n".join(lines)


def _value(value: Any) -> str:
    """An attribute of a module; of objects of other kinds their class."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_value(part)}' for name, part in value.items())}}}"
    if isinstance(value, Tensor):
        small = value.numel() <= _SMALL and not value.is_meta
        return f"{layout(value)} {value.tolist() if small else ''}"
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__} {_bytecode(value)}"
    return repr(value) if value is None or isinstance(value, _PLAIN) else type(value).__qualname__


@cache
def _bytecode(function: Any) -> str:
    """What a function runs: a class may have another one than its source says."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else hashlib.sha256(_constants(code).encode()).hexdigest()[:16]


def _constants(part: Any) -> str:
    if isinstance(part, CodeType):
        return f"{part.co_code!r} {part.co_names} {_constants(part.co_consts)}"
    if isinstance(part, (tuple, frozenset)):
        parts = map(_constants, part)
        return str(sorted(parts) if isinstance(part, frozenset) else [*parts])
    return repr(part)


def follows_its_caller(modules: Iterable[nn.Module]) -> str:
    """The class of a module with a hook or a forward of its user's own, which may do another thing in every call; empty
    where there is none."""
    parts = (part for module in modules for part in module.modules())
    return next((type(part).__name__ for part in parts if has_own_code(part)), "")


def has_own_code(part: nn.Module) -> bool:
    """Whether a module itself has a hook or a forward of its user's own."""
    given = [*part._forward_hooks.values(), *part._forward_pre_hooks.values(), vars(part).get("forward", layout)]
    functions = (one.func if isinstance(one, partial) else one for one in given)
    return not all(str(getattr(one, "__module__", "")).startswith("selfspec.") for one in functions)


def bucket(count: int, smallest: int = 1) -> int:
    """The least power of two, times `smallest`, that is at least `count`."""
    size = smallest
    while size < count:
        size *= 2
    return size


def holds(known: Any, gone: set[int]) -> bool:
    """Whether a key of compiled code is one of these objects, or has one inside."""
    return id(known) in gone or (isinstance(known, tuple) and any(holds(part, gone) for part in known))
