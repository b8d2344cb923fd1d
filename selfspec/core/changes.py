"""What was done to a model after it was loaded."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.core.quantized import has_int8

_VALUES = {str, int, float, bool, type(None), tuple, list, dict}  # of a config
_HELD = {str, int, float, bool, type(None), Tensor}  # by modules
_OF_MODULES = frozenset(vars(nn.Module()))
_LIBRARIES = ("torch.", "transformers.", "peft.", "selfspec.")  # whose modules hold no state of a user's
# Of PEFT's layers: what a view copies, and which adapters are in the weights
_ADAPTER_STATE, _MERGED = ("_disable_adapters", "_active_adapter", "scaling"), "merged_adapters"


class Changes:
    """A model as it was loaded, and as `follow` last saw it. int8: whether some of its linear maps multiply in 8
    bits."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.int8 = model, has_int8(model)
        self._loaded, self._structure, self._layers = self._head(), self._structure_now(), self._layers_now()
        self._lock = threading.RLock()

    def _head(self) -> tuple[object, ...]:
        weight = next(self.model.get_output_embeddings().parameters())
        return weight.dtype, weight.device, list(weight.shape)

    def _layers_now(self) -> int:
        count: int = self.model.config.get_text_config().num_hidden_layers
        return count

    def _structure_now(self) -> list[object]:
        """What views of the model copy."""
        configs = {id(c): vars(c) for m in self.model.modules() if (c := getattr(m, "config", None)) is not None}
        parts: list[object] = [str([(k, v) for k, v in c.items() if type(v) in _VALUES]) for c in configs.values()]
        for m in self.model.modules():
            parts += [v if type(v) is not Tensor else id(v) for v in vars(m).values() if type(v) in _HELD]
            parts += [m, type(m), type(m).forward, *m._modules, *m._modules.values()]  # held: ids come again
            parts += [*m._forward_hooks, *m._forward_pre_hooks, vars(m).get("forward")]
            tensors = [t for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
            parts += [(id(t), t.dtype, t.device, t.shape, _address(t)) for t in tensors]
            parts += [str(vars(m).get(name, "")) for name in _ADAPTER_STATE]
            parts += [(_MERGED, str(vars(m).get(_MERGED, "")))]
            others = [(k, v) for k, v in vars(m).items() if k not in _OF_MODULES and type(v) not in _HELD]
            if type(m).__module__.startswith(_LIBRARIES):  # what was put there; their own are caches, too
                others = [(k, v) for k, v in others if k[0] != "_" and (callable(v) or _is_plain(v))]
            parts += [v if callable(v) and not isinstance(v, type) else _inside(v) for _, v in others]
        return parts

    @property
    def moved(self) -> bool:
        """Whether the model was cast, moved or resized since it was loaded."""
        return self._head() != self._loaded

    def check(self) -> None:
        """Raises ValueError where the model was cast, moved or resized after it was loaded."""
        dtype, device, _ = now = self._head()
        assert isinstance(device, torch.device)
        known = torch.amp.is_autocast_available(device.type)
        if known and torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) != dtype:
            raise ValueError(
                "torch.autocast is on, under which keys and values have another dtype than the KV cache; leave it, and "
                "load the target in the dtype that you want"
            )
        if self.moved:
            raise ValueError(
                f"target.model was changed after loading: its lm_head was {self._loaded}, it is {now} "
                "(dtype, device, shape); cast, move or resize a model first and load it then: "
                "selfspec.load(..., target=model)"
            )

    def follow(self, refuse: Callable[[PreTrainedModel], None], rebuild: Callable[[bool], None]) -> None:
        """Call `rebuild` where what views copy differs from what was seen last, with whether adapters were merged or
        taken out since. What is interrupted is done by the next call. Raises ValueError where a part was set to
        training, layers were added, or linear maps went to 8 bits or back, and what `refuse` raises."""
        with self._lock:
            if (now := self._structure_now()) == self._structure:
                return
            if any(part.training for part in self.model.modules()):
                raise ValueError(
                    "target.model is in training mode, in which dropout makes tokens random; call target.model.eval()"
                )
            if (count := self._layers_now()) > self._layers:
                raise ValueError(
                    f"target.model was changed after loading: it has {count} layers, it had {self._layers}; load it "
                    "anew: selfspec.load(..., target=model)"
                )
            refuse(self.model)
            if self.int8 != has_int8(self.model):
                raise ValueError(
                    f"target.model was changed after loading: its linear maps {'no longer ' * self.int8}multiply in 8 "
                    "bits; load it anew: selfspec.load(..., target=model)"
                )
            before, after = ([p for p in s if isinstance(p, tuple) and p[0] == _MERGED] for s in (self._structure, now))
            rebuild(before != after)
            self._structure = now


def _address(tensor: Tensor) -> int:
    """Where a plain tensor lies: `.data` can be given another place."""
    return tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0


def _is_plain(value: object) -> bool:
    """Whether a value is a number of NumPy's or a container."""
    return isinstance(value, (dict, list, tuple)) or (hasattr(value, "item") and getattr(value, "ndim", None) == 0)


def _inside(value: object, levels: int = 3) -> object:
    """What a container or an object holds, to be compared with what it held before."""
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version
    if hasattr(value, "tolist"):  # of NumPy
        return value.tolist()
    if isinstance(value, dict) and levels:
        return [(str(key), _inside(part, levels - 1)) for key, part in value.items()]
    if isinstance(value, (list, tuple, set, frozenset, deque)) and levels:
        return [_inside(part, levels - 1) for part in value]
    plain = hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value)
    if plain and levels and not type(value).__module__.startswith(_LIBRARIES):
        return _inside(vars(value), levels)
    return value if type(value) in _HELD else id(value)
