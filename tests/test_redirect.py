"""The kernels in passes that are not compiled, beside torch's own functions."""

from typing import Any

import pytest
import torch
from conftest import tiny_model
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.core.cache import KVCache
from selfspec.core.generate import autoregressive
from selfspec.core.memory import own_storage
from selfspec.core.options import Options
from selfspec.core.quantized import quantize
from selfspec.core.target import Target
from selfspec.engine.engine import Engine
from selfspec.engine.kernels import invariant, redirect, skinny_gemm
from selfspec.engine.kernels.native import has_compiler, served
from selfspec.engine.kernels.redirect import Redirected

here = pytest.mark.skipif(
    not (served() and has_compiler()), reason="the kernels need AVX2 or AVX-512, and a C++ compiler"
)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@here
@pytest.mark.parametrize(
    ("heads", "shared", "nodes", "rows", "masks"), [(4, 2, 5, 2, 2), (4, 1, 3, 2, 1), (2, 2, 1, 3, 3), (3, 3, 40, 1, 1)]
)
def test_attention_is_torchs(heads, shared, nodes, rows, masks):
    """Also over the first entries of longer buffers, and with keys that lie in another order."""
    query, slots, width = random(rows, nodes, heads, 64).transpose(1, 2), 64, 64
    kept = [random(rows, shared, 256, width)[:, :, :slots], random(rows, shared, 256, width)[:, :, :slots]]
    turned = [random(rows, slots, shared, width).transpose(1, 2) for _ in range(2)]
    mask = torch.zeros(masks, 1, nodes, slots).bfloat16()
    mask[..., 17::3] = torch.finfo(torch.bfloat16).min
    for key, value in (kept, turned):
        with Redirected() as mode, torch.inference_mode():
            found = F.scaled_dot_product_attention(query=query, key=key, value=value, attn_mask=mask, enable_gqa=True)
        assert not mode.varying
        plain = (part.float() for part in (query, key, value))
        right = F.scaled_dot_product_attention(*plain, attn_mask=mask.float(), enable_gqa=True)
        torch.testing.assert_close(found.float(), right, rtol=0.02, atol=0.02)


@here
def test_linear_maps_are_torchs(monkeypatch):
    monkeypatch.setattr(skinny_gemm, "_BLOCK_ROWS", 8)
    monkeypatch.setattr(skinny_gemm, "_BLOCK_NUMBERS", 64)
    x, weight, bias = random(3, 7, 64), random(40, 64), random(40)
    with Redirected() as mode, torch.inference_mode():
        found, none = F.linear(input=x, weight=weight, bias=bias), F.linear(x[:0], weight)
        alone = torch.cat([F.linear(row[None], weight, bias) for row in x.flatten(0, 1)])
    assert none.shape == (0, 7, 40)
    assert found.flatten(0, 1).equal(alone)
    torch.testing.assert_close(found.float(), F.linear(x.float(), weight.float(), bias.float()), rtol=0.02, atol=0.02)
    assert mode.varying == {"linear"}  # of the empty one


@here
def test_what_the_kernels_do_not_take_is_torchs_and_named():
    class Wrapped(Tensor):
        pass

    x, weight = random(2, 64), random(40, 64)
    cases: list[tuple[str, Any]] = [
        ("linear", lambda: F.linear(x, weight.as_subclass(Wrapped))),
        ("linear", lambda: F.linear(x.float(), weight.float())),
        ("linear", lambda: F.linear(x[:, :48], weight[:, :48].contiguous())),
        ("linear", lambda: F.linear(x, weight[0])),
        ("matmul", lambda: torch.matmul(input=x, other=weight.T)),
        ("__matmul__", lambda: x @ weight.T),
        ("addmm", lambda: torch.addmm(random(2, 1), x, weight[:1].T)),
        ("gelu", lambda: F.gelu(x)),
        (
            "scaled_dot_product_attention",
            lambda: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
        ),
    ]
    for name, call in cases:
        with Redirected() as mode:
            found = call()
        assert mode.varying & {name, name.strip("_")}, name
        assert found.equal(call())
    with Redirected() as mode:
        assert (x[:, :1] @ weight[:1, :40]).shape == (2, 40)  # of one term
    assert not mode.varying


@here
def test_int8_without_its_kernel_is_up_to_rounding(monkeypatch):
    model = tiny_model("llama", hidden_size=64, num_attention_heads=2, num_key_value_heads=1).to(torch.bfloat16)
    quantize(model)
    monkeypatch.setattr(redirect, "has_kernel", lambda: False)
    assert autoregressive(Target(model), [[5, 9, 2]], Options(2)).stats.exact == "up to rounding"


@here
def test_a_compiler_that_fails_leaves_passes_to_torch(monkeypatch, capsys):
    def fails(name: str) -> None:
        raise RuntimeError(f"Python.h: no such file ({name})")

    monkeypatch.setattr(redirect, "binding", fails)
    redirect._ready.cache_clear()
    try:
        assert redirect.redirected([nn.Linear(64, 64).bfloat16()]) is None
    finally:
        redirect._ready.cache_clear()
    assert "run on torch's own kernels" in capsys.readouterr().err


def test_only_bfloat16_on_the_cpu_is_redirected():
    assert redirect.redirected([nn.Linear(64, 64)]) is None
    assert redirect.redirected([nn.Linear(64, 64).half()]) is None
    assert redirect.redirected([]) is None


def test_rows_that_stay_grow_alone():
    """Only rows of the batch are copied into larger buffers; memory of the old ones lives while something uses it."""
    like = [(torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 3))]
    cache = KVCache(like, 4, 4, 2000, Engine("inductor"), torch.device("cpu"))
    kept = cache.view(0, 1, 2).buffers[0]
    cache.stores[0].copy_(torch.rand(cache.stores[0].shape))
    cache.lengths = [3, 4, 2, 3]
    before = cache.stores[0][:, 2, :, :2].clone()
    cache.select([2])
    cache.view(0, 1, 1100)
    assert cache.capacity == 2048
    assert cache.stores[0].shape == (2, 1, 2, 2048, 3)
    assert cache.stores[0][:, 0, :, :2].equal(before)
    assert kept[0].flat.isfinite().all()


def test_a_part_with_a_storage_of_its_own_is_the_same_memory():
    whole = torch.zeros(3, 4)
    part = own_storage(whole[1])
    part += 1
    assert whole.tolist() == [[0] * 4, [1] * 4, [0] * 4]
    assert part.untyped_storage().nbytes() == 16


@pytest.mark.parametrize(
    ("operation", "given", "varies"),
    [
        (torch.rsqrt, torch.bfloat16, True),
        (torch.rsqrt, torch.float32, False),
        (torch.sigmoid, torch.float32, True),
        (torch.sigmoid, torch.bfloat16, False),
        (lambda x: x.pow(2), torch.bfloat16, False),
        (lambda x: x**-0.5, torch.bfloat16, True),
        (lambda x: torch.linalg.matmul(x, x), torch.bfloat16, True),
        (lambda x: torch.ops.aten.mm.default(x, x), torch.bfloat16, True),
        (lambda x: x.clone().addmm_(x, x), torch.bfloat16, True),
    ],
)
def test_operations_that_vary_are_named(operation, given, varies):
    """By vectors that are full or not, whatever was met before, and by any of their names."""
    x = torch.ones(4, 4)
    with Redirected() as seen:
        operation(x.to(torch.float64))
        operation(x.to(given))
    assert bool(seen.varying) == varies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_functions_that_are_called_row_invariant_are(dtype):
    """Each row alone, in pairs and beside eight others; of functions of one tensor, and of two."""
    tried, g = set(), torch.Generator().manual_seed(0)
    names = f"{invariant._COMPUTES} {invariant._SUMS}".split()
    for name in {*names, *invariant._HALF, *invariant._SINGLE}:
        function = getattr(torch, name, None) or getattr(F, name, None)
        if function is None or not invariant.row_invariant(name, 8 * dtype.itemsize):
            continue
        for width in (5, 48, 3001):
            x = (3 * torch.randn(9, width, generator=g)).to(dtype)
            more = () if name in [*invariant._COMPUTES.split(), *invariant._SINGLE] else (-1,)
            for given in ((x, *more), (x, 1.7), (x, x.flip(-1))):
                try:
                    whole = function(*given)
                except (TypeError, RuntimeError, AttributeError):
                    continue
                if not isinstance(whole, Tensor) or whole.shape[:1] != (9,):
                    continue
                for rows in (slice(3, 4), slice(8, 9), slice(2, 4)):
                    part = function(*(one[rows].clone() if isinstance(one, Tensor) else one for one in given))
                    same = torch.isclose(part, whole[rows], 0, 0, equal_nan=True).all()
                    assert same, (name, width, rows)
                tried.add(name)
                break
    assert len(tried) > 60


def _product(x: Tensor) -> Tensor:
    return x @ torch.ones(x.shape[-1], x.shape[-1], dtype=x.dtype)


@here
def test_what_nobody_measured_is_not_called_exact():
    """A function of another package in a hook; one whose vectors have other bits."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    product = torch.library.custom_op("selfspec_test::softmax", mutates_args=())(_product)  # by a name of torch's
    for function in (torch.logaddexp, lambda a, b: F.cosine_similarity(a, b, -1)[..., None], lambda a, b: product(a)):
        target = Target(tiny_model("llama", **sizes).to(torch.bfloat16))
        assert autoregressive(target, [[5, 9, 2]], Options(2)).stats.exact == "by construction"
        target.layers[0].mlp.register_forward_hook(lambda m, a, out, f=function: out + f(out, out))
        assert autoregressive(target, [[5, 9, 2]], Options(2)).stats.exact == "up to rounding"
