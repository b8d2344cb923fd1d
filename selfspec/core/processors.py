"""transformers' logits processors and stopping criteria on rows that have lengths of their own.

Both are written for a batch of one length whose row i is prompt i, but rows of one pass have prefixes of different
lengths. Those of equal length are scored in one full-size batch; the other rows of it hold a copy, and their scores are
dropped. Neither may keep a state from call to call or compare rows; criteria get no scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor, PrefixConstrainedLogitsProcessor, StoppingCriteria

# transformers' processors that never read the prefix
_WARPERS = ("Epsilon", "Eta", "MinP", "Temperature", "TopK", "TopP", "Typical")
_BLIND = {f"{name}LogitsWarper" for name in _WARPERS}
_BLIND |= {"InfNanRemoveLogitsProcessor", "LogitNormalization", "SuppressTokensLogitsProcessor"}


def _blind(processor: LogitsProcessor) -> bool:
    kind = type(processor)
    return kind.__name__ in _BLIND and kind.__module__.partition(".")[0] == "transformers"


class PrefixRules:
    """processors: those of the list, all of them in order, where any reads the prefix; else empty."""

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        stops: Sequence[StoppingCriteria],
        pads: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        self.processors = () if all(map(_blind, processors)) else tuple(processors)
        self.stops, self.pads, self.device = stops, [list(p) for p in pads], device

    def scores(self, logits: Tensor, rows: list[int], prefixes: list[list[int]]) -> Tensor:
        """Processed scores [A, V] of logits [A, V], float32 or better, behind the prefixes of A rows (indices among
        the prompts). Raises ValueError for a processor that changes the shape."""
        result = torch.empty_like(logits)
        full = [self.pads[row] + prefix for row, prefix in zip(rows, prefixes, strict=True)]
        for length in {len(prefix) for prefix in full}:
            group = [i for i, prefix in enumerate(full) if len(prefix) == length]
            ids = torch.tensor([full[group[0]]], device=self.device).repeat(len(self.pads), 1)
            scores = logits[group[:1]].repeat(len(self.pads), 1)
            at = [rows[i] for i in group]
            ids[at] = torch.tensor([full[i] for i in group], device=self.device)
            scores[at] = logits[group]
            for processor in self.processors:
                before = scores.shape
                if isinstance(processor, PrefixConstrainedLogitsProcessor):
                    self._constrain(processor, scores, ids, at)
                    continue
                scores = processor(ids, scores)
                if not isinstance(scores, Tensor) or scores.shape != before:
                    got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                    raise ValueError(
                        f"logits processor {type(processor).__name__} returned {got}; it must return scores of the "
                        f"shape it was given, {list(before)}"
                    )
            result[group] = scores[at].to(result.dtype)
        return result

    def _constrain(
        self, processor: PrefixConstrainedLogitsProcessor, scores: Tensor, ids: Tensor, rows: list[int]
    ) -> None:
        """The user's function meets these rows alone: it may know no answer for a row with another row's text."""
        for row in rows:
            allowed = processor._prefix_allowed_tokens_fn(row // processor._num_beams, ids[row])  # samples of a prompt
            if not len(allowed):
                raise ValueError(f"prefix_allowed_tokens_fn allows no token for row {row}; allow at least one")
            mask = torch.ones_like(scores[row], dtype=torch.bool)
            mask[torch.as_tensor(allowed, device=mask.device)] = False
            left = scores[row].masked_fill(mask, -torch.inf)
            none = bool(left.amax().isneginf())  # of what others leave: the constraint holds, as in transformers
            scores[row] = torch.zeros_like(left).masked_fill(mask, -torch.inf) if none else left

    def stop(self, row: int, prefix: list[int]) -> bool:
        """Whether a criterion ends this row with the prefix's last token. Raises ValueError for no such answer."""
        ids = torch.tensor([self.pads[row] + prefix], device=self.device).repeat(len(self.pads), 1)
        for criterion in self.stops:
            answer = criterion(ids, None)
            known = isinstance(answer, (bool, Tensor)) or type(answer).__module__ == "numpy"
            done = torch.as_tensor(answer) if known else None
            if done is None or done.dtype != torch.bool or done.shape not in ((), (1,), (len(self.pads),)):
                got = type(answer).__name__ if done is None else f"{done.dtype} of shape {list(done.shape)}"
                raise ValueError(
                    f"stopping criterion {type(criterion).__name__} returned {got}; it must return one bool per row, "
                    f"a tensor of shape [{len(self.pads)}]"
                )
            if bool(done.expand(len(self.pads))[row]):
                return True
        return False
