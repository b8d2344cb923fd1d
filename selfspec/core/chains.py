"""Targets that no tree can run over, served by chains.

Some models compute positions or select entries inside their attention, or keep a state of a kind that has no form over
trees, so no tree mask reaches them. They can still go on from a cache by several tokens. Each row has a cache of the
model's own; a pass runs on a copy. If all drafted tokens are accepted, the copy takes its place. Else the accepted
tokens are run again at the beginning of the next pass.
"""

from __future__ import annotations

import copy
import inspect
import threading
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.core.cache import KVCache
from selfspec.core.pass_cache import TextCache
from selfspec.core.passes import Pass
from selfspec.core.support import cache_name, decoder_of, layer_stack, refuse_any, view
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, ancestors, trusted
from selfspec.core.verify import Kept, WalkNoise, walk
from selfspec.utils.exactness import ROUNDED, exactness

WAITING = 32  # accepted tokens that a pass runs again at most; more are run into the state at once


class ChainCache:
    """The states of B rows. states: the model's own caches, None at the beginning; waiting: accepted tokens of each row
    that its state has not seen; ran: of the last pass, each row's tokens and the state behind them all."""

    idle = 0

    def __init__(self, target: ChainTarget, rows: int, capacity: int, limit: int) -> None:
        """capacity, limit: as of `KVCache`, by which drafters size caches of their own."""
        self.target, self.engine, self.lengths = target, target.engine, [0] * rows
        self.capacity, self.limit = capacity, limit
        self.states: list[Any] = [None] * rows
        self.waiting: list[list[int]] = [[] for _ in range(rows)]
        self.ran: list[tuple[list[int], Any]] = []

    def row_lengths(self) -> Tensor:
        """int64 [rows]."""
        return torch.tensor(self.lengths, device=self.target.device)

    def commit(self, paths: list[list[int]], kept: Kept | None = None) -> None:
        """Keep the first nodes of the last pass's chains."""
        for row, path in enumerate(paths):
            tokens, state = self.ran[row]
            if len(path) == len(tokens):
                self.states[row], self.waiting[row] = state, []
                continue
            waiting = self.waiting[row] + tokens[: len(path)]
            if len(waiting) > WAITING:
                start = self.lengths[row] - len(self.waiting[row])
                _, self.states[row] = self.target.run(waiting, start, self.states[row])
                waiting = []
            self.waiting[row] = waiting
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]
        self.ran = []

    def select(self, left: list[int]) -> None:
        """Keep these rows, in this order."""
        self.lengths, self.states = [self.lengths[i] for i in left], [self.states[i] for i in left]
        self.waiting = [self.waiting[i] for i in left]

    def close(self) -> None:
        """The call is over."""
        self.states = []


class ChainTarget(Target):
    """A stock model that verifies chains. Drafters that run parts of the target refuse it."""

    refused = staticmethod(refuse_any)

    def __init__(self, model: PreTrainedModel, why: str) -> None:
        """why: no tree can run over it. Raises ValueError for a model that no chain can be verified on either."""
        super().__init__(model)
        self.why = why
        self._reading: dict[tuple[int, ...], nn.Module] = {}  # views, by the layers that their hooks read
        self._aside = threading.local()
        self._positions = "position_ids" in inspect.signature(model.forward).parameters
        self.state_size = self.hidden_size  # of what its decoder gives, as the probe finds it

    @property
    def layers(self) -> nn.ModuleList:
        with suppress(ValueError):
            return layer_stack(self.model)
        raise ValueError(f"{type(self.model).__name__} has no single stack of layers, which this drafter reads")

    @property
    def exact(self) -> str:
        types = getattr(self.model.config.get_text_config(), "layer_types", None) or ()
        return ROUNDED if "indexed_attention" in types else self.exact_between  # which keys count turns on rounding

    @property
    def exactness(self) -> str:
        return exactness(f"{self.dtype_name}, chains", self.exact)

    def forget(self) -> None:
        super().forget()
        self._reading = {}

    def use_engine(self, name: str) -> None:
        """auto is the eager one. Raises ValueError for any other."""
        if name not in ("auto", "eager"):
            raise ValueError(
                f"engine={name}: {self.why}; it is served by chains, which run eagerly: take engine=eager (selfspec "
                "limits compares both engines and does not serve it)"
            )

    def use_width(self, width: int | None) -> None:
        """Raises ValueError for any width."""
        if width is not None:
            raise ValueError(f"width={width}: {self.why}, so its passes run chains of any length; leave width out")

    def check_drafter(self, drafter: object) -> None:
        """Raises ValueError for one whose trees must run as they are."""
        drafter = getattr(drafter, "drafter", drafter)  # `Auto` holds another
        if not getattr(drafter, "prunable", True):
            raise ValueError(f"{type(drafter).__name__} needs its whole tree to run, but {self.why}")
        reading = [*getattr(drafter, "members", {}).values(), drafter]
        trained = any(isinstance(one, nn.Module) and any(True for _ in one.parameters()) for one in reading)
        if trained and self.state_size != self.hidden_size:
            raise ValueError(
                f"the decoder of {type(self.model).__name__} gives states of {self.state_size} numbers, not of "
                f"{self.hidden_size}; trained drafters can not read them: take prompt_lookup"
            )

    def shaped(self, tree: DraftTree) -> DraftTree:
        """The likeliest chain of each row, from the root down; spare nodes behind the shorter ones."""
        scores = None if tree.scores is None else tree.scores.expand_as(tree.tokens).tolist()
        chains: list[list[int]] = []
        for row, children in enumerate(tree.children):
            chain, node = [0], 0
            while below := [c for c in children[node] if tree.plain is None or c < tree.plain]:
                node = below[0] if scores is None else max(below, key=scores[row].__getitem__)
                chain.append(node)
            chains.append(chain)
        depth = max(map(len, chains))
        at = torch.tensor([chain + [0] * (depth - len(chain)) for chain in chains], device=tree.tokens.device)
        parents = [[*range(-1, len(chain) - 1), *[-1] * (depth - len(chain))] for chain in chains]
        picked = tree.scores.expand_as(tree.tokens).gather(1, at) if tree.scores is not None else None
        made = trusted(tree.tokens.gather(1, at), torch.tensor(parents, device=at.device), picked)
        if tree.sources is None:
            return made
        sources = zip(tree.sources, at.tolist(), strict=True)
        return made.with_sources([[row[i] for i in chain] for row, chain in sources])

    def cache(self, rows: int, capacity: int, limit: int = 0) -> KVCache:
        return cast(KVCache, ChainCache(self, rows, capacity, limit))

    def part(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ValueError."""
        raise ValueError(
            f"{self.why}; it is served by chains, without drafters that run parts of the target: take drafter=medusa, "
            "eagle3, block, prompt_lookup, or sequential with drafter.prefix=false"
        )

    def run(
        self, tokens: list[int], start: int, state: Any, reads: tuple[int, ...] = ()
    ) -> tuple[dict[int, Tensor], Any]:
        """Logits (as -2), the outputs of the decoder (as -1) and of the layers read, all [n, ...], on n tokens behind a
        cache of `start` tokens, and the cache behind them; `state` stays."""
        name = cache_name(self.model)
        behind = {} if state is None else {name: copy.deepcopy(state)}
        ids = torch.tensor([tokens], device=self.device)
        outputs, out = self._passed(reads, ids, start, use_cache=True, **behind)
        if name not in out:
            raise ValueError(f"{type(self.model).__name__} returns no {name} to go on from")
        return {i: part[0] for i, part in outputs.items()}, out[name]

    def _passed(
        self, reads: tuple[int, ...], ids: Tensor, start: int, **settings: Any
    ) -> tuple[dict[int, Tensor], Any]:
        """A pass through a view of the model that puts the outputs of these layers, and the decoder's (as -1), aside,
        beside the logits (as -2). Positions are given as transformers' generate gives them: some models count them by
        what is no padding."""
        if (reading := self._reading.get(reads)) is None:
            self.follow()
            reading = model = view(self.model)
            layers = layer_stack(model) if reads else nn.ModuleList()
            for i in reads:
                layers[i].register_forward_hook(partial(self._keep, i))
            decoder_of(model).register_forward_hook(partial(self._keep, -1))
            self._reading[reads] = reading
        self._aside.outputs = {}
        if self._positions:
            settings["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device)[None].expand_as(ids)
        out = reading(input_ids=ids, **settings)
        outputs, self._aside.outputs = self._aside.outputs, {}
        return {**outputs, -2: out.logits}, out

    def _keep(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook; several threads may run passes at once."""
        states = output if isinstance(output, Tensor) else output[0]
        if index >= 0 and states.dim() != 3:
            raise ValueError(
                f"layers of {type(self.model).__name__} give {list(states.shape)} instead of one state a token, which "
                "drafters that read layers can not take: choose medusa or prompt_lookup"
            )
        self._aside.outputs[index] = states

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
        """One pass over a chain of each row, see `shaped`; as `Target.forward`."""
        if layers not in (None, (0, self.n_layers)) or hidden is not None:
            self.part()
        states = cast(ChainCache, cache)
        rows: list[dict[int, Tensor]] = []
        tokens, parents = tree.tokens, tree.parents
        before = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device)
        sizes = (parents == before).long().cumprod(1).sum(1).tolist()
        states.ran = []
        limit = self.max_positions or 2**62
        for row, size in enumerate(sizes):
            size = min(size, limit - states.lengths[row])  # what stands behind is never emitted
            chain, waiting = tokens[row, :size].tolist(), states.waiting[row]
            start = states.lengths[row] - len(waiting)
            outputs, state = self.run(waiting + chain, start, states.states[row], reads)
            states.ran.append((chain, state))
            rows.append({i: part[len(waiting) :] for i, part in outputs.items()})
        width = tokens.shape[1]

        def stacked(index: int) -> Tensor:
            return torch.stack([nn.functional.pad(row[index], (0, 0, 0, width - len(row[index]))) for row in rows])

        scores = stacked(-2)
        walked = None if noise is None else walk(scores, tokens, parents, ancestors(parents), noise)
        return Pass(scores if logits else None, stacked(-1), {i: stacked(i) for i in reads}, walked)

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
        """One pass over whole texts, int64 [B, S]; as `Target.text`, without parts and masks. What goes into `cache` is
        not kept."""
        if any(value is not None for value in (layers, hidden, masks, positions)):
            self.part()
        if documents is None:
            whole = self._passed(reads, tokens, 0, use_cache=False)[0]
        else:  # each document alone
            counts = [of.unique_consecutive(return_counts=True)[1].tolist() for of in documents]
            texts = [[part[None] for part in row.split(of)] for row, of in zip(tokens, counts, strict=True)]
            rows = [[self._passed(reads, part, 0, use_cache=False)[0] for part in row] for row in texts]
            whole = {i: torch.cat([torch.cat([part[i] for part in row], 1) for row in rows]) for i in rows[0][0]}
        return Pass(whole[-2] if logits else None, whole[-1], {i: whole[i] for i in reads})
