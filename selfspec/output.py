"""What a call of generate gives: tokens, text, and where each token came from."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase as Tokenizer

from selfspec.budget.policy import Forecast
from selfspec.core.lossy import Lossy
from selfspec.core.stats import Stats
from selfspec.detokenize import Detokenizer
from selfspec.trace import Trace

_DRAFTED = "background:#cfe8d5;color:#10331c"  # dark green on pale green: told apart by lightness, too


@dataclass(repr=False)
class Generated:
    """token_ids: the new tokens of each row; texts: the same, decoded (empty strings without a tokenizer);
    from_draft: for each token whether the draft tree held it; stats: see `selfspec.core.stats.Stats`; seed: what the
    noise was made from; lossy: the rule that changed the output, where one was asked for by name, and how many tokens
    it altered; forecast: with nodes="auto", how many nodes were chosen and what was expected of them; trace: what every
    pass did, where it was asked for; finish_reasons: of each row, "stop" (an EOS token or a text of `stop`) or "length"
    (max_new_tokens, or the target's last position)."""

    token_ids: list[list[int]]
    texts: list[str]
    from_draft: list[list[bool]]
    stats: Stats
    seed: int | Sequence[int] = 0
    lossy: Lossy | None = None
    forecast: Forecast | None = None
    trace: Trace | None = None
    tokenizer: Tokenizer | None = field(default=None, compare=False)
    finish_reasons: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text of the only row. Raises ValueError where there are several."""
        if len(self.texts) != 1:
            raise ValueError(f"there are {len(self.texts)} rows; take texts")
        return self.texts[0]

    def __len__(self) -> int:
        return len(self.token_ids)

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, row: int) -> str:
        """The text of a row."""
        return self.texts[row]

    def __repr__(self) -> str:
        lossy = "" if self.lossy is None else f", {self.lossy.altered} tokens altered by {self.lossy.rule}"
        rows = "1 row" if len(self.texts) == 1 else f"{len(self.texts)} rows"
        return f"Generated({rows}, {self.stats!r}{lossy})"

    def pieces(self, row: int = 0) -> list[tuple[str, bool]]:
        """A row's text token by token, each with whether the draft tree held it; tokens that only together make a
        character are one piece. Raises ValueError without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError("the target has no tokenizer to make text; read token_ids and from_draft")
        text, pieces = Detokenizer(self.tokenizer), list[tuple[str, bool]]()
        for token, drafted in zip(self.token_ids[row], self.from_draft[row], strict=True):
            pieces.append((text.add([token]), drafted))
        if pieces:
            pieces[-1] = pieces[-1][0] + text.rest(), pieces[-1][1]
        return [piece for piece in pieces if piece[0]]

    def _repr_html_(self) -> str:
        """For notebooks: the texts, with what the draft tree held on green."""
        lines = [f"<p><small>{html.escape(repr(self))}; on green: drafted</small></p>"]
        for row in range(len(self.texts) if self.tokenizer is not None else 0):
            marked = (
                f'<span style="{_DRAFTED}">{html.escape(text)}</span>' if drafted else html.escape(text)
                for text, drafted in self.pieces(row)
            )
            lines.append(f'<pre style="white-space:pre-wrap">{"".join(marked)}</pre>')
        return "".join(lines)
