"""DFlash and DSpark drafters as vLLM reads them: the plain form, and speculators'.

`target_layer_ids` counts layers whose outputs are read; `aux_hidden_state_layer_ids`, of speculators' form, counts
states from the embeddings on, one more. A mask row enters with the target's embedding of `mask_token_id`, or with
mask_embedding.pt where there is one.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from selfspec.checkpoints.formats import files
from selfspec.core.target import Target
from selfspec.drafters.block import BlockConfig, BlockDrafter
from selfspec.drafters.parts import markov
from selfspec.drafters.parts.llama_config import own_settings
from selfspec.utils.files import Figures

MASK_FILE = "mask_embedding.pt"
_KINDS = ("dflash", "dspark")
_IDS, _STATES = "target_layer_ids", "aux_hidden_state_layer_ids"
_MARKOV = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_JOINT = {"vanilla": (), "gated": ("markov_head.gate_proj",), "rnn": ("markov_head.joint_proj",)}
_SURE = "confidence_head.proj.weight", "confidence_head.proj.bias"
_CAUSAL = "causal", "is_causal", "use_swa", "sliding_window_non_causal"


def kind_of(config: Figures) -> str | None:
    """dflash or dspark, from what a config says of itself; None for any other."""
    names = f"{config.get('architectures')} {config.get('speculators_model_type')}".lower()
    if "dflash2" in names:
        return None
    return next((kind for kind in _KINDS if kind in names), None)


def flat(config: Figures) -> Figures:
    """A config of either form with all keys at one level."""
    nested = config.get("dflash_config") or {}
    if odd := sorted(name for name in nested.keys() & config.keys() if nested[name] != config[name]):
        raise ValueError(f"dflash_config and the config around it differ in {', '.join(odd)}; remove what is wrong")
    if "speculators_model_type" not in config:
        merged = {**config, **nested}
        return {"sample_from_anchor": kind_of(config) == "dspark", **merged}
    merged = {**config, **(config.get("transformer_layer_config") or {})}
    if isinstance(states := config.get(_STATES), list):
        merged[_IDS] = [state - 1 for state in states]
    merged["draft_vocab_size"] = config.get("draft_vocab_size")
    return {"sample_from_anchor": False, "sliding_window_non_causal": False, **merged}


def attention(config: Figures, where: str) -> Figures:
    """What a flat config says of the layers' masks, as `BlockConfig` has it, by vLLM's rules.

    Raises ValueError for kinds of layers that are not known, and a window that is missing.
    """
    count, kinds, swa = config["num_hidden_layers"], config.get("layer_types"), bool(config.get("use_swa"))
    known = {"full_attention", "sliding_attention"}
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= known):
        raise ValueError(f"{where}: layer_types={kinds!r} must list full_attention or sliding_attention {count} times")
    if kinds is None and config.get("use_sliding_window") and not swa:
        raise ValueError(f"{where}: use_sliding_window=true without layer_types; say which of the layers slide")
    sliding = [i for i, kind in enumerate(kinds or []) if kind == "sliding_attention"]
    if swa and not sliding:
        sliding = list(range(count))
    causal = config.get("is_causal") if config.get("is_causal") is not None else config.get("causal")
    usual = "sliding_attention" in (kinds or []) and not config.get("sliding_window_non_causal")
    read: Figures = {"causal": bool(causal), "sliding_causal": usual if causal is None else causal}
    if not sliding:
        return {"causal": bool(causal)}
    window = config.get("swa_window_size") or config.get("sliding_window")
    if type(window) is not int or window < 1:
        raise ValueError(f"{where}: layers slide, but swa_window_size or sliding_window is {window!r}; give positions")
    return {**read, "sliding": sliding, "window": window}


def markov_names(form: str) -> list[str]:
    """What files call the parameters of a correction, in the drafter's order."""
    return [*_MARKOV, *(f"{name}.{part}" for name in _JOINT[form] for part in ("weight", "bias"))]


def read(folder: Path, target: Target) -> BlockDrafter:
    """A published drafter of this target, in either form. It is not calibrated.

    Raises ValueError for what this target or `drafter=block` can not have: other sizes, features or masks that do not
    exist, tensors that are missing or too many.
    """
    config, (found, path) = flat(files.read_config(folder)), files.read_weights(folder)
    where = f"{folder}/config.json"
    tensors = files.renamed(found, lambda name: name.removeprefix("model."), path)
    _refuse(config, target, folder)
    few = files.settle(config, tensors, target, folder)
    form, rank = config.get("markov_head_type", "vanilla"), config.get("markov_rank") or 0
    files.check_held(rank * (target.vocab_size + few), tensors, f"a markov_rank of {rank}", folder)
    ids = files.vocabulary(tensors, few, target, path)
    _drop_copies(tensors, target, ids, path)
    if config.get("enable_confidence_head") is False:  # as engines read it
        tensors = {name: tensor for name, tensor in tensors.items() if name not in _SURE}
    if _SURE[0] in tensors:
        tensors.setdefault(_SURE[1], torch.zeros(1))
    with_markov = bool(config.get("confidence_head_with_markov", "speculators_model_type" in config))
    sure = None if _SURE[0] not in tensors else "parents" if with_markov else "rows"
    drafter = BlockDrafter(
        target,
        BlockConfig(
            layers=config[_IDS],
            stack=config["num_hidden_layers"],
            size=files.number(config, "block_size", folder),
            predicts="next" if config["sample_from_anchor"] else "own",
            correction=rank,
            correction_form=form if rank else "vanilla",
            confidence=sure,
            draft_vocab=None if ids is None else few,
            llama=own_settings(config),
            **attention(config, where),
        ),
    )
    if ids is not None:
        drafter.drafts_only(ids)
    files.fill(_parts(drafter), tensors, path)
    files.fill({"mask": drafter.stack.trained_stack.mask}, {"mask": _mask(config, target, folder)}, path)
    return drafter.eval()


def _refuse(config: Figures, target: Target, folder: Path) -> None:
    """Raises ValueError for values that this target or `drafter=block` can not have."""
    where, ids = f"{folder}/config.json", config.get(_IDS)
    if files.number(config, "num_hidden_layers", folder) > 64:
        raise ValueError(f"{where}: num_hidden_layers={config['num_hidden_layers']} must be at most 64")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < target.n_layers for i in ids):
        raise ValueError(f"{where}: {_IDS}={ids!r} must list layers of the target, 0 to {target.n_layers - 1}")
    if sorted(set(ids)) != ids:
        raise ValueError(f"{where}: {_IDS}={ids} must ascend")
    for name in (*_CAUSAL, "sample_from_anchor", "enable_confidence_head", "confidence_head_with_markov"):
        if not isinstance(config.get(name) or False, bool):
            raise ValueError(f"{where}: {name}={config[name]!r} must be true or false")
    plain: Figures = {"hidden_act": "silu", "attention_value_scale": None, "projector_type": "dflash"}
    if config.get("mask_embedding") is not False:
        plain["mask_embedding"] = MASK_FILE
    files.check_read(config, plain, folder)
    depth = "num_target_layers" if config.get("num_target_layers") != len(ids) else "target_num_hidden_layers"
    files.check_fits(config, {depth: target.n_layers}, folder)  # some name the number of layers read by the first
    form = config.get("markov_head_type", "vanilla")
    if config.get("markov_rank") and form not in markov.FORMS:
        raise ValueError(f"{where}: markov_head_type={form!r} must be one of {', '.join(markov.FORMS)}")


def _mask(config: Figures, target: Target, folder: Path) -> Tensor:
    """What a mask row enters with, [H]. Raises ValueError for a token that does not exist, or a file that holds no
    such numbers."""
    token, path = config.get("mask_token_id"), folder / MASK_FILE
    if type(token) is not int or not 0 <= token < target.vocab_size:
        raise ValueError(
            f"{folder}/config.json: mask_token_id={token!r} must be a token of the target, 0 to {target.vocab_size - 1}"
        )
    if not path.is_file() and config.get("mask_embedding"):  # as `write` names it
        raise FileNotFoundError(f"{path} is missing, which config.json names; copy it again")
    if not path.is_file():
        return target.model.get_input_embeddings().weight[token]
    mask = files.read_torch(path)
    if isinstance(mask, dict):  # MiMo's, with the token beside it
        mask = mask.get("embedding")
    files.check_plain("embedding", mask, path)
    if mask.numel() != target.hidden_size or not mask.is_floating_point() or not mask.float().isfinite().all():
        raise ValueError(f"{path} must hold {target.hidden_size} finite numbers")
    return mask.flatten()


def _drop_copies(tensors: dict[str, Tensor], target: Target, ids: Tensor | None, path: Path) -> None:
    """Take out the copies of the target's embeddings and lm_head that files may hold. Raises ValueError for others."""
    head = next(target.lm_head.parameters())
    theirs = {"embed_tokens.weight": target.model.get_input_embeddings().weight}
    theirs["lm_head.weight"] = head if ids is None else head[ids.to(head.device)]
    for name, wanted in theirs.items():
        copied = tensors.pop(name, None)
        if copied is not None and (copied.shape != wanted.shape or not torch.equal(copied.to(wanted), wanted)):
            raise ValueError(f"{path}: {name} differs from the target's; selfspec drafts with the target's own")


def _parts(drafter: BlockDrafter) -> dict[str, Tensor]:
    """A drafter's parameters by their names in files, without the mask, which has a file of its own."""
    stack = drafter.stack.trained_stack.named_parameters()
    corrections = zip(markov_names(drafter.config.correction_form), drafter.corrections, strict=False)
    parts = dict([*stack, *corrections, *zip(_SURE, drafter.confidence, strict=False)])
    return {name: part for name, part in parts.items() if name != "mask"}


def write(drafter: BlockDrafter, target: Target, folder: Path) -> None:
    """config.json, model.safetensors and mask_embedding.pt as vLLM reads them: DSpark's form where tokens correct their
    children, else DFlash's. In the target's saved dtype; embeddings and lm_head stay the target's, but for its rows of
    a draft vocabulary."""
    config, dtype, stack = drafter.config, target.saved_dtype, drafter.stack.trained_stack
    tensors = {name: part.detach().to(dtype) for name, part in _parts(drafter).items()}
    if drafter.vocabulary is not None:
        ids = drafter.vocabulary.cpu()
        tensors["lm_head.weight"] = drafter.head.weight.detach()[drafter.vocabulary].to(dtype)
        tensors["d2t"] = ids - torch.arange(len(ids))
    last = target.vocab_size - 1  # vLLM puts mask_embedding.pt in its place
    spark = bool(config.correction)
    ids_read = {"mask_token_id": last, _IDS: list(drafter.reads)}
    sliding = [i in (config.sliding or []) for i in range(config.stack)]
    slides: Figures = {"layer_types": [f"{'sliding' if slide else 'full'}_attention" for slide in sliding]}
    slides |= {"sliding_window": config.window} if any(sliding) else {}
    # Without it sliding layers alone are causal.
    causal = {"causal": config.causal} if config.causal == config.sliding_causal or not any(sliding) else {}
    spark_config = {
        "markov_rank": config.correction,
        "markov_head_type": config.correction_form,
        "enable_confidence_head": config.confidence is not None,
        "confidence_head_with_markov": config.confidence == "parents",
        **ids_read,
    }
    written = {
        "architectures": ["Qwen3DSparkModel" if spark else "DFlashDraftModel"],
        "model_type": "qwen3",
        **files.llama_keys(target, drafter.stack.config, config.stack),
        "num_target_layers": target.n_layers,
        "draft_vocab_size": config.draft_vocab,
        "mask_embedding": MASK_FILE,
        "block_size": config.size,
        "dflash_config": {**ids_read, **causal, "sample_from_anchor": config.predicts == "next"},
        **slides,
        "sample_from_anchor": config.predicts == "next",
        **(spark_config if spark else {}),
    }
    files.write_files(folder, written, tensors)
    torch.save(stack.mask.detach().to(dtype).cpu(), folder / MASK_FILE)
