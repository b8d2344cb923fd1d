"""UNO's adapters (arXiv 2609.04010): a regular PEFT LoRA over a target's linear maps, under which noise rows draft.

UNO runs the root as it is and behind it rows of tokens drawn at random, on which alone the adapter is active; row j
forecasts the token at one position more. That is the mask drafter with a pass of its own, whose masks are the
embeddings of such tokens.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from selfspec.checkpoints.formats.files import check_held, fill, number, read_config, read_tensors
from selfspec.core.target import Target
from selfspec.drafters.mask import Mask, MaskConfig
from selfspec.drafters.parts.gated import adapted_maps
from selfspec.drafters.parts.views import lora_of

NAME, FILE = "adapter_config.json", "adapter_model.safetensors"
_ROWS = 7  # noise rows behind the root: a block of eight, as UNO is served by default
_ODD = (
    *("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication", "layers_to_transform"),
    *("exclude_modules", "trainable_token_indices", "target_parameters", "fan_in_fan_out", "alora_invocation_tokens"),
)
_CHANGES_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initializations that do, under the adapter


def read(folder: Path, target: Target) -> Mask:
    """An adapter's folder as a drafter. It is not calibrated; the noise is drawn once, from all tokens but the first.

    Raises ValueError for what is no plain LoRA, and for maps that this target does not have or of another shape.
    """
    config, path = read_config(folder, NAME), folder / FILE
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        adapter = f"peft_type={config.get('peft_type')!r}, bias={config.get('bias')!r}"
        raise ValueError(f"{folder}/{NAME}: {adapter}; a LORA without biases can be read")
    if odd := [name for name in _ODD if config.get(name)]:
        raise ValueError(f"{folder}/{NAME}: {odd[0]}={config[odd[0]]!r} can not be read; only one LoRA of one rank")
    initial = config.get("init_lora_weights")
    if str(initial).lower().startswith(_CHANGES_WEIGHTS):
        raise ValueError(f"{folder}/{NAME}: init_lora_weights={initial!r}: it was trained on other weights; convert it")
    modules = config.get("target_modules")
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        raise ValueError(f"{folder}/{NAME}: target_modules={modules!r} must be a list of names")
    rank, alpha = number(config, "r", folder, NAME), config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
        raise ValueError(f"{folder}/{NAME}: lora_alpha={alpha!r} must be a finite number above 0")
    if not isinstance(config.get("use_rslora", False), bool):
        raise ValueError(f"{folder}/{NAME}: use_rslora={config['use_rslora']!r} must be true or false")
    tensors = {name.removeprefix("base_model.model."): t for name, t in read_tensors(path).items()}
    longest = max(((*t.shape, 0)[0] for name, t in tensors.items() if name.endswith("lora_A.weight")), default=0)
    if rank > longest:
        raise ValueError(f"{folder}/{NAME}: r={rank}, its tensors are of rank {longest}")
    names = sorted({name.rsplit(".", 1)[-1] for name in modules})
    sizes = [target.model.get_submodule(path).weight.shape for path in adapted_maps(target.model, names)]
    check_held(rank * sum(map(sum, sizes)), tensors, f"a rank of {rank}", folder, NAME)
    drafter = Mask(target, MaskConfig(masks=_ROWS, passes=2, rank=rank, maps=names, correction=0))
    maps = zip(drafter.gated.paths, drafter.gated.maps, strict=True)
    loras = {place: lora_of(module, drafter.gated.adapter) for place, module in maps}
    pairs = [{f"{place}.lora_A.weight": a, f"{place}.lora_B.weight": b} for place, (a, b, _) in loras.items()]
    fill({name: part for pair in pairs for name, part in pair.items()}, tensors, path)
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    noise = torch.randint(1, target.vocab_size, (_ROWS,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for _, b, own in loras.values():
            b.mul_(scale / own)
            if not b.isfinite().all():
                raise ValueError(f"{folder}/{NAME}: lora_alpha={alpha!r} is too large for {b.dtype}")
        embeddings = target.model.get_input_embeddings()  # which may scale what it reads
        drafter.gated.masks.copy_(embeddings(noise.to(embeddings.weight.device)))
    return drafter.eval()
