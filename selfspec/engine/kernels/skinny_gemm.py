"""Products of few rows with bfloat16 weights, and attention of few queries, in compiled passes on processors with
AVX-512.

There the library's product of one row with a matrix is bound by its own instructions, not by the memory that it reads.
Products with frozen weights go to the kernel that was measured to be fastest (see `selfspec.engine.kernels.weights`).
The kernels `tiles.cpp` (with AMX), `products.cpp` and `attention.cpp` read weights, keys and values as they are. All add
up in float32 in an order that does not depend on how many rows there are or where they lie: a node's numbers are the same in
a pass over one node and over a tree. Measured: notebooks/LOG.md.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import ir
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.lowering import register_lowering
from torch._inductor.select_algorithm import ExternKernelChoice

from selfspec.engine.kernels import int8
from selfspec.engine.kernels.native import SOURCES, binding, in_place, served
from selfspec.engine.kernels.weights import laid_out

UNDIVIDED = 2**14  # numbers of a row that are summed up by one thread: two would add them in another order
MOST = 4096  # rows, and queries of each head: those of 16 prompts in one pass
STEP = 32  # rows of weights, and heads, must be multiples of it
SLOTS = 16  # the number of slots must be a multiple of it
_aten = torch.ops.aten
_flash = _aten._scaled_dot_product_flash_attention_for_cpu.default


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
        "fx_graph_cache": False,  # what it holds was not seen by the pass in this process; the engine keeps code itself
    }


def _multiply(*given: Tensor, sizes: tuple[int, ...], biased: bool, out: Tensor) -> Tensor:
    """given: left, one to three weights, and where biased the bias of the only one; sizes: B, M, K, and N of each."""
    left, *weights = given
    bias = weights.pop() if biased else None
    if (ready := laid_out(weights)) is not None:
        if left.dim() > 2:
            left = left[0]
        ready.kernel.multiply(left, ready.weights, bias, out if out.dim() == 2 else out[0])
        return out
    first, second, third = (*weights, weights[0], weights[0])[:3]
    last = first if bias is None else bias
    in_place(sizes[3:])(left, first, second, third, last, out, *sizes, *[0] * (6 - len(sizes)), biased)
    return out


def few_rows(left: Tensor, weights: list[Tensor], bias: Tensor | None = None) -> Tensor:
    """left [M, K] times one to three weights [N, K], side by side; plus bias [N], with one weight. Or left [B, M, K]
    times weights [B, N, K], each its own. All are contiguous, in bfloat16, on the CPU; K is a multiple of STEP."""
    sizes = _sizes(left.shape, [weight.shape for weight in weights])
    out = left.new_empty(*left.shape[:-1], sum(sizes[3:]))
    return _multiply(left, *weights, *([] if bias is None else [bias]), sizes=sizes, biased=bias is not None, out=out)


def _sizes(left: Sequence[int], weights: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Shapes as `_multiply` takes them."""
    return (1 if len(left) == 2 else int(left[0]), int(left[-2]), int(left[-1]), *(int(part[-2]) for part in weights))


def _attend(*given: Tensor, sizes: tuple[int, ...], scale: float, out: Tensor) -> Tensor:
    """given: query, keys, values, mask; sizes: rows, heads, heads that share keys, nodes, slots, width, and rows of the
    mask."""
    binding("attention.cpp")(*given, out, *sizes, scale)
    return out


def few_queries(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention [B, n, heads, D] of query [B, heads, n, D] over keys and values [B, G, S, D] under an additive mask
    [B or 1, 1, n, S]; heads / G of them share keys. All are contiguous, in bfloat16, on the CPU; D is a multiple of
    STEP, S of SLOTS."""
    rows, heads, nodes, width = query.shape
    sizes, out = _attention_sizes(query.shape, keys.shape, mask.shape), query.new_empty(rows, nodes, heads, width)
    return _attend(query, keys, values, mask, sizes=sizes, scale=scale, out=out)


def _attention_sizes(query: Sequence[int], keys: Sequence[int], mask: Sequence[int]) -> tuple[int, ...]:
    """Shapes as `_attend` takes them."""
    rows, heads, nodes, width = map(int, query)
    return rows, heads, heads // int(keys[1]), nodes, int(keys[2]), width, int(mask[0])


_library = torch.library.Library("selfspec", "DEF")
_library.define("few_rows(Tensor left, Tensor[] weights, Tensor? bias=None) -> Tensor")
_library.define("few_queries(Tensor query, Tensor keys, Tensor values, Tensor mask, float scale) -> Tensor")
_library.impl("few_rows", few_rows, "CPU")
_library.impl("few_rows", lambda left, weights, bias=None: torch.cat([left @ w.mT for w in weights], -1), "Meta")
_library.impl("few_queries", few_queries, "CPU")
_library.impl("few_queries", lambda query, *_: query.transpose(1, 2).contiguous(), "Meta")
_few_rows, _few_queries = torch.ops.selfspec.few_rows.default, torch.ops.selfspec.few_queries.default
_int8_rows = torch.ops.selfspec.int8_rows.default


def _multiply_int8(*tensors: Tensor, count: int, biased: bool, out: Tensor) -> Tensor:
    """tensors: left, `count` weights as panels and their scales, and where biased the bias."""
    panels, scales = tensors[1 : 1 + count], tensors[1 + count : 1 + 2 * count]
    return int8.multiply(tensors[0], panels, scales, tensors[-1] if biased else None, out)


_int8_products = ExternKernelChoice(_multiply_int8, name="selfspec_int8_rows")
_products = ExternKernelChoice(_multiply, name="selfspec_few_rows")
_attention = ExternKernelChoice(_attend, name="selfspec_few_queries")


@register_lowering(_few_rows, type_promotion_kind=None)
def _lowered(left: Any, weights: list[Any], bias: Any = None) -> Any:
    sizes = _sizes(left.get_size(), [weight.get_size() for weight in weights])
    in_place(sizes[3:])  # an error belongs to compiling
    layout = ir.FixedLayout(left.get_device(), left.get_dtype(), [*left.get_size()[:-1], sum(sizes[3:])])
    parts = [left, *weights, *([] if bias is None else [bias])]
    tensors = [ir.ExternKernel.require_contiguous(part) for part in parts]
    return _products.bind(tensors, layout, sizes=sizes, biased=bias is not None).output_node()


@register_lowering(_int8_rows, type_promotion_kind=None)
def _lowered_int8(left: Any, panels: list[Any], scales: list[Any], bias: Any = None) -> Any:
    if int8.has_kernel():
        binding("int8.cpp")
    outputs = int8.LANES * sum(int(part.get_size()[0]) for part in panels)
    layout = ir.FixedLayout(left.get_device(), left.get_dtype(), [left.get_size()[0], outputs])
    parts = [left, *panels, *scales, *([] if bias is None else [bias])]
    tensors = [ir.ExternKernel.require_contiguous(part) for part in parts]
    bound = _int8_products.bind(tensors, layout, count=len(panels), biased=bias is not None)
    return bound.output_node()


@register_lowering(_few_queries, type_promotion_kind=None)
def _lowered_attention(query: Any, keys: Any, values: Any, mask: Any, scale: float) -> Any:
    binding("attention.cpp")
    rows, heads, nodes, width = (int(size) for size in query.get_size())
    sizes = _attention_sizes(query.get_size(), keys.get_size(), mask.get_size())
    layout = ir.FixedLayout(query.get_device(), query.get_dtype(), [rows, nodes, heads, width])
    tensors = [ir.ExternKernel.require_contiguous(part) for part in (query, keys, values, mask)]
    return _attention.bind(tensors, layout, sizes=sizes, scale=scale).output_node()


class FewRows(CustomGraphPass):
    """Rewrites a graph of aten operations: what the kernels serve is run by them. Up to three products that read the
    same rows, and inputs of the graph as weights, are one call. varying: names of the products and attentions that are
    left to the library, whose rows may depend on how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.varying: list[str] = []

    def __call__(self, graph: fx.Graph) -> None:
        groups: dict[Hashable, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.op == "call_function" and node.target in (_aten.mm.default, _aten.addmm.default):
                *bias, left, right = node.args
                if node.kwargs or not _fits(*(part.meta["val"] for part in (left, right, *bias))):
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
        return get_hash_for_files((__file__, *map(str, SOURCES)))


def _varies(node: fx.Node) -> bool:
    """Whether this is a product of more than one term, a convolution or an attention of the library."""
    if node.target == _int8_rows:
        return not int8.has_kernel()
    name = str(node.target).split(".")[1] if str(node.target).startswith(("aten.", "mkldnn.")) else ""
    if not re.search(r"mm$|mm_|attention|convolution|linear", name):
        return False
    return not (name in ("mm", "bmm") and node.args[0].meta["val"].shape[-1] == 1)  # type: ignore[union-attr]


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
