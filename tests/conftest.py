"""Tiny random targets, built from config; nothing is downloaded."""

from __future__ import annotations

import os

os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

from selfspec.target import Target

torch.set_num_threads(2)

VOCAB, HIDDEN = 61, 32


def tiny_config(family: str, **changes: object) -> object:
    if family == "gpt2":
        settings = {"n_embd": HIDDEN, "n_layer": 3, "n_head": 4, "n_positions": 256}
        return GPT2Config(vocab_size=VOCAB, bos_token_id=0, eos_token_id=0, **{**settings, **changes})
    settings = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    settings |= {"num_key_value_heads": 2, "max_position_embeddings": 256}
    return LlamaConfig(vocab_size=VOCAB, bos_token_id=0, eos_token_id=0, **{**settings, **changes})


def tiny_model(family: str = "llama", dtype: torch.dtype = torch.float64, **changes: object) -> PreTrainedModel:
    """Random weights, large enough that logits differ clearly."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2 if "embed" not in name and "wte" not in name else 0.5)
    return model.to(dtype).eval()


@pytest.fixture(scope="session", params=["llama", "gpt2"])
def target(request: pytest.FixtureRequest) -> Target:
    return Target(tiny_model(request.param))


@pytest.fixture(scope="session")
def llama() -> Target:
    return Target(tiny_model())
