"""The rows that are being generated: their tokens, noise and cache, and who is finished."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from selfspec.core.contract import Accepted, Session
from selfspec.core.lossy import Lossy
from selfspec.core.options import Options, Seen
from selfspec.core.passes import Pass
from selfspec.core.processors import PrefixRules
from selfspec.core.sampling import Noise, Sampling, limiting, pick, warp
from selfspec.core.target import Target
from selfspec.core.tree import DraftTree, chain
from selfspec.core.verify import Kept, WalkNoise, read_walk, verify

_LAZY = {"cpu"}  # devices where sorting the scores of all nodes costs more than reading which ones a walk visits
PREFILL, MAX_NODES = 1024, 1024  # prompt tokens per pass; largest draft tree


class Rows:
    """The rows still being generated, shared by both loops: tokens, noise, cache, and who is finished."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        options: Options,
        records: list[list[tuple[Tensor, Tensor]]],
        stopped: list[bool],
    ) -> None:
        """records, stopped: filled on the way, see `Result`."""
        if isinstance(options.seed, int):
            seeds, ids = [options.seed] * len(prompts), list(range(len(prompts)))
        else:
            seeds, ids = list(options.seed), [0] * len(prompts)
        self.target, self.options = target, options
        self.alive = list(range(len(prompts)))
        self.tokens = [list(prompt) for prompt in prompts]
        limit = target.max_positions or 2**62
        self.left = [min(options.max_new_tokens, limit - len(prompt)) for prompt in prompts]
        longest = max(len(p) + n for p, n in zip(prompts, self.left, strict=True)) + (target.width or 0)
        self.cache = target.cache(len(prompts), min(longest, max(map(len, prompts)) + 256) + 64, longest)
        self.warpers = options.sampling.warpers() if options.processors is None else options.processors
        self.rules = PrefixRules(self.warpers, options.stops, options.pads or [()] * len(prompts), target.device)
        # Passes walk their trees if nothing else warps than `Sampling` does and no logits are recorded.
        self.recording = options.record or options.watch is not None
        unseen = not (options.relaxed or self.recording or self.rules.processors)
        sampling = Sampling.of(self.warpers)
        self.limits = (None, None, None) if sampling is None else sampling.limits
        lazy = target.device.type in _LAZY and sampling is not None and len(limiting(*self.limits)) > 0
        self.walks = unseen and sampling is not None and not lazy
        self.records, self.stopped = records, stopped
        temperature = 1.0 if sampling is None else sampling.temperature
        self.temperature = torch.tensor(temperature, dtype=torch.float64, device=target.device)
        self.noise: Noise | None = None
        self.altered: list[list[bool]] = []  # of the last walk: which tokens a relaxed rule put in a pick's place
        if options.sampling.temperature > 0:
            self.noise = Noise(seeds, ids, target.vocab_size, target.device, target.engine)

    def roots(self) -> Tensor:
        """int64 [B]: the last token of each row, before the first pass."""
        return torch.tensor([tokens[-1] for tokens in self.tokens], device=self.target.device)

    @property
    def positions(self) -> Tensor:
        """int64 [B]: of the tokens behind the roots."""
        return self.cache.row_lengths()[: len(self.alive)] + 1

    def picker(self, logits: Tensor, rows: list[int], ahead: list[list[int]]) -> tuple[Tensor, Tensor]:
        """The target's picks for some rows, each after its tokens and those this pass emitted before; their scores."""
        logits = logits.to(self.target.device)  # where processors have their tensors; of a target on several GPUs
        if self.rules.processors:
            raw = logits.to(torch.promote_types(logits.dtype, torch.float32))
            prefixes = [self.tokens[row] + new for row, new in zip(rows, ahead, strict=True)]
            scores = self.rules.scores(raw, [self.alive[row] for row in rows], prefixes)
        else:
            scores = warp(logits, self.warpers)
        if self.recording:
            for row, raw, processed in zip(rows, logits, scores, strict=True):
                record = (raw.clone(), processed.clone()) if self.options.record else (raw, processed)
                self.records[self.alive[row]].append(record)
        if self.noise is None:
            return pick(scores, None), scores
        # All rows stand at one depth of their trees, so the first row's offset holds for every row.
        offset = len(ahead[0])
        noise = self.noise.ahead([n + offset + 1 for n in self.cache.lengths], 1, self.positions + offset)[:, 0]
        return pick(scores, noise if len(rows) == len(self.alive) else noise[rows]), scores

    def walk_noise(self, tree: DraftTree) -> WalkNoise | None:
        """What a pass over this tree needs to walk it; None where `accepted` picks node by node."""
        if not self.walks:
            return None
        if self.noise is None:
            return WalkNoise()
        depths = self.target.engine.size(tree.levels + 1)
        values = self.noise.ahead([n + 1 for n in self.cache.lengths], depths, self.positions)
        if self.target.width is not None and not self.target.engine.eager:  # one compiled function for all trees
            values = nn.functional.pad(values, (0, 0, 0, max(0, self.target.width - depths)))
        return WalkNoise(values.contiguous(), self.temperature, self.limits)

    def accepted(self, tree: DraftTree, out: Pass) -> tuple[list[list[int]], list[list[int]], Kept]:
        """Each row's path and what it emits, after a pass, and the same on the device."""
        if out.walked is not None:
            return *read_walk(out.walked), Kept(out.walked)
        assert out.logits is not None
        paths, emitted, self.altered = verify(tree, out.logits, self.picker, self.options.relaxed, self._ended)
        return paths, emitted, Kept.of(paths, emitted, self.target.device)

    def _ended(self, row: int, emitted: list[int]) -> bool:
        """Whether a row ends with these tokens of a pass, whatever criteria of the user's say."""
        return len(emitted) >= self.left[row] or not self.options.eos.isdisjoint(emitted)

    def prefill(self, session: Session | None, reads: tuple[int, ...]) -> None:
        """Cache every prompt but its last token, which becomes the root."""
        prompts = [tokens[:-1] for tokens in self.tokens]
        start, longest = 0, max(map(len, prompts))
        while start < longest:
            width = min(PREFILL, longest - start)
            parts = [prompt[start : start + width] for prompt in prompts]
            start += width
            padded = torch.tensor([part + [0] * (width - len(part)) for part in parts], device=self.target.device)
            tree = chain(padded)  # what stands behind a row's own part is never kept
            out = self.target.forward(tree, self.cache, False, reads=reads, prompt=True)
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
            if isinstance(self.options.relaxed, Lossy):  # what is not emitted is not altered
                self.options.relaxed.altered -= sum(self.altered[i][len(cut) :])
            if self.recording and len(row) > len(cut):
                del self.records[self.alive[i]][len(cut) - len(row) :]
            self.tokens[i] += cut
            self.left[i] -= len(cut)
            emitted[i] = cut
            self.stopped[self.alive[i]] = end is not None
            if end is None and self.left[i] > 0:
                going.append(i)
        return emitted, moved_up(going)

    def watched(
        self,
        before: tuple[list[int], list[int]],
        tree: DraftTree,
        paths: list[list[int]],
        emitted: list[list[int]],
        seconds: Sequence[float],
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
        if going:
            self.cache.select(going)
            if self.noise is not None:
                self.noise.select(going)
        self.alive = [self.alive[i] for i in going]
        self.tokens = [self.tokens[i] for i in going]
        self.left = [self.left[i] for i in going]


def moved_up(going: list[int]) -> list[int]:
    """The rows that stay, in their new order. going: these rows, ascending. Only the last ones move: they take the
    places of rows that ended."""
    count = len(going)
    last = iter([row for row in going if row >= count])
    staying = set(going)
    return [row if row in staying else next(last) for row in range(count)]
