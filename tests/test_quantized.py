"""Quantized targets in the forms that people have: loaded, decoded as plainly, drafted for, and trained on."""

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import made, random_drafter, refused, save_tiny, tiny_model, trains
from transformers import QuantoConfig

import selfspec
from selfspec.checkpoints.drafter_folder import save_drafter
from selfspec.checkpoints.gguf import _scale_positions
from selfspec.checkpoints.load_target import load_target
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling

PROMPTS = [[5, 9, 2, 7, 7, 1, 12, 40, 8], [8, 1, 30, 4, 17]]
SIZES = {"hidden_size": 64, "intermediate_size": 64}  # multiples of the blocks that share a scale


def test_a_quantized_target(tmp_path, tokenizer):
    pytest.importorskip("optimum.quanto")
    folder = save_tiny(tmp_path / "target", tokenizer, **SIZES)
    target, _ = load_target(folder, quantization_config=QuantoConfig(weights="int8"))
    options = Options(16, Sampling(1.0), seed=3)
    plain = autoregressive(target, PROMPTS, options).token_ids
    drafters = [made("medusa", target, heads=2, rank=4), made("early_exit", target, exit=1, rank=2, min_prob=0.0)]
    for drafter in drafters:
        assert speculative(target, PROMPTS, options, trains(drafter, target), 8).token_ids == plain
    save_drafter(drafters[0], tmp_path / "heads", target, folder, tokenizer, "For tests.")
    spec = selfspec.load(str(tmp_path / "heads"), quantization_config=QuantoConfig(weights="int8"))
    assert speculative(spec.target, PROMPTS, options, spec.drafter, 8).token_ids == plain
    assert type(spec.target.layers[0].self_attn.q_proj.weight).__name__ == "WeightQBytesTensor"
    refused("target", selfspec.load, str(tmp_path / "heads"))
    loaded = selfspec.load("prompt_lookup", target=folder, dtype="float16", quantization_config=None)
    assert loaded.target.dtype == torch.float16


def test_what_quanto_makes_is_served_or_refused_by_name(tmp_path, tokenizer, capsys):
    pytest.importorskip("optimum.quanto")
    folder = save_tiny(tmp_path / "target", tokenizer, **SIZES)
    with pytest.raises(ValueError, match=r"quanto's int4 or int2, which .* quanto's int8 and float8 are served"):
        load_target(folder, quantization_config=QuantoConfig(weights="int4"))
    plain, _ = load_target(folder)
    drafter = random_drafter("medusa", plain, heads=2, rank=4)
    save_drafter(drafter, tmp_path / "heads", plain, folder, tokenizer, "For tests.")
    for weights in ("int8", "float8"):  # heads of the weights before they were quantized
        spec = selfspec.load(str(tmp_path / "heads"), quantization_config=QuantoConfig(weights=weights))
        assert "here are weights that quanto has quantized" in capsys.readouterr().err
        assert spec.generate(PROMPTS, 8).token_ids == spec.autoregressive(PROMPTS, 8).token_ids
    other = save_tiny(tmp_path / "other", tokenizer, **{**SIZES, "num_hidden_layers": 2})
    with pytest.raises(ValueError, match=r"was made for target .* not for"):
        selfspec.load(str(tmp_path / "heads"), target=other, quantization_config=QuantoConfig(weights="int8"))


def _write_gguf(
    gguf: Any, file: Path, kind: Any, left_out: str = "", factors: Any = None, bias: bool = False, **more: Any
) -> None:
    """A Qwen2 of two layers with a vocabulary of bytes, its matrices in this form. left_out: how names of tensors begin
    that are not written; factors: of rotary frequencies, as of Llama 3; bias: one that Qwen2 does not have; more: other
    settings, by the method that adds them."""
    vocab, width, generator = [chr(33 + i) for i in range(93)] + ['!"', "<s>", "</s>"], 64, np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, arch := more.pop("arch", "qwen2"))
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(width)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(more.pop("pre", "default"))
    writer.add_token_list(vocab)
    writer.add_token_types([1] * 94 + [3] * 2)
    writer.add_token_merges(['! "'])
    writer.add_bos_token_id(94)
    writer.add_eos_token_id(95)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    sizes = {"token_embd": (len(vocab), width), "output": (len(vocab), width), "output_norm": (width,)}
    for layer in ("blk.0.", "blk.1."):
        sizes |= {f"{layer}{name}": (width,) for name in ("attn_norm", "ffn_norm")}
        sizes |= {f"{layer}{name}": (width, width) for name in ("attn_q", "attn_output", "ffn_gate", "ffn_up")}
        sizes |= {f"{layer}{name}": (width // 2, width) for name in ("attn_k", "attn_v")}
        sizes |= {f"{layer}ffn_down": (width, width)}
        if arch == "qwen2":
            sizes |= {f"{layer}attn_q.bias": (width,), f"{layer}attn_k.bias": (32,), f"{layer}attn_v.bias": (32,)}
    if bias:
        sizes |= {"blk.0.attn_output.bias": (width,)}
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(factors, np.float32))
    for name, shape in sizes.items():
        if left_out and name.startswith(left_out):
            continue
        name = name if name.endswith(".bias") else f"{name}.weight"
        values = generator.standard_normal(shape, np.float32) * (0.2 if len(shape) > 1 else 1)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_a_target(tmp_path, monkeypatch, capsys):
    """It is dequantized once, keeps its name, and a drafter that was trained on it finds it again."""
    gguf = pytest.importorskip("gguf")
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    _write_gguf(gguf, file, gguf.GGMLQuantizationType.Q8_0)
    spec = selfspec.load("prompt_lookup", target=str(file))
    said = capsys.readouterr().err
    assert "tiny.gguf is dequantized once" in said
    assert "splits text" not in said
    assert repr(spec).startswith(f"Spec(target={str(file)!r}, drafter=prompt_lookup, dtype=bfloat16")
    text = spec.generate([5, 6, 7], max_new_tokens=8)
    assert text.token_ids == spec.autoregressive([5, 6, 7], max_new_tokens=8).token_ids
    drafter = made("medusa", spec.target, heads=2, rank=4)
    save_drafter(drafter, tmp_path / "run" / "drafter", spec.target, str(file), None, "For tests.")
    monkeypatch.setattr(gguf, "GGUFReader", None)  # never read again
    assert repr(selfspec.load(str(tmp_path / "run"))).startswith(f"Spec(target={str(file)!r}, drafter=medusa")
    assert "dequantized" not in capsys.readouterr().err
    refused("is not a file", load_target, str(tmp_path / "missing.gguf"), error=FileNotFoundError)


def test_a_gguf_file_in_float16_keeps_its_digits(tmp_path, monkeypatch, capsys):
    gguf = pytest.importorskip("gguf")
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    _write_gguf(gguf, tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F16, pre="deepseek-coder")
    target, _ = load_target(str(tmp_path / "tiny.gguf"))
    assert target.dtype == torch.float32
    if hasattr(transformers, "GgufConfig"):  # else the architecture says how texts are split
        assert "tokenizers of the form 'deepseek-coder' and splits text as GPT-2's do" in capsys.readouterr().err


def test_a_gguf_file_that_is_read_in_part_is_refused(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    kind = gguf.GGMLQuantizationType.Q8_0
    _write_gguf(gguf, tmp_path / "part.gguf", kind, left_out="blk.1.")
    refused(r"no weights for model\.layers\.1\..*merge the parts", load_target, str(tmp_path / "part.gguf"))
    unlike = {"factors": range(1, 9)}, {"rope_scaling_type": gguf.RopeScalingType.YARN, "rope_scaling_factor": 4.0}
    for i, setting in enumerate(unlike):
        _write_gguf(gguf, tmp_path / f"{i}.gguf", kind, **setting)
        refused(r"scales positions by (rope_freqs|qwen2\.rope\.scaling)", load_target, str(tmp_path / f"{i}.gguf"))
    for name, setting in {
        "tensors, of which 64 numbers are left over": {"bias": True},
        "qwen2.rope.dimension_count=8": {"rope_dimension_count": 8},
        "qwen2.attention.sliding_window=32": {"sliding_window": 32},
    }.items():
        _write_gguf(gguf, tmp_path / f"{name}.gguf", kind, **setting)
        message = f"transformers does not read its {name}; take the model's folder"
        refused(message, load_target, str(tmp_path / f"{name}.gguf"))
    settings = {"rope_freq_base": 5e4, "rope_dimension_count": 16, "eot_token_id": 94}
    _write_gguf(gguf, tmp_path / "plain.gguf", kind, factors=[1.0] * 8, **settings)
    plain, _ = load_target(str(tmp_path / "plain.gguf"))
    assert plain.model.config.rope_parameters["rope_theta"] == 5e4
    assert plain.end_tokens == {94, 95}


def test_a_gguf_file_of_llama_3_begins_texts_as_llama_cpp_does(tmp_path, monkeypatch):
    """Its files seldom say that a text begins with a BOS token."""
    gguf = pytest.importorskip("gguf")
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    said, kind = {"add_bos_token": False}, gguf.GGMLQuantizationType.Q8_0
    for name, setting, begins in (("bos", {}, [94]), ("none", said, [])):
        _write_gguf(gguf, tmp_path / f"{name}.gguf", kind, arch="llama", pre="llama-bpe", **setting)
        tokenizer = load_target(str(tmp_path / f"{name}.gguf"))[1]
        assert tokenizer('!"#')["input_ids"] == [*begins, 93, 2]
        assert tokenizer.backend_tokenizer.model.ignore_merges


def test_a_gguf_file_scales_positions(tmp_path, monkeypatch):
    """As llama.cpp divides rotary frequencies: by a table, as of Llama 3, or by one number."""
    gguf = pytest.importorskip("gguf")
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    kind, base = gguf.GGMLQuantizationType.Q8_0, 5e5
    plain = base ** -(torch.arange(8) / 8)
    waves = 2 * torch.pi / plain
    share = ((8192 / waves - 1) / 3).clamp(0, 1)  # of a frequency that stays, by how often it turns in 8192 positions
    llama3 = 1 / ((1 - share) / 32 + share)
    linear = {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": 4.0}
    for name, divisors, setting in (("llama3", llama3, {"factors": llama3}), ("linear", torch.tensor(4.0), linear)):
        _write_gguf(gguf, tmp_path / f"{name}.gguf", kind, rope_freq_base=base, **setting)
        model = load_target(str(tmp_path / f"{name}.gguf"))[0].model
        assert model.config.rope_parameters["rope_type"] == name
        torch.testing.assert_close(model.model.rotary_emb.inv_freq, plain / divisors, rtol=1e-5, atol=0)
    none = {**linear, "rope_scaling_type": gguf.RopeScalingType.NONE}
    _write_gguf(gguf, tmp_path / "none.gguf", kind, rope_freq_base=base, **none)
    model = load_target(str(tmp_path / "none.gguf"))[0].model
    assert model.config.rope_parameters["rope_type"] == "default"
    gemma = tiny_model("gemma3_text", torch.float32)
    before = gemma.model.rotary_emb
    assert not _scale_positions(gemma, [8.0, 1.0, 1.0, 1.0])
    assert _scale_positions(gemma, 8.0)
    after = type(before)(gemma.config)
    torch.testing.assert_close(after.full_attention_inv_freq, before.full_attention_inv_freq / 8)
    assert after.sliding_attention_inv_freq.equal(before.sliding_attention_inv_freq)


def test_a_gguf_file_that_is_damaged_or_has_no_room(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF and nothing else")
    refused(r"target '.*tiny.gguf' is damaged, cut off or in a form", load_target, str(file))
    assert not list((tmp_path / "cache" / "targets").iterdir())
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 0, 0))
    refused(r"0 MB are free in .*, tiny.gguf needs", load_target, str(file))
