"""The model families that the tests serve losslessly: one row each, tiny and random. docs/families.md
lists them from here.

`python tests/families.py` prints that list.
"""

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
MIXED = ["linear_attention", "full_attention"]
DELTA = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"head_dim": 8, "layer_types": MIXED},
}
KDA = {**MLA, **MOE, "layer_types": MIXED, "head_dim": 8, "linear_num_heads": 4, "linear_head_dim": 8}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
DEEP = {"num_hidden_layers": 4, "tie_word_embeddings": False}
MAMBA1 = {"mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
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
    "Gemma 2 (alternating windows, soft-capping)": ("gemma2", {"head_dim": 8, **ALTERNATING,
        "final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0}),
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
    "Qwen3-Next": ("qwen3_next", {**DELTA, **MOE, "shared_expert_intermediate_size": 24}),
    "Qwen3.5": ("qwen3_5_text", DELTA),
    "Qwen3.5-MoE": ("qwen3_5_moe_text", {**DELTA, **MOE, "shared_expert_intermediate_size": 24}),
    "OLMo-hybrid": ("olmo_hybrid", DELTA),
    "Kimi Linear (MLA)": ("kimi_linear", KDA),
    "Bailing-hybrid": ("bailing_hybrid", KDA),
    "Mamba2": ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8}),
    "Bamba": ("bamba", {**MAMBA2, "attn_layer_indices": [1]}),
    "Falcon-H1": ("falcon_h1", {**MAMBA2, "mamba_d_ssm": 64}),
    "Granite 4 (hybrid)": ("granitemoehybrid", {**MAMBA2, "layer_types": ["mamba", "attention"], "num_local_experts": 0,
        "shared_intermediate_size": 32}),
    "Nemotron-H": ("nemotron_h", {**{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2,
        "expand": 2}, **{"chunk_size": 8, "layers_block_type": ["mamba", "attention", "mlp"], "time_step_min": 1e-30}}),
    "Zamba2": ("zamba2", {**{"mamba_d_state": 8, "mamba_ngroups": 2, "n_mamba_heads": 8, "mamba_headdim": 8,
        "chunk_size": 8}, **{"layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "time_step_min": 1e-30}}),
    "LFM2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    "LFM2-MoE": ("lfm2_moe", {**MOE, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "LFM3": ("lfm3", {"layer_types": ["conv", "sliding_attention", "full_attention"], "num_hidden_layers": 3,
        "sliding_window": 6}),
    "Lara-mini": ("lara_mini", {**DELTA, **MOE, "num_hidden_layers": 3, "layer_types": ["linear_attention",
        "sliding_attention", "full_attention"], "shared_expert_intermediate_size": 24, "sliding_window": 6}),
    "Mamba": ("mamba", {"state_size": 8, "time_step_rank": 4}),
    "Falcon-Mamba": ("falcon_mamba", {"state_size": 8, "time_step_rank": 4}),
    "Jamba": ("jamba", {**MAMBA1, "num_experts": 2, "num_experts_per_tok": 1}),
    "Zamba": ("zamba", {**MAMBA1, "n_mamba_heads": 2, "attention_head_dim": 16, **DEEP}),
}  # fmt: skip
RECURRENT = tuple(FAMILIES)[tuple(FAMILIES).index("Qwen3-Next") :]  # with layers that keep a state
NO_ATTENTION = ("mamba2", "mamba", "falcon_mamba")
_GPT_LIKE = ("gpt2", "gptj", "codegen", "gpt_bigcode")
EAGER_ONLY = ("mimo_v2_flash", "gpt_oss", "gemma2", "gptj", "codegen")  # transformers has no sdpa for these


def build(
    name: str, attention: str | None = None, dtype: torch.dtype = torch.float64, **changes: Any
) -> PreTrainedModel:
    """A tiny model of the family, its random weights large enough that logits differ clearly."""
    kind, settings = FAMILIES[name]
    config = AutoConfig.for_model(kind, **{**(GPT if kind in _GPT_LIKE else SHARED), **settings, **changes})
    torch.manual_seed(0)
    attention = attention or ("eager" if kind in EAGER_ONLY else "sdpa")
    kernels = {} if kind in NO_ATTENTION else {"attn_implementation": attention}
    # The experts' default, a grouped product, knows no float64.
    experts = {"experts_implementation": "eager"} if settings.get("num_experts_per_tok") else {}
    model = AutoModelForCausalLM.from_config(config, **kernels, **experts)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5 if "embed" in key or "wte" in key else 0.2)
    return model.to(dtype).eval()


def listing() -> str:
    return f"{len(FAMILIES)} families: " + ", ".join(FAMILIES)


if __name__ == "__main__":
    print(listing())
