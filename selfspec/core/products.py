"""Products of few rows with bfloat16 weights, on processors without tiles for them: as sums that inductor compiles.

There the library's product of one row with a matrix is bound by its own instructions, not by the memory that it reads:
all linear maps of a target of 12M parameters take 2.3 ms, and 1.0 ms as sums over the rows of the weights; eight rows
take 3.4 and 2.4 ms (notebooks/LOG.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

MOST = 8  # rows; from 16 on the library is ahead
_aten, _prims = torch.ops.aten, torch.ops.prims


def as_sums() -> bool:
    """Whether products are written as sums on this processor; measured on one with AVX-512 and without AMX alone."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not torch.cpu._is_amx_tile_supported()


def options() -> dict[str, Any]:
    """What inductor is told."""
    if not as_sums():
        return {}
    return {"post_grad_custom_pre_pass": FewRows(), "cpp.enable_floating_point_contract_flag": "fast"}


class FewRows(CustomGraphPass):
    """Rewrites a graph of aten operations: a product of at most MOST rows with a bfloat16 weight becomes one sum in
    float32 for each row, over each row of the weight. Inductor runs them in one sweep over the weight."""

    def __call__(self, graph: fx.Graph) -> None:
        for target in (_aten.mm.default, _aten.addmm.default):
            for node in graph.find_nodes(op="call_function", target=target):
                *bias, left, right = node.args
                if not node.kwargs and _fits(left.meta["val"], right.meta["val"]):
                    _rewrite(graph, node, left, right, *bias)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


def _fits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """left: [M, K]; right: [K, N], which must be a weight [N, K] seen as columns."""
    few = left.shape[0] <= MOST and left.dtype == right.dtype == torch.bfloat16 and left.device.type == "cpu"
    return few and right.stride() == (1, right.shape[0])


def _rewrite(graph: fx.Graph, node: fx.Node, left: fx.Node, right: fx.Node, bias: fx.Node | None = None) -> None:
    rows, width = left.meta["val"].shape

    def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(target, args, kwargs)
        with left.meta["val"].fake_mode:
            made.meta["val"] = target(*fx.map_arg(args, lambda arg: arg.meta["val"]), **kwargs)
        return made

    def converted(part: fx.Node, dtype: torch.dtype = torch.float32) -> fx.Node:
        return add(_prims.convert_element_type.default, part, dtype)

    with graph.inserting_before(node):
        # inductor writes what as_strided is given to memory: else every sweep would convert the left side anew
        exact = add(_aten.as_strided.default, converted(left), [rows, width], [width, 1])
        weight = converted(add(_aten.permute.default, right, [1, 0]))
        products = [add(_aten.mul.Tensor, weight, add(_aten.select.int, exact, 0, row)) for row in range(rows)]
        sums = [add(_aten.unsqueeze.default, add(_aten.sum.dim_IntList, part, [-1]), 0) for part in products]
        found = sums[0]
        if rows > 1:  # put together by choosing, which fuses with what reads it; a cat would copy each row
            of = {"start": 0, "step": 1, "dtype": torch.int64, "device": torch.device("cpu"), "requires_grad": False}
            at = add(_aten.unsqueeze.default, add(_prims.iota.default, rows, **of), 1)
            for row in range(1, rows):
                found = add(_aten.where.self, add(_aten.eq.Scalar, at, row), sums[row], found)
        if bias is not None:
            found = add(_aten.add.Tensor, found, converted(bias))
        found = converted(found, torch.bfloat16)
    node.replace_all_uses_with(found)
    graph.erase_node(node)
