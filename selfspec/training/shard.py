"""A frozen target divided over processes: each keeps its part of every matrix and gathers a whole one where it is used.

The parts are DTensors, cut along their first dimension as FSDP2 cuts them. FSDP2 gathers in hooks of the modules it was
given; a drafter's structural views are modules of their own, with the target's tensors. So here the attribute gathers
(SimpleFSDP, arXiv 2411.00284), whoever reads it. Each read is a collective: all processes must read the same parameters
in the same order, or they wait forever.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather_object, reduce
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from selfspec.utils.files import is_main_process


def wanted() -> bool:
    """Whether `accelerate launch` was given a configuration of FSDP, and more than one process."""
    sharded = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return sharded and int(os.environ.get("WORLD_SIZE", "1")) > 1


def group(device: str) -> PartialState:
    """The processes of this run; the first call opens their group."""
    # One process tokenizes, or writes texts, while the others wait; a process that ended is noticed by the launcher.
    return PartialState(cpu=torch.device(device).type == "cpu", timeout=timedelta(days=1))


def share() -> tuple[int, int]:
    """This process's number, and how many there are, among those that divide work which is no batch. Processes among
    which a target is FSDP-sharded have to run the same passes, so each does all of it."""
    state = PartialState()
    return (0, 1) if wanted() else (state.process_index, state.num_processes)


def wait() -> None:
    """Until all processes are here."""
    PartialState().wait_for_everyone()


def total(counts: Tensor) -> Tensor:
    """The sum of a tensor over the processes that divide such work (see `share`)."""
    return counts if share()[1] == 1 else reduce(counts.to(PartialState().device), "sum").cpu()


def say(lines: Iterable[str]) -> None:
    """Print lines, in one process."""
    for line in lines if is_main_process() else ():
        print(line)


def gathered(values: list[Any]) -> list[Any]:
    """The lists of all processes, one behind the other."""
    return list(gather_object(values))


def agree(settings: dict[str, object]) -> None:
    """Raises ValueError, in every process, where they were started with different settings."""
    for name in settings:
        values = gathered([repr(settings[name])])
        if odd := [i for i, value in enumerate(values) if value != values[0]]:
            raise ValueError(
                f"process {odd[0]} was started with another {name} than process 0: {values[odd[0]]} instead of "
                f"{values[0]}; start all with the same command"
            )


def divide(model: nn.Module, device: str) -> None:
    """Keep on this process's device its part of every parameter of two dimensions or more, and all others whole.

    The processes' group must be open. Gradients do not reach the parameters: the model is frozen.
    """
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # keeps the original alive: its id is not reused
    for module in list(model.modules()):
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        for name, p in parameters.items():
            if id(p) not in made:
                made[id(p)] = p, nn.Parameter(_part(p.detach(), mesh, device), requires_grad=False)
            module._parameters[name] = made[id(p)][1]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
        if cut := tuple(name for name, p in parameters.items() if p.ndim > 1):
            module.__class__ = _gathering(type(module), cut)  # type: ignore[arg-type]


def replicated(module: nn.Module) -> DistributedDataParallel:
    """A module whose trained parameters are whole in every process, beside views of a divided target."""
    cut = [name for name, p in module.named_parameters() if isinstance(p, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, cut)
    return DistributedDataParallel(module)


def _part(p: Tensor, mesh: DeviceMesh, device: str) -> Tensor:
    if p.ndim < 2:
        return p.to(device, copy=True)
    cut = distribute_tensor(p, mesh, [Shard(0)], src_data_rank=None)
    local = cut.to_local().clone()  # a copy, so that the whole matrix's storage is freed
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride())


@cache
def _gathering(kind: type, names: tuple[str, ...]) -> type:
    """A module class whose parameters of these names are whole tensors when they are read."""
    members: dict[str, Any] = {name: property(partial(_whole, name=name)) for name in names}
    return type(kind.__name__, (kind,), {**members, "__module__": kind.__module__})


def _whole(module: nn.Module, name: str) -> Tensor:
    p = module._parameters.get(name)
    if p is None:  # torch then looks among buffers
        raise AttributeError(name)
    return p.full_tensor() if isinstance(p, DTensor) else p
