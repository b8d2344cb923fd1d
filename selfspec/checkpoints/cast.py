"""A model in another dtype, as transformers' from_pretrained(dtype=...) gives it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

# Parts of names that PEFT puts around stock layers
_OF_PEFT = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


def differs(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Whether `cast` has something to change."""
    if _libraries(model):
        return model.get_output_embeddings().weight.dtype != dtype
    own = stock_dtype(model, dtype)
    return any(t.dtype != (own(name) or t.dtype) for name, t in _tensors(model).items() if t.is_floating_point())


@torch.no_grad()
def cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast a model in place. A buffer that is a new model's buffer, rounded, takes the new model's exact value: a scale
    that was rounded to bfloat16 is exact in float32."""
    if _libraries(model):
        model.to(dtype)  # type: ignore[arg-type]
        return
    own, made = stock_dtype(model, dtype), _empty(model, dtype)
    fresh = {} if made is None else dict(made.named_buffers())
    for name, tensor in _tensors(model).items():
        if tensor.is_floating_point():
            new = fresh.get(name)
            rounded = None if new is None or new.is_meta else new.to(tensor)
            same = rounded is not None and rounded.shape == tensor.shape and torch.equal(rounded, tensor)
            value = new.to(tensor.device) if new is not None and same else tensor.data
            tensor.data = value.to(own(name) or tensor.dtype)


def stock_dtype(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], torch.dtype | None]:
    """By a parameter's or buffer's name, the dtype that from_pretrained(dtype=...) gives it: float32 to what its class
    keeps in it; their own to tensors that the class makes in one, such as rotary frequencies. None where that is not
    known."""
    kept = {torch.bfloat16: ["_strict"], torch.float16: ["_strict", ""]}.get(dtype, [])
    names = [name for kind in kept for name in getattr(model, f"_keep_in_fp32_modules{kind}", None) or ()]
    in_float32 = re.compile("|".join(name.replace("*", ".*") for name in names) or "(?!)")
    saved, made = model.state_dict().keys(), _empty(model, dtype)
    dtypes = {} if made is None else {name: tensor.dtype for name, tensor in _tensors(made).items()}

    def of(name: str) -> torch.dtype | None:
        plain = _OF_PEFT.sub("", name)
        if in_float32.search(plain):
            return torch.float32
        return dtypes.get(plain, dtype if name in saved else None)

    return of


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict((*model.named_parameters(), *model.named_buffers()))


def _libraries(model: PreTrainedModel) -> bool:
    """Whether it holds tensors of other libraries: transformers knows which of them can be cast."""
    odd = any(type(tensor) not in (Tensor, nn.Parameter) for tensor in _tensors(model).values())
    return odd or getattr(model, "quantization_method", None) is not None


class _Meta(TorchFunctionMode):
    """What modules allocate for weights has no memory. Of this thread alone, unlike accelerate's init_empty_weights."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = {"device": "meta"} if function is torch.empty else {}
        return function(*args, **{**(kwargs or {}), **device})


def _empty(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel | None:
    """A new model of this class and config, made in `dtype`, with its buffers but without memory for parameters; None
    for a class of its user's own that takes other arguments."""
    made: PreTrainedModel | None = None
    with suppress(Exception), torch.random.fork_rng([]), _Meta():
        made = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    return made
