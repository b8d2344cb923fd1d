"""Graphs of aten operations rewritten for the kernels of `skinny_gemm`, when inductor compiles them."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.lowering import fallbacks, lowerings
from torch._ops import HigherOrderOperator, OpOverload

from selfspec.engine.kernels import int8, lowering, skinny_gemm
from selfspec.engine.kernels.invariant import of_torch, row_invariant
from selfspec.engine.kernels.native import SOURCES, served
from selfspec.engine.kernels.skinny_gemm import MOST, SLOTS, STEP
from selfspec.engine.keys import ROUNDS

UNDIVIDED = 2**14  # numbers of a row that are summed up by one thread: two would add them in another order
# Newer inductor sums up LayerNorm of one row in another way than of many, unless this is 0
_VARIANCE = "use_two_step_variance_threshold"
_aten = torch.ops.aten
_flash = _aten._scaled_dot_product_flash_attention_for_cpu.default
_few_rows, _few_queries = torch.ops.selfspec.few_rows.default, torch.ops.selfspec.few_queries.default
_int8_rows = torch.ops.selfspec.int8_rows.default


def options() -> dict[str, Any]:
    """Options for inductor. Numbers are rounded where the model rounds them, not where operations happen to be fused:
    that differs from one number of nodes to another."""
    if not served():
        return {}
    return {
        "post_grad_custom_pre_pass": FewRows(),
        "emulate_precision_casts": True,
        "size_asserts": False,
        "cpp.min_chunk_size": UNDIVIDED,
        **({f"cpp.{_VARIANCE}": 0} if hasattr(config.cpp, _VARIANCE) else {}),
        "fx_graph_cache": False,  # what it holds was not seen by the pass in this process; the engine keeps code itself
    }


class FewRows(CustomGraphPass):
    """Rewrites a graph of aten operations: what the kernels serve is run by them. Up to three products that read the
    same rows, and inputs of the graph as weights, are one call. varying: names of what is left to the library and
    whose rows may depend on how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.varying = [] if ROUNDS else [f"roundings of torch {torch.__version__}"]

    def __call__(self, graph: fx.Graph) -> None:
        groups: dict[Hashable, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.op == "call_function" and node.target in (_aten.mm.default, _aten.addmm.default):
                *bias, left, right = node.args
                if node.kwargs or not _fits(*(part.meta["val"] for part in (left, right, *bias))):
                    continue
                if right.meta["val"].shape[1] == 1:  # of one row inductor makes sums, which no product is like
                    continue
                alone = bias or _input(right) is None
            elif node.op == "call_function" and node.target == _int8_rows:
                left, alone = node.args[0], len(node.args) > 3 and node.args[3] is not None
            else:
                continue
            viewed = left.target in (_aten.view.default, _aten.reshape.default)  # by each product anew
            seen = node.target, left.args[0] if viewed else left, left.meta["val"].shape
            groups.setdefault(node if alone or len(groups.get(seen, [])) == 3 else seen, []).append(node)
        for nodes in groups.values():
            _rewrite(graph, nodes)
        for target in (_aten.bmm.default, _aten.baddbmm.default):
            for node in graph.find_nodes(op="call_function", target=target):
                _rewrite_batch(graph, node)
        for node in graph.find_nodes(op="call_function", target=_flash):
            _rewrite_attention(graph, node)
        self.varying += [str(node.target) for node in graph.nodes if _varies(node)]

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__, str(lowering.__file__), str(skinny_gemm.__file__), *map(str, SOURCES)))


def _varies(node: fx.Node) -> bool:
    """Whether this is a product of more than one term, or left to a library that may vary."""
    inner: Any = node.args[0] if node.args else None
    target: Any = node.target
    if isinstance(target, HigherOrderOperator) and target.name().startswith("auto_functionalized"):
        target = inner  # which it calls
    if target == _int8_rows:
        return not int8.has_kernel()
    if isinstance(target, HigherOrderOperator):
        return target.name() != "invoke_subgraph"  # of layers alike, whose own graph is seen as well
    if not isinstance(target, OpOverload) or target.namespace == "selfspec":
        return False
    name = target._schema.name.split("::")[1]
    if re.search(r"mm$|mm_|attention|convolution|linear", name):
        return not (name in ("mm", "bmm") and inner.meta["val"].shape[-1] == 1)
    generated = target in lowerings and target not in fallbacks
    return not generated and not (of_torch(target) and row_invariant(name))


def _alike(*parts: Tensor) -> bool:
    """Whether all are of the dtype and device that the kernels serve."""
    return all(part.dtype == torch.bfloat16 and part.device.type == "cpu" for part in parts)


def _fits(left: Tensor, right: Tensor, *bias: Tensor) -> bool:
    """left: [M, K]; right: [K, N], which must be a weight [N, K] seen as columns; bias: maybe [N]."""
    columns = right.stride() == (1, right.shape[0]) and all(part.dim() == 1 for part in bias)
    return _alike(left, right, *bias) and columns and left.shape[0] <= MOST and right.shape[0] % STEP == 0


def _input(right: fx.Node) -> fx.Node | None:
    """The input of the graph that is seen as columns; None where it is something else."""
    if right.target != _aten.permute.default or right.args[1] != [1, 0]:
        return None
    source = right.args[0]
    return source if isinstance(source, fx.Node) and source.op == "placeholder" else None


def _add(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A node of the graph, with its value's layout."""
    node, values = graph.call_function(target, args), fx.map_arg(args, lambda arg: arg.meta["val"])
    with next(arg for arg in values if isinstance(arg, Tensor)).fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = target(*values)
    return node


def _rewrite(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """One call instead of products that read the same rows, at the place of the first."""
    if nodes[0].target == _int8_rows and len(nodes) == 1:
        return
    with graph.inserting_before(nodes[0]):
        product, start = _add(graph, *_operands(graph, nodes)), 0
        for node in nodes:
            stop = start + node.meta["val"].shape[1]
            part = _add(graph, _aten.slice.Tensor, product, 1, start, stop) if len(nodes) > 1 else product
            node.replace_all_uses_with(part)
            start = stop
    for node in nodes:
        graph.erase_node(node)


def _operands(graph: fx.Graph, nodes: list[fx.Node]) -> tuple[Any, ...]:
    """The operation that does all of these products, and its arguments."""
    if nodes[0].target == _int8_rows:
        panels, scales = ([node.args[i][0] for node in nodes] for i in (1, 2))  # type: ignore[index]
        return _int8_rows, nodes[0].args[0], panels, scales
    *bias, left, right = nodes[0].args
    weights = [_input(node.args[-1]) for node in nodes]  # type: ignore[arg-type]
    if weights[0] is None:
        weights = [_add(graph, _aten.permute.default, right, [1, 0])]
    return _few_rows, left, weights, *bias


def _rewrite_batch(graph: fx.Graph, node: fx.Node) -> None:
    """`_few_rows` instead of a product of batches [B, M, K] and [B, K, N], where weights [B, N, K] are seen as columns.
    What is added to it is added afterwards."""
    *more, left, right = node.args
    rows, columns = left.meta["val"], right.meta["val"]  # type: ignore[union-attr]
    seen = columns.stride()[1:] == (1, columns.shape[1]) and rows.shape[1] <= MOST and columns.shape[1] % STEP == 0
    if node.kwargs or not (_alike(rows, columns) and seen):
        return
    with graph.inserting_before(node):
        weight = _add(graph, _aten.permute.default, right, [0, 2, 1])
        product = _add(graph, _few_rows, left, [weight])
        if more:
            product = _add(graph, _aten.add.Tensor, product, more[0])
    node.replace_all_uses_with(product)
    graph.erase_node(node)


def _unrepeated(heads: Any) -> Any:
    """Keys or values [B, G, S, D], of which these are copies for the queries that share them."""
    node = heads
    for target in ((_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default), (_aten.clone.default,)):
        node = node.args[0] if node.target in target else node
    if node.target != _aten.expand.default or node.args[0].target != _aten.unsqueeze.default:
        return heads
    source, dim = node.args[0].args
    shape, repeated = source.meta["val"].shape, node.meta["val"].shape
    alike = dim == 2 and repeated[:2] == shape[:2] and repeated[3:] == shape[2:]
    joined = heads.meta["val"].shape == (shape[0], shape[1] * repeated[2], *shape[2:])
    return source if alike and joined else heads


def _rewrite_attention(graph: fx.Graph, node: fx.Node) -> None:
    """`_few_queries` instead of the library's attention, where it serves it."""
    if len(node.args) != 3 or not node.kwargs.keys() <= {"attn_mask", "scale"} or "attn_mask" not in node.kwargs:
        return
    inputs = [node.args[0], *map(_unrepeated, node.args[1:]), node.kwargs["attn_mask"]]
    query, keys, values, mask = shapes = [part.meta["val"] for part in inputs]
    if mask.dim() != 4:
        return
    fits = query.shape[2] <= MOST and query.shape[3] % STEP == 0 and keys.shape[2] % SLOTS == 0
    same = keys.shape[0] == query.shape[0] and query.shape[1] % keys.shape[1] == 0 and keys.shape == values.shape
    same = same and mask.shape[1:] == (1, query.shape[2], keys.shape[2])
    if not (_alike(*shapes) and fits and same) or any(user.args[1] != 0 for user in node.users):
        return
    scale = node.kwargs.get("scale") or query.shape[3] ** -0.5
    with graph.inserting_before(node):
        attention = graph.call_function(_few_queries, (*inputs, scale))
        seen = graph.call_function(_aten.permute.default, (attention, [0, 2, 1, 3]))
    seen.meta["val"] = next(iter(node.users)).meta["val"]
    attention.meta["val"] = seen.meta["val"].permute(0, 2, 1, 3)
    for user in list(node.users):
        user.replace_all_uses_with(seen)
        graph.erase_node(user)
    graph.erase_node(node)
