"""DFlash and DSpark drafters as vLLM reads them: the plain form, and speculators'.

`target_layer_ids` counts layers whose outputs are read; `aux_hidden_state_layer_ids`, of speculators' form, counts
states from the embeddings on, one more. A mask row enters with the target's embedding of `mask_token_id`, or with
mask_embedding.pt where there is one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec.checkpoints.formats.files import Contract, hold, number, read_config, read_tensors, write_files
from selfspec.core.target import Target
from selfspec.drafters.block import BlockConfig, BlockDrafter
from selfspec.drafters.parts.llama_config import OWN, own_settings
from selfspec.utils.files import Figures

MASK_FILE = "mask_embedding.pt"
_KINDS = ("dflash", "dspark")
_IDS, _STATES = "target_layer_ids", "aux_hidden_state_layer_ids"
_MARKOV = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_PROJECTIONS = "q_proj", "k_proj", "v_proj", "o_proj"


def kind_of(config: Figures) -> str | None:
    """dflash or dspark, from what a config says of itself; None for any other."""
    names = f"{config.get('architectures')} {config.get('speculators_model_type')}".lower()
    if "dflash2" in names:
        return None
    return next((kind for kind in _KINDS if kind in names), None)


def flat(config: Figures) -> Figures:
    """A config of either form with all keys at one level."""
    nested = config.get("dflash_config") or {}
    if "speculators_model_type" not in config:
        merged = {**config, **nested}
        return {"sample_from_anchor": kind_of(config) == "dspark", **merged}
    merged = {**config, **(config.get("transformer_layer_config") or {})}
    if isinstance(states := config.get(_STATES), list):
        merged[_IDS] = [state - 1 for state in states]
    # Its sliding_window_non_causal is of sliding layers, which are refused; full attention was trained both ways.
    return {"sample_from_anchor": False, "causal": False, **merged, "draft_vocab_size": config.get("draft_vocab_size")}


def contract(config: Figures, folder: Path) -> Contract:
    """Names and shapes of a drafter's tensors, from its flat config; without embeddings, lm_head and a confidence
    head."""
    H, inner, heads, keys, width, V, layers = (
        number(config, name, folder)
        for name in (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
            "num_hidden_layers",
        )
    )  # fmt: skip
    shapes = {"fc.weight": [H, len(config[_IDS]) * H], "hidden_norm.weight": [H], "norm.weight": [H]}
    outputs = dict(zip(_PROJECTIONS, (heads * width, keys * width, keys * width, H), strict=True))
    for i in range(layers):
        for name, out in outputs.items():
            shapes[f"layers.{i}.self_attn.{name}.weight"] = [out, heads * width if name == "o_proj" else H]
            if config.get("attention_bias"):
                shapes[f"layers.{i}.self_attn.{name}.bias"] = [out]
        shapes |= {f"layers.{i}.self_attn.{name}.weight": [width] for name in ("q_norm", "k_norm")}
        shapes |= {f"layers.{i}.mlp.{name}.weight": [inner, H] for name in ("gate_proj", "up_proj")}
        shapes[f"layers.{i}.mlp.down_proj.weight"] = [H, inner]
        shapes |= {f"layers.{i}.{name}.weight": [H] for name in ("input_layernorm", "post_attention_layernorm")}
    few = config.get("draft_vocab_size") or V
    if rank := config.get("markov_rank"):
        shapes |= dict(zip(_MARKOV, ([V, rank], [few, rank]), strict=True))
    tensors: Contract = {name: (shape, None) for name, shape in shapes.items()}
    return tensors | ({"d2t": ([few], torch.int64)} if few < V else {})


def read(folder: Path, target: Target) -> BlockDrafter:
    """A published drafter of this target, in either form. It is not calibrated. A confidence head is left out, with a
    line: trees are ranked by the drafter's own scores.

    Raises ValueError for what this target or `drafter=block` can not have: other sizes, sliding layers, gated or
    recurrent corrections, features or masks that do not exist, tensors that are missing or too many.
    """
    config, path = flat(read_config(folder)), folder / "model.safetensors"
    where, V = f"{folder}/config.json", target.vocab_size
    tensors = {name.removeprefix("model."): tensor for name, tensor in read_tensors(path).items()}
    for name, wanted in {"hidden_size": target.hidden_size, "vocab_size": V}.items():
        if config.get(name) != wanted:
            raise ValueError(f"{where}: {name} is {config.get(name)!r}, the target's is {wanted}")
    heads = number(config, "num_attention_heads", folder)  # Llama's own defaults, where a key is missing or null
    usual = {"head_dim": target.hidden_size // heads, "num_key_value_heads": heads, "rms_norm_eps": 1e-6}
    config |= {name: value for name, value in usual.items() if config.get(name) is None}
    ids, few = config.get(_IDS), config.get("draft_vocab_size") or V
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < target.n_layers for i in ids):
        raise ValueError(f"{where}: {_IDS}={ids!r} must list layers of the target, 0 to {target.n_layers - 1}")
    if sorted(set(ids)) != ids:
        raise ValueError(f"{where}: {_IDS}={ids} must ascend")
    for name in ("causal", "sample_from_anchor"):
        if not isinstance(config.get(name, False), bool):
            raise ValueError(f"{where}: {name}={config[name]!r} must be true or false")
    if not isinstance(config.get("layer_types") or [], list):
        raise ValueError(f"{where}: layer_types={config['layer_types']!r} must be a list")
    if any("sliding" in str(kind) for kind in config.get("layer_types") or []) or config.get("use_swa"):
        raise ValueError(f"{where}: layers with a sliding window can not be read; full attention can")
    plain = {"hidden_act": "silu", "attention_value_scale": None, "projector_type": "dflash", "is_causal": None}
    for name, readable in plain.items():
        if config.get(name) not in (None, readable):
            raise ValueError(f"{where}: {name}={config[name]!r} can not be read")
    if config.get("markov_rank") and config.get("markov_head_type", "vanilla") != "vanilla":
        raise ValueError(f"{where}: markov_head_type={config['markov_head_type']!r} can not be read; vanilla can")
    if not isinstance(few, int) or not 0 < few <= V:
        raise ValueError(f"{where}: draft_vocab_size={few!r} must lie between 1 and {V}, or be null")
    tensors = _without_copies(tensors, target, few, path)
    hold(tensors, contract(config, folder), path)
    drafter = BlockDrafter(
        target,
        BlockConfig(
            layers=ids,
            stack=config["num_hidden_layers"],
            size=number(config, "block_size", folder),
            predicts="next" if config["sample_from_anchor"] else "own",
            causal=bool(config.get("causal", False)),
            correction=config.get("markov_rank") or 0,
            draft_vocab=few if few < V else None,
            llama=own_settings(config),
        ),
    )
    with torch.no_grad():
        parameters = drafter.trained()
        if "d2t" in tensors:
            drafter.drafts_only(tensors.pop("d2t") + torch.arange(few))
        for place, name in enumerate(_MARKOV):
            if name in tensors:
                parameters[f"corrections.{place}"].copy_(tensors.pop(name))
        for name, tensor in tensors.items():
            parameters[f"stack.trained_stack.{name}"].copy_(tensor)
        parameters["stack.trained_stack.mask"].copy_(_mask(config, target, folder))
    return drafter.eval()


def _mask(config: Figures, target: Target, folder: Path) -> Tensor:
    """What a mask row enters with, [H]. Raises ValueError for a token that does not exist, or a file that holds no
    such numbers."""
    token, path = config.get("mask_token_id"), folder / MASK_FILE
    if type(token) is not int or not 0 <= token < target.vocab_size:
        raise ValueError(
            f"{folder}/config.json: mask_token_id={token!r} must be a token of the target, 0 to {target.vocab_size - 1}"
        )
    if not path.is_file():
        return target.model.get_input_embeddings().weight[token]
    try:
        mask: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise ValueError(f"{path} can not be read: {error}") from error
    if isinstance(mask, dict):  # MiMo's, with the token beside it
        mask = mask.get("embedding")
    if not isinstance(mask, Tensor) or mask.numel() != target.hidden_size:
        raise ValueError(f"{path} must hold {target.hidden_size} numbers")
    return mask.flatten()


def _without_copies(tensors: dict[str, Tensor], target: Target, few: int, path: Path) -> dict[str, Tensor]:
    """Without the copies of the target's embeddings and lm_head that files may hold, and a confidence head. Raises
    ValueError for embeddings or a head of a drafter's own, and for a map of the draft vocabulary that leads nowhere."""
    own = {name: t for name, t in tensors.items() if name != "t2d" and not name.startswith("confidence_head.")}
    if len(own) < len(tensors) - ("t2d" in tensors):
        print(f"{path}: its confidence head is left out", file=sys.stderr)
    ids = None
    if "d2t" in own:
        own["d2t"] = own["d2t"].to(torch.int64)
        ids = own["d2t"] + torch.arange(len(own["d2t"]))
        if not 0 <= int(ids.min()) <= int(ids.max()) < target.vocab_size:
            raise ValueError(f"{path}: d2t leads to tokens from {int(ids.min())} to {int(ids.max())}")
    head = next(target.lm_head.parameters())
    theirs = {"embed_tokens.weight": target.model.get_input_embeddings().weight}
    theirs["lm_head.weight"] = head if ids is None else head[ids.to(head.device)]
    for name, wanted in theirs.items():
        copied = own.pop(name, None)
        if copied is not None and (copied.shape != wanted.shape or not torch.equal(copied.to(wanted), wanted)):
            raise ValueError(f"{path}: {name} differs from the target's; selfspec drafts with the target's own")
    return own


def write(drafter: BlockDrafter, target: Target, folder: Path) -> None:
    """config.json, model.safetensors and mask_embedding.pt as vLLM reads them: DSpark's form where tokens correct their
    children, else DFlash's. In the target's saved dtype; embeddings and lm_head stay the target's, but for its rows of
    a draft vocabulary."""
    config, dtype, stack = drafter.config, target.saved_dtype, drafter.stack.trained_stack
    shape = drafter.stack.config
    tensors = {name: p.detach().to(dtype) for name, p in stack.named_parameters() if name != "mask"}
    tensors |= {name: p.detach().to(dtype) for name, p in zip(_MARKOV, drafter.corrections, strict=False)}
    if drafter.vocabulary is not None:
        ids = drafter.vocabulary.cpu()
        tensors["lm_head.weight"] = drafter.head.weight.detach()[drafter.vocabulary].to(dtype)
        tensors["d2t"] = ids - torch.arange(len(ids))
    last = target.vocab_size - 1  # vLLM puts mask_embedding.pt in its place
    spark = bool(config.correction)
    own = {name: getattr(shape, name) for name in OWN if name != "rope_parameters"}
    rope = dict(shape.rope_parameters or {})
    ids_read = {"mask_token_id": last, _IDS: list(drafter.reads)}
    markov = {
        "markov_rank": config.correction,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
        **ids_read,
    }
    written = {
        "architectures": ["Qwen3DSparkModel" if spark else "DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_hidden_layers": config.stack,
        "num_target_layers": target.n_layers,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **own,
        "rope_theta": rope.get("rope_theta"),
        "rope_parameters": rope,
        "draft_vocab_size": config.draft_vocab,
        "block_size": config.size,
        "dflash_config": {**ids_read, "causal": config.causal, "sample_from_anchor": config.predicts == "next"},
        "torch_dtype": str(dtype).removeprefix("torch."),
        "sample_from_anchor": config.predicts == "next",
        **(markov if spark else {}),
    }
    write_files(folder, written, tensors)
    torch.save(stack.mask.detach().to(dtype).cpu(), folder / MASK_FILE)
