"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): the module that many models ship, iterated into trees.

Entry t reads the target's state at position t and the embedding of token t + 1, each behind a norm of its own, through
one product; a decoder layer of the target's kind follows, and a final norm; lm_head and embeddings are the target's.
`selfspec.checkpoints.formats.mtp` reads shipped modules. Training starts from the target's last layer. See
`parts.unrolled` for how it is trained and drafts.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec.core.recurrent.mixers import mixers
from selfspec.core.support import view
from selfspec.core.target import Target
from selfspec.drafters.base import one_of, pack, training_dtype, whole
from selfspec.drafters.parts.feature_layer import FeatureLayer, normed
from selfspec.drafters.parts.unrolled import Unrolled, UnrolledConfig
from selfspec.drafters.parts.views import Tail, final_norm
from selfspec.drafters.parts.vocabulary import check_head
from selfspec.drafters.parts.weights import for_decoding

_ATTENTION, _FOLLOWS = ("full_attention", "sliding_attention"), ("dense", "sparse", "mlp", "moe")


@dataclass
class MtpConfig(UnrolledConfig):
    """As `UnrolledConfig`. layers: must be null, the last layer alone is read; modules: in a row, each reading
    the outputs of the one before; the last is iterated. Modules differ in four things.
    hidden_first: the product reads the state first, then the embedding. fed: whether the target's state is taken behind
    its final norm (post) or before it (pre). recycled: the same choice for the module's own output, which stands for a
    drafted position. final_norm: whether the module has a final norm. form: of its layer, where that is another than
    of the target's last: the kinds of attention and of what follows it, as [full_attention, dense]."""

    modules: int = 1
    hidden_first: bool = False
    fed: str = "post"
    recycled: str = "post"
    final_norm: bool = True
    form: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("modules", self.modules, 1, self.unroll, f": drafter.unroll is {self.unroll}, and trains no more")
        if self.layers is not None:
            raise ValueError(f"drafter.layers={self.layers}: a module reads the last layer; leave layers out")
        for name in ("hidden_first", "final_norm"):
            one_of(name, getattr(self, name), (True, False))
        for name in ("fed", "recycled"):
            one_of(name, getattr(self, name), ("post", "pre"))
        if self.form is not None:
            form = tuple(self.form) if isinstance(self.form, (list, tuple)) else ()
            if len(form) != 2 or form[0] not in _ATTENTION or form[1] not in _FOLLOWS:
                raise ValueError(
                    f"drafter.form={self.form!r} must name two kinds: one of {', '.join(_ATTENTION)}, and one of "
                    f"{', '.join(_FOLLOWS)}; or be null"
                )
            self.form = form


class Mtp(Unrolled):
    """Parameters of a module: those of a decoder layer, 2*H*H, and three norms."""

    config: MtpConfig
    layer: MtpLayer

    def __init__(self, target: Target, config: MtpConfig) -> None:
        super().__init__(target, config)
        self.reads = (target.n_layers - 1,)
        self.layer, *more = (MtpLayer(target, config, training_dtype(target.dtype)) for _ in range(config.modules))
        self.further = nn.ModuleList(more)
        check_head(self.layer.tail, self.head, config.draft_vocab)

    @property
    def draft_layers(self) -> tuple[MtpLayer, ...]:
        return (self.layer, *self.further)

    def saved_buffers(self) -> dict[str, Tensor]:
        """With those of the decoder layers, such as the bias of a router."""
        named = {f"further.{k}": layer for k, layer in enumerate(self.draft_layers[1:])} | {"layer": self.layer}
        parts = {f"{at}.{name}": part for at, layer in named.items() for name, part in layer.layer_buffers().items()}
        return super().saved_buffers() | parts


class MtpLayer(FeatureLayer):
    """The module's parts: norms, product, and the decoder layer in `tail`."""

    tail: Tail
    packed_proj: Tensor | None

    def __init__(self, target: Target, config: MtpConfig, dtype: torch.dtype) -> None:
        super().__init__()
        last = target.n_layers - 1
        self.layers, self.config, self.after_norm = (last,), config, config.recycled == "post"
        if last < 1:
            raise ValueError("mtp needs a target of at least two layers: its own layer stands in for the last")
        theirs = final_norm(target.decoder)
        if theirs is None:
            raise ValueError(f"{type(target.model).__name__} has no final norm by a known name, which mtp begins from")
        if config.form is None and any(True for _ in mixers(nn.ModuleList([target.layers[last]]))):
            raise ValueError(
                f"{type(target.model).__name__}: the last layer keeps a state; mtp needs attention there: name a layer "
                "that has it by drafter.form"
            )
        self._theirs = {"": view(theirs)}  # a dict, so that it is no submodule
        hidden = target.hidden_size
        self.enorm, self.hnorm = (copy.deepcopy(theirs).to(dtype).requires_grad_(True) for _ in range(2))
        self.norm = copy.deepcopy(theirs).to(dtype).requires_grad_(True) if config.final_norm else nn.Identity()
        self.proj = nn.Linear(2 * hidden, hidden, bias=False, device=target.device, dtype=dtype)
        with torch.no_grad():  # at first the state goes into the layer as it is
            parts = torch.eye(hidden), torch.zeros(hidden, hidden)
            self.proj.weight.copy_(torch.cat(parts if config.hidden_first else parts[::-1], 1))
        self.tail = Tail(target, 0, dtype, "mtp", full=True, norm=self.norm, form=config.form)
        for path in self.layer_buffers():  # they are the target's so far
            module, name = self.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
            module.register_buffer(name, getattr(module, name).clone())
        self.embedding = nn.Parameter(target.model.get_input_embeddings().weight, requires_grad=False)
        pack(self, packed_proj=None)

    def layer_buffers(self) -> dict[str, Tensor]:
        """The decoder layer's buffers that belong to its weights."""
        buffers: dict[str, Tensor] = {}
        for path, module in self.tail.parts[0].named_modules(prefix="tail.parts.0"):
            saved = module.state_dict()
            buffers |= {f"{path}.{name}": b for name, b in module.named_buffers(recurse=False) if name in saved}
        return buffers

    def train(self, mode: bool = True) -> MtpLayer:
        """Leaving training mode lays out the weights for decoding, in the target's dtype."""
        super().train(mode)
        pack(self, packed_proj=None if mode else for_decoding(self.proj.weight, self.tail.dtype))
        return self

    def fused(self, stacked: Tensor) -> Tensor:
        return normed(self._theirs[""], stacked) if self.config.fed == "post" else stacked

    def entry(self, states: Tensor, tokens: Tensor) -> Tensor:
        embedded = F.embedding(tokens.to(self.embedding.device), self.embedding).to(states)
        parts = [normed(self.enorm, embedded), normed(self.hnorm, states)]
        weight = self.proj.weight.to(states.dtype) if self.packed_proj is None else self.packed_proj
        return F.linear(torch.cat(parts[::-1] if self.config.hidden_first else parts, -1), weight)
