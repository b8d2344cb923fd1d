"""Targets with weights in 8 bits: the products, token identity, gradients, drafters of the bfloat16 weights."""

import pytest
import torch
from conftest import TORCH_ROUNDS, made, random_drafter, refused, save_tiny, tiny_model
from torch import nn
from torch.nn import functional as F

import selfspec
from selfspec.checkpoints.load_target import load_target
from selfspec.checkpoints.weights_hash import target_hash
from selfspec.core.quantized import Int8Linear, quantize, unquantized
from selfspec.engine.kernels import int8

SIZES: dict[str, int] = {"hidden_size": 64, "intermediate_size": 96}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}  # heads of 32, which attention has a kernel for


def linear(outputs: int, width: int, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(width, outputs, bias=bias).to(torch.bfloat16).requires_grad_(False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer) -> str:
    """Of which every linear map can be quantized."""
    size = -(-len(tokenizer) // 16) * 16
    return save_tiny(tmp_path_factory.mktemp("int8") / "tiny", tokenizer, **SIZES, vocab_size=size)


@pytest.mark.parametrize(("outputs", "width", "bias"), [(16, 32, False), (80, 64, True), (192, 96, False)])
def test_products_are_those_of_the_numbers_that_are_stored(outputs, width, bias):
    full = linear(outputs, width, bias)
    small = Int8Linear(full)
    weight = int8.from_int8(small.panels, small.scales)
    assert (weight - full.weight.float()).abs().max() < full.weight.float().abs().max() / 127
    for rows in (1, 2, 7, 8, 9, 33, 70):
        x = torch.randn(rows, width).bfloat16()
        exact = F.linear(int8.rounded(x).double(), weight.double(), None if full.bias is None else full.bias.double())
        torch.testing.assert_close(small(x).double(), exact, rtol=2**-7, atol=2**-7)
        assert (small(x) - full(x)).float().norm() < 0.02 * full(x).float().norm()


@pytest.mark.skipif(not int8.has_kernel(), reason="needs AVX2 or AVX-512 VNNI")
def test_the_kernel_is_row_invariant_and_agrees_with_torch(monkeypatch):
    small, x = Int8Linear(linear(208, 576)), torch.randn(40, 576).bfloat16()
    alone = torch.cat([small(row[None]) for row in x])
    for start, stop in ((0, 2), (1, 4), (0, 4), (3, 11), (2, 18), (0, 17), (4, 24), (5, 37), (1, 37), (0, 40)):
        assert small(x[start:stop]).equal(alone[start:stop])
    monkeypatch.setattr(int8, "has_kernel", lambda: False)
    torch.testing.assert_close(small(x), alone, rtol=2**-7, atol=2**-7)


@pytest.mark.skipif(not int8.has_kernel(), reason="needs AVX2 or AVX-512 VNNI")
def test_weights_side_by_side_give_what_each_gives():
    parts, x = [Int8Linear(linear(outputs, 64)) for outputs in (80, 16, 112)], torch.randn(5, 64).bfloat16()
    for count in (2, 3):
        panels, scales = [part.panels for part in parts[:count]], [part.scales for part in parts[:count]]
        assert int8.int8_rows(x, panels, scales).equal(torch.cat([part(x) for part in parts[:count]], 1))


@pytest.mark.parametrize("kernel", [True, False])
def test_what_is_no_number_stays_so(kernel, monkeypatch):
    if kernel and not int8.has_kernel():
        pytest.skip("needs AVX2 or AVX-512 VNNI")
    monkeypatch.setattr(int8, "has_kernel", lambda: kernel)
    x = torch.randn(2, 64).bfloat16()
    x[0, 40] = torch.nan
    out = Int8Linear(linear(16, 64))(x)
    assert out[0].isnan().all()
    assert not out[1].isnan().any()


def test_rows_of_other_dtypes():
    small, x = Int8Linear(linear(16, 32)), torch.randn(3, 32)
    refused("multiply rows in bfloat16, not in", small, x, error=RuntimeError)
    with torch.autocast("cpu", torch.bfloat16):
        assert small(x).equal(small(x.bfloat16()))


def test_rows_of_zeros_and_zero_weights():
    full = linear(16, 32)
    full.weight.zero_()
    assert Int8Linear(full)(torch.randn(2, 32).bfloat16()).eq(0).all()
    assert Int8Linear(linear(16, 32))(torch.zeros(2, 32).bfloat16()).eq(0).all()


def test_gradients_pass_through():
    full = linear(48, 64)
    x = torch.randn(5, 64).bfloat16().requires_grad_(True)
    Int8Linear(full)(x).float().square().sum().backward()
    gradient, x.grad = x.grad, None
    full(x).float().square().sum().backward()
    assert (gradient - x.grad).norm() < 0.05 * x.grad.norm()


@pytest.mark.parametrize("engine", ["eager", pytest.param("compiled", marks=TORCH_ROUNDS)])
def test_speculative_text_is_plain_text(folder, engine, tokenizer, tmp_path):
    if engine == "compiled":
        folder = save_tiny(
            tmp_path / "one", tokenizer, **SIZES, vocab_size=-(-len(tokenizer) // 16) * 16, num_hidden_layers=1
        )
    spec = selfspec.load("prompt_lookup", target=folder, dtype="int8", engine=engine)
    assert isinstance(spec.target.lm_head, Int8Linear)
    assert spec.target.dtype_name == "int8"
    assert "int8" in repr(spec)
    assert spec.target.exactness.startswith("int8")
    prompts = [[5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8, 9]][: 2 if engine == "eager" else 1]
    for temperature in (0.0, 1.0) if engine == "eager" else (0.0,):  # each compiles shapes of its own
        arguments = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
        plain = spec.autoregressive(prompts, **arguments)
        nodes = 8 if engine == "eager" else 2
        assert spec.generate(prompts, nodes=nodes, **arguments).token_ids == plain.token_ids
    if engine == "compiled" and int8.has_kernel():
        assert spec.target.exact == "by construction"


def test_the_hash_is_that_of_the_weights_it_was_made_from(folder, tmp_path):
    target, _ = load_target(folder, "bfloat16")
    target.model.save_pretrained(tmp_path)
    small, _ = load_target(str(tmp_path), "int8")
    assert small.saved_hash is None
    assert target_hash(small) == target_hash(target)


def test_a_head_that_can_not_be_quantized_leaves_the_layers(tokenizer, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": len(tokenizer) + 16 - len(tokenizer) % 16 + 3}
    target, _ = load_target(save_tiny(tmp_path / "t", tokenizer, **sizes), "int8")
    assert not isinstance(target.lm_head, Int8Linear)
    assert target.dtype_name == "int8"
    quantize(target.model)  # again: nothing is left to do


def test_a_drafter_of_other_weights_loads_with_a_line(folder, tmp_path, capsys):
    from selfspec.checkpoints.drafter_folder import load_drafter, save_drafter

    target, tokenizer = load_target(folder, "bfloat16")
    drafter = random_drafter("feature", target, rank=4, train="lora", draft_vocab=64)
    save_drafter(drafter, tmp_path / "drafter", target, folder, tokenizer, "For tests.")
    small, _ = load_target(folder, "int8")
    loaded = load_drafter(tmp_path / "drafter", small, tokenizer)
    assert "trained on weights that were not quantized" in capsys.readouterr().err
    spec = selfspec.Spec(small, loaded, tokenizer)
    plain = spec.autoregressive([1, 2, 3], max_new_tokens=16)
    assert spec.generate([1, 2, 3], max_new_tokens=16).token_ids == plain.token_ids
    save_drafter(loaded, tmp_path / "again", small, folder, tokenizer, "For tests.")
    load_drafter(tmp_path / "again", small, tokenizer)
    assert "not quantized" not in capsys.readouterr().err


def test_parts_that_are_trained_have_whole_weights(folder):

    target, _ = load_target(folder, "int8")
    drafter = made("feature", target, train="full").train()
    block = drafter.layer.tail.parts[0]
    assert not any(isinstance(module, Int8Linear) for module in block.modules())
    layer = target.layers[-1].mlp.up_proj
    assert isinstance(layer, Int8Linear)
    assert unquantized(layer).weight is layer.weight
    assert not isinstance(unquantized(layer), Int8Linear)


def test_what_can_not_be_quantized_is_refused(tokenizer, tmp_path):
    model = tiny_model("llama", torch.bfloat16, hidden_size=24, intermediate_size=24, num_attention_heads=2)
    refused("dtype='int8' serves bfloat16 linear maps", quantize, model)
    refused("int8", load_target, save_tiny(tmp_path / "t", tokenizer), "int8", device_map="cpu")


def test_weights_that_change_are_quantized_anew(folder):
    """As PEFT's merging changes them, past the version counter."""
    spec = selfspec.load("prompt_lookup", folder, dtype="int8", engine="eager")
    before = spec.generate([[5, 9, 2, 7]], 8).token_ids
    layers = [part for part in spec.target.model.modules() if isinstance(part, Int8Linear)]
    for part in layers:
        part.weight.data = torch.roll(part.weight.data, 1, 0)  # elsewhere
        part.weight.data.mul_(-1)  # in place
    found = spec.generate([[5, 9, 2, 7]], 8).token_ids
    with torch.no_grad():
        layers[0].weight[1, 1] = 5  # which no sample sees
    spec.target.model(torch.tensor([[5, 9, 2, 7]]))  # counts in the model's own passes too
    for part, rows in ((layers[1], slice(3, 4)), (layers[2], (slice(None), slice(5, 6)))):
        part.weight.data[rows] *= 3  # one row or column
    spec.generate([[5, 9, 2, 7]], 2)
    for part in layers:
        fresh = Int8Linear(unquantized(part))
        assert torch.equal(part.panels, fresh.panels)
        assert torch.equal(part.scales, fresh.scales)
    assert found != before


def test_a_model_that_another_call_quantizes_is_refused(folder):
    first = selfspec.load("prompt_lookup", folder, dtype="bfloat16", engine="eager")
    second = selfspec.load("prompt_lookup", first.target.model, dtype="int8", engine="eager")
    assert second.generate([[5, 9, 2, 7]], 4).token_ids
    refused("its linear maps multiply in 8 bits; load it anew", first.generate, [[5, 9, 2, 7]], 4)
