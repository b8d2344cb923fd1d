"""The frozen target: a stock transformers model that runs over trees, whole or in parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.core.cache import PassCache, TextCache, TreeCache, restarting, within
from selfspec.core.slots import Opened, Picking, SlotCache, padded, static_pass
from selfspec.core.support import layer_stack, longest_context, refuse, returns_tuples, view
from selfspec.core.tree import DraftTree
from selfspec.engine.engine import Engine

RowCache = TreeCache | SlotCache  # the cache of a call: of the eager engine, of a compiled one


@dataclass(frozen=True)
class Pass:
    """What one pass gave. logits: [B, N, V] or None; hidden: [B, N, H], the decoder's last hidden state after its final
    norm, or the output of the last layer run; features: layer index -> that layer's output [B, N, H]; walked: int64
    [B, 2, N], see `selfspec.core.verify.walk`, where the pass was asked to walk its tree."""

    logits: Tensor | None
    hidden: Tensor
    features: dict[int, Tensor]
    walked: Tensor | None = None


def _carrier(args: tuple[Any, ...], kwargs: dict[str, Any]) -> PassCache:
    """The cache among a layer's arguments, which families pass under different names."""
    return next(a for a in (*kwargs.values(), *args) if isinstance(a, PassCache))


_ADAPTER_STATE = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")  # of PEFT's layers


class _Absent(nn.Module):
    """Stands in a view for a layer below a part's first. Returns its input; the last one returns the hidden states that
    came with the cache. Per-layer attributes that decoders read, such as attention_type, are the layer's."""

    def __init__(self, layer: nn.Module, entry: bool, tuples: bool) -> None:
        super().__init__()
        self.__dict__.update(layer=layer, entry=entry, tuples=tuples)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if self.__dict__["entry"]:
            hidden = _carrier(args, kwargs).given
        return (hidden, None, None) if self.__dict__["tuples"] else hidden


def _note(index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """A forward hook: the output goes into the cache that came with the call."""
    _carrier(args, kwargs).seen[index] = output if isinstance(output, Tensor) else output[0]


class Target:
    """A full- or sliding-window-attention decoder of transformers, unmodified and frozen.

    Passes run over parts: structural views of the model, built on first use and kept, that share its tensors and hold
    no state, so that several calls and threads can use them at once and the model itself can be used beside them.
    """

    def __init__(
        self, model: PreTrainedModel, frozen: bool = True, tuples: bool | None = None, engine: Engine | None = None
    ) -> None:
        """frozen: False leaves requires_grad as it is, for views that hold trained parts; tuples: whether layers return
        tuples, where it is known (None: found by a pass when it is needed).

        Raises ValueError, with the reason, for a model that trees can not be verified on.
        """
        refuse(model)
        config = model.config.get_text_config()
        self.model = model.eval()
        if frozen:
            model.requires_grad_(False)
        self.name = str(model.config.name_or_path or type(model).__name__)
        self.saved_hash: str | None = None  # the weights hash of what was loaded, where it was cast afterwards
        self.decoder: nn.Module = model.get_decoder()
        self.lm_head: nn.Linear = model.get_output_embeddings()
        self.saved_dtype = self.dtype
        self.n_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = self.lm_head.out_features
        self.max_positions, self.limited_by = longest_context(model)
        self.window: int | None = getattr(config, "sliding_window", None)
        self.layer_types = set(getattr(config, "layer_types", None) or ()) or {
            "sliding_attention" if self.window else "full_attention"
        }
        if not getattr(config, "use_sliding_window", True):
            self.window, self.layer_types = None, self.layer_types - {"sliding_attention"} or {"full_attention"}
        windows = {"full_attention": None, "sliding_attention": self.window}
        self.windows = {name: windows[name] for name in sorted(self.layer_types)}
        self.layers = layer_stack(model)
        self._head = self._head_now()
        self._parts: dict[tuple[int, int, tuple[int, ...]], tuple[nn.Module, nn.Module]] = {}
        self._built_from = self._structure()
        self._tuples, self.engine = tuples, engine
        self._like: list[tuple[Tensor, Tensor] | None] | None = None

    @property
    def device(self) -> torch.device:
        return next(self.lm_head.parameters()).device  # not its `weight`, which a divided target would gather

    @property
    def dtype(self) -> torch.dtype:
        return next(self.lm_head.parameters()).dtype

    def _head_now(self) -> tuple[object, ...]:
        weight = next(self.model.get_output_embeddings().parameters())
        return weight.dtype, weight.device, list(weight.shape)

    @property
    def changed(self) -> bool:
        """Whether the model was cast, moved or resized since it was loaded."""
        return self._head_now() != self._head

    def _structure(self) -> list[object]:
        """A snapshot of what views copy; when it changes, parts are built anew."""
        found: list[object] = [self.model.config.get_text_config()._attn_implementation]
        for m in self.model.modules():
            found += [id(m), *m._forward_hooks, *m._forward_pre_hooks]
            tensors = [t for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
            found += [(id(t), t.dtype, t.device, t.shape) for t in tensors]
            found += [str(vars(m).get(name, "")) for name in _ADAPTER_STATE]
        return found

    def check(self) -> None:
        """At the start of every call: parts follow what was hooked into the model or changed in its structure since.

        Raises ValueError where the model was cast, moved, resized or set to training after it was loaded.
        """
        if self.model.training:
            raise ValueError(
                "target.model is in training mode, in which dropout makes tokens random; call target.model.eval()"
            )
        if self.changed:
            raise ValueError(
                f"target.model was changed after loading: its lm_head was {self._head}, it is {self._head_now()} "
                "(dtype, device, shape); cast, move or resize a model first and load it then: "
                "selfspec.load(..., target=model)"
            )
        if (structure := self._structure()) != self._built_from:
            refuse(self.model)
            self.forget()
            self._parts, self._built_from, self._like = {}, structure, None

    def forget(self) -> None:
        """What was compiled for this target's parts is dropped; they will not be used again."""
        if self.engine is not None:
            self.engine.forget([module for pair in self._parts.values() for module in pair])

    @property
    def tuples(self) -> bool:
        """Whether the model's layers return tuples, as those of older families do."""
        if self._tuples is None:
            self._tuples = returns_tuples(self.model)
        return self._tuples

    @property
    def compiled(self) -> int:
        """How many functions its engine has compiled or read from disk."""
        return 0 if self.engine is None else len(self.engine.made)

    def cache(self, rows: int, capacity: int, limit: int = 0) -> RowCache:
        """An empty cache for `capacity` slots a row; its first pass raises MemoryError where `limit` slots would not
        fit."""
        if self.engine is not None:
            return SlotCache(self._one_token(), rows, capacity, limit, self.engine)
        return TreeCache(self.n_layers, rows, capacity, self.dtype, limit)

    @torch.no_grad()
    def _one_token(self) -> list[tuple[Tensor, Tensor] | None]:
        """Keys and values [1, heads, 1, D] of one token in each layer, by which buffers are made."""
        if self._like is None:
            cache = TextCache(self.n_layers, kept=True)
            self.text(torch.zeros(1, 1, dtype=torch.long, device=self.device), False, cache=cache)
            kept = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
            self._like = [None if k is None or v is None else (k, v) for k, v in kept]
        return self._like

    def part(self, start: int, stop: int, reads: tuple[int, ...] = (), logits: bool = True) -> nn.Module:
        """A view of the model that runs layers start to stop - 1 on what its cache was given, notes the outputs of
        layers `reads`, of layer stop - 1 and of the decoder in that cache, and leaves out all other layers; its decoder
        where no logits are wanted."""
        key, parts = (start, stop, tuple(sorted(set(reads)))), self._parts
        if key not in parts:
            model = view(self.model)
            model.config.return_dict = True
            layers = layer_stack(model)
            for i in range(start):  # they keep the index of those behind them, by which masks and caches are found
                layers[i] = _Absent(layers[i], i == start - 1, self.tuples)
            del layers[stop:]
            last = {stop - 1} if start < stop < self.n_layers else set()
            for i in {i for i in reads if start <= i < stop} | last:
                layers[i].register_forward_hook(partial(_note, i), with_kwargs=True)
            decoder = model.get_decoder()
            decoder.register_forward_hook(partial(_note, -1), with_kwargs=True)
            parts[key] = model, decoder
        return parts[key][0 if logits else 1]

    def forward(
        self,
        tree: DraftTree,
        cache: RowCache,
        logits: bool = True,
        layers: tuple[int, int] | None = None,
        hidden: Tensor | None = None,
        reads: tuple[int, ...] = (),
        ran: int = 0,
        picking: Picking | None = None,
    ) -> Pass:
        """One pass over a tree of B rows and N nodes.

        Appends N slots to the cache; the caller says with `cache.keep` which stay. `layers=(start, stop)` runs only
        those: with start > 0 from `hidden` [B, N, H], the output of layer start - 1 on the same nodes; with stop below
        the number of layers the result holds that layer's output, no final norm and no logits. `reads` are the layers
        whose outputs are wanted. Nodes below `ran` were already run through the same layers in an earlier pass over the
        same tree, with nothing kept since; N then counts only the remaining ones. With `picking`, which a compiled
        engine serves, the pass walks the tree as well.
        """
        start, stop = layers or (0, self.n_layers)
        if not 0 <= start < stop <= self.n_layers or (start > 0) != (hidden is not None):
            raise ValueError(
                f"layers={layers} must satisfy 0 <= start < stop <= {self.n_layers}, hidden goes with start"
            )
        if isinstance(cache, SlotCache):
            return self._static(tree, cache, logits, (start, stop), hidden, reads, ran, picking)
        cache.begin(tree, hidden, ran)
        positions = cache.positions(tree)
        if self.max_positions is not None:  # nodes past the last position exist only to be cut off
            positions = positions.clamp(max=self.max_positions - 1)
        masks = self.per_type(partial(cache.mask, tree))
        return self._run(cache, tree.tokens[:, ran:], logits, (start, stop), reads, masks, positions[:, ran:])

    def opened(
        self, cache: SlotCache, layers: tuple[int, int], reads: tuple[int, ...], logits: bool, nodes: int
    ) -> Opened:
        """What passes inside a graph need of some layers and their cache, with room for `nodes` more slots a row."""
        return Opened(
            self.part(*layers, reads, logits),
            cache.begin(*layers, nodes),
            cache.row_lengths(self.device),
            self.windows,
            (self.max_positions or 2**62) - 1,
            self.dtype,
        )

    def _static(
        self,
        tree: DraftTree,
        cache: SlotCache,
        logits: bool,
        layers: tuple[int, int],
        hidden: Tensor | None,
        reads: tuple[int, ...],
        ran: int,
        picking: Picking | None,
    ) -> Pass:
        """`forward` by the engine: sizes are rounded up to those that passes are compiled for."""
        (start, stop), rows = layers, len(cache.lengths)
        tokens, parents, nodes = padded(tree, ran, rows + cache.idle)
        wide = max(ran + tokens.shape[1], 0 if parents is None else parents.shape[1])
        opened = self.opened(cache, layers, reads, logits and stop == self.n_layers, wide)
        if hidden is not None and hidden.shape[:2] != tokens.shape:
            hidden = nn.functional.pad(hidden, (0, 0, 0, tokens.shape[1] - nodes, 0, cache.idle))
        drawn = None if picking is None else picking.tensors(cache.idle, self.dtype)
        at = torch.tensor(ran, device=tokens.device)
        out, seen, walked = cache.engine.run(static_pass, opened, hidden, tokens, parents, at, drawn)
        seen = {layer: found[:rows, :nodes] for layer, found in seen.items()}
        if hidden is not None:
            seen = {start - 1: hidden[:rows, :nodes], **seen}
        features, final = {i: seen[i] for i in reads}, seen[-1 if stop == self.n_layers else stop - 1]
        if out is not None:
            out = out[:rows, :nodes]
        return Pass(out, final, features, None if walked is None else walked[:rows])

    def text(
        self,
        tokens: Tensor,
        logits: bool = True,
        layers: tuple[int, int] | None = None,
        hidden: Tensor | None = None,
        reads: tuple[int, ...] = (),
        cache: TextCache | None = None,
        masks: Tensor | dict[str, Tensor] | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Pass:
        """One pass over whole texts, tokens int64 [B, S], under the model's own causal mask unless `masks` and
        `positions` are given; gradients flow. As `forward`, but start may be the number of layers: then only the final
        norm and lm_head run. documents: int64 [B, S], by which a token sees those of its own document alone, and
        positions begin anew in each."""
        cache = TextCache(self.n_layers) if cache is None else cache
        if documents is not None:
            masks, positions = self.per_type(partial(within, documents, self.dtype)), restarting(documents)
        cache.enter(hidden)
        return self._run(cache, tokens, logits, layers or (0, self.n_layers), reads, masks, positions)

    def _run(
        self,
        cache: PassCache,
        tokens: Tensor,
        logits: bool,
        layers: tuple[int, int],
        reads: tuple[int, ...],
        masks: Tensor | dict[str, Tensor] | None,
        positions: Tensor | None,
    ) -> Pass:
        start, stop = layers
        whole = logits and stop == self.n_layers
        out = self.part(start, stop, reads, whole)(
            input_ids=tokens, attention_mask=masks, position_ids=positions, past_key_values=cache, use_cache=True
        )
        seen = cache.seen if cache.given is None else {start - 1: cache.given, **cache.seen}
        cache.enter(None)
        if (final := -1 if stop == self.n_layers else stop - 1) not in seen:
            raise ValueError(f"the forward of {type(self.model).__name__} was replaced; load the model as it came")
        return Pass(out.logits if whole else None, seen[final], {i: seen[i] for i in reads})

    def per_type(self, mask: Callable[[int | None], Tensor]) -> Tensor | dict[str, Tensor]:
        """Masks as the model takes them, made by `mask` of each layer type's window: one, or one for each type."""
        masks = {name: mask(window) for name, window in self.windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))
