"""The kernel for products of few rows: the same numbers, whatever rows are beside."""

import pytest
import torch
from conftest import TORCH_ROUNDS, tiny_model
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from selfspec.core.cache import KVCache
from selfspec.core.generate import autoregressive
from selfspec.core.options import Options
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain
from selfspec.engine.engine import Engine
from selfspec.engine.kernels import native
from selfspec.engine.kernels.graph_pass import FewRows
from selfspec.engine.kernels.native import served
from selfspec.engine.kernels.skinny_gemm import MOST, few_queries, few_rows
from selfspec.engine.layers import REPEATED

_aten = torch.ops.aten
pytestmark = pytest.mark.skipif(not served(), reason="the kernels need a processor with AVX2 or AVX-512")


def rewritten(*given: Tensor) -> tuple[Tensor, int]:
    """A linear map of `given` (input, weight, maybe bias) after the pass, and how many products are left in it."""
    module = make_fx(lambda *args: F.linear(*args), tracing_mode="fake")(*given)
    FewRows()(module.graph)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    left = [n for n in module.graph.nodes if n.target in (_aten.mm.default, _aten.addmm.default)]
    for node in module.graph.nodes:
        if node.op == "call_function":
            assert "val" in node.meta, node
    found: Tensor = module(*given)
    return found, len(left)


@pytest.mark.parametrize("outputs", [2, 80, 83])
@pytest.mark.parametrize("bias", [False, True])
def test_the_kernel_gives_the_products(outputs, bias):
    torch.manual_seed(0)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 29):
        x, weight = torch.randn(rows, 96).bfloat16(), torch.randn(outputs, 96).bfloat16()
        more = [torch.randn(outputs).bfloat16()] if bias else []
        found, left = rewritten(x, weight, *more)
        assert left == 0
        assert found.dtype == torch.bfloat16
        assert found.shape == (rows, outputs)
        exact = F.linear(x.double(), weight.double(), *(part.double() for part in more))
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)  # rounded once


def test_one_output_is_left_to_the_library_and_said():
    """Of one row inductor makes a sum before this pass sees it, which no kernel's product is like."""
    assert [rewritten(torch.randn(rows, 96).bfloat16(), torch.randn(1, 96).bfloat16())[1] for rows in (2, 8)] == [1, 1]


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


@pytest.mark.slow
def test_norms_of_one_row_are_those_of_many():
    """Else inductor sums a row up in one way alone and in another beside others."""
    engine, x = Engine("inductor", quiet=True), torch.randn(960, 512).bfloat16()
    with torch.inference_mode():
        alone = torch.cat([engine.run(norm, row[None]) for row in x])
        assert alone.equal(torch.cat([engine.run(norm, rows) for rows in x.split(8)]))
    assert not engine.failed


def test_a_row_does_not_depend_on_the_rows_beside_it():
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape).bfloat16() for shape in ((67, 1024), (203, 1024), (203,)))
    for more in (None, bias):
        alone = torch.cat([few_rows(row[None], [weight], more) for row in x])
        for rows in (2, 3, 7, 67):
            assert few_rows(x[:rows].contiguous(), [weight], more).equal(alone[:rows])


@pytest.mark.parametrize(
    ("rows", "nodes", "slots", "width"), [(1, 1, 16, 32), (1, 4, 256, 64), (2, 7, 64, 96), (3, 64, 48, 32)]
)
@pytest.mark.parametrize("one_mask", [False, True])
def test_attention_is_the_library_s(rows, nodes, slots, width, one_mask):
    torch.manual_seed(0)
    query = torch.randn(rows, 3, nodes, width).bfloat16()
    keys, values = (torch.randn(rows, 3, slots, width).bfloat16() for _ in range(2))
    hidden = torch.rand(1 if one_mask else rows, 1, nodes, slots) < 0.4
    hidden[..., -8:], hidden[..., 0] = True, False
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.bfloat16).min).bfloat16()
    found = few_queries(query, keys, values, mask, 0.3).transpose(1, 2)
    given = [part.double() for part in (query, keys, values)]
    exact = F.scaled_dot_product_attention(*given, attn_mask=mask.double(), scale=0.3)
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=1e-4)


def test_scores_that_are_nan_stay_nan():
    """As of damaged weights: they are no even mean over what may not be seen."""
    query, keys = torch.ones(1, 1, 4, 64).bfloat16(), torch.ones(1, 1, 32, 64).bfloat16()
    keys[..., 3] = float("nan")
    mask = torch.zeros(1, 1, 4, 32).bfloat16()
    assert few_queries(query, keys, torch.ones_like(keys), mask, 0.1).isnan().all()


def test_a_query_does_not_depend_on_where_it_lies():
    """On the queries beside it, on hidden slots between those it sees, or on how large the buffers are."""
    torch.manual_seed(0)
    lowest = torch.finfo(torch.bfloat16).min
    query = torch.randn(1, 2, 5, 64).bfloat16()
    keys, values = (torch.randn(1, 2, 40, 64).bfloat16() for _ in range(2))
    places = torch.tensor(sorted(torch.randperm(250)[:40].tolist()))
    large = [torch.randn(1, 2, 256, 64).bfloat16().index_copy(2, places, part) for part in (keys, values)]
    mask = torch.full((1, 1, 5, 256), lowest).bfloat16()
    mask[..., places] = 0
    found = few_queries(query, *large, mask, 0.125)
    small = [F.pad(part, (0, 0, 0, 8)) for part in (keys, values)]
    for n in range(5):
        mask = torch.tensor([0.0] * 40 + [lowest] * 8).bfloat16()[None, None, None]
        alone = few_queries(query[:, :, n : n + 1].contiguous(), *small, mask, 0.125)
        assert alone[:, 0].equal(found[:, n])


def test_rounding_is_that_of_torch():
    """Ties go to even; infinities and NaN stay; numbers too small to be normal too, or are zero."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for by in (1.0, 1.0078125, 0.3333):
        x = torch.zeros(len(bits), 32, dtype=torch.bfloat16)
        x[:, 0], weight = bits, torch.zeros(1, 32, dtype=torch.bfloat16)
        weight[0, 0] = by
        found = torch.cat([few_rows(part.contiguous(), [weight]) for part in x.split(MOST)])[:, 0]
        product = bits.float() * weight[0, 0].float()
        exact = product.bfloat16()
        assert found.isnan().equal(exact.isnan())
        normal = torch.minimum(bits.float().abs(), product.abs()) >= torch.finfo(torch.float32).tiny
        kept = ~exact.isnan() & (normal | (found != 0) if native.has_pairs() else True)
        assert found[kept].equal(exact[kept])


@pytest.mark.parametrize("added", [False, True])
def test_products_of_batches(added):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 64).bfloat16(), torch.randn(3, 70, 64).bfloat16()
    bias = torch.randn(3, 1, 70).bfloat16()

    def product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.baddbmm(bias, x, weight.mT) if added else x @ weight.mT

    module = make_fx(product, tracing_mode="fake")(x, weight, bias)
    FewRows()(module.graph)
    module.graph.lint()
    module.recompile()
    assert not [n for n in module.graph.nodes if n.target in (_aten.bmm.default, _aten.baddbmm.default)]
    exact = product(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(module(x, weight, bias).double(), exact, rtol=2**-7, atol=2**-6)


def test_what_does_not_fit_is_left_as_it_is():
    weight = torch.randn(80, 96)
    for x, w in (
        (torch.randn(MOST + 1, 96).bfloat16(), weight.bfloat16()),
        (torch.randn(2, 96), weight),
        (torch.randn(2, 96).bfloat16(), weight.bfloat16().t().contiguous().t()),
        (torch.randn(2, 48).bfloat16(), weight[:, :48].bfloat16().contiguous()),
    ):
        found, left = rewritten(x, w)
        assert left == 1
        torch.testing.assert_close(found, F.linear(x, w))


@pytest.mark.parametrize(
    ("backend", "width"),
    [
        (None, 64),
        pytest.param("inductor", 64, marks=TORCH_ROUNDS),
        pytest.param("inductor", 4096, marks=[TORCH_ROUNDS, pytest.mark.slow]),
    ],
)
def test_a_pass_over_a_tree_has_the_bits_of_plain_passes(backend, width):
    """In bfloat16, which rounds at every step: through every layer of a model, compiled and as it is."""
    sizes = {"hidden_size": width, "num_attention_heads": width // 32, "num_key_value_heads": width // 64}
    sizes["intermediate_size"] = 2 * width
    sizes["num_hidden_layers"] = REPEATED if backend else 1  # layers that are compiled once
    target = Target(tiny_model("llama", **sizes).to(torch.bfloat16))
    model = target.model
    target.engine = Engine(backend, quiet=True)
    torch.manual_seed(0)
    vocabulary = model.config.vocab_size
    prompt, tokens = torch.randint(vocabulary, (1, 9)), torch.randint(vocabulary, (1, 8))
    tree = DraftTree(tokens, torch.tensor([[-1, 0, 0, 1, 1, 2, 3, 5]]))

    def opened() -> KVCache:
        cache = target.cache(1, 64)
        target.forward(chain(prompt), cache, logits=False, prompt=True)
        cache.commit([list(range(9))])
        return cache

    with torch.inference_mode():
        found = target.forward(tree, opened()).logits
        for path in ([0, 2, 5, 7], [0, 1, 3, 6], [0, 1, 4]):
            cache = opened()
            for node in path:
                alone = target.forward(chain(tokens[:, node : node + 1]), cache).logits
                cache.commit([[0]])
                assert alone[0, 0].equal(found[0, node])
    assert not target.engine.failed
    assert target.exact == "by construction", target.engine.varying


def test_what_is_left_to_the_library_is_not_called_exact_by_construction(tmp_path):
    """Widths that the kernels do not take; the same of code that is read from disk."""
    sizes = {"hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    for how in ("compiled", "read"):
        target = Target(tiny_model("llama", **sizes).to(torch.bfloat16))
        target.engine = Engine("inductor", tmp_path, quiet=True)
        assert target.exact == "up to rounding"
        result = autoregressive(target, [[5, 9, 2]], Options(2))
        assert {done for _, _, done in target.engine.made} == {how}
        assert result.stats.exact == "up to rounding"
        assert "aten.mm" in next(iter(target.engine.varying.values()))
    target = Target(target.model)
    assert autoregressive(target, [[5, 9, 2]], Options(2)).stats.exact == "up to rounding"
    assert target.engine.varying["tree_pass_alone"] == "linear, scaled_dot_product_attention"
    target = Target(tiny_model("llama", hidden_size=64, intermediate_size=64).to(torch.bfloat16))
    weights = torch.randn(64, 256).bfloat16(), torch.randn(256, 64).bfloat16()
    target.layers[0].mlp.register_forward_hook(lambda m, a, out: torch.linalg.multi_dot([out[0], *weights])[None])
    assert autoregressive(target, [[5, 9, 2]], Options(2)).stats.exact == "up to rounding"
    assert "multi_dot" in target.engine.varying["tree_pass_alone"]


def test_shared_keys_are_read_once():
    """Attention whose keys a model copies for every head that shares them."""
    torch.manual_seed(0)
    query, mask = torch.randn(2, 4, 3, 32).bfloat16(), torch.zeros(1, 1, 3, 16).bfloat16()
    keys, values = (torch.randn(2, 2, 16, 32).bfloat16() for _ in range(2))

    def attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        copied = (part[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, 4, 16, 32) for part in (keys, values))
        return F.scaled_dot_product_attention(query, *copied, attn_mask=mask)

    module = make_fx(attention, tracing_mode="fake")(query, keys, values, mask)
    module.graph.eliminate_dead_code()
    FewRows()(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    assert not module.graph.find_nodes(op="call_function", target=_aten.clone.default)
    exact = attention(query.double(), keys.double(), values.double(), mask.double())
    torch.testing.assert_close(module(query, keys, values, mask).double(), exact, rtol=2**-7, atol=1e-3)


def test_kernels_are_kept_for_the_next_process(tmp_path, monkeypatch):
    """What can not be read is compiled anew."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    compile_anew, compiled = CppPythonBindingsCodeCache.load_pybinding, []
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(
        CppPythonBindingsCodeCache, "load_pybinding", lambda *of: (compiled.append(of), compile_anew(*of))[1]
    )
    left, keys = torch.randn(1, 1, 1, 32).bfloat16(), torch.randn(1, 1, 16, 32).bfloat16()
    mask = torch.zeros(1, 1, 1, 16).bfloat16()
    found = []
    for _ in range(2):
        native.binding.cache_clear()
        found.append(few_queries(left, keys, keys, mask, 1.0))
    native.binding.cache_clear()
    assert len(compiled) == 1
    assert torch.equal(*found)
    (tmp_path / "damaged.so").write_bytes(next(tmp_path.glob("kernels/*.so")).read_bytes()[:1000])
    with pytest.raises(ImportError):
        native._loaded(tmp_path / "damaged.so")
