"""The model families that the tests serve losslessly: one row each, tiny and random. notebooks/results/families.md
lists them from here.

`python tests/families.py` prints that list.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 61
SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GPT: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}
WINDOW = 6  # shorter than the text
MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

# name as readers know it: (model_type, settings beside SHARED or GPT)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Mistral (sliding window)": ("mistral", {"sliding_window": WINDOW}),
    "Mixtral": ("mixtral", {**MOE}),
    "Ministral": ("ministral", {"head_dim": 8, **ALTERNATING}),
    "Qwen2": ("qwen2", {}),
    "Qwen2-MoE": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 24}),
    "Qwen3": ("qwen3", {"head_dim": 8}),
    "Qwen3-MoE": ("qwen3_moe", {**MOE, "head_dim": 8}),
    "Gemma": ("gemma", {"head_dim": 8}),
    "Gemma 2 (alternating windows, soft-capping)": (
        "gemma2",
        {"head_dim": 8, **ALTERNATING, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0},
    ),
    "Gemma 3 (alternating windows)": ("gemma3_text", {"head_dim": 8, **ALTERNATING}),
    "Phi": ("phi", {}),
    "Phi-3": ("phi3", {}),
    "OLMo": ("olmo", {}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3 (alternating windows)": ("olmo3", {**ALTERNATING}),
    "OLMoE": ("olmoe", {**MOE}),
    "GPT-2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "GPT-NeoX": ("gpt_neox", {}),
    "GPT-J": ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4}),
    "CodeGen": ("codegen", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4}),
    "GPT-BigCode": ("gpt_bigcode", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "Falcon": ("falcon", {"alibi": False, "new_decoder_architecture": False, "num_kv_heads": 4}),
    "OPT": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "StarCoder2": ("starcoder2", {}),
    "StableLM": ("stablelm", {}),
    "Cohere": ("cohere", {}),
    "Cohere2 (alternating windows)": ("cohere2", {**ALTERNATING}),
    "Granite": ("granite", {}),
    "GraniteMoE": ("granitemoe", {**MOE}),
    "Nemotron": ("nemotron", {}),
    "DeepSeek-V2 (MLA)": ("deepseek_v2", {**MLA, "topk_method": "greedy"}),
    "DeepSeek-V3 (MLA)": ("deepseek_v3", {**MLA}),
    "GLM": ("glm", {"head_dim": 8}),
    "GLM-4": ("glm4", {"head_dim": 8}),
    "SmolLM3": ("smollm3", {}),
    "gpt-oss (attention sinks)": ("gpt_oss", {**MOE, "head_dim": 8, **ALTERNATING}),
    "EXAONE 4": ("exaone4", {**ALTERNATING}),
    "ERNIE 4.5": ("ernie4_5", {}),
    "Seed-OSS": ("seed_oss", {"head_dim": 8}),
    "Helium": ("helium", {"head_dim": 8}),
    "Apertus": ("apertus", {}),
    "Arcee": ("arcee", {}),
    "HunYuan": ("hunyuan_v1_dense", {"head_dim": 8}),
}
_GPT_LIKE = ("gpt2", "gptj", "codegen", "gpt_bigcode")
EAGER_ONLY = ("gpt_oss", "gemma2", "gptj", "codegen")  # transformers has no sdpa for these


def build(
    name: str, attention: str | None = None, dtype: torch.dtype = torch.float64, **changes: Any
) -> PreTrainedModel:
    """A tiny model of the family, its random weights large enough that logits differ clearly."""
    kind, settings = FAMILIES[name]
    config = AutoConfig.for_model(kind, **{**(GPT if kind in _GPT_LIKE else SHARED), **settings, **changes})
    torch.manual_seed(0)
    attention = attention or ("eager" if kind in EAGER_ONLY else "sdpa")
    # The experts' default, a grouped product, knows no float64.
    experts = {"experts_implementation": "eager"} if "num_experts_per_tok" in settings else {}
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, **experts)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5 if "embed" in key or "wte" in key else 0.2)
    return model.to(dtype).eval()


def listing() -> str:
    return f"{len(FAMILIES)} families: " + ", ".join(FAMILIES)


if __name__ == "__main__":
    print(listing())
