"""Decoding: the plain loop, which is the oracle, and the speculative loop, which must emit the same tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper

from selfspec.core.contract import Accepted, Context, Drafts, Session
from selfspec.core.options import Options, Seen, check, integer
from selfspec.core.processors import PrefixRules
from selfspec.core.sampling import Noise, pick, warp
from selfspec.core.stats import Stats
from selfspec.core.target import Pass, Target
from selfspec.core.tree import DraftTree, chain
from selfspec.core.verify import WalkNoise, read_walk, verify

PREFILL, MAX_NODES = 1024, 1024  # prompt tokens per eager pass; largest draft tree
CHUNKS = (16, 64, 256)  # prompt tokens per compiled pass; each of these is compiled once
# What one pass added: (index of the prompt, its tokens, whether each of them came from the tree)
Added = list[tuple[int, list[int], list[bool]]]
_begun: WeakValueDictionary[int, Session] = WeakValueDictionary()  # sessions that a call was begun with, by id


@dataclass
class Result:
    """token_ids: new tokens of each row. from_draft: for each of them whether the tree held it (False: bonus token).
    records: where asked for, each token's logits and processed scores, both [V]."""

    token_ids: list[list[int]]
    from_draft: list[list[bool]]
    stats: Stats
    records: list[list[tuple[Tensor, Tensor]]]


class _Rows:
    """The rows still being generated, shared by both loops: tokens, noise, cache, and who is finished."""

    def __init__(self, target: Target, prompts: Sequence[Sequence[int]], options: Options) -> None:
        if isinstance(options.seed, int):
            seeds, ids = [options.seed] * len(prompts), list(range(len(prompts)))
        else:
            seeds, ids = list(options.seed), [0] * len(prompts)
        self.target, self.options = target, options
        self.alive = list(range(len(prompts)))
        self.tokens = [list(prompt) for prompt in prompts]
        limit = target.max_positions or 2**62
        self.left = [min(options.max_new_tokens, limit - len(prompt)) for prompt in prompts]
        longest = max(len(p) + n for p, n in zip(prompts, self.left, strict=True))
        self.cache = target.cache(len(prompts), min(longest, max(map(len, prompts)) + 256) + 64, longest)
        self.warpers = options.sampling.warpers() if options.processors is None else options.processors
        self.rules = PrefixRules(self.warpers, options.stops, options.pads or [()] * len(prompts), target.device)
        # Passes walk their trees if nothing warps but a temperature and no logits are recorded.
        self.recording = options.record or options.watch is not None
        unseen = not (options.relaxed or self.recording or self.rules.processors)
        plain = not self.warpers or [type(warper) for warper in self.warpers] == [TemperatureLogitsWarper]
        self.walks = unseen and plain
        self.records: list[list[tuple[Tensor, Tensor]]] = [[] for _ in prompts]
        warper = next((w for w in self.warpers if isinstance(w, TemperatureLogitsWarper)), None)
        temperature = 1.0 if warper is None else warper.temperature
        self.temperature = torch.tensor(temperature, dtype=torch.float64, device=target.device)
        self.noise: Noise | None = None
        if options.sampling.temperature > 0:
            self.noise = Noise(seeds, ids, target.vocab_size, target.device, target.engine)

    def roots(self) -> Tensor:
        return torch.tensor([tokens[-1] for tokens in self.tokens], device=self.target.device)

    def picker(self, logits: Tensor, rows: list[int], ahead: list[list[int]]) -> tuple[Tensor, Tensor]:
        """The target's picks for some rows, each after its tokens and those this pass emitted before; their scores."""
        scores = self._processed(logits, rows, ahead) if self.rules.processors else warp(logits, self.warpers)
        if self.recording:
            for row, raw, processed in zip(rows, logits, scores, strict=True):
                record = (raw.clone(), processed.clone()) if self.options.record else (raw, processed)
                self.records[self.alive[row]].append(record)
        if self.noise is None:
            return pick(scores, None), scores
        # All rows stand at one depth of their trees, so the first row's offset holds for every row.
        noise = self.noise.ahead([n + len(ahead[0]) + 1 for n in self.cache.lengths], 1)[:, 0]
        return pick(scores, noise if len(rows) == len(self.alive) else noise[rows]), scores

    def walk_noise(self, tree: DraftTree) -> WalkNoise | None:
        """What a pass over this tree needs to walk it; None where `accepted` picks node by node."""
        if not self.walks:
            return None
        if self.noise is None:
            return WalkNoise()
        values = self.noise.ahead([n + 1 for n in self.cache.lengths], self.target.engine.size(tree.levels + 1))
        return WalkNoise(values.contiguous(), self.temperature)

    def accepted(self, tree: DraftTree, out: Pass) -> tuple[list[list[int]], list[list[int]]]:
        """Each row's path and what it emits, after a pass."""
        if out.walked is not None:
            return read_walk(out.walked)
        assert out.logits is not None
        return verify(tree, out.logits, self.picker, self.options.relaxed)

    def _processed(self, logits: Tensor, rows: list[int], ahead: list[list[int]]) -> Tensor:
        """Rows that ended in this pass keep their logits: processors never see text that is not emitted."""
        eos = self.options.eos
        ended = [len(new) >= self.left[row] or not eos.isdisjoint(new) for row, new in zip(rows, ahead, strict=True)]
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).clone()
        if at := [i for i, done in enumerate(ended) if not done]:
            prefixes = [self.tokens[rows[i]] + ahead[i] for i in at]
            scores[at] = self.rules.scores(scores[at], [self.alive[rows[i]] for i in at], prefixes)
        return scores

    def prefill(self, session: Session | None, reads: tuple[int, ...]) -> None:
        """Cache every prompt but its last token, which becomes the root."""
        prompts = [tokens[:-1] for tokens in self.tokens]
        start, longest = 0, max(map(len, prompts))
        while start < longest:
            size, width = piece(self.target, longest - start)
            parts = [prompt[start : start + size] for prompt in prompts]
            start += size
            padded = torch.tensor([part + [0] * (width - len(part)) for part in parts], device=self.target.device)
            tree = chain(padded)  # what stands behind a row's own part is never kept
            out = self.target.forward(tree, self.cache, False, reads=reads)
            paths = [list(range(len(part))) for part in parts]
            self.cache.commit(paths)
            if session is not None:
                session.observe(Accepted(out.hidden, out.features, list(range(len(parts))), paths))

    def advance(self, emitted: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        """Add one pass's tokens, cut where the row ends; returns the cut lists and the rows that go on."""
        going = []
        for i, row in enumerate(emitted):
            cut = row[: self.left[i]]
            if (end := next((j for j, token in enumerate(cut) if token in self.options.eos), None)) is not None:
                cut = cut[: end + 1]
            if self.options.stops:
                lengths = range(1, len(cut) + 1)
                if stop := next((n for n in lengths if self.rules.stop(self.alive[i], self.tokens[i] + cut[:n])), None):
                    cut, end = cut[:stop], stop
            if self.recording and len(row) > len(cut):
                del self.records[self.alive[i]][len(cut) - len(row) :]
            self.tokens[i] += cut
            self.left[i] -= len(cut)
            emitted[i] = cut
            if end is None and self.left[i] > 0:
                going.append(i)
        return emitted, going

    def watched(
        self,
        before: tuple[list[int], list[int]],
        tree: DraftTree,
        paths: list[list[int]],
        emitted: list[list[int]],
        seconds: tuple[float, float, float],
    ) -> None:
        """Call `watch` with what a pass did. before: the rows that were in it, and what each had cached."""
        assert self.options.watch is not None
        records = [self.records[row][-len(cut) :] for row, cut in zip(before[0], emitted, strict=True)]
        self.options.watch(Seen(*before, tree, paths, emitted, records, seconds))
        if not self.options.record:
            for row in before[0]:
                self.records[row].clear()

    def select(self, going: list[int]) -> None:
        if len(going) == len(self.alive):
            return
        index = torch.tensor(going, dtype=torch.long, device=self.target.device)
        if going:
            self.cache.select(index)
            if self.noise is not None:
                self.noise.select(index)
        self.alive = [self.alive[i] for i in going]
        self.tokens = [self.tokens[i] for i in going]
        self.left = [self.left[i] for i in going]


def piece(target: Target, left: int) -> tuple[int, int]:
    """How many of `left` tokens the next pass over a prompt takes at most, and how many nodes it has. Compiled passes
    have one of few sizes; at most a third of their nodes are spare, but for the smallest size."""
    if target.engine.eager:
        return PREFILL, min(PREFILL, left)
    whole = next((chunk for chunk in CHUNKS if chunk >= left), CHUNKS[-1])
    if whole > 1.5 * left and whole > CHUNKS[0]:
        whole = max(chunk for chunk in CHUNKS if chunk <= left)
    return min(left, whole), whole


def clock(device: torch.device) -> float:
    torch.cuda.synchronize(device) if device.type == "cuda" else None
    return time.perf_counter()


@torch.inference_mode()
def autoregressive(
    target: Target, prompts: Sequence[Sequence[int]], options: Options, drafter: Drafts | None = None, nodes: int = 1
) -> Result:
    """Plain decoding, one token per pass: the oracle for `speculative` and the baseline of every speedup. Drafter and
    nodes are ignored; the signature is that of `speculative`."""
    check(target, prompts, options)
    stats = Stats()
    result: list[list[int]] = [[] for _ in prompts]
    t0, compiled = clock(target.device), target.compiled
    rows = _Rows(target, prompts, options)
    rows.prefill(None, ())
    root = chain(rows.roots()[:, None])
    t1 = clock(target.device)
    stats.seconds_prefill = t1 - t0
    while rows.alive:
        out = target.forward(root, rows.cache, noise=rows.walk_noise(root))
        t2 = clock(target.device)
        if out.walked is not None:
            _, emitted = read_walk(out.walked)
        else:
            assert out.logits is not None
            picked, _ = rows.picker(out.logits[:, 0], list(range(len(rows.alive))), [[]] * len(rows.alive))
            emitted = [[token] for token in picked.tolist()]
        before = rows.alive, rows.cache.lengths
        rows.cache.commit([[0]] * len(rows.alive))
        tokens, going = rows.advance(emitted)
        for row, cut in zip(rows.alive, tokens, strict=True):
            stats.count(0, len(cut))
            result[row] += cut
        tree = root
        if len(going) < len(rows.alive):
            rows.select(going)
            root = chain(rows.roots()[:, None])
        else:
            root = root.with_tokens(rows.roots()[:, None])
        t0, t1 = t1, clock(target.device)
        stats.calls += 1
        stats.nodes += 1
        stats.seconds_target += t2 - t0
        stats.seconds_other += t1 - t2
        if options.watch is not None:
            rows.watched(before, tree, [[0]] * len(tokens), tokens, (0.0, t2 - t0, t1 - t2))
            t1 = clock(target.device)
    stats.compiled = target.compiled - compiled
    return Result(result, [[False] * len(row) for row in result], stats, rows.records)


@torch.inference_mode()
def speculative(
    target: Target, prompts: Sequence[Sequence[int]], options: Options, drafter: Drafts, nodes: int = 16
) -> Result:
    """Draft a tree of at most `nodes` nodes, verify it in one pass, repeat: the tokens of `autoregressive` in fewer
    passes, whatever the drafter proposes."""
    result = Result([[] for _ in prompts], [[] for _ in prompts], Stats(), [[] for _ in prompts])
    for added in speculative_steps(target, prompts, options, drafter, nodes, result.stats, result.records):
        for row, tokens, drafted in added:
            result.token_ids[row] += tokens
            result.from_draft[row] += drafted
    return result


def _begin(drafter: Drafts, target: Target, rows: int) -> Session:
    """A session for one call. Raises ValueError for one that another call was begun with."""
    session = drafter.session(target, rows)
    if _begun.get(id(session)) is session:
        raise ValueError(
            f"{type(drafter).__name__}.session returned a session of an earlier call; it must make a new one each time"
        )
    with suppress(TypeError):  # of a class with slots: it can not be remembered
        _begun[id(session)] = session
    return session


def speculative_steps(
    target: Target,
    prompts: Sequence[Sequence[int]],
    options: Options,
    drafter: Drafts,
    nodes: int,
    stats: Stats,
    records: list[list[tuple[Tensor, Tensor]]] | None = None,
) -> Iterator[Added]:
    """`speculative`, one pass at a time; `stats` and, where asked for, `records` are filled on the way. Bad arguments
    are refused before the first step."""
    check(target, prompts, options)
    if not 1 <= integer("nodes", nodes) <= MAX_NODES:
        raise ValueError(f"nodes={nodes} must lie between 1 (the root alone) and {MAX_NODES}")
    return _steps(target, prompts, options, drafter, nodes, stats, records)


@torch.inference_mode()
def _steps(
    target: Target,
    prompts: Sequence[Sequence[int]],
    options: Options,
    drafter: Drafts,
    nodes: int,
    stats: Stats,
    records: list[list[tuple[Tensor, Tensor]]] | None,
) -> Iterator[Added]:
    t0, compiled = clock(target.device), target.compiled
    rows = _Rows(target, prompts, options)
    rows.records = rows.records if records is None else records
    session, reads, cache = _begin(drafter, target, len(prompts)), drafter.reads, rows.cache
    try:
        rows.prefill(session, reads)
        t1 = clock(target.device)
        stats.seconds_prefill += t1 - t0
        roots = rows.roots()
        while rows.alive:
            temperature = options.sampling.temperature
            tree = session.propose(
                Context(
                    roots, cache.lengths, rows.tokens, nodes, temperature, rows.noise, target, cache, notes=stats.notes
                )
            )
            assert torch.equal(tree.tokens[:, 0], roots), "a session's tree must stand on the row's last token"
            t2 = clock(target.device)
            noise, layers = rows.walk_noise(tree), (tree.start, target.n_layers)
            runner: Target = target if tree.through is None else tree.through
            out = runner.forward(tree, cache, True, layers, tree.hidden, reads, noise=noise)
            t3 = clock(target.device)
            paths, emitted = rows.accepted(tree, out)
            before = rows.alive, cache.lengths
            cache.commit(paths)
            tokens, going = rows.advance(emitted)
            added: Added = []
            for i, (row, cut) in enumerate(zip(rows.alive, tokens, strict=True)):
                drafted = min(len(paths[i]) - 1, len(cut))
                stats.count(drafted, len(cut))
                added.append((row, cut, [True] * drafted + [False] * (len(cut) - drafted)))
            rows.select(going)
            if going:
                session.observe(Accepted(out.hidden, out.features, going, [paths[i] for i in going], out.logits))
                roots = rows.roots()
            t0, t1 = t1, clock(target.device)
            stats.calls += 1
            stats.nodes += tree.tokens.shape[1]
            stats.seconds_draft += t2 - t0
            stats.seconds_target += t3 - t2
            stats.seconds_other += t1 - t3
            if options.watch is not None:
                rows.watched(before, tree, paths, tokens, (t2 - t0, t3 - t2, t1 - t3))
            yield added
            t1 = clock(target.device)
    finally:
        stats.compiled += target.compiled - compiled
        cache.close()
