"""Products of few rows as sums: the same numbers, where they are written so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from selfspec.core.products import MOST, FewRows

_aten = torch.ops.aten


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


@pytest.mark.parametrize("rows", [1, 2, 5, MOST])
@pytest.mark.parametrize("bias", [False, True])
def test_sums_are_the_products(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 48).bfloat16(), torch.randn(80, 48).bfloat16()
    more = [torch.randn(80).bfloat16()] if bias else []
    found, left = rewritten(x, weight, *more)
    assert left == 0
    assert found.dtype == torch.bfloat16
    assert found.shape == (rows, 80)
    exact = F.linear(x.double(), weight.double(), *(part.double() for part in more))
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)  # rounded once


def test_what_does_not_fit_is_left_as_it_is() -> None:
    weight = torch.randn(80, 48)
    for x, w in (
        (torch.randn(MOST + 1, 48).bfloat16(), weight.bfloat16()),
        (torch.randn(2, 48), weight),
        (torch.randn(2, 48).bfloat16(), weight.bfloat16().t().contiguous().t()),
    ):
        found, left = rewritten(x, w)
        assert left == 1
        torch.testing.assert_close(found, F.linear(x, w))
