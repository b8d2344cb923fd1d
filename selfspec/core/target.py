"""The frozen target: a stock transformers model that runs over trees, whole or in parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.core.cache import KVCache
from selfspec.core.masks import restarting, within
from selfspec.core.pass_cache import TextCache
from selfspec.core.passes import Entry, Part, Pass, Skipped, read_output, tree_pass, tree_pass_alone
from selfspec.core.quantized import Int8Linear
from selfspec.core.recurrent.mixers import LayerState, mixers, over_trees
from selfspec.core.support import (
    cache_name,
    decoder_of,
    layer_stack,
    longest_context,
    refuse,
    returned_values,
    unhooked,
    view,
)
from selfspec.core.tree import DraftTree
from selfspec.core.verify import WalkNoise
from selfspec.engine.engine import Engine, check_engine, chosen, engine_for
from selfspec.engine.kernels.weights import forget_changed
from selfspec.utils.exactness import EXACT, ROUNDED, TESTED, exactness

__all__ = ["Part", "Pass", "Target", "check_engine", "chosen", "tree_pass"]

LONG = 32  # longer chains get a triangular mask without products


# Of PEFT's layers: what a view copies, and which adapters are in the weights
_ADAPTER_STATE, _MERGED = ("_disable_adapters", "_active_adapter", "scaling"), "merged_adapters"


def _address(tensor: Tensor) -> int:
    """Where a plain tensor lies: `.data` can be given another place."""
    return tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0


class Target:
    """A decoder of transformers with full or sliding attention, or with layers that keep a state, unmodified and
    frozen.

    Passes run over parts: structural views of the model, built on first use and kept, that share its tensors and hold
    no state, so that several calls and threads can use them at once and the model itself can be used beside them.
    """

    refused = staticmethod(refuse)

    def __init__(
        self, model: PreTrainedModel, frozen: bool = True, returns: int | None = None, engine: Engine | None = None
    ) -> None:
        """frozen: False leaves requires_grad as it is, for views that hold trained parts; returns: how many
        values layers return, 0 for a tensor alone, where it is known (None: found by a pass when it is needed).

        Raises ValueError, with the reason, for a model that trees can not be verified on.
        """
        self.refused(model)
        config = model.config.get_text_config()
        self.model = model.eval()
        if frozen:
            model.requires_grad_(False)
        self.name = str(model.config.name_or_path or type(model).__name__)
        self.saved_hash: str | None = None  # the weights hash of what was loaded, where it was cast afterwards
        self.saved_parts: str | None = None  # the same of what stands outside the layers
        self.decoder: nn.Module = decoder_of(model)
        self.lm_head: nn.Linear = model.get_output_embeddings()
        self.saved_dtype = self.dtype
        self.int8 = any(isinstance(part, Int8Linear) for part in model.modules())  # whether some multiply in 8 bits
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
        kinds = {("sliding" if "sliding" in kind else "full") + "_attention" for kind in self.layer_types}
        kinds = kinds & self.layer_types or kinds  # layers with a state alone need no mask
        self.windows = {name: windows[name] for name in sorted(kinds)}
        # Whether its decoder is not in memory, but for single tensors
        self.partial = any(p.is_meta for p in self.decoder.parameters()) and self.device.type != "meta"
        self.recurrent = any(True for _ in mixers(self.decoder))  # whether some layers keep a state
        self._head = self._head_now()
        self._parts: dict[tuple[int, int, tuple[int, ...]], tuple[Part, Part]] = {}
        self._built_from = self._structure()
        self.rebuilt = 0  # how often parts were built anew; other views of the model follow by it
        self._returns, self.engine = returns, engine or Engine()
        self._like: tuple[list[tuple[Tensor, Tensor] | None], dict[int, LayerState]] | None = None

    @property
    def layers(self) -> nn.ModuleList:
        return layer_stack(self.model)

    @property
    def device(self) -> torch.device:
        return next(self.lm_head.parameters()).device  # not its `weight`, which a divided target would gather

    @property
    def dtype(self) -> torch.dtype:
        return next(self.lm_head.parameters()).dtype

    @property
    def dtype_name(self) -> str:
        """Of its weights, as users name it: that of `dtype`, or int8."""
        return "int8" if self.int8 else str(self.dtype).removeprefix("torch.")

    def _head_now(self) -> tuple[object, ...]:
        weight = next(self.model.get_output_embeddings().parameters())
        return weight.dtype, weight.device, list(weight.shape)

    @property
    def changed(self) -> bool:
        """Whether the model was cast, moved or resized since it was loaded."""
        return self._head_now() != self._head

    def _structure(self) -> list[object]:
        """A snapshot of what views copy; when it changes, parts are built anew."""
        parts: list[object] = [self.model.config.get_text_config()._attn_implementation]
        for m in self.model.modules():
            parts += [id(m), *m._forward_hooks, *m._forward_pre_hooks, vars(m).get("forward")]
            tensors = [t for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
            parts += [(id(t), t.dtype, t.device, t.shape, _address(t)) for t in tensors]
            parts += [str(vars(m).get(name, "")) for name in _ADAPTER_STATE]
            parts += [(_MERGED, str(vars(m).get(_MERGED, "")))]
        return parts

    def check(self) -> None:
        """At the start of every call: parts follow what was hooked into the model or changed in its structure since.

        Raises ValueError where the model was cast, moved, resized or set to training after it was loaded.
        """
        if self.model.training:
            raise ValueError(
                "target.model is in training mode, in which dropout makes tokens random; call target.model.eval()"
            )
        kind = self.device.type
        known = torch.amp.is_autocast_available(kind)
        if known and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != self.dtype:
            raise ValueError(
                "torch.autocast is on, under which keys and values have another dtype than the KV cache; leave it, and "
                "load the target in the dtype that you want"
            )
        if self.changed:
            raise ValueError(
                f"target.model was changed after loading: its lm_head was {self._head}, it is {self._head_now()} "
                "(dtype, device, shape); cast, move or resize a model first and load it then: "
                "selfspec.load(..., target=model)"
            )
        merged = False
        if (structure := self._structure()) != self._built_from:
            self.refused(self.model)
            if self.int8 != any(isinstance(part, Int8Linear) for part in self.model.modules()):
                raise ValueError(
                    f"target.model was changed after loading: its linear maps {'no longer ' * self.int8}multiply in 8 "
                    "bits; load it anew: selfspec.load(..., target=model)"
                )
            self.forget()
            before, now = (
                [p for p in s if isinstance(p, tuple) and p[0] == _MERGED] for s in (self._built_from, structure)
            )
            merged = before != now
            self._parts, self._built_from, self._like = {}, structure, None
            self.rebuilt += 1
        forget_changed({id(p) for p in self.model.parameters()} if merged else set())
        for part in self.model.modules() if self.int8 else ():
            if isinstance(part, Int8Linear):
                part.follow(merged)

    def forget(self) -> None:
        """What was compiled for this target's parts is dropped; they will not be used again."""
        self.engine.forget([part.module for pair in self._parts.values() for part in pair])

    @property
    def returns(self) -> int:
        """How many values the model's layers return: some families' tuples of them; 0 for a tensor alone."""
        if self._returns is None:
            self._returns = returned_values(self.model)
        return self._returns

    @property
    def exact(self) -> str:
        """Whether speculative output is that of plain decoding "by construction", since every pass so far gave a row
        the bits that it has in any other; "in every test", since in float32 rounding is far below what separates
        tokens; or "up to rounding" of near-ties."""
        if self.engine.row_invariant("tree_pass_alone") and not self.recurrent:
            return EXACT
        return self.exact_between

    @property
    def exact_between(self) -> str:
        """The same of a text of which some passes ran before they were compiled: compiled ones have other bits."""
        rounded = self.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"  # float32 as TF32
        return TESTED if self.dtype.itemsize >= 4 and not (rounded and self.dtype == torch.float32) else ROUNDED

    @property
    def exactness(self) -> str:
        """What holds of speculative output in this dtype and engine, as a line for users."""
        waits = self.engine.waited > 0 and not self.engine.made and not self.engine.varying and not self.recurrent
        return exactness(f"{self.dtype_name}, {self.engine.name} engine", self.exact, waits)

    @property
    def compiled(self) -> int:
        """How many functions its engine has compiled or read from disk, and calls that ran before they were."""
        return len(self.engine.made) + self.engine.waited

    def use_engine(self, name: str) -> None:
        """Run passes by the engine of this name from now on; see `engine_for` for the errors."""
        self.engine = engine_for(name, self.device)

    def check_drafter(self, drafter: object) -> None:
        """Raises ValueError for a drafter that can not draft for this target."""

    def shaped(self, tree: DraftTree) -> DraftTree:
        """What of a draft tree a pass runs: all of it."""
        return tree

    def cache(self, rows: int, capacity: int, limit: int = 0) -> KVCache:
        """An empty cache for `capacity` entries a row; its first pass raises MemoryError where `limit` entries would
        not fit."""
        like, states = self._one_token()
        return KVCache(like, rows, capacity, limit, self.engine, self.device, states)

    @torch.no_grad()
    def _one_token(self) -> tuple[list[tuple[Tensor, Tensor] | None], dict[int, LayerState]]:
        """Keys and values [1, heads, 1, D] of one token in each layer, by which buffers are made, and what layers with
        a state keep of one row at the beginning."""
        if self._like is None:
            cache = TextCache(self.n_layers, kept=True)
            ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
            decoder = decoder_of(unhooked(self.model))
            over_trees(decoder)
            decoder(input_ids=ids, use_cache=True, **{cache_name(decoder): cache})
            pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
            like = [None if k is None or v is None else (k[:, :, :1], v[:, :, :1]) for k, v in pairs]
            self._like = like, cache.beginning()
        return self._like

    def part(self, start: int, stop: int, reads: tuple[int, ...] = (), logits: bool = True) -> Part:
        """A view of the model that runs layers start to stop - 1 on what enters with the cache, puts the outputs of
        layers `reads`, of layer stop - 1 and of the decoder into that cache, and leaves out all other layers."""
        name, parts = (start, stop, tuple(sorted(set(reads)))), self._parts
        if name not in parts:
            model = view(self.model)
            model.config.return_dict = True
            layers = layer_stack(model)
            if self.recurrent:
                over_trees(model)
            for i in range(start):  # they keep the index of those behind them, by which masks and caches are found
                layers[i] = (Entry if i == start - 1 else Skipped)(layers[i], self.returns)
            del layers[stop:]
            last = {stop - 1} if start < stop < self.n_layers else set()
            for i in {i for i in reads if start <= i < stop} | last:
                layers[i].register_forward_hook(partial(read_output, i), with_kwargs=True)
            decoder = decoder_of(model)
            decoder.register_forward_hook(partial(read_output, -1), with_kwargs=True)
            parts[name] = self._taken_as(model), self._taken_as(decoder)
        return parts[name][0 if logits else 1]

    def _taken_as(self, module: nn.Module) -> Part:
        takes = "position_ids" in inspect.signature(module.forward).parameters
        longest = (self.max_positions or 2**62) - 1
        return Part(module, self.windows, longest, self.dtype, cache_name(module), takes)

    def forward(
        self,
        tree: DraftTree,
        cache: KVCache,
        logits: bool = True,
        layers: tuple[int, int] | None = None,
        hidden: Tensor | None = None,
        reads: tuple[int, ...] = (),
        noise: WalkNoise | None = None,
        prompt: bool = False,
    ) -> Pass:
        """One pass over a tree of B rows and N nodes.

        Appends N entries to the cache; the caller says with `cache.commit` which stay. `layers=(start, stop)` runs only
        those: with start > 0 from `hidden` [B, N, H], the output of layer start - 1 on the same nodes; with stop below
        the number of layers the result holds that layer's output, no final norm and no logits. `reads` are the layers
        whose outputs are wanted. With `noise` the pass walks the tree as well. A pass over a `prompt` is not compiled:
        its shape seldom comes again.
        """
        start, stop = layers or (0, self.n_layers)
        if not 0 <= start < stop <= self.n_layers or (start > 0) != (hidden is not None):
            raise ValueError(
                f"layers={layers} must satisfy 0 <= start < stop <= {self.n_layers}, hidden goes with start"
            )
        rows, idle, nodes = len(cache.lengths), cache.idle, tree.tokens.shape[1]
        tokens, parents = self._sized(tree, idle, prompt)
        kv = cache.view(start, stop, tokens.shape[1])
        if hidden is not None and hidden.shape[:2] != tokens.shape:
            hidden = nn.functional.pad(hidden, (0, 0, 0, tokens.shape[1] - nodes, 0, idle))
        if noise is not None and noise.values is not None and idle:
            noise = noise._replace(values=nn.functional.pad(noise.values, (0, 0, 0, 0, 0, idle)))
        part = self.part(start, stop, reads, logits and stop == self.n_layers)
        arguments = part, kv, hidden, tokens, parents, 0, noise
        out, outputs, walked, left = self.engine.run(tree_pass_alone, *arguments, compiled=not prompt)
        cache.leave(left)
        self._check_outputs(outputs, start, stop)
        outputs = {layer: states[:rows, :nodes] for layer, states in outputs.items()}
        if hidden is not None:
            outputs[start - 1] = hidden[:rows, :nodes]
        features, final = {i: outputs[i] for i in reads}, outputs[-1 if stop == self.n_layers else stop - 1]
        if out is not None:
            out = out[:rows, :nodes]
        return Pass(out, final, features, None if walked is None else walked[:rows])

    def _sized(self, tree: DraftTree, idle: int, prompt: bool) -> tuple[Tensor, Tensor | None]:
        """Tokens and parents (None: a long chain) [B + idle, n] of a tree, with spare nodes up to a size that passes
        are compiled for."""
        tokens, parents, nodes = tree.tokens, tree.parents, tree.tokens.shape[1]
        n = nodes if prompt else self.engine.size(nodes)
        if n > nodes or idle:
            tokens = nn.functional.pad(tokens, (0, n - nodes, 0, idle))
        if n > LONG and tree.is_chain:
            return tokens.contiguous(), None
        if n > nodes or idle:
            parents = nn.functional.pad(parents, (0, n - nodes, 0, idle), value=-1)
        return tokens.contiguous(), parents.contiguous()

    def _check_outputs(self, outputs: dict[int, Tensor], start: int, stop: int) -> None:
        """Raises ValueError where the model's forward is not its own: its decoder was not called with the cache."""
        if (-1 if stop == self.n_layers else stop - 1) not in outputs:
            raise ValueError(f"the forward of {type(self.model).__name__} was replaced; load the model as it came")

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
        start, stop = layers or (0, self.n_layers)
        if self.recurrent and start < self.n_layers:
            full = masks["full_attention"] if isinstance(masks, dict) else masks
            cache.see(None if full is None else (full[:, 0] == 0).expand(len(tokens), -1, -1))
            if all(pair is None for pair in self._one_token()[0]):  # no layer attends
                masks = None
        whole = logits and stop == self.n_layers
        cache.entering, cache.outputs = hidden, {}
        part = self.part(start, stop, reads, whole)
        out = part.module(input_ids=tokens, attention_mask=masks, use_cache=True, **part.arguments(positions, cache))
        outputs = cache.outputs if hidden is None else {start - 1: hidden, **cache.outputs}
        cache.entering, cache.outputs = None, {}
        self._check_outputs(outputs, start, stop)
        final = outputs[-1 if stop == self.n_layers else stop - 1]
        return Pass(out.logits if whole else None, final, {i: outputs[i] for i in reads})

    def per_type(self, mask: Callable[[int | None], Tensor]) -> Tensor | dict[str, Tensor]:
        """Masks as the model takes them, made by `mask` of each layer type's window: one, or one for each type."""
        masks = {name: mask(window) for name, window in self.windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))
