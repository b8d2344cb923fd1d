"""A target without its layers: embeddings, final norm and lm_head read from its checkpoint, for drafters that are
trained on hidden states which come from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.checkpoints.cast import Stock
from selfspec.checkpoints.embedded import resolve
from selfspec.checkpoints.find import check_target_name
from selfspec.checkpoints.load_target import load_tokenizer
from selfspec.checkpoints.target_files import Shards, check_config
from selfspec.checkpoints.weights_hash import parts_of
from selfspec.core.support import layer_stack
from selfspec.core.target import Target
from selfspec.utils.machine import default_device, dtype_name


def load_parts(
    name: str, dtype: str = "auto", device: str | None = None, revision: str | None = None
) -> tuple[Target, Tokenizer]:
    """A target of which all but the layers is in memory; these stay on the meta device. Raises ValueError for a model
    whose parts are not found by their names, FileNotFoundError for a checkpoint without safetensors files."""
    check_target_name(name, resolve(name))
    shards = Shards(name, revision)
    check_config(str(shards.folder), {"trust_remote_code": False}, False)
    config = AutoConfig.from_pretrained(shards.folder)
    config = config.get_text_config() if hasattr(config, "vision_config") else config
    config.name_or_path = name
    if hasattr(config, "quantization_config"):  # of the layers; what is read here is saved plain
        del config.quantization_config
    with init_empty_weights(include_buffers=False):  # buffers, such as rotary frequencies, are computed
        model = AutoModelForCausalLM.from_config(config)
    wanted = None if dtype_name(dtype) == "auto" else getattr(torch, dtype_name(dtype))
    place = torch.device(default_device() if device in (None, "auto") else str(device))
    inside = {id(p) for p in layer_stack(model).parameters()}
    outside = {n: p for n, p in model.named_parameters() if id(p) not in inside}
    head = next(n for n, m in model.named_modules() if m is model.get_output_embeddings())
    begins = next(n for n, m in model.named_modules() if m is model.get_input_embeddings())
    beside = str(shards.find(f"{begins}.weight"))
    missing, loaded = list[str](), dict[str, Tensor]()
    for parameter, empty in outside.items():
        found = shards.find(parameter)
        tensor = None if found is None else shards.read(found)
        if config.tie_word_embeddings and parameter == f"{head}.weight":
            own = found is not None and beside.startswith(found.removesuffix(f"{head}.weight"))
            if tensor is None or not own or torch.equal(tensor, loaded.get(f"{begins}.weight", tensor)):
                continue  # the embeddings serve; a head that differs stays one, as transformers leaves it
        if tensor is None or tensor.shape != empty.shape or not tensor.is_floating_point():
            missing.append(parameter)
            continue
        loaded[parameter] = tensor
    if missing:
        raise ValueError(f"target {name!r}: its files hold no {', '.join(missing)} of the shape that its config says")
    model.load_state_dict(loaded, strict=False, assign=True)
    if model.get_output_embeddings().weight.is_meta:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight  # one parameter, hashed once
    saved_dtype, saved_hash = model.get_output_embeddings().weight.dtype, parts_of(model)
    stated = getattr(config, "dtype", None)  # in which transformers loads it
    Stock(model, wanted or (stated if isinstance(stated, torch.dtype) else saved_dtype)).cast()
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(place))
    if (shards.folder / "generation_config.json").is_file():  # which names the tokens that end a text
        model.generation_config = GenerationConfig.from_pretrained(shards.folder)
    target = _checked(model)
    target.saved_parts, target.saved_dtype = saved_hash, saved_dtype
    return target, load_tokenizer(str(shards.folder))


@torch.no_grad()
def _checked(model: PreTrainedModel) -> Target:
    """The target, whose final norm and lm_head are reached past its layers, whatever these return."""
    for returns in (0, 1, 2):
        target = Target(model, returns=returns)
        states = torch.randn(1, 3, target.hidden_size, device=target.device, dtype=target.dtype)
        tokens, end = torch.zeros(1, 3, dtype=torch.long, device=target.device), target.n_layers
        try:
            out = target.text(tokens, layers=(end, end), hidden=states)
        except (TypeError, IndexError, AttributeError, RuntimeError, ValueError):
            continue
        if out.hidden.shape == states.shape:
            return target
    raise ValueError(f"{type(model).__name__} can not be run without its layers; train with the whole target")


@contextmanager
def _one_layer(target: Target, shards: Shards, layer: int, stock: Stock) -> Iterator[None]:
    """A layer's own weights, for as long as the block runs. Raises ValueError where the files name them otherwise."""
    stack = layer_stack(target.model)
    prefix = next(n for n, m in target.model.named_modules() if m is stack)
    names = [f"{prefix}.{layer}.{n}" for n, _ in stack[layer].named_parameters()]
    if unknown := [n for n in names if shards.find(n) is None]:
        raise ValueError(f"the files of {shards.name!r} hold no {unknown[0]}, so its layers can not be run one by one")
    empty = {n: target.model.get_parameter(n) for n in names}
    own = {n: shards.read(str(shards.find(n))).to(target.device, stock.dtype_of(n)) for n in names}
    try:
        target.model.load_state_dict(own, strict=False, assign=True)
        yield
    finally:
        target.model.load_state_dict(empty, strict=False, assign=True)
        target.check()


@torch.no_grad()
def layer_by_layer(target: Target, tokens: Tensor, shards: Shards) -> Iterator[tuple[int, Tensor]]:
    """Outputs [1, S, H] of the target's layers on a text, tokens int64 [1, S], with one layer in memory at a time."""
    hidden, stock = None, Stock(target.model, target.dtype)
    for layer in range(target.n_layers):
        with _one_layer(target, shards, layer, stock):
            target.check()  # views are built anew
            span = (layer, layer + 1)
            hidden = target.text(tokens, False, span, hidden, reads=(layer,)).features[layer].clone()
        yield layer, hidden
