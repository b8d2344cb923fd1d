"""A decoder layer of another form than the target's last: shipped modules may have a window, or a dense MLP, that the
last layer has not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.core.support import layer_stack


class _InRow(nn.ModuleList):
    """Attention and what follows it, where the target has layers of their own for them. block_type: by which decoders
    choose its mask."""

    def __init__(self, layers: Iterable[nn.Module], block_type: str) -> None:
        super().__init__(layers)
        self.block_type = block_type

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        for layer in self:
            hidden_states = layer(hidden_states, **kwargs)
        return hidden_states


def put_form(model: PreTrainedModel, form: Sequence[str]) -> None:
    """Put a layer of this form in the place of a view's last one. form: the kinds of its attention and of what follows
    it, as the target's config names them. It begins as a view of tensors of the same names and shapes in the target's
    highest layers that have them.

    Raises ValueError for a form that the target's layers can not have, or have nothing to begin from.
    """
    layers, config = layer_stack(model), model.config.get_text_config()
    last, kind = len(layers) - 1, cast(Any, type(layers[-1]))
    attention, follows = form
    made: nn.Module
    with torch.device("meta"):
        try:
            if hasattr(config, "layers_block_type"):
                row = (kind(_of(config, "layer_types", last, name), last) for name in form)
                made = _InRow(row, attention)
                _of(config, "layer_types", last, attention)
            else:
                _of(config, "layer_types", last, attention)
                made = kind(_mlp(config, last, follows), last)
        except (KeyError, ValueError) as error:
            raise _refused(model, form, str(error)) from error
    theirs = [dict(layer.state_dict(keep_vars=True)) for layer in layers][::-1]
    for path, tensor in list(made.state_dict(keep_vars=True).items()):
        name = path.partition(".")[2] if isinstance(made, _InRow) else path
        like = next((of[name] for of in theirs if name in of and of[name].shape == tensor.shape), None)
        if like is None:
            raise _refused(model, form, f"none has {name} {list(tensor.shape)}")
        owner, _, own = path.rpartition(".")
        setattr(made.get_submodule(owner), own, like)
    layers[last] = made.eval()


def _of(config: Any, name: str, last: int, kind: str) -> Any:
    """The config with this kind of its last layer, where it has such a list."""
    if kinds := getattr(config, name, None):
        setattr(config, name, [*kinds[:last], kind])
    return config


def _mlp(config: Any, last: int, kind: str) -> Any:
    """The config with this kind of MLP in its last layer, dense or sparse."""
    if getattr(config, "mlp_layer_types", None):
        return _of(config, "mlp_layer_types", last, kind)
    if hasattr(config, "moe_layer_end_index") and kind == "dense":
        config.moe_layer_end_index = last - 1
        return config
    raise ValueError("its config does not say which layers are dense")


def _refused(model: PreTrainedModel, form: Sequence[str], why: str) -> ValueError:
    return ValueError(
        f"drafter.form={list(form)}: layers of {type(model).__name__} have no such form ({why}); take null"
    )
