"""Reduced draft vocabularies (FR-Spec, arXiv 2502.14856; EAGLE-3, arXiv 2503.01840): a drafter scores the most frequent
tokens of its training text alone. Whatever they leave out is emitted all the same, never drafted."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from selfspec.core.quantized import in_8_bits
from selfspec.core.target import Target
from selfspec.drafters.base import Batch, DrafterConfig, Trained, pack, whole
from selfspec.drafters.parts.losses import check_loss, counted_ahead, random_hosts
from selfspec.drafters.parts.views import Block
from selfspec.engine.engine import replaced_weights


def check_draft_vocab(draft_vocab: int | None, loss: str) -> None:
    """Raises ValueError for an unknown loss, a size below 1, and a loss that needs all tokens."""
    check_loss(loss)
    if draft_vocab is not None:
        whole("draft_vocab", draft_vocab, 1, 2**31 - 1)
        if loss in ("ce", "ce_tv"):  # of the text's tokens, which may not be among the drafted ones
            raise ValueError(f"drafter.loss={loss!r} needs the whole vocabulary; take 'kl' or drafter.draft_vocab=null")


class Reduced(Trained):
    """A drafter that may have a reduced vocabulary. vocabulary: int64, the only tokens it can draft (None: all);
    tokens: of the target; draft_head: lm_head's rows of the draft vocabulary, for decoding (None: not needed)."""

    vocabulary: Tensor | None
    draft_head: Tensor | None

    def __init__(self, target: Target, config: DrafterConfig, depth: int, draft_vocab: int | None) -> None:
        """Until `drafts_only` is called, the vocabulary is the first `draft_vocab` tokens. Raises ValueError where the
        target has no more than that."""
        super().__init__(config, depth)
        self.tokens = target.vocab_size
        if draft_vocab is not None:
            why = f": the target has {target.vocab_size} tokens, all of which are drafted with drafter.draft_vocab=null"
            whole("draft_vocab", draft_vocab, 1, target.vocab_size - 1, why)
        few = None if draft_vocab is None else torch.arange(draft_vocab, device=target.device)
        self.register_buffer("vocabulary", few)
        pack(self, draft_head=None)

    def drafts_only(self, ids: Tensor) -> None:
        """Before training: the draft vocabulary is `ids`, int64, as many as the config says."""
        assert self.vocabulary is not None
        self.vocabulary.copy_(ids)

    def check_vocabulary(self) -> None:
        """Raises ValueError for a map of the draft vocabulary that names a token twice or one that does not exist."""
        ids = self.vocabulary
        if ids is not None and (
            len(ids.unique()) < len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < self.tokens
        ):
            raise ValueError(
                f"the map of the draft vocabulary must name {len(ids)} different tokens between 0 and "
                f"{self.tokens - 1}; it names {len(ids.unique())}, from {int(ids.min())} to {int(ids.max())}"
            )

    def counts(self, batch: Batch) -> Tensor:
        """Those of `draft_loss` with as many depths: at random hosts, where the config says at how many."""
        anchors, n = getattr(self.config, "anchors", None), batch.tokens.shape[1] - 1 - self.depth
        hosts = None if anchors is None else random_hosts(batch, self.depth, anchors)
        masks = counted_ahead(batch, self.depth, self.vocabulary, hosts)
        return torch.stack([mask[:, :n].sum() for mask in masks])

    def rows_of(self, head: nn.Linear) -> Tensor | None:
        """lm_head's rows [V', H] of the draft vocabulary; None where there is none, or the head has only those rows."""
        if self.vocabulary is None or head.out_features != self.tokens:
            return None
        return head.weight[self.vocabulary]

    def train(self, mode: bool = True) -> Self:
        """Leaving training mode makes the weights ready for decoding, in the target's dtype. Raises ValueError as
        `check_vocabulary`."""
        super().train(mode)
        self.check_vocabulary()
        with torch.no_grad():
            self.prepare(mode)
        replaced_weights(self)
        return self

    def prepare(self, mode: bool) -> None:
        """Lay out weights for decoding, or drop that in training mode: `draft_head`, in the head's dtype."""
        head: nn.Linear | None = None if mode else getattr(self, "head", None)  # of those that read logits of lm_head
        rows = None if head is None else self.rows_of(head)
        if rows is not None:
            in_8_bits([rows := rows.detach()])
        pack(self, draft_head=rows)

    def of_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits of the tokens it can draft, from logits of all or of these."""
        return logits if self.vocabulary is None or logits.shape[-1] < self.tokens else logits[..., self.vocabulary]

    def of_all(self, logits: Tensor) -> Tensor:
        """Logits of all tokens, from logits of all or of those it can draft; others can not be chosen."""
        if self.vocabulary is None:
            return logits
        none = logits.new_full((*logits.shape[:-1], self.tokens), -torch.inf)
        return none.index_copy(logits.ndim - 1, self.vocabulary, self.of_vocabulary(logits))


@torch.no_grad()
def check_head(block: Block, head: nn.Linear, draft_vocab: int | None) -> None:
    """Raises ValueError where there is a draft vocabulary, and the model does more than one product with the hidden
    states that its lm_head reads."""
    if draft_vocab is None:
        return
    hidden = torch.randn(1, 2, head.in_features).to(head.weight)
    plain = torch.zeros(1, 2, dtype=torch.long, device=hidden.device)
    dtype = head.weight.dtype
    with torch.autocast(hidden.device.type, dtype, enabled=dtype.itemsize < 4):  # the norm may be in float32
        out = block.text(hidden, plain, block=False)
        product = head(out.hidden) if head.bias is None else head(out.hidden) - head.bias
    assert out.logits is not None
    if not torch.allclose(out.logits.float(), product.float(), rtol=0.02, atol=0.02):
        raise ValueError(
            f"drafter.draft_vocab={draft_vocab}: the target scales, caps or shifts its logits, which a "
            "reduced draft vocabulary does not; take drafter.draft_vocab=null"
        )
