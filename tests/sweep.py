"""Every causal LM of transformers, tiny and random: served as trees, as chains, or refused, and why.

    python tests/sweep.py          # one minute; writes the lists of docs/families.md
    python tests/sweep.py bloom    # prints the lines of these types

A family whose small config transformers itself can not run is left out, with the reason.
"""

import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from families import FAMILIES, MIXED, RECURRENT
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from selfspec.core.chains import ChainTarget
from selfspec.core.probe import served
from selfspec.utils.errors import one_line

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
VOCAB, LAYERS, LARGEST = 61, 2, 10**7
STATE = "with layers that keep a state"
# What makes a model small, by the names that configs give it.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "inner_dim", "d_ff", "ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_intermediate_size"), 24),
    **dict.fromkeys(("shared_intermediate_size", "dense_intermediate_size", "intermediate_size_mlp"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "context_length"), 128),
    **dict.fromkeys(("head_dim", "attention_head_dim", "d_kv", "kv_channels", "swa_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_list"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **{"q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
    **{"qk_head_dim": 16, "sliding_window": 16, "sliding_window_size": 16, "attention_window": 16, "window_size": 16},
    **{"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
    **{"state_size": 8, "ssm_state_size": 8, "time_step_rank": 4, "chunk_size": 8, "block_multiple_of": 8},
    **{"rotary_dim": 4, "lru_width": 32, "type_vocab_size": 1, "embedding_size": 32, "index_head_dim": 8},
    **{"index_n_heads": 2, "index_topk": 64, "d_rel": 8, "rel_extent": 32, "router_hidden_size": 16},
}
# Where that is not enough, by model type.
MORE: dict[str, dict[str, Any]] = dict(FAMILIES[name] for name in RECURRENT) | {
    "falcon": {"alibi": False, "new_decoder_architecture": False},
    "recurrent_gemma": {"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "xlstm": {"num_heads": 2, "num_blocks": 2, "qk_dim_factor": 0.5, "v_dim_factor": 1.0},
    "rwkv": {"attention_hidden_size": 32},
    "minimax": {"layer_types": MIXED, "num_key_value_heads": 4},
}


def tiny(kind: str) -> Any:
    """A tiny model of a type, in float64, or an exception."""
    known = AutoConfig.for_model(kind).to_dict()
    chosen = {name: value for name, value in SMALL.items() if name in known} | MORE.get(kind, {})
    if "kv_lora_rank" in known:  # latent attention has no groups
        chosen["num_key_value_heads"] = 4
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type"):
        if name not in chosen and isinstance(known.get(name), list):
            layers = chosen.get("num_hidden_layers", LAYERS)
            chosen[name] = sorted(set(known[name]), key=known[name].index)[:layers]
            chosen[name] += [chosen[name][-1]] * (layers - len(chosen[name]))
    try:
        config = AutoConfig.for_model(kind, **chosen)
    except Exception:  # a config that derives some of these itself
        dropped = ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type", "head_dim")
        config = AutoConfig.for_model(
            kind, **{n: v for n, v in chosen.items() if n not in dropped or n in MORE.get(kind, {})}
        )
    if (inner := config.get_text_config()) is not config:
        raise TypeError(f"a part of {type(config).__name__}; its text model is a type of its own ({inner.model_type})")
    config.is_decoder = True
    torch.manual_seed(0)
    error: Exception | None = None
    for settings in ({"attn_implementation": "sdpa"}, {"attn_implementation": "eager"}, {}):
        for experts in ({"experts_implementation": "eager"}, {}):
            try:
                with torch.device("meta"):
                    size = sum(
                        p.numel() for p in AutoModelForCausalLM.from_config(config, **settings, **experts).parameters()
                    )
                if size > LARGEST:
                    raise RuntimeError(f"{size / 1e6:.0f} million parameters: its config has sizes of other names")
                model = AutoModelForCausalLM.from_config(config, **settings, **experts)
                break
            except (ValueError, TypeError) as refused:
                error = refused
        else:
            continue
        break
    else:
        raise error
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "A_log" not in name:
                parameter.normal_(std=0.5 if "embed" in name or "wte" in name else 0.2)
    return model.double().eval()


def judged(kind: str) -> tuple[str, str]:
    """How a type is served, and why not better: trees, chains, refused, crash, or not run."""
    try:
        model = tiny(kind)
        with torch.no_grad():
            logits = model(input_ids=torch.arange(1, 9)[None]).logits
        assert bool(torch.isfinite(logits).all()), "logits that are no numbers"
    except Exception as error:
        return "not run", one_line(error)[:160]
    try:
        with redirect_stderr(StringIO()):
            target = served(model)
    except ValueError as error:
        return "refused", one_line(error)
    except Exception as error:
        return "crash", f"{type(error).__name__}: {one_line(error)}"
    if isinstance(target, ChainTarget):
        return "chains", target.why
    return "trees", STATE if target.recurrent else ""


def sweep(kinds: list[str]) -> Iterator[tuple[str, str, str]]:
    for kind in kinds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield (kind, *judged(kind))


def page(found: list[tuple[str, str, str]]) -> str:
    """The lists of docs/families.md."""

    def named(how: str, why: str | None = None) -> list[str]:
        return [kind for kind, way, reason in found if way == how and why in (None, reason)]

    def rows(how: str) -> list[str]:
        return [f"| `{kind}` | {reason.replace('|', '/')} |" for kind, way, reason in found if way == how]

    stateful = named("trees", STATE)
    plain = [kind for kind in named("trees") if kind not in stateful]
    lists = [
        f"**Trees over attention**, {len(plain)} types: {', '.join(plain)}.",
        f"**Trees over layers that keep a state**, {len(stateful)} types: {', '.join(stateful)}.",
        f"**Chains**, {len(named('chains'))} types:",
        "\n".join(["| type | why no tree |", "|---|---|", *rows("chains")]),
        f"**Refused**, {len(named('refused'))} types:",
        "\n".join(["| type | why |", "|---|---|", *rows("refused")]),
    ]
    if crashed := rows("crash"):
        lists.append("\n".join(["**Crashed:**", "", "| type | how |", "|---|---|", *crashed]))
    outside = named("not run")
    lists.append(
        f"**Not tried**, {len(outside)} types that the small config of `tests/sweep.py` does not fit, or that are "
        f"parts of models for pictures and sound: {', '.join(outside)}."
    )
    return "\n\n".join(lists)


if __name__ == "__main__":
    asked = sys.argv[1:]
    found = []
    for line in sweep(asked or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
        print(*line, sep=" | ", flush=True)
        found.append(line)
    if not asked:
        before, rest = PAGE.read_text().split("<!-- sweep -->")
        wrapped = [
            part if part.startswith("|") else textwrap.fill(part, 120, break_on_hyphens=False)
            for part in page(found).split("\n\n")
        ]
        lists = "\n\n".join(wrapped)
        after = rest.split("<!-- end of sweep -->")[1]
        PAGE.write_text(f"{before}<!-- sweep -->\n\n{lists}\n\n<!-- end of sweep -->{after}")
