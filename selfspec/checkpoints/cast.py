"""A model in another dtype, as transformers' from_pretrained(dtype=...) gives it."""

from __future__ import annotations

import copy
import re
from contextlib import suppress
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

_MAKING = Lock()  # transformers sets torch's default dtype for the whole process meanwhile
# Parts of names that PEFT puts around stock layers
_OF_PEFT = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


class Stock:
    """What transformers' from_pretrained(dtype=...) would have made of a model: float32 of what its class keeps in it;
    of tensors that the class makes in a dtype of their own, such as rotary frequencies, that."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self.model, self.dtype, self.saved = model, dtype, model.state_dict().keys()
        kept = {torch.bfloat16: ["_strict"], torch.float16: ["_strict", ""]}.get(dtype, [])
        names = [name for kind in kept for name in getattr(model, f"_keep_in_fp32_modules{kind}", None) or ()]
        self.in_float32 = re.compile("|".join(name.replace("*", ".*") for name in names) or "(?!)")
        made = _empty(model, dtype)
        self.made = {} if made is None else _tensors(made)
        # Tensors of other libraries: transformers knows which of them can be cast
        odd = any(type(tensor) not in (Tensor, nn.Parameter) for tensor in _tensors(model).values())
        self.theirs = odd or getattr(model, "quantization_method", None) is not None

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Of a parameter or buffer by its name; None where that is not known."""
        plain = _OF_PEFT.sub("", name)
        if self.in_float32.search(plain):
            return torch.float32
        return self.made[plain].dtype if plain in self.made else self.dtype if name in self.saved else None

    @property
    def differs(self) -> bool:
        """Whether `cast` has something to change."""
        if self.theirs:
            return self.model.get_output_embeddings().weight.dtype != self.dtype
        floats = ((name, t.dtype) for name, t in _tensors(self.model).items() if t.is_floating_point())
        return any(dtype != (self.dtype_of(name) or dtype) for name, dtype in floats)

    @torch.no_grad()
    def cast(self) -> None:
        """Cast the model in place. A buffer that is not saved and is a new model's buffer, rounded, takes the new
        model's exact value: a scale that was rounded to bfloat16 is exact in float32."""
        if self.theirs:
            self.model.to(self.dtype)  # type: ignore[arg-type]
            return
        for name, tensor in _tensors(self.model).items():
            if tensor.is_floating_point():
                new, value = self.made.get(name), tensor.data
                known = new is not None and name not in self.saved and not new.is_meta
                if new is not None and known and new.shape == tensor.shape and torch.equal(new.to(tensor), tensor):
                    value = new.to(tensor.device)
                tensor.data = value.to(self.dtype_of(name) or tensor.dtype)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict((*model.named_parameters(), *model.named_buffers()))


class _Meta(TorchFunctionMode):
    """What modules allocate for weights has no memory. Of this thread alone, unlike accelerate's init_empty_weights."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = {"device": "meta"} if function is torch.empty else {}
        return function(*args, **{**(kwargs or {}), **device})


def _empty(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel | None:
    """A new model of this class and config, made in `dtype`, with its buffers but without memory for parameters; None
    for a class of its user's own that takes other arguments."""
    made: PreTrainedModel | None = None
    with suppress(Exception), _MAKING, _Meta():
        made = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    return made
