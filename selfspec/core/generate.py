"""Decoding: the plain loop, which is the oracle, and the speculative loop, which must emit the same tokens."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from selfspec.core.contract import Accepted, Context, Drafts, Session, checked
from selfspec.core.options import Options, check
from selfspec.core.rows import MAX_NODES, Rows
from selfspec.core.same_bits import same_bits
from selfspec.core.stats import Span, Stats, elapsed, moment
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain
from selfspec.core.verify import Kept
from selfspec.utils.checks import integer
from selfspec.utils.exactness import EXACT, LOSSY

R = TypeVar("R")
# What one pass added: (index of the prompt, its tokens, whether each of them came from the tree)
Added = list[tuple[int, list[int], list[bool]]]
_ROOM = 2**15  # entries of Python's stack that compiled code, one local for each tensor, takes at most
_MANY = 200  # drafted tokens, none accepted, before a warning
_PASSES = ("tree_pass_alone", "_grown")  # functions of the engine: what verifies, and what drafts
# By drafter, how many drafted tokens were rejected so far; infinity once one was accepted
_rejected: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()


@dataclass
class Result:
    """token_ids: new tokens of each row. from_draft: for each of them whether the tree held it (False: bonus token).
    records: where asked for, each token's logits and processed scores, both [V]. stopped: whether an end token or a
    criterion ended the row, not its length."""

    token_ids: list[list[int]]
    from_draft: list[list[bool]]
    stats: Stats
    records: list[list[tuple[Tensor, Tensor]]]
    stopped: list[bool]

    @classmethod
    def of(cls, rows: int) -> Result:
        """Of so many rows, before anything was emitted."""
        return cls(
            [[] for _ in range(rows)], [[] for _ in range(rows)], Stats(), [[] for _ in range(rows)], [False] * rows
        )


def autoregressive(target: Target, prompts: Sequence[Sequence[int]], options: Options) -> Result:
    """Plain decoding, one token per pass: the oracle for `speculative` and the baseline of every speedup."""
    return speculative(target, prompts, options, None)


@torch.inference_mode()
def speculative(
    target: Target, prompts: Sequence[Sequence[int]], options: Options, drafter: Drafts | None, nodes: int = 16
) -> Result:
    """Draft a tree of at most `nodes` nodes, verify it in one pass, repeat: the tokens of `autoregressive` in fewer
    passes, whatever the drafter proposes."""
    result = Result.of(len(prompts))
    with_room(deque, speculative_steps(target, prompts, options, drafter, nodes, result), 0)
    return result


def speculative_steps(
    target: Target,
    prompts: Sequence[Sequence[int]],
    options: Options,
    drafter: Drafts | None,
    nodes: int,
    result: Result,
) -> Iterator[Added]:
    """`speculative`, one pass at a time; `result`, empty, is filled on the way. Bad arguments are refused before the
    first step."""
    check(target, prompts, options)
    if drafter is not None:
        target.check_drafter(drafter)
    if not 1 <= integer("nodes", nodes) <= MAX_NODES:
        raise ValueError(f"nodes={nodes} must lie between 1 (the root alone) and {MAX_NODES}")
    if target.width is not None and drafter is not None and nodes > target.width:
        raise ValueError(f"nodes={nodes}: every pass runs width={target.width} nodes; give fewer, or a larger width")
    return _steps(target, prompts, options, drafter if nodes > 1 else None, nodes, result)


@torch.inference_mode()
def _steps(
    target: Target,
    prompts: Sequence[Sequence[int]],
    options: Options,
    drafter: Drafts | None,
    nodes: int,
    result: Result,
) -> Iterator[Added]:
    """The one loop. drafter: None for plain decoding, in which every tree is a root."""
    stats, device, built = result.stats, target.device, target.rebuilt
    compiled, waits, below = target.compiled, [target.engine.waits(name) for name in _PASSES], False
    begun, spans = moment(device), list[Span]()  # of the last pass; booked on a GPU after the next walk is read
    rows = Rows(target, prompts, options, result.records, result.stopped)
    session = None if drafter is None else drafter.session(target, len(prompts))
    reads, cache = () if drafter is None else drafter.reads, rows.cache
    alike = False
    if target.width is not None:
        walks = ("greedy" if rows.noise is None else "sampled") if rows.walks else ""
        trial = len(prompts), cache.capacity, reads, walks, rows.limits
        alike, begun = same_bits(target, *trial), moment(device)
    # Drafted tokens before the first accepted one; passes of rows for which something was drafted
    rejected: Tensor | int = 0
    drafts: Tensor | int = 0
    try:
        rows.prefill(session, reads)
        start = moment(device)
        spans = [("prefill", begun, start)]
        roots = rows.roots()
        tree = chain(roots[:, None])
        while rows.alive:
            if target.rebuilt != built:  # by another call, which met the model in another state
                target.check()
                built = target.rebuilt
            tree = _tree(session, rows, roots, tree, nodes)
            below = below or tree.start > 0
            alike = alike and tree.start == 0 and tree.through is None and tree.tokens.shape[1] <= (target.width or 0)
            drafted = start if session is None else moment(device)
            noise, layers = rows.walk_noise(tree), (tree.start, target.n_layers)
            out = (tree.through or target).forward(tree, cache, True, layers, tree.hidden, reads, noise=noise)
            passed = moment(device)
            if session is not None:
                nodes_below = tree.parents[:, 1 : tree.plain] >= 0
                rejected = rejected if stats.accepted else rejected + nodes_below.sum()
                drafts = drafts + (nodes_below.any(1).sum() if len(nodes_below) > 1 else nodes_below.shape[1] > 0)
            paths, emitted, kept = rows.accepted(tree, out)
            stats.book(spans)
            before = rows.alive, cache.lengths
            cache.commit(paths, kept)
            tokens, going = rows.advance(emitted)
            added = _added(rows.alive, paths, tokens, result)
            rows.select(going)
            if going:
                kept = kept if len(going) == len(paths) else Kept(kept.walked[going])
                roots = kept.bonus
                if session is not None:
                    left = [paths[i] for i in going]
                    session.observe(Accepted(out.hidden, out.features, going, left, out.logits, kept))
            spans = [("draft", start, drafted), ("target", drafted, passed), ("other", passed, moment(device))]
            stats.ran(tree.tokens.shape[1])
            if options.watch is not None:
                rows.watched(before, tree, paths, tokens, [elapsed(first, last) for _, first, last in spans])
            if isinstance(start, float):  # nothing to wait for
                stats.book(spans)
            yield added
            start = moment(device)
    finally:
        cache.close()
        if target.width is not None and not alike:  # some of what ran was no pass of this width
            target.tried["aside",] = False
        stats.exact = LOSSY if options.relaxed else _exact(target, below, waits, alike)
        stats.compiled += target.compiled - compiled
        with suppress(RuntimeError):  # of a GPU that failed, which another error tells
            stats.book(spans)
            stats.rejected, stats.drafts = stats.rejected + int(rejected), stats.drafts + int(drafts)
        _warn_of_none(drafter, stats)


def _exact(target: Target, below: bool, waits: list[float], alike: bool) -> str:
    """How exact a call was. below: whether drafts ran the target's first layers, which are then a part of its passes;
    waits: of `_PASSES`, before the call; alike: whether passes of one width gave tokens the same bits."""
    ran = _PASSES if below else _PASSES[:1]
    alone = any(target.engine.waits(name) > before for name, before in zip(ran, waits, strict=False))
    if alike and not alone:
        return EXACT
    same = not below or target.engine.row_invariant(_PASSES[1])
    return target.exact if same and not alone else target.exact_between


def _added(alive: list[int], paths: list[list[int]], tokens: list[list[int]], result: Result) -> Added:
    """Take in and return what a pass added to the rows that were alive in it. tokens: cut where rows end."""
    added: Added = []
    for row, path, cut in zip(alive, paths, tokens, strict=True):
        count = min(len(path) - 1, len(cut))
        result.stats.count(count, len(cut))
        added.append((row, cut, [True] * count + [False] * (len(cut) - count)))
        result.token_ids[row] += cut
        result.from_draft[row] += added[-1][2]
    return added


def _tree(session: Session | None, rows: Rows, roots: Tensor, last: DraftTree, nodes: int) -> DraftTree:
    """What the next pass runs, drafted or a root alone, on the rows' last tokens. last: the tree of the pass before."""
    if session is None:
        return last.with_tokens(roots[:, None]) if len(last.tokens) == len(roots) else chain(roots[:, None])
    target, cache, temperature = rows.target, rows.cache, rows.options.sampling.temperature
    # Copies: what a drafter of a user's own writes to them has no effect
    seen = roots.clone(), [*cache.lengths], [[*row] for row in rows.tokens]
    context = Context(*seen, nodes, temperature, rows.noise, target, cache)
    return target.shaped(checked(session.propose(context), context).on(roots))


def _warn_of_none(drafter: object, stats: Stats) -> None:
    """Warn, once for a drafter with weights, that nothing of what it drafted in its first calls is accepted."""
    drafter = getattr(drafter, "drafter", drafter)  # of what sizes its trees
    if not isinstance(drafter, nn.Module) or next(drafter.parameters(), None) is None:
        return
    before = _rejected.get(drafter, 0)
    count = _rejected[drafter] = math.inf if stats.accepted else before + stats.rejected
    if before < _MANY <= count < math.inf:
        warnings.warn(
            f"0 of {count:.0f} drafted tokens accepted: does this drafter belong to this target? The output is the "
            "target's own all the same",
            stacklevel=2,
        )


def with_room(function: Callable[..., R], *args: Any) -> R:
    """function(*args), with room for the frames below it in one piece. Compiled code has one local for each tensor and
    hundreds of calls. Python maps and unmaps memory at every call out of a frame that ends where a piece of its stack
    does, which it may do by chance."""
    return function(*args)


with_room.__code__ = with_room.__code__.replace(co_stacksize=_ROOM)
