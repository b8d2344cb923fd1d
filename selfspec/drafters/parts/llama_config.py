"""The config of Llama layers that draft beside a target, checked."""

from __future__ import annotations

import math
from typing import Any

from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from selfspec.core.target import Target

# What of a Llama's config draft layers may have of its own; all else follows from the target
OWN = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "attention_bias",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
)
_WIDEST = 64  # times the target's hidden size that a layer is wide inside, at most
_ROPE_NUMBERS = (
    *("rope_theta", "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
)
_ROPES = ("default", "linear", "dynamic", "yarn", "llama3")  # that draft models of all engines can have


def own_settings(config: dict[str, Any]) -> dict[str, Any]:
    """What a draft model's config says of its layers, by the names of `drafter.llama`."""
    if config.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(
            f"partial_rotary_factor={config['partial_rotary_factor']} can not be read: all of a head turns"
        )
    settings = {name: config[name] for name in OWN if config.get(name) is not None}
    rope, scaling, theta = (config.get(name) for name in ("rope_parameters", "rope_scaling", "rope_theta"))
    scaling = {key: value for key, value in (scaling or {}).items() if value is not None}
    if (kind := scaling.pop("type", None)) is not None and scaling.setdefault("rope_type", kind) != kind:
        raise ValueError(f"rope_scaling has type={kind!r} and rope_type={scaling['rope_type']!r}; remove what is wrong")
    older = {**scaling, **({} if theta is None else {"rope_theta": theta})}
    stated = {key: value for key, value in (rope or older).items() if value is not None}
    rope = {"rope_type": "default", "rope_theta": theta or 10000.0, **stated}
    if odd := sorted(key for key in older if rope.get(key, older[key]) != older[key]):
        raise ValueError(
            f"rope_parameters={rope!r:.200} differ in {', '.join(odd)} from rope_scaling={scaling!r:.200} and "
            f"rope_theta={theta!r:.40}; engines read one or the other, so remove what is wrong"
        )
    return {**settings, "rope_parameters": rope}


def layer_config(target: Target, own: dict[str, Any], tokens: int) -> LlamaConfig:
    """The layer's config: the target's own numbers where `own` has no others. tokens: rows of its lm_head.

    Raises ValueError for a key that no layer has, and for numbers that make none.
    """
    if not isinstance(own, dict):
        raise ValueError(f"drafter.llama={own!r} must be a mapping with any of {', '.join(OWN)}")
    if unknown := sorted(own.keys() - set(OWN)):
        raise ValueError(f"drafter.llama has unknown keys {unknown}; there are {', '.join(OWN)}")
    theirs = target.model.config.get_text_config()
    heads = getattr(theirs, "num_attention_heads", 8)
    rope = getattr(theirs, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # of families whose layer types differ
    if rope.get("rope_type") not in _ROPES or "partial_rotary_factor" in rope:
        rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
    rope = own.get("rope_parameters") or rope
    if isinstance(rope, dict) and rope.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(f"drafter.llama.rope_parameters={rope!r}: partial_rotary_factor can not be read")
    if not isinstance(rope, dict) or rope.get("rope_type") not in _ROPES:
        raise ValueError(f"drafter.llama.rope_parameters={rope!r}: rope_type must be one of {', '.join(_ROPES)}")
    settings = {
        "intermediate_size": getattr(theirs, "intermediate_size", None) or 4 * target.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(theirs, "num_key_value_heads", None) or heads,
        "head_dim": getattr(theirs, "head_dim", None) or target.hidden_size // heads,
        "attention_bias": False,
        "rms_norm_eps": getattr(theirs, "rms_norm_eps", None) or 1e-6,
        "max_position_embeddings": target.max_positions or 2**20,
        **own,
        "rope_parameters": dict(rope),  # which transformers adds to
    }
    longest, reach = settings["max_position_embeddings"], target.max_positions or 2**31
    if rope.get("rope_type") == "dynamic" and type(longest) is int and longest < reach:
        raise ValueError(
            f"drafter.llama.max_position_embeddings={longest} with rope_type=dynamic: a text beyond it changes the "
            f"frequencies of all rows beside it; give the target's {reach}, or another rope_type"
        )
    usual = 0 if "intermediate_size" in own else settings["intermediate_size"]
    _check_numbers(settings, max(_WIDEST * target.hidden_size, usual))
    widths = {
        "embeddings": target.model.get_input_embeddings().weight.shape[-1],
        "lm_head": next(target.lm_head.parameters()).shape[-1],
    }
    if odd := [f"{name} {width}" for name, width in widths.items() if width != target.hidden_size]:
        raise ValueError(
            f"{type(target.model).__name__} has hidden states of {target.hidden_size} and {', '.join(odd)}; a draft "
            "layer reads and writes one width"
        )
    try:
        config = LlamaConfig(hidden_size=target.hidden_size, vocab_size=tokens, num_hidden_layers=1, **settings)
        LlamaRotaryEmbedding(config)
    except Exception as error:
        raise ValueError(f"drafter.llama={own} makes no layer: {' '.join(str(error).split())}") from error
    config._attn_implementation = "sdpa"
    return config


def _check_numbers(settings: dict[str, Any], widest: int) -> None:
    """Raises ValueError for numbers that make no layer, or one wider than `widest`."""
    sizes = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
    for name in sizes:
        most = 2**31 if name == "max_position_embeddings" else widest
        if type(settings[name]) is not int or not 1 <= settings[name] <= most:
            raise ValueError(f"drafter.llama.{name}={settings[name]!r:.200} must be a whole number from 1 to {most}")
    if settings["num_attention_heads"] * settings["head_dim"] > widest:
        raise ValueError(f"drafter.llama: heads of {settings['head_dim']} are wider together than {widest}")
    if settings["head_dim"] % 2:
        raise ValueError(f"drafter.llama.head_dim={settings['head_dim']} must be even: positions turn pairs of numbers")
    rope = {"rope_theta": None, **settings["rope_parameters"]}
    numbers = {name: rope[name] for name in _ROPE_NUMBERS if rope.get(name) is not None or name == "rope_theta"}
    for name, value in {"rms_norm_eps": settings["rms_norm_eps"], **numbers}.items():
        below = 1.0 if name == "rms_norm_eps" else math.inf
        none = value == 0 and name.startswith("mscale")  # which counts as absent
        if type(value) not in (int, float) or not (0 < value < below or none):
            raise ValueError(f"drafter.llama: {name}={value!r:.40} must be a number above 0, below {below:g}")
    if not isinstance(settings["attention_bias"], bool):
        raise ValueError(f"drafter.llama.attention_bias={settings['attention_bias']!r} must be true or false")
    if settings["num_attention_heads"] % settings["num_key_value_heads"]:
        raise ValueError(
            f"drafter.llama.num_key_value_heads={settings['num_key_value_heads']} must divide "
            f"num_attention_heads={settings['num_attention_heads']}"
        )
