"""EAGLE-3 and P-EAGLE draft models as serving engines read them: the plain form (vLLM, SGLang, TensorRT-LLM) and
vLLM's own speculators form.

Which of the target's states are read is written twice, since readers differ: `eagle_aux_hidden_state_layer_ids` at the
top counts states from the embeddings on (v: the state after v layers; vLLM), the list inside `eagle_config` counts
layers (v - 1; SGLang, SpecForge, ModelOpt).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from selfspec.checkpoints.formats import files
from selfspec.core.target import Target
from selfspec.drafters.eagle3 import Eagle3, Eagle3Config
from selfspec.drafters.parts.llama_config import own_settings
from selfspec.utils.files import Figures

_MOST = 64  # layers, and depths of a tree
IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
MASK, _MASK_TOKENS = "mask_hidden", ("mask_token_id", "pard_token", "ptd_token_id")  # of P-EAGLE
DEPTH = "speculative_tokens"  # of a tree; the plain form has no such key, so it is ours there
EMBEDDINGS, _QUERY_NORM = "embedding", "midlayer.self_attn.q_norm.weight"


def write(drafter: Eagle3, target: Target, folder: Path, form: str, target_name: str) -> None:
    """Write config.json and model.safetensors. form: plain or speculators; target_name: where engines find the target.

    What is written is in the target's saved dtype; embeddings and lm_head are left out where they are the target's.
    """
    dtype = target.saved_dtype
    shared = form == "plain" and not drafter.config.parallel and not drafter.config.qk_norm
    first = "midlayer" if shared else "layers.0"  # SGLang knows the one, speculators the other, vLLM both
    state = {_theirs(name, first): p.detach().to(dtype) for name, p in drafter.trained().items()}
    if drafter.config.parallel:
        state[MASK] = state[MASK].view(1, 1, -1)
    vocabulary = drafter.vocabulary
    if vocabulary is not None:
        ids = vocabulary.cpu()
        if "lm_head.weight" not in state:
            state["lm_head.weight"] = drafter.head.weight.detach()[vocabulary].to(dtype)
        state["d2t"] = ids - torch.arange(len(ids))
        state["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    config = _config(drafter, target, None if "d2t" not in state else len(state["d2t"]))
    if form == "speculators":
        config = _speculators(config, target, target_name, drafter.depth)
    files.write_files(folder, config, state)


def _config(drafter: Eagle3, target: Target, few: int | None) -> Figures:
    llama, config = drafter.layer.config, drafter.config
    scaled = {key: value for key, value in (llama.rope_parameters or {}).items() if key != "rope_theta"}
    return {
        "architectures": ["Eagle3Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        **files.llama_keys(target, llama, config.stack),
        "draft_vocab_size": few,  # null, but present: SGLang then takes the target's lm_head
        "rope_scaling": None if scaled.get("rope_type", "default") == "default" else scaled,
        "num_aux_hidden_states": len(drafter.reads),
        **{name: getattr(config, name) for name in FLAGS},
        IDS: [layer + 1 for layer in drafter.reads],
        "eagle_config": {"use_aux_hidden_state": True, IDS: list(drafter.reads)},
        **({**dict.fromkeys(_MASK_TOKENS, drafter.layer.mask_token), DEPTH: drafter.depth} if config.parallel else {}),
    }


def _speculators(plain: Figures, target: Target, target_name: str, depth: int) -> Figures:
    outer = ("architectures", "draft_vocab_size", "tie_word_embeddings", "rope_theta", "rope_scaling", "eagle_config")
    parallel = "mask_token_id" in plain
    kind = "peagle" if parallel else "eagle3"
    inner = [name for name in plain if name not in (*outer, *FLAGS, *_MASK_TOKENS, DEPTH, IDS)]
    architectures = target.model.config.architectures or [type(target.model).__name__]
    steps = {"proposal_type": "greedy", DEPTH: depth}
    return {
        "architectures": ["PEagleSpeculator" if parallel else "Eagle3Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "draft_vocab_size": plain["draft_vocab_size"] or plain["vocab_size"],
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "torch_dtype": plain["torch_dtype"],
        **{name: plain[name] for name in FLAGS},
        IDS: plain[IDS],
        **({"mask_token_id": plain["mask_token_id"]} if parallel else {}),
        "transformer_layer_config": {name: plain[name] for name in inner},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [steps],
            "verifier": {"name_or_path": target_name, "architectures": architectures},
        },
    }


def flat(config: Figures) -> Figures:
    """A config of either form as the plain one; what readers take for missing keys is filled in."""
    if "speculators_model_type" not in config:
        return {**dict.fromkeys(FLAGS, False), **config}
    inner = config.get("transformer_layer_config")
    kind = config["speculators_model_type"]
    if kind not in ("eagle3", "peagle") or not isinstance(inner, dict):
        raise ValueError(
            f"speculators_model_type={kind!r}: only eagle3 and peagle with a transformer_layer_config can be read"
        )
    keys = (*FLAGS, *_MASK_TOKENS, IDS, "draft_vocab_size", "target_hidden_size")
    outer = {name: config[name] for name in keys if name in config}
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    usual = {"norm_before_residual": kind == "eagle3", DEPTH: methods[0].get(DEPTH)}
    return {**dict.fromkeys(FLAGS, False), **usual, **inner, **outer}


def layers_read(config: Figures, layers: int, folder: Path) -> list[int]:
    """The layers whose outputs a draft model reads, from a flat config for a target of so many layers.

    Raises ValueError for lists that contradict each other, are not ascending, or name a layer there is not.
    """
    ours = config.get("eagle_config") or {}
    if ours.get("use_aux_hidden_state") not in (None, True):
        raise ValueError(
            f"{folder}/config.json: use_aux_hidden_state={ours['use_aux_hidden_state']!r} can not be read; an EAGLE-3 "
            "layer reads such states"
        )
    nested, states = (None if part.get(IDS) == [] else part.get(IDS) for part in (ours, config))  # as engines read it
    for found in (nested, states):
        if found is not None and not (isinstance(found, list) and all(type(v) is int for v in found)):
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


def read(folder: Path, target: Target) -> Eagle3:
    """The draft model of a folder as a drafter, in either form, with `midlayer.` or `layers.0.` names: P-EAGLE's where
    it holds `mask_hidden`. It is not calibrated: `selfspec calibrate` does that.

    Raises ValueError for what is no EAGLE-3 layer on this target: other layers, sizes, activations or keys.
    """
    config, (found, path) = flat(files.read_config(folder)), files.read_weights(folder)
    tensors = {
        name: t for name, t in files.renamed(found, _ours, path).items() if not name.endswith("rotary_emb.inv_freq")
    }
    parallel = MASK in tensors
    if not parallel and any(config.get(name) is not None for name in _MASK_TOKENS):
        raise ValueError(
            f"{path}: {MASK} is missing, and {folder}/config.json names a mask token; copy the folder again"
        )
    _check_values(config, folder)
    few = files.settle(config, tensors, target, folder)
    layers = layers_read(config, target.n_layers, folder)
    files.check_read(config, {"num_aux_hidden_states": len(layers), "logit_scale": 1}, folder)
    files.check_fits(config, {"target_hidden_size": target.hidden_size}, folder)
    theirs = target.model.get_input_embeddings().weight
    if EMBEDDINGS in tensors and torch.equal(tensors[EMBEDDINGS].to(theirs), theirs):
        del tensors[EMBEDDINGS]  # a copy
    alone = "t2d" not in tensors
    ids = files.vocabulary(tensors, few, target, path)
    if ids is not None and alone and torch.equal(ids, torch.arange(few)):  # a choice of tokens, which is never these
        raise files.unwritten(few, target.vocab_size, path)
    if ids is not None and "lm_head.weight" not in tensors:
        raise ValueError(f"{path}: missing tensors ['lm_head.weight'], of a draft vocabulary of {few} tokens")
    settings: dict[str, Any] = {
        "layers": layers,
        "draft_vocab": None if ids is None else few,
        "head": "own" if "lm_head.weight" in tensors else "shared",
        "embeddings": "own" if EMBEDDINGS in tensors else "shared",
        "qk_norm": _QUERY_NORM in tensors,
        "stack": config.get("num_hidden_layers", 1),
        "llama": own_settings(config),
        **{name: config[name] for name in FLAGS},
    }
    if parallel:
        settings |= {"parallel": True, "mask_token": _mask_token(config, target, folder)}
        settings |= {"depth": config.get(DEPTH) or Eagle3Config.depth, "unroll": 1}
        tensors[MASK] = tensors[MASK].flatten()
    drafter = Eagle3(target, Eagle3Config(**settings))
    if ids is not None:
        drafter.drafts_only(ids)
    files.fill({name.removeprefix("layer."): part for name, part in drafter.trained().items()}, tensors, path)
    return drafter.eval()


def _check_values(config: Figures, folder: Path) -> None:
    """Raises ValueError for values of a flat config that no EAGLE-3 layer here can have."""
    for name in FLAGS:
        if not isinstance(config[name], bool):
            raise ValueError(f"{folder}/config.json: {name}={config[name]!r} must be true or false")
    stack, act = config.get("num_hidden_layers", 1), config.get("hidden_act", "silu")
    if type(stack) is not int or not 1 <= stack <= _MOST or act != "silu":
        raise ValueError(
            f"{folder}/config.json: num_hidden_layers={stack!r}, hidden_act={act!r}; 1 to {_MOST} layers with silu can "
            "be read"
        )
    depth = config.get(DEPTH)
    if depth is not None and (type(depth) is not int or not 1 <= depth <= _MOST):
        raise ValueError(f"{folder}/config.json: {DEPTH}={depth!r} must be a whole number from 1 to {_MOST}")
    kinds = config.get("layer_types")
    slides = config.get("use_sliding_window") or (
        config.get("model_type") == "mistral" and config.get("sliding_window")
    )
    if kinds not in (None, ["full_attention"] * stack) or (kinds is None and slides):
        raise ValueError(
            f"{folder}/config.json: layer_types={kinds!r} can not be read; full_attention can, without a window"
        )


def _mask_token(config: Figures, target: Target, folder: Path) -> int:
    """The token that masks are embedded as. Raises ValueError for one that does not exist."""
    tokens = {name: config[name] for name in _MASK_TOKENS if config.get(name) is not None}
    token = next(iter(tokens.values()), None)
    if any(other != token for other in tokens.values()):
        raise ValueError(
            f"{folder}/config.json: {tokens} are different tokens; engines read any of them: remove others"
        )
    if type(token) is not int or not 0 <= token < target.vocab_size:
        raise ValueError(
            f"{folder}/config.json: mask_token_id={token!r} must be a token of the target, 0 to {target.vocab_size - 1}"
        )
    return token


def _ours(name: str) -> str:
    """A tensor's name as the drafter has it, without the prefixes that writers differ in."""
    name = name.removeprefix("model.")
    if found := re.match(r"layers\.(\d+)\.(.*)", name):
        layer = int(found[1])
        return f"midlayer.{found[2]}" if layer == 0 else f"further.{layer - 1}.{found[2]}"
    return EMBEDDINGS if name == "embed_tokens.weight" else name


def _theirs(name: str, first: str) -> str:
    """A drafter's parameter as files name it. first: what they call the first layer."""
    name = re.sub(r"^midlayer\.", f"{first}.", name.removeprefix("layer."))
    if found := re.match(r"further\.(\d+)\.(.*)", name):
        return f"layers.{int(found[1]) + 1}.{found[2]}"
    return "embed_tokens.weight" if name == EMBEDDINGS else name
