"""Weights laid out for few rows: the products, in the same bits whatever rows are beside, and never of weights that are
no longer there."""

import gc
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.engine.kernels import fastest, int8
from selfspec.engine.kernels import weights as module
from selfspec.engine.kernels.fastest import KERNELS, Kernel, choose, measure, row_invariant
from selfspec.engine.kernels.native import binding, has_tiles, served
from selfspec.engine.kernels.skinny_gemm import few_rows
from selfspec.engine.kernels.weights import forget_changed, freeze, laid_out, sampled
from selfspec.utils.machine import private_memory

SERVED = [kernel for kernel in KERNELS if kernel.serves(96, 64)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Choices of this test alone."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(fastest, "_choices", {})
    monkeypatch.setattr(fastest, "_shapes_used", set())
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)
    return tmp_path


def linear(outputs: int, width: int) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, outputs, bias=False).to(torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize("kernel", SERVED, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("outputs", [16, 48, 64, 80, 96, 208])
@pytest.mark.parametrize("bias", [False, True])
def test_every_kernel_gives_the_products(kernel, outputs, bias):
    torch.manual_seed(0)
    weight, more = torch.randn(outputs, 64).bfloat16(), torch.randn(outputs).bfloat16() if bias else None
    ready = kernel.lay_out(weight)
    for rows in (*range(1, 18), 40):
        left = torch.randn(rows, 64).bfloat16()
        found = torch.empty(rows, outputs, dtype=torch.bfloat16)
        kernel.multiply(left, ready, more, found)
        exact = F.linear(left.double(), weight.double(), None if more is None else more.double())
        torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-6)


def test_ours_is_row_invariant_and_a_kernel_that_is_not_is_found_out():
    torch.manual_seed(0)
    left = torch.randn(64, 1536).bfloat16()
    weight = torch.randn(80, 1536).bfloat16()
    for kernel in SERVED:
        if kernel.name in ("in place", "panels"):
            assert row_invariant(kernel, kernel.lay_out(weight), left, 80)

    def by_number(left: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        out.copy_(F.linear(left, weight))
        out[0, 0] += len(left)

    planted = Kernel("planted", lambda weight: weight, by_number, lambda *_: True)
    assert not row_invariant(planted, weight, left, 80)


def test_a_choice_is_measured_once_and_kept(folder, monkeypatch):
    chosen = choose(96, 64)
    assert list((folder / "kernels").glob("*.json"))
    monkeypatch.setattr(fastest, "_choices", {})
    monkeypatch.setattr(fastest, "measure", lambda *_: pytest.fail("measured twice"))
    assert choose(96, 64) is chosen


@pytest.mark.skipif(not served(), reason="needs a processor with AVX2 or AVX-512")
def test_beside_other_work_nothing_is_measured(folder, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (2.0 * (os.cpu_count() or 1), 0.0, 0.0), raising=False)
    monkeypatch.setattr(fastest, "measure", lambda *_: pytest.fail("measured"))
    chosen = choose(96, 64)
    assert chosen is not None
    assert chosen.name in ("in place", "panels")
    assert not fastest.measured()
    assert not list(folder.rglob("*.json"))


def test_only_row_invariant_kernels_are_chosen(monkeypatch):
    monkeypatch.setattr(fastest, "row_invariant", lambda *_: False)
    figures = measure(96, 64)
    assert figures["kernel"] is None
    assert figures["varies"] == [kernel.name for kernel in SERVED]
    assert choose(96, 64) is None


PANELS = next((kernel for kernel in SERVED if kernel.name == "panels"), None)
in_panels = pytest.mark.skipif(PANELS is None, reason="needs a processor with AVX2 or AVX-512")


@in_panels
def test_frozen_weights_are_laid_out_and_others_are_not(monkeypatch):
    monkeypatch.setattr(module, "choose", lambda *_: PANELS)
    part, left = linear(96, 64), torch.randn(3, 64).bfloat16()
    assert laid_out([part.weight]) is None
    freeze(linear(96, 64).requires_grad_(True), 0)
    freeze(part)  # too small to pay
    assert laid_out([part.weight]) is None
    freeze(part, 0)
    assert laid_out([part.weight[:48]]) is None  # begins where the weight does
    first = laid_out([part.weight])
    assert first is not None
    assert laid_out([part.weight]) is first
    found = few_rows(left, [part.weight])
    torch.testing.assert_close(found.double(), F.linear(left.double(), part.weight.double()), rtol=2**-7, atol=2**-6)

    part.weight.mul_(2)  # in place: what was laid out is another weight
    assert few_rows(left, [part.weight]).equal(2 * found)

    other = linear(32, 64)
    freeze(other, 0)
    both = few_rows(left, [part.weight, other.weight])
    assert both[:, :96].equal(2 * found)
    assert both[:, 96:].equal(few_rows(left, [other.weight]))


@in_panels
@pytest.mark.skipif(not int8.has_kernel(), reason="the kernel in 8 bits needs AVX2 and a C++ compiler")
def test_drafts_multiply_in_8_bits_and_the_target_does_not(monkeypatch):
    monkeypatch.setattr(module, "LEAST", 0)
    first, second, exact = linear(64, 96), linear(32, 96), linear(64, 96)
    freeze(exact, 0)
    int8.in_8_bits([first.weight, second.weight, exact.weight])
    left = torch.randn(5, 96).bfloat16()
    found = few_rows(left, [first.weight, second.weight])
    panels, scales = zip(*(int8.to_int8(part.weight) for part in (first, second)), strict=True)
    assert found.equal(int8.int8_rows(left, list(panels), list(scales)))
    for alone in (few_rows(left, [exact.weight]), few_rows(left, [exact.weight, first.weight])[:, :64]):
        assert alone.equal(few_rows(left, [linear(64, 96).weight]))
    assert module.laid_out_bytes() >= 96 * 96


def test_what_was_laid_out_goes_with_its_weight(monkeypatch):
    monkeypatch.setattr(module, "choose", lambda *_: PANELS)
    part = linear(96, 64)
    freeze(part, 0)
    address = part.weight.data_ptr()
    laid_out([part.weight])
    assert address in module._frozen
    del part
    gc.collect()
    assert address not in module._frozen
    assert address not in module._laid_out


@in_panels
def test_weights_that_are_read_as_they_are_take_no_more_memory(monkeypatch):
    monkeypatch.setattr(module, "choose", lambda *_: module.IN_PLACE)
    part, before = linear(96, 64), module.laid_out_bytes()
    freeze(part, 0)
    assert laid_out([part.weight]) is None
    assert module.laid_out_bytes() == before


@pytest.mark.skipif(not has_tiles(), reason="needs a processor with AMX")
def test_tiles_and_products_agree():
    torch.manual_seed(0)
    left, weights = torch.randn(2, 69, 96).bfloat16(), [torch.randn(2, n, 96).bfloat16() for n in (16, 83, 48)]
    outs = []
    for name in ("tiles.cpp", "products.cpp"):
        outs.append(torch.empty(2, 69, 147, dtype=torch.bfloat16))
        binding(name)(left, *weights, left, outs[-1], 2, 69, 96, 16, 83, 48, False)
    torch.testing.assert_close(*outs, rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize("shape", [(576, 1536), (1536, 576), (7, 7), (6, 4), (4, 6), (1, 5), (5, 1), (12, 30), (2, 9)])
def test_a_sample_has_numbers_of_every_row_and_column(shape):
    places = sampled(torch.arange(shape[0] * shape[1]).view(shape))
    assert set((places // shape[1]).tolist()) == set(range(shape[0]))
    assert set((places % shape[1]).tolist()) == set(range(shape[1]))
    assert min(shape) < 9 or len(places) < max(shape) * 1.2


@in_panels
def test_weights_that_change_past_their_version_are_laid_out_anew(monkeypatch):
    monkeypatch.setattr(module, "choose", lambda *_: PANELS)
    one, x = linear(96, 64), torch.randn(3, 64).bfloat16()
    freeze(one, least=0)
    before = laid_out([one.weight])
    assert before is not None
    one.weight.data.mul_(-1)
    forget_changed()
    now = laid_out([one.weight])
    assert now is not None
    found = torch.empty(3, 96, dtype=torch.bfloat16)
    now.kernel.multiply(x, now.weights, None, found)
    torch.testing.assert_close(found, one(x), rtol=2**-6, atol=2**-6)
    address = one.weight.data_ptr()
    one.weight.data = one.weight.data.clone()  # another weight may lie there from now on
    forget_changed()
    assert address not in module._frozen
    assert address not in module._laid_out


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_what_is_laid_out_is_a_process_s_own():
    room = private_memory(4096)
    if not (child := os.fork()):
        room[0] = 1
        os._exit(0)
    os.waitpid(child, 0)
    assert room[0] == 0


def test_the_beginning_of_a_laid_out_weight_is_another(monkeypatch):
    panels = next((kernel for kernel in SERVED if kernel.name == "panels"), None)
    if panels is None:
        pytest.skip("weights are read in place here")
    monkeypatch.setattr(module, "choose", lambda *_: panels)
    whole, x = linear(96, 64), torch.randn(3, 64).bfloat16()
    freeze(whole, 0)
    assert laid_out([whole.weight]) is not None
    part = whole.weight[:32]
    torch.testing.assert_close(few_rows(x, [part]).double(), F.linear(x.double(), part.double()), rtol=2**-6, atol=1e-2)
