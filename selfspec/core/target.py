"""The frozen target: a stock transformers model that runs over trees, whole or in parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.core import support
from selfspec.core.cache import KVCache, one_token
from selfspec.core.changes import Changes
from selfspec.core.masks import restarting, within
from selfspec.core.pass_cache import TextCache
from selfspec.core.passes import Entry, Part, Pass, Skipped, by_type, last_output, read_output, sized, tree_pass_alone
from selfspec.core.quantized import follow_weights
from selfspec.core.recurrent.mixers import LayerState, mixers, over_trees
from selfspec.core.tree import DraftTree
from selfspec.core.verify import WalkNoise
from selfspec.core.width import attend_by_paths, check_width
from selfspec.engine.choose import engine_for
from selfspec.engine.engine import Engine
from selfspec.engine.keys import ROUNDS, float32_products, has_own_code
from selfspec.utils.exactness import EXACT, ROUNDED, TESTED, exactness


class Target:
    """A decoder of transformers with full or sliding attention, or with layers that keep a state, unmodified and
    frozen.

    Passes run over parts: structural views of the model, built on first use and kept, that share its tensors and hold
    no state, so that several calls and threads can use them at once and the model itself can be used beside them.
    """

    refused = staticmethod(support.refuse)

    def __init__(
        self, model: PreTrainedModel, frozen: bool = True, returns: int | None = None, engine: Engine | None = None
    ) -> None:
        """frozen: False leaves requires_grad as it is, for views that hold trained parts; returns: length of the tuple
        that a layer returns, 0 for a bare tensor (None: a pass finds out when it is needed).

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
        self.decoder: nn.Module = support.decoder_of(model)
        self.lm_head: nn.Linear = model.get_output_embeddings()
        self.saved_dtype = self.dtype
        self.n_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = self.lm_head.out_features
        # Whether its decoder is not in memory, but for single tensors
        self.partial = any(p.is_meta for p in self.decoder.parameters()) and self.device.type != "meta"
        self.recurrent = any(True for _ in mixers(self.decoder))  # whether some layers keep a state
        self._parts: dict[tuple[int, int, tuple[int, ...]], tuple[Part, Part]] = {}
        self.changes = Changes(model)
        self.int8 = self.changes.int8  # whether some of its linear maps multiply in 8 bits
        self.width: int | None = None  # nodes of every pass; see `use_width`
        self.tried: dict[tuple[object, ...], bool] = {}  # of calls of one width, see `same_bits`
        self.rebuilt = -1  # times that parts were rebuilt, but the first; views notice by it that they are old
        self._returns, self.engine = returns, engine or Engine()
        self._like: tuple[list[tuple[Tensor, Tensor] | None], dict[int, LayerState]] | None = None
        self._follows = frozen  # a view with trained parts changes with what it is a view of
        self._rebuild()

    def _rebuild(self, merged: bool = False) -> None:
        """Read the config as it is now; parts are made anew. merged: adapters went into weights, or out of them."""
        if merged:
            follow_weights(self.model, merged=True)
        self.forget()
        self._parts, self._like, self.tried = {}, None, {}
        self.max_positions, self.limited_by = support.longest_context(self.model)
        self.windows = support.attention_windows(self.model)
        self.rebuilt += 1

    @property
    def layers(self) -> nn.ModuleList:
        return support.layer_stack(self.model)

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

    def check(self) -> None:
        """At the start of every call: parts follow what was hooked into the model or changed on it since. Raises
        ValueError where it was cast, moved, resized or set to training after it was loaded."""
        self.changes.check()
        self.follow()
        follow_weights(self.model)

    def follow(self) -> None:
        """Parts are made anew where the model has other hooks, adapters or attributes than they were made of."""
        if self._follows:
            self.changes.follow(self.refused, self._rebuild)

    def forget(self) -> None:
        """What was compiled for this target's parts is dropped; they will not be used again."""
        self.engine.forget([part.module for pair in self._parts.values() for part in pair])

    @property
    def returns(self) -> int:
        """How many values the model's layers return: some families' tuples of them; 0 for a tensor alone."""
        if self._returns is None:
            self._returns = support.returned_values(self.model)
        return self._returns

    @property
    def end_tokens(self) -> frozenset[int]:
        """The EOS ids of its generation config."""
        eos = getattr(self.model.generation_config, "eos_token_id", None)
        name = f"target {self.name!r}: generation_config.eos_token_id"
        return frozenset() if eos is None else support.tokens_of(eos, name)

    @property
    def exact(self) -> str:
        """Whether speculative output is that of plain decoding "by construction", since every pass so far gave a row
        the bits that it has in any other; "in every test", since in float32 rounding is far below what separates
        tokens; or "up to rounding" of near-ties."""
        constructed = self.engine.row_invariant("tree_pass_alone") and not self.recurrent
        return EXACT if constructed else self.exact_between

    @property
    def exact_between(self) -> str:
        """The same of a text of which some passes ran before they were compiled: compiled ones have other bits."""
        rounded = not {"highest", "ieee", "none"}.issuperset(float32_products())  # to TF32 or bfloat16
        narrow = min(p.dtype.itemsize for p in self.model.parameters() if p.is_floating_point())
        return TESTED if narrow >= 4 and not (rounded and narrow == 4) else ROUNDED

    @property
    def exactness(self) -> str:
        """What holds of speculative output in this dtype and engine, as a line for users."""
        engine, tried = self.engine, self.tried
        waits = ROUNDS and engine.waited > 0 and not (engine.made or engine.varying or self.recurrent)
        exact = EXACT if tried and all(tried.values()) else self.exact
        return exactness(f"{self.dtype_name}, {engine.name} engine", exact, waits)

    @property
    def compiled(self) -> int:
        """Functions that its engine has compiled or read from disk, and calls that ran before they were."""
        return len(self.engine.made) + self.engine.waited

    def use_engine(self, name: str) -> None:
        """Run passes by this engine from now on (see `engine_for`); drafters that are built already keep theirs."""
        self.engine, self.tried = engine_for(name, self.device), {}

    def use_width(self, width: int | None) -> None:
        """Run `width` nodes in every pass from now on: a token has the same bits in each. Raises as `check_width`."""
        if width is not None:
            check_width(width, self.model, self.decoder, self.recurrent)
        self.width = width
        self._rebuild()

    def check_drafter(self, drafter: object) -> None:
        """Raises ValueError for a drafter that can not draft for this target."""

    def shaped(self, tree: DraftTree) -> DraftTree:
        """What of a draft tree a pass runs: all of it."""
        return tree

    def cache(self, rows: int, capacity: int, limit: int = 0) -> KVCache:
        """An empty cache for `capacity` entries a row; its first pass raises MemoryError if `limit` do not fit."""
        like, states = self._one_token()
        more = limit, self.engine, self.device, states, self.width is not None
        return KVCache(like, rows, limit if self.width else capacity, *more)

    def _one_token(self) -> tuple[list[tuple[Tensor, Tensor] | None], dict[int, LayerState]]:
        if self._like is None:
            self._like = one_token(self.model, self.n_layers, self.device)
        return self._like

    def part(self, start: int, stop: int, reads: tuple[int, ...] = (), logits: bool = True) -> Part:
        """A view of the model that runs layers start to stop - 1 on what enters with the cache, puts the outputs of
        layers `reads`, of layer stop - 1 and of the decoder into that cache, and leaves out all other layers."""
        name = start, stop, tuple(sorted(set(reads)))
        if (pair := self._parts.get(name)) is None:
            self.follow()
            parts = self._parts  # another thread may begin new ones meanwhile
            model = support.view(self.model)
            model.config.return_dict = True
            if self.width is not None:
                attend_by_paths(model)
            layers = support.layer_stack(model)
            if self.recurrent:
                over_trees(model)
            for i in range(start):  # they keep the index of those behind them, by which masks and caches are found
                layers[i] = (Entry if i == start - 1 else Skipped)(layers[i], self.returns)
            del layers[stop:]
            last = {stop - 1} if start < stop < self.n_layers else set()
            for i in {i for i in reads if start <= i < stop} | last:
                layers[i].register_forward_hook(partial(read_output, i), with_kwargs=True)
            decoder = support.decoder_of(model)
            decoder.register_forward_hook(partial(read_output, -1), with_kwargs=True)
            around = (m for m in model.modules() if m is not decoder and decoder in m.modules())
            hooked = any(has_own_code(m) and not hasattr(m, "_hf_hook") for m in around)
            settings = self.windows, (self.max_positions or 2**62) - 1, self.dtype, self.width or 0
            whole = Part.of(model, *settings)  # for a prompt too, where a hook may change what enters the decoder
            pair = parts[name] = whole, whole.of_prompts() if hooked else Part.of(decoder, *settings)
        return pair[0 if logits else 1]

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
        tokens, parents = sized(tree, idle, nodes if prompt else self.width or self.engine.size(nodes))
        kv = cache.view(start, stop, tokens.shape[1])
        if hidden is not None and hidden.shape[:2] != tokens.shape:
            hidden = nn.functional.pad(hidden, (0, 0, 0, tokens.shape[1] - nodes, 0, idle))
        if noise is not None and noise.values is not None and idle:
            noise = noise._replace(values=nn.functional.pad(noise.values, (0, 0, 0, 0, 0, idle)))
        part = self.part(start, stop, reads, logits and stop == self.n_layers)
        arguments = part, kv, hidden, tokens, parents, 0, noise
        out, outputs, walked, left = self.engine.run(tree_pass_alone, *arguments, compiled=not prompt)
        cache.leave(left)
        outputs = {layer: states[:rows, :nodes] for layer, states in outputs.items()}
        final = last_output(self.model, outputs, -1 if stop == self.n_layers else stop - 1)
        outputs |= {} if hidden is None else {start - 1: hidden[:rows, :nodes]}
        features = {i: outputs[i] for i in reads}
        out, walked = (None if one is None else one[:rows] for one in (out, walked))
        return Pass(None if out is None else out[:, :nodes], final, features, walked)

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
            if documents is not None and "full_attention" not in self.windows:
                full = within(documents, self.dtype, None)  # states have no window
            cache.see(None if full is None else (full[:, 0] == 0).expand(len(tokens), -1, -1))
            if all(pair is None for pair in self._one_token()[0]):  # no layer attends
                masks = None
        whole = logits and stop == self.n_layers
        cache.entering, cache.outputs = hidden, {}
        part = self.part(start, stop, reads, whole)
        out = part.module(input_ids=tokens, attention_mask=masks, use_cache=True, **part.arguments(positions, cache))
        outputs = {layer: states.to(tokens.device) for layer, states in cache.outputs.items()}
        outputs |= {} if hidden is None else {start - 1: hidden}
        cache.entering, cache.outputs = None, {}
        final = last_output(self.model, outputs, -1 if stop == self.n_layers else stop - 1)
        return Pass(out.logits if whole else None, final, {i: outputs[i] for i in reads})

    def per_type(self, mask: Callable[[int | None], Tensor]) -> Any:
        """Masks as the model takes them, made by `mask` of each layer type's window."""
        return by_type({name: mask(window) for name, window in self.windows.items()})
