"""Targets that no tree can run over: chains, verified by the model's own cache, a copy of which is gone back to.

Attention that computes positions or choices of entries by itself, and states of kinds that have no form over trees,
go on rightly from a cache over several tokens. Each row has its own; a pass runs a copy. Where all its nodes are
accepted, the copy stays. Else the accepted tokens wait, and the next pass runs them again before its own.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.core.cache import KVCache
from selfspec.core.passes import Pass
from selfspec.core.probe import deviation, probe, tolerance
from selfspec.core.support import cache_name, refuse_any
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, ancestors, trusted
from selfspec.core.verify import WalkNoise, walk
from selfspec.utils.errors import one_line

WAITING = 32  # accepted tokens that are run again with every pass at most


class ChainCache:
    """The states of B rows. states: the model's own caches, None at the beginning; waiting: accepted tokens of each row
    that its state has not seen; ran: of the last pass, each row's tokens and the state behind them all."""

    idle = 0

    def __init__(self, target: ChainTarget, rows: int, capacity: int, limit: int) -> None:
        """capacity, limit: as of `KVCache`, by which drafters size caches of their own."""
        self.target, self.lengths = target, [0] * rows
        self.capacity, self.limit = capacity, limit
        self.states: list[Any] = [None] * rows
        self.waiting: list[list[int]] = [[] for _ in range(rows)]
        self.ran: list[tuple[list[int], Any]] = []

    def commit(self, paths: list[list[int]]) -> None:
        """Keep the first nodes of the last pass's chains."""
        for row, path in enumerate(paths):
            tokens, state = self.ran[row]
            if len(path) == len(tokens):
                self.states[row], self.waiting[row] = state, []
                continue
            waiting, end = self.waiting[row] + tokens[: len(path)], self.lengths[row] + len(path)
            if len(waiting) > WAITING:
                _, self.states[row] = self.target.run(waiting, self.states[row], end)
                waiting = []
            self.waiting[row] = waiting
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]
        self.ran = []

    def select(self, rows: Tensor) -> None:
        """Keep these rows, int64 [B'], in this order."""
        left = rows.tolist()
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

    def _stack(self) -> nn.ModuleList:
        with suppress(ValueError):
            return super()._stack()
        return nn.ModuleList()  # no drafter can read its layers

    @property
    def exact(self) -> str:
        return "up to rounding"

    def use_engine(self, name: str) -> None:
        """Raises ValueError for any but the eager one."""
        if name != "eager":
            raise ValueError(f"engine={name}: {self.why}; it is served by chains, which run eagerly: take engine=eager")

    def check_drafter(self, drafter: object) -> None:
        """Raises ValueError for one whose trees must run as they are."""
        if not getattr(getattr(drafter, "drafter", drafter), "prunable", True):  # `Auto` holds another
            raise ValueError(f"{type(drafter).__name__} needs its whole tree to run, but {self.why}")

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
        raise ValueError(f"{self.why}; it is served by chains, without drafters that run parts of the target")

    def run(self, tokens: list[int], state: Any, end: int) -> tuple[Any, Any]:
        """The model's output on tokens that end at position `end` - 1, and its cache behind them; `state` stays."""
        ids = torch.tensor([tokens], device=self.device)
        name, told = cache_name(self.model), dict[str, Any]()
        if "position_ids" in inspect.signature(self.model.forward).parameters:
            told["position_ids"] = torch.arange(end - len(tokens), end, device=self.device)[None]
        if state is not None:
            told[name] = copy.deepcopy(state)
        out = self.model(input_ids=ids, use_cache=True, **told)
        return out, out[name]

    def forward(
        self,
        tree: DraftTree,
        cache: KVCache,
        logits: bool = True,
        layers: tuple[int, int] | None = None,
        hidden: Tensor | None = None,
        reads: tuple[int, ...] = (),
        ran: int = 0,
        noise: WalkNoise | None = None,
        prompt: bool = False,
    ) -> Pass:
        """One pass over a chain of each row, see `shaped`; as `Target.forward`."""
        if layers not in (None, (0, self.n_layers)) or ran or hidden is not None:
            self.part()
        states = cast(ChainCache, cache)
        rows: list[tuple[Tensor, Tensor, dict[int, Tensor]]] = []
        tokens, parents = tree.tokens, tree.parents
        before = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device)
        sizes = (parents == before).long().cumprod(1).sum(1).tolist()
        states.ran = []
        with self._reading(reads) as outputs:
            for row, size in enumerate(sizes):
                chain, waiting = tokens[row, :size].tolist(), states.waiting[row]
                out, state = self.run(waiting + chain, states.states[row], states.lengths[row] + size)
                states.ran.append((chain, state))
                kept = {i: part[0, len(waiting) :] for i, part in outputs.items()}
                rows.append((out.logits[0, len(waiting) :], kept.pop(-1), kept))
        width = tokens.shape[1]

        def stacked(parts: list[Tensor]) -> Tensor:
            return torch.stack([torch.nn.functional.pad(part, (0, 0, 0, width - len(part))) for part in parts])

        scores = stacked([row[0] for row in rows])
        walked = None if noise is None else walk(scores, tokens, parents, ancestors(parents), noise)
        features = {i: stacked([row[2][i] for row in rows]) for i in reads}
        return Pass(scores if logits else None, stacked([row[1] for row in rows]), features, walked)

    def text(self, tokens: Tensor, logits: bool = True, *args: Any, **kwargs: Any) -> Pass:
        """One pass over whole texts, int64 [B, S]; as `Target.text`, without parts, masks and documents."""
        reads = kwargs.pop("reads", ())
        if args or any(value is not None for value in kwargs.values()):
            self.part()
        with self._reading(reads) as outputs:
            out = self.model(input_ids=tokens, use_cache=False)
            return Pass(out.logits if logits else None, outputs[-1], {i: outputs[i] for i in reads})

    @contextmanager
    def _reading(self, reads: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """Inside, passes put the outputs of these layers, and the decoder's as -1, into a dict."""
        outputs: dict[int, Tensor] = {}

        def keep(index: int, module: Any, given: Any, out: Any) -> None:
            outputs[index] = out if isinstance(out, Tensor) else out[0]

        hooked = {-1: self.decoder, **{i: self.layers[i] for i in reads}}
        hooks = [module.register_forward_hook(partial(keep, i)) for i, module in hooked.items()]
        try:
            yield outputs
        finally:
            for hook in hooks:
                hook.remove()


def served(model: PreTrainedModel) -> Target:
    """The model as a target of trees, or with a line that says why not, of chains. Raises ValueError, with the reasons,
    for one that can be neither."""
    try:
        target = Target(model)
        probe(target)
        return target
    except ValueError as error:
        why = str(error)
    try:
        chains = ChainTarget(model, why)
        _probe_chains(chains)
    except Exception as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(why if reason == why else f"{why}; nor are chains served: {reason}") from error
    print(f"served by chains alone, not trees: {why}", file=sys.stderr)
    return chains


@torch.inference_mode()
def _probe_chains(target: ChainTarget) -> None:
    """Raises ValueError where the model does not go on from its cache, over several tokens and over one, as over the
    whole text."""
    text = [(1 + 7 * i) % target.vocab_size for i in range(14)]
    whole = target.text(torch.tensor([text], device=target.device)).logits
    assert whole is not None
    state, at = None, 0
    for width in (6, 4, 1, 3):
        out, state = target.run(text[at : at + width], state, at + width)
        parts = [deviation(a, b) for a, b in zip(out.logits[0], whole[0, at : at + width], strict=True)]
        at += width
        if not sorted(parts)[width // 2] < tolerance(target.dtype, True):
            raise ValueError(f"{type(target.model).__name__} does not go on from its cache as over the whole text")
