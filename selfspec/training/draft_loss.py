"""A drafter's loss on what the frozen target says of a batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from selfspec.core.pass_cache import TextCache
from selfspec.core.target import Target
from selfspec.drafters.base import Batch, Few, Sample, Trained, no_reduce
from selfspec.drafters.parts.vocabulary import Reduced
from selfspec.drafters.registry import CODE_ERRORS, failed
from selfspec.training.hidden import HiddenStates
from selfspec.training.loop_config import LoopConfig
from selfspec.training.states import States, behind_layers, drafted_behind
from selfspec.training.step import autocast


class DraftLoss(nn.Module):
    """The drafter's loss on what the frozen target says of a batch: tokens int64 [B, S], mask bool [B, S], where rows
    are packed documents int64 [B, S] and rows int64 [B] (see `Batch`). Only the drafter is a submodule."""

    def __init__(
        self,
        drafter: Trained,
        target: Target,
        average: Callable[[Tensor], Tensor] = no_reduce,
        hidden: HiddenStates | None = None,
        states: States | None = None,
    ) -> None:
        """average: the mean of a tensor over all processes, each of which has a part of the batch in training; hidden:
        what the target said of rows that are read again; states: hidden states from elsewhere, where the target has no
        layers here."""
        super().__init__()
        self.drafter, self.average, self.hidden, self.elsewhere = drafter, average, hidden, states
        self.target = target  # not a module

    def forward(self, batch: dict[str, Tensor], counts: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """counts: [K], see `counts`, of the whole step. The losses of its parts then add up to the step's loss."""
        average = self.average if self.training else no_reduce
        return self.drafter.loss(self._seen(batch, average if counts is None else shares(counts)))

    @torch.no_grad()
    def counts(self, batch: dict[str, Tensor]) -> Tensor:
        """How many positions each mean of the loss is over, float [K]."""
        drafter, cheap = self.drafter, type(self.drafter).counts is not Trained.counts
        if cheap and isinstance(drafter, Reduced) and drafter.vocabulary is None:  # no logits are asked for
            nothing = torch.empty(0)
            documents, epochs = batch.get("documents"), batch.get("epochs")
            seen = Batch(batch["tokens"], batch["mask"], nothing, nothing, {}, None, documents, epochs=epochs)
        else:
            seen = self._seen(batch, no_reduce)
        return drafter.counts(seen).float()

    def _seen(self, batch: dict[str, Tensor], average: Callable[[Tensor], Tensor]) -> Batch:
        documents, epochs, cache = batch.get("documents"), batch.get("epochs"), None
        ids = self.drafter.vocabulary if isinstance(self.drafter, Reduced) else None
        few: Few | None = None
        share = bool(getattr(self.drafter, "confidence", None))
        with torch.no_grad():
            if self.hidden is not None and "rows" in batch:
                if ids is None:
                    out = self.hidden.states(batch)
                else:
                    few, hidden, features = self.hidden.drafted(batch, ids, share)
            elif self.elsewhere is not None:
                features = self.elsewhere.features(batch)
                if ids is None:
                    out = behind_layers(self.target, batch["tokens"], features)
                else:
                    few, hidden = drafted_behind(self.target, batch["tokens"], features, ids, share)
            else:
                cache = TextCache(self.target.n_layers, kept=True)
                out = self.target.text(batch["tokens"], reads=self.drafter.reads, cache=cache, documents=documents)
        if few is not None:
            return Batch(batch["tokens"], batch["mask"], hidden, few, features, None, documents, average, epochs)
        assert out.logits is not None
        seen = batch["tokens"], batch["mask"], out.hidden, out.logits, out.features, cache
        return Batch(*seen, documents, average, epochs)


class _Random(States):
    """States of no text, to try a loss on."""

    def of(self, tokens: Tensor) -> Tensor:
        return torch.randn(len(tokens), len(self.layers), self.target.hidden_size)


def needs_layers(kind: str) -> ValueError:
    return ValueError(
        f"drafter={kind} runs layers of the target, which train.states leaves where they are; train drafter=eagle3, "
        "medusa, sequential, mtp or block"
    )


def try_states(target: Target, drafter: Trained, loop: LoopConfig) -> None:
    """Raises ValueError for a drafter that needs more of a target than hidden states, embeddings, norm and lm_head."""
    size = 4 * (drafter.depth + 4)
    tokens = torch.arange(size, device=target.device)[None] % target.vocab_size
    batch = {"tokens": tokens, "mask": torch.ones_like(tokens, dtype=torch.bool), "documents": torch.zeros_like(tokens)}
    if any(p.is_meta for p in drafter.parameters()):
        raise needs_layers(drafter.kind)
    try:
        with torch.no_grad(), autocast(target.device, loop):
            DraftLoss(drafter, target, states=_Random(target, drafter.reads, None))(batch)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AttributeError) as error:  # of weights, or of keys and values, that are not here
        if not target.partial:
            raise
        raise needs_layers(drafter.kind) from error


def try_training(drafter: Trained, target: Target, loop: LoopConfig) -> None:
    """Loss and scores of a drafter of another package on short texts of random tokens. Raises ValueError naming what of
    the contract they break, before long work starts."""
    name, most = type(drafter).__qualname__, target.max_positions or 2**31
    size = min(4 * (drafter.depth + 4), most)
    tokens = torch.randint(target.vocab_size, (2, size), generator=torch.Generator().manual_seed(0)).to(target.device)
    batch = {"tokens": tokens, "mask": torch.ones_like(tokens, dtype=torch.bool), "documents": torch.zeros_like(tokens)}
    was, buffers = drafter.training, {key: part.clone() for key, part in drafter.named_buffers()}
    devices = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices):  # what is drawn later stays what it was
        try:
            with autocast(target.device, loop):
                loss = DraftLoss(drafter, target)(batch)
        except CODE_ERRORS as error:
            raise failed(drafter, "loss", error) from error
        pair = isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[0], Tensor) and isinstance(loss[1], dict)
        if not pair or loss[0].dim() or not loss[0].requires_grad:
            raise ValueError(
                f"drafter {name}: loss has to return what `decayed` gives, a scalar with a gradient and a dict of "
                f"figures, not {_described(loss)}"
            )
        at = torch.arange(2, 6)
        try:
            with torch.no_grad():
                out = target.text(tokens[:1], False, reads=drafter.reads)
                features = {layer: part[0] for layer, part in out.features.items()}
                sample = Sample(tokens[0].cpu(), 2, out.hidden[0], features, 0.0, None)
                scores = drafter.eval().scores(sample, at)
        except CODE_ERRORS as error:
            raise failed(drafter, "scores", error) from error
    drafter.train(was)
    for key, part in drafter.named_buffers():
        if key in buffers:
            part.copy_(buffers[key])
    wanted = [drafter.depth, len(at), target.vocab_size]
    if not isinstance(scores, Tensor) or list(scores.shape) != wanted:
        raise ValueError(
            f"drafter {name}: scores has to return logits {wanted} [depth, n, V], not {_described(scores)}"
        )


def _described(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_described, value))})"
    if not isinstance(value, Tensor):
        return f"{value!r:.60}"
    return f"a tensor {list(value.shape)}{'' if value.requires_grad else ' without a gradient'}"


def shares(counts: Tensor) -> Callable[[Tensor], Tensor]:
    """Hands out `counts`, [K], in place of a part's own, in the order in which they are asked for."""
    each = iter(counts)
    return lambda own: torch.stack([next(each, own[i]) for i in range(len(own))])
