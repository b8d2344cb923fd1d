"""The frozen target: a stock transformers model that runs over trees, layer ranges included."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.cache import TreeCache
from selfspec.families import layers_return_tuples, refuse
from selfspec.fingerprint import weights_hash
from selfspec.tree import DraftTree


@dataclass
class Pass:
    """What one pass gave. logits: [B, N, V] or None; hidden: [B, N, H], the decoder's last hidden state after its final
    norm, or the output of the last layer run; features: layer index -> that layer's output [B, N, H]."""

    logits: Tensor | None
    hidden: Tensor
    features: dict[int, Tensor]


class _Reached(Exception):
    """Ends a pass at the layer it was asked to stop at."""


class _Skip(nn.Module):
    """Stands in for a layer below `start` during one pass; hands over what its target was handed."""

    def __init__(self, layer: nn.Module, target: Target) -> None:
        super().__init__()
        self.__dict__.update(layer=layer, target=target)

    def __getattr__(self, name: str) -> Any:  # decoders read per-layer attributes such as attention_type
        return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["target"].handed


class Target:
    """A full- or sliding-window-attention decoder of transformers, unmodified and frozen."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ValueError, with the reason, for a model that trees can not be verified on."""
        refuse(model)
        config = model.config.get_text_config()
        self.model = model.eval().requires_grad_(False)
        self.name = str(model.config.name_or_path or type(model).__name__)
        self.fingerprint: str | None = None  # of the weights as saved, where they were cast after loading
        self._skips: dict[str, _Skip] = {}
        self.handed: Any = None  # to the layers that a pass skips, by what comes before them
        self.saved_dtype = self.model.get_output_embeddings().weight.dtype
        self.decoder: nn.Module = model.get_decoder()
        self.lm_head: nn.Linear = model.get_output_embeddings()
        self.n_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = self.lm_head.out_features
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self.window: int | None = getattr(config, "sliding_window", None)
        self.kinds = set(getattr(config, "layer_types", None) or ()) or {
            "sliding_attention" if self.window else "full_attention"
        }
        if not getattr(config, "use_sliding_window", True):
            self.window, self.kinds = None, self.kinds - {"sliding_attention"} or {"full_attention"}
        self.layers = next(
            m for m in self.decoder.children() if isinstance(m, nn.ModuleList) and len(m) == self.n_layers
        )

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def cache(self, rows: int, capacity: int, limit: int = 0) -> TreeCache:
        """An empty cache for `capacity` slots a row; refused at once where `limit` slots would not fit into memory."""
        return TreeCache(self.n_layers, rows, capacity, limit)

    def forward(
        self,
        tree: DraftTree,
        cache: TreeCache,
        logits: bool = True,
        layers: tuple[int, int] | None = None,
        hidden: Tensor | None = None,
        features: tuple[int, ...] = (),
        ran: int = 0,
    ) -> Pass:
        """One pass over a tree of B rows and N nodes.

        Appends N slots to the cache; the caller says with `cache.keep` which stay. `layers=(start, stop)` runs only
        those: with start > 0 from `hidden` [B, N, H], the output of layer start - 1 on the same nodes; with stop below
        the number of layers the result holds that layer's output, no final norm and no logits. Where the first `ran`
        nodes went through these layers before, with nothing kept since, only the others run: they are N above.
        """
        start, stop = layers or (0, self.n_layers)
        if not 0 <= start < stop <= self.n_layers or (start > 0) != (hidden is not None):
            raise ValueError(
                f"layers={layers} must satisfy 0 <= start < stop <= {self.n_layers}, hidden goes with start"
            )
        cache.begin(tree.tokens.shape[1], tree.tokens.device, ran)
        lengths = cache.lengths
        if len(set(lengths)) == 1:
            positions = tree.depth + lengths[0]
        else:
            positions = tree.depth + torch.tensor(lengths, device=self.device)[:, None]
        if self.max_positions is not None:  # nodes past the last position exist only to be cut off
            positions = positions.clamp(max=self.max_positions - 1)
        seen = {} if hidden is None else {start - 1: hidden}
        module = self.model if logits and stop == self.n_layers else self.decoder
        with self.patched(start, stop, hidden, features, seen):
            try:
                out = module(
                    input_ids=tree.tokens[:, ran:],
                    attention_mask=self.per_kind(lambda window: cache.mask(tree, self.dtype, window)),
                    position_ids=positions[:, ran:],
                    past_key_values=cache,
                    use_cache=True,
                )
            except _Reached:
                return Pass(None, seen[stop - 1], {i: seen[i] for i in features})
        last = seen[-1]
        return Pass(out.logits if module is self.model else None, last, {i: seen[i] for i in features})

    def per_kind(self, mask: Callable[[int | None], Tensor]) -> Tensor | dict[str, Tensor]:
        """Masks as the model takes them, made by `mask` of each kind's window: one, or one for each kind of layer."""
        windows = {"full_attention": None, "sliding_attention": self.window}
        masks = {kind: mask(windows[kind]) for kind in self.kinds}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @cached_property
    def tuples(self) -> bool:
        return layers_return_tuples(self)

    @contextlib.contextmanager
    def patched(
        self, start: int, stop: int, hidden: Tensor | None, features: tuple[int, ...], seen: dict[int, Tensor]
    ) -> Iterator[None]:
        """For one pass: record outputs, replace layers below `start`, leave after layer `stop - 1`."""
        self.handed = (hidden, None, None) if start and self.tuples else hidden
        modules = self.layers._modules  # swapped here: ModuleList's own way costs more than a layer of a small model
        if start and not self._skips:
            self._skips = {name: _Skip(layer, self) for name, layer in modules.items()}  # type: ignore[arg-type]
        originals = {str(i): modules[str(i)] for i in range(start)}

        def record(index: int, output: Any) -> None:
            seen[index] = output[0]  # of a block's tuple or a decoder's output
            if index == stop - 1 and stop < self.n_layers:
                raise _Reached

        watched = {i: self.layers[i] for i in (*features, *((stop - 1,) if stop < self.n_layers else ()))}
        hooks = [
            module.register_forward_hook(lambda m, a, out, i=i: record(i, (out,) if isinstance(out, Tensor) else out))
            for i, module in {-1: self.decoder, **watched}.items()
        ]
        try:
            modules.update({name: self._skips[name] for name in originals})
            yield
        finally:
            modules.update(originals)
            self.handed = None
            for handle in hooks:
                handle.remove()

    def checksum(self, dtype: torch.dtype | None = None) -> str:
        """A hash over all weights, in `dtype` or as they are (see `weights_hash`)."""
        return weights_hash(self.model, dtype)
