"""The fingerprints of weights and tokenizers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.core.support import layer_stack
from selfspec.core.target import Target
from selfspec.drafters.base import Drafter
from selfspec.utils.files import Figures

# Of a config, what changes no output; end tokens count by themselves
_NAMES = {"transformers_version", "architectures", "dtype", "torch_dtype", "use_cache", "initializer_range"}
_NAMES |= {f"{name}_token_id" for name in ("bos", "eos", "pad", "unk")}
PARTS = "parts:"  # before the hash of a target whose layers were not in memory


def weights_hash(model: nn.Module, dtype: torch.dtype | None = None, without: nn.Module | None = None) -> str:
    """SHA-256 over names, shapes and values of all weights (a shared tensor once) that are in memory, in `dtype` or as
    they are; quantized weights by what they store, saved buffers (where some formats keep theirs) included. without: a
    part of the model that is left out."""
    digest, left = hashlib.sha256(), set[int]()
    if without is not None:
        left = {id(tensor) for tensor in (*without.parameters(), *without.buffers())}
    buffers = (
        (f"{path}.{name}", buffer)
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    )
    for name, tensor in (*model.named_parameters(), *buffers):
        if tensor.is_meta or id(tensor) in left:
            continue
        for part in _stored(tensor.detach()):
            _add(digest, name, part.to(dtype or part.dtype) if part.is_floating_point() else part)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, values: Tensor) -> None:
    digest.update(f"{name} {list(values.shape)} {values.dtype}\n".encode())
    digest.update(values.cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def _stored(tensor: Tensor) -> Iterator[Tensor]:
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(part := getattr(tensor, name), Tensor):  # a DTensor names its mesh, too
            yield from _stored(part)


def drafter_hash(drafter: Drafter) -> str:
    """SHA-256 over what makes a drafter, which is no hybrid, propose what it does: its kind, config, calibration and
    own weights."""
    digest = hashlib.sha256(repr((drafter.kind, drafter.config, drafter.calibration)).encode())
    for name, tensor in {**drafter.trained(), **drafter.saved_buffers()}.items():
        _add(digest, name, tensor.detach())
    return digest.hexdigest()


def tokenizer_hash(tokenizer: Tokenizer | None) -> str | None:
    """SHA-256 of the vocabulary; None without a tokenizer."""
    if tokenizer is None:
        return None
    vocab = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.sha256(vocab.encode()).hexdigest()


def target_hash(target: Target) -> str:
    """The weights hash of a target rounded to bfloat16, the same whatever dtype it is loaded in; of one without its
    layers, `parts_hash`, marked as such."""
    if target.partial:
        return PARTS + parts_hash(target)
    return target.saved_hash or weights_hash(target.model, torch.bfloat16)


def settings_of(target: Target) -> Figures:
    """What a target computes beside its weights, as JSON has it: the tokens that end its texts, and its config where it
    differs from its class's defaults. A setting that a newer transformers adds does not count at its default."""
    config = target.model.config.get_text_config()
    usual: Figures = {}
    with suppress(Exception):  # of a class that has no defaults
        usual = type(config)().to_dict()
    own = {name: value for name, value in config.to_dict().items() if value != usual.get(name)}
    own = {name: value for name, value in own.items() if name not in _NAMES and not name.startswith("_")}
    found: Figures = json.loads(json.dumps({**own, "end_tokens": sorted(target.end_tokens)}, default=str))
    return found


def model_hash(target: Target) -> str:
    """SHA-256 over `target_hash` and `settings_of`: of targets that compute the same."""
    settings = json.dumps(settings_of(target), sort_keys=True)
    return hashlib.sha256(f"{target_hash(target)} {settings}".encode()).hexdigest()


def parts_hash(target: Target) -> str:
    """The same of what stands outside the layers: embeddings, final norm, lm_head."""
    return target.saved_parts or parts_of(target.model)


def parts_of(model: PreTrainedModel) -> str:
    """The same of a model; of one without a single stack of layers, of all that it has."""
    stack = None
    with suppress(ValueError):
        stack = layer_stack(model)
    return weights_hash(model, torch.bfloat16, stack)


def same_weights(saved: Figures, target: Target) -> bool | None:
    """Whether a target is the one that a drafter's file names, by the parts that both know; None where they know no
    part in common."""
    theirs, ours = str(saved["weights_hash"]), target_hash(target)
    if theirs == ours:
        return True
    if not (theirs.startswith(PARTS) or target.partial):
        return False
    if "parts_hash" not in saved:
        return None
    return bool(saved["parts_hash"] == parts_hash(target))
