"""EAGLE-3 draft models as serving engines read them: the plain form (vLLM, SGLang, TensorRT-LLM) and vLLM's own
speculators form.

Which of the target's states are read is written twice, since readers differ: `eagle_aux_hidden_state_layer_ids` at the
top counts states from the embeddings on (v: the state after v layers; vLLM), the list inside `eagle_config` counts
layers (v - 1; SGLang, SpecForge, ModelOpt).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from selfspec.checkpoints.formats.files import Contract, hold, number, read_config, read_tensors, write_files
from selfspec.core.target import Target
from selfspec.drafters.eagle3 import Eagle3, Eagle3Config
from selfspec.drafters.parts.llama_config import own_settings
from selfspec.utils.files import Figures

IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_MAPS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")


def write(drafter: Eagle3, target: Target, folder: Path, form: str, target_name: str) -> None:
    """Write config.json and model.safetensors. form: plain or speculators; target_name: where engines find the target.

    What is written is in the target's saved dtype; embeddings are left out, and lm_head where it is the target's.
    """
    dtype = target.saved_dtype
    state = {name.removeprefix("layer."): p.detach().to(dtype) for name, p in drafter.trained().items()}
    vocabulary = drafter.vocabulary
    if vocabulary is not None:
        ids = vocabulary.cpu()
        if "lm_head.weight" not in state:
            state["lm_head.weight"] = drafter.head.weight.detach()[vocabulary].to(dtype)
        state["d2t"] = ids - torch.arange(len(ids))
        state["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    config = _config(drafter, target, None if "d2t" not in state else len(state["d2t"]), dtype)
    if form == "speculators":
        config = _speculators(config, target, target_name, drafter.depth)
    write_files(folder, config, state)


def _config(drafter: Eagle3, target: Target, few: int | None, dtype: torch.dtype) -> Figures:
    llama, config = drafter.layer.config, drafter.config
    rope: dict[str, Any] = {**(llama.rope_parameters or {})}
    scaled = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": llama.hidden_size,
        "intermediate_size": llama.intermediate_size,
        "num_attention_heads": llama.num_attention_heads,
        "num_key_value_heads": llama.num_key_value_heads,
        "head_dim": llama.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": llama.rms_norm_eps,
        "max_position_embeddings": llama.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": few,  # null, but present: SGLang then takes the target's lm_head
        "tie_word_embeddings": False,
        "attention_bias": llama.attention_bias,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "rope_theta": rope.get("rope_theta"),  # beside rope_parameters: readers of older transformers
        "rope_scaling": None if scaled.get("rope_type", "default") == "default" else scaled,
        "rope_parameters": rope,
        "num_aux_hidden_states": len(drafter.reads),
        **{name: getattr(config, name) for name in FLAGS},
        IDS: [layer + 1 for layer in drafter.reads],
        "eagle_config": {"use_aux_hidden_state": True, IDS: list(drafter.reads)},
    }


def _speculators(plain: Figures, target: Target, target_name: str, depth: int) -> Figures:
    outer = ("architectures", "draft_vocab_size", "tie_word_embeddings", "rope_theta", "rope_scaling", "eagle_config")
    inner = [name for name in plain if name not in (*outer, *FLAGS, IDS)]
    steps = {"proposal_type": "greedy", "speculative_tokens": depth}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": plain["draft_vocab_size"] or plain["vocab_size"],
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "torch_dtype": plain["torch_dtype"],
        **{name: plain[name] for name in FLAGS},
        IDS: plain[IDS],
        "transformer_layer_config": {name: plain[name] for name in inner},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [steps],
            "verifier": {"name_or_path": target_name, "architectures": target.model.config.architectures},
        },
    }


def flat(config: Figures) -> Figures:
    """A config of either form as the plain one; what readers take for missing keys is filled in."""
    if "speculators_model_type" not in config:
        return {**dict.fromkeys(FLAGS, False), **config}
    inner = config.get("transformer_layer_config")
    if config["speculators_model_type"] != "eagle3" or not isinstance(inner, dict):
        raise ValueError(
            f"speculators_model_type={config['speculators_model_type']!r}: only eagle3 with a transformer_layer_config "
            "can be read"
        )
    outer = {name: config[name] for name in (*FLAGS, IDS, "draft_vocab_size") if name in config}
    return {**dict.fromkeys(FLAGS, False), "norm_before_residual": True, **inner, **outer}


def layers_read(config: Figures, layers: int, folder: Path) -> list[int]:
    """The layers whose outputs a draft model reads, from a flat config for a target of so many layers.

    Raises ValueError for lists that contradict each other, are not ascending, or name a layer there is not.
    """
    nested, states = (config.get("eagle_config") or {}).get(IDS), config.get(IDS)
    for found in (nested, states):
        if found is not None and not (isinstance(found, list) and all(isinstance(v, int) for v in found)):
            raise ValueError(f"{folder}/config.json: {IDS}={found!r} must be a list of whole numbers")
    if states is None:
        states = [2, layers // 2, layers - 3] if nested is None else [layer + 1 for layer in nested]
    elif nested is not None and [layer + 1 for layer in nested] != states:
        raise ValueError(
            f"{folder}/config.json: {IDS} is {states} and inside eagle_config {nested}; the first counts states from "
            "the embeddings on, the second layers, so it must be one less throughout: vLLM and SGLang would read "
            "different states"
        )
    if sorted(set(states)) != list(states) or not all(1 <= v <= layers for v in states):
        raise ValueError(
            f"{folder}/config.json: {IDS}={states} must be ascending numbers from 1 to {layers}, the target's layers"
        )
    return [v - 1 for v in states]


def contract(config: Figures, aux: int, head: bool, folder: Path) -> Contract:
    """Names, shapes and dtypes of a draft model's tensors, from its flat config. head: whether lm_head is its own."""
    H, inner, heads, keys, width, V = (
        number(config, name, folder)
        for name in (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        )
    )  # fmt: skip
    few = config.get("draft_vocab_size") or V
    shapes: dict[str, list[int]] = {
        "fc.weight": [H, aux * H],
        "midlayer.self_attn.q_proj.weight": [heads * width, 2 * H],
        "midlayer.self_attn.k_proj.weight": [keys * width, 2 * H],
        "midlayer.self_attn.v_proj.weight": [keys * width, 2 * H],
        "midlayer.self_attn.o_proj.weight": [H, heads * width],
        "midlayer.mlp.gate_proj.weight": [inner, H],
        "midlayer.mlp.up_proj.weight": [inner, H],
        "midlayer.mlp.down_proj.weight": [H, inner],
        "midlayer.hidden_norm.weight": [H],
        "midlayer.input_layernorm.weight": [H],
        "midlayer.post_attention_layernorm.weight": [H],
        "norm.weight": [H],
    }
    if config.get("attention_bias"):
        shapes |= {f"midlayer.{name}.bias": shapes[f"midlayer.{name}.weight"][:1] for name in _MAPS}
    if config["norm_before_fc"]:
        shapes["input_norm.weight"] = [aux * H]
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": [H] for i in range(aux)}
    if head or few < V:
        shapes["lm_head.weight"] = [few, H]
    shapes_wanted: Contract = {name: (shape, None) for name, shape in shapes.items()}
    if few < V:
        shapes_wanted |= {"d2t": ([few], torch.int64), "t2d": ([V], torch.bool)}
    return shapes_wanted


def read(folder: Path, target: Target) -> Eagle3:
    """The draft model of a folder as a drafter, in either form, with `midlayer.` or `layers.0.` names. It is not
    calibrated: train/heads.py with drafter=eagle3 and train.init_from does that.

    Raises ValueError for what is not one EAGLE-3 layer on this target: other layers, sizes, activations or keys.
    """
    config, path = flat(read_config(folder)), folder / "model.safetensors"
    tensors = {_plain(name): t for name, t in read_tensors(path).items()}
    for name, wanted in {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}.items():
        if config.get(name) != wanted:
            raise ValueError(f"{folder}/config.json: {name} is {config.get(name)}, the target's is {wanted}")
    for name in FLAGS:
        if not isinstance(config[name], bool):
            raise ValueError(f"{folder}/config.json: {name}={config[name]!r} must be true or false")
    few = config.get("draft_vocab_size") or target.vocab_size
    if not isinstance(few, int) or not 0 < few <= target.vocab_size:
        raise ValueError(
            f"{folder}/config.json: draft_vocab_size={few!r} must lie between 1 and {target.vocab_size}, or be null"
        )
    if config.get("num_hidden_layers", 1) != 1 or config.get("hidden_act", "silu") != "silu":
        raise ValueError(
            f"{folder}/config.json: num_hidden_layers={config.get('num_hidden_layers')}, hidden_act="
            f"{config.get('hidden_act')!r}; one layer with silu can be read"
        )
    heads = number(config, "num_attention_heads", folder)  # Llama's own defaults, where a key is missing or null
    usual = {"head_dim": target.hidden_size // heads, "num_key_value_heads": heads, "rms_norm_eps": 1e-6}
    config |= {name: value for name, value in usual.items() if config.get(name) is None}
    layers = layers_read(config, target.n_layers, folder)
    embeddings = tensors.pop("embed_tokens.weight", None)
    theirs = target.model.get_input_embeddings().weight
    if embeddings is not None and not torch.equal(embeddings.to(theirs), theirs):
        raise ValueError(
            f"{path}: embed_tokens.weight differs from the target's; selfspec drafts with the target's own"
        )
    if "d2t" in tensors and "t2d" not in tensors:  # which engines ignore
        ids = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
        if not 0 <= int(ids.min()) <= int(ids.max()) < target.vocab_size:
            raise ValueError(
                f"{path}: d2t leads to tokens from {int(ids.min())} to {int(ids.max())}; it must hold each draft "
                f"token's distance to a token of the target, 0 to {target.vocab_size - 1}"
            )
        tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"].to(torch.int64)
    hold(tensors, contract(config, len(layers), "lm_head.weight" in tensors, folder), path)
    drafter_config = Eagle3Config(
        layers=layers,
        draft_vocab=few if few < target.vocab_size else None,
        head="own" if "lm_head.weight" in tensors else "shared",
        llama=own_settings(config),
        **{name: config[name] for name in FLAGS},
    )
    drafter = Eagle3(target, drafter_config)
    d2t = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    with torch.no_grad():
        parameters = drafter.trained()
        for name, tensor in tensors.items():
            parameters[f"layer.{name}"].copy_(tensor)
        if d2t is not None and drafter.vocabulary is not None:
            drafter.vocabulary.copy_(d2t + torch.arange(few))
    return drafter.eval()


def _plain(name: str) -> str:
    """A tensor's name without the prefixes that writers differ in."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name
